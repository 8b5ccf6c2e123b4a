"""Captured passes against those launched as they are, without a GPU: fixed sizes over static buffers filled up with
padding, budgets that the device spends, prompts beside nodes, steps in flight."""

import json
import pickle
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise as neighbours
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.kernels.attention.ragged import plan_work, ragged_attention
from slipstream.kernels.speculation.ragged import admit, lay_out, select_heads, store, verify_rows
from slipstream.models.files.cost_tables import MODES, CostTables
from slipstream.serve.engine import cost_files, draft_windows, graph_keys
from slipstream.serve.engine.build import find_tables
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.graph_keys import MOST_CHUNKS, GraphTable, buckets, draft_sizes, head_sizes, prompt_sizes
from slipstream.serve.engine.plan import PromptChunk, SamplingMode, StepKey, StepOutput, StepPlan
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request
from slipstream.serve.runner.model_runner import ModelRunner
from slipstream.serve.runner.request_state import RequestState
from slipstream.tests.pairwise import gate_of, some_of
from slipstream.tests.random_targets import CAPPED
from slipstream.tests.serve.cache_invariants import check_scheduler
from slipstream.tests.serve.engine_runs import (
    Tokens,
    build_engine,
    caches_of,
    kinds_of_requests,
    make_request,
    plain_answers,
    random_prompt,
    run,
    serve_traffic,
    sized_requests,
    tokens_of,
    watch_outputs,
)
from slipstream.tests.serve.played_graphs import EqualTimes, build_eager, build_played, drafts_of, play, replays_of
from slipstream.tests.serve.test_lossless import CHECKPOINTS, AnyPolicy, preempt_some, watch
from slipstream.tests.tables import table_of

DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = table_of(__file__, "drafters")
FAMILIES = ["qwen3", "mistral-window", "qwen3-windows"]
Configure = Callable[..., EngineConfig]
Recorded = list[tuple[StepPlan, StepOutput | None]]


@pytest.fixture(scope="module")
def configure(make_target, tmp_path_factory) -> Configure:
    """(family, name in DRAFTERS, engine options) -> options of an engine."""

    @cache
    def saved(family, name):
        save = CHECKPOINTS[name]
        folder = tmp_path_factory.mktemp("drafts") / "draft"
        if save is None:
            return name
        save(make_target(family), folder)
        return str(folder)

    def make(family, drafter, **options):
        name, drafter_options = DRAFTERS[drafter]
        values = {"draft": saved(family, name), "drafter": drafter_options, "max_running": 5, "kv_cache_tokens": 176}
        values["grammar_drafts"] = False  # slots store as many nodes as drafts have
        return EngineConfig(target=str(make_target(family)), **values | options)

    return make


def record(engine: Engine) -> Recorded:
    """Records from now on the plans that are launched, and their outputs if they are read."""
    recorded = Recorded()
    places = {}

    def trace(event, plan):
        if event == "launched":
            places[plan.number] = len(recorded)
            recorded.append((pickle.loads(pickle.dumps(plan)), None))  # noqa: S301

    def look(plan, output):
        place = places[plan.number]
        recorded[place] = recorded[place][0], pickle.loads(pickle.dumps(output))  # noqa: S301

    engine.trace = trace
    watch_outputs(engine, look)
    return recorded


def check_replay(recorded: Recorded, engine: Engine, eager: Engine):
    """Launched as they are, the plans yield the same, and leave the same."""
    for plan, expected in recorded:
        if eager.runner.steps is None:
            plan = replace(plan, graph=None, draft_graph=None)
        replayed = eager.runner.launch(plan).read()
        if expected is not None:
            for name in StepOutput._fields:
                np.testing.assert_equal(
                    getattr(replayed, name), getattr(expected, name), f"{name} of step {plan.number}"
                )
    check_states(engine.runner, eager.runner)
    page_size = engine.config.page_size
    for kv, eager_kv in zip(engine.runner.passes.kv, eager.runner.passes.kv, strict=True):
        for layers, eager_layers in zip(kv.caches, eager_kv.caches, strict=True):
            captured_cache, other = (flat[:, :, page_size:] for flat in (layers.flat, eager_layers.flat))
            torch.testing.assert_close(captured_cache, other, rtol=1e-4, atol=1e-4)


