"""Losses of a draft over its vocabulary, fused, so that no softmax is written: against the target's distribution
(`soft_cross_entropy`), and against labels, alone (`label_cross_entropy`) or along with the overlap of the two
distributions (`taught_cross_entropy`).

With p = softmax(teacher) and q = softmax(student), in fp32, a row's loss is

    soft_ce      -sum p log q         the draft learns the target's whole distribution, likely tokens most
    forward_kl   sum p log (p / q)    the same gradient; minus the entropy of p, so a perfect draft has loss 0
    reverse_kl   sum q log (q / p)    pulls the draft to the target's main mode, away from tokens the target excludes
    tv           1 - sum min(p, q)    the share that rejection sampling rejects; its gradient vanishes where p and q
                                      are far apart, so it suits a trained draft
    lk           -log sum min(p, q)   minus the log of the share accepted ("LK"): tv's direction, but no vanishing
    lk_lambda    l kl + (1 - l) tv    l = exp(-3 sum min(p, q)), not differentiated: forward_kl while little is
                                      accepted, later tv (LK, arXiv 2602.23881)

The forward kernel reads each row once (tv and lk twice) with running maxima (Milakov & Gimelshein 2018, arXiv
1805.02867), one program per row; the backward kernel recomputes both softmaxes from a row's saved maxima and sums and
can write the gradient over the student's logits. Labels need no backward kernel: a program reads its row two or three
times.
Letters: N rows, V columns (the draft's vocabulary). reverse_kl is infinite where q > 0 and the teacher's logit is -inf;
the others treat -inf as probability 0. The references compute float64 logits in float64.
"""

from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, on_gpu
from slipstream.kernels.loss_kinds import Kind

TILE = 2048  # columns per step of a program, at most
LEAST_TILE = 128
NUM_WARPS = 8
NUM_STATS = tl.constexpr(6)  # per row: student's maximum and log of its sum, the teacher's, and two of the loss
LEAST_OVERLAP = tl.constexpr(1e-30)  # below it lk is flat
ETA = tl.constexpr(3.0)  # of lk_lambda


@Op
def soft_cross_entropy(
    student: Tensor,
    teacher: Tensor,
    weights: Tensor,
    kind: Kind = "soft_ce",
    *,
    in_place: bool = False,  # noqa: ARG001, the kernel's
) -> tuple[Tensor, Tensor]:
    """(losses (N,) fp32, each times its weight; best (N,) int64, the student's likeliest column, ties to the lowest).

    student, teacher (N, V) logits of any float type, rows may be strided; weights (N,) fp32. Only the student gets a
    gradient; a row of weight 0 gets none, even if it holds NaN. `in_place` (GPU): backward writes the gradient over
    `student`, which must be the output of an operation that no later one reads; a second backward is then an error.
    """
    dtype = torch.promote_types(student.dtype, torch.float32)
    is_out = (weights == 0)[:, None]
    log_q = student.to(dtype).masked_fill(is_out, 0.0).log_softmax(dim=-1)
    log_p = teacher.detach().to(dtype).masked_fill(is_out, 0.0).log_softmax(dim=-1)
    return _row_losses(log_p, log_q, kind) * weights.detach(), student.detach().argmax(dim=-1)


