"""A cache of e4m3 codes: what is written equals torch's conversion, and attention over codes equals attention over what
they stand for, in fp64; a row's bits do not depend on its pass."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.paged import Blocks
from slipstream.kernels.attention.ragged import ragged_attention, tile_tokens
from slipstream.kernels.attention.tree import tree_attention
from slipstream.kernels.kv.cache import move_rows
from slipstream.kernels.kv.fp8 import E4M3, decode, encode
from slipstream.kernels.kv.rope import rotate_and_store, store_context
from slipstream.tests.kernels import attention_scenes, test_ragged_attention, test_rope
from slipstream.tests.kernels.triton_runs import SLOW, each_device
from slipstream.tests.pairwise import grouped, rotating

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # the interpreter, masked rows
Write = Callable[..., Tensor]
NEXT = 0.07  # of a number, to the next e4m3 at most; rounding goes half as far


def random_scales(*shape: int, device: str = "cpu") -> Tensor:
    return (0.015 + 0.02 * torch.rand(*shape, generator=torch.Generator().manual_seed(0))).to(device)


def test_codes_are_rounded_to_the_nearest_and_saturate():
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = every[every.isfinite()]
    x = torch.cat((torch.linspace(-600, 600, 4001), torch.linspace(-0.1, 0.1, 2001)))
    codes = encode(x, torch.tensor(1.0)).float()
    nearest = (x[:, None] - finite).abs().amin(dim=1)
    torch.testing.assert_close((x - codes).abs(), nearest, atol=0, rtol=0)
    assert codes.max() == 448
    assert encode(torch.tensor([torch.inf, torch.nan]), torch.tensor(2.0)).float().tolist()[0] == 448
    assert encode(torch.tensor(torch.nan), torch.tensor(2.0)).float().isnan()
    assert torch.equal(decode(encode(3 * finite, torch.tensor(3.0)), torch.tensor(3.0), torch.float32), 3 * finite)


KERNELS = [rotate_and_store.reference, pytest.param(rotate_and_store.triton, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", [(5, 6, 2, 8), (2, 3, 1, 8, 6), (64, 32, 8, 128)])
def test_keys_and_values_are_written_as_codes(kernel, case):
    device = "cuda" if kernel is rotate_and_store.triton else "cpu"
    scene = test_rope.Scene(case, torch.float32, device)
    scales = random_scales(2, case[2], device=device)
    keys, values = (torch.zeros_like(x).to(E4M3) for x in (scene.keys, scene.values))
    kernel(*scene.arguments()[:7], keys, values, None, scales)
    decoded = decode(keys, scales[0, :, None], torch.float64)[scene.slots].cpu()
    torch.testing.assert_close(decoded, scene.turned(scene.k), atol=float(scales[0].max()) * 2**-9, rtol=NEXT)
    assert torch.equal(values.view(torch.uint8)[scene.slots], encode(scene.v, scales[1, :, None]).view(torch.uint8))


def codes_of_all(device: str) -> tuple[Tensor, Tensor]:
    """Numbers (4, 4, 16) of 2 heads' keys and values that are codes times powers of two, and these scales (2, 2): the
    interpreter does not round to e4m3 as GPUs do."""
    finite = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    x = finite[finite.isfinite()][:252].repeat(2)[:256].view(4, 4, 16).to(device)
    return x, torch.tensor([[1.0, 0.25], [8.0, 2.0**-7]], device=device)


@each_device
@torch.inference_mode()
def test_codes_come_back_from_the_kernels(device):
    """Beyond the largest code they saturate. The angle is 0."""
    x, scales = codes_of_all(device)
    kv = x * scales.flatten()[:, None]
    kv[1] *= 4096
    k, v = kv.split([2, 2], dim=1)
    cos = torch.ones(4, 16, device=device)
    sin = torch.zeros(4, 16, device=device)
    slots = torch.tensor([5, 0, 3, 2], device=device)
    cache = torch.zeros(1, 2, 6, 2, 16, device=device).to(E4M3)
    out = rotate_and_store.triton(k, k, v, cos, sin, slots.clamp(max=3), slots, *cache[0], None, scales)
    assert torch.equal(out, k)
    expected = x.clone()
    expected[1] = (4096 * x[1]).clamp(-448, 448)
    assert (expected[1] == 448).any()
    assert torch.equal(cache[0].float()[:, slots], torch.stack(expected.split([2, 2], dim=1)))


@each_device
def test_context_rows_are_written_as_codes(device):
    scene = test_rope.ContextScene(test_rope.Case(3, L=2, G=3, D=16, R=12), torch.float32, device)
    scales = random_scales(2, 2, 3, device=device)
    plain = scene.run(store_context.reference)
    for store in (store_context.reference, store_context.triton):
        scene.cache = torch.zeros_like(scene.cache).to(E4M3)
        codes = scene.run(lambda *args, store=store: store(*args, scales))
        decoded = decode(codes, scales[:, :, None, :, None], torch.float32)[:, :, scene.slots]
        error = (decoded - plain[:, :, scene.slots]).abs() / (plain[:, :, scene.slots].abs() + 1e-3)
        # The interpreter forgets to carry where rounding reaches the next power of two.
        assert error.median() < NEXT / 2
        assert (error > NEXT).float().mean() < (0.1 if store is store_context.triton and device == "cpu" else 1e-9)


def coded(scene: "test_ragged_attention.Scene | attention_scenes.Scene") -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Puts codes into the scene's cache; their scales, and what they stand for."""
    scales = random_scales(2, scene.case.G, device=str(scene.q.device))
    codes = [encode(x, scale[:, None]) for x, scale in zip((scene.keys, scene.values), scales, strict=True)]
    exact = [decode(x, scale[:, None], torch.float32) for x, scale in zip(codes, scales, strict=True)]
    scene.keys, scene.values = codes
    return scales, (exact[0], exact[1])


