"""How programs run: threads on a CPU that other programs use, too, and the stages of a start.

OpenMP's threads meet after every operator of a model. By default one that waits there spins for milliseconds, on the
core that the last one needs: beside one other busy program that costs 80 to 95 % of the speed. Threads that sleep at
once cost half of it on an idle machine, where waking a core takes longer than an operator. So they spin for some
microseconds and then sleep (figures: docs/log/2026-11-22.md).

Importing this module, or any other of the package, sets that, and how Triton compiles. It imports no torch: OpenMP
reads its settings once, when torch is imported.
"""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)

LONG_STAGE = 2.0  # seconds
NICENESS = 10  # of threads and processes that compile
SPIN_COUNT = "1000"  # some 20 microseconds; also what GNU's OpenMP, torch's, takes itself for more threads than cores


def set_thread_policy() -> bool:
    """Sets how OpenMP's threads wait, in this process and in those that it starts; what the environment already says
    of it stays. False if it is too late for this process: torch is imported."""
    if os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return True
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return "torch" not in sys.modules


THREADS_SPIN = not set_thread_policy()
# Whether a product and a sum become one operation decides bits. Triton does so up to 3.9, which warns that it will not.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

PARENT = os.getppid()  # as this program begins; another one later means that it has died


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def cores_in_use(seconds: float = 0.3) -> float:
    """How many of the usable cores are busy, measured while this process sleeps for `seconds`."""
    import psutil  # here, since every program imports this module and few ask

    return psutil.cpu_percent(seconds) / 100 * usable_cores()


def free_cores() -> int:
    """The cores that other programs leave, at least one; says so on stderr where these take half of one or more."""
    cores = usable_cores()
    load = cores_in_use()
    if load < 0.5:
        return cores
    message = f"the machine is busy: other programs use {load:.1f} of {cores} cores, so this takes longer than usual"
    print(f"{message}, and speeds measured now mean little", file=sys.stderr, flush=True)
    return max(1, round(cores - load))


def lower_priority() -> None:
    """Gives other threads precedence over this one if cores are few. What it starts inherits the priority."""
    with suppress(OSError, AttributeError):  # macOS has no priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Ctrl-C and service managers signal every process. Children that are started here inherit a mask, so that only
    their parent acts on signals, and end with it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Has Ctrl-C wait for the end of what must not be broken off; a second one does not wait."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # no interrupt comes to this thread
        return
    is_held = False

    def hold(*_: object) -> None:
        nonlocal is_held
        is_held = True
        signal.signal(signal.SIGINT, handler)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if is_held:
            signal.raise_signal(signal.SIGINT)


def end_with_parent() -> None:
    """Ends this worker process when the program that started it ends: without one, workers wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Keeps garbage collections away from the objects that exist already: to traverse those of all modules takes tenths
    of a second, in which a program does nothing else."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # or libraries report leaks at exit


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Logs how long a stage of a program's start took, and after `LONG_STAGE` seconds that it goes on."""
    began = time.monotonic()
    notice = threading.Timer(LONG_STAGE, logger.info, ("%s ...", name))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
    logger.info("%s: %.1f s", name, time.monotonic() - began)
