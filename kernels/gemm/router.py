"""Which experts of a mixture each token goes to, in one launch for any number of tokens.

A near-tie between two experts must not fall one way in a pass of one row and another way in a pass of many. So logits
are fp32 and sum the inputs in parts that the layer's shape alone fixes: programs side by side for few rows, one program
after another part for many. The last program of some rows chooses their experts, or some programs do, each for four
rows; the last of all sorts tokens by expert, for kernels/gemm/grouped.py, without the host.
Letters: T tokens, H inputs, E experts, k experts of a token, P = T * k pairs of a token and one of its experts.
"""

import functools
import math
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm.small_m import inputs_ahead
from slipstream.kernels.grid_sync import all_resident, barrier_wait, barriers, done_counters, is_last_done, new_words
from slipstream.kernels.launch import Op, pdl_options, prefetch
from slipstream.kernels.tiles import load_fp32, load_inputs, load_weights

DEPTH = 64  # inputs of a tile
PART = 256  # inputs of a part, at least
MAX_PARTS = 8
MAX_EXPERTS = 1024
PARALLEL_ROWS = 512  # up to here programs share the inputs
LOW_ROWS = 2048  # up to here more programs, of low tiles, pay more than reading weights less often
GROUP = 16  # rows whose experts are chosen at a time; without normalising, weights are added in an order of it
FEW_ROWS = 4  # a warp for each
LEAST_SUM = tl.constexpr(1e-20)  # of scores that weights are divided by
# Up to so many pairs, of at most a quarter of the experts, each pair is a block of its own. Of more pairs some share an
# expert: tokens of one request, which a round verifies, have many experts in common.
UNSORTED_PAIRS = 16
# Mean pairs of an expert, up to which a block has so many rows.
BLOCK_ROWS = ((4, 8), (8, 16), (24, 32), (96, 64))
LEAST_ROWS = 16  # of a block, for products that take as long with fewer


class Blocks(NamedTuple):
    """Pairs of the same expert, in blocks that a program computes."""

    rows: int  # of a block, at most
    pairs: Tensor  # (E, T) int32: the pairs of each expert, in any order
    first: Tensor  # (most blocks,) int32: where a block begins in the flattened `pairs`
    sizes: Tensor  # (most blocks,) int32: its pairs
    num_blocks: Tensor  # (1,) int32


class Scoring(NamedTuple):
    """How logits become the scores by which experts are chosen and weighed."""

    function: Literal["softmax", "sigmoid"] = "softmax"
    softcap: float | None = None
    """Logits x first become c * tanh(x / c)."""
    groups: int = 1
    """Experts are in groups of equal size, of which the best are chosen first, by the sum of their best two."""
    top_groups: int = 1
    """How many groups."""
    scale: float = 1.0
    """Factor of the weights."""


SOFTMAX = Scoring()


class Share(NamedTuple):
    """The experts that this rank has, of those that the router chooses from. They are numbered from 0, others -1."""

    first: int
    size: int


class Routing(NamedTuple):
    experts: Tensor  # (T, k) int32, the best first
    weights: Tensor  # (T, k) fp32
    blocks: Blocks | None = None  # None: each pair is a block


