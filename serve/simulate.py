"""A verdict with a given accept length, for benchmarks of the runtime alone: its tokens are wrong."""

import torch
from torch import Tensor

from slipstream.serve.batch import Verdict

GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: its multiples modulo 2^32 spread evenly


def simulate(sampled: Tensor, keys: Tensor, positions: Tensor, accept_length: float) -> Verdict:
    """Accepts as many nodes of each chain as give `accept_length` tokens a round on average.

    sampled (B, N): the target's token after each node; keys (B,) and positions (B,) draw the fraction's coin, in few
    launches, since what a simulation costs is measured with the round.
    """
    N = sampled.shape[1]
    whole, fraction = int(accept_length), accept_length % 1
    coin = (positions * GOLDEN + keys) & 0xFFFFFFFF  # (B,) in [0, 2^32)
    lengths = (whole + (coin < int(fraction * 2**32))).clamp(max=N).int()
    nodes = torch.arange(N, dtype=torch.int32, device=sampled.device).expand(len(sampled), N)
    padding = nodes >= lengths[:, None]
    return Verdict(nodes.masked_fill(padding, -1), sampled.int().masked_fill(padding, -1), lengths)
