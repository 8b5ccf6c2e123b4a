"""The target's states of committed tokens, kept beside their KV in the pages of group 0.

So states share the life of KV: accepted nodes' move with it, prefix hits bring them along, and a request that was
preempted computes them again. Letters: T rows of a pass, S KV slots, K states, H the target's hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.serve.runner.kv import zeros


class KeptStates:
    """States of `layers`, distinct ids as in models/targets/config.py."""

    def __init__(
        self,
        layers: tuple[int, ...],
        num_pages: int,
        page_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.page_size = page_size
        self.rows = zeros((num_pages * page_size, len(layers), hidden_size), dtype, device)

    @property
    def flat(self) -> Tensor:
        """(1, 1, S, K, H), a view, as `move_rows` takes KV."""
        return self.rows[None, None]

    def union(self, drafter_layers: Sequence[int]) -> tuple[int, ...]:
        """The states of a pass: those of the drafter first."""
        return tuple(dict.fromkeys((*drafter_layers, *self.layers)))

    def store(self, slots: Tensor, states: Tensor, drafter_layers: Sequence[int]) -> Tensor | None:
        """Keeps rows of a pass, whose states (T, U * H) are the `union`, in KV slots (T,). Returns the drafter's
        (T, Kd * H), if it reads any."""
        union = self.union(drafter_layers)
        parts = dict(zip(union, states.split(self.rows.shape[2], dim=1), strict=True))
        ours = states if union == self.layers else torch.cat([parts[layer] for layer in self.layers], dim=1)
        self.rows[slots] = ours.unflatten(1, (len(self.layers), -1))
        if not drafter_layers:
            return None
        return states[:, : len(drafter_layers) * self.rows.shape[2]].contiguous()

    def read(self, page_ids: Tensor, num_tokens: int) -> Tensor:
        """A copy (N, K, H), on the device, of the states of a text's first N tokens, whose pages are given."""
        by_page = self.rows.unflatten(0, (-1, self.page_size))
        return by_page[page_ids[: -(-num_tokens // self.page_size)]].flatten(0, 1)[:num_tokens]