@Op
def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    normalise: bool,
    least_rows: int = LEAST_ROWS,  # noqa: ARG001
    scoring: Scoring = SOFTMAX,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
    share: Share | None = None,
) -> Routing:
    """The k experts with the highest scores of logits x (T, H) @ weight (E, H).T + bias (E,), the lower one of equals
    first. `correction` (E,) is added to scores for the choice alone (DeepSeek-V3, arXiv 2412.19437, equation 16).

    Weights are the scores, divided by their sum over the chosen experts if `normalise`, times the experts' `factors`
    (E,). least_rows: of a block, however few pairs an expert has. share: None: all experts are here.
    """
    logits = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if scoring.softcap is not None:
        logits = scoring.softcap * torch.tanh(logits / scoring.softcap)
    scores = logits.sigmoid() if scoring.function == "sigmoid" else logits.softmax(dim=-1)
    # Softmax keeps the order of the logits, which differ where scores are equal, but not that of groups.
    by_logits = correction is None and scoring.function == "softmax" and scoring.groups == 1
    preference = logits if by_logits else scores
    if correction is not None:
        preference = preference + correction.float()
    if scoring.groups > 1:
        groups = preference.unflatten(1, (scoring.groups, -1))
        best = groups.topk(2, dim=-1).values.sum(dim=-1).sort(dim=-1, descending=True, stable=True).indices
        is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best[:, : scoring.top_groups], False)
        preference = groups.masked_fill(is_out[..., None], -torch.inf).flatten(1)
    experts = preference.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    if scoring.function == "softmax":
        top = logits.gather(1, experts)
        total = (top if normalise else logits).logsumexp(dim=-1, keepdim=True)
        weights = (top - total).exp()
    else:
        weights = scores.gather(1, experts)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM.value) if normalise else weights
    weights = weights * scoring.scale
    weights = weights if factors is None else weights * factors[experts]
    if share is not None:
        numbers = experts - share.first
        experts = numbers.where((numbers >= 0) & (numbers < share.size), -1)
    return Routing(experts.int(), weights)


