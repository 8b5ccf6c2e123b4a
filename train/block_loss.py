"""How the slots of a block weigh, and their cross-entropy against the target's frozen head.

Letters: N blocks of S slots, M counting slots, H hidden, Vd draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cross_entropy import label_cross_entropy

GAMMAS = {8: 4.0, 10: 5.0, 16: 7.0}  # DFLASH's own choice by block size (arXiv 2602.06036)
DPACE_ALPHA = 0.5  # arXiv 2605.18810
LOGITS_AT_ONCE = 2**28  # 512 MiB in bf16


def default_gamma(size: int) -> float:
    """gamma of the decay for blocks of `size`: on the lines through DFLASH's own choices."""
    low, high = (8, 10) if size < 10 else (10, 16)
    return max(1.0, GAMMAS[low] + (size - low) * (GAMMAS[high] - GAMMAS[low]) / (high - low))


def decay_weights(size: int, gamma: float) -> Tensor:
    """(S - 1,) fp32: exp(-(k - 1) / gamma) for slots k = 1 .. S - 1."""
    return torch.exp(-torch.arange(size - 1) / gamma)


def dpace_weights(losses: Tensor, known: Tensor, counts: Tensor) -> Tensor:
    """(N, S - 1) fp32 weights of D-PACE: what a better slot k would add to the expected accepted length.

    losses (N, S - 1) cross-entropies where `known`; slots that count with a label outside the draft vocabulary are sure
    to fail. w_k = sum over j >= k of P_j, P_j = product over i <= j of (1 - alpha) exp(-loss_i) + alpha.
    """
    confidence = torch.where(known, torch.exp(-losses.detach()), 0.0)
    survival = ((1 - DPACE_ALPHA) * confidence + DPACE_ALPHA).cumprod(dim=1) * counts
    return survival.flip(1).cumsum(1).flip(1) * known


class FrozenHeadLoss(torch.autograd.Function):
    """Cross-entropy and best token per row; the head gets no gradient, so the rows' is made along with the loss, and no
    logits are kept or computed twice."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses = states.new_empty(len(states), dtype=torch.float32)
        gradients = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        best = torch.empty_like(labels)
        rows = rows_at_once(head)
        for start in range(0, len(states), rows):
            part = slice(start, start + rows)
            with torch.autocast(states.device.type, enabled=False):
                logits = states[part].to(head.dtype) @ head.t()
                losses[part], best[part] = label_cross_entropy(
                    logits, labels[part], with_gradient=gradients is not None
                )
                if gradients is not None:
                    gradients[part] = logits @ head  # the logits' gradient lies where they were
        ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(best)
        return losses, best

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * upstream[0].unsqueeze(1).to(gradients.dtype), None, None


def head_losses(states: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """states (M, H), head (Vd, H) frozen, labels (M,) rows of the head -> cross-entropies (M,) fp32, best rows (M,)."""
    return FrozenHeadLoss.apply(states, head, labels)


def best_rows(states: Tensor, head: Tensor) -> Tensor:
    """Row of the head (M,) that scores highest for each of states (M, H); ties go to the lowest."""
    parts = states.split(rows_at_once(head))
    with torch.autocast(states.device.type, enabled=False):
        return torch.cat([(part.to(head.dtype) @ head.t()).argmax(dim=-1) for part in parts])


def rows_at_once(head: Tensor) -> int:
    return max(1, LOGITS_AT_ONCE // len(head))
