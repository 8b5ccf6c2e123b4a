"""Router and experts against a loop over tokens in fp64, in every format, and a row's bits among any others."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.collectives.tree import add_along_tree
from slipstream.kernels.gemm import fp8, grouped_fp8, int4_weight
from slipstream.kernels.gemm import grouped as grouped_gemm
from slipstream.kernels.gemm.choose import EXPERT_ROWS, SUMMED_ROWS, choose, device_of
from slipstream.kernels.gemm.expert_weights import ExpertMatrix, FP8Weight, format_of
from slipstream.kernels.gemm.grouped import (
    FEW_ROWS,
    TILINGS,
    Clamped,
    ExpertWeights,
    Leaves,
    Shared,
    Tiling,
    activate,
    least_block_rows,
    least_rows,
    mix_experts,
    mix_experts_triton,
)
from slipstream.kernels.gemm.linear import gated_linear
from slipstream.kernels.gemm.mxfp4 import (
    WIDEST,
    MXFP4Weight,
    decode,
    dequantize_words,
    pack_words,
)
from slipstream.kernels.gemm.router import Routing, Scoring, Share, choose_block_rows, pair_counts, route, route_triton
from slipstream.kernels.norm import rms_norm
from slipstream.tests.kernels.mxfp4_files import dequantize_mxfp4
from slipstream.tests.kernels.triton_runs import TOLERANCES, each_device, poisoned, replayed
from slipstream.tests.pairwise import gate_of, grouped, rotating, some_of
from slipstream.tests.quantized_targets import rounded

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TINY = {rows: Tiling(32, 32, 1) for rows in (1, 8, 16, 32)}  # by block rows: few steps of the interpreter
SHAPES = [(1, 40, 24, 4, 2), (5, 64, 33, 6, 3), (37, 32, 32, 5, 1), (70, 48, 16, 9, 3)]  # T, H, I, E, k
A3B = (2048, 768, 128, 8)  # H, I, E, k of Qwen3-30B-A3B
REAL = {"a3b": A3B, "mixtral": (4096, 14336, 8, 2), "gpt-oss": (2880, 2880, 32, 4), "qwen2": (3584, 2560, 64, 8)}
ROWS = [1, 2, 3, 4, 5, 8, 16, 17, 32, 64, 65, 100, 128, 200, 512, 513, 1000, 2048]


def random_layer(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, is_gpt_oss: bool = False
) -> tuple[Tensor, Tensor | None, ExpertWeights]:
    """Router weight and bias, and the experts."""
    size, intermediate, experts, _ = shape
    generator = torch.Generator(device).manual_seed(experts)

    def random(*sizes, scale=1.0):
        return (scale * torch.randn(sizes, generator=generator, device=device)).to(dtype)

    gate_up = random(experts, 2 * intermediate, size, scale=size**-0.5)
    down = random(experts, size, intermediate, scale=intermediate**-0.5)
    biases = (random(experts, 2 * intermediate), random(experts, size)) if is_gpt_oss else (None, None)
    clamped = Clamped(1.702, 1.5) if is_gpt_oss else None
    router = random(experts, size, scale=size**-0.5)
    return router, random(experts) if is_gpt_oss else None, ExpertWeights(gate_up, down, *biases, clamped)


def random_rows(count: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """With strides, as parts of a wider tensor have them."""
    generator = torch.Generator(device).manual_seed(count)
    return torch.randn(count, size + 16, generator=generator, device=device).to(dtype)[:, :size]


def loop(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    shared: Shared | None = None,
    inputs: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Token by token, in fp64; `inputs` rounds what products read."""
    gate_up, down, gate_up_bias, down_bias = (None if w is None else w.double() for w in weights[:4])
    rows = []
    for row, experts, shares in zip(x.double(), routing.experts.tolist(), routing.weights.tolist(), strict=True):
        total = torch.zeros_like(row)
        for expert, share in zip(experts, shares, strict=True):
            hidden = gate_up[expert] @ inputs(row) + (0 if gate_up_bias is None else gate_up_bias[expert])
            output = down[expert] @ inputs(activate(hidden, weights.activation))
            total += share * (output + (0 if down_bias is None else down_bias[expert]))
        rows.append(total)
    if shared is None:
        return torch.stack(rows)
    factor = 1 if shared.gate is None else shared.gate.double().sigmoid()
    return torch.stack(rows) + factor * shared.output.double()


