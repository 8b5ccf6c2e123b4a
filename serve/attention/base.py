"""What an attention backend is, how a phase finds its backend, and the hybrid of two."""

import importlib
from pathlib import Path
from typing import Protocol

from torch import Tensor

from slipstream.models.layers import Attention, Mask, RotaryEmbedding
from slipstream.serve.batch import Batch

PHASES = ("prefill", "verify", "draft")


class Backend(Attention, Protocol):
    """Attention over one network's paged KV. A file of this folder defines one as its class `Backend`."""

    needs_host_lengths: bool  # plans on the host with exact lengths: makes rounds synchronous

    def __init__(self, cache: Tensor, rope: RotaryEmbedding) -> None:
        """cache (L, 2, num_pages, page_size, G, D)."""
        ...

    def plan(self, batch: Batch) -> None:
        """Prepares one pass; `write` and `attend` of every layer follow."""
        ...


class Hybrid:
    """One backend for prefill, another for verify, over the same cache."""

    def __init__(self, prefill: Backend, verify: Backend) -> None:
        self.prefill, self.verify = prefill, verify
        self.needs_host_lengths = verify.needs_host_lengths
        self.active = verify

    def plan(self, batch: Batch) -> None:
        self.active = self.verify if batch.next_tokens is None else self.prefill
        self.active.plan(batch)

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        self.active.write(k, v, layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, mask: Mask) -> Tensor:
        return self.active.attend(q, k, v, layer, mask)


def find_backends(option: str) -> dict[str, type[Backend]]:
    """The backend class of each phase from `--attention`: one name, or prefill=NAME,verify=NAME,draft=NAME."""
    if "=" not in option:
        return dict.fromkeys(PHASES, _find_backend(option))
    choices = [part.partition("=")[::2] for part in option.split(",")]
    if sorted(phase for phase, _ in choices) != sorted(PHASES):
        raise ValueError(f"attention is {option!r}; write one name or prefill=NAME,verify=NAME,draft=NAME")
    return {phase: _find_backend(name) for phase, name in choices}


def _find_backend(name: str) -> type[Backend]:
    found = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "base")
    if name not in found:
        raise ValueError(f"attention backend {name!r} does not exist; found: {', '.join(found)}")
    return importlib.import_module(f"slipstream.serve.attention.{name}").Backend
