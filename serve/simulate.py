"""A verdict with a given accept length, for benchmarks of the runtime alone: its tokens are wrong."""

import torch
from torch import Tensor

from slipstream.kernels.sampling import gumbel
from slipstream.serve.batch import Verdict


def simulate(sampled: Tensor, keys: Tensor, positions: Tensor, accept_length: float) -> Verdict:
    """Accepts as many nodes of each chain as give `accept_length` tokens a round on average.

    sampled (B, N): the target's token after each node; keys (B,) and positions (B,) draw the fraction's coin.
    """
    N = sampled.shape[1]
    whole, fraction = int(accept_length), accept_length % 1
    noise = gumbel(keys, positions, torch.zeros(1, dtype=torch.int64, device=sampled.device))[:, 0]
    uniform = torch.exp(-torch.exp(-noise))  # (B,) in (0, 1)
    lengths = (whole + (uniform < fraction).int()).clamp(max=N)
    nodes = torch.arange(N, dtype=torch.int32, device=sampled.device).expand(len(sampled), N)
    padding = nodes >= lengths[:, None]
    return Verdict(nodes.masked_fill(padding, -1), sampled.int().masked_fill(padding, -1), lengths.int())
