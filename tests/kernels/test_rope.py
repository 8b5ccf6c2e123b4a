"""Rotary embedding and the KV write against complex numbers in fp64, also of context rows in all layers at once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm import fp8, int4, small_m
from slipstream.kernels.gemm.int4_weight import Int4Weight, pack_codes, pack_units
from slipstream.kernels.gemm.tiling import Tiling, choose_fp8_tiling, choose_int4_tiling, choose_tiling
from slipstream.kernels.kv.rope import Rotation, rotate, rotate_and_store, store_context
from slipstream.kernels.norm import HeadNorms, rms_norm
from slipstream.tests.kernels.triton_runs import each_device, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating

MAX_LEN = 300
THETA = 100.0
EPS = 1e-6
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # one rounding
NORMED_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # two
CASES: list[tuple[int, ...]] = [  # T, Q, G, D, and R where it is less
    (1, 32, 8, 128),
    (3, 4, 1, 64),
    (5, 6, 2, 8),
    (2, 28, 4, 128),
    (7, 1, 1, 96),
    (2, 8, 8, 256),
    (2, 3, 1, 512),
    (3, 4, 2, 128, 96),
    (2, 3, 1, 8, 6),
]
KERNELS = [rotate_and_store.reference, rotate_and_store.triton]
REAL = pytest.param((8192, 32, 8, 128), marks=pytest.mark.gpu)


class Scene:
    """Views of one fused tensor, and a cache whose every value is a sentinel."""

    def __init__(self, case: tuple[int, ...], dtype: torch.dtype, device: str):
        T, Q, G, D = case[:4]
        self.rotary_dim = case[-1]
        generator = torch.Generator().manual_seed(T)
        wide = torch.randn(T, (Q + 2 * G) * D + 16, generator=generator)  # strided tokens
        fused = wide.to(device, dtype)[:, : (Q + 2 * G) * D]
        self.q, self.k, self.v = fused.unflatten(1, (-1, D)).split([Q, G, G], dim=1)
        R = self.rotary_dim
        frequencies = THETA ** (-torch.arange(R // 2, dtype=torch.float64) * 2 / R)
        self.angles = torch.outer(torch.arange(MAX_LEN).double(), frequencies)  # (P, R / 2)
        tables = (self.angles.cos(), self.angles.sin())
        self.cos, self.sin = (torch.cat((table, table), dim=1).float().to(device) for table in tables)
        self.positions = torch.randint(MAX_LEN, (T,), generator=generator).to(device)
        self.slots = torch.randperm(4 * T, generator=generator)[:T].to(device)
        self.keys, self.values = torch.full((2, 4 * T, G, D), 7.0, dtype=dtype, device=device)

    def arguments(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v, self.cos, self.sin, self.positions, self.slots, self.keys, self.values)

    def norms(self) -> HeadNorms:
        q, k = 1 + 0.3 * torch.randn(2, self.q.shape[-1], generator=torch.Generator().manual_seed(2)).to(self.q)
        return HeadNorms(q, k, EPS)

    def turned(self, x: Tensor, sign: float = 1.0) -> Tensor:
        """The first R of x (T, heads, D) as complex numbers (x[i], x[i + R / 2]), each turned by its angle times
        `sign`, in fp64."""
        turn = torch.polar(torch.ones_like(self.angles), sign * self.angles)[self.positions.cpu(), None]
        x = x.double().cpu()
        result = torch.complex(*x[..., : self.rotary_dim].chunk(2, dim=-1)) * turn
        return torch.cat((result.real, result.imag, x[..., self.rotary_dim :]), dim=-1)

    def check_cache(self, k: Tensor, tolerances: Mapping[torch.dtype, float] = TOLERANCES):
        """Checks the cache against k, which has not been rotated yet."""
        check(self.keys[self.slots], self.turned(k), tolerances)
        assert torch.equal(self.values[self.slots], self.v)
        untouched = torch.ones(len(self.keys), dtype=torch.bool, device=self.slots.device)
        untouched[self.slots] = False
        assert (self.keys[untouched] == 7).all()
        assert (self.values[untouched] == 7).all()


def check(actual: Tensor, expected: Tensor, tolerances: Mapping[torch.dtype, float] = TOLERANCES):
    tolerance = tolerances[actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected, atol=tolerance, rtol=tolerance)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """In fp64, rounded as a norm of its own would round."""
    scale = (x.double().square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
    return (x.double() * scale * weight.double()).to(x.dtype)


@grouped("dtype")
@each_device
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["bare", "normed", "normed last", "normed values", "growing"])
@pytest.mark.parametrize(("case", "dtype"), rotating([*CASES, REAL], TOLERANCES))
def test_equals_complex_numbers(kernel, kind, case, dtype, device):
    scene = Scene(case, dtype, device)
    is_last = kind == "normed last"
    norms = scene.norms()._replace(last=is_last) if kind.startswith("normed") else None
    if norms is not None and kind == "normed values":
        norms = norms._replace(v=norms.q.float() / 2)
    growth = 1 + torch.arange(MAX_LEN, device=device) / 100 if kind == "growing" else None
    before = scene.k.clone()
    out = kernel(*scene.arguments(), norms, None, growth)
    assert torch.equal(scene.k, before), "the projection itself stays"
    assert out.dtype == dtype
    assert out.is_contiguous()
    q = scene.q
    k = scene.k
    tolerances = TOLERANCES
    if norms is not None:
        tolerances = NORMED_TOLERANCES
        if is_last:
            check(out, normed(scene.turned(q).to(dtype), norms.q.cpu()).double(), tolerances)
            check(scene.keys[scene.slots], normed(scene.turned(k).to(dtype), norms.k.cpu()).double(), tolerances)
            return
        q = normed(q, norms.q)
        k = normed(k, norms.k)
        if norms.v is not None:
            check(scene.values[scene.slots], normed(scene.v, norms.v).double().cpu(), tolerances)
            scene.values[scene.slots] = scene.v
    factors = 1.0 if growth is None else growth[scene.positions].double().cpu()[:, None, None]
    check(out, scene.turned(q) * factors, tolerances)
    scene.check_cache(k, tolerances)


@each_device
@pytest.mark.parametrize("kernel", KERNELS)
def test_without_queries_keys_and_values_are_written(kernel, device):
    scene = Scene((3, 4, 2, 64), torch.float32, device)
    kernel(scene.q[:, :0], *scene.arguments()[1:])
    scene.check_cache(scene.k)


@each_device
@pytest.mark.parametrize("kernel", KERNELS)
def test_without_keys_queries_are_turned_and_nothing_is_written(kernel, device):
    """The cache is another layer's; its scales do not count."""
    scene = Scene((3, 4, 2, 64), torch.float32, device)
    q, k, v, *tables = scene.arguments()
    norms = scene.norms()
    out = kernel(q, k[:, :0], v[:, :0], *tables, norms, torch.ones(2, 2, device=device))
    check(out, scene.turned(normed(q, norms.q)), NORMED_TOLERANCES)
    assert (scene.keys == 7).all()
    assert (scene.values == 7).all()
    assert rotate.triton(k[:, :0], scene.cos, scene.sin, scene.positions, torch.float32).shape == (3, 0, 64)