@soft_cross_entropy.kernel(when=on_gpu)
def soft_cross_entropy_triton(
    student: Tensor, teacher: Tensor, weights: Tensor, kind: Kind = "soft_ce", *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    assert kind in get_args(Kind)
    assert student.shape == teacher.shape
    assert weights.shape == student.shape[:1]
    assert student.stride(1) == teacher.stride(1) == 1
    assert not (in_place and student.is_leaf and student.requires_grad), "would write over a parameter"
    return _SoftCrossEntropy.apply(student, teacher, weights, kind, in_place)


def _row_losses(log_p: Tensor, log_q: Tensor, kind: Kind) -> Tensor:
    """(N,) from log probabilities (N, V)."""
    p = log_p.exp()
    q = log_q.exp()
    if kind == "soft_ce":
        return -_expectation(p, log_q)
    if kind == "forward_kl":
        return _expectation(p, log_p - log_q)
    if kind == "reverse_kl":
        return _expectation(q, log_q - log_p)
    overlap = torch.minimum(p, q).sum(dim=-1)
    if kind == "lk_lambda":
        share = torch.exp(-ETA.value * overlap.detach())
        return share * _expectation(p, log_p - log_q) + (1 - share) * (1.0 - overlap)
    return 1.0 - overlap if kind == "tv" else -overlap.clamp(min=LEAST_OVERLAP.value).log()


def _expectation(weights: Tensor, terms: Tensor) -> Tensor:
    """sum weights * terms over columns; a weight of 0 takes an infinite term out."""
    return (weights * terms.masked_fill(weights == 0, 0.0)).sum(dim=-1)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, weights: Tensor, kind: Kind, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        N, V = student.shape
        losses = torch.empty(N, dtype=torch.float32, device=student.device)
        best = torch.empty(N, dtype=torch.int64, device=student.device)
        stats = torch.empty(N, NUM_STATS.value, dtype=torch.float32, device=student.device)
        if N:
            _soft_forward[(N,)](
                student, teacher, weights, losses, best, stats, student.stride(0), teacher.stride(0), V,
                LOSS=kind, TILE=_tile(V), num_warps=NUM_WARPS,
            )  # fmt: skip
        ctx.save_for_backward(student, teacher, weights, stats)
        ctx.mark_non_differentiable(best)
        ctx.kind = kind
        ctx.in_place = in_place
        return losses, best

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _best: Tensor) -> tuple[Tensor, None, None, None, None]:
        student, teacher, weights, stats = ctx.saved_tensors
        N, V = student.shape
        gradient = student.detach() if ctx.in_place else torch.empty_like(student)
        tile = _tile(V)
        if N:
            _soft_backward[(N, triton.cdiv(V, tile))](
                student, teacher, weights, stats, upstream, gradient,
                student.stride(0), teacher.stride(0), upstream.stride(0), gradient.stride(0), V,
                LOSS=ctx.kind, TILE=tile, num_warps=NUM_WARPS,
            )  # fmt: skip
        if ctx.in_place:
            torch.autograd.graph.increment_version(student)
        return gradient, None, None, None, None


def _tile(V: int) -> int:
    return min(max(triton.next_power_of_2(V), LEAST_TILE), TILE)


