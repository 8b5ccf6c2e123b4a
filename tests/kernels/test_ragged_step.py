"""The steps around a ragged pass: the references against loops over lists, the kernels against the references."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.ragged import _part, places_of_parts
from slipstream.kernels.speculation.ragged import (
    BINS,
    Chunks,
    Heads,
    Layout,
    Stored,
    Verified,
    admit,
    lay_out,
    select_heads,
    store,
    verify_rows,
)
from slipstream.tests.kernels.test_verify import VOCAB, padded, random_tree, walk
from slipstream.tests.kernels.triton_runs import SLOW, each_device, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating

PAGES = 8  # of a request
UNUSED = {"tokens": -1, "parents": -1, "probabilities": 0, "bins": -1}


def equal(actual: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]):
    for name, value, exact in zip(type(expected)._fields, actual, expected, strict=True):
        assert (value is None) == (exact is None), name
        if value is not None and exact is not None:
            assert value.dtype == exact.dtype, name
            assert torch.equal(value, exact), name


def on(device: str, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """A copy."""
    return type(tensors)(*(None if x is None else x.to(device, copy=True) for x in tensors))


@dataclass
class Scene:
    """Everything of a pass, on the CPU."""

    stored: Stored
    requests: Tensor
    counts: Tensor
    chunks: Chunks
    pages: Tensor
    page_size: int
    num_rows: int
    num_heads: int
    branches: bool
    padding: int
    sampled: Tensor  # by head

    @property
    def sizes(self) -> list[int]:
        return self.counts.tolist() + self.chunks.counts.tolist()

    def lay_out_args(self, device: str) -> tuple:
        stored = on(device, self.stored)
        chunks = on(device, self.chunks)
        return (
            stored,
            self.counts.to(device),
            self.requests.to(device),
            chunks,
            self.pages.to(device),
            self.page_size,
            self.num_rows,
            self.branches,
            self.padding,
        )

    def new_results(self, device: str) -> Tensor:
        width = 2 + (3 if self.branches else 2) * self.stored.tokens.shape[1]
        return torch.full((len(self.sizes), width + 3), 77, dtype=torch.int32, device=device)[:, :width]


def random_stored(rng: random.Random, slots: int, width: int, branches: bool) -> Stored:
    """The last slot is padding."""
    trees = [random_tree(rng, width, chain=not branches) for _ in range(slots - 1)]
    probabilities = []
    bins = []
    for tokens, _ in trees:
        num_used = sum(token >= 0 for token in tokens)
        falling = sorted((rng.choice((rng.random(), 0.25)) for _ in range(num_used - 1)), reverse=True)
        probabilities.append([1.0, *falling] + [0.0] * (width - num_used))
        bins.append(padded([-1, *(rng.randrange(BINS) for _ in range(num_used - 1))], width))
    none = [-1] * width
    return Stored(
        torch.tensor([*(tokens for tokens, _ in trees), none], dtype=torch.int32),
        torch.tensor([*(parents for _, parents in trees), none], dtype=torch.int32),
        torch.tensor([*probabilities, [0.0] * width]),
        torch.tensor([*bins, none], dtype=torch.int32),
        torch.tensor([*(rng.randrange(1, 20) for _ in trees), 0], dtype=torch.int32),
        torch.tensor([*(max(tokens[0], 0) for tokens, _ in trees), 0]),
    )


def random_chunks(rng: random.Random, slots: list[int], padding: int, longest: int) -> Chunks:
    """Chunks of `slots`, some of them padding."""
    slots = [slot if rng.random() < 0.8 else padding for slot in slots]
    counts = [0 if slot == padding else rng.randint(1, longest) for slot in slots]
    is_last = [int(count > 0 and rng.random() < 0.5) for count in counts]
    starts = [0 if slot == padding else rng.randrange(20) for slot in slots]
    tokens = [rng.randrange(100) for _ in range(sum(counts) + rng.choice((0, 2) if sum(counts) or not slots else (1,)))]
    after = [-1 if last or rng.random() < 0.3 else rng.randrange(100) for last in is_last]
    return Chunks(*(torch.tensor(x, dtype=torch.int64) for x in (slots, starts, counts, is_last, tokens, after)))


def random_scene(seed: int, decoding: int, chunks: int, width: int, branches: bool, longest: int = 20) -> Scene:
    rng = random.Random(seed)
    slots = decoding + chunks + 3
    stored = random_stored(rng, slots, width, branches)
    free = list(range(slots - 1))
    rng.shuffle(free)
    requests = [slots - 1 if rng.random() < 0.2 else free.pop() for _ in range(decoding)]
    num_used = (stored.tokens >= 0).sum(dim=1).tolist()
    counts = [0 if slot == slots - 1 else rng.randint(1, num_used[slot]) for slot in requests]
    prompts = random_chunks(rng, [free.pop() for _ in range(chunks)], slots - 1, longest)
    page_size = rng.choice((1, 3, 16))
    total = sum(counts) + int(prompts.counts.sum())
    num_rows = max(1, total + rng.choice((0, 1, 70)))
    num_heads = max(1, sum(counts) + chunks + rng.choice((0, 70)))
    columns = -(-(20 + max(longest, width)) // page_size)
    pages = torch.tensor([[rng.randrange(1, 1000) for _ in range(columns)] for _ in range(slots)])
    pages[-1] = 0
    sampled = torch.tensor([rng.randrange(-1, VOCAB) for _ in range(num_heads)])
    return Scene(
        stored, torch.tensor(requests, dtype=torch.int64), torch.tensor(counts, dtype=torch.int32), prompts, pages,
        page_size, num_rows, num_heads, branches, slots - 1, sampled,
    )  # fmt: skip


def segments_of(scene: Scene) -> list[dict]:
    """Slot, committed length and rows of each segment; a row is a dict of its columns, as the loop below finds them."""
    segments = []
    tokens = iter(scene.chunks.tokens.tolist())
    for slot, count in zip(scene.requests.tolist(), scene.counts.tolist(), strict=True):
        length = int(scene.stored.lengths[slot])
        rows = []
        for node in range(count):
            parent = int(scene.stored.parents[slot, node])
            path = [node]
            while path[-1]:
                path.append(int(scene.stored.parents[slot, path[-1]]))
            token = int(scene.stored.tokens[slot, node])
            mask = sum(1 << other for other in path)
            rows.append({"tokens": token, "parents": parent, "positions": length + len(path) - 1, "ancestors": mask})
        segments.append({"slot": slot, "length": length, "rows": rows})
    for slot, start, count, *_ in zip(*(x.tolist() for x in scene.chunks[:3]), strict=True):
        rows = [
            {"tokens": next(tokens), "parents": -1, "positions": start + index, "ancestors": -1}
            for index in range(count)
        ]
        segments.append({"slot": slot, "length": start, "rows": rows})
    for segment in segments:
        for index, row in enumerate(segment["rows"]):
            place = segment["length"] + index
            page = int(scene.pages[segment["slot"], place // scene.page_size])
            kv_slot = page * scene.page_size + place % scene.page_size
            row |= {"requests": segment["slot"], "nodes": index, "places": place, "kv_slots": kv_slot}
            row["following"] = row["positions"] + 1
    return segments


def expected_layout(scene: Scene) -> Layout:
    segments = segments_of(scene)
    rows = [row for segment in segments for row in segment["rows"]]
    unused = dict.fromkeys(Layout._fields[3:], 0) | {"requests": scene.padding, "parents": -1, "ancestors": -1}
    unused["following"] = 1
    rows += [unused] * (scene.num_rows - len(rows))
    columns = {name: torch.tensor([row[name] for row in rows]) for name in unused}
    columns |= {name: columns[name].int() for name in ("nodes", "parents")}
    if not scene.branches:
        del columns["ancestors"]
    ends = [sum(scene.sizes[:index]) for index in range(len(segments) + 1)]
    return Layout(
        torch.tensor(ends, dtype=torch.int32),
        torch.tensor([segment["slot"] for segment in segments]),
        torch.tensor([segment["length"] for segment in segments]),
        **{"ancestors": None} | columns,
    )


def expected_heads(scene: Scene) -> Heads:
    segments = segments_of(scene)
    first = 0
    heads = []
    ends = []
    for index, segment in enumerate(segments):
        for row in segment["rows"] if index < len(scene.counts) else []:
            heads.append((first + row["nodes"], segment["slot"], row["positions"] + 1, row["nodes"]))
        first += len(segment["rows"])
        if index >= len(scene.counts):
            is_used = len(segment["rows"]) > 0
            end = (first - 1, segment["slot"], segment["length"] + len(segment["rows"]), 0)
            ends.append(end if is_used else (0, scene.padding, 0, 0))
    heads += ends
    heads += [(0, scene.padding, 0, 0)] * (scene.num_heads - len(heads))
    rows, requests, positions, nodes = (torch.tensor(column) for column in zip(*heads, strict=True))
    return Heads(rows, requests, positions, nodes.int())


def expected_end(scene: Scene) -> tuple[Verified, Stored, Tensor]:
    """Returns the results of verify_rows, and what it leaves in the slots and in the results on the host."""
    W = scene.stored.tokens.shape[1]
    B = len(scene.counts)
    T = scene.num_rows
    stored = Stored(*(x.tolist() for x in scene.stored))
    segments = segments_of(scene)
    sampled = scene.sampled.tolist()
    first = 0
    num_nodes = sum(scene.counts.tolist())
    following = [-1] * T
    order = list(range(T))
    paths = []
    emitted = []
    lengths = []
    last = []
    results = []
    for index, segment in enumerate(segments):
        rows = segment["rows"]
        slot = segment["slot"]
        tokens = []
        path = []
        bins = []
        if index < B and rows:
            after = sampled[first : first + len(rows)]
            path = walk([row["tokens"] for row in rows], [row["parents"] for row in rows], after)
            tokens = [after[node] for node in path]
            bins = stored.bins[slot]
            for rank, node in enumerate(path):
                following[first + rank] = after[node]
                order[first + rank] = first + node
        elif rows:
            chunk = index - B
            if scene.chunks.is_last[chunk]:
                tokens = [sampled[num_nodes + chunk]]
            after = [row["tokens"] for row in rows[1:]] + (tokens or [int(scene.chunks.next_tokens[chunk])])
            following[first : first + len(rows)] = after
        advance = len(path) if index < B else len(rows)
        admitted = len(rows) if index < B else 0
        results.append([len(tokens), admitted, *padded(tokens, W), *padded(bins, W)])
        if scene.branches:
            results[-1] += padded(path, W)
        paths.append(padded(path, W))
        emitted.append(padded(tokens, W))
        lengths.append(len(tokens))
        last.append(first + advance - 1 if advance else T - 1)
        if advance and slot != scene.padding:
            stored.lengths[slot] = segment["length"] + advance
            if tokens:
                root = max(tokens[-1], 0)
                stored.roots[slot] = root
                stored.tokens[slot] = padded([root], W)
                stored.parents[slot] = [-1] * W
                stored.bins[slot] = [-1] * W
                stored.probabilities[slot] = [1.0] + [0.0] * (W - 1)
        first += len(rows)
    numbers = (paths[:B], emitted, lengths, following)
    nodes, emitted, lengths, following = (torch.tensor(x, dtype=torch.int32) for x in numbers)
    verified = Verified(
        nodes.view(B, W), emitted, lengths, following, torch.tensor(order) if scene.branches else None,
        torch.tensor(last),
    )  # fmt: skip
    after = Stored(*(torch.tensor(x).to(y.dtype) for x, y in zip(stored, scene.stored, strict=True)))
    return verified, after, torch.tensor(results, dtype=torch.int32)


# Seed, decoding requests, chunks, nodes that a slot stores, trees.
SCENES = [
    (0, 1, 0, 1, False), (1, 1, 0, 4, False), (2, 0, 1, 4, False), (3, 0, 3, 1, True), (4, 5, 2, 4, False),
    (5, 4, 1, 8, True), (6, 3, 3, 64, True), (7, 2, 0, 64, False), (8, 9, 5, 3, True), (9, 1, 1, 1, False),
    (104, 6, 1, 1, True),
]  # fmt: skip
MORE = [(seed, seed % 7, 1 + seed % 4, (1, 2, 5, 17)[seed % 4], seed % 3 > 0) for seed in range(10, 130)]


@grouped()
@pytest.mark.parametrize("scene", [random_scene(*scene) for scene in SCENES + MORE[::4]])
def test_a_step_equals_a_walk_over_lists(scene):
    layout = lay_out.reference(*scene.lay_out_args("cpu"))
    equal(layout, expected_layout(scene))
    B = len(scene.counts)
    equal(select_heads.reference(layout, B, scene.num_heads, scene.padding), expected_heads(scene))
    stored = on("cpu", scene.stored)
    results = scene.new_results("cpu")
    actual = verify_rows.reference(layout, scene.sampled, stored, scene.chunks, B, results, scene.padding)
    verified, after, expected = expected_end(scene)
    equal(actual, verified)
    equal(stored, after)
    assert torch.equal(results, expected)


@grouped()
@each_device
@pytest.mark.parametrize("args", [*SCENES, *(pytest.param(x, marks=SLOW) for x in MORE), (99, 70, 40, 6, True, 60)])
def test_a_step_of_the_kernels_equals_the_references(args, device):
    scene = random_scene(*args)
    B = len(scene.counts)
    expected = lay_out.reference(*scene.lay_out_args(device))
    with poisoned():
        layout = lay_out.triton(*scene.lay_out_args(device))
        heads = select_heads.triton(layout, B, scene.num_heads, scene.padding)
    equal(layout, expected)
    equal(heads, select_heads.reference(expected, B, scene.num_heads, scene.padding))
    ends = []
    for run in (verify_rows.triton, verify_rows.reference):
        stored = on(device, scene.stored)
        results = scene.new_results(device)
        chunks = on(device, scene.chunks)
        sampled = scene.sampled.to(device)
        with poisoned():
            verified = run(expected, sampled, stored, chunks, B, results, scene.padding)
        ends.append((verified, stored, results))
    equal(ends[0][0], ends[1][0])
    equal(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][2], ends[1][2])


@each_device
@pytest.mark.parametrize("branches", [True, False])
def test_results_of_passes_take_turns(branches, device):
    """In the host's memory, which a GPU writes to."""
    scene = random_scene(6, 5, 2, 8, branches)
    B = len(scene.counts)
    layout = lay_out.reference(*scene.lay_out_args(device))
    lone = scene.new_results("cpu")
    turns = torch.full((3, *lone.shape), -7, dtype=torch.int32, pin_memory=device == "cuda")
    for run_admit, run_verify in ((admit.triton, verify_rows.triton), (admit.reference, verify_rows.reference)):
        passes = torch.zeros(1, dtype=torch.int64, device=device)
        budget = torch.tensor([B], device=device)
        turns.fill_(-7)
        for number in range(1, 6):
            stored = on(device, scene.stored)
            run_admit(stored.probabilities, scene.requests.to(device), budget, 8, passes=passes)
            sampled = scene.sampled.to(device)
            chunks = on(device, scene.chunks)
            run_verify(layout, sampled, stored, chunks, B, turns, scene.padding, passes)
            results = scene.new_results(device)
            run_verify(layout, sampled, on(device, scene.stored), chunks, B, results, scene.padding)
            if device == "cuda":
                torch.cuda.synchronize()
            assert passes.tolist() == [number]
            assert torch.equal(turns[number % 3], results.cpu())
            turns[number % 3] = -number
            assert [turn.unique().tolist() for turn in turns] == [[-last_of(number, turn)] for turn in range(3)]


