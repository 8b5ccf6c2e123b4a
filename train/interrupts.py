"""Signals and the end of a launcher: both end a run after the step at hand, saved.

`accelerate launch` dies of a signal without passing it on; its processes then ran on alone. On Linux the kernel tells
them of its end. Without a launcher the parent is a shell, whose end must not stop a program in the background.
"""

import ctypes
import os
import select
import signal
import sys
from types import FrameType

from slipstream import runtime

LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")  # variables that accelerate and torchrun set
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Records the signals of NUMBERS instead of ending the process; a second SIGINT ends it as usual. A SIGHUP that is
    ignored, as under nohup, stays ignored."""

    def __enter__(self) -> "Interrupt":
        self.received = False
        numbers = [number for number in NUMBERS if signal.getsignal(number) != signal.SIG_IGN]
        self.previous = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def note(self, number: int, _frame: FrameType | None) -> None:
        self.received = True
        mute_lost_streams()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def end_with_launcher() -> None:
    """Asks for SIGTERM when the launcher of this process ends, if it has one."""
    if sys.platform != "linux" or not any(name in os.environ for name in LAUNCHERS):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != runtime.PARENT:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)


def mute_lost_streams() -> None:
    """Lets stdout and stderr lead nowhere if their terminal is closed or their reader gone, so that a run can print and
    still be saved."""
    poller = select.poll()
    for descriptor in (1, 2):
        poller.register(descriptor, 0)
    for descriptor, _ in poller.poll(0):  # errors and hang-ups alone
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