@route.kernel()
def route_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    normalise: bool,
    least_rows: int = LEAST_ROWS,
    scoring: Scoring = SOFTMAX,
    correction: Tensor | None = None,
    factors: Tensor | None = None,
    share: Share | None = None,
    block_rows: int | None = None,
) -> Routing:
    """`block_rows`: rows of a block; 1: unsorted."""
    num_rows, num_inputs = x.shape
    num_experts = len(weight)
    device = x.device
    assert num_experts <= MAX_EXPERTS
    assert factors is None or factors.is_contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    experts = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=device)
    first, num_local = share or (0, num_experts)
    block_rows = block_rows or choose_block_rows(num_rows * top_k, num_experts, least_rows, is_part=share is not None)
    blocks = None if block_rows == 1 else _empty_blocks(num_rows, top_k, num_local, block_rows, device)
    if num_rows == 0:
        return Routing(experts, weights, blocks)
    num_parts = max(1, min(MAX_PARTS, num_inputs // PART))
    is_parallel = num_rows <= PARALLEL_ROWS
    parallel = num_parts if is_parallel else 1
    low = GROUP, 32 if is_parallel else min(max(32, triton.next_power_of_2(num_experts)), 128)
    rows, tile = low if num_rows <= LOW_ROWS else (64, 64)
    logits = torch.empty(parallel, num_rows, num_experts, dtype=torch.float32, device=device)
    grid = triton.cdiv(num_rows, rows), triton.cdiv(num_experts, tile), parallel
    part = triton.cdiv(triton.cdiv(num_inputs, DEPTH), num_parts) * DEPTH
    assert weight.is_contiguous()
    is_shared = rows // FEW_ROWS <= math.prod(grid[1:]) and all_resident(device, math.prod(grid))
    # Only sums over all experts are added in an order of the tile.
    sums_all = scoring.function == "softmax" and not (normalise and correction is None and scoring.groups == 1)
    by_fours = not sums_all and (num_rows <= FEW_ROWS or is_shared)
    route_kernel[grid](
        x, weight, bias, correction, factors, logits, done_counters(device), barriers(device), pair_counts(device),
        experts, weights,
        *((None,) * 4 if blocks is None else blocks[1:]),
        x.stride(0), num_rows, num_inputs, part, first,
        EXPERTS=num_experts, LOCAL=num_local, PADDED=triton.next_power_of_2(num_experts), TOP_K=top_k,
        PADDED_K=triton.next_power_of_2(top_k), NORMALISE=normalise, SIGMOID=scoring.function == "sigmoid",
        SOFTCAP=scoring.softcap or 0.0, GROUPS=scoring.groups, TOP_GROUPS=scoring.top_groups, SCALE=scoring.scale,
        ROWS=rows, TILE=tile, DEPTH=DEPTH,
        PARTS=num_parts, PARALLEL=parallel, BLOCK=block_rows, EVEN=num_inputs % DEPTH == 0,
        GROUP=FEW_ROWS if by_fours else GROUP, SHARED=by_fours and num_rows > FEW_ROWS,
        AHEAD=inputs_ahead(weight, part, part * weight.element_size()) if is_parallel else 0,
        PRECISION="ieee", num_warps=4, num_stages=4, **pdl_options(device),
    )  # fmt: skip
    return Routing(experts, weights, blocks)


def choose_block_rows(num_pairs: int, num_experts: int, least_rows: int = LEAST_ROWS, *, is_part: bool = False) -> int:
    """is_part: a rank lists even few pairs, to leave out those of other ranks."""
    if not is_part and num_pairs <= min(UNSORTED_PAIRS, num_experts // 4):
        return 1
    mean = num_pairs / num_experts
    return max(least_rows, next((rows for max_mean, rows in BLOCK_ROWS if mean <= max_mean), 128))


def _empty_blocks(num_rows: int, top_k: int, num_experts: int, rows: int, device: torch.device) -> Blocks:
    """With room for the most blocks that there can be: where as many experts as possible are hit."""
    pairs = num_rows * top_k
    hit = min(num_experts, pairs)
    max_blocks = hit + (pairs - hit) // rows

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return Blocks(rows, empty(num_experts, num_rows), empty(max_blocks), empty(max_blocks), empty(1))


@functools.cache
def pair_counts(device: torch.device) -> Tensor:
    """(MAX_EXPERTS,) int32 that the kernel counts with, zero between launches, as `done_counters` are."""
    return new_words(device)[:MAX_EXPERTS]


@triton.jit(do_not_specialize=["num_rows", "first_expert"])
def route_kernel(
    x_ptr, weight_ptr, bias_ptr, correction_ptr, factors_ptr, logits_ptr, counters_ptr, points_ptr, counts_ptr,
    experts_ptr, weights_ptr,
    pairs_ptr, first_ptr, sizes_ptr, num_blocks_ptr, x_stride, num_rows, num_inputs, part, first_expert,
    EXPERTS: tl.constexpr, LOCAL: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr,
    NORMALISE: tl.constexpr, SIGMOID: tl.constexpr, SOFTCAP: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, PARALLEL: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS tokens (axis 0), TILE experts (axis 1), one of the parts or all of them (axis 2). When all programs of ROWS
    tokens are done, the last one chooses for them or, SHARED, some choose for GROUP of them each. Of the experts LOCAL
    are here, from `first_expert` on."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * TILE + tl.arange(0, TILE)
    weights = weight_ptr + tl.minimum(expert, EXPERTS - 1)[:, None] * num_inputs
    first = tl.program_id(2)
    bias = None
    if bias_ptr is not None:
        number = tl.arange(0, PADDED)
        bias = load_fp32(bias_ptr + number, number < EXPERTS)
    correction = None
    if correction_ptr is not None:
        number = tl.arange(0, PADDED)
        correction = tl.load(correction_ptr + number, mask=number < EXPERTS, other=0.0).to(tl.float32)
    if PDL:
        prefetch(weights, tl.minimum(first * part, num_inputs - AHEAD), AHEAD)
        tl.extra.cuda.gdc_wait()
    result = tl.zeros((TILE, ROWS), tl.float32)
    for index in range(first, first + PARTS // PARALLEL):
        acc = tl.zeros((TILE, ROWS), tl.float32)
        for start in range(index * part, tl.minimum((index + 1) * part, num_inputs), DEPTH):
            k = start + tl.arange(0, DEPTH)[None, :]
            x = load_inputs(x_ptr + row[:, None].to(tl.int64) * x_stride, k, row, num_rows, num_inputs, EVEN)
            weight = load_weights(weights + k, k, num_inputs, EVEN)
            acc = tl.dot(weight, tl.trans(x).to(weight.dtype), acc, input_precision=PRECISION)
        result += acc
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    cells = logits_ptr + (first.to(tl.int64) * num_rows + row)[:, None] * EXPERTS + expert[None, :]
    tl.store(cells, tl.trans(result), mask=(row < num_rows)[:, None] & (expert < EXPERTS)[None, :])
    place = tl.program_id(1) * PARALLEL + first
    programs = tl.num_programs(1) * PARALLEL
    start = 0
    count = tl.minimum(num_rows - tl.program_id(0) * ROWS, ROWS)
    choosers = 1
    if SHARED:
        choosers = ROWS // GROUP
        start = place * GROUP
        chooses = place < choosers
        count = tl.where(chooses, start + 1, 0)
        barrier_wait(points_ptr + tl.program_id(0), place == 0, programs, chooses)
    else:
        chooses = is_last_done(counters_ptr + tl.program_id(0), programs)
    if chooses:
        for begin in range(start, count, GROUP):
            rows = tl.program_id(0) * ROWS + begin + tl.arange(0, GROUP)
            _choose(
                logits_ptr, bias, correction, factors_ptr, experts_ptr, weights_ptr, counts_ptr, pairs_ptr, rows,
                num_rows, first_expert, EXPERTS, LOCAL, PADDED, TOP_K, PADDED_K, NORMALISE, SIGMOID, SOFTCAP, GROUPS,
                TOP_GROUPS, SCALE, PARALLEL, BLOCK,
            )  # fmt: skip
        if BLOCK > 1:  # noqa: SIM102  `and` would compile both sides
            if is_last_done(counters_ptr + tl.num_programs(0), tl.num_programs(0) * choosers):
                _list_blocks(counts_ptr, first_ptr, sizes_ptr, num_blocks_ptr, num_rows, LOCAL, PADDED, BLOCK)


@triton.jit
def _choose(
    logits_ptr, bias, correction, factors_ptr, experts_ptr, weights_ptr, counts_ptr, pairs_ptr, rows, num_rows,
    first_expert, EXPERTS: tl.constexpr, LOCAL: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr, NORMALISE: tl.constexpr, SIGMOID: tl.constexpr, SOFTCAP: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SCALE: tl.constexpr, PARALLEL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, PADDED)[None, :]
    choice = tl.arange(0, PADDED_K)[None, :]
    inside = (rows < num_rows)[:, None] & (expert < EXPERTS)
    logits = tl.zeros((rows.shape[0], PADDED), tl.float32)
    for index in tl.static_range(PARALLEL):
        cells = logits_ptr + (index * num_rows + rows)[:, None].to(tl.int64) * EXPERTS + expert
        logits += tl.load(cells, mask=inside, other=0.0, cache_modifier=".cg")
    if bias is not None:
        logits += bias[None, :]
    if SOFTCAP > 0:
        logits = SOFTCAP * (1 - 2 / (tl.exp(2 / SOFTCAP * logits) + 1))
    # By scores, or by logits where these have the same order.
    BY_SCORES: tl.constexpr = SIGMOID or correction is not None or GROUPS > 1
    scores = logits
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    elif BY_SCORES:
        highest = tl.max(tl.where(expert < EXPERTS, logits, float("-inf")), axis=1)
        scores = tl.exp(logits - highest[:, None])
        scores /= tl.sum(tl.where(expert < EXPERTS, scores, 0.0), axis=1)[:, None]
    preference = scores
    if correction is not None:
        preference += correction[None, :]
    keys = _sortable(preference, expert, PADDED)
    lowest = tl.full(keys.shape, -(1 << 63), tl.int64)
    keys = tl.where(expert < EXPERTS, keys, lowest)
    if GROUPS > 1:
        keys = _within_best_groups(keys, expert, lowest, EXPERTS // GROUPS, GROUPS, TOP_GROUPS)
    experts = tl.zeros((rows.shape[0], PADDED_K), tl.int32)
    weights = tl.zeros((rows.shape[0], PADDED_K), tl.float32)
    total = tl.zeros((rows.shape[0],), tl.float32)
    top = total
    for index in tl.static_range(TOP_K):
        best = tl.max(keys, axis=1)
        expert_number = PADDED - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        is_best = expert == expert_number[:, None]
        keys = tl.where(is_best, lowest, keys)
        if BY_SCORES:
            weight = tl.sum(tl.where(is_best, scores, 0.0), axis=1)
        else:
            score = _sorted_value(best)
            top = score if index == 0 else top
            weight = tl.exp(score - top)
        total += weight
        experts = tl.where(choice == index, expert_number[:, None], experts)
        weights = tl.where(choice == index, weight[:, None], weights)
    if BY_SCORES and not NORMALISE:
        total = tl.full(total.shape, 1.0, tl.float32)
    elif not NORMALISE:
        total = tl.sum(tl.where(expert < EXPERTS, tl.exp(logits - top[:, None]), 0.0), axis=1)
    elif BY_SCORES:
        total += LEAST_SUM
    weights /= total[:, None]
    if SCALE != 1:
        weights *= SCALE
    valid = (rows < num_rows)[:, None] & (choice < TOP_K)
    if factors_ptr is not None:
        weights *= load_fp32(factors_ptr + experts, valid)
    pair = rows[:, None] * TOP_K + choice
    tl.store(weights_ptr + pair, weights, mask=valid)
    is_listed = valid
    if LOCAL < EXPERTS:
        experts -= first_expert
        is_here = (experts >= 0) & (experts < LOCAL)
        experts = tl.where(is_here, experts, -1)
        is_listed = valid & is_here
    tl.store(experts_ptr + pair, experts, mask=valid)
    if BLOCK > 1:
        place = tl.atomic_add(counts_ptr + experts, 1, mask=is_listed, sem="relaxed")
        tl.store(pairs_ptr + experts * num_rows + place, pair, mask=is_listed)


@triton.jit
def _sortable(values, expert, PADDED: tl.constexpr):
    """Integers in the order of fp32 values above the expert's number, so that choices differ even where values are
    NaN."""
    bits = values.to(tl.int32, bitcast=True)  # not of -0, since sums begin with 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (PADDED - 1 - expert).to(tl.int64)


@triton.jit
def _sorted_value(keys):
    high = (keys >> 32).to(tl.int32)
    return (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _within_best_groups(
    keys, expert, lowest, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr
):  # fmt: skip
    """Keys of the experts of the groups whose two best have the highest sums; the lower one of equal groups first."""
    PADDED_GROUPS: tl.constexpr = triton.next_power_of_2(GROUPS)
    group = tl.arange(0, PADDED_GROUPS)[None, :]
    sums = tl.zeros((keys.shape[0], PADDED_GROUPS), tl.float32)
    for index in tl.static_range(GROUPS):
        members = tl.where(expert // SIZE == index, keys, lowest)
        first = tl.max(members, axis=1)
        second = tl.max(tl.where(members == first[:, None], lowest, members), axis=1)
        sums = tl.where(group == index, (_sorted_value(first) + _sorted_value(second))[:, None], sums)
    ranks = tl.where(group < GROUPS, _sortable(sums, group, PADDED_GROUPS), -(1 << 63))
    is_in = expert < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(ranks, axis=1)
        number = PADDED_GROUPS - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        ranks = tl.where(group == number[:, None], -(1 << 63), ranks)
        is_in = is_in | (expert // SIZE == number[:, None])
    return tl.where(is_in, keys, lowest)


@triton.jit
def _list_blocks(
    counts_ptr, first_ptr, sizes_ptr, num_blocks_ptr, num_rows,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, PADDED)
    counts = tl.load(counts_ptr + expert, mask=expert < EXPERTS, other=0, cache_modifier=".cg")
    blocks = tl.cdiv(counts, BLOCK)
    ends = tl.cumsum(blocks, 0)
    tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    for index in range(0, tl.max(blocks, axis=0)):
        place = ends - blocks + index
        inside = index < blocks
        tl.store(first_ptr + place, expert * num_rows + index * BLOCK, mask=inside)
        tl.store(sizes_ptr + place, tl.minimum(counts - index * BLOCK, BLOCK), mask=inside)
    tl.store(counts_ptr + expert, 0, mask=expert < EXPERTS)
