"""Processes that try grammars, forked from one that has loaded the library, which takes two seconds."""

import multiprocessing
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from typing import Any

from slipstream.serve.grammar import trial_process

LIBRARIES = ("xgrammar", "transformers.models.auto.tokenization_auto")


class ForkedTrials:
    """Takes the place of the module `subprocess` in serve/grammar/trial.py."""

    DEVNULL = subprocess.DEVNULL

    class Popen(ForkServerProcess):
        def __init__(self, argv: Sequence[str], pass_fds: Sequence[int], **_: Any) -> None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([*LIBRARIES, trial_process.__name__])
            connection = socket.socket(fileno=pass_fds[0])
            super().__init__(target=run, args=(connection,), daemon=True)
            self.start()
            connection.detach()  # its owner closes it

        def wait(self) -> None:
            self.join()


def run(connection: socket.socket) -> None:
    sys.argv = [trial_process.__name__, str(connection.detach())]
    trial_process.main()
