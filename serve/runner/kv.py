"""KV caches of networks by groups of layers with one retention.

Group 0 keeps all tokens, further groups those that a sliding window sees. A group has its own page table and its own
pool of pages, of which target and draft each hold the KV of their layers in it. A network's KV is in its own dtype or
in e4m3 codes (kernels/kv/fp8.py).
Letters: L layers of a network in a group, G KV heads, D head dim, S slots = num_pages * page_size.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.kv.fp8 import E4M3
from slipstream.models.targets.config import AttentionSpec

Windows = tuple[int | None, ...]  # by group: how many tokens its layers see; None, of the first: all


def find_windows(specs: Iterable[AttentionSpec], longest: int) -> Windows:
    """One group for each window that can bind in contexts of `longest` tokens, after the one that keeps all. A window
    of one token has none: drafts' KV depends on the token after it."""
    windows = {spec.window for spec in specs if spec.window is not None and 1 < spec.window < longest}
    return (None, *sorted(windows))


def group_of(spec: AttentionSpec, windows: Windows) -> int:
    return windows.index(spec.window) if spec.window in windows else 0


def page_bytes(
    networks: Iterable[tuple[Sequence[AttentionSpec], torch.dtype]], windows: Windows, page_size: int
) -> list[int]:
    """Bytes of a page of each group: KV of the layers in it, of networks by their layers and the dtype of their KV."""
    sizes = [0] * len(windows)
    for specs, dtype in networks:
        for spec in specs:
            sizes[group_of(spec, windows)] += 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize * page_size
    return sizes


@dataclass(frozen=True, slots=True)
class NetworkKV:
    """The KV of one network."""

    caches: dict[int, Tensor]  # by group: (L, 2, num_pages, page_size, G, D)
    places: tuple[tuple[int, int], ...]  # by layer: its group, and its place among the layers there
    specs: tuple[AttentionSpec, ...]  # by layer
    dtype: torch.dtype | None = None  # of queries; None: that of the caches
    scales: dict[int, Tensor] = field(default_factory=dict)  # by group: (L, 2, G) fp32 of e4m3 codes; else none

    @classmethod
    def allocate(
        cls,
        specs: Sequence[AttentionSpec],
        windows: Windows,
        num_pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[Tensor] | None = None,
    ) -> "NetworkKV":
        """Zeros; `num_pages` by group. Padding writes to page 0, the dump page; nothing reads it.

        dtype: of queries and of KV or, with `scales`, (2, G) fp32 of each layer, of queries alone: KV is in e4m3."""
        groups = [group_of(spec, windows) for spec in specs]
        places = tuple((group, groups[:index].count(group)) for index, group in enumerate(groups))
        caches: dict[int, Tensor] = {}
        for group in sorted(set(groups)):
            members = [spec for spec, number in zip(specs, groups, strict=True) if number == group]
            heads = {(spec.num_kv_heads, spec.head_dim) for spec in members}
            assert len(heads) == 1, "layers of a group have KV of one shape"
            shape = len(members), 2, num_pages[group], page_size, *heads.pop()
            caches[group] = _zeros(shape, dtype if scales is None else E4M3, device)
        return cls(caches, places, tuple(specs), dtype, {} if scales is None else _by_group(scales, groups))

    @property
    def query_dtype(self) -> torch.dtype:
        return self.dtype or next(iter(self.caches.values())).dtype

    @property
    def layer_scales(self) -> list[Tensor | None]:
        """(2, G) of each layer's keys and values; None where it has no codes."""
        return [self.scales[group][place] if self.scales else None for group, place in self.places]

    @property
    def layers(self) -> list[Tensor]:
        """(2, num_pages, page_size, G, D) of each."""
        return [self.caches[group][place] for group, place in self.places]

    @property
    def groups(self) -> list[int]:
        """The group of each layer."""
        return [group for group, _ in self.places]

    def flat(self, group: int) -> Tensor:
        """(L, 2, S, G, D), a view, for kernels that take all layers of a group."""
        return self.caches[group].flatten(2, 3)


def _by_group(scales: Sequence[Tensor], groups: Sequence[int]) -> dict[int, Tensor]:
    """Scales by layer -> (L, 2, G) of the layers of each group."""
    grouped = {
        group: [scale for scale, number in zip(scales, groups, strict=True) if number == group] for group in set(groups)
    }
    return {group: torch.stack(members).contiguous() for group, members in grouped.items()}


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":  # the system's zero pages, each taken when it is first written: torch.zeros writes all
        return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


@dataclass(slots=True)
class KVSlots:
    """The slots that the queries' KV goes to: (T,) int64 in each group, computed at the first use."""

    find: Callable[[int], Tensor]
    by_group: dict[int, Tensor] = field(default_factory=dict)

    def of(self, group: int) -> Tensor:
        if group not in self.by_group:
            self.by_group[group] = self.find(group)
        return self.by_group[group]
