"""The table of kernels: what an 8B Llama takes, what products must be like, and that all choices can be executed."""

from collections.abc import Sequence
from itertools import product
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from slipstream.kernels.gemm import fp8, int4
from slipstream.kernels.gemm.choose import TABLE, Choice, Device, Format, Kernel, Kind, Product, choose, product_of
from slipstream.kernels.gemm.fixed_order import linear_many_rows_triton
from slipstream.kernels.gemm.linear import few_rows
from slipstream.kernels.gemm.tiling import Wide, choose_wide, part_inputs
from slipstream.tests.kernels import test_fp8, test_int4
from slipstream.tests.tables import each_case, table_of

H100 = Device()
A100 = Device(is_hopper=False, programs=108, shared_memory=163 << 10, library=frozenset())
B200 = Device(is_hopper=False, programs=148, library=frozenset())
ROWS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1024, 1025)
# Of Llama-3.1-8B.
QKV = (6144, 4096)
OUT = (4096, 4096)
GATE_UP = (28672, 4096)
DOWN = (4096, 14336)
EXACT: list[tuple[Format, Kind, tuple[int, int], dict[int, Kernel]]] = table_of(__file__, "exact")


def described(format: Format, kind: Kind, shape: Sequence[int], rows: int = 1) -> Product:
    return Product(format, rows, *shape, kind, head_dim=128 if kind == "rotated" else 0)


@pytest.mark.parametrize("exact", [True, False])
def test_which_kernels_an_8b_llama_takes(exact):
    for format, kind, shape, kernels in EXACT if exact else table_of(__file__, "fastest"):
        for rows in ROWS:
            expected = next(kernel for limit, kernel in kernels.items() if rows <= limit)
            item = described(format, kind, shape, rows)._replace(is_exact=exact)
            assert choose(item, H100).kernel == expected, item


def test_a_whole_mlp_in_fp8_is_one_kernel():
    mlp = Product("fp8", 32, 4096, 4096, "mlp", size=14336)
    changes = [
        {"num_rows": 33},
        {"num_rows": 0},
        {"dtype": torch.float16},
        {"size": 14336 + 128},
        {"num_inputs": 4096 + 128},
        {"num_outputs": 4096 + 32},
        {"format": "fp8 blocks"},
    ]
    assert choose(mlp, H100).kernel == "fp8 mlp"
    assert {choose(mlp._replace(**change), H100).kernel for change in changes} == {"apart"}
    assert {choose(mlp, device).kernel for device in (B200, H100._replace(programs=16))} == {"apart"}


@each_case()
def test_products_that_do_not_fit_take_another(format, kind, shape, rows, change, kernel, other):
    item = described(format, kind, shape, rows)
    assert choose(item, H100).kernel == kernel
    change = {name: getattr(torch, value) if name == "dtype" else value for name, value in change.items()}
    assert choose(item._replace(**change), H100).kernel == other


def test_what_start_up_saw_of_the_library_decides():
    kernels = ["library", "library by parts"]
    for kernel in kernels:
        item = described("16 bits", "plain", OUT, 256)._replace(is_exact=True, library=kernel)
        assert choose(item, H100).kernel == kernel
        assert choose(item._replace(kind="rotated", head_dim=128, num_rows=100), H100).kernel == "apart"
    assert choose(item._replace(kind="gated", library="library"), H100).kernel == "library"
    assert (
        choose(described("fp8", "plain", OUT, 72)._replace(is_exact=True, library="library"), H100).kernel == "library"
    )


@pytest.mark.parametrize("device", [A100, B200, H100._replace(programs=4)], ids=["A100", "B200", "slice"])
def test_kernels_of_hopper_need_all_of_it(device):
    hopper = {"streamed", "fp8 mlp", "int4 streamed", "int4 pipelined"}
    kernels = {choose(described(*case, rows), device).kernel for *case, _ in EXACT for rows in ROWS}
    assert not kernels & hopper
    assert ("few rows" in kernels) == (device.shared_memory > 200 << 10), "an A100 has no room for the largest tiles"
    wide = {choose(described(*case, 64), device).wide for *case, _ in EXACT if case[0] == "int4"}
    assert (wide == {None}) == (not device.is_hopper)


