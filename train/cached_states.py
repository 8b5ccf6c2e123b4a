"""Target states of a batch that were read from disk or computed by an engine, and their way from host to device.

Letters: B rows of S tokens, R tokens with cached states, M supervised ones among them, L tokens without, K captured
layers, Ht the target's hidden size. Rows are indices into the flattened batch.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.models.files.state_store import DTYPES, decode
from slipstream.models.targets.frozen import FrozenTarget


@dataclass(frozen=True, slots=True)
class CachedStates:
    """In the dtype of the source, fp8 included: half the bytes to copy. Rows in no index are zero."""

    rows: Tensor  # (R,) int64
    aux_states: Tensor  # (R, K, Ht)
    aux_scales: Tensor | None  # (R, K) fp32
    final_rows: Tensor  # (M,) int64
    final: Tensor  # (M, Ht) after the target's final norm; empty where that is one of the K
    final_scales: Tensor | None  # (M,) fp32
    online_rows: Tensor  # (L,) int64, of whole documents' beginnings, in reading order
    copies: tuple[Future[None], ...] = ()  # pending jobs that fill these tensors
    places: dict[str, Tensor] = field(default_factory=dict)  # tensors that replace these then, by name
    waits: list[float] = field(default_factory=list)  # seconds that `to` has waited for them

    def to(self, device: torch.device) -> "CachedStates":
        """Waits for the copies. Raises ValueError for a damaged shard, for other tokens than the data's, and if no
        engine computes the states."""
        began = time.perf_counter()
        for copy in self.copies:
            copy.result()
        self.waits.append(time.perf_counter() - began)
        columns = {column.name: getattr(self, column.name) for column in fields(self)} | self.places
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in columns.items() if isinstance(value, Tensor)
        }
        for value in self.places.values():
            if value.is_cuda:  # it came by another stream, which may not write there once more before this one has read
                value.record_stream(torch.cuda.current_stream(device))
        return replace(self, copies=(), places={}, **moved)

    def spread(self, target: FrozenTarget, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The result of `FrozenTarget.aux_states` for `tokens` and `positions` (B, S): (B, S, K * Ht) and (B, S, Ht).

        Only supervised tokens have the state after the final norm, unless it is a captured layer.
        """
        dtype = target.head.dtype
        shape = tokens.shape
        layers, size = self.aux_states.shape[1:]
        aux_states = torch.zeros(tokens.numel(), layers * size, dtype=dtype, device=tokens.device)
        final = aux_states.new_zeros(tokens.numel(), size)
        aux_states.index_copy_(0, self.rows, decode(self.aux_states, self.aux_scales, dtype).flatten(1))
        if len(target.layers) in target.aux_layers:
            place = target.aux_layers.index(len(target.layers))
            final = aux_states.view(-1, layers, size)[:, place]
        else:
            final.index_copy_(0, self.final_rows, decode(self.final, self.final_scales, dtype))
        if len(self.online_rows):
            online_tokens = tokens.flatten()[self.online_rows].unsqueeze(0)
            online_positions = positions.flatten()[self.online_rows].unsqueeze(0)
            captured, normed = target.aux_states(online_tokens, online_positions)
            aux_states.index_copy_(0, self.online_rows, captured[0])
            final.index_copy_(0, self.online_rows, normed[0])
        return aux_states.view(*shape, -1), final.view(*shape, -1)


def empty_states(
    rows: Tensor,
    final_rows: Tensor,
    online_rows: Tensor,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
    pinned: bool,
    on_meta: bool = False,
) -> CachedStates:
    """Room for the states of these rows, of `shape` (K, Ht); with scales if `dtype` is that of fp8. `on_meta`: takes
    no memory for them yet."""
    is_scaled = dtype == DTYPES["fp8"]

    def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        device = "meta" if on_meta else "cpu"
        return torch.empty(sizes, dtype=dtype, pin_memory=pinned and not on_meta, device=device)

    def host(indices: Tensor) -> Tensor:
        return indices.pin_memory() if pinned else indices

    layers, hidden_size = shape
    return CachedStates(
        rows=host(rows),
        aux_states=empty(len(rows), layers, hidden_size),
        aux_scales=empty(len(rows), layers, dtype=torch.float32) if is_scaled else None,
        final_rows=host(final_rows),
        final=empty(len(final_rows), hidden_size),
        final_scales=empty(len(final_rows), dtype=torch.float32) if is_scaled else None,
        online_rows=host(online_rows),
    )
