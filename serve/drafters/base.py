"""The interface of a drafter and how one is found. A drafter is a file of this folder with a class `Drafter`."""

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.models.checkpoint import is_checkpoint, read_json, resolve
from slipstream.models.draft import drafter_of
from slipstream.models.target import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.batch import Batch, HostProposal, KVSpec, Proposal, Rows, Verdict
from slipstream.serve.options import NoOptions
from slipstream.serve.request import Request


class Drafter(ABC):
    """Proposes tokens for the target to verify. The engine asks only what stands here, never which drafter it is."""

    Options: ClassVar[type] = NoOptions  # its dataclass of options, shown as --drafter.*
    feature_layers: tuple[
        int, ...
    ] = ()  # target states it reads: 0..n-1 = output of that layer, n = after the final norm
    kv: KVSpec | None = None  # its own per-token KV, kept at the target's slots
    lookahead: int = 0  # its KV at slot i depends on tokens up to i + lookahead
    branches: bool = False  # False: proposals are chains, which need neither tree mask nor KV moves
    on_host: ClassVar[bool] = False  # draft runs between rounds, which wait for the host while that pays
    widths: tuple[int, ...] = (1,)  # the values of N it can offer; 1 is always allowed

    @property
    def device_width(self) -> int:
        """Most nodes that it proposes on the device."""
        return max(self.widths)

    @classmethod
    @abstractmethod
    def load(cls, draft: str, options: Any, target: Target) -> "Drafter":
        """Builds the drafter for `target`, on its device and in its dtype. Raises ValueError where they do not fit."""

    def scratch(self, width: int) -> int:
        """KV rows that drafting `width` nodes writes beyond the committed ones."""
        return 0

    def attach(self, target: Target, state: Rows, attention: Backend | None) -> None:
        """Shares the target's weights and the rows; `attention` works on the KV that `kv` asked for."""

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that it would not serve as promised."""

    def admit(self, row: int, tokens: list[int], namespace: str) -> None:
        """A request begins (or resumes) in `row` with these tokens, prefix hits included."""

    def propose(self, batch: Batch, width: int) -> Proposal:
        """At most N = `width` nodes for each request: batch.lengths (B,) tokens are committed, batch.roots (B,) follow.

        Here the roots alone."""
        assert batch.roots is not None
        return Proposal(batch.roots[:, None].int(), chain_parents(len(batch.roots), 1, batch.roots.device))

    def observe(self, batch: Batch, features: Tensor | None, verdict: Verdict | None) -> None:
        """Sees a target pass: `features` (T, K * H) of its queries.

        After a prefill chunk `verdict` is None and batch.next_tokens (T,) holds each query's successor. After a round
        the accepted nodes are committed, in order, at positions batch.lengths (B,) + 0..verdict.lengths - 1.
        """

    def draft(self, rows: Sequence[int], emitted: NDArray[np.int32], width: int) -> HostProposal:
        """On the host: the requests in `rows` (B,) have gained the first emitted[:, 0] of emitted[:, 1:], and get nodes
        for what follows.

        A request may end within these tokens: then `release`, before its next `draft`, says how many were its own.
        """
        raise NotImplementedError(f"{type(self).__module__} drafts on the host and does not say how")

    def release(self, row: int, tokens: list[int]) -> None:
        """The request in `row` ended or was preempted; `tokens` is all of it."""

    def metrics(self) -> dict[str, int]:
        """Gauges by name, for /metrics."""
        return {}

    def close(self) -> None:
        """The engine ends; no request is running."""


def find_drafter(draft: str) -> type[Drafter]:
    """The class for a bare name (a file of this folder) or for a checkpoint (its config.json names the drafter)."""
    name = drafter_name(draft)
    found = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "base")
    if name not in found:
        raise ValueError(f"drafter {name!r} does not exist; name a checkpoint folder or one of: {', '.join(found)}")
    return importlib.import_module(f"slipstream.serve.drafters.{name}").Drafter


def options_of(draft: str) -> type:
    """The dataclass of options of this draft's drafter; a checkpoint's can be mixed with n-gram lookahead."""
    own = find_drafter(draft).Options
    if not is_checkpoint(draft):
        return own
    return importlib.import_module("slipstream.serve.drafters.mixed").options_class(own)


def load_drafter(draft: str, values: dict[str, Any], target: Target) -> Drafter:
    """The drafter with options by name. Raises ValueError where a name or value is wrong, or it does not fit."""
    drafter = find_drafter(draft)
    if not is_checkpoint(draft):
        return drafter.load(draft, build_options(drafter, values), target)
    mixed = importlib.import_module("slipstream.serve.drafters.mixed")
    own, options = mixed.split_options(values)
    network = drafter.load(draft, build_options(drafter, own), target)
    return mixed.Drafter.around(network, options, target) if options.ngram_first else network


def drafter_name(draft: str) -> str:
    if not is_checkpoint(draft):
        return draft
    return drafter_of(read_json(resolve(draft) / "config.json"), draft)


def build_options(drafter: type[Drafter], values: dict[str, Any]) -> Any:
    """The drafter's Options from names and values; ValueError lists the valid names for an unknown one."""
    names = [field.name for field in fields(drafter.Options)]
    unknown = sorted(values.keys() - set(names))
    if unknown:
        raise ValueError(f"drafter option {unknown[0]!r} does not exist; valid: {', '.join(names) or '(none)'}")
    return drafter.Options(**values)


def chain_parents(batch_size: int, width: int, device: torch.device) -> Tensor:
    """(B, N) int32 parents of a chain: -1, 0, 1, ..."""
    return _chain_parents(width, device).expand(batch_size, width)


@functools.cache
def _chain_parents(width: int, device: torch.device) -> Tensor:
    """(N,), made once: a captured round only reads it."""
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capture"
    with torch.inference_mode(False):
        return torch.arange(-1, width - 1, dtype=torch.int32, device=device)
