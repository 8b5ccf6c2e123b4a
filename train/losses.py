"""Losses of a draft's states against the target: through its frozen head, and aux hidden state by aux hidden state.

Letters: N rows, H hidden, Vd draft vocabulary, k candidates of a row, r rank of a bias.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cross_entropy import label_cross_entropy, soft_cross_entropy, taught_cross_entropy
from slipstream.kernels.loss_kinds import Kind
from slipstream.kernels.sampling.softcap import softcap
from slipstream.models.targets.frozen import FrozenTarget, no_autocast
from slipstream.train.text_noise import RowValues, best_with_noise, slices

LOGITS_AT_ONCE = 2**28  # 512 MiB in bf16
GATHERED_AT_ONCE = 2**27  # numbers of the head's rows that candidates gather: 256 MiB in bf16
Bias = tuple[Tensor, Tensor]  # of logits: factors (N, r) and rows (Vd, r), trained, of factors @ rows.T
Teach = Callable[[slice], Tensor]  # rows -> the target's logits (n, Vd) there
# Rows, and their states (n, H) in the head's dtype -> losses (n,) fp32, best rows of the head (n,), gradient (n, H).
Part = Callable[[slice, Tensor], tuple[Tensor, Tensor, Tensor | None]]


class TargetHead:
    """The rows of the target's frozen head that a draft without a head of its own is read with."""

    def __init__(self, target: FrozenTarget, ids: Tensor) -> None:
        """ids (Vd,) int64 ascending: the draft's vocabulary."""
        head = target.head.detach()
        self.ids = ids.to(head.device)  # kept there: a copy in every step would synchronise
        is_whole = len(ids) == len(head)
        bias = target.head_bias
        self.rows = head if is_whole else head[self.ids]  # (Vd, H)
        self.bias = bias if bias is None or is_whole else bias[self.ids]  # (Vd,), the target's alone
        self.cap = target.logit_softcap

    def predictions(self, states: Tensor, noise: RowValues | None = None) -> Tensor:
        """Target id of the best token at each state, (N, H) -> (N,), of the logits plus `noise`."""
        if noise is None:
            return self.ids[best_rows(states, self.rows)]

        def logits(part: slice) -> Tensor:
            with no_autocast(states.device):
                return states[part].to(self.rows.dtype) @ self.rows.t()

        return self.ids[best_with_noise(len(states), rows_at_once(self.rows), logits, noise)]

    @torch.no_grad()
    def teach(self, final: Tensor) -> Tensor:
        """The target's logits (N, Vd) at its states after its final norm (N, Ht)."""
        with no_autocast(final.device):
            logits = F.linear(final.to(self.rows.dtype), self.rows, self.bias)
        return logits if self.cap is None else softcap(logits, self.cap)

    @torch.no_grad()
    def teach_candidates(self, final: Tensor, candidates: Tensor) -> Tensor:
        """The target's logits of candidates (N, k), rows of the head: (N, k) fp32."""
        logits = gathered_logits(final, self.rows, candidates)
        logits = logits if self.bias is None else logits + self.bias[candidates]
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @torch.no_grad()
    def normalisers(self, final: Tensor) -> Tensor:
        """(N,) fp32 log of the sum of exp of the target's logits."""
        chunks = [self.teach(final[part]).float().logsumexp(dim=-1) for part in parts(len(final), self.rows)]
        return torch.cat(chunks) if chunks else final.new_zeros(0, dtype=torch.float32)


