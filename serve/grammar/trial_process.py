"""Processes that compile grammars within limits, for serve/grammar/trial.py.

python -m slipstream.serve.grammar.trial_process FD      # of a socket that keeps messages apart; ends when it is closed

This process loads the library and a vocabulary, which takes seconds, and is then forked for each trial, which takes
milliseconds, so nobody waits where a trial has to be killed. It starts no thread, since those do not survive a fork.
Messages in: first a pickle of what loads the tokenizer; then FORK with the socket of a trial, answered by the trial's
process id; or such an id, whose process is ended, answered by its exit status.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import math
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any

import numpy as np

from slipstream.serve.grammar.grammars import compile_with, make_compiler, read_vocabulary, translate

NUMBER = struct.Struct("!i")
FORK = b"fork"
# how a trial's answer begins, before the grammar's translation or a sentence
COMPILED = b"+"
REFUSED = b"-"
SLOW = b"~"
MOST_MESSAGE = 64 * 2**10
MOST_BYTES = 4 * 2**30  # of a trial's data
WALK_TOKENS = 32
WALK_SECONDS = 0.25  # CPU time after which a walk is long enough
# CPU time for a token and the mask after it. Common grammars take .5 ms, some 35 (strings with a large maxLength, words
# separated by blanks), with 150,000 tokens on a slow core.
MOST_TOKEN_SECONDS = 0.1
MOST_FILLS = 3  # of one mask, the fastest of which counts: a busy machine may slow one down


class TooSlow(ValueError):
    """A token takes too long on this machine."""


def main() -> None:
    # The library writes a line to the descriptor for each character of a regular expression that it finds odd.
    sys.stderr = os.fdopen(os.dup(2), "w", 1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    with socket.socket(fileno=int(sys.argv[1])) as server:
        load_tokenizer = pickle.loads(server.recv(MOST_MESSAGE))
        vocabulary = read_vocabulary(load_tokenizer())
        gc.freeze()  # or a collection in a trial would copy all memory
        while True:
            message, descriptors, _, _ = socket.recv_fds(server, MOST_MESSAGE, 1)
            if not message:
                return
            if message == FORK:
                answer = fork(server, socket.socket(fileno=descriptors[0]), vocabulary)
            else:
                answer = end(*NUMBER.unpack(message))
            server.sendall(NUMBER.pack(answer))


def fork(server: socket.socket, connection: socket.socket, vocabulary: Any) -> int:
    """The process id of a trial, which ends with its answer."""
    with connection:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            server.close()
            run_trial(connection, vocabulary)
            status = 0
        except EOFError:
            pass  # the server ended before it sent the grammar
        except Exception as error:  # whose text may be a client's
            print(f"a grammar made its trial fail by {type(error).__name__}", file=sys.stderr)
            traceback.print_tb(error.__traceback__)
        finally:
            os._exit(status)  # whatever happens, a trial does not go on as the process that forked it


def end(pid: int) -> int:
    """The exit status of a trial, which is killed unless it has ended; negative: the signal that ended it."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_trial(connection: socket.socket, vocabulary: Any) -> None:
    """Translates and compiles the grammar that comes over `connection`, and answers. SIGPROF ends the process after the
    CPU time that the grammar may take, on all cores together, also if nobody is left to kill it."""
    with connection.makefile("rb") as file:
        grammar, seconds, json_whitespace = pickle.load(file)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES if hard < 0 else min(MOST_BYTES, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        translated = translate(grammar, json_whitespace)
        check_speed(compile_with(make_compiler(vocabulary), translated), vocabulary)
        answer = COMPILED + translated.text.encode()
    except TooSlow as slow:
        answer = SLOW + str(slow).encode()
    except ValueError as refusal:
        answer = REFUSED + str(refusal).encode(errors="replace")
    connection.sendall(answer)


def check_speed(compiled: Any, vocabulary: Any) -> None:
    """Follows the grammar through a random text. Raises TooSlow if a token takes too long: a library that follows many
    readings of a text at once, as nested repetitions have them, would hold up the steps of all requests."""
    import torch
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiled)
    mask = torch.empty((1, -(-vocabulary.vocab_size // 32)), dtype=torch.int32)
    rng = np.random.default_rng(0)
    total = 0.0
    for _ in range(WALK_TOKENS):
        mask.fill_(-1)
        seconds = fill_seconds(matcher, mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), count=vocabulary.vocab_size, bitorder="little")
        bits[vocabulary.stop_token_ids] = 0
        tokens = np.flatnonzero(bits)
        if len(tokens):
            start = time.thread_time()
            matcher.accept_token(int(rng.choice(tokens)))
            seconds += time.thread_time() - start
        if seconds > MOST_TOKEN_SECONDS:
            raise TooSlow(
                f"takes {1000 * seconds:.0f} ms for a token of the answer; the limit is "
                f"{1000 * MOST_TOKEN_SECONDS:.0f} ms: repeat nothing that repeats itself, and leave fewer readings"
            )
        total += seconds
        if not len(tokens) or total > WALK_SECONDS:
            return


def fill_seconds(matcher: Any, mask: Any) -> float:
    """Fills a mask (1, words) int32 with the tokens that may come next, and returns the CPU time that this takes."""
    seconds = math.inf
    for _ in range(MOST_FILLS):
        start = time.thread_time()
        matcher.fill_next_token_bitmask(mask)
        seconds = min(seconds, time.thread_time() - start)
        if not MOST_TOKEN_SECONDS < seconds < 10 * MOST_TOKEN_SECONDS:  # no busy machine slows it down so far
            break
    return seconds


if __name__ == "__main__":
    main()
