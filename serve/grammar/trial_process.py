"""The process of serve/grammar/trial.py: compiles the grammars that come over a connection, within limits.

python -m slipstream.serve.grammar.trial_process FD      # of the connection; ends when that is closed
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import resource
import signal
import sys
from multiprocessing.connection import Connection

from slipstream.serve.grammar.grammars import NUM_CORES, compile_with, make_compiler

MOST_BYTES = 4 * 2**30  # of the process's data


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends it
    with Connection(int(sys.argv[1])) as connection:
        vocabulary, seconds = connection.recv()
        compiler = make_compiler(vocabulary)
        limit(resource.RLIMIT_DATA, MOST_BYTES)
        connection.send("")
        while True:
            try:
                grammar = connection.recv()
            except EOFError:
                return
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit(
                resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds * NUM_CORES) + 2
            )  # if nobody is left to kill it
            try:
                compile_with(compiler, grammar)
                connection.send("")
            except ValueError as error:
                connection.send(str(error))


def limit(what: int, most: int) -> None:
    """Lowers a limit of this process, as far as it may be changed."""
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