class _FrozenHeadLoss(torch.autograd.Function):
    """Loss and best token per row. The head gets no gradient, so the states' is made along with the loss, a part of
    the rows at a time: logits of all rows never exist together, and none are computed twice."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, loss_of: Part) -> tuple[Tensor, Tensor]:
        losses = states.new_empty(len(states), dtype=torch.float32)
        gradients = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        best = torch.empty(len(states), dtype=torch.int64, device=states.device)
        for part in parts(len(states), head):
            with no_autocast(states.device):
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


def head_losses(
    states: Tensor, head: Tensor, labels: Tensor, *, cap: float | None = None, candidates: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """states (N, H), head (Vd, H) frozen, labels (N,) rows of the head -> cross-entropies (N,) fp32, best rows (N,).

    `cap`: logits x become cap * tanh(x / cap). `candidates` (N, k) int64 is filled with each state's best rows, in
    order.
    """
    with_gradient = states.requires_grad

    def loss_of(part: slice, states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        logits, slope = capped(states @ head.t(), cap, with_slope=with_gradient)
        if candidates is not None:
            candidates[part] = logits.topk(candidates.shape[1], dim=-1).indices
        losses, best = label_cross_entropy(logits, labels[part], with_gradient=with_gradient)
        if not with_gradient:
            return losses, best, None
        return losses, best, (logits if slope is None else logits * slope) @ head  # the gradient is where logits were

    return _FrozenHeadLoss.apply(states, head, loss_of)


def capped(logits: Tensor, cap: float | None, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
    """cap * tanh(logits / cap), and its derivative; the logits and None without a cap."""
    if cap is None:
        return logits, None
    ratio = torch.tanh(logits.float() / cap)
    return (cap * ratio).to(logits.dtype), (1 - ratio.square()).to(logits.dtype) if with_slope else None


class WeightedLosses(NamedTuple):
    """Losses of rows that are read through a frozen head."""

    total: Tensor  # the rows' cross-entropies times their weights, summed; what has a gradient
    entropies: Tensor  # (N,) fp32 cross-entropies against the labels
    overlaps: Tensor  # (N,) fp32 sum min(p, q), by which the target accepts what the draft samples; 0 without a teacher
    best: Tensor  # (N,) best rows of the head


class _WeightedLoss(torch.autograd.Function):
    """As _FrozenHeadLoss, of rows whose weights are known beforehand: so a bias' rows can be trained, too, and their
    gradient is summed up along with the loss."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, features: Tensor | None, rows: Tensor | None, head: Tensor, loss_of: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        losses, entropies, overlaps = states.new_zeros(3, len(states), dtype=torch.float32)
        best = torch.empty(len(states), dtype=torch.int64, device=states.device)
        inputs = states, features, rows
        gradients = [
            torch.zeros_like(x) if x is not None and needed else None
            for x, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        with no_autocast(states.device):
            wide = None if rows is None else rows.to(head.dtype)
            for part in parts(len(states), head):
                part_features = None if features is None else features[part].to(head.dtype)
                bias = None if part_features is None or wide is None else part_features @ wide.t()
                columns, gradient, slope = loss_of(part, states[part].to(head.dtype) @ head.t(), bias)
                for column, values in zip((losses, entropies, overlaps, best), columns, strict=True):
                    column[part] = values
                if gradients[1] is not None and wide is not None:
                    gradients[1][part] = gradient @ wide
                if gradients[2] is not None and part_features is not None:
                    gradients[2] += gradient.t() @ part_features
                if gradients[0] is not None:
                    gradients[0][part] = (gradient if slope is None else gradient * slope) @ head
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(entropies, overlaps, best)
        return losses.sum(), entropies, overlaps, best

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if x is None else x * upstream[0].to(x.dtype) for x in ctx.saved_tensors)
        return *scaled, None, None


