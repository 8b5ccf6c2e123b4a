"""Attention of a ragged pass against a softmax in fp64 over the very tokens that each row sees, and its bits against
those of the same row in another pass."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from slipstream.kernels.attention import ragged
from slipstream.kernels.attention.paged import Blocks
from slipstream.kernels.attention.paths import Paths, trace_paths, trace_paths_triton
from slipstream.kernels.attention.ragged import (
    NO_TILE,
    SHARED,
    START,
    USED,
    Segments,
    Tiles,
    Work,
    choose_blocks,
    plan_work,
    plan_work_triton,
    ragged_attention,
    ragged_attention_triton,
    tile_tokens,
)
from slipstream.kernels.attention.tree import fit_blocks
from slipstream.kernels.grid_sync import done_counters
from slipstream.tests.kernels.attention_scenes import attend_in_fp64, path_of, random_parents, signed_mask
from slipstream.tests.kernels.triton_runs import NO_INTERPRETER, SLOW, each_device, poisoned
from slipstream.tests.pairwise import grouped
from slipstream.tests.tables import objects_of

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # the interpreter, masked rows
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the norm
SCALE = 0.3  # as attend_in_fp64 has it

Rows = tuple[tuple[int, int], ...]  # committed tokens and rows of each segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The segments of a pass."""

    nodes: Rows = ()
    chunks: Rows = ()
    mask: str = "causal"
    Q: int = 4
    G: int = 2
    D: int = 16
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    unused: int = 3  # rows

    @property
    def segments(self) -> Rows:
        return self.nodes + self.chunks

    @property
    def most_nodes(self) -> int:
        return max((rows for _, rows in self.nodes), default=1)


CASES = objects_of(__file__, "cases", Case)
IN_GATE = (
    "both",
    "window of trees",
    "one row",
    "nothing",
    "33 nodes of a tree",
    "window within the rows",
    "sinks and a cap, window",
)
NAMES = [name if name in IN_GATE else pytest.param(name, marks=SLOW) for name in CASES]
BUSY = random.Random(0)
REAL = Case(
    nodes=tuple((BUSY.randrange(1, 5000), BUSY.choice((0, 1, 1, 2, 4, 8))) for _ in range(40)),
    chunks=((0, 300), (512, 81), (4090, 700), (77, 1)),
    mask="tree",
    Q=32,
    G=8,
    D=128,
)
GPU_CASES = objects_of(__file__, "gpu_cases", partial(replace, REAL))


@pytest.fixture(autouse=True)
def unwritten_shows() -> Iterator[None]:
    with poisoned():
        assert torch.empty(1).isnan()
        yield