TREES = ("tree", "window, a tree", "sinks, a block", "cap, a tree")
CASES = {
    "both": test_ragged_attention.CASES["pages of one token"],
    "cap and sinks": replace(test_ragged_attention.CASES["sinks and a cap, window"], nodes=((40, 3), (130, 7))),
}
REAL = test_ragged_attention.REAL
GPU_CASES = {"busy": REAL, "64 nodes": test_ragged_attention.GPU_CASES["64 nodes"], "D 64": replace(REAL, D=64, Q=64)}
GPU_CASES["D 256"] = replace(REAL, D=256, Q=16)


@pytest.mark.parametrize(
    ("name", "dtype", "with_paths"), rotating(CASES, [torch.float32, torch.float16], [True, False])
)
def test_ragged_attention_over_codes(name, dtype, with_paths):
    check_ragged(replace(CASES[name], D=16 if dtype == torch.float32 else 32), dtype, "cpu", with_paths)


@pytest.mark.gpu
@grouped("dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", GPU_CASES)
@torch.inference_mode()
def test_ragged_attention_over_codes_on_a_gpu(name, dtype):
    check_ragged(GPU_CASES[name], dtype, "cuda", True)


def check_ragged(case: "test_ragged_attention.Case", dtype: torch.dtype, device: str, with_paths: bool):
    scene = test_ragged_attention.Scene(case, dtype, device)
    paths = scene.paths() if with_paths and case.mask == "tree" else None
    scales, exact = coded(scene)
    kernels = [ragged_attention.triton] if with_paths else [ragged_attention.triton, ragged_attention.reference]
    outs = [scene.run(lambda *x, run=run, **y: run(*x, **y, scales=scales), paths=paths) for run in kernels]
    scene.keys, scene.values = exact
    for out in outs:
        scene.check(out)


@grouped()
@each_device
@pytest.mark.parametrize("name", ["new nodes of a tree", *(pytest.param(name, marks=SLOW) for name in TREES)])
@torch.inference_mode()
def test_tree_attention_over_codes(name, device):
    case = attention_scenes.Case(lengths=(70, 5), N=4, mask="tree", D=16, Q=2, G=1)
    scene = attention_scenes.Scene(attention_scenes.CASES.get(name, case), torch.float32, device)
    scales, exact = coded(scene)
    outs = [scene.run(run, scales=scales) for run in (tree_attention.reference, tree_attention.triton)]
    scene.keys, scene.values = exact
    out, lse = scene.expected()
    for actual, actual_lse in outs:
        torch.testing.assert_close(actual.double(), out, atol=1e-5, rtol=1e-5)
        if scene.sinks is None:
            torch.testing.assert_close(actual_lse.double(), lse, atol=1e-5, rtol=1e-5)


@each_device
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_another_pass(device):
    """Segments of one pass alone, in the opposite order, and with other tiles."""
    dtype, tiny = (torch.float32, device == "cpu") if device == "cpu" else (torch.bfloat16, False)
    nodes = ((40, 1), (130, 3)) if tiny else REAL.nodes[:12]
    case = replace(test_ragged_attention.CASES["nodes of trees"], nodes=nodes, D=16 if tiny else 128)
    rows = [rows for _, rows in nodes]

    def answer(order):
        part = replace(case, nodes=tuple(nodes[s] for s in order))
        scene = test_ragged_attention.Scene(part, dtype, device, seeds=order, shuffle=order[0])
        paths = scene.paths()
        scales, _ = coded(scene)
        out = scene.run(lambda *x, **y: ragged_attention.triton(*x, **y, scales=scales), paths=paths)
        return list(out.split([rows[s] for s in order]))

    together = answer(list(range(len(nodes))))
    backwards = answer(list(reversed(range(len(nodes)))))[::-1]
    for s, rows_together in enumerate(together):
        assert torch.equal(rows_together, backwards[s])
        assert torch.equal(rows_together, answer([s])[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["busy", "D 64", "D 256"])
@torch.inference_mode()
def test_bits_do_not_depend_on_the_height_of_tiles(name):
    """Low tiles are multiplied by other instructions than high ones."""
    case = GPU_CASES[name]
    scene = test_ragged_attention.Scene(case, torch.bfloat16, "cuda")
    scales, _ = coded(scene)

    def run(**options):
        return scene.run(lambda *x, **y: ragged_attention.triton(*x, **y, scales=scales), **options)

    expected = run()
    tokens = tile_tokens(case.D, 2)
    heights = [Blocks(rows, tokens, 8 if rows * case.D > 64 * 128 else 4, 2) for rows in (16, 32, 64, 128)]
    for blocks in heights[: 3 if case.D > 128 else 4]:
        assert torch.equal(run(work=scene.plan(blocks=(blocks, blocks))), expected)


@each_device
def test_codes_move_as_they_are(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(4).view(1, 2, 16, 2, 16)
    sources = torch.tensor([[3, 9, 4]], device=device)
    destinations = torch.tensor([[2, 3, 4]], device=device)
    expected = codes.clone()
    expected[:, :, [2, 3, 4]] = codes[:, :, [3, 9, 4]]
    for move in (move_rows.reference, move_rows.triton):
        cache = codes.clone().view(E4M3)
        move(cache, sources, destinations)
        assert torch.equal(cache.view(torch.uint8), expected)
