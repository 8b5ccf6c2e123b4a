"""Layers whose projection rotates and stores what it projects, against those that leave this to attention. The kernels
themselves are tested in tests/kernels/test_rope.py; here plain torch stands for them."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm import fp8
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.kv.rope import Rotation, rotate_and_store
from slipstream.models.layers import linear as linear_layers
from slipstream.models.layers.attention import AttentionLayer, SelfAttention
from slipstream.models.layers.formats.fp8 import FP8Format, FP8Linear
from slipstream.serve.attention.sdpa import Backend
from slipstream.tests.serve.attention_passes import Pass, Scene

HIDDEN = 256
HEAD_DIM = 64
CASE = Pass(mask="causal", lengths=(0, 9, 31), query_lens=(3,) * 3)


class Rotating(Backend):
    """Lets projections rotate on a CPU, too."""

    def rotation(self, layer: AttentionLayer) -> Rotation | None:
        return self._rotation(layer)


def rotated(projected: Tensor, to: Rotation) -> Tensor:
    """Rotates and stores the heads (T, (Q + 2 * G) * D) of a projection, as a kernel does."""
    assert to.positions is not None
    G, D = to.keys.shape[1:]
    q, k, v = projected.unflatten(1, (-1, D)).split([projected.shape[1] // D - 2 * G, G, G], dim=1)
    rotated_q = rotate_and_store.reference(
        q, k, v, to.cos, to.sin, to.positions, to.slots, to.keys, to.values, None, to.scales
    )
    return rotated_q.flatten(1)


def attended(backend: type[Backend], layer: SelfAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's output (T, H), and the cache."""
    scene = Scene(CASE, HEAD_DIM, torch.float32, "cpu")
    attention = backend(scene.kv, scene.ropes)
    attention.plan(scene.metadata())
    with torch.no_grad():
        return layer(x, attention), scene.cache


@pytest.mark.parametrize("format", ["plain", "fp8"])
def test_it_attends_to_the_same(format, monkeypatch):
    torch.manual_seed(0)
    scene = Scene(CASE, HEAD_DIM, torch.float32, "cpu")
    layer = SelfAttention(scene.layer().spec, 1, HIDDEN, 1e-6)
    calls = []
    torch.nn.init.normal_(layer.qkv_proj.weight, std=0.05)
    torch.nn.init.normal_(layer.o_proj.weight, std=0.05)
    if format == "fp8":
        projection = FP8Linear(layer.qkv_proj, FP8Format("channel", on_the_fly=True))
        projection.load_part(None, {"weight": layer.qkv_proj.weight.data})
        layer.qkv_proj = projection

    def multiply(x, weight, bias, rotation):
        calls.append(len(x))
        return rotated(linear(x, weight, bias), rotation)

    def multiply_fp8(x, *arguments, rotation):
        calls.append(len(x.codes))
        return rotated(fp8.fp8_linear.reference(x, *arguments), rotation)

    x = torch.randn(9, HIDDEN)
    expected, cache = attended(Backend, layer, x)
    monkeypatch.setattr(linear_layers, "rotated_linear", multiply)
    monkeypatch.setattr(fp8, "fp8_linear_triton", multiply_fp8)
    assert torch.equal(attended(Backend, layer, x)[0], expected)
    assert not calls, "attention that has no rotation"
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "runs_kernels", lambda *_: True)
        patch.setattr(fp8.quantize_rows, "when", lambda *_, **__: False)
        patch.setattr(fp8.fp8_linear, "when", lambda *_, **__: False)
        output, output_cache = attended(Rotating, layer, x)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output_cache, cache, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert calls == [9]


def test_many_rows_are_not_quantised_for_nothing(monkeypatch):
    scene = Scene(CASE, HEAD_DIM, torch.float32, "cpu")
    layer = FP8Linear(SelfAttention(scene.layer().spec, 1, HIDDEN, 1e-6).qkv_proj, FP8Format("channel"))
    attention = Backend(scene.kv, scene.ropes)
    attention.plan(scene.metadata())
    monkeypatch.setattr(fp8, "runs_kernels", lambda *_: True)
    monkeypatch.setattr(fp8, "quantize_rows", None)
    assert layer.rotated(torch.randn(fp8.FEW_ROWS + 1, HIDDEN), attention._rotation(scene.layer())) is None
