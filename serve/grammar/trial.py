"""Translates and compiles a grammar in a process that can be killed, to learn whether that ends within limits.

xgrammar cannot be interrupted, and what it has compiled cannot be sent to another process in bounded space. So a server
tries a grammar in a process of serve/grammar/trial_process.py, and gives its translation to the engine, which compiles
it again. Python reads a client's schema there alone, and holds up no other client.
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from slipstream import runtime
from slipstream.serve.grammar.grammars import JSON_WHITESPACE
from slipstream.serve.grammar.trial_process import COMPILED, FORK, NUMBER, REFUSED, SLOW, TooSlow
from slipstream.serve.request import Grammar

MODULE = "slipstream.serve.grammar.trial_process"
WALL_FACTOR = 10  # a trial on a busy machine may last so many times its CPU time


class TooLong(Exception):
    """A trial has used up its CPU time."""


class Crashed(Exception):
    """A trial has ended without an answer."""


class Unavailable(Exception):
    """No grammar can be tried now."""


class TrialProcess:
    """The process that is forked for each trial. `load_tokenizer` is pickled; `json_whitespace` as `translate` has it.
    All methods belong to one event loop."""

    def __init__(self, load_tokenizer: Callable[[], Any], json_whitespace: int = JSON_WHITESPACE) -> None:
        self._load_tokenizer = pickle.dumps(load_tokenizer)
        self._json_whitespace = json_whitespace
        self._lock = asyncio.Lock()  # one message and its answer at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Returns at once. A first trial waits until the process has loaded its modules and the vocabulary."""
        if self._socket is not None:
            return
        self._socket, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with peer:
            argv = [sys.executable, "-m", MODULE, str(peer.fileno())]
            with runtime.blocked_signals():
                self._process = subprocess.Popen(argv, pass_fds=(peer.fileno(),), stdin=subprocess.DEVNULL)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, runtime.NICENESS)
        self._socket.setblocking(False)
        self._socket.send(self._load_tokenizer)

    def close(self) -> None:
        """Ends the process. Trials end with their answers, or their CPU time."""
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
        self._process = self._socket = None

    async def attempt(self, grammar: Grammar, seconds: float, abandoned: asyncio.Event) -> Grammar:
        """Returns the translation of a grammar that compiles, or the grammar itself once it is `abandoned`. Raises
        ValueError with the refusal, TooSlow if another machine may not refuse it; TooLong after `seconds` of CPU time;
        Crashed; Unavailable."""
        connection, peer = socket.socketpair()
        with peer:
            pid = await self._fork(peer)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            writer.write(pickle.dumps((grammar, seconds, self._json_whitespace)))
            answer = await self._answer(reader, seconds, abandoned)
        finally:
            writer.close()
            status = await self._end(pid)
        if abandoned.is_set():
            return grammar
        if answer is None:
            raise Unavailable(f"the grammar did not get {seconds:g} s of CPU time within {WALL_FACTOR * seconds:g} s")
        if answer[:1] == COMPILED:
            return Grammar("ast", answer[1:].decode())
        if answer[:1] == REFUSED:
            raise ValueError(answer[1:].decode())
        if answer[:1] == SLOW:
            raise TooSlow(answer[1:].decode())
        raise TooLong if status == -signal.SIGPROF else Crashed

    async def _answer(self, reader: asyncio.StreamReader, seconds: float, abandoned: asyncio.Event) -> bytes | None:
        """Returns a trial's answer, empty if the trial was killed; None if the trial still runs."""
        reading = asyncio.create_task(reader.read())
        waiting = asyncio.create_task(abandoned.wait())
        await asyncio.wait((reading, waiting), timeout=WALL_FACTOR * seconds, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not reading.done():
            reading.cancel()
            return None
        return b"" if reading.exception() is not None else reading.result()

    async def _fork(self, connection: socket.socket) -> int:
        for _ in range(2):  # the process may have been killed since the last trial
            self.start()
            try:
                return await self._ask(FORK, connection.fileno())
            except EOFError:
                self.close()
        raise Unavailable("the process that tries grammars does not start")

    async def _end(self, pid: int) -> int:
        try:
            return await self._ask(NUMBER.pack(pid))
        except EOFError:
            self.close()
            raise Unavailable("the process that tries grammars was killed") from None

    async def _ask(self, message: bytes, *descriptors: int) -> int:
        """Sends a message and returns the answer. Raises EOFError if the process has ended."""
        async with self._lock:
            try:
                if self._socket is None:
                    raise EOFError
                socket.send_fds(self._socket, [message], descriptors)
                answer = await asyncio.get_running_loop().sock_recv(self._socket, NUMBER.size)
            except OSError:
                raise EOFError from None
        if not answer:
            raise EOFError
        return int(*NUMBER.unpack(answer))
