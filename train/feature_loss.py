"""How far predicted features are from the target's, in themselves and in what the target's frozen head makes of them.

Letters: N rows, H hidden, V target and Vd draft vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cross_entropy import soft_cross_entropy
from slipstream.train.block_loss import rows_at_once

Teach = Callable[[slice], Tensor]  # rows -> the target's logits (n, Vd) there


def regression_losses(states: Tensor, features: Tensor) -> Tensor:
    """states and features (N, H) -> (N,) fp32: smooth L1, its mean over H (EAGLE, arXiv 2401.15077, equation 4)."""
    with torch.autocast(states.device.type, enabled=False):
        return F.smooth_l1_loss(states.float(), features.float(), reduction="none").mean(dim=-1)


def distillation_loss(states: Tensor, head: Tensor, teach: Teach, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the head's distribution at `states` (N, H) against the one that `teach` gives, times `weights`
    (N,) fp32, summed; and the best row of the head (Vd, H) at each state (N,)."""
    return _Distillation.apply(states, head, teach, weights)


class _Distillation(torch.autograd.Function):
    """The head gets no gradient, so the states' is made along with the loss, a part of the rows at a time: logits of
    all rows never exist together."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, teach: Teach, weights: Tensor) -> tuple[Tensor, Tensor]:
        loss = states.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(states)
        best = torch.empty(len(states), dtype=torch.int64, device=states.device)
        rows = rows_at_once(head)
        for start in range(0, len(states), rows):
            part = slice(start, start + rows)
            teacher = teach(part)
            with torch.enable_grad(), torch.autocast(states.device.type, enabled=False):
                leaf = states[part].detach().to(head.dtype).requires_grad_()
                losses, best[part] = soft_cross_entropy(leaf @ head.t(), teacher, weights[part], in_place=head.is_cuda)
                (gradient[part],) = torch.autograd.grad(losses.sum(), leaf)
            loss += losses.detach().sum()
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None
