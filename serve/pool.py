"""KV memory: one tensor per network (target, drafter), all addressed by the same pages."""

import os
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


def bytes_per_token(specs: Sequence[KVSpec], dtype: torch.dtype) -> int:
    return sum(2 * spec.num_layers * spec.num_kv_heads * spec.head_dim for spec in specs) * dtype.itemsize


def free_bytes(device: torch.device, mem_fraction: float) -> int:
    """Memory that the KV cache may take once weights are loaded: on the CPU a quarter of what is free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1.0 - mem_fraction) * total)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