def check_states(runner: ModelRunner, other: ModelRunner):
    """Lengths, roots and proposals of all slots; the padding slot is as it was at first."""
    padding = runner.state.padding
    for field in ("lengths", "roots", "tokens", "parents", "bins", "probabilities"):
        stored = getattr(runner.state.stored, field)
        expected = getattr(other.state.stored, field)
        assert torch.equal(stored[:padding], expected[:padding]), field
    for state in (runner.state, other.state):
        assert int(state.lengths[padding]) == 0
        assert not state.stored.probabilities[padding].any()


@pytest.mark.parametrize(
    ("drafter", "page_size", "family"),
    gate_of(
        product(DRAFTERS, [1, 16], FAMILIES),
        [
            ("mixed", 1, "mistral-window"),
            ("eagle3 tree, deep", 16, "qwen3"),
        ],
    )
    + [pytest.param(*case, marks=pytest.mark.slow) for case in product(DRAFTERS, [16], CAPPED)],
)
def test_captured_steps_equal_those_launched_as_they_are(
    drafter, page_size, family, configure, make_target, monkeypatch
):
    """Step by step, whatever each computes: any budget of nodes, any chunks of prompts beside them, any width, tables
    that prefer any nodes. Requests of all kinds come, are aborted, preempted and continued from cached pages, and get
    the tokens that they get without a draft."""
    for name, value in {"WINDOW": 32, "GRAIN": 16, "SHORTEST": 48}.items():
        monkeypatch.setattr(draft_windows, name, value)
    rng = random.Random(f"{drafter} {page_size} {family}")
    kinds = {
        name: request for name, request in kinds_of_requests(rng, 16, longest=40).items() if len(request.prompt) < 50
    }
    expected = plain_answers(make_target(family), list(kinds.values()))
    config = configure(family, drafter, page_size=page_size, prefill_budget=40)
    engine = play(config)
    assert engine.overlap
    engine.planner.policy = AnyPolicy(engine.planner, rng)
    recorded = record(engine)
    counts = watch(engine)
    serve_traffic(engine, kinds, expected, rng, lambda number: number < 20, 8, lambda: preempt_some(engine, rng))
    check_replay(recorded, engine, build_eager(config))
    assert sum(replays_of(engine).values()) == len(recorded), "every step was a captured one"
    assert any(plan.read_starts for plan, _ in recorded) == (engine.planner.windows is not None)
    assert min(counts["mixed"], counts["cached"]) > 0
    if drafter != "none":
        assert min(counts["ragged"], counts["accepted"]) > 0


BESIDE_ATTENTION = (admit, lay_out, select_heads, store, verify_rows)