def test_wide_products_fill_the_gpu():
    down = described("int4", "plain", DOWN)._replace(is_exact=True)
    wide = [choose(down._replace(num_rows=rows), H100).wide for rows in (16, 17, 64, 1024)]
    assert wide == [None, Wide(32, 2), Wide(64, 2), Wide(128, 2)]
    projection = [choose(described("int4", "plain", OUT, rows), H100).wide for rows in (17, 100)]
    assert projection == [Wide(32, 1), Wide(128, 1)]
    gated = described("int4", "gated", (34816, 5120), 64)
    assert choose(gated, H100).wide is None, "136 programs"
    assert choose(gated._replace(num_outputs=16384, num_inputs=2048, num_rows=256), H100).wide == Wide(128, 2)
    assert choose_wide(64, 6144, 4, False, 132) == Wide(64, 2)
    assert choose_wide(256, 6144, 4, False, 132) == Wide(128, 1), "three times 128 rather than 96 after 132 programs"


SHAPES = [QKV, OUT, GATE_UP, DOWN, (512, 1024), (1152, 896), (2880, 2880), (2048, 8448), (250, 264)]
KINDS: dict[Format, tuple[Kind, ...]] = {
    "16 bits": ("plain", "gated", "rotated"),
    "fp8": get_args(Kind),
    "fp8 blocks": get_args(Kind),
    "int4": ("plain", "gated", "rotated"),
}


@pytest.mark.parametrize("format", KINDS)
def test_all_products_have_a_kernel_and_exact_ones_an_order(format):
    """A product's inputs are cut into the same parts for any number of rows."""
    for kind, shape, device in product(KINDS[format], SHAPES, (H100, B200)):
        parts = set()
        for rows, dtype in product((0, *ROWS, 5000), (torch.bfloat16, torch.float16)):
            item = described(format, kind, shape, rows)._replace(is_exact=True, dtype=dtype, size=1024)
            choice = choose(item, device)
            assert choice.kernel in {rule.kernel for rule in TABLE[format] if kind in rule.kinds}
            parts.add(min(part_inputs(shape[1], choice.tiling), shape[1]))
        assert len(parts) == 1, (kind, shape, device)


def test_choices_can_be_executed():
    """By the interpreter, which has no kernels of Hopper; those are compiled in test_compile_ahead.py."""
    x = torch.randn(130, 256).half()
    weight = torch.randn(64, 256).half() / 16
    bias = torch.randn(64).half()
    rows = fp8.quantize_rows(x)
    packed, value = test_int4.layer(64, 256, 128, True, "cpu", torch.float16)
    blocks = test_fp8.layer(64, 256, True, "cpu")
    block_rows = fp8.quantize_rows(x, fp8.InputScales(by_block=True))
    codes = fp8.quantize_weight(weight)

    def of_16_bits(count):
        choice = choose(product_of(x[:count], weight, is_exact=True), B200)
        if choice.kernel == "many rows":
            return linear_many_rows_triton(x[:count], weight, bias)
        return few_rows(choice, x[:count], weight, bias)

    def first(count, rows):
        scales = rows.scales[:count] if rows.scales.dim() == 1 else rows.scales[:, :count]
        return rows._replace(codes=rows.codes[:count], scales=scales)

    runs = [
        (of_16_bits, F.linear(x, weight, bias), (1, 130)),
        (
            lambda count: fp8.fp8_linear_triton(first(count, rows), *codes, bias),
            fp8.fp8_linear.reference(rows, *codes, bias),
            (3, 130),
        ),
        (
            lambda count: fp8.fp8_linear_triton(first(count, block_rows), *blocks, bias),
            fp8.fp8_linear.reference(block_rows, *blocks, bias),
            (3, 130),
        ),
        (lambda count: int4.int4_linear_triton(x[:count], packed, bias), F.linear(x, value.half(), bias), (1, 20)),
    ]
    for run, expected, counts in runs:
        for count in counts:
            torch.testing.assert_close(run(count), expected[:count], atol=2e-2, rtol=1e-2)


def test_choices_are_plain_values():
    assert choose(described("fp8", "plain", OUT), H100) is choose(described("fp8", "plain", OUT), Device())
    assert isinstance(choose(described("fp8", "plain", OUT), H100), Choice)
