"""Products of few rows with 4-bit weights that copy them into a ring, against the usual kernel, bit by bit; and which
are taken."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm import int4, pipelined_int4, streamed
from slipstream.kernels.gemm.int4_weight import Int4Weight
from slipstream.kernels.gemm.pipelined_int4 import MOST_ROWS, choose_pipeline, pipelines_int4
from slipstream.kernels.gemm.streamed_linear import own_parts
from slipstream.kernels.grid_sync import done_counters
from slipstream.kernels.kv.rope import Rotation
from slipstream.tests.kernels import test_int4
from slipstream.tests.kernels.test_streamed_linear import ProductPair, check_heads, empty_weight, heads
from slipstream.tests.kernels.triton_runs import replayed
from slipstream.tests.pairwise import grouped

ROWS = [1, 2, 5, 8]
# O, I, gated: gates and ups, of many steps and of one; in eight parts, four of which one is smaller, four, two and one.
PRODUCTS = [
    (28672, 4096, True),
    (128, 256, True),
    (4096, 14336, False),
    (1024, 7936, False),
    (6144, 4096, False),
    (10240, 8192, False),
    (1088, 768, False),
]
# O, I, query heads, dims; in four, two and one part.
HEADS = [(6144, 4096, 32, 128), (10240, 8192, 64, 128), (17408, 512, 256, 64)]
# Inputs of a group, whether without zeros.
FORMATS = [
    (128, True, torch.bfloat16),
    (32, False, torch.bfloat16),
    (128, True, torch.float16),
    (64, False, torch.float16),
]


def usual(x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool, rotation: Rotation | None = None) -> Tensor:
    """By the kernel of any number of rows: of a given tiling."""
    tiling = int4.choose_int4_tiling(*shape_of(weight), gated, len(x))
    return int4.int4_linear_triton(x, weight, bias, gated, tiling=tiling, rotation=rotation)


def pipelined(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool, rotation: Rotation | None = None
) -> Tensor:
    assert takes(x, weight, gated, rotation)
    return int4.int4_linear_triton(x, weight, bias, gated, rotation=rotation)


def shape_of(weight: Int4Weight) -> tuple[int, int]:
    return len(weight.words), weight.num_inputs


def takes(x: Tensor, weight: Int4Weight, gated: bool = False, rotation: Rotation | None = None) -> bool:
    return pipelines_int4(x, weight, int4.choose_int4_tiling(*shape_of(weight), gated, len(x)), rotation)


@pytest.mark.gpu
@grouped("dtype")
@pytest.mark.parametrize(("group", "symmetric", "dtype"), FORMATS)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), PRODUCTS)
@torch.inference_mode()
def test_bits_are_those_of_the_usual_products(
    outputs: int, inputs: int, gated: bool, group: int, symmetric: bool, dtype: torch.dtype
) -> None:
    weight, _ = test_int4.layer(outputs, inputs, group, symmetric, "cuda", dtype)
    x = torch.randn(MOST_ROWS, inputs, device="cuda").to(dtype)
    for bias in (None,) if gated else (None, torch.randn(outputs, device="cuda").to(dtype)):
        for rows in ROWS:
            expected = usual(x[:rows], weight, bias, gated)
            for _ in range(2):
                assert torch.equal(pipelined(x[:rows], weight, bias, gated), expected), rows
    assert not done_counters(x.device).any()


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize(("group", "symmetric", "dtype"), FORMATS)
@pytest.mark.parametrize("shape", HEADS)
@torch.inference_mode()
def test_heads_are_rotated_and_stored(
    shape: tuple[int, int, int, int], group: int, symmetric: bool, dtype: torch.dtype
) -> None:
    outputs, inputs = shape[:2]
    weight, _ = test_int4.layer(outputs, inputs, group, symmetric, "cuda", dtype)
    x, bias = (torch.randn(*size, device="cuda").to(dtype) for size in ((MOST_ROWS, inputs), (outputs,)))
    runs = (lambda x, rotation, run=run: run(x, weight, bias, False, rotation) for run in (pipelined, usual))
    check_heads(ProductPair(*runs, MOST_ROWS, dtype), shape, x)


def chain(run: Callable[..., Tensor], gate_up: Int4Weight, down: Int4Weight, x: Tensor) -> Tensor:
    """Eight gated MLPs after each other, by `run`."""
    for _ in range(8):
        hidden = run(x, gate_up, None, True)
        x = torch.nn.functional.rms_norm(x + run(hidden, down, None, False), (down.words.shape[0],))
    return x


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_replays_a_chain() -> None:
    """Each kernel's first weights are read while the one before it runs, and its rows once that has written them."""
    (gate_up, _), (down, _) = (
        test_int4.layer(*shape, 128, True, "cuda", torch.bfloat16) for shape in ((8192, 2048), (2048, 4096))
    )
    for rows in (1, MOST_ROWS):
        x = torch.randn(rows, 2048, device="cuda").bfloat16()
        expected = chain(usual, gate_up, down, x)
        assert expected.isfinite().all()
        assert torch.equal(replayed(partial(chain, pipelined, gate_up, down, x)), expected)
    torch.cuda.synchronize()
    assert not done_counters(x.device).any()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that asks which GPU it runs on sees an H200."""
    monkeypatch.setattr(streamed, "use_triton", lambda _: True)
    monkeypatch.setattr(streamed, "is_hopper", lambda _: True)
    monkeypatch.setattr(streamed, "programs_of", lambda _: 132)
    monkeypatch.setattr(pipelined_int4, "is_packed", lambda _: True)


@pytest.mark.usefixtures("hopper")
def test_which_products_are_taken() -> None:
    weight = empty_weight(6144, 4096)
    x = torch.zeros(9, 4096).bfloat16()
    for rows in (1, 8):
        assert takes(x[:rows], weight)
        assert takes(x[:rows], weight, gated=True)
        assert takes(x[:rows], weight, rotation=heads(128))
    assert takes(x[:1].half(), empty_weight(6144, 4096, torch.float16))
    assert not takes(x, weight), "more rows than a tile has"
    assert not takes(x[:0], weight)
    assert not takes(x[:1].half(), weight)
    assert not takes(x[:1], empty_weight(6112, 4096)), "half a tile"
    assert not takes(x[:1, :4000].contiguous(), empty_weight(6144, 4000)), "half a chunk"
    assert not takes(torch.zeros(1, 4097).bfloat16()[:, 1:], weight), "rows that begin within 16 bytes"
    assert not takes(torch.zeros(2, 4104).bfloat16()[:, :4096], weight), "rows that do not follow each other"
    assert not takes(torch.zeros(1, 8448).bfloat16(), empty_weight(2048, 8448)), "an empty part"
    assert not takes(x[:1], weight, rotation=heads(32)), "a tile has two heads"
    assert not takes(x[:1], weight, rotation=heads(128, torch.ones(2, 1))), "a cache in FP8"
    assert not takes(torch.zeros(1, 16384).bfloat16(), empty_weight(2048, 16384), rotation=heads(128)), "eight parts"


def test_none_is_taken_elsewhere() -> None:
    weight, _ = test_int4.layer(64, 256, 128, True, "cpu", torch.float16)
    assert not takes(torch.zeros(1, 256).half(), weight)


def test_rings_fill_the_same_memory() -> None:
    """Whatever number of parts a program sums."""
    shapes = [shape for *shape, gated in PRODUCTS if not gated]
    parts = [own_parts(MOST_ROWS, inputs, int4.choose_int4_tiling(outputs, inputs)) for outputs, inputs in shapes]
    assert parts == [1, 1, 4, 2, 1]
    assert [choose_pipeline(False, num_parts).slots * num_parts for num_parts in (2, 4)] == [8, 8]
