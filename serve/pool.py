"""KV memory: one tensor per network (target, drafter), all addressed by the same pages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.serve.batch import KVSpec


class KVPool:
    """`groups[i]` is (L, 2, num_pages, page_size, G, D) for `specs[i]`; page 0 takes what nobody will read."""

    def __init__(
        self, specs: Sequence[KVSpec], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.groups: list[Tensor] = [
            torch.zeros(
                spec.num_layers, 2, num_pages, page_size, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device
            )
            for spec in specs
        ]