@pytest.mark.parametrize(
    ("drafter", "ops"),
    [
        ("eagle3", BESIDE_ATTENTION),
        ("eagle tree", BESIDE_ATTENTION),
        pytest.param("eagle3", (*BESIDE_ATTENTION, plan_work, ragged_attention), marks=pytest.mark.slow),
        pytest.param("eagle tree", (*BESIDE_ATTENTION, plan_work, ragged_attention), marks=pytest.mark.slow),
    ],
    ids=["chains", "trees", "chains, attention", "trees, attention"],
)
def test_the_kernels_of_captured_steps(drafter, ops, configure, make_target, monkeypatch):
    """The kernels of a ragged pass, interpreted."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU")
    rng = random.Random(0)
    requests = sized_requests((1, 9, 33), max_tokens=5, temperature=0.7)
    expected = plain_answers(make_target("mistral-window"), requests)
    config = configure("mistral-window", drafter, page_size=1, max_running=2, prefill_budget=16)
    engine = play(config)
    engine.planner.policy = AnyPolicy(engine.planner, rng)
    recorded = record(engine)
    with monkeypatch.context() as patch:
        for op in ops:
            patch.setattr(op, "when", lambda *_args, **_options: True)
        assert tokens_of(run(engine, requests)) == expected
    check_replay(recorded, engine, build_eager(config))


@pytest.fixture(scope="module")
def traffic(target) -> tuple[dict[str, Request], Tokens]:
    """Requests of all kinds, and their answers without a draft."""
    kinds = kinds_of_requests(random.Random(1), count=16, longest=60)
    return kinds, tokens_of(run(build_engine(target, kv_cache_tokens=4096), list(kinds.values())))


@pytest.mark.parametrize("num_requests", [24, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafter", some_of(DRAFTERS, ["mixed"]))
def test_mixed_traffic_with_aborts_and_preemption(drafter, num_requests, configure, traffic, target):
    """With the policy's own choices, and as if memory had not held some graphs."""
    rng = random.Random(1)
    kinds, expected = traffic
    engine = play(configure("qwen3", drafter, max_running=24, kv_cache_tokens=900, page_size=1))
    captured = engine.engine_plan.graphs.steps
    recorded = record(engine)
    remaining = {key for key in captured if key.rows not in (24, 32) and (key.rows, key.mode) != (2, "all")}
    engine.planner.graphs = without_graphs(engine, set(captured) - remaining)
    serve_traffic(
        engine,
        kinds,
        expected,
        rng,
        lambda number: number < num_requests,
        30,
        lambda: check_scheduler(engine.scheduler),
    )
    greedy = make_request("greedy", random_prompt(9, 0), ignore_eos=True)
    assert tokens_of(run(engine, [greedy])) == plain_answers(target, [greedy])
    replayed = replays_of(engine)
    plans = [plan for plan, _ in recorded]
    assert {mode for *_, mode in replayed} == {"plain", "all"}
    assert set(replayed) < remaining
    assert engine.runner.graphs.steps == captured, "nothing is captured while serving"
    assert {min(len(plan.chunks), 2) for plan in plans} == {0, 1, 2}
    assert any(plan.slots and plan.chunks for plan in plans)
    if drafter != "none":
        assert len({plan.nodes / len(plan.slots) for plan in plans if plan.slots}) > 2
    if drafter not in ("none", "ngram"):
        assert drafts_of(engine)


def test_a_step_with_one_filtered_request_is_chosen_by_filtered_times(configure):
    engine = play(configure("qwen3", "eagle3", kv_cache_tokens=900, max_running=4))
    steps = engine.runner.steps
    drafts = engine.runner.drafts
    policy = engine.planner.policy
    sizes = sorted({*steps.sizes, *steps.prompt_sizes})
    target = {"plain": dict.fromkeys(sizes, 1.0), "all": {rows: float(rows**3) for rows in sizes}}
    keys = drafts.keys
    draft = dict.fromkeys(target, {key[:2]: 0.0 for key in keys})
    policy.costs = EqualTimes(CostTables(target, draft))
    recorded = record(engine)
    max_nodes = engine.planner.limits.most_nodes
    run(engine, [make_request("0", random_prompt(9, 0), max_tokens=30, ignore_eos=True)])
    assert max(plan.nodes for plan, _ in recorded) == max_nodes
    recorded.clear()
    params = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0}
    prompt = random_prompt(9, 1)
    run(engine, [make_request("a", prompt, **params), make_request("b", prompt, top_k=9, **params)])
    filtered = [plan for plan, _ in recorded if plan.mode == "all" and plan.slots]
    assert len(filtered) > 10
    assert {plan.nodes - len(plan.slots) for plan in filtered} == {0}


LENGTHS = (1, 5, 31, 32, 33, 64, 70, 95, 130)  # around captured sizes, and beyond the largest


@pytest.mark.parametrize(
    ("drafter", "page_size", "captured"),
    gate_of(
        product(["none", "eagle3", "eagle3 tree", "dflash"], [16, 1], [96, 40]),
        [("eagle3 tree", 16, 96), ("dflash", 1, 40)],
    ),
)
def test_prompts_of_all_lengths(drafter, page_size, captured, configure):
    """Answers, what of the drafts was accepted, and the KV of target and draft; again with a filled cache."""
    requests = sized_requests(LENGTHS, max_tokens=4, temperature=0.6, top_k=30)
    options = {"page_size": page_size, "max_running": 6, "kv_cache_tokens": 4096, "prefill_budget": 96}
    config = configure("qwen3", drafter, prefill_graph_tokens=captured, **options)
    expected = plain_answers(Path(config.target), requests)
    engine = play(config)
    recorded = record(engine)
    first = run(engine, requests)
    again = run(engine, requests)
    assert tokens_of(first) == tokens_of(again) == expected
    check_replay(recorded, engine, build_eager(config))
    assert any(answer.counts.cached_tokens for answer in again.values())


