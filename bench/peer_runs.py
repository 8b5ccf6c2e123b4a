"""Trains and measures one draft of bench/peer_training.py, in processes of their own, and keeps what is finished.

A run's folder is named after its command and holds train.log, the checkpoints, trained.json (written last) and accept/.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.models.files.atomic import remove_folder, write_json
from slipstream.models.files.checkpoint import read_json

ROOT = Path(__file__).resolve().parent.parent
INSTALL = "python3.11 -m venv peer && peer/bin/pip install speculators==0.9.0, then --peer-python peer/bin/python"
ASK = """import json, torch, importlib.metadata as metadata
print(json.dumps([metadata.version("speculators"), torch.accelerator.is_available()]))"""
CPU_FLAGS = ("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--num-workers", "0")
TRAINED = "trained.json"
LOG_TAIL = 12  # lines of a failed program that the error repeats
Side = Literal["slipstream", "speculators"]


@dataclass(frozen=True, slots=True)
class Peer:
    """The package in its environment."""

    python: str
    version: str
    on_accelerator: bool

    @classmethod
    def find(cls, python: str) -> "Peer":
        """Raises ValueError unless `python` runs and has speculators."""
        program = shutil.which(python)
        if program is None:
            raise ValueError(f"peer_python {python} is not a program; {INSTALL}")
        path = str(Path(program).absolute())  # its links not followed: they lead out of the environment
        answer = subprocess.run([path, "-c", ASK], capture_output=True, text=True, env=peer_environment())
        if answer.returncode:
            last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"peer_python {python} has no speculators ({last}); {INSTALL}")
        version, on_accelerator = json.loads(answer.stdout)
        return cls(path, version, on_accelerator)

    def command(self, flags: Sequence[str]) -> list[str]:
        if self.on_accelerator:
            return [self.python, "-m", "speculators", "train", *flags]
        return [self.python, "-P", str(ROOT / "bench" / "speculators_on_cpu.py"), *CPU_FLAGS, *flags]


def peer_environment() -> dict[str, str]:
    """Ours without the path to our packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def module_command(module: str, flags: Sequence[str]) -> list[str]:
    """The command of one of our programs. -P: names in the working directory hide no package."""
    return [sys.executable, "-P", "-m", f"slipstream.{module}", *flags]


@dataclass(frozen=True, slots=True)
class Run:
    """One try: a command that trains a draft, except for the folder that it writes, which comes last."""

    side: Side
    drafter: str
    flags: str
    """The options in which the tries of a side differ."""
    command: tuple[str, ...]
    parent: Path

    @property
    def folder(self) -> Path:
        name = hashlib.sha256(shlex.join(self.command).encode()).hexdigest()[:8]
        return (self.parent / f"{self.drafter}-{self.side}-{name}").resolve()

    @property
    def draft(self) -> Path:
        """Checkpoint with the lowest loss (speculators) or the longest accept length (ours) on the held-out rows."""
        return self.folder / ("checkpoint_best" if self.side == "speculators" else "draft/best")

    @property
    def seconds(self) -> float:
        """Seconds of the whole training program."""
        return read_json(self.folder / TRAINED)["seconds"]

    def train(self, environment: Mapping[str, str]) -> None:
        """Trains the draft unless it is there; a training that was stopped begins again. Raises ValueError if the
        program fails."""
        if (self.folder / TRAINED).exists():
            return
        if self.folder.exists():
            remove_folder(self.folder)
        self.folder.mkdir(parents=True)
        is_peer = self.side == "speculators"
        base = peer_environment() if is_peer else dict(os.environ)
        place = self.folder if is_peer else self.folder / "draft"
        began = time.perf_counter()
        call(
            [*self.command, str(place)], self.folder / "train.log", base | environment, self.folder if is_peer else None
        )
        if not self.draft.exists():
            raise ValueError(f"{self.folder / 'train.log'}: the program ended without {self.draft.name}")
        write_json(self.folder / TRAINED, {"seconds": round(time.perf_counter() - began, 1)})

    def measure(self, flags: Sequence[str], environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The figures of `slipstream accept` with `flags`, by category. Raises ValueError if it fails."""
        output = self.folder / "accept"
        words = ["--draft", str(self.draft), "--output", str(output), "--overwrite", *flags]
        command = module_command("serve.measure.accept", words)
        call(command, self.folder / "accept.log", dict(os.environ) | environment, None)
        return {entry["category"]: entry for entry in read_json(output / "accept.json")["figures"]}


def call(command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path | None) -> None:
    """Runs `command` in `folder` with its output in `log`. Raises ValueError with the last lines if it fails."""
    with log.open("w") as file:
        file.write("$ " + shlex.join(command) + "\n")
        file.flush()
        ended = subprocess.run(command, cwd=folder, env=dict(environment), stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        raise ValueError(f"{log}: the program ended with status {ended.returncode}:\n{tail}")