def last_of(number: int, turn: int) -> int:
    """The last pass up to `number` of a turn of three, 7 before its first."""
    last = number - (number - turn) % 3
    return last if last > 0 else 7


def likeliest(probabilities: list[list[float]], budget: int, max_nodes: int) -> list[int]:
    """Roots, and the best of all other nodes, one by one."""
    counts = [int(row[0] > 0) for row in probabilities]
    drafted = [
        (-math.ceil(probability * 255), request, node)
        for request, row in enumerate(probabilities)
        for node, probability in enumerate(row[:max_nodes])
        if node > 0 and probability > 0
    ]
    for _, request, node in sorted(drafted)[: max(budget - sum(counts), 0)]:
        assert node == counts[request], "what is admitted is a prefix"
        counts[request] += 1
    return counts


@grouped()
@each_device
@pytest.mark.parametrize(
    ("requests", "width"), [*rotating([1, 5, 64], [1, 4, 64]), (1024, 2), (130, 16), pytest.param(1024, 64, marks=SLOW)]
)
def test_admission_takes_the_likeliest(requests, width, device):
    rng = random.Random(requests * width)
    stored = random_stored(rng, requests + 1, width, branches=False)
    slots = [requests if rng.random() < 0.1 else slot for slot in rng.sample(range(requests), requests)]
    rows_of_probabilities = [stored.probabilities[slot].tolist() for slot in slots]
    probabilities = stored.probabilities.to(device)
    rows = torch.tensor(slots, device=device)
    total = int((stored.probabilities[rows.cpu()] > 0).sum())
    budgets = {0, 1, requests, (requests + total) // 2, total - 1, total, total + 1, 10 * total + 7}
    for budget in budgets:
        for max_nodes in {1, max(width // 2, 1), width, width + 3}:
            limit = torch.tensor([budget], dtype=torch.int32, device=device)
            with poisoned():
                counts = admit.triton(probabilities, rows, limit, max_nodes)
            expected = admit.reference(probabilities, rows, limit, max_nodes)
            assert counts.dtype == expected.dtype == torch.int32
            assert torch.equal(counts, expected)
            assert expected.tolist() == likeliest(rows_of_probabilities, budget, max_nodes)


@each_device
def test_nodes_beyond_a_longer_part_wait(device):
    """Parts of the context get longer at 3,072 tokens, and wherever they have doubled."""
    lengths = [0, 3060, 3070, 3071, 3072, 6140, 6144, 12_287, 100_000]
    room = [8, 8, 2, 1, 8, 4, 8, 1, 8]
    probabilities = torch.ones(len(lengths), 8, device=device)
    rows = torch.arange(len(lengths), device=device)
    budget = torch.tensor([1000], device=device)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=device)
    for run in (admit.reference, admit.triton):
        assert run(probabilities, rows, budget, 8, contexts).tolist() == room
    spare = sum(room) - 3
    counts = admit.triton(probabilities, rows, torch.tensor([spare], device=device), 8, contexts)
    assert counts.sum() == spare, "others get what these may not take"
    for length in lengths:
        parts = {_part(place, None) for place in range(length, int(places_of_parts(torch.tensor(length))))}
        assert len(parts) == 1
        assert _part(int(places_of_parts(torch.tensor(length))), None) not in parts


@pytest.mark.parametrize(
    "run", [pytest.param(x, id=name) for x, name in ((admit.triton, "kernel"), (admit.reference, "reference"))]
)
@each_device
def test_among_equals_the_first_requests_win(run, device):
    """Also 0.5 and 0.4999, which lie in one step of 1/255; a tiny probability is not none."""
    probabilities = torch.tensor(
        [[1, 0.4999, 0.4999, 1e-9], [1, 0.5, 0.5, 0], [1, 0.9, 0.5, 0.5], [0, 0, 0, 0]], device=device
    )
    rows = torch.tensor([3, 0, 3, 1, 2], device=device)
    expected = {3: [1, 1, 1], 4: [1, 1, 2], 5: [2, 1, 2], 6: [3, 1, 2], 7: [3, 2, 2], 8: [3, 3, 2], 10: [3, 3, 4]}
    for budget, expected_counts in (expected | {11: [4, 3, 4], 99: [4, 3, 4], 0: [1, 1, 1]}).items():
        counts = run(probabilities, rows, torch.tensor([budget], dtype=torch.int32, device=device), 4).tolist()
        assert [counts[index] for index in (1, 3, 4)] == expected_counts
        assert counts[0] == counts[2] == 0


def expected_store(before: Stored, slots, tokens, parents, scores, table, padding: int) -> Stored:
    after = Stored(*(x.tolist() for x in before))
    W = before.tokens.shape[1]
    for slot, *columns in zip(slots, tokens, parents, scores, strict=True):
        for name, value in UNUSED.items():
            getattr(after, name)[slot] = [value] * W
        lowest = 1.0
        for node, (token, parent, score) in enumerate(zip(*columns, strict=True)):
            if slot == padding:
                continue
            if node == 0:
                after.tokens[slot][0] = token
                after.probabilities[slot][0] = 1.0
            elif token < 0 or score == -math.inf:
                lowest = 0.0
            else:
                acceptance_bin = (min(node, 16) - 1) * 16 + min(int(16 * math.exp(score)), 15)
                lowest = min(lowest, table[acceptance_bin])
                after.tokens[slot][node] = token
                after.parents[slot][node] = parent
                after.bins[slot][node] = acceptance_bin
                after.probabilities[slot][node] = lowest
    return Stored(*(torch.tensor(x).to(y.dtype) for x, y in zip(after, before, strict=True)))


@grouped()
@each_device
@pytest.mark.parametrize(
    ("nodes", "width", "dtype"),
    [(1, 1, torch.int64), (1, 5, torch.int32), (4, 4, torch.int64), (7, 16, torch.int32), (64, 64, torch.int64)],
)
def test_a_proposal_replaces_all_that_its_slot_held(nodes, width, dtype, device):
    rng = random.Random(nodes)
    generator = torch.Generator().manual_seed(width)
    before = random_stored(rng, 8, width, branches=True)
    padding = 7
    slots = [4, padding, 0, 6, padding]
    # Strided, as a drafter's columns may be.
    tokens = torch.randint(0, 1000, (nodes, 5), dtype=dtype, generator=generator).t()
    parents = (torch.arange(nodes, dtype=dtype) - 1).expand(5, nodes)
    falling = torch.randn(5, nodes, generator=generator).abs().neg().cumsum(dim=1)
    scores = torch.where(torch.rand(5, nodes, generator=generator) < 0.7, falling, 0.0)
    tokens[3, nodes // 2 + 1 :] = -1
    scores[3, nodes // 2 + 1 :] = -torch.inf
    scores[:, 0] = 0
    table = torch.rand(2 * BINS, generator=generator)
    columns = [x.tolist() for x in (tokens, parents, scores, table)]
    expected = expected_store(before, slots, *columns, padding)
    for run in (store.reference, store.triton):
        stored = on(device, before)
        run(
            stored,
            torch.tensor(slots, device=device),
            *(x.to(device) for x in (tokens, parents, scores, table)),
            padding,
        )
        equal(stored, on(device, expected))


@each_device
def test_buckets_begin_at_sixteenths_on_every_device(device):
    """Kernel and reference put scores around each boundary into the same bucket; a NaN is no node."""
    edges = torch.tensor([math.log(k / 16) for k in range(1, 17)])
    scores = torch.stack((edges, edges.nextafter(torch.tensor(-9.0)), edges.nextafter(torch.tensor(9.0)))).to(device)
    scores[2, 15] = torch.nan
    scores = torch.cat((torch.zeros(3, 1, device=device), scores), dim=1)
    tokens = torch.ones(3, 17, dtype=torch.int32, device=device)
    slots = torch.arange(3, device=device)
    results = []
    for run in (store.reference, store.triton):
        stored = on(device, random_stored(random.Random(0), 4, 17, branches=False))
        run(stored, slots, tokens, tokens, scores, torch.ones(BINS, device=device), 3)
        results.append(stored)
    equal(results[0], results[1])
    buckets = results[0].bins[:, 1:].cpu() % 16
    assert buckets[0].tolist() == [*range(1, 16), 15]
    assert buckets[1].tolist() == [*range(15), 15]
    assert results[0].tokens[2].tolist() == [1] * 16 + [-1]


@pytest.mark.gpu
@pytest.mark.parametrize("branches", [True, False])
def test_a_graph_replays_a_step(branches):
    scene = random_scene(5, 64, 8, 16, branches, 200)
    args = scene.lay_out_args("cuda")
    B = len(scene.counts)
    stored = args[0]
    budget = torch.tensor([2 * B], dtype=torch.int32, device="cuda")
    before = on("cuda", stored)
    chunks = args[3]
    sampled = scene.sampled.cuda().repeat(4)
    results = scene.new_results("cpu")[None].repeat(3, 1, 1).pin_memory()
    passes = torch.zeros(1, dtype=torch.int64, device="cuda")

    def run():
        for x, y in zip(stored, before, strict=True):
            x.copy_(y)
        results.fill_(-1)
        passes.fill_(3)
        counts = admit.triton(stored.probabilities, args[2], budget, 16, passes=passes)
        layout = lay_out.triton(stored, counts, *args[2:])
        heads = select_heads.triton(layout, B, scene.num_heads, scene.padding)
        verified = verify_rows.triton(layout, sampled, stored, chunks, B, results, scene.padding, passes)
        copied = results.to("cuda", non_blocking=True)
        return counts, *layout, *heads, *verified, copied, passes.clone(), *(x.clone() for x in stored)

    for actual, expected in zip(replayed(run), run(), strict=True):
        assert (actual is None) == (expected is None)
        assert actual is None or torch.equal(actual, expected)
