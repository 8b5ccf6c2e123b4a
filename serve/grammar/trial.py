"""Compiles grammars in a process that can be killed, to learn whether that ends in time and in how much memory.

xgrammar cannot be interrupted, and what it has compiled cannot be sent to another process in bounded space. So a
grammar is first compiled there (serve/grammar/trial_process.py), and then once more where it is used.
"""

import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from slipstream.serve.request import Grammar

PROCESS = "slipstream.serve.grammar.trial_process"
START_SECONDS = 120.0  # until the process has loaded the library
CRASHED = "needs too much memory to compile, or makes the compiler fail; simplify it"


class Trial:
    """`vocabulary`: xgrammar's TokenizerInfo as JSON. `seconds`: that a grammar may take."""

    def __init__(self, vocabulary: str, seconds: float) -> None:
        self._vocabulary, self._seconds = vocabulary, seconds
        self._lock = threading.Lock()  # one grammar at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._is_closed = False

    def check(self, grammar: Grammar) -> None:
        """Raises ValueError, in a sentence, for a grammar that cannot be compiled within the limits."""
        with self._lock:
            try:
                connection = self._connection or self._start()
                connection.send(grammar)
                if not connection.poll(self._seconds):
                    self._end()
                    limit = f"takes longer than {self._seconds:g} s to compile (grammar_timeout)"
                    raise ValueError(f"{grammar.kind} {limit}; simplify it")
                error = connection.recv()
            except (EOFError, OSError) as ended:
                self._end()
                raise ValueError(f"{grammar.kind} {CRASHED}") from ended
        if error:
            raise ValueError(error)

    def close(self) -> None:
        """Ends the process, also while it compiles."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def _start(self) -> Connection:
        if self._is_closed:
            raise EOFError
        self._connection, theirs = Pipe()
        with theirs:
            fd = theirs.fileno()
            argv = [sys.executable, "-m", PROCESS, str(fd)]
            self._process = subprocess.Popen(argv, pass_fds=(fd,), stdin=subprocess.DEVNULL)
        self._connection.send((self._vocabulary, self._seconds))
        if not self._connection.poll(START_SECONDS):
            raise EOFError
        self._connection.recv()
        return self._connection

    def _end(self) -> None:
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None