@triton.jit
def _soft_forward(
    student_ptr, teacher_ptr, weights_ptr, losses_ptr, best_ptr, stats_ptr, student_stride, teacher_stride, V,
    LOSS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """`moment` is the sum of exp(a - its maximum) * term; terms refer to the maxima so far and shift with them."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    # a finite stand-in for -inf: differences of maxima stay numbers
    s_peak = -1e30
    s_total = 0.0
    t_peak = -1e30
    t_total = 0.0
    moment = 0.0
    best_values = tl.full((TILE,), float("-inf"), tl.float32)
    best_columns = lanes
    for start in range(0, V, TILE):
        columns = start + lanes
        s = _load_tile(student_ptr, columns, V)
        t = _load_tile(teacher_ptr, columns, V)
        best_columns = tl.where(s > best_values, columns, best_columns)
        best_values = tl.maximum(s, best_values)
        s_next = tl.maximum(s_peak, tl.max(s, axis=0))
        t_next = tl.maximum(t_peak, tl.max(t, axis=0))
        s_scale = tl.exp(s_peak - s_next)
        t_scale = tl.exp(t_peak - t_next)
        s_exp = tl.exp(s - s_next)
        t_exp = tl.exp(t - t_next)
        s_shift = s_peak - s_next
        t_shift = t_peak - t_next  # of all columns before
        if LOSS == "soft_ce":
            terms = t_exp * tl.where(t_exp > 0.0, s_next - s, 0.0)
            moment = (moment - t_total * s_shift) * t_scale + tl.sum(terms, axis=0)
        if LOSS == "forward_kl" or LOSS == "lk_lambda":
            terms = t_exp * tl.where(t_exp > 0.0, (t - t_next) - (s - s_next), 0.0)
            moment = (moment + t_total * (t_shift - s_shift)) * t_scale + tl.sum(terms, axis=0)
        if LOSS == "reverse_kl":
            terms = s_exp * tl.where(s_exp > 0.0, (s - s_next) - (t - t_next), 0.0)
            moment = (moment + s_total * (s_shift - t_shift)) * s_scale + tl.sum(terms, axis=0)
        s_total = s_total * s_scale + tl.sum(s_exp, axis=0)
        t_total = t_total * t_scale + tl.sum(t_exp, axis=0)
        s_peak = s_next
        t_peak = t_next

    s_log = tl.log(s_total)
    t_log = tl.log(t_total)
    # saved for backward
    first = 0.0
    second = 0.0
    if LOSS == "soft_ce":
        loss = moment / t_total + s_log
    elif LOSS == "forward_kl":
        loss = moment / t_total + s_log - t_log
    elif LOSS == "reverse_kl":
        loss = moment / s_total + t_log - s_log
        first = loss
    else:
        for start in range(0, V, TILE):
            q = tl.exp(_load_tile(student_ptr, start + lanes, V) - s_peak - s_log)
            p = tl.exp(_load_tile(teacher_ptr, start + lanes, V) - t_peak - t_log)
            first += tl.sum(tl.minimum(p, q), axis=0)
            second += tl.sum(q * _is_below(q, p), axis=0)
        loss = 1.0 - first if LOSS == "tv" else -tl.log(tl.maximum(first, LEAST_OVERLAP))
        if LOSS == "lk_lambda":
            share = tl.exp(-(first * ETA))
            loss = share * (moment / t_total + s_log - t_log) + (1.0 - share) * (1.0 - first)

    weight = tl.load(weights_ptr + row)
    tl.store(losses_ptr + row, tl.where(weight == 0.0, 0.0, loss * weight))
    peak = tl.max(best_values, axis=0)
    tl.store(best_ptr + row, tl.min(tl.where(best_values == peak, best_columns, V - 1), axis=0).to(tl.int64))
    _store_stats(stats_ptr + row * NUM_STATS, s_peak, s_log, t_peak, t_log, first, second)


@triton.jit
def _soft_backward(
    student_ptr, teacher_ptr, weights_ptr, stats_ptr, upstream_ptr, gradient_ptr,
    student_stride, teacher_stride, upstream_stride, gradient_stride, V,
    LOSS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile is read before it is written, so the gradient may overwrite the student's logits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    scale = tl.load(weights_ptr + row) * tl.load(upstream_ptr + row * upstream_stride).to(tl.float32)
    end = tl.where(scale == 0.0, 0, V)  # rows of weight 0 are not read
    s = _load_tile(student_ptr + row * student_stride, columns, end)
    t = _load_tile(teacher_ptr + row * teacher_stride, columns, end)
    stats_ptr += row * NUM_STATS
    log_q = s - tl.load(stats_ptr) - tl.load(stats_ptr + 1)
    log_p = t - tl.load(stats_ptr + 2) - tl.load(stats_ptr + 3)
    q = tl.exp(log_q)
    p = tl.exp(log_p)
    first = tl.load(stats_ptr + 4)
    second = tl.load(stats_ptr + 5)
    if LOSS == "reverse_kl":
        gradient = q * tl.where(q > 0.0, log_q - log_p - first, 0.0)
    elif LOSS == "tv":
        gradient = q * (second - _is_below(q, p))
    elif LOSS == "lk":
        gradient = tl.where(first > LEAST_OVERLAP, q * (second - _is_below(q, p)) / first, 0.0)
    elif LOSS == "lk_lambda":
        share = tl.exp(-(first * ETA))
        gradient = share * (q - p) + (1.0 - share) * q * (second - _is_below(q, p))
    else:
        gradient = q - p
    gradient = tl.where(columns < end, scale * gradient, 0.0).to(gradient_ptr.dtype.element_ty)
    tl.store(gradient_ptr + row * gradient_stride + columns, gradient, mask=columns < V)


@triton.jit
def _load_tile(row_ptr, columns, end):
    """Logits of a row in fp32, -inf from `end` on."""
    return tl.load(row_ptr + columns, mask=columns < end, other=float("-inf")).to(tl.float32)


@triton.jit
def _store_stats(stats_ptr, s_peak, s_log, t_peak, t_log, first, second):
    tl.store(stats_ptr, s_peak)
    tl.store(stats_ptr + 1, s_log)
    tl.store(stats_ptr + 2, t_peak)
    tl.store(stats_ptr + 3, t_log)
    tl.store(stats_ptr + 4, first)
    tl.store(stats_ptr + 5, second)


@triton.jit
def _is_below(q, p):
    """Derivative of min(p, q) by q; a half at ties, as in torch."""
    return tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0))


@Op
def label_cross_entropy(logits: Tensor, labels: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """(losses (N,) fp32; best (N,) int64, each row's likeliest column, ties to the lowest).

    logits (N, V) of any float type, rows may be strided; labels (N,) int64 in 0 .. V - 1. `with_gradient` overwrites
    the logits with the gradient of each row's loss, softmax - onehot, computed in fp32 and rounded once. Builds no
    autograd graph: call it in the forward of an autograd function.
    """
    assert not logits.requires_grad
    label = labels.unsqueeze(1)
    best = logits.argmax(dim=-1)
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    losses = -log_q.gather(1, label).squeeze(1).float()
    if with_gradient:
        logits.copy_(log_q.exp_().scatter_add_(1, label, torch.full_like(label, -1, dtype=log_q.dtype)))
    return losses, best


@label_cross_entropy.kernel(when=on_gpu)
def label_cross_entropy_triton(logits: Tensor, labels: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor]:
    N, V = logits.shape
    assert labels.shape == (N,)
    assert not logits.requires_grad
    assert logits.stride(1) == labels.stride(0) == 1
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    best = torch.empty(N, dtype=torch.int64, device=logits.device)
    if N:
        _label_cross_entropy[(N,)](
            logits, None, labels, None, None, losses, None, best, logits.stride(0), 0, V,
            WITH_GRADIENT=with_gradient, TILE=_tile(V), num_warps=NUM_WARPS,
        )  # fmt: skip
    return losses, best


@Op
def taught_cross_entropy(
    logits: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor, *, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(losses (N,), each a cross-entropy times its weight; cross-entropies (N,) against the labels; overlaps
    sum min(p, q) (N,), all fp32; best (N,) int64, each row's likeliest column, ties to the lowest).

    logits, teacher (N, V) of any float type, rows may be strided; labels (N,) int64 in 0 .. V - 1; weights (N,) fp32.
    `with_gradient` overwrites the logits with the gradient of their row's loss, computed in fp32 and rounded once; a
    row of weight 0 gets none. Builds no autograd graph: call it in the forward of an autograd function.
    """
    assert not logits.requires_grad
    label = labels.unsqueeze(1)
    best = logits.argmax(dim=-1)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_q = logits.to(dtype).log_softmax(dim=-1)
    q = log_q.exp()
    entropies = -log_q.gather(1, label).squeeze(1)
    overlap = torch.minimum(teacher.to(dtype).log_softmax(dim=-1).exp(), q).sum(dim=-1)
    if with_gradient:
        gradient = q.scatter_add_(1, label, torch.full_like(label, -1, dtype=dtype))
        logits.copy_((gradient * weights.unsqueeze(1)).masked_fill_((weights == 0).unsqueeze(1), 0.0))
    return (entropies * weights).masked_fill(weights == 0, 0.0).float(), entropies.float(), overlap.float(), best


@taught_cross_entropy.kernel(when=on_gpu)
def taught_cross_entropy_triton(
    logits: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor, *, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, V = logits.shape
    assert teacher.shape == logits.shape
    assert labels.shape == weights.shape == (N,)
    assert not logits.requires_grad
    assert logits.stride(1) == teacher.stride(1) == labels.stride(0) == weights.stride(0) == 1
    losses, entropies, overlaps = torch.empty(3, N, dtype=torch.float32, device=logits.device)
    best = torch.empty(N, dtype=torch.int64, device=logits.device)
    if N:
        _label_cross_entropy[(N,)](
            logits, teacher, labels, weights, losses, entropies, overlaps, best, logits.stride(0), teacher.stride(0), V,
            WITH_GRADIENT=with_gradient, TILE=_tile(V), num_warps=NUM_WARPS,
        )  # fmt: skip
    return losses, entropies, overlaps, best


@triton.jit
def _label_cross_entropy(
    logits_ptr, teacher_ptr, labels_ptr, weights_ptr, losses_ptr, entropies_ptr, overlaps_ptr, best_ptr,
    stride, teacher_stride, V, WITH_GRADIENT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Without a teacher there are neither weights, losses times these, nor overlaps."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    label_logit = tl.load(logits_ptr + label).to(tl.float32)
    # a finite stand-in for -inf: differences of maxima stay numbers
    s_peak = -1e30
    s_total = 0.0
    t_peak = -1e30
    t_total = 0.0
    best_values = tl.full((TILE,), float("-inf"), tl.float32)
    best_columns = lanes
    for start in range(0, V, TILE):
        columns = start + lanes
        s = _load_tile(logits_ptr, columns, V)
        best_columns = tl.where(s > best_values, columns, best_columns)
        best_values = tl.maximum(s, best_values)
        s_peak, s_total = _add_tile(s, s_peak, s_total)
        if teacher_ptr is not None:
            t = _load_tile(teacher_ptr + row * teacher_stride, columns, V)
            t_peak, t_total = _add_tile(t, t_peak, t_total)

    s_log = tl.log(s_total)
    entropy = s_peak - label_logit + s_log
    tl.store(entropies_ptr + row, entropy)
    peak = tl.max(best_values, axis=0)
    tl.store(best_ptr + row, tl.min(tl.where(best_values == peak, best_columns, V - 1), axis=0).to(tl.int64))
    weight = 1.0
    if teacher_ptr is not None:
        t_log = tl.log(t_total)
        overlap = 0.0
        for start in range(0, V, TILE):
            q = tl.exp(_load_tile(logits_ptr, start + lanes, V) - s_peak - s_log)
            p = tl.exp(_load_tile(teacher_ptr + row * teacher_stride, start + lanes, V) - t_peak - t_log)
            overlap += tl.sum(tl.minimum(p, q), axis=0)
        weight = tl.load(weights_ptr + row)
        tl.store(losses_ptr + row, tl.where(weight == 0.0, 0.0, entropy * weight))
        tl.store(overlaps_ptr + row, overlap)
    if WITH_GRADIENT:
        tl.debug_barrier()  # every warp has read the row before one writes over it
        for start in range(0, V, TILE):
            columns = start + lanes
            q = tl.exp(_load_tile(logits_ptr, columns, V) - s_peak - s_log)
            gradient = q - tl.where(columns == label, 1.0, 0.0)
            if teacher_ptr is not None:
                gradient = tl.where(weight == 0.0, 0.0, gradient * weight)
            tl.store(logits_ptr + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < V)


@triton.jit
def _add_tile(x, peak, total):
    """The maximum so far and the sum of exponentials below it, with those of a tile."""
    higher = tl.maximum(peak, tl.max(x, axis=0))
    return higher, total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), axis=0)
