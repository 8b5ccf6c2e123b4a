"""KV caches of networks by groups of layers with one retention.

A group keeps all tokens of a text, those that a sliding window sees, or a state (serve/runner/recurrence.py). It has
its own page table and its own pool of pages. All layers with its retention lie in its pages, of target and draft,
whatever the shape of their rows: each network has one tensor for its layers of a group with one shape. A network's KV
is in its own dtype or in e4m3 codes (kernels/kv/fp8.py).
Letters: L layers of a network with one group and shape, K parts of a row (keys and values), G KV heads, D head dim,
S slots = num_pages * page_size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.kv.fp8 import E4M3
from slipstream.models.targets.config import AttentionSpec, KVShape

Retention = int | Literal["all", "state"]  # a window in tokens, all tokens, or a state alone
Groups = tuple[Retention, ...]  # the retention of each cache group; the first is "all"


def find_groups(specs: Iterable[AttentionSpec], longest: int, *, has_states: bool = False) -> Groups:
    """One group that keeps all tokens, one for each window that can bind in contexts of `longest` tokens, and one for
    states. A window of one token has none: drafts' KV depends on the token after it."""
    windows = {spec.window for spec in specs if spec.window is not None and 1 < spec.window < longest}
    states: tuple[Retention, ...] = ("state",) if has_states else ()
    return ("all", *sorted(windows), *states)


def group_of(spec: AttentionSpec, groups: Groups) -> int:
    return groups.index(spec.window) if spec.window in groups else groups.index("all")


def page_bytes(
    networks: Iterable[tuple[Sequence[AttentionSpec], torch.dtype]], groups: Groups, page_size: int
) -> list[int]:
    """Bytes of a page of each group: KV of the layers in it, of networks by their layers and the dtype of their KV."""
    sizes = [0] * len(groups)
    for specs, dtype in networks:
        for spec in specs:
            sizes[group_of(spec, groups)] += spec.kv_shape.size * dtype.itemsize * page_size
    return sizes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV of a network's layers with one group and one shape."""

    group: int
    pages: Tensor  # (L, K, num_pages, page_size, G, D)
    scales: Tensor | None = None  # (L, K, G) fp32, where pages hold e4m3 codes

    @property
    def flat(self) -> Tensor:
        """(L, K, S, G, D), a view, for kernels that take all layers at once."""
        return self.pages.flatten(2, 3)


@dataclass(frozen=True, slots=True)
class NetworkKV:
    """The KV of one network."""

    caches: tuple[LayerCache, ...]
    places: tuple[tuple[int, int], ...]  # by layer: the index of its cache, and its place in that; or its source's
    specs: tuple[AttentionSpec, ...]  # by layer
    dtype: torch.dtype | None = None  # of queries; None: that of the caches

    @classmethod
    def allocate(
        cls,
        specs: Sequence[AttentionSpec],
        groups: Groups,
        num_pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[Tensor] | None = None,
    ) -> "NetworkKV":
        """Zeros; `num_pages` by group. Padding writes to page 0, the dump page; nothing reads it.

        dtype: of queries and of KV or, with `scales`, (K, G) fp32 of each layer, of queries alone: KV is in e4m3."""
        members: dict[tuple[int, KVShape], list[int]] = {}  # layers by group and shape
        for layer, spec in enumerate(specs):
            if spec.kv_source is None:
                members.setdefault((group_of(spec, groups), spec.kv_shape), []).append(layer)
        caches = []
        places: dict[int, tuple[int, int]] = {}
        for index, ((group, row), layers) in enumerate(sorted(members.items())):
            shape = len(layers), row.parts, num_pages[group], page_size, row.heads, row.head_dim
            pages = zeros(shape, dtype if scales is None else E4M3, device)
            stacked = None if scales is None else torch.stack([scales[layer] for layer in layers]).contiguous()
            caches.append(LayerCache(group, pages, stacked))
            places |= {layer: (index, place) for place, layer in enumerate(layers)}
        sources = (layer if spec.kv_source is None else spec.kv_source for layer, spec in enumerate(specs))
        return cls(tuple(caches), tuple(places[source] for source in sources), tuple(specs), dtype)

    def read_by(self, specs: Sequence[AttentionSpec]) -> "NetworkKV":
        """The KV as layers of another network read it, each that of the layer which its `kv_source` names."""
        sources = [spec.kv_source for spec in specs]
        places = tuple(self.places[source] for source in sources if source is not None)
        assert len(places) == len(specs), "none has KV"
        return NetworkKV(self.caches, places, tuple(specs), self.dtype)

    @property
    def query_dtype(self) -> torch.dtype:
        return self.dtype or self.caches[0].pages.dtype

    @property
    def layer_scales(self) -> list[Tensor | None]:
        """(K, G) of each layer's keys and values; None where it has no codes."""
        scales = ((self.caches[cache].scales, place) for cache, place in self.places)
        return [None if stacked is None else stacked[place] for stacked, place in scales]

    @property
    def layers(self) -> list[Tensor]:
        """(K, num_pages, page_size, G, D) of each."""
        return [self.caches[cache].pages[place] for cache, place in self.places]

    @property
    def groups(self) -> list[int]:
        """The group of each layer."""
        return [self.caches[cache].group for cache, _ in self.places]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":  # the system's zero pages, each taken when it is first written: torch.zeros writes all
        return torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