@pytest.mark.parametrize("max_size", [32, 100, 1024, 4096])
@pytest.mark.parametrize(("sizes", "wasted"), [(buckets, 0.5), (prompt_sizes, 0.25)])
def test_sizes_waste_little(sizes, wasted, max_size):
    tried_sizes = sizes(max_size)
    assert tried_sizes == sorted(set(tried_sizes))
    assert tried_sizes[-1] == max_size
    for smaller, larger in neighbours(tried_sizes):
        assert larger - smaller in (1, 32) or (larger - smaller - 1) / larger <= wasted
    assert draft_sizes(max_size)[-1] == max_size


@pytest.mark.parametrize("rows", [32, 1024, 1280, 4096])
@pytest.mark.parametrize("max_size", [5, 80, 1040])
def test_every_number_of_rows_with_logits_has_a_pass(rows, max_size):
    tried_sizes = head_sizes(rows, max_size)
    assert tried_sizes == sorted(set(tried_sizes))
    assert tried_sizes[-1] == min(rows, max_size)


def test_without_prompts_there_are_no_sizes_for_them():
    assert prompt_sizes(0) == []


def chunk_of(start: int, end: int, slot: int = 0) -> PromptChunk:
    return PromptChunk(slot, start, random_prompt(end, 0)[start:], None, is_last=True)


def step_of(*chunks: PromptChunk, mode: SamplingMode = "plain", slots: Iterable[int] = (), nodes: int = 0) -> StepPlan:
    drafting = (*slots, *[chunk.slot for chunk in chunks])
    return StepPlan(1, chunks=chunks, slots=tuple(slots), drafting=drafting, nodes=nodes, mode=mode)


def without_graphs(engine: Engine, keys: Collection[StepKey]) -> GraphTable:
    """Finds passes as if memory had not held these."""
    graphs = engine.engine_plan.graphs
    steps = tuple(key for key in graphs.steps if key not in keys)
    return GraphTable(replace(graphs, steps=steps), lambda: True)


@pytest.fixture
def engine(configure) -> Engine:
    options = {"prefill_graph_tokens": 1024, "prefill_budget": 1024, "max_running": MOST_CHUNKS + 4}
    return play(configure("qwen3", "eagle3", kv_cache_tokens=4096, **options))


@pytest.mark.parametrize("mode", ["greedy", "plain", "all"])
def test_which_captured_pass_takes_what(mode, engine):
    graphs = engine.planner.graphs

    def rows(*chunks, num_decoding=0, nodes=0):
        """Rows of the captured pass, and those with logits."""
        key = graphs.step(step_of(*chunks, mode=mode, slots=range(num_decoding), nodes=nodes))
        if key is None:
            return None
        assert key[2:] == (bool(chunks), False, "all" if mode == "all" else "plain")
        return key[:2]

    assert rows(chunk_of(0, 3)) == (32, 32)
    assert rows(chunk_of(0, 33)) == (64, 32)
    assert rows(chunk_of(100, 196)) == (96, 32)
    assert rows(chunk_of(0, 90), num_decoding=3, nodes=9) == (128, 32)
    assert rows(chunk_of(0, 900), num_decoding=20, nodes=90) == (1024, 128)
    assert rows(num_decoding=3, nodes=9) == (16, 16)
    assert rows(num_decoding=1, nodes=1) == (1, 1)
    assert rows(num_decoding=20, nodes=120) == (120, 120)
    chunks = [chunk_of(0, 3, slot) for slot in range(MOST_CHUNKS + 1)]
    assert rows(*chunks[1:]) == (64, 32)
    assert rows(*chunks) is None
    assert rows(chunk_of(30_000, 31_000)) is None, "most of the work is attention"
    assert rows(chunk_of(30_000, 31_000), num_decoding=1, nodes=4), "what decodes does not wait for other kernels"
    captured = engine.engine_plan.graphs.steps
    graphs = without_graphs(engine, {key for key in captured if key.rows in (16, 64)})
    assert rows(chunk_of(0, 33)) == (96, 32), "the next larger one takes it"
    assert rows(num_decoding=3, nodes=9) == (24, 24)
    graphs = without_graphs(engine, captured)
    assert rows(chunk_of(0, 33)) is rows(num_decoding=1, nodes=1) is None


