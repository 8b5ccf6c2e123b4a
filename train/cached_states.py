"""Target states of a batch that were read from disk, and their way from host to device.

Letters: B rows of S tokens, R tokens with cached states, M supervised ones among them, L tokens without, K captured
layers, Ht the target's hidden size. Rows are indices into the flattened batch.
"""

from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.models.files.state_store import decode
from slipstream.models.targets.frozen import FrozenTarget


@dataclass(frozen=True, slots=True)
class CachedStates:
    """In the dtype of the files, fp8 included: half the bytes to copy. Rows in no index are zero."""

    rows: Tensor  # (R,) int64
    aux_states: Tensor  # (R, K, Ht)
    aux_scales: Tensor | None  # (R, K) fp32
    final_rows: Tensor  # (M,) int64
    final: Tensor  # (M, Ht) after the target's final norm; empty where that is one of the K
    final_scales: Tensor | None  # (M,) fp32
    online_rows: Tensor  # (L,) int64, of whole documents' beginnings, in reading order
    copies: tuple[Future[None], ...] = ()  # pending jobs that fill these tensors

    def to(self, device: torch.device) -> "CachedStates":
        """Waits for the copies. Raises ValueError for a damaged shard and for other tokens than the data's."""
        for copy in self.copies:
            copy.result()
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name in (field.name for field in fields(self))
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, copies=(), **moved)

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
