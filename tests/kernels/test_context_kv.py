"""KV of context rows in all layers at once, against the norm and the rotation of one head at a time."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipstream.kernels.norm import rms_norm_triton
from slipstream.kernels.rope import (
    rotate_and_store_triton,
    store_context,
    store_context_reference,
    store_context_triton,
)
from slipstream.tests.kernels.triton_runs import DEVICES, TOLERANCES

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Case:
    T: int
    L: int = 2
    G: int = 2
    D: int = 16


CASES = [Case(1), Case(5), Case(3, L=5, G=8, D=128), Case(2, L=3, G=3, D=24), Case(4, L=1, G=1, D=64)]
CASES += [Case(2, G=12, D=8), Case(0)]
REAL = [Case(16, L=5, G=8, D=128), Case(512, L=5, G=8, D=128), Case(8192, L=5, G=8, D=128)]


class Scene:
    """Slots in random order; the rest of the cache, NaN, must stay as it is."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str) -> None:
        self.case, generator = case, torch.Generator(device).manual_seed(1)
        options = {"generator": generator, "device": device}
        T, L, G, D = case.T, case.L, case.G, case.D
        self.kv = torch.randn(T, L * 2 * G * D, **options).to(dtype)
        self.k_norm = (1 + torch.rand(L, D, **options)).to(dtype)
        self.positions = torch.randint(0, 50, (T,), **options)
        self.slots = torch.randperm(T + 7, **options)[:T]
        angles = torch.outer(torch.arange(50, device=device), 100.0 ** (-torch.arange(D // 2, device=device) * 2 / D))
        self.cos, self.sin = (torch.cat((x, x), dim=-1) for x in (angles.cos(), angles.sin()))
        self.cache = torch.full((L, 2, T + 7, G, D), torch.nan, device=device).to(dtype)

    def run(self, store: object) -> Tensor:
        cache = self.cache.clone()
        assert callable(store)
        store(self.kv, self.k_norm, EPS, self.cos, self.sin, self.positions, self.slots, cache)
        return cache

    def expected(self) -> Tensor:
        case, cache = self.case, self.cache.double()
        half = case.D // 2
        rows = self.kv.double().view(case.T, case.L, 2, case.G, case.D)
        for t, (slot, position) in enumerate(zip(self.slots.tolist(), self.positions.tolist(), strict=True)):
            turn = torch.complex(self.cos[position, :half].double(), self.sin[position, :half].double())
            for layer in range(case.L):
                for head in range(case.G):
                    key = rows[t, layer, 0, head]
                    key = key / (key.square().mean() + EPS).sqrt() * self.k_norm[layer].double()
                    turned = torch.complex(key[:half], key[half:]) * turn
                    cache[layer, 0, slot, head] = torch.cat((turned.real, turned.imag))
                    cache[layer, 1, slot, head] = rows[t, layer, 1, head]
        return cache


def check(scene: Scene, cache: Tensor) -> None:
    tolerance = TOLERANCES[cache.dtype]
    assert cache.dtype == scene.kv.dtype
    torch.testing.assert_close(cache.double(), scene.expected(), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_equals_a_loop(case: Case, dtype: torch.dtype) -> None:
    scene = Scene(case, dtype, "cpu")
    check(scene, scene.run(store_context_reference))
    check(scene, scene.run(store_context))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_kernel_equals_a_loop(case: Case, dtype: torch.dtype, device: str) -> None:
    scene = Scene(case, dtype, device)
    check(scene, scene.run(store_context_triton))


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL, ids=str)
@torch.inference_mode()
def test_the_kernel_stores_what_one_kernel_a_layer_stores(case: Case) -> None:
    """Rounded where the norm and the rotation round: a draft's KV does not depend on who wrote it."""
    scene = Scene(case, torch.bfloat16, "cuda")
    expected, rows = scene.cache.clone(), scene.kv.view(case.T, case.L, 2, case.G, case.D)
    for layer, (keys, values) in enumerate(expected):
        k = rms_norm_triton(rows[:, layer, 0], scene.k_norm[layer], EPS)
        where = (scene.cos, scene.sin, scene.positions, scene.slots)
        rotate_and_store_triton(k[:, :0], k, rows[:, layer, 1], *where, keys, values)
    torch.testing.assert_close(scene.run(store_context), expected, atol=2**-5, rtol=2**-7, equal_nan=True)