def random_shared(kind: str, rows: int, size: int, dtype: torch.dtype, device: str) -> Shared | None:
    """Outputs of a shared expert: "gated", "plain" without a gate, or "none"."""
    outputs = random_rows(rows, size + 1, dtype, device)
    gate = outputs[:, size:].contiguous() if kind == "gated" else None
    return None if kind == "none" else Shared(outputs[:, :size].contiguous(), gate)


def quantized_matrix(kind: str, outputs: int, inputs: int, experts: int, device: str) -> tuple[ExpertMatrix, Tensor]:
    """Random codes and scales of a format, and the matrix that they mean in fp64."""
    generator = torch.Generator(device).manual_seed(outputs)

    def codes(*shape, end=256):
        return torch.randint(end, shape, generator=generator, device=device).byte()

    def scales(*shape):
        return (1 + torch.rand(shape, generator=generator, device=device)) * inputs**-0.5

    if kind == "mxfp4":
        blocks = codes(experts, outputs, inputs // 32, 16)
        exponents = codes(experts, outputs, inputs // 32, end=4) + 121
        value = dequantize_mxfp4(blocks, exponents).double()
        return MXFP4Weight(*pack_words(blocks, exponents), inputs), value
    if kind.startswith("int4"):
        numbers = codes(experts, outputs, inputs, end=16)
        weight_scales = scales(experts, outputs, -(-inputs // 32)) / 4
        zeros = codes(*weight_scales.shape, end=16) if kind == "int4 zeros" else None
        spread = torch.arange(inputs, device=device) // 32
        value = numbers.double() - (8 if zeros is None else zeros.double()[..., spread])
        weight_scales = weight_scales.to(torch.bfloat16 if device == "cuda" else torch.float16)
        words = torch.stack([int4_weight.pack_codes(number) for number in numbers])
        scales_of_units, zeros_of_units = (
            None if units is None else torch.stack([int4_weight.pack_units(matrix, 32, inputs) for matrix in units])
            for units in (weight_scales, None if zeros is None else zeros.to(torch.int16))
        )
        value = (
            (value * weight_scales.double()[..., spread])
            .to(torch.bfloat16 if device == "cuda" else torch.float32)
            .double()
        )
        return int4_weight.Int4Weight(words, scales_of_units, zeros_of_units, 32, inputs), value
    weight = torch.randn(experts, outputs, inputs, generator=generator, device=device).to(fp8.E4M3)
    static = torch.tensor(0.02, device=device) if kind == "fp8 static" else None
    if kind == "fp8 blocks":
        weight_scales = scales(experts, outputs // 128, -(-inputs // 128))
        spread_scales = weight_scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[..., :inputs]
    else:
        weight_scales = scales(experts, outputs)
        spread_scales = weight_scales[..., None]
    matrix = FP8Weight(weight, weight_scales, fp8.InputScales(static, kind == "fp8 blocks"))
    return matrix, weight.double() * spread_scales.double()


def quantized_experts(kind: str, shape: tuple[int, int, int, int], device: str) -> tuple[ExpertWeights, ExpertWeights]:
    """As stored, and as plain numbers in fp64; MXFP4 with biases and a clamped activation, as gpt-oss has it."""
    size, intermediate, experts, _ = shape
    gate_up, wide_gate_up = quantized_matrix(kind, 2 * intermediate, size, experts, device)
    down, wide_down = quantized_matrix(kind, size, intermediate, experts, device)
    if kind != "mxfp4":
        return ExpertWeights(gate_up, down), ExpertWeights(wide_gate_up, wide_down)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    gate_up_bias = torch.randn(experts, 2 * intermediate, device=device).to(dtype)
    down_bias = torch.randn(experts, size, device=device).to(dtype)
    clamped = Clamped(1.702, 1.5)
    return (
        ExpertWeights(gate_up, down, gate_up_bias, down_bias, clamped),
        ExpertWeights(wide_gate_up, wide_down, gate_up_bias, down_bias, clamped),
    )


@grouped()
@each_device
@pytest.mark.parametrize(("shape", "dtype", "normalise"), rotating(SHAPES, DTYPES, [True, False]))
def test_tokens_go_to_their_best_experts(shape, dtype, normalise, device):
    rows, size, _, experts, top_k = shape
    router, bias, _ = random_layer(shape[1:], dtype, device, is_gpt_oss=True)
    x = random_rows(rows, size, dtype, device)
    logits = x.double() @ router.double().t() + bias.double()
    best = logits.topk(top_k)  # there are no ties
    expected = logits.softmax(dim=-1).gather(1, best.indices)
    expected = expected / expected.sum(dim=-1, keepdim=True) if normalise else expected
    for run in (route.reference, route_triton):
        with poisoned():
            routing = run(x, router, bias, top_k, normalise)
        assert torch.equal(routing.experts.long(), best.indices)
        torch.testing.assert_close(routing.weights.double(), expected, atol=1e-5, rtol=1e-4)


def scores_of(logits: Tensor, scoring: Scoring) -> Tensor:
    """Scores in fp64, as the papers have them."""
    if scoring.softcap is not None:
        logits = scoring.softcap * torch.tanh(logits / scoring.softcap)
    return logits.sigmoid() if scoring.function == "sigmoid" else logits.softmax(dim=-1)


def preferred(preference: list[float], scoring: Scoring, top_k: int) -> list[int]:
    """The experts of one token, by sorting."""
    size = len(preference) // scoring.groups
    groups = [list(range(start, start + size)) for start in range(0, len(preference), size)]
    if scoring.groups > 1:
        groups.sort(key=lambda group: -sum(sorted(preference[expert] for expert in group)[-2:]))
        groups = groups[: scoring.top_groups]
    members = sorted(expert for group in groups for expert in group)
    return sorted(members, key=lambda expert: -preference[expert])[:top_k]


@grouped()
@each_device
@pytest.mark.parametrize(
    ("scoring", "experts", "rows", "corrects", "normalise"),
    rotating(
        [
            Scoring("sigmoid"),
            Scoring("sigmoid", groups=4, top_groups=2, scale=2.5),
            Scoring("sigmoid", softcap=1.5),
            Scoring("sigmoid", groups=3, top_groups=1),
            Scoring(scale=0.5),
            Scoring(groups=2, top_groups=1),
            Scoring("softmax", softcap=0.7),
        ],
        [12, 24, 48],
        [1, 3, 20, 40],
        [True, True, False],
        [True, False],
    ),
)
def test_scores_corrections_and_groups_choose_as_sorting_does(scoring, experts, rows, corrects, normalise, device):
    """The correction counts for the choice alone, and groups by their two best."""
    router, _, _ = random_layer((64, 16, experts, 3), torch.float32, device)
    x = random_rows(rows, 64, torch.float32, device)
    correction = torch.randn(experts, generator=torch.Generator().manual_seed(3)).to(device) if corrects else None
    scores = scores_of(x.double() @ router.double().t(), scoring)
    preference = scores if correction is None else scores + correction.double()
    best = torch.tensor([preferred(row, scoring, 3) for row in preference.tolist()], device=device)
    weights = scores.gather(1, best)
    weights = scoring.scale * (weights / weights.sum(dim=-1, keepdim=True) if normalise else weights)
    for run in (route.reference, route_triton):
        with poisoned():
            routing = run(x, router, None, 3, normalise, scoring=scoring, correction=correction)
        assert torch.equal(routing.experts.long(), best)
        torch.testing.assert_close(routing.weights.double(), weights, atol=1e-5, rtol=1e-4)


@each_device
@pytest.mark.parametrize(("rows", "normalise", "dtype"), [(1, True, torch.bfloat16), (37, False, torch.float32)])
def test_factors_of_experts_multiply_the_weights_alone(rows, normalise, dtype, device):
    """As Gemma 4's: bit for bit the product of two operators."""
    router, _, _ = random_layer((64, 16, 24, 3), torch.float32, device)
    x = random_rows(rows, 64, torch.float32, device)
    factors = (torch.rand(24, generator=torch.Generator().manual_seed(4)) + 0.5).to(device, dtype)
    for run in (route.reference, route_triton):
        plain = run(x, router, None, 3, normalise)
        routing = run(x, router, None, 3, normalise, factors=factors)
        assert torch.equal(routing.experts, plain.experts)
        assert torch.equal(routing.weights, plain.weights * factors[plain.experts.long()])


@each_device
@pytest.mark.parametrize("block_rows", [2, 16])
def test_blocks_hold_every_pair_once_and_one_expert_each(block_rows, device):
    router, _, _ = random_layer((32, 8, 6, 2), torch.float32, device)
    x = random_rows(40, 32, torch.float32, device)
    for _ in range(2):  # counts are zero again
        routing = route_triton(x, router, None, 2, True, block_rows=block_rows)
        assert not pair_counts(x.device).any()
    count = routing.blocks.num_blocks.item()
    pairs = routing.blocks.pairs.flatten().tolist()
    listed = []
    for first, size in zip(routing.blocks.first[:count].tolist(), routing.blocks.sizes[:count].tolist(), strict=True):
        assert 1 <= size <= block_rows
        block = pairs[first : first + size]
        assert {routing.experts.flatten()[pair].item() for pair in block} == {first // 40}
        listed += block
    assert sorted(listed) == list(range(80))


@each_device
def test_of_equal_experts_the_lowest_is_chosen_and_nan_chooses_different_ones(device):
    x = torch.ones(3, 32, device=device)
    x[1] = 0
    x[2, 0] = float("nan")
    router = torch.zeros(7, 32, device=device)
    router[[2, 5]] = 1.0
    for run in (route.reference, route_triton):
        experts = run(x, router, None, 3, True).experts.tolist()
        assert experts[:2] == [[2, 5, 0], [0, 1, 2]]
        assert len(set(experts[2])) == 3
        assert set(experts[2]) <= set(range(7))
        scoring = Scoring("sigmoid", groups=4, top_groups=2)
        experts = run(x, router.repeat(2, 1)[:12], None, 3, True, scoring=scoring).experts.tolist()
        assert experts[:2] == [[2, 5, 0], [0, 1, 2]], "2 and 5 of the first two groups, not 9 of the last"
        assert len(set(experts[2])) == 3


@grouped()
@each_device
@pytest.mark.parametrize(
    ("shape", "dtype", "kind", "sharing"),
    rotating(SHAPES, DTYPES, ["gpt-oss", "silu", "gelu"], ["none", "gated", "plain"]),
)
def test_outputs_are_those_of_a_loop_over_tokens(shape, dtype, kind, sharing, device):
    rows, size, _, experts, top_k = shape
    router, bias, weights = random_layer(shape[1:], dtype, device, kind == "gpt-oss")
    weights = weights._replace(activation="gelu_tanh") if kind == "gelu" else weights
    x = random_rows(rows, size, dtype, device)
    shared = random_shared(sharing, rows, size, dtype, device)
    expected = loop(x, route.reference(x, router, bias, top_k, True), weights, shared)
    tolerance = {"atol": 4 * TOLERANCES[dtype], "rtol": 4 * TOLERANCES[dtype]}
    mixed = mix_experts.reference(x, route.reference(x, router, bias, top_k, True), weights, shared)
    torch.testing.assert_close(mixed.double(), expected, **tolerance)
    for block_rows in TINY if rows < 64 else (16, 32):
        routing = route_triton(x, router, bias, top_k, True, block_rows=block_rows)
        with poisoned():
            mixed = mix_experts_triton(x, routing, weights, shared, TINY[block_rows])
        assert mixed.dtype == dtype
        torch.testing.assert_close(mixed.double(), expected, **tolerance)


@each_device
@pytest.mark.parametrize(
    ("is_gpt_oss", "sharing"),
    gate_of([(True, "none"), (False, "gated"), (False, "plain")], [(True, "none"), (False, "gated")]),
)
def test_large_tiles_give_the_bits_of_small_ones(is_gpt_oss, sharing, device):
    """Experts whose sizes are no multiples of a tile's; full blocks and others."""
    rows = 150
    size = 320
    experts = 2
    top_k = 2
    dtype = torch.float16
    router, bias, weights = random_layer((size, 200, experts, top_k), dtype, device, is_gpt_oss)
    x = random_rows(rows, size, dtype, device)
    shared = random_shared(sharing, rows, size, dtype, device)
    routing = route_triton(x, router, bias, top_k, True, block_rows=EXPERT_ROWS)
    with poisoned():
        mixed = mix_experts_triton(x, routing, weights, shared)
    tolerance = 4 * TOLERANCES[dtype]
    torch.testing.assert_close(mixed.double(), loop(x, routing, weights, shared), atol=tolerance, rtol=tolerance)
    assert torch.equal(mixed, mix_experts_triton(x, routing, weights, shared, Tiling(64, 64, 2)))


@each_device
def test_the_router_adds_parts_in_one_order(device, monkeypatch):
    """Side by side, one after another, in low tiles and in high ones."""
    router, bias, _ = random_layer((1024, 8, 6, 2), torch.float16, device, is_gpt_oss=True)
    x = random_rows(70, 1024, torch.float16, device)
    expected = route_triton(x, router, bias, 2, True)
    for low in (1 << 30, 0):
        monkeypatch.setattr("slipstream.kernels.gemm.router.PARALLEL_ROWS", 0)
        monkeypatch.setattr("slipstream.kernels.gemm.router.LOW_ROWS", low)
        routing = route_triton(x, router, bias, 2, True)
        assert torch.equal(routing.experts, expected.experts)
        assert torch.equal(routing.weights, expected.weights)


QUANTIZED = [  # format, (T, H, I, E, k), rows of a block
    ("mxfp4", (2, 96, 64, 4, 2), 1),
    ("mxfp4", (9, 96, 64, 4, 2), 8),
    ("mxfp4", (34, 160, 32, 3, 2), 16),
    ("fp8", (30, 64, 48, 3, 2), 32),
    ("fp8 static", (33, 80, 32, 3, 1), 16),
    ("fp8 blocks", (2, 256, 128, 3, 2), 1),
    ("fp8 blocks", (33, 128, 128, 2, 1), 16),
    ("int4", (2, 64, 32, 3, 2), 1),
    ("int4 zeros", (5, 288, 40, 2, 1), 16),
]


def rounding(kind: str, device: str) -> Callable[[Tensor], Tensor]:
    """Returns the function that rounds a product's inputs as a format does."""
    how = {"fp8": "row"}.get(kind, kind.removeprefix("fp8 ").rstrip("s"))
    static = torch.tensor(0.02, device=device)

    def round_inputs(row):
        return rounded(row.float()[None], how, static)[0].double() if kind.startswith("fp8") else row

    return round_inputs


@grouped()
@each_device
@pytest.mark.parametrize(("kind", "shape", "block_rows"), QUANTIZED)
def test_quantised_experts_are_those_of_a_loop(kind, shape, block_rows, device):
    rows, size, _, experts, top_k = shape
    weights, wide = quantized_experts(kind, shape[1:], device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    router, _, _ = random_layer((size, 8, experts, top_k), dtype, device)
    x = random_rows(rows, size, dtype, device)
    routing = route_triton(x, router, None, top_k, True, block_rows=block_rows)
    expected = loop(x, routing, wide, None, rounding(kind, device))
    with poisoned():
        mixed = mix_experts_triton(x, routing, weights, None, Tiling(64, 32, 1))
    if isinstance(weights.gate_up, FP8Weight):
        codes = fp8.quantize_rows(x, weights.gate_up.inputs)._replace(rows=x)
        assert torch.equal(mix_experts_triton(codes, routing, weights, None, Tiling(64, 32, 1)), mixed)
    if device == "cuda" or (kind == "fp8 blocks" and rows <= SUMMED_ROWS):
        # Inputs on the edge between two codes fall either way; and the interpreter rounds to e4m3 in its own way.
        assert (mixed.double() - expected).norm() < 0.15 * expected.norm()
    else:
        torch.testing.assert_close(mixed.double(), expected, atol=1e-4, rtol=1e-4)
    if device == "cpu":
        mixed = mix_experts.reference(x, routing, weights)
        torch.testing.assert_close(mixed.double(), expected, atol=1e-4, rtol=1e-4)


@each_device
@pytest.mark.parametrize("kind", some_of(["fp8", "fp8 static", "fp8 blocks"], ["fp8 static", "fp8 blocks"]))
@torch.inference_mode()
def test_large_tiles_of_fp8_give_the_bits_of_small_ones(kind, device):
    """Full blocks and others; inputs that come quantised, and not; a shared expert."""
    rows = 150
    size = 384
    experts = 2
    top_k = 2
    dtype = torch.float16
    weights, wide = quantized_experts(kind, (size, 256, experts, top_k), device)
    router, _, _ = random_layer((size, 8, experts, top_k), dtype, device)
    x = random_rows(rows, size, dtype, device)
    shared = Shared(x.flip(0).contiguous(), x[:, :1].contiguous())
    routing = route_triton(x, router, None, top_k, True, block_rows=grouped_fp8.ROWS)
    assert isinstance(weights.gate_up, FP8Weight)
    assert isinstance(weights.down, FP8Weight)
    product = grouped_gemm.experts_product(x, routing.blocks.rows, weights)
    assert choose(product, device_of(x)).kernel == "experts, fp8 blocks"
    codes = fp8.quantize_rows(x, weights.gate_up.inputs)._replace(rows=x)
    with poisoned():
        mixed = mix_experts_triton(x, routing, weights, shared)
        assert torch.equal(mix_experts_triton(codes, routing, weights, shared), mixed)
    expected = loop(x, routing, wide, shared, rounding(kind, device))
    assert (mixed.double() - expected).norm() < 0.05 * expected.norm()
    if device == "cuda" or kind != "fp8 blocks":  # the interpreter rounds to e4m3 in its own way
        assert torch.equal(mixed, mix_experts_triton(x, routing, weights, shared, Tiling(64, 128, 2)))


@each_device
def test_parts_of_the_inputs_are_added_in_one_way(device, monkeypatch):
    """Side by side for few rows, one after the other for more."""
    monkeypatch.setattr(grouped_gemm, "SPLIT_INPUTS", 544)
    weights, wide = quantized_experts("mxfp4", (32, 544, 2, 1), device)
    router, _, _ = random_layer((32, 8, 2, 1), torch.float32, device)
    x = random_rows(34, 32, torch.float32, device)
    results = []
    for rows, block_rows, depth in ((3, 1, 256), (3, 16, 128), (34, 16, 512)):
        routing = route_triton(x[:rows], router, None, 1, True, block_rows=block_rows)
        with poisoned():
            results.append(mix_experts_triton(x[:rows], routing, weights, None, Tiling(128, depth, 1))[:3])
    torch.testing.assert_close(results[0].double(), loop(x, routing, wide)[:3], atol=1e-4, rtol=1e-4)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_mxfp4_words_are_those_of_the_file():
    """Inputs that do not fill the last chunk are read back, and each code at its place."""
    blocks = torch.randint(256, (2, 96, 5, 16)).byte()
    scales = torch.randint(100, 150, (2, 96, 5)).byte()
    words, packed = pack_words(blocks, scales)
    assert (words.shape, words.dtype, packed.shape) == ((2, 3, 2, 32, 32), torch.int16, (2, 3, 2, 32))
    assert torch.equal(dequantize_words(MXFP4Weight(words, packed, 160)), dequantize_mxfp4(blocks, scales))
    assert torch.equal(dequantize_words(MXFP4Weight(words[1], packed[1], 160)), dequantize_mxfp4(blocks, scales)[1])


@triton.jit
def decode_kernel(words_ptr, out_ptr, PACKED: tl.constexpr):
    """Words (16, 32) with 16 scales for each program -> (4, 16, 32)."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    cells = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    words_ptr += tl.program_id(0) * 512
    words = tl.load(words_ptr + cells)
    neighbours = None
    if not PACKED:
        neighbours = tl.load(words_ptr + (cells ^ 1))
    for place in tl.static_range(4):
        weights = decode(words, row, place, out_ptr.dtype.element_ty, neighbours)
        tl.store(out_ptr + tl.program_id(0) * 2048 + place * 512 + cells, weights)


@pytest.mark.parametrize(
    ("device", "dtype", "rows"),
    [
        ("cpu", torch.float32, range(1, 240)),
        pytest.param("cuda", torch.bfloat16, range(WIDEST + 1), marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float32, range(1, 240), marks=pytest.mark.gpu),
    ],
)
def test_mxfp4_weights_are_exact(device, dtype, rows):
    """At every scale that a way of decoding takes, subnormal numbers included."""
    words = torch.randint(-(1 << 15), 1 << 15, (8, 1, 32, 32), generator=torch.Generator().manual_seed(0)).short()
    scales = torch.arange(256)[:, None].expand(-1, 4).byte().contiguous().view(torch.int32)
    expected = dequantize_words(MXFP4Weight(words, scales.view(8, 1, 32), 128))
    out = torch.empty(16, 4, 16, 32, dtype=dtype, device=device)
    with np.errstate(over="ignore", invalid="ignore"):
        decode_kernel[(16,)](words.to(device), out, PACKED=dtype == torch.bfloat16)
    decoded = out.cpu().float().permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
    assert torch.equal(decoded[rows.start : rows.stop], expected[rows.start : rows.stop])


def test_no_rows():
    router, _, weights = random_layer((32, 8, 6, 2), torch.float32, "cpu")
    x = torch.empty(0, 32)
    for run, mix in ((route.reference, mix_experts.reference), (route_triton, mix_experts_triton)):
        assert mix(x, run(x, router, None, 2, True), weights).shape == (0, 32)


@each_device
def test_an_expert_of_more_pairs_than_a_tile_of_few_reads_its_weights_once(device):
    router, _, weights = random_layer((64, 24, 3, 2), torch.float16, device)
    x = random_rows(30, 64, torch.float16, device)
    routing = route_triton(x, router, None, 2, True, least_block_rows("plain", len(x)))
    assert int(routing.blocks.num_blocks) == 3
    assert int(routing.blocks.sizes[:3].max()) > FEW_ROWS
    small = route_triton(x, router, None, 2, True, block_rows=FEW_ROWS)
    tiling = Tiling(32, 32, 1)
    mixed = mix_experts_triton(x, routing, weights, tiling=tiling)
    assert torch.equal(mixed, mix_experts_triton(x, small, weights, tiling=tiling))


def test_blocks_grow_with_the_pairs_of_an_expert():
    assert [choose_block_rows(8 * rows, 128) for rows in (1, 2, 3, 128, 256, 1024, 8192)] == [1, 1, 16, 16, 32, 64, 128]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), [("fp8", "a3b"), ("fp8 blocks", "a3b"), ("fp8 static", "qwen2"),
    ("mxfp4", "gpt-oss"), ("int4", "a3b"), ("int4 zeros", "a3b"), ("fp8 blocks", "qwen2")])  # fmt: skip
@torch.inference_mode()
def test_a_row_of_quantised_experts_has_the_same_bits_among_any_others(kind, name):
    """Also in a graph; cf. the plain torch."""
    size, _, experts, top_k = REAL[name]
    weights, _ = quantized_experts(kind, (*REAL[name][:2], min(experts, 16), top_k), "cuda")
    router, bias, _ = random_layer((size, 8, min(experts, 16), top_k), torch.bfloat16, "cuda")
    weights = ExpertWeights(*(w.bfloat16() if isinstance(w, Tensor) else w for w in weights[:4]), weights.activation)
    x = random_rows(ROWS[-1], size, torch.bfloat16, "cuda")
    format = format_of(weights.gate_up)

    def run(start, end):
        routing = route_triton(x[start:end], router, bias, top_k, True, least_block_rows(format, end - start))
        return mix_experts_triton(x[start:end], routing, weights)

    expected = run(0, len(x))
    for rows in ROWS:
        for start in {0, (ROWS[-1] - rows) // 3, ROWS[-1] - rows}:
            assert torch.equal(run(start, start + rows), expected[start : start + rows]), (rows, start)
    for rows in (1, 8, 128, 600):
        assert torch.equal(replayed(lambda rows=rows: run(0, rows)), expected[:rows]), rows
    few = x[:40].contiguous()
    reference = mix_experts.reference(few, route_triton(few, router, bias, top_k, True), weights)
    assert (expected[:40] - reference).float().norm() < 0.02 * reference.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", REAL)
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_others(name, dtype):
    """And routing does not depend on them; a graph gives the same as plain launches; cf. torch in fp32."""
    size, _, experts, top_k = REAL[name]
    router, bias, weights = random_layer(REAL[name], dtype, "cuda", name == "gpt-oss")
    x = random_rows(ROWS[-1], size, dtype, "cuda")
    shared = Shared(x.flip(0).contiguous(), x[:, :1].contiguous()) if name == "qwen2" else None

    def run(start, end):
        rows = x[start:end]
        routing = route_triton(rows, router, bias, top_k, name != "qwen2", least_block_rows("plain", len(rows)))
        part_shared = None if shared is None else Shared(*(part[start:end].contiguous() for part in shared))
        return mix_experts_triton(rows, routing, weights, part_shared), routing.experts, routing.weights

    expected = run(0, len(x))
    for rows in ROWS:
        for start in {0, (ROWS[-1] - rows) // 3, ROWS[-1] - rows}:
            for part, full in zip(run(start, start + rows), expected, strict=True):
                assert torch.equal(part, full[start : start + rows]), (rows, start)
    for rows in (1, 8, 128, 600):
        assert torch.equal(replayed(lambda rows=rows: run(0, rows))[0], expected[0][:rows]), rows
    assert not pair_counts(x.device).any()
    few = x[:24].contiguous()
    part_shared = None if shared is None else Shared(*(part[:24].float() for part in shared))
    routing = Routing(*(part[:24] for part in expected[1:]))
    wide = ExpertWeights(*(w.float() if isinstance(w, Tensor) else w for w in weights[:4]), weights.activation)
    torch.testing.assert_close(
        expected[0][:24].float(), loop(few, routing, wide, part_shared).float(), atol=0.05, rtol=0.05
    )
    logits = F.linear(few.float(), router.float(), None if bias is None else bias.float()).topk(top_k).indices
    assert (expected[1][:24] == logits).float().mean() > 0.98  # near-ties may fall the other way


@pytest.mark.parametrize("format", TILINGS)
def test_every_block_size_has_a_tiling(format):
    sizes = {choose_block_rows(pairs, 8, least_rows(format)) for pairs in range(1, 2000)}
    assert sizes == {1, *TILINGS[format]}


def part_of(weights: ExpertWeights, share: Share) -> ExpertWeights:
    """A rank's experts."""

    def cut(matrix):
        if isinstance(matrix, Tensor):
            return matrix[share.first : share.first + share.size]
        return matrix._replace(**{name: cut(x) for name, x in matrix._asdict().items() if isinstance(x, Tensor)})

    biases = [None if bias is None else cut(bias) for bias in weights[2:4]]
    return ExpertWeights(cut(weights.gate_up), cut(weights.down), *biases, weights.activation)


@grouped()
@each_device
@pytest.mark.parametrize(
    ("kind", "rows", "block_rows"),
    gate_of(
        [
            ("gated", 1, None),
            ("none", 5, 8),
            ("plain", 21, 8),
            ("mxfp4", 2, None),
            ("int4 zeros", 3, 16),
            ("fp8", 34, 16),
        ],
        [("gated", 1, None), ("none", 5, 8), ("mxfp4", 2, None), ("fp8", 34, 16)],
    ),
)
def test_whole_experts_of_ranks_add_up_to_one(kind, rows, block_rows, device):
    """Bit for bit, though no token goes to some ranks; and a rank's experts are those of a loop."""
    shape = (64, 32, 8, 2)
    size, _, experts, top_k = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    router, bias, wide = random_layer(shape, dtype, device, is_gpt_oss=kind == "none")
    is_plain = kind in ("gated", "none", "plain")
    weights, wide = (wide, wide) if is_plain else quantized_experts(kind, shape, device)
    x = random_rows(rows, size, dtype, device)
    shared = random_shared(kind if is_plain else "none", rows, size, dtype, device)
    expected = loop(x, route.reference(x, router, bias, top_k, True), wide, shared, rounding(kind, device))
    triton_runs = partial(route_triton, block_rows=block_rows), partial(mix_experts_triton, tiling=Tiling(32, 32, 1))
    for run, mix in ((route.reference, mix_experts.reference), triton_runs):
        sums = []
        for world in (1, 2, 4):
            partials = []
            for rank in range(world):
                share = Share(rank * experts // world, experts // world)
                routing = run(x, router, bias, top_k, True, share=share if world > 1 else None)
                leaves = Leaves(4 // world, experts // 4)
                part = part_of(weights, share)
                with poisoned():
                    partials.append(mix(x, routing, part, None if rank else shared, leaves=leaves, dtype=torch.float32))
            sums.append(add_along_tree(partials))
        assert torch.equal(sums[1], sums[0])
        assert torch.equal(sums[2], sums[0])
        assert (sums[0].double() - expected).norm() < (0.15 if device == "cuda" else 1e-4) * expected.norm()


@pytest.mark.gpu
@torch.inference_mode()
def test_a_gated_product_begins_beside_the_router():
    """It has the bits of one that waits, among kernels that reuse each other's memory."""
    router, _, _ = random_layer((2816, 8, 128, 8), torch.bfloat16, "cuda")
    weight = random_rows(4224, 2816, torch.bfloat16, "cuda") / 53
    gain = torch.ones(2816, device="cuda").bfloat16()

    def chain(x, *, is_early):
        for _ in range(8):
            normed, routed = (rms_norm(x, gain, 1e-6) for _ in range(2))
            routing = route_triton(routed, router, None, 8, True)
            out = gated_linear(normed, weight, is_early=is_early)
            x = torch.cat((out, out), dim=1)[:, :2816] + routing.weights[:, :1].bfloat16()
        return x

    for rows in (1, 8, 32, 128):
        x = random_rows(rows, 2816, torch.bfloat16, "cuda")
        assert torch.equal(replayed(partial(chain, x, is_early=True)), chain(x, is_early=False)), rows
