"""The noise with which a target may have said a text, for replaying a server at T > 0.

At T > 0 target and draft sample with the same noise, so how many drafted tokens are accepted depends on noise that a
text does not keep. Its distribution given the text is known, though: a token is the argmax of logit / T + gumbel; the
argmax and the maximum are independent, the maximum is Gumbel distributed around the logsumexp, and all other terms are
Gumbel variables truncated at the maximum (Maddison, Tarlow, Minka 2014, arXiv 1411.0030, section 3). With noise from
this distribution a draft accepts on average what it accepts when it is served.

Letters: R rows, V target and Vd draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.sampling.sample import gumbel

NOISE_COST = 8  # times the memory of some rows' logits that their noise takes while it is computed
RowValues = Callable[[slice], Tensor]  # rows -> numbers (R, Vd) there


def noise_behind(tokens: Tensor, logits: Tensor, keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise (R, Vd) fp32 of the target ids `ids` (Vd,), given that argmax(logits + noise) is `tokens` (R,).

    logits (R, V): the target's, divided by the temperature. keys and positions (R,) int64 seed the samples.
    """
    logits = logits.float()
    no_token = ids.new_tensor([logits.shape[1]])  # an id of its own for the noise of the maximum
    maximum = logits.logsumexp(dim=1, keepdim=True) + gumbel(keys, positions, no_token)  # (R, 1)
    draft_logits = logits[:, ids]
    truncated = -torch.logaddexp(-maximum, -(draft_logits + gumbel(keys, positions, ids)))
    return torch.where(ids == tokens[:, None], maximum, truncated) - draft_logits


def best_with_noise(num_rows: int, size: int, logits: RowValues, noise: RowValues) -> Tensor:
    """Argmax (num_rows,) of logits plus noise, for a NOISE_COSTth of `size` rows at a time."""
    parts = slices(num_rows, size // NOISE_COST)
    best = [(logits(part).float() + noise(part)).argmax(dim=-1) for part in parts]
    return torch.cat(best) if best else torch.empty(0, dtype=torch.int64)


def slices(count: int, size: int) -> list[slice]:
    """All of so many rows, `size` at a time, or one."""
    size = max(1, size)
    return [slice(start, start + size) for start in range(0, count, size)]
