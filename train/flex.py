"""FlexAttention over packed rows: compiled on a GPU; plain on the CPU, where only tests want it.

Letters: N queries, K keys, Q/G query and KV heads, D head dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

RECOMPILATIONS = 32  # beyond the limit torch would silently compute all scores; its default is 8
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key -> whether it is seen


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled again for a window, with gradients or without, and once more as soon as sizes change."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILATIONS)
    return torch.compile(function)


def visible_tiles(sees: MaskRule, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """The tiles of 128 x 128 that hold a visible pair: others are skipped."""
    make = compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return make(sees, None, None, num_queries, num_keys, device=device)


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: BlockMask) -> Tensor:
    """q (N, Q, D), k and v (K, G, D) of one dtype -> (N, Q, D)."""
    heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    run: Any = compiled(flex_attention) if q.is_cuda else flex_attention
    # By itself torch takes its decoding kernel below 128 queries, which has no tiles for some numbers of them.
    options = {"BACKEND": "TRITON"}
    out = run(*heads_first, block_mask=tiles, enable_gqa=True, kernel_options=options)
    return out.squeeze(0).transpose(0, 1)
