"""Gated MLPs in one kernel against the separate kernels, bit by bit."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from slipstream.kernels.gemm import fp8
from slipstream.kernels.gemm.choose import Product, choose, device_of
from slipstream.kernels.gemm.streamed_fp8 import FP8Matrix, fp8_mlp, most_words
from slipstream.kernels.grid_sync import barriers, done_counters
from slipstream.tests.kernels import test_fp8
from slipstream.tests.kernels.triton_runs import replayed

SHAPES = [(4096, 14336), (3584, 18944), (2048, 8192), (512, 1024), (5120, 3072)]  # H, I
ROWS = [1, 2, 5, 8, 9, 16, 17, 32]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_an_mlp_in_fp8_has_the_bits_of_its_parts(shape):
    """Rows of all numbers, again and again, and in a graph whose kernels overlap."""
    size, intermediate = shape
    gate_up, down = (FP8Matrix(*test_fp8.layer(*pair, False, "cuda")) for pair in ((2 * intermediate, size), shape))

    def whole(x):
        product = Product("fp8", len(x), size, size, "mlp", size=intermediate)
        assert choose(product, device_of(x)).kernel == "fp8 mlp"
        return fp8_mlp(fp8.quantize_rows(x), gate_up, down)

    def apart(x):
        hidden = fp8.fp8_linear(fp8.quantize_rows(x), *gate_up, None, True)
        return fp8.fp8_linear(fp8.quantize_rows(hidden), *down)

    def chain(layer, x):
        for _ in range(6):
            x = F.rms_norm(x + layer(x), (size,))
        return x

    x = torch.randn(ROWS[-1], size, device="cuda").bfloat16()
    for rows in ROWS:
        expected = apart(x[:rows])
        for _ in range(3):
            assert torch.equal(whole(x[:rows]), expected), rows
    for rows in (ROWS[0], ROWS[-1]):
        expected = chain(apart, x[:rows])
        assert expected.isfinite().all()
        assert torch.equal(replayed(partial(chain, whole, x[:rows])), expected), rows
    torch.cuda.synchronize()
    assert not done_counters(x.device).any()
    assert not most_words(x.device).any()
    assert not (barriers(x.device) & 0x7FFFFFFF).any()
