"""What scheduler and runner exchange."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SamplingMode = Literal["greedy", "plain", "full"]  # all requests greedy | temperature only | filters too


@dataclass(frozen=True, slots=True)
class HostProposal:
    """Proposals drafted on the host, in the layout of Proposal."""

    nodes: Tensor  # (2, B, N) int32 on the CPU, pinned for a GPU: tokens, unused ones -1, and parents
    scores: NDArray[np.float32]  # (B, N)
    counts: list[int]  # nodes in use, root included; 0: the request keeps its stored proposal
    kinds: list[int]  # from 1 up, higher where surer; serve/engine/widths.py counts acceptance by kind
