"""Processes of servers, forked from one that has loaded their libraries, which takes seconds."""

import multiprocessing
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from slipstream.serve.grammar import trial_process

PRELOADED = (
    trial_process.__name__,
    "xgrammar",
    "transformers.models.auto.tokenization_auto",
    "slipstream.serve.engine.build",
    "slipstream.tests.serve.fake_engine",
)


def get_context(_: str) -> ForkServerContext:
    """Takes the place of that of the module `multiprocessing` in serve/http/engine_client.py."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class ForkedTrials:
    """Takes the place of the module `subprocess` in serve/grammar/trial.py."""

    DEVNULL = subprocess.DEVNULL

    class Popen(ForkServerProcess):
        def __init__(self, argv: Sequence[str], pass_fds: Sequence[int], **_: Any):
            get_context("")
            connection = socket.socket(fileno=pass_fds[0])
            super().__init__(target=run, args=(connection,), daemon=True)
            self.start()
            connection.detach()  # its owner closes it

        def wait(self):
            self.join()


def run(connection: socket.socket):
    sys.argv = [trial_process.__name__, str(connection.detach())]
    trial_process.main()
