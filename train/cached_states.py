"""Target states of a batch that were read from disk or computed by an engine, and their way from host to device.

Letters: B rows of S tokens, R tokens with cached states, M supervised ones among them, L tokens without, K captured
layers, Ht the target's hidden size. Rows are indices into the flattened batch.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.models.files.state_store import decode
from slipstream.models.states.client import empty_places
from slipstream.models.targets.frozen import FrozenTarget


@dataclass(frozen=True, slots=True)
class CachedStates:
    """Rows in no index are zero.

    `states`, in the dtype of the source, fp8 included, which halves the bytes to copy: `aux_states` (R, K, Ht), and
    `final` (M, Ht) after the target's final norm, empty where that is one of the K; in fp8 `aux_scales` (R, K) and
    `final_scales` (M,), too. An engine's answer may bring other tensors in their place."""

    rows: Tensor  # (R,) int64
    final_rows: Tensor  # (M,) int64
    online_rows: Tensor  # (L,) int64, of whole documents' beginnings, in reading order
    states: dict[str, Tensor]
    copies: tuple[Future[None], ...] = ()  # pending jobs that fill `states`
    waits: list[float] = field(default_factory=list)  # seconds that `to` has waited for them

    def to(self, device: torch.device) -> "CachedStates":
        """Waits for the copies. Raises ValueError for a damaged shard, for other tokens than the data's, and if no
        engine computes the states."""
        began = time.perf_counter()
        for copy in self.copies:
            copy.result()
        self.waits.append(time.perf_counter() - began)
        for value in self.states.values():
            if value.is_cuda:  # it came by another stream, which may not write there once more before this one has read
                value.record_stream(torch.cuda.current_stream(device))
        indices = (self.rows, self.final_rows, self.online_rows)
        rows, final_rows, online_rows = (index.to(device, non_blocking=True) for index in indices)
        states = {name: value.to(device, non_blocking=True) for name, value in self.states.items()}
        return CachedStates(rows, final_rows, online_rows, states)

    def spread(self, target: FrozenTarget, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The result of `FrozenTarget.aux_states` for `tokens` and `positions` (B, S): (B, S, K * Ht) and (B, S, Ht).

        Only supervised tokens have the state after the final norm, unless it is a captured layer.
        """
        dtype = target.head.dtype
        shape = tokens.shape
        states = self.states
        layers, size = states["aux_states"].shape[1:]
        aux_states = torch.zeros(tokens.numel(), layers * size, dtype=dtype, device=tokens.device)
        final = aux_states.new_zeros(tokens.numel(), size)
        aux_states.index_copy_(0, self.rows, decode(states["aux_states"], states.get("aux_scales"), dtype).flatten(1))
        if len(target.layers) in target.aux_layers:
            place = target.aux_layers.index(len(target.layers))
            final = aux_states.view(-1, layers, size)[:, place]
        else:
            final.index_copy_(0, self.final_rows, decode(states["final"], states.get("final_scales"), dtype))
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

    def host(indices: Tensor) -> Tensor:
        return indices.pin_memory() if pinned else indices

    options = {"device": "meta"} if on_meta else {"device": "cpu", "pin_memory": pinned}
    states = empty_places(len(rows), len(final_rows), shape, dtype, **options)
    return CachedStates(host(rows), host(final_rows), host(online_rows), states)
