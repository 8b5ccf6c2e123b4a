"""Linear layers of few rows against their formula in fp64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm import small_m
from slipstream.kernels.gemm.activation import gelu_tanh_mul, silu_mul
from slipstream.kernels.gemm.linear import gated_linear, linear
from slipstream.kernels.gemm.tiling import MAX_OUTPUTS, PROGRAMS, Tiling, choose_tiling
from slipstream.tests.kernels.triton_runs import SLOW, TOLERANCES, check_chain, each_device, poisoned
from slipstream.tests.pairwise import grouped, rotating

# The interpreter has no product of bfloat16.
DTYPES = [torch.float16, torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TILINGS = [Tiling(16, 16, 1), Tiling(16, 32, 3), Tiling(32, 16, 4)]
GATED_TILINGS = [TILINGS[0], Tiling(32, 32, 1), None]
SMALL = [(1, 24, 40), (3, 33, 50), (8, 16, 16), (17, 65, 7), (32, 10, 128)]
LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]
DRAFT = [(4096, 12288), (6144, 8192), (32000, 4096), (24576, 4096), (4096, 12288), (1000, 2560)]
REAL = [pytest.param(shape, marks=pytest.mark.gpu) for shape in LLAMA + DRAFT]


def random(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x has strided rows; results are about 1 in size."""
    generator = torch.Generator(device).manual_seed(rows)
    shapes = (rows, inputs + 16), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    weight *= inputs**-0.5
    return x[:, :inputs], weight, bias


def check(out: Tensor, expected: Tensor, dtype: torch.dtype):
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@grouped()
@each_device
@pytest.mark.parametrize(("tiling", "shape", "dtype"), rotating([*TILINGS, None], SMALL, DTYPES))
def test_small(tiling, shape, dtype, device):
    if tiling is None and dtype == torch.float32 and device == "cuda":
        pytest.skip("the default tilings are for weights of 16 bits; of 32 they do not fit into shared memory")
    x, weight, bias = random(*shape, dtype, device)
    for own_bias in (None, bias):
        with poisoned():
            out = small_m.linear_few_rows_triton(x, weight, own_bias, tiling)
        added = 0 if own_bias is None else own_bias.double()
        check(out, x.double() @ weight.double().t() + added, dtype)


@grouped()
@each_device
@pytest.mark.parametrize(
    ("tiling", "shape", "dtype"),
    rotating(GATED_TILINGS, [*SMALL, (40, 24, 40), (100, 40, 72)], DTYPES),
)
def test_small_gated(tiling, shape, dtype, device):
    if tiling is None and dtype == torch.float32 and device == "cuda":
        pytest.skip("the default tilings are for weights of 16 bits; of 32 they do not fit into shared memory")
    rows, outputs, inputs = shape
    x, weight, _ = random(rows, 2 * outputs, inputs, dtype, device)
    with poisoned():
        out = small_m.gated_linear_few_rows_triton(x, weight, tiling)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    check(out, F.silu(gate) * up, dtype)


@each_device
@pytest.mark.parametrize(("activation", "alone"), [("silu", silu_mul.triton), ("gelu_tanh", gelu_tanh_mul.triton)])
def test_gated_rounds_as_the_two_kernels(activation, alone, device):
    x, weight, _ = random(5, 64, 48, torch.float16, device)
    tiling = Tiling(16, 16, 1)
    apart = alone(small_m.linear_few_rows_triton(x, weight, None, tiling))
    assert torch.equal(small_m.gated_linear_few_rows_triton(x, weight, tiling, activation), apart)


@each_device
@pytest.mark.parametrize("tiling", [TILINGS[1], *(pytest.param(tiling, marks=SLOW) for tiling in TILINGS[::2])])
def test_a_row_does_not_depend_on_the_others(tiling, device):
    max_rows = 16 if device == "cpu" else 32  # the interpreter's product of 32 rows adds in another order
    x, weight, bias = random(max_rows, 40, 72, torch.float16, device)
    out = small_m.linear_few_rows_triton(x, weight, bias, tiling)
    for rows in (1, 2, 5, 8, max_rows):
        assert torch.equal(small_m.linear_few_rows_triton(x[:rows], weight, bias, tiling), out[:rows])
    place = torch.empty(max_rows, 40, device=device)
    assert small_m.linear_few_rows_triton(x, weight, bias, tiling, out=place) is place
    assert torch.equal(place.half(), out)


