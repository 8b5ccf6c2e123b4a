"""Losses of a draft's states against the target: through its frozen head, and aux hidden state by aux hidden state.

Letters: N rows, H hidden, Vd draft vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cross_entropy import label_cross_entropy, soft_cross_entropy
from slipstream.models.targets.frozen import FrozenTarget

LOGITS_AT_ONCE = 2**28  # 512 MiB in bf16
Teach = Callable[[slice], Tensor]  # rows -> the target's logits (n, Vd) there
# Rows, and their states (n, H) in the head's dtype -> losses (n,) fp32, best rows of the head (n,), gradient (n, H).
Part = Callable[[slice, Tensor], tuple[Tensor, Tensor, Tensor | None]]


class TargetHead:
    """The rows of the target's frozen head that a draft without a head of its own is read with."""

    def __init__(self, target: FrozenTarget, ids: Tensor) -> None:
        """ids (Vd,) int64 ascending: the draft's vocabulary."""
        head = target.head.detach()
        self.ids = ids.to(head.device)  # kept there: a copy in every step would synchronise
        self.rows = head if len(ids) == len(head) else head[self.ids]  # (Vd, H)

    def predictions(self, states: Tensor) -> Tensor:
        """Target id of the best token at each state: (N, H) -> (N,)."""
        return self.ids[best_rows(states, self.rows)]


class _FrozenHeadLoss(torch.autograd.Function):
    """Loss and best token per row. The head gets no gradient, so the states' is made along with the loss, a part of
    the rows at a time: logits of all rows never exist together, and none are computed twice."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, loss_of: Part) -> tuple[Tensor, Tensor]:
        losses = states.new_empty(len(states), dtype=torch.float32)
        gradients = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        best = torch.empty(len(states), dtype=torch.int64, device=states.device)
        for part in parts(len(states), head):
            with torch.autocast(states.device.type, enabled=False):
                losses[part], best[part], gradient = loss_of(part, states[part].to(head.dtype))
            if gradients is not None and gradient is not None:
                gradients[part] = gradient
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(best)
        return losses, best

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * upstream[0].unsqueeze(1).to(gradients.dtype), None, None


def head_losses(states: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """states (N, H), head (Vd, H) frozen, labels (N,) rows of the head -> cross-entropies (N,) fp32, best rows (N,)."""
    with_gradient = states.requires_grad

    def loss_of(part: slice, states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = states @ head.t()
        losses, best = label_cross_entropy(logits, labels[part], with_gradient=with_gradient)
        return losses, best, logits @ head if with_gradient else None  # the gradient lies where the logits were

    return _FrozenHeadLoss.apply(states, head, loss_of)


def distillation_loss(states: Tensor, head: Tensor, teach: Teach, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the head's distribution at `states` (N, H) against the one that `teach` gives, times `weights`
    (N,) fp32, summed; and the best row of the head (Vd, H) at each state (N,)."""

    def loss_of(part: slice, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        teacher = teach(part)
        with torch.enable_grad():
            leaf = states.detach().requires_grad_()
            losses, best = soft_cross_entropy(leaf @ head.t(), teacher, weights[part], in_place=head.is_cuda)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), best, gradient

    losses, best = _FrozenHeadLoss.apply(states, head, loss_of)
    return sum((losses[part].sum() for part in parts(len(states), head)), losses.new_zeros(())), best


def regression_losses(states: Tensor, aux_states: Tensor) -> Tensor:
    """both (N, H) -> (N,) fp32: smooth L1, its mean over H (EAGLE, arXiv 2401.15077, equation 4)."""
    with torch.autocast(states.device.type, enabled=False):
        return F.smooth_l1_loss(states.float(), aux_states.float(), reduction="none").mean(dim=-1)


def best_rows(states: Tensor, head: Tensor) -> Tensor:
    """Row of the head (N,) that scores highest for each of states (N, H); ties go to the lowest."""
    with torch.autocast(states.device.type, enabled=False):
        return torch.cat([(part.to(head.dtype) @ head.t()).argmax(dim=-1) for part in states.split(rows_at_once(head))])


def parts(num_rows: int, head: Tensor) -> list[slice]:
    """The rows, as many at a time as have LOGITS_AT_ONCE logits."""
    size = rows_at_once(head)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def rows_at_once(head: Tensor) -> int:
    return max(1, LOGITS_AT_ONCE // len(head))