class Scene:
    """A cache whose unwritten slots, and those before every window, are NaN. A request's tokens, from the first, depend
    on its seed alone, so that it can appear in other passes."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str, seeds: list[int] | None = None, shuffle: int = 0):
        self.case = case
        segments = case.segments
        page = case.page_size
        self.seeds = list(range(len(segments))) if seeds is None else seeds
        needed = [triton.cdiv(length + rows, page) for length, rows in segments]
        generator = torch.Generator().manual_seed(shuffle)
        ids = (torch.randperm(sum(needed), generator=generator) + 1).split(needed)
        slots = torch.randperm(len(segments), generator=generator)
        pages = torch.zeros(len(segments), max(needed) + 1, dtype=torch.int64)
        starts = torch.tensor([0, *(rows for _, rows in segments)]).cumsum(0)
        T = int(starts[-1]) + case.unused
        options = {"dtype": dtype, "device": device}
        self.q = torch.full((T, case.Q, case.D), torch.nan, **options)
        cache = torch.full((2, (sum(needed) + 1) * page, case.G, case.D), torch.nan, **options)
        ancestors = torch.full((T,), -1)
        self.parents: list[list[int]] = []
        for s, (length, rows) in enumerate(segments):
            generator = torch.Generator().manual_seed(self.seeds[s])
            token = torch.arange(length + rows)
            kv = torch.randn(length + rows, 2, case.G, case.D, generator=generator).transpose(0, 1)
            unseen = 0 if case.window is None else max(0, length + 1 - case.window)
            kv[:, :unseen] = torch.nan
            pages[slots[s], : needed[s]] = ids[s]
            at = pages[slots[s], token // page] * page + token % page
            cache[:, at.to(device)] = kv.to(device, dtype)
            pages[slots[s], : unseen // page] = 0
            generator = torch.Generator().manual_seed(1000 + self.seeds[s])
            queries = torch.randn(length + rows, case.Q, case.D, generator=generator)[length:]
            self.q[starts[s] : starts[s + 1]] = queries.to(device, dtype)
            self.parents.append(random_parents(self.seeds[s], rows))
            if s < len(case.nodes):
                masks = [signed_mask(self.path(s, node)) for node in range(rows)]
                ancestors[starts[s] : starts[s + 1]] = torch.tensor(masks, dtype=torch.int64)
        self.keys, self.values = cache.unflatten(1, (-1, page))
        self.pages = pages.to(device)
        self.ancestors = ancestors.to(device)
        self.segments = Segments(
            starts.int().to(device),
            slots.to(device),
            torch.tensor([length for length, _ in segments]).to(device),
            len(case.nodes),
            case.most_nodes,
        )
        self.used = int(starts[-1])
        sinks = 2 * torch.randn(case.Q, generator=torch.Generator().manual_seed(7))
        self.sinks = sinks.to(device, dtype) if case.sinks else None

    def path(self, s: int, node: int) -> list[int]:
        """The node and its ancestors."""
        return path_of(self.parents[s], node)

    def seen(self, s: int, row: int) -> list[int]:
        """Returns the places that a row sees."""
        length = self.case.segments[s][0]
        path = list(range(row + 1))
        if self.case.mask == "tree" and s < len(self.case.nodes):
            path = self.path(s, row)
        first = 0 if self.case.window is None else max(0, length + len(path) - self.case.window)
        visible = path if self.case.window is None else path[-self.case.window :]
        return [*range(first, length), *(length + node for node in visible)]

    def plan(self, **options: object) -> Work:
        case = self.case
        return plan_work_triton(
            self.segments, len(self.q), case.Q, case.G, case.D, self.q.dtype, window=case.window, **options
        )

    def paths(self, trace: object = trace_paths_triton) -> Paths:
        starts = self.segments.starts
        decoding = self.segments.num_decoding
        positions = torch.zeros_like(self.ancestors)
        for s, (length, rows) in enumerate(self.case.segments):
            for row in range(rows):
                depth = len(self.path(s, row)) - 1 if s < decoding else row
                positions[int(starts[s]) + row] = length + depth
        return trace(starts, decoding, self.ancestors, positions)

    def run(
        self, kernel: object = ragged_attention_triton, work: Work | None = None, paths: Paths | None = None
    ) -> Tensor:
        """The rows in use."""
        options = {"window": self.case.window, "softcap": self.case.softcap, "sinks": self.sinks}
        options |= {"paths": paths, "work": work}
        out = kernel(
            self.q, self.keys, self.values, self.pages, self.segments, self.ancestors, self.case.mask, SCALE, **options
        )
        assert out.dtype == self.q.dtype
        assert out.shape == self.q.shape
        return out[: self.used]

    def check(self, out: Tensor):
        """Against a softmax in fp64, segment by segment: their relative errors; NaN never passes."""
        case = self.case
        starts = self.segments.starts.tolist()
        for s, (length, rows) in enumerate(case.segments):
            token = torch.arange(length + rows, device=self.q.device)
            at = self.pages[self.segments.slots[s]][token // case.page_size] * case.page_size + token % case.page_size
            keys, values = (x.flatten(0, 1)[at] for x in (self.keys, self.values))
            for row in range(rows):
                tokens = self.seen(s, row)
                q = self.q[starts[s] + row]
                right, _ = attend_in_fp64(q, keys[tokens], values[tokens], case.softcap, self.sinks)
                error = (out[starts[s] + row].double() - right).norm() / right.norm()
                assert error < TOLERANCES[out.dtype], (s, row)


@grouped()
@pytest.mark.parametrize("name", NAMES)
def test_reference_equals_softmax_over_what_each_row_sees(name):
    scene = Scene(CASES[name], torch.float32, "cpu")
    scene.check(scene.run(ragged_attention.reference))
    scene.check(scene.run(ragged_attention))


@grouped("dtype")
@each_device
@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(x, marks=pytest.mark.gpu) for x in list(TOLERANCES)[1:])]
)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_kernel_equals_softmax_over_what_each_row_sees(name, dtype, device):
    scene = Scene(CASES[name], dtype, device)
    scene.check(scene.run())
    assert not done_counters(torch.device(device)).any(), "counters are left as they were found"


@NO_INTERPRETER
@pytest.mark.parametrize("name", ["both"])
def test_fp16_under_the_interpreter(name):
    """Tiles of prompts are higher than those of nodes, and part of their tokens."""
    scene = Scene(replace(CASES[name], D=64), torch.float16, "cpu")
    scene.check(scene.run())


def same(actual: Tiles | None, right: Tiles | None):
    if actual is None or right is None:
        assert actual is right
        return
    assert actual[2:] == right[2:]
    (records, ranges), (right_records, right_ranges) = (
        (x.cpu()[:, : USED.value] for x in y[:2]) for y in (actual, right)
    )
    after = int((right_records[:, START.value] == NO_TILE.value).nonzero()[0])
    assert torch.equal(records[: after + 1], right_records[: after + 1])
    assert torch.equal(ranges, right_ranges)


@grouped()
@each_device
@pytest.mark.parametrize("seed", range(12))
def test_plan_of_the_kernel_is_that_of_the_reference(seed, device):
    rng = random.Random(seed)

    def length():
        return rng.choice((0, 1, 127, 128, rng.randrange(600), rng.randrange(9000), rng.randrange(70000)))

    max_nodes = rng.choice((1, 4, 16, 64))
    nodes = [(length(), rng.choice((0, 1, rng.randint(1, max_nodes)))) for _ in range(rng.choice((0, 1, 5, 40)))]
    chunks = [(length(), rng.choice((0, 1, 33, rng.randint(1, 900)))) for _ in range(rng.choice((0, 1, 5)))]
    rows = [rows for _, rows in (*nodes, *chunks)]
    S = len(rows)
    segments = Segments(
        torch.tensor([0, *rows], device=device).cumsum(0).int(),
        torch.randperm(S, device=device),
        torch.tensor([length for length, _ in (*nodes, *chunks)], dtype=torch.int64, device=device),
        len(nodes),
        max_nodes,
        by_path=bool(seed % 2),
    )
    Q, G, D = rng.choice(((32, 8, 128), (14, 2, 64), (8, 8, 64), (16, 1, 256)))
    window = rng.choice((None, 1, 100, 128, 4096))
    dtype = rng.choice((torch.bfloat16, torch.float32))
    num_rows = sum(rows) + rng.choice((0, 7))
    if not S or not num_rows:
        return
    for actual, right in zip(
        plan_work_triton(segments, num_rows, Q, G, D, dtype, window=window),
        plan_work.reference(segments, num_rows, Q, G, D, dtype, window=window),
        strict=True,
    ):
        same(actual, right)


@each_device
@pytest.mark.parametrize(("longest", "idle", "is_own"), [(700, 1, True), (700, 9, False), (4000, 0, False)])
def test_each_tile_has_a_program_where_that_fills_the_device(longest, idle, is_own, device):
    """16 requests with 8 KV heads; not if many have no nodes, nor if one is far longer than the others."""
    lengths = [*range(540, 600, 4), longest]
    rows = [0] * idle + [1 + index % 4 for index in range(16 - idle)]
    starts = torch.tensor([0, *rows], device=device).cumsum(0).int()
    slots = torch.arange(16, device=device)
    lengths_ = torch.tensor(lengths, device=device)
    segments = Segments(starts, slots, lengths_, 16, 4)
    actual = plan_work_triton(segments, sum(rows), 32, 8, 128, torch.bfloat16)
    right = plan_work.reference(segments, sum(rows), 32, 8, 128, torch.bfloat16)
    same(actual.nodes, right.nodes)
    records = right.nodes.records[: 16 - idle]
    whole_starts = [index * 6 for index in range(16 - idle)]
    assert (records[:, START.value].tolist() == whole_starts) == is_own
    assert not (is_own and records[:, SHARED.value].any())


@torch.inference_mode()
def test_bits_do_not_depend_on_tiles_having_a_program_each(monkeypatch):
    monkeypatch.setattr(ragged, "PROGRAMS", 2)
    scene = Scene(Case(nodes=((600, 3), (500, 2)), mask="tree", G=1, Q=2), torch.float32, "cpu")
    work = scene.plan()
    assert work.nodes.records[:2, START.value].tolist() == [0, 5]
    expected = scene.run(work=work)
    scene.check(expected)
    assert torch.equal(scene.run(work=scene.plan(programs=3)), expected)


@each_device
@pytest.mark.parametrize("programs", [1, 3, pytest.param(40, marks=SLOW)])
@torch.inference_mode()
def test_bits_do_not_depend_on_how_work_is_shared_out(programs, device):
    case = Case(nodes=((130, 3), (600, 2)), chunks=((400, 9),), mask="tree", G=1, Q=2)
    scene = Scene(case, torch.float32, device)
    expected = scene.run()
    scene.check(expected)
    work = scene.plan(programs=programs)
    assert torch.equal(scene.run(work=work), expected)
    for tiles in work:
        count = int((tiles.records[:, START.value] == NO_TILE.value).nonzero()[0])
        assert tiles.records[:count, SHARED.value].any() == (programs > 1), "the test is about shared tiles"
    assert not done_counters(torch.device(device)).any()


def alone(case: Case, s: int, dtype: torch.dtype, device: str) -> Tensor:
    """The rows of a segment in a pass of its own."""
    segment = (case.segments[s],)
    is_node = s < len(case.nodes)
    case = replace(case, nodes=segment if is_node else (), chunks=() if is_node else segment, unused=0)
    return Scene(case, dtype, device, seeds=[s], shuffle=5).run()


@each_device
@pytest.mark.parametrize("features", [{"window": 250}, {"sinks": True, "softcap": 2.0}], ids=["window", "sinks, cap"])
@torch.inference_mode()
def test_bits_of_a_row_do_not_depend_on_its_company(features, device):
    case = Case(nodes=((130, 3), (300, 2), (0, 1)), chunks=((33, 20), (270, 9)), mask="tree", G=1, Q=2, **features)
    scene = Scene(case, torch.float32, device)
    out = scene.run()
    starts = scene.segments.starts.tolist()
    for s in range(len(case.segments)):
        assert torch.equal(alone(case, s, torch.float32, device), out[starts[s] : starts[s + 1]])


def add_in_fours(
    _: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_options: object
) -> TensorHandle:
    """A product of the interpreter that adds four numbers at a time, as tensor cores add 16: unlike NumPy's, a row's
    bits depend on which numbers are added together, and not on where in the tile the row lies."""
    total = d.data.copy()
    for k in range(0, a.data.shape[1], 4):
        first, second, third, fourth = (a.data[:, i : i + 1] * b.data[i : i + 1] for i in range(k, k + 4))
        total += (first + second) + (third + fourth)
    return TensorHandle(total, d.dtype.scalar)


def check_paths(scene: Scene, work: Work | None = None):
    """Nodes have the bits that they have where their path lies in the cache as a chain."""
    out = scene.run(work=work, paths=scene.paths())
    device = scene.q.device
    scene.check(out)
    starts = scene.segments.starts.tolist()
    for s, (length, rows) in enumerate(scene.case.nodes):
        slot = scene.segments.slots[s : s + 1]
        pages = scene.pages[slot[0]]
        places = torch.arange(length, length + rows, device=device)
        at = pages[places // scene.case.page_size] * scene.case.page_size + places % scene.case.page_size
        for leaf in set(range(rows)) - set(scene.parents[s]):
            path = torch.tensor(scene.path(s, leaf), device=device)
            keys = scene.keys.clone()
            values = scene.values.clone()
            for cache in (keys, values):
                cache.flatten(0, 1)[at[: len(path)]] = cache.flatten(0, 1)[at[path]]
            q = scene.q[starts[s] + path]
            count = torch.tensor([0, len(path)], dtype=torch.int32, device=device)
            chain = Segments(count, slot, scene.segments.lengths[s : s + 1], 1, scene.segments.most_nodes)
            right = ragged_attention_triton(
                q,
                keys,
                values,
                scene.pages,
                chain,
                None,
                "causal",
                SCALE,
                window=scene.case.window,
                softcap=scene.case.softcap,
                sinks=scene.sinks,
            )
            assert torch.equal(out[starts[s] + path], right)


@each_device
@torch.inference_mode()
def test_paths_of_the_kernel_are_those_of_the_reference(device):
    case = Case(nodes=((5, 64), (0, 1), (130, 17)), chunks=((3, 9),), mask="tree")
    scene = Scene(case, torch.float32, device)
    right = scene.paths(trace_paths)
    actual = scene.paths()
    starts = scene.segments.starts.tolist()
    for s, (_, rows) in enumerate(scene.case.nodes):
        segment = slice(starts[s], starts[s + 1])
        assert actual.of_row[segment].tolist() == right.of_row[segment].tolist()
        for path, leaf in enumerate(sorted(set(range(rows)) - set(scene.parents[s]))):
            nodes = scene.path(s, leaf)
            for paths in (right, actual):
                assert paths.nodes[starts[s] + path, : len(nodes)].tolist() == nodes


@each_device
@pytest.mark.parametrize(
    "case",
    [
        Case(nodes=((125, 9), (0, 1), (318, 5)), chunks=((33, 5),), mask="tree", G=1, Q=4),
        Case(nodes=((126, 14),), mask="tree", G=1, Q=4, page_size=1, window=19),
        Case(nodes=((126, 9),), mask="tree", G=1, Q=4, sinks=True, softcap=2.0),
    ],
    ids=["parts", "window", "sinks and a cap"],
)
@torch.inference_mode()
def test_nodes_of_a_tree_have_the_bits_of_a_chain(case, device, monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "create_dot", add_in_fours)
    scene = Scene(case, torch.float32, device)
    check_paths(scene, scene.plan(programs=3))


@pytest.mark.gpu
@grouped("dtype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "name",
    [
        *("busy", "window", "D 256", "D 512", "D 64", "64 nodes", "pages of one token", "sinks, window"),
        "sinks and a cap",
    ],
)
@torch.inference_mode()
def test_nodes_of_real_trees_have_the_bits_of_a_chain(name, dtype):
    check_paths(Scene(replace(GPU_CASES[name], mask="tree"), dtype, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cuts", [(7,), (1, 16, 40, 90, 91)])
@torch.inference_mode()
def test_bits_of_a_prompt_do_not_depend_on_its_chunks(cuts, dtype):
    # parts grow in between
    first = 3010
    last = 3110
    device = "cuda"
    case = replace(REAL, nodes=(), chunks=((first, last - first),))
    scene = Scene(case, dtype, device, seeds=[9])
    expected = scene.run()
    edges = [0, *cuts, last - first]
    for begin, end in zip(edges, edges[1:], strict=False):
        segments = scene.segments._replace(
            starts=torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            lengths=torch.tensor([first + begin], device=device),
        )
        q = scene.q[begin:end].contiguous()
        out = ragged_attention_triton(q, scene.keys, scene.values, scene.pages, segments, None, "causal", SCALE)
        assert torch.equal(out, expected[begin:end])


@pytest.mark.parametrize(("decoding", "nodes"), [(1, 1), (1, 16), (40, 64)])
def test_tiles_of_heads_of_512_dims_fit_into_a_multiprocessor(decoding, nodes):
    """A program of an H100 has 227 KB of shared memory, and its threads 255 registers for the two sums of their rows,
    of a part and of all before it."""
    for blocks in choose_blocks(decoding, nodes, 512, 16, 2, 512, 2):
        assert fit_blocks(blocks, 512, 2, 227 << 10) == blocks
        assert 2 * blocks.rows * 512 <= 128 * 32 * blocks.warps, "half of the registers"


@pytest.mark.gpu
@grouped("dtype")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", GPU_CASES)
@torch.inference_mode()
def test_real_shapes(name, dtype):
    scene = Scene(GPU_CASES[name], dtype, "cuda")
    scene.check(scene.run())
    assert not done_counters(torch.device("cuda", 0)).any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["busy", "window", "D 256", "D 512", "D 64", "one long request", "sinks, window", "sinks and a cap"]
)
@torch.inference_mode()
def test_bits_in_bf16(name):
    """Whatever the company, the tiles' heights and how they are shared; ten runs each, for races."""
    case = GPU_CASES[name]
    scene = Scene(case, torch.bfloat16, "cuda")
    expected = scene.run()
    starts = scene.segments.starts.tolist()
    heights = [
        Blocks(rows, tile_tokens(case.D, 2), 8 if rows * case.D > 64 * 128 else 4, 2)
        for rows in ((16, 32, 64, 128) if case.D <= 128 else (16, 32, 64))
    ]
    for blocks in [(x, y) for x in heights for y in heights if min(x.rows, y.rows) >= case.Q // case.G]:
        for programs in (None, 3):
            for _ in range(10):
                assert torch.equal(scene.run(work=scene.plan(blocks=blocks, programs=programs)), expected)
    for s in range(0, len(case.segments), 7):
        assert torch.equal(alone(case, s, torch.bfloat16, "cuda"), expected[starts[s] : starts[s + 1]])


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 100, 3071, 3072, 5000])
@torch.inference_mode()
def test_a_token_has_the_bits_that_it_would_have_in_a_prompt(length):
    case = replace(REAL, nodes=((length, 1),), chunks=())
    node = Scene(case, torch.bfloat16, "cuda", seeds=[3])
    chunk = Scene(replace(case, nodes=(), chunks=case.nodes), torch.bfloat16, "cuda", seeds=[3])
    assert torch.equal(node.run(), chunk.run())