def test_tilings_fill_the_device_once():
    for outputs, inputs in (shape for shape in LLAMA + DRAFT if 4000 < shape[0] <= MAX_OUTPUTS):
        tiling = choose_tiling(outputs, inputs)
        programs = -(-outputs // tiling.outputs) * tiling.split
        assert PROGRAMS / 2 < programs <= PROGRAMS


def test_no_rows_and_the_cpu():
    x = torch.randn(4, 24)
    weight = torch.randn(10, 24)
    bias = torch.randn(10)
    assert small_m.linear_few_rows_triton(x[:0], weight, bias).shape == (0, 10)
    expected = silu_mul.reference(F.linear(x, weight))
    torch.testing.assert_close(gated_linear(x.view(2, 2, 24), weight), expected.view(2, 2, 5))


@grouped("rows")
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 32])
@pytest.mark.parametrize("shape", REAL)
def test_real_shapes(shape, rows):
    x, weight, bias = random(rows, *shape, torch.bfloat16, "cuda")
    first = small_m.linear_few_rows_triton(x, weight, bias)
    check(first, (x.float() @ weight.float().t() + bias.float()).double(), torch.bfloat16)
    assert torch.equal(small_m.linear_few_rows_triton(x[:1], weight, bias), first[:1])
    for _ in range(5):
        assert torch.equal(small_m.linear_few_rows_triton(x, weight, bias), first)
    gated = small_m.gated_linear_few_rows_triton(x, weight)
    apart = silu_mul.triton(F.linear(x.float(), weight.float()).to(torch.bfloat16))
    torch.testing.assert_close(gated, apart, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize("rows", [33, 64, 65, 100, 128])
@pytest.mark.parametrize("shape", [(28672, 4096), (24576, 4096), (19456, 2560), (4224, 2816)])
def test_gated_products_of_more_rows(shape, rows):
    """They round as few rows do, whatever their tiling."""
    x, weight, _ = random(rows, *shape, torch.bfloat16, "cuda")
    gated = small_m.gated_linear_few_rows_triton(x, weight)
    apart = silu_mul.triton(F.linear(x.float(), weight.float()).to(torch.bfloat16))
    torch.testing.assert_close(gated, apart, atol=3e-2, rtol=3e-2)
    for few in (1, 32, 50):
        few = min(few, rows)
        assert torch.equal(small_m.gated_linear_few_rows_triton(x[:few], weight), gated[:few])
    with torch.inference_mode():
        assert torch.equal(gated_linear(x, weight), gated)


@pytest.mark.gpu
@pytest.mark.parametrize("run", [small_m.linear_few_rows_triton, linear])
@torch.inference_mode()
def test_a_graph_replays_a_chain(run):
    x, down, _ = random(4, 4096, 14336, torch.bfloat16, "cuda")
    _, gate_up, _ = random(4, 28672, 4096, torch.bfloat16, "cuda")

    def layer(x):
        return F.rms_norm(small_m.gated_linear_few_rows_triton(run(x, down), gate_up), (14336,))

    check_chain([layer], x)


@pytest.mark.gpu
def test_the_dispatch():
    x, weight, _ = random(4, 4096, 4096, torch.bfloat16, "cuda")
    with torch.inference_mode():
        assert torch.equal(linear(x, weight), small_m.linear_few_rows_triton(x, weight))
        assert linear(x[:0], weight).shape == (0, 4096)
        shaped = linear(x.view(2, 2, 4096), weight)
    assert torch.equal(shaped.view(4, 4096), small_m.linear_few_rows_triton(x, weight))