def weighted_losses(
    states: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    teach: Teach | None = None,
    *,
    bias: Bias | None = None,
    cap: float | None = None,
) -> WeightedLosses:
    """Cross-entropies of logits states @ head.T, capped, plus `bias`, against labels (N,), rows of the head, times
    `weights` (N,) fp32; and their overlaps with what `teach` gives.

    states (N, H), head (Vd, H) frozen.
    """
    features, rows = bias or (None, None)
    inputs = [x for x in (states, features, rows) if x is not None]
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)

    def loss_of(part: slice, logits: Tensor, bias: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        logits, slope = capped(logits, cap, with_slope=with_gradient)
        logits = logits if bias is None else logits + bias
        row_weights = weights[part]
        label = labels[part]
        if teach is not None:
            losses = taught_cross_entropy(logits, teach(part), label, row_weights, with_gradient=with_gradient)
            return losses, logits, slope
        entropies, best = label_cross_entropy(logits, label, with_gradient=with_gradient)
        if with_gradient:
            logits *= row_weights.to(logits.dtype).unsqueeze(1)
        return (row_weights * entropies, entropies, torch.zeros_like(entropies), best), logits, slope

    return WeightedLosses(*_WeightedLoss.apply(states, features, rows, head, loss_of))


class _GatheredLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, candidates: Tensor) -> Tensor:
        logits = states.new_empty(candidates.shape, dtype=torch.float32)
        with no_autocast(states.device):
            for part in gathered_parts(candidates, head):
                rows = head[candidates[part]]  # (n, k, H)
                logits[part] = (rows @ states[part].to(head.dtype).unsqueeze(2)).squeeze(2)
        ctx.save_for_backward(head, candidates)
        ctx.dtype = states.dtype
        return logits

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        head, candidates = ctx.saved_tensors
        gradient = upstream[0].new_empty(len(candidates), head.shape[1], dtype=ctx.dtype)
        with no_autocast(head.device):
            for part in gathered_parts(candidates, head):
                weighted = upstream[0][part].to(head.dtype).unsqueeze(1)
                gradient[part] = (weighted @ head[candidates[part]]).squeeze(1)
        return gradient, None, None


def gathered_logits(states: Tensor, head: Tensor, candidates: Tensor) -> Tensor:
    """states (N, H), candidates (N, k) rows of the frozen head (Vd, H) -> their logits (N, k) fp32. Rows are gathered a
    part at a time, in the backward pass again."""
    return _GatheredLogits.apply(states, head, candidates)


def gathered_parts(candidates: Tensor, head: Tensor) -> list[slice]:
    return slices(len(candidates), GATHERED_AT_ONCE // (candidates.shape[1] * head.shape[1]))


def distillation_loss(
    states: Tensor, head: Tensor, teach: Teach, weights: Tensor, kind: Kind = "soft_ce"
) -> tuple[Tensor, Tensor]:
    """Distance of the head's distribution at `states` (N, H) from the one that `teach` gives, times `weights` (N,)
    fp32, summed; and the best row of the head (Vd, H) at each state (N,)."""

    def loss_of(part: slice, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        teacher = teach(part)
        with torch.enable_grad():
            leaf = states.detach().requires_grad_()
            losses, best = soft_cross_entropy(leaf @ head.t(), teacher, weights[part], kind, in_place=head.is_cuda)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), best, gradient

    losses, best = _FrozenHeadLoss.apply(states, head, loss_of)
    return sum((losses[part].sum() for part in parts(len(states), head)), losses.new_zeros(())), best


def regression_losses(states: Tensor, aux_states: Tensor) -> Tensor:
    """both (N, H) -> (N,) fp32: smooth L1, its mean over H (EAGLE, arXiv 2401.15077, equation 4)."""
    with no_autocast(states.device):
        return F.smooth_l1_loss(states.float(), aux_states.float(), reduction="none").mean(dim=-1)


def best_rows(states: Tensor, head: Tensor) -> Tensor:
    """Row of the head (N,) that scores highest for each of states (N, H); ties go to the lowest."""
    with no_autocast(states.device):
        return torch.cat([(part.to(head.dtype) @ head.t()).argmax(dim=-1) for part in states.split(rows_at_once(head))])


def parts(num_rows: int, head: Tensor) -> list[slice]:
    """The rows, as many at a time as have LOGITS_AT_ONCE logits."""
    return slices(num_rows, rows_at_once(head))


def rows_at_once(head: Tensor) -> int:
    return max(1, LOGITS_AT_ONCE // len(head))
