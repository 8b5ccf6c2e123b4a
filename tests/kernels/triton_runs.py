"""How the kernels' tests run them: interpreted on the CPU or compiled on a GPU, into poisoned memory, in a graph."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from slipstream.kernels.sampling.sample import Sampling, gumbel, noise_key

NO_INTERPRETER = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=NO_INTERPRETER), pytest.param("cuda", marks=pytest.mark.gpu)]
)
SLOW = pytest.mark.slow
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # two roundings

Result = TypeVar("Result")


def compiled(program: str, *words: object, **variables: str) -> str:
    """The output of a program of this folder that compiles kernels, for a GPU that need not be there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, str(Path(__file__).with_name(program)), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def keys_of(seeds: range, device: str = "cpu") -> Tensor:
    return torch.tensor([noise_key(seed, 0) for seed in seeds], device=device)


def exact_scores(logits: Tensor, positions: Tensor, sampling: Sampling, ids: Tensor | None = None) -> Tensor:
    """Logits (R, V) with noise in fp64, without filters."""
    if sampling.temperature is None:
        return logits.double()
    ids = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    noise = gumbel(sampling.keys, positions, ids).double()
    return logits.double() + sampling.temperature.double()[:, None] * noise


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills memory that is allocated inside with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def replayed(run: Callable[[], Result]) -> Result:
    """The result of the second replay of a graph that holds `run`."""
    run()  # compiles, and allocates what outlives a launch
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), poisoned():
        result = run()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return result


def check_chain(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor):
    """Each kernel starts while the one before it runs, and reads what that one writes: eight rounds of `layers` in a
    graph give what they give where each has ended before the next."""

    def chain(pause=False):
        hidden = x
        for _ in range(8):
            for layer in layers:
                hidden = layer(hidden)
                if pause:
                    torch.cuda.synchronize()
        return hidden

    expected = chain(pause=True)
    assert expected.isfinite().all()
    assert torch.equal(replayed(chain), expected)
