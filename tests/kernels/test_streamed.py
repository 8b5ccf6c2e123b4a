"""Gated MLPs in one kernel against the separate kernels, bit by bit, and which are not taken."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm import fp8, streamed
from slipstream.kernels.gemm.streamed_fp8 import MOST_ROWS, FP8Matrix, fp8_mlp, most_words, streams_fp8
from slipstream.kernels.grid_sync import barriers, done_counters
from slipstream.tests.kernels import test_fp8
from slipstream.tests.kernels.triton_runs import replayed

SHAPES = [(4096, 14336), (3584, 18944), (2048, 8192), (512, 1024), (5120, 3072)]  # H, I
ROWS = [1, 2, 5, 8, 9, 16, 17, 32]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_an_mlp_in_fp8_has_the_bits_of_its_parts(shape: tuple[int, int]) -> None:
    """Rows of all numbers, again and again, and in a graph whose kernels overlap."""
    size, intermediate = shape
    gate_up, down = (FP8Matrix(*test_fp8.layer(*pair, False, "cuda")) for pair in ((2 * intermediate, size), shape))

    def whole(x: Tensor) -> Tensor:
        assert streams_fp8(x, gate_up, down)
        return fp8_mlp(fp8.quantize_rows(x), gate_up, down)

    def apart(x: Tensor) -> Tensor:
        hidden = fp8.fp8_linear(fp8.quantize_rows(x), *gate_up, None, True)
        return fp8.fp8_linear(fp8.quantize_rows(hidden), *down)

    def chain(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
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


def test_other_mlps_are_left_to_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def matrices(size: int, intermediate: int, blocks: bool = False) -> list[FP8Matrix]:
        shapes = (2 * intermediate, size), (size, intermediate)
        return [FP8Matrix(*test_fp8.layer(*shape, blocks, "cpu")) for shape in shapes]

    x = torch.zeros(MOST_ROWS + 1, 512, dtype=torch.bfloat16)
    assert not streams_fp8(x[:1], *matrices(512, 1024)), "a CPU"
    monkeypatch.setattr(streamed, "use_triton", lambda _: True)
    monkeypatch.setattr(streamed, "is_hopper", lambda _: True)
    monkeypatch.setattr(streamed, "programs_of", lambda _: 132)
    for rows in (x[:1], x[:MOST_ROWS], fp8.quantize_rows(x[:1])):
        assert streams_fp8(rows, *matrices(512, 1024))
    for rows in (x, x[:0], x[:1].half(), x[None, :1]):
        assert not streams_fp8(rows, *matrices(512, 1024))
    for shape in ((512, 960), (512, 1152), (480, 1024)):
        assert not streams_fp8(x[:1, : shape[0]], *matrices(*shape)), shape
    assert not streams_fp8(x[:1], *matrices(512, 1024, blocks=True))
    monkeypatch.setattr(streamed, "programs_of", lambda _: 16)  # of a part of a GPU
    assert not streams_fp8(x[:1], *matrices(512, 1024))