def test_long_prompts_are_captured_ones_until_their_kernels_are_compiled(engine, monkeypatch):
    monkeypatch.setattr(graph_keys, "MOST_PAIRS", 0)
    for is_ready in (False, True):
        monkeypatch.setattr(type(engine.runner.passes.attention["prefill"]), "is_ready", is_ready)
        assert (engine.planner.graphs.step(step_of(chunk_of(0, 33))) is None) == is_ready


def test_kernels_for_prompts_take_many_tokens_earlier():
    chunks = (chunk_of(4096, 5120), chunk_of(16_384, 17_408), chunk_of(0, 2048), chunk_of(2048, 4096))
    assert [graph_keys.is_long([chunk]) for chunk in chunks] == [False, True, False, True]


@pytest.mark.parametrize(
    ("drafter", "captured"), gate_of(product(["none", "eagle3"], [96, 40]), [("none", 96), ("eagle3", 40)])
)
def test_every_step_fits_a_captured_one(drafter, captured, configure):
    """Many short prompts at once, long ones among them: chunks are cut so that no pass runs kernel by kernel."""
    options = {
        "prefill_graph_tokens": captured,
        "max_running": 2 * MOST_CHUNKS,
        "kv_cache_tokens": 8192,
        "page_size": 1,
    }
    engine = play(configure("qwen3", drafter, **options))
    lengths = [1] * 2 * MOST_CHUNKS + [1, 2, 3, 33, 40, 1, 96, 97, 230, 64] * 3
    requests = [make_request(str(i), random_prompt(n, i), max_tokens=3) for i, n in enumerate(lengths)]
    recorded = record(engine)
    run(engine, requests)
    assert sum(replays_of(engine).values()) == len(recorded) > 0
    assert max(len(plan.chunks) for plan, _ in recorded) == MOST_CHUNKS
    assert any(plan.slots and plan.chunks for plan, _ in recorded)


def test_prompts_may_be_left_uncaptured(configure):
    config = configure("qwen3", "eagle3", prefill_graph_tokens=0, kv_cache_tokens=4096)
    engine = play(config)
    requests = sized_requests(LENGTHS, max_tokens=6)
    recorded = record(engine)
    expected = plain_answers(Path(config.target), requests)
    assert tokens_of(run(engine, requests)) == expected
    keys = engine.runner.steps.keys
    assert not any(key.has_prompts for key in keys)
    assert sum(replays_of(engine).values()) == sum(not plan.chunks for plan, _ in recorded) > 0


@pytest.mark.parametrize("drafter", ["eagle3 tree", "dflash"])
def test_padding_is_written_to_the_dump_page_only(drafter, configure):
    """Whatever of the cache has no owner stays as it was, while passes are captured and as they are replayed."""
    engine = play(configure("qwen3", drafter, page_size=1, kv_cache_tokens=2048))
    steps = engine.runner.steps
    drafts = engine.runner.drafts
    state = engine.runner.state
    assert steps is not None
    assert drafts is not None
    for kv in caches_of(engine):
        kv.fill_(7)
    with torch.inference_mode():
        steps.run_all()
        drafts.run_all()
    check_untouched(state)
    for kv in caches_of(engine):
        assert (kv[:, :, 1:] == 7).all()
    request = make_request("0", random_prompt(33, 1), max_tokens=1)
    run(engine, [request])
    for index, kv in enumerate(caches_of(engine)):
        is_written = (kv != 7).flatten(3).any(-1).any(0).any(0)
        assert (
            int(is_written[1:].sum()) >= len(request.prompt)
            if index
            else int(is_written[1:].sum()) == len(request.prompt)
        )
        assert torch.isfinite(kv).all()


def check_untouched(state: RequestState):
    assert not state.lengths.any()
    assert not state.pages.any()
    assert not state.stored.probabilities.any()


