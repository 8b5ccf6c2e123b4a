"""Attention over the paged cache against a softmax in fp64 over the very tokens that each node sees."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import tree as module
from slipstream.kernels.attention.paged import Blocks, fit_blocks
from slipstream.kernels.attention.tree import Parts, choose_blocks, choose_parts, choose_shares, tree_attention
from slipstream.kernels.grid_sync import barriers, done_counters
from slipstream.tests.kernels.attention_scenes import CASES, GPU_CASES, LONG, Case, Scene
from slipstream.tests.kernels.triton_runs import NO_INTERPRETER, SLOW, compiled, each_device, poisoned
from slipstream.tests.pairwise import grouped, rotating

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:overflow")  # the interpreter, in rows that pad
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the norm
IN_GATE = (
    *("nothing committed, a tree", "chain", "block", "tree", "D 8", "seven heads share", "window"),
    *("parts whose last holds nodes only", "pages of one token", "window within the nodes"),
    *("pages of 64 tokens", "window, a tree", "window, a block"),
    *("window within 64 nodes of a tree", "window, edges of pages", "window of one, a tree"),
    *("window, new nodes of a tree only", "starts", "starts, a tree", "starts and windows"),
    *("cap, new nodes only", "sinks, a tree", "sinks and a cap, parts of a long context"),
)
LAST = {
    "tree": (1, 5, 8),
    "33 nodes": (17, 32),
    "64 nodes of a tree": (60,),
    "pages of one token": (4,),
    "parts whose last holds nodes only": (3,),
    "new nodes only": (6,),
    "chain": (2, 4),
    "block": (5,),
    "window": (3,),
    "window within the nodes": (30,),
    "window, pages of 64 tokens": (16,),
    "window, a tree": (1, 5),
    "window within 64 nodes of a tree": (40,),
    "window of one, a block": (7,),
    "window, edges of tiles": (3,),
    "window, new nodes of a tree only": (15,),
}


@pytest.fixture(autouse=True)
def unwritten_shows() -> Iterator[None]:
    with poisoned():
        assert torch.empty(1).isnan()
        yield


def gate(names: Iterable[str], *gate_names: str) -> list[Any]:
    """`gate_names` run in the gate; the interpreter runs the others nightly."""
    return [name if name in gate_names else pytest.param(name, marks=SLOW) for name in names]


def check(results: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]):
    """Relative error of the norm; NaN never passes."""
    tolerance = TOLERANCES[results[0].dtype]
    for actual, right in zip(results, expected, strict=True):
        assert (actual.double() - right).norm() < tolerance * right.norm()
    assert (results[1].double() - expected[1]).abs().max() < 1e-3, "scores are summed in fp32 whatever the dtype"


@grouped()
@pytest.mark.parametrize("name", gate(CASES, *IN_GATE))
def test_reference_equals_softmax_over_what_each_node_sees(name):
    scene = Scene(CASES[name], torch.float32, "cpu")
    check(scene.run(tree_attention.reference), scene.expected())


@grouped("dtype")
@each_device
@pytest.mark.parametrize(
    "dtype",
    # The interpreter is slow in fp32, whose tiles are small, and multiplies the bits of bf16 as integers.
    [torch.float16, *(pytest.param(dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.bfloat16))],
)
@pytest.mark.parametrize("name", gate(CASES, *IN_GATE))
def test_kernel_equals_softmax_over_what_each_node_sees(name, dtype, device):
    scene = Scene(CASES[name], dtype, device)
    check(scene.run(tree_attention.triton), scene.expected())


@NO_INTERPRETER
@pytest.mark.parametrize("name", gate(["D 8", "decode", "33 nodes", "D 256"], "D 8"))
def test_fp32_under_the_interpreter(name):
    scene = Scene(CASES[name], torch.float32, "cpu")
    check(scene.run(tree_attention.triton), scene.expected())


@each_device
@pytest.mark.parametrize(("nodes", "window"), [(32, 20), (64, 33), (64, 90)])
def test_a_window_of_a_tree_that_is_a_chain(nodes, window, device):
    """Every bit of a mask is set."""
    scene = Scene(Case(lengths=(100, 0), N=nodes, window=window), torch.float16, device)
    expected = scene.expected()
    bits = torch.ones(nodes, dtype=torch.int64, device=device) << torch.arange(nodes, device=device)
    scene.ancestors = bits.cumsum(dim=0).expand(len(scene.lengths), -1).contiguous()
    scene.case = replace(scene.case, mask="tree")
    check(scene.run(tree_attention.reference), expected)
    check(scene.run(tree_attention.triton), expected)


@grouped()
@each_device
@pytest.mark.parametrize(
    ("blocks", "splits"), rotating([Blocks(16, 64, 4, 3), Blocks(32, 32, 4, 2), Blocks(16, 16, 4, 2)], [1, 2, 7, 32])
)
def test_any_cut_gives_the_same(blocks, splits, device):
    scene = Scene(replace(CASES["parts of a long context"], lengths=(530, 0), mask="tree"), torch.float16, device)
    check(scene.run(tree_attention.triton, blocks=blocks, parts=Parts(splits)), scene.expected())
    assert not done_counters(torch.device(device)).any(), "counters are left as they were found"


def test_parts_shrink_as_the_batch_grows():
    assert [choose_parts(batch, 8, 16, 32768, 128).max_parts for batch in (1, 2, 8, 32)] == [32, 24, 6, 1]
    assert [choose_parts(1, 8, 16, capacity, 128).max_parts for capacity in (1, 64, 65, 1024)] == [1, 1, 2, 16]
    assert [choose_parts(1, 8, rows, 32768, 128).max_parts for rows in (32, 64, 128)] == [32, 16, 8]
    assert {choose_parts(batch, 8, 16, 32768, 128).max_parts for batch in range(5, 9)} == {6}
    assert choose_parts(8, 8, 16, 32768, 256).max_parts == 4, "of wider heads two programs run at a time, not three"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "head_dim", "window", "has_codes"),
    [
        *((128, 128, 0, 0), (64, 256, 0, 0), (64, 128, 0, 0), (64, 128, 9, 0), (128, 128, 0, 1), (64, 256, 0, 1)),
        *((16, 512, 0, 0), (64, 512, 0, 0), (64, 512, 0, 1)),
    ],
)
def test_blocks_fit_into_99_kb_of_shared_memory(num_rows, head_dim, window, has_codes):
    """sm_86, 89 and 120 have 99 KB; the compiler says how much a program takes."""
    blocks = choose_blocks(1, num_rows, head_dim, 2)
    assert fit_blocks(blocks, head_dim, 2, 227 << 10) == blocks, "an H100 has room"
    blocks = fit_blocks(blocks, head_dim, 2, 99 << 10)
    blocks = blocks._replace(stages=blocks.stages + has_codes)
    assert compiled_for(89, blocks, head_dim, window, has_codes)[0] <= 99 << 10


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "stages"), [(16, 3), (32, 4)])
def test_codes_are_converted_two_at_a_time_and_never_loaded_one_by_one(num_rows, stages):
    """For an H100, 64 tokens and heads of 128: a thread of 128 has 64 codes of keys and 64 of values."""
    _, converted, single = compiled_for(90, Blocks(num_rows, 64, 4, stages), 128, 0, 1)
    assert converted == 64
    assert single == 0


def compiled_for(capability: int, blocks: Blocks, head_dim: int, window: int, has_codes: int) -> list[int]:
    output = compiled("compile_attention.py", capability, *blocks, head_dim, window, has_codes)
    return [int(number) for number in output.split()]


@pytest.mark.parametrize("rows", [16, 64])
def test_shares_cover_the_rows(rows):
    for num_parts in range(1, 33):
        share = choose_shares(Blocks(rows, 64, 4, 3), Parts(num_parts), 128)["SHARE"]
        assert num_parts * share >= rows, "each program merges one share"
        assert rows % share == 0
        assert num_parts == 1 or share < rows, "a share as large as the tile says that there is nothing to merge"


def test_without_gradients_on_a_gpu_only_does_the_kernel_run():
    scene = Scene(CASES["tree"], torch.float32, "cpu")
    check(scene.run(tree_attention), scene.expected())
    scene.q.requires_grad_()
    out, _ = scene.run(tree_attention)
    out.sum().backward()
    assert scene.q.grad is not None


@pytest.mark.gpu
@grouped("dtype")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", GPU_CASES)
@torch.inference_mode()
def test_real_shapes(name, dtype):
    scene = Scene(GPU_CASES[name], dtype, "cuda")
    check(scene.run(tree_attention), scene.expected())


@pytest.mark.gpu
@torch.inference_mode()
def test_a_cache_with_more_cells_than_32_bits_count():
    scene = Scene(replace(GPU_CASES["batch 8"], lengths=LONG[:3]), torch.bfloat16, "cuda")
    expected = scene.run(tree_attention)
    cells = scene.keys[0].numel()
    ahead = 2**31 // cells + 1  # pages that nothing reads
    for name in ("keys", "values"):
        tensor = getattr(scene, name)
        cache = torch.empty(ahead + len(tensor), *tensor.shape[1:], dtype=tensor.dtype, device="cuda")
        cache[ahead:] = tensor
        setattr(scene, name, cache)
    scene.pages += ahead
    assert all(map(torch.equal, scene.run(tree_attention), expected))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["batch 1, 700 tokens", "batch 1, 16 nodes", "batch 8", "32k tokens"])
@torch.inference_mode()
def test_repeats_are_bit_identical(name, monkeypatch):
    """Whichever program comes last; the result must not show which. Programs may have to run one after another: then
    the last merges what all would."""
    scene = Scene(GPU_CASES[name], torch.bfloat16, "cuda")
    expected = scene.run(tree_attention)
    for _ in range(100):
        assert all(map(torch.equal, scene.run(tree_attention), expected))
    assert not (barriers(torch.device("cuda", 0)) & 0x7FFFFFFF).any()
    monkeypatch.setattr(module, "all_resident", lambda *_: False)
    assert all(map(torch.equal, scene.run(tree_attention), expected))
    assert not done_counters(torch.device("cuda", 0)).any()


@pytest.mark.gpu
@torch.inference_mode()
def test_rows_that_pad_a_batch_change_nothing():
    scene = Scene(replace(GPU_CASES["batch 8"], lengths=LONG[:3]), torch.bfloat16, "cuda")
    padded = scene.run(tree_attention)  # six requests
    scene.rows, scene.lengths, scene.q, scene.ancestors = (
        x[:5] for x in (scene.rows, scene.lengths, scene.q, scene.ancestors)
    )
    assert all(map(torch.equal, scene.run(tree_attention), padded))


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_follows_the_lengths_on_the_device():
    scene = Scene(GPU_CASES["batch 8"], torch.bfloat16, "cuda")
    # rows that pad, too, are compared
    keys = scene.keys.nan_to_num(0.5)
    values = scene.values.nan_to_num(0.5)
    lengths = scene.lengths.clone()

    def attend():
        out = tree_attention(scene.q, keys, values, scene.pages, scene.rows, lengths, scene.ancestors, "tree", 0.3)
        assert isinstance(out, Tensor)
        return out

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for share in (1.0, 0.0, 0.5, 0.01, 0.9):
        lengths.copy_((scene.lengths * share).long())
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, attend())


def last_of(case: Case, first_node: int, kernel: object, dtype: torch.dtype, device: str):
    scene = Scene(case, dtype, device)
    expected = tuple(x[:, first_node:] for x in scene.expected())
    scene.q = scene.q[:, first_node:].contiguous()
    if scene.ancestors is not None:
        scene.ancestors = scene.ancestors[:, first_node:].contiguous()
    else:  # rows of a tree may have any depth, so the kernel reads from the root's window on
        scene.give_back(first_position=first_node)
    results = scene.run(kernel, first_node=first_node)
    check(results, expected)


@grouped()
@pytest.mark.parametrize("name", LAST)
def test_last_nodes_of_the_reference(name):
    """The earlier nodes are in the cache: the result equals the last rows of attention over all nodes."""
    for first_node in LAST[name]:
        last_of(CASES[name], first_node, tree_attention.reference, torch.float32, "cpu")


@grouped()
@each_device
@pytest.mark.parametrize("name", gate(LAST, "tree", "window", "pages of one token", "new nodes only", "window, a tree"))
def test_last_nodes_of_the_kernel(name, device):
    for first_node in LAST[name]:
        last_of(CASES[name], first_node, tree_attention.triton, torch.float16, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("nodes", "first_node"), [(8, 4), (16, 12), (64, 54)])
@pytest.mark.parametrize("name", ["batch 1, 16 nodes", "batch 32", "batch 32, pages of one token"])
def test_levels_of_real_trees(name, nodes, first_node):
    last_of(replace(GPU_CASES[name], N=nodes), first_node, tree_attention.triton, torch.bfloat16, "cuda")