@grouped()
@each_device
@pytest.mark.parametrize("kernel", [rotate.reference, rotate.triton])
@pytest.mark.parametrize(("case", "dtype"), rotating(CASES, TOLERANCES))
def test_alone_it_turns_forth_and_its_gradient_back(kernel, case, dtype, device):
    scene = Scene(case, torch.float32, device)
    leaf = scene.q.detach().requires_grad_()
    upstream = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    with poisoned():
        out = kernel(leaf, scene.cos, scene.sin, scene.positions, dtype)
        (gradient,) = torch.autograd.grad(out, leaf, upstream.transpose(1, 2).contiguous().transpose(1, 2))
    assert (out.dtype, gradient.dtype) == (dtype, torch.float32)
    check(out.detach(), scene.turned(leaf.detach()))
    torch.testing.assert_close(gradient.double().cpu(), scene.turned(upstream, -1.0), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@torch.inference_mode()
def test_replays_write_what_eager_calls_write():
    scene = Scene((4, 32, 8, 128), torch.bfloat16, "cuda")
    expected = rotate_and_store(*scene.arguments())
    keys = scene.keys[scene.slots]

    def run():
        scene.keys.fill_(torch.nan)
        return rotate_and_store(*scene.arguments())

    assert torch.equal(replayed(run), expected)
    assert torch.equal(scene.keys[scene.slots], keys)


@dataclass(frozen=True, slots=True)
class Case:
    T: int
    L: int = 2
    G: int = 2
    D: int = 16
    R: int = 0  # 0: D


CONTEXTS = [Case(1), Case(5), Case(3, L=5, G=8, D=128), Case(2, L=3, G=3, D=24), Case(4, L=1, G=1, D=64)]
CONTEXTS += [Case(2, G=12, D=8), Case(0), Case(3, D=16, R=12)]
REAL_CONTEXTS = [Case(16, L=5, G=8, D=128), Case(512, L=5, G=8, D=128), Case(8192, L=5, G=8, D=128)]


class ContextScene:
    """Slots in random order; the rest of the cache, NaN, must stay as it is."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str):
        self.case = case
        generator = torch.Generator(device).manual_seed(1)
        options = {"generator": generator, "device": device}
        T = case.T
        L = case.L
        G = case.G
        D = case.D
        self.kv = torch.randn(T, L * 2 * G * D, **options).to(dtype)
        self.k_norm = (1 + torch.rand(L, D, **options)).to(dtype)
        self.positions = torch.randint(0, 50, (T,), **options)
        self.slots = torch.randperm(T + 7, **options)[:T]
        R = case.R or D
        angles = torch.outer(torch.arange(50, device=device), 100.0 ** (-torch.arange(R // 2, device=device) * 2 / R))
        self.cos, self.sin = (torch.cat((x, x), dim=-1) for x in (angles.cos(), angles.sin()))
        self.cache = torch.full((L, 2, T + 7, G, D), torch.nan, device=device).to(dtype)

    def run(self, store: Callable[..., None]) -> Tensor:
        cache = self.cache.clone()
        store(self.kv, self.k_norm, EPS, self.cos, self.sin, self.positions, self.slots, cache)
        return cache

    def expected(self) -> Tensor:
        case = self.case
        cache = self.cache.double()
        half = (case.R or case.D) // 2
        rows = self.kv.double().view(case.T, case.L, 2, case.G, case.D)
        for t, (slot, position) in enumerate(zip(self.slots.tolist(), self.positions.tolist(), strict=True)):
            turn = torch.complex(self.cos[position, :half].double(), self.sin[position, :half].double())
            for layer in range(case.L):
                for head in range(case.G):
                    key = rows[t, layer, 0, head]
                    key = key / (key.square().mean() + EPS).sqrt() * self.k_norm[layer].double()
                    turned = torch.complex(key[:half], key[half : 2 * half]) * turn
                    cache[layer, 0, slot, head] = torch.cat((turned.real, turned.imag, key[2 * half :]))
                    cache[layer, 1, slot, head] = rows[t, layer, 1, head]
        return cache


def check_context(scene: ContextScene, cache: Tensor):
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[cache.dtype]  # two roundings
    assert cache.dtype == scene.kv.dtype
    torch.testing.assert_close(cache.double(), scene.expected(), atol=tolerance, rtol=tolerance, equal_nan=True)


@grouped()
@each_device
@pytest.mark.parametrize(("case", "dtype"), rotating(CONTEXTS, TOLERANCES))
@pytest.mark.parametrize("kernel", [store_context.reference, store_context.triton])
def test_context_rows_equal_a_loop(kernel, case, dtype, device):
    scene = ContextScene(case, dtype, device)
    check_context(scene, scene.run(kernel))


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL_CONTEXTS, ids=str)
@torch.inference_mode()
def test_the_kernel_stores_what_one_kernel_a_layer_stores(case):
    """Rounded where the norm and the rotation round: a draft's KV does not depend on who wrote it."""
    scene = ContextScene(case, torch.bfloat16, "cuda")
    expected = scene.cache.clone()
    rows = scene.kv.view(case.T, case.L, 2, case.G, case.D)
    for layer, (keys, values) in enumerate(expected):
        k = rms_norm.triton(rows[:, layer, 0], scene.k_norm[layer], EPS)
        rotate_and_store.triton(
            k[:, :0],
            k,
            rows[:, layer, 1],
            scene.cos,
            scene.sin,
            scene.positions,
            scene.slots,
            keys,
            values,
        )
    torch.testing.assert_close(scene.run(store_context), expected, atol=2**-5, rtol=2**-7, equal_nan=True)


def project(format: str, x: Tensor, num_outputs: int, bias: Tensor | None, tiling: Tiling) -> Callable[..., Tensor]:
    """A product of x with random weights of a format, given a rotation or none."""
    generator = torch.Generator().manual_seed(5)
    inputs = x.shape[1]
    weight = (torch.randn(num_outputs, inputs, generator=generator) * inputs**-0.5).to(x)
    if format == "plain":
        return lambda rotation: small_m.linear_few_rows_triton(x, weight, bias, tiling, rotation)
    if format == "int4":
        codes = torch.randint(16, weight.shape, generator=generator).to(x.device)
        scales = torch.full((num_outputs, inputs // 128), 0.3 * inputs**-0.5).to(x)
        quantised = Int4Weight(pack_codes(codes), pack_units(scales, 128, inputs), None, 128, inputs)
        return lambda rotation: int4.int4_linear_triton(x, quantised, bias, tiling=tiling, rotation=rotation)
    codes, scales = fp8.quantize_weight(weight)
    input_scales = fp8.InputScales(None, format == "fp8 blocks")
    if input_scales.by_block:
        scales = torch.rand(-(-num_outputs // 128), -(-inputs // 128), generator=generator).to(x.device) * 0.01
    rows = fp8.quantize_rows(x, input_scales)
    return lambda rotation: fp8.fp8_linear_triton(rows, codes, scales, bias, tiling=tiling, rotation=rotation)


def check_projection(
    format: str, case: tuple[int, int, int, int], dtype: torch.dtype, device: str, tiling: Tiling, codes: bool = False
):
    """The bits of the product and then of the kernel that rotates."""
    scene = Scene(case, dtype, device)
    T, Q, G, D = case
    keys = scene.keys
    values = scene.values
    scales = None
    if codes:
        scales = torch.linspace(0.01, 0.02, 2 * G, device=device).view(2, G)
        keys, values = (torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device=device) for x in (keys, values))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, 256, generator=generator).to(device, dtype)
    bias = torch.randn((Q + 2 * G) * D, generator=generator).to(device, dtype)
    run = project(format, x, (Q + 2 * G) * D, bias, tiling)
    expected_keys = keys.clone()
    expected_values = values.clone()
    cos = scene.cos
    sin = scene.sin
    positions = scene.positions
    slots = scene.slots
    q, k, v = run(None).unflatten(1, (-1, D)).split([Q, G, G], dim=1)
    expected = rotate_and_store.triton(
        q, k, v, cos, sin, positions, slots, expected_keys, expected_values, None, scales
    )
    with poisoned():
        out = run(Rotation(cos, sin, positions, slots, keys, values, scales))
    assert out.shape == (T, Q * D)
    assert torch.equal(out.view(T, Q, D), expected)
    assert torch.equal(keys.view(torch.uint8), expected_keys.view(torch.uint8))
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))


@grouped()
@each_device
@pytest.mark.parametrize(
    ("tiling", "case", "dtype"),
    rotating(
        [Tiling(16, 32, 1), Tiling(32, 64, 2), Tiling(16, 64, 4)],
        [(1, 4, 1, 64), (5, 6, 2, 32), (3, 4, 2, 128)],
        [torch.float32, torch.float16],
    ),
)
def test_a_projection_rotates_and_stores(tiling, case, dtype, device):
    check_projection("plain", case, dtype, device, tiling)


@pytest.mark.gpu
@grouped("format")
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("format", ["plain", "fp8", "fp8 blocks", "int4"])
@pytest.mark.parametrize(
    "case", [(1, 64, 8, 64), (2, 32, 8, 128), (17, 32, 8, 128), (33, 8, 2, 256), (100, 32, 4, 128)]
)
def test_a_projection_of_any_format_rotates(format, case, codes):
    num_outputs = (case[1] + 2 * case[2]) * case[3]
    choose = {"plain": choose_tiling, "int4": choose_int4_tiling}.get(format, choose_fp8_tiling)
    tiling = choose(num_outputs, 256, False, case[0])
    check_projection(format, case, torch.bfloat16, "cuda", tiling, codes)
