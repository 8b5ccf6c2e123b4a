"""Messages between an engine and the process that trains its draft on what it serves: pickles on a socket.

The engine (serve/engine/learning.py) sends ServedText and Verdict, the trainer (train/learn.py) Ready and Offers, and
before them StateQuestions, one after the StateAnswer to another.
Whether the engine has work stands in memory of both.
"""

import mmap
import pickle
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Outcome = Literal["passed", "worse", "refused"]
TEXT_LEN = 2048  # tokens of a text, at most, that a trainer reads


@dataclass(frozen=True, slots=True)
class LearnJob:
    """The trainer's task, as JSON on its command line."""

    target: str
    draft: str
    trust_remote_code: bool
    layers: list[int]  # whose states texts have
    device: str
    share: float  # of the time while the engine has work
    memory: int  # bytes of texts
    folder: str  # for the checkpoints that it offers
    output: str  # folder that the last one becomes whose trial it passed
    data: str | None  # prepared dataset that the draft was trained on


@dataclass(frozen=True, slots=True, eq=False)
class ServedText:
    """A prompt and its answer. `states`: (L, K, H) of all tokens but the last, which nothing reads; in fp8 with their
    `scales` (L, K)."""

    client: str
    tokens: list[int]
    num_prompt: int
    states: Tensor
    scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + (0 if self.scales is None else self.scales.nbytes) + 8 * len(self.tokens)


@dataclass(frozen=True, slots=True)
class StateQuestion:
    """Texts whose states the trainer wants."""

    texts: list[list[int]]


@dataclass(frozen=True, slots=True, eq=False)
class StateAnswer:
    """`states`: (L, K, H) of all tokens of the texts, or of none if the engine had no memory for them, or an id is none
    of the target's."""

    states: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a trial of weights that were offered, or their refusal."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Ready:
    """The trainer has all the memory that it takes of a GPU."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Weights that the trainer holds for better: a checkpoint's folder, accept lengths of held-out texts, and how many
    seconds training has gone on, and went to steps and to evaluations."""

    folder: str
    before: float
    after: float
    seconds: dict[str, float]


class Load:
    """Whether the engine has work: a byte of a file in the job's folder."""

    def __init__(self, folder: str) -> None:
        with Path(folder, "load").open("a+b") as file:
            file.truncate(1)
            self._byte = mmap.mmap(file.fileno(), 1)

    def is_busy(self) -> bool:
        return self._byte[0] == 1

    def set(self, is_busy: bool) -> None:
        self._byte[0] = is_busy


class TensorPickler(pickle.Pickler):
    """Writes tensors on the host as they lie there; torch's own way copies them, and holds Python's lock for that."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        return tensor_of, (value.contiguous().view(torch.uint8).numpy(), value.dtype)


def tensor_of(values: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(values).view(dtype)


class Line:
    """An end of the socket. One thread sends, another one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._in = end.makefile("rb")
        self._out = end.makefile("wb")

    def send(self, message: object) -> None:
        """Raises OSError where the other end is closed."""
        TensorPickler(self._out, pickle.HIGHEST_PROTOCOL).dump(message)
        self._out.flush()

    def receive(self) -> Any:
        """Blocks for the next message. Raises EOFError or OSError at the end, in a message, too."""
        try:
            return pickle.load(self._in)
        except pickle.UnpicklingError as error:
            raise EOFError from error

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
