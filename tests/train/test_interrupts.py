"""A launcher that is ended, a terminal that is closed and a reader that is gone: the run is saved all the same."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from slipstream.models.files.outputs import step_folders
from slipstream.tests.sources import ROOT
from slipstream.tests.train.runs import heeded_signals

TRAINER = """
import os, signal, sys
from slipstream.train.interrupts import Interrupt, end_with_launcher, mute_lost_streams
end_with_launcher()
with Interrupt() as interrupt:
    os.write(int(sys.argv[1]), b"trains ")
    for _ in range(1000):  # ends, where nothing tells it to
        if not interrupt.received:
            signal.sigtimedwait([], 0.02)
    mute_lost_streams()
    print("says so", flush=True)
    print("twice", file=sys.stderr, flush=True)
os.write(int(sys.argv[1]), b"saved" if interrupt.received else b"ran on")
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]], pass_fds=[int(sys.argv[2])])"


def start(*command: str, launched: bool, **streams: int) -> tuple[subprocess.Popen[bytes], int]:
    """A process with the stand-in trainer in it, and a pipe with the trainer's messages."""
    reader, writer = os.pipe()
    environment = os.environ | ({"ACCELERATE_MIXED_PRECISION": "no"} if launched else {})
    with heeded_signals():
        process = subprocess.Popen([*command, TRAINER, str(writer)], env=environment, pass_fds=[writer], **streams)
    os.close(writer)
    assert os.read(reader, 7) == b"trains "
    return process, reader


def rest_of(reader: int) -> bytes:
    with os.fdopen(reader, "rb") as file:
        return file.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_a_launcher_ends_a_run_saved(number):
    launcher, reader = start(sys.executable, "-c", LAUNCHER, launched=True)
    launcher.send_signal(number)
    assert launcher.wait() == -number
    assert rest_of(reader) == b"saved"


def test_a_closed_terminal_and_a_lost_reader_end_a_run_saved():
    for open_stream in (pty.openpty, os.pipe):
        near_end, far_end = open_stream()
        trainer, reader = start(sys.executable, "-c", launched=False, stdout=far_end, stderr=far_end)
        os.close(far_end)
        os.close(near_end)
        trainer.send_signal(signal.SIGHUP)
        assert trainer.wait() == 0
        assert rest_of(reader) == b"saved"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_of_accelerate_launch_ends_a_run_saved(number, tmp_path, arguments):
    flags = arguments(tmp_path, optim__steps=100_000, checkpoint__every=100_000, evaluation__every=100_000)
    config = ROOT / "configs" / "accelerate" / "cpu.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--config_file={config}", "train/eagle3.py", *flags]
    with heeded_signals():
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert launcher.stdout is not None
    with launcher.stdout as printed:
        next(line for line in printed if "heldout:" in line)
        while not (tmp_path / "metrics.jsonl").exists():
            assert launcher.poll() is None
        launcher.send_signal(number)
        launcher.wait()
        rest = printed.read()  # to the trainer's end
    assert "is saved, the same command continues" in rest
    assert len(step_folders(tmp_path)) == 1