class FakeEvent:
    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, _: "FakeEvent") -> float:
        return 1.0


@pytest.mark.parametrize("sizes", [(64, None), (96, 48)], ids=["requests fill a pass", "no request fills a pass"])
def test_the_largest_passes_are_timed(sizes, configure, monkeypatch):
    """All the sizes that costs are asked for, each time on as many random nodes, which leave nothing behind."""
    captured, longest = sizes
    options = {"prefill_graph_tokens": captured, "max_model_len": longest}
    engine = build_played(configure("qwen3", "eagle3 tree", **options))
    steps = engine.runner.steps
    drafts = engine.runner.drafts
    state = engine.runner.state
    assert steps is not None
    assert drafts is not None
    before = state.proposals.clone()
    embedded = []
    timed = {}  # by key: nodes that were verified, and the tokens of the rows
    replay = steps._replay

    def replay_and_look(key):
        embedded.clear()
        replay(key)
        num_decoding = min(key[0], steps.max_running)
        turns = steps.results.tokens
        verified = int(turns[int(steps.passes) % len(turns), :num_decoding, 1].sum())
        timed.setdefault(key, []).append((verified, embedded[0]))

    monkeypatch.setattr(steps, "_replay", replay_and_look)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    embed = engine.runner.target.embed_tokens
    with embed.register_forward_pre_hook(lambda _, inputs: embedded.append(inputs[0].clone())):
        tables = steps.time_all()
    assert {mode: set(table) for mode, table in tables.items()} == {
        mode: {*steps.sizes, *(rows for rows in steps.prompt_sizes if rows > steps.sizes[-1])} for mode in tables
    }
    assert set(steps.timed_sizes) == set(tables["plain"])
    assert len(timed) == sum(map(len, tables.values()))
    for (rows, *_), passes in timed.items():
        num_nodes = min(rows, steps.sizes[-1])
        assert {verified for verified, _ in passes} == {num_nodes}
        (_, first), *later = passes
        assert all(torch.equal(tokens, first) for _, tokens in later)
        assert len(first[:num_nodes].unique()) > num_nodes / 2  # of a small vocabulary
    assert torch.equal(state.proposals, before)
    check_untouched(state)


@pytest.mark.parametrize("damage", [None, "target", "draft"])
def test_step_times_of_other_sizes_are_measured_again(damage, configure, tmp_path, monkeypatch):
    monkeypatch.setenv(cost_files.FOLDER_VARIABLE, str(tmp_path))
    runner = build_played(configure("qwen3", "eagle3 tree")).runner
    steps = runner.steps
    drafts = runner.drafts
    assert steps is not None
    assert drafts is not None
    key = cost_files.CostKey("H100", "2.11", "3.6", "0.1", "", "")
    measured = []

    def times(sizes):
        measured.append("")
        return {mode: dict.fromkeys(sizes, 1.5) for mode in MODES}

    monkeypatch.setattr(steps, "time_all", lambda: times(steps.timed_sizes))
    monkeypatch.setattr(drafts, "time_all", lambda: times(drafts.timed_sizes))
    tables = find_tables(runner, key)
    if damage is not None:
        saved = tables.to_json()
        for table in saved[damage].values():
            del table[1]
        cost_files.save(key, saved)
    assert find_tables(runner, key) == tables
    assert len(measured) == (2 if damage is None else 4)
    assert cost_files.load(key) == json.loads(json.dumps(tables.to_json()))


def test_a_dropped_size_is_taken_by_a_larger_one(configure):
    engine = build_played(configure("qwen3", "eagle3 tree"))
    steps = engine.runner.steps
    assert steps is not None

    def rows():
        """Rows of the pass that takes 4 nodes."""
        key = GraphTable(engine.runner.graphs, lambda: True).step(step_of(slots=[0], nodes=4))
        return key.rows

    assert rows() == 4
    steps.drop({4})
    assert rows() == 8
    assert 4 not in steps.sizes
    largest = steps.sizes[-1]
    steps.drop({*steps.sizes, *steps.prompt_sizes[:-1]})
    assert steps.sizes == [largest], "a pass with prompts takes no nodes alone"
    assert rows() == largest
