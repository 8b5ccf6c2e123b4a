"""Router and experts against a loop over tokens in fp64, and a row's bits among any others."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm.grouped import (
    TILINGS,
    Clamped,
    ExpertWeights,
    Shared,
    Tiling,
    activate,
    mix_experts,
    mix_experts_triton,
)
from slipstream.kernels.gemm.router import Routing, choose_block_rows, pair_counts, route, route_triton
from slipstream.tests.kernels.triton_runs import DEVICES, TOLERANCES, cover, poisoned, replayed

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TINY = {rows: Tiling(32, 32, 1) for rows in (1, 16, 32)}  # by block rows: few steps of the interpreter
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

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
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


def loop(x: Tensor, routing: Routing, weights: ExpertWeights, shared: Shared | None) -> Tensor:
    """Token by token, in fp64."""
    gate_up, down, gate_up_bias, down_bias = (None if w is None else w.double() for w in weights[:4])
    rows = []
    for row, experts, shares in zip(x.double(), routing.experts.tolist(), routing.weights.tolist(), strict=True):
        total = torch.zeros_like(row)
        for expert, share in zip(experts, shares, strict=True):
            hidden = gate_up[expert] @ row + (0 if gate_up_bias is None else gate_up_bias[expert])
            output = down[expert] @ activate(hidden, weights.clamped)
            total += share * (output + (0 if down_bias is None else down_bias[expert]))
        rows.append(total)
    added = 0 if shared is None else shared.gate.double().sigmoid() * shared.output.double()
    return torch.stack(rows) + added


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "dtype", "normalise"), cover(SHAPES, DTYPES, [True, False]))
def test_tokens_go_to_their_best_experts(
    shape: tuple[int, ...], dtype: torch.dtype, normalise: bool, device: str
) -> None:
    rows, size, _, experts, top_k = shape
    router, bias, _ = random_layer(shape[1:], dtype, device, is_gpt_oss=True)
    x = random_rows(rows, size, dtype, device)
    logits = x.double() @ router.double().t() + bias.double()
    chosen = logits.topk(top_k)  # there are no ties
    expected = logits.softmax(dim=-1).gather(1, chosen.indices)
    expected = expected / expected.sum(dim=-1, keepdim=True) if normalise else expected
    for run in (route.reference, route_triton):
        with poisoned():
            found = run(x, router, bias, top_k, normalise)
        assert torch.equal(found.experts.long(), chosen.indices)
        torch.testing.assert_close(found.weights.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_rows", [2, 16])
def test_blocks_hold_every_pair_once_and_one_expert_each(block_rows: int, device: str) -> None:
    router, _, _ = random_layer((32, 8, 6, 2), torch.float32, device)
    x = random_rows(40, 32, torch.float32, device)
    for _ in range(2):  # counts are zero again
        found = route_triton(x, router, None, 2, True, block_rows)
        assert not pair_counts(x.device).any()
    assert found.blocks is not None
    count, pairs = found.blocks.used.item(), found.blocks.pairs.flatten().tolist()
    seen = []
    for first, size in zip(found.blocks.first[:count].tolist(), found.blocks.sizes[:count].tolist(), strict=True):
        assert 1 <= size <= block_rows
        own = pairs[first : first + size]
        assert {found.experts.flatten()[pair].item() for pair in own} == {first // 40}
        seen += own
    assert sorted(seen) == list(range(80))


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_experts_the_lowest_is_chosen_and_nan_chooses_different_ones(device: str) -> None:
    x = torch.ones(3, 32, device=device)
    x[1], x[2, 0] = 0, float("nan")
    router = torch.zeros(7, 32, device=device)
    router[[2, 5]] = 1.0
    for run in (route.reference, route_triton):
        found = run(x, router, None, 3, True).experts.tolist()
        assert found[:2] == [[2, 5, 0], [0, 1, 2]]
        assert len(set(found[2])) == 3
        assert set(found[2]) <= set(range(7))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "dtype", "is_gpt_oss", "has_shared"), cover(SHAPES, DTYPES, [True, False], [False, True])
)
def test_outputs_are_those_of_a_loop_over_tokens(
    shape: tuple[int, ...], dtype: torch.dtype, is_gpt_oss: bool, has_shared: bool, device: str
) -> None:
    rows, size, _, experts, top_k = shape
    router, bias, weights = random_layer(shape[1:], dtype, device, is_gpt_oss)
    x = random_rows(rows, size, dtype, device)
    others = random_rows(rows, size + 1, dtype, device)
    shared = Shared(others[:, :size].contiguous(), others[:, size:].contiguous()) if has_shared else None
    expected = loop(x, route.reference(x, router, bias, top_k, True), weights, shared)
    tolerance = {"atol": 4 * TOLERANCES[dtype], "rtol": 4 * TOLERANCES[dtype]}
    found = mix_experts.reference(x, route.reference(x, router, bias, top_k, True), weights, shared)
    torch.testing.assert_close(found.double(), expected, **tolerance)
    for block_rows in TINY if rows < 64 else (16, 32):
        routing = route_triton(x, router, bias, top_k, True, block_rows)
        with poisoned():
            found = mix_experts_triton(x, routing, weights, shared, TINY[block_rows])
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, **tolerance)


def test_no_rows() -> None:
    router, _, weights = random_layer((32, 8, 6, 2), torch.float32, "cpu")
    x = torch.empty(0, 32)
    for run, mix in ((route.reference, mix_experts.reference), (route_triton, mix_experts_triton)):
        assert mix(x, run(x, router, None, 2, True), weights).shape == (0, 32)


def test_blocks_grow_with_the_pairs_of_an_expert() -> None:
    assert [choose_block_rows(8 * rows, 128) for rows in (1, 4, 5, 128, 256, 1024, 8192)] == [1, 1, 16, 16, 32, 64, 128]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", REAL)
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_others(name: str, dtype: torch.dtype) -> None:
    """And routing does not depend on them; a graph gives the same as plain launches; cf. torch in fp32."""
    size, _, experts, top_k = REAL[name]
    router, bias, weights = random_layer(REAL[name], dtype, "cuda", name == "gpt-oss")
    x = random_rows(ROWS[-1], size, dtype, "cuda")
    shared = Shared(x.flip(0).contiguous(), x[:, :1].contiguous()) if name == "qwen2" else None

    def run(start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = x[start:end]
        routing = route_triton(rows, router, bias, top_k, name != "qwen2")
        own = None if shared is None else Shared(*(part[start:end].contiguous() for part in shared))
        return mix_experts_triton(rows, routing, weights, own), routing.experts, routing.weights

    expected = run(0, len(x))
    for rows in ROWS:
        for start in {0, (ROWS[-1] - rows) // 3, ROWS[-1] - rows}:
            for found, whole in zip(run(start, start + rows), expected, strict=True):
                assert torch.equal(found, whole[start : start + rows]), (rows, start)
    for rows in (1, 8, 128, 600):
        assert torch.equal(replayed(lambda rows=rows: run(0, rows))[0], expected[0][:rows]), rows
    assert not pair_counts(x.device).any()
    few = x[:24].contiguous()
    own = None if shared is None else Shared(*(part[:24].float() for part in shared))
    routing = Routing(*(part[:24] for part in expected[1:]))
    wide = ExpertWeights(*(w.float() if isinstance(w, Tensor) else w for w in weights[:4]), weights.clamped)
    torch.testing.assert_close(expected[0][:24].float(), loop(few, routing, wide, own).float(), atol=0.05, rtol=0.05)
    logits = F.linear(few.float(), router.float(), None if bias is None else bias.float()).topk(top_k).indices
    assert (expected[1][:24] == logits).float().mean() > 0.98  # near-ties may fall the other way


def test_every_block_size_has_a_tiling() -> None:
    assert {choose_block_rows(pairs, 8) for pairs in range(1, 2000)} == {1, *TILINGS}