@pytest.mark.gpu
@torch.inference_mode()
def test_a_graph_follows_the_segments_on_the_device():
    scene = Scene(REAL, torch.bfloat16, "cuda")
    lengths = scene.segments.lengths.clone()
    starts = scene.segments.starts.clone()
    scene.keys = scene.keys.nan_to_num(0.5)
    scene.values = scene.values.nan_to_num(0.5)
    scene.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = scene.run()
    for share in (1.0, 0.0, 0.5, 0.01, 0.9):
        scene.segments.lengths.copy_((lengths * share).long())
        scene.segments.starts.copy_((starts * share).int())
        captured.fill_(torch.nan)
        graph.replay()
        num_rows = int(scene.segments.starts[-1])
        assert torch.equal(captured[:num_rows], scene.run()[:num_rows])


@pytest.mark.gpu
@torch.inference_mode()
def test_a_cache_with_more_cells_than_32_bits_count():
    scene = Scene(replace(REAL, nodes=REAL.nodes[:3], chunks=((300, 40),)), torch.bfloat16, "cuda")
    expected = scene.run()
    cells = scene.keys[0].numel()
    ahead = 2**31 // cells + 1  # pages that nothing reads
    for name in ("keys", "values"):
        tensor = getattr(scene, name)
        cache = torch.empty(ahead + len(tensor), *tensor.shape[1:], dtype=tensor.dtype, device="cuda")
        cache[ahead:] = tensor
        setattr(scene, name, cache)
    scene.pages += ahead
    assert torch.equal(scene.run(), expected)
