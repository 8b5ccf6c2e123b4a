"""Random documents to capture features of, and the shards of a capture."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

MAX_LENGTH = 40
Flags = Callable[..., list[str]]


def random_row(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Up to 60 tokens in turns; some rows supervise nothing."""
    length = int(generator.integers(1, 60))
    mask = np.repeat(generator.random(12) < 0.4, 5)[:length] & (generator.random() < 0.8)
    return generator.integers(0, 120, length, dtype=np.int32), mask


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
