"""Requests may refuse drafts, and may ask where their tokens come from."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.plan import StepOutput, StepPlan
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request, SamplingParams, Speculation, TokenTrace
from slipstream.serve.runner.model_runner import InFlight
from slipstream.tests.pairwise import rotating
from slipstream.tests.serve.engine_runs import (
    DRAFTERS,
    Answer,
    Build,
    build_engine,
    drafted_engines,
    make_request,
    plain_answers,
    random_prompt,
    run,
    texts_of,
    tokens_of,
    watch_outputs,
)
from slipstream.tests.serve.played_graphs import drafts_of, play
from slipstream.tests.serve.test_lossless import AnyPolicy
from slipstream.tests.serve.test_overlap import build_overlapping, slow_down

DRAFTED = {name: options for name, options in DRAFTERS.items() if name != "none"} | {
    "ngram first": {"depth": 3, "ngram_first": 1, "ngram_nodes": 7}
}
OFF = Speculation(enabled=False)
TRACE = Speculation(trace=True)


def requests_of(count: int = 6, **params: Any) -> list[Request]:
    return [
        make_request(str(seed), random_prompt(4 + 5 * seed, seed), max_tokens=14 + seed, seed=seed, **params)
        for seed in range(count)
    ]


def with_speculation(requests: list[Request], speculation: Speculation, every: int = 1) -> list[Request]:
    """The first of each `every` requests, with that; the others as they are."""
    return [
        make_request(
            request.id, request.prompt, max_tokens=request.params.max_tokens, seed=request.seed, speculation=speculation
        )
        if index % every == 0
        else request
        for index, request in enumerate(requests)
    ]


@pytest.fixture(scope="module")
def expected(target) -> dict[str, list[int]]:
    return plain_answers(target, requests_of())


@pytest.fixture(scope="module")
def build(target, tmp_path_factory) -> Build:
    """(drafter, engine options, with `make` for another builder) -> engine. The drafts know some of the answers."""
    folder = tmp_path_factory.mktemp("drafts")
    drafted_engines(target, folder, texts_of(target, [request for request in requests_of() if request.id not in "14"]))

    def make(drafter, make=build_engine, **options):
        name = "eagle3" if drafter == "ngram first" else drafter.split()[0]
        return make(target, name if name == "ngram" else folder / name, drafter=DRAFTED[drafter], **options)

    return make


def build_played(target: Path, draft: Path | str, **options: Any) -> Engine:
    config = {"max_running": 8, "kv_cache_tokens": 2048, "prefill_graph_tokens": 64}
    return play(EngineConfig(target=str(target), draft=str(draft), **config | options))


class Watcher:
    """Records the nodes that every pass verifies for every request, by the stored tokens on the device."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.verified: dict[str, list[tuple[list[list[int]], int]]] = {}  # by request: nodes, how many were verified
        self._owners: dict[int, str] = {}
        self._before: dict[int, list[tuple[str, list[list[int]]]]] = {}  # by plan
        self._launch = engine.runner.launch
        watch_outputs(engine, self.look)
        engine.runner.launch = self.launch

    def launch(self, plan: StepPlan, **options: Any) -> InFlight:
        engine = self.engine
        engine.runner.prepare(plan)
        self._owners.update((admission.slot, admission.request.id) for admission in plan.admissions)
        if plan.acceptance_table is not None:
            engine.runner.state.set_acceptance_table(plan.acceptance_table)
        for proposal in plan.edits.proposals:
            engine.runner._store(proposal)
        stored = engine.runner.state.proposals[:2]
        self._before[plan.number] = [(self._owners[slot], stored[:, slot].tolist()) for slot in plan.slots]
        return self._launch(plan, **options)

    def look(self, plan: StepPlan, output: StepOutput):
        before = self._before.get(plan.number, [])  # of an earlier watcher: nobody waits for it
        for (name, nodes), count in zip(before, output.num_verified.tolist(), strict=False):
            self.verified.setdefault(name, []).append((nodes, count))


@pytest.mark.parametrize(("drafter", "make"), rotating(DRAFTED, [build_engine, build_overlapping, build_played]))
def test_a_request_without_drafts_has_one_node_in_every_step(drafter, make, build, expected):
    """Beside others, which go on drafting; also in the slot of one of these."""
    engine = build(drafter, make, max_running=4)
    if make is build_overlapping:
        slow_down(engine)  # else steps of a busy machine stop waiting for n-grams
    requests = with_speculation(requests_of(), OFF, every=2)
    watcher = Watcher(engine)
    off = [request.id for request in requests[::2]]
    for _ in range(2):  # n-grams know the others' answers then
        answers = run(engine, requests)
        assert tokens_of(answers) == expected
        for name in off:
            counts = answers[name].counts
            assert (counts.rounds, counts.drafted_tokens, counts.accepted_by_position) == (0, 0, [])
    nodes = {name: {count for _, count in rounds} for name, rounds in watcher.verified.items()}
    assert all(nodes[name] == {1} for name in off)
    assert all(stored[0][1:] == [-1] * (len(stored[0]) - 1) for name in off for stored, _ in watcher.verified[name])
    assert all(max(nodes[request.id]) > 1 for request in requests[1::2])
    assert sum(answer.counts.accepted_tokens for answer in answers.values()) > 0


@pytest.mark.parametrize("make", [build_engine, build_played])
@pytest.mark.parametrize("drafter", ["eagle3", "ngram"])
def test_requests_without_drafts_teach_nothing(drafter, make, build, expected):
    """Where none wants drafts no draft runs, nothing is looked up and nothing is counted."""
    engine = build(drafter, make)
    before = engine.metrics()
    assert tokens_of(run(engine, with_speculation(requests_of(), OFF))) == expected
    acceptance = engine.planner.policy.acceptance
    after = engine.metrics()
    assert acceptance.num_tried.sum() == 0
    assert acceptance.version == 0
    same = [name for name in after if name.startswith("ngram") or name == "draft_width"]
    assert [after[name] for name in same] == [before[name] for name in same]
    assert after["nodes_per_step"] == 0 or drafter == "ngram"
    if make is build_played and drafter == "eagle3":
        assert drafts_of(engine) == {}


def test_a_step_is_sized_by_those_that_draft(build):
    """A fixed width holds for them alone."""
    engine = build("eagle3", width=4)
    plans = []
    engine.trace = lambda event, plan: plans.append(plan) if event == "launched" else None
    run(engine, with_speculation(requests_of(), OFF, every=3))
    assert any(len({*plan.slots} - {*plan.drafting}) > 1 for plan in plans)
    for plan in plans:
        num_drafted = len({*plan.slots} & {*plan.drafting})
        assert plan.nodes == len(plan.slots) + 3 * num_drafted


def alternatives(nodes: list[list[int]], count: int, path: list[int]) -> list[int]:
    """Tokens of the first `count` nodes that follow the drafted tokens of `path`, by the texts of the nodes."""
    tokens, parents = nodes
    texts = [[]]
    for node in range(1, count):
        texts.append([*texts[parents[node]], tokens[node]])
    return [text[-1] for text in texts[1:] if text[:-1] == path]


def explain(answer: Answer, rounds: list[tuple[list[list[int]], int]]) -> list[tuple[bool, int, int, list[int]]]:
    """Returns, for each token of an answer that was never preempted, whether it was drafted, its position, its round,
    and what was refused."""
    origins = [(False, 0, 0, [])]
    ends = [*answer.starts[2:], len(answer.tokens)]
    pairs = zip(answer.starts[1:], ends, rounds, strict=False)
    for number, (start, end, (nodes, count)) in enumerate(pairs, 1):
        for place in range(start, end):
            path = answer.tokens[start:place]
            token = answer.tokens[place]
            offered = alternatives(nodes, count, path)
            position = len(path) + 1 if token in offered else 0
            origins.append((token in offered, position, number, [node for node in offered if node != token]))
    return origins


@pytest.mark.parametrize(("drafter", "make"), rotating(DRAFTED, [build_engine, build_overlapping, build_played]))
def test_a_trace_says_where_each_token_comes_from(drafter, make, build, expected):
    """Against the proposals on the device, with the passes' numbers of verified nodes: what was held back was not
    refused. Refused n-grams are named where the request's own text goes on with them."""
    engine = build(drafter, make)
    requests = with_speculation(requests_of(), TRACE, every=2)
    sources = set()
    refused = 0
    held_back = 0
    withheld = 0
    for _ in range(2):
        watcher = Watcher(engine)
        engine.planner.policy = AnyPolicy(engine.planner, random.Random(1))
        answers = run(engine, requests)
        assert tokens_of(answers) == expected
        for request in requests:
            answer = answers[request.id]
            rounds = watcher.verified[request.id]
            if not request.params.wants_trace:
                assert answer.trace == []
                continue
            explained = explain(answer, rounds)
            for entry, (is_drafted, position, number, offered) in zip(answer.trace, explained, strict=True):
                assert (entry.source != "target", entry.position, entry.round) == (is_drafted, position, number)
                assert named(entry.refused, offered) == offered
            withheld += check_names(request.prompt, answer, is_ngram=drafter == "ngram")
            assert all(entry.drafted == rounds[entry.round - 1][1] - 1 for entry in answer.trace if entry.round)
            check_counts(answer)
            sources.update(entry.source for entry in answer.trace)
            refused += sum(len(entry.refused) for entry in answer.trace)
            held_back += sum(len([node for node in nodes[0] if node >= 0]) > count for nodes, count in rounds)
    name = drafter.split()[0]
    assert sources == {"target", "eagle3", "ngram"} if drafter == "ngram first" else {"target", name}
    assert refused > 5
    assert held_back > 5
    assert (withheld > 0) == ("ngram" in drafter)


def named(refused: Sequence[int | None], offered: list[int]) -> list[int]:
    """The refused tokens, those that are withheld as they were offered."""
    return [offer if token is None else token for token, offer in zip(refused, offered, strict=True)]


def check_names(prompt: list[int], answer: Answer, *, is_ngram: bool) -> int:
    """Returns how many refused tokens are withheld. Asserts that a named one, if n-grams alone draft, has followed the
    token before it in the request's own text."""
    text = prompt + answer.tokens
    withheld = 0
    for place, entry in enumerate(answer.trace, len(prompt)):
        withheld += entry.refused.count(None)
        pairs = set(pairwise(text[:place]))
        assert not is_ngram or all(token is None or (text[place - 1], token) in pairs for token in entry.refused)
    return withheld


def check_counts(answer: Answer):
    positions = [entry.position for entry in answer.trace if entry.position]
    assert len(answer.trace) == len(answer.tokens)
    assert [
        positions.count(place + 1) for place in range(max(positions, default=0))
    ] == answer.counts.accepted_by_position
    assert max(entry.round for entry in answer.trace) == answer.counts.rounds


@pytest.mark.parametrize(
    ("drafter", "make"), rotating(["eagle3 tree", "ngram first"], [build_engine, build_overlapping])
)
def test_a_trace_survives_preemption_prefix_hits_and_ends(drafter, make, build, expected):
    """Rounds go on counting; a token that a prompt's pass gives when a request resumes is the target's. What the engine
    counts for /metrics is the sum of all that."""
    engine = build(drafter, make, page_size=1)
    rng = random.Random(3)
    requests = with_speculation(requests_of(), TRACE)

    def preempt(*_):
        if engine.scheduler.num_running > 1 and rng.random() < 0.3:
            engine.scheduler._preempt_newest()

    accepted = Counter()
    drafted = 0
    emitted = 0
    for _ in range(2):
        answers = run(engine, requests, preempt)
        assert tokens_of(answers) == expected
        for answer in answers.values():
            check_counts(answer)
            accepted.update((entry.source, str(entry.position)) for entry in answer.trace if entry.position)
            drafted += answer.counts.drafted_tokens
            emitted += len(answer.tokens)
            assert [entry.round for entry in answer.trace].count(0) == answer.counts.prefills
            rounds = [entry.round for entry in answer.trace if entry.round]
            assert rounds == sorted(rounds)
    counts = engine.counts()
    assert counts.accepted == accepted
    assert (sum(counts.drafted.values()), counts.emitted_tokens) == (drafted, emitted)
    assert counts.kv_pages["0", "used"] == 0
    assert engine.scheduler.num_preemptions > 3
    assert max(answer.counts.cached_tokens for answer in answers.values()) > 8


def test_a_trace_of_a_request_without_drafts(build, expected):
    requests = with_speculation(requests_of(), Speculation(enabled=False, trace=True))
    for name, answer in run(build("eagle3"), requests).items():
        trace = [entry._replace(rows=0) for entry in answer.trace]
        assert trace == [TokenTrace("target", 0, number) for number in range(len(expected[name]))]


def test_a_trace_tells_the_rows_of_each_pass(build):
    """The rows of all requests: two without drafts, their prompts included, and one with drafts."""
    requests = with_speculation(requests_of(2), Speculation(enabled=False, trace=True))
    engine = build("eagle3", prefill_budget=64)
    passes = []
    engine.trace = lambda event, plan: passes.append(rows_of(plan)) if event == "committed" else None
    answers = run(engine, requests)
    assert [entry.rows for entry in answers["1"].trace] == passes  # the longest runs from the first step to the last
    engine = build("eagle3")
    passes = []
    engine.trace = lambda event, plan: passes.append(rows_of(plan)) if event == "committed" else None
    [answer] = run(engine, with_speculation(requests_of(1), TRACE)).values()
    assert [entry.rows for entry in answer.trace] == [passes[entry.round] for entry in answer.trace]
    assert max(entry.drafted for entry in answer.trace) > 1


def rows_of(plan: StepPlan) -> int:
    return plan.nodes + sum(len(chunk.tokens) for chunk in plan.chunks)


@pytest.mark.parametrize("make", [build_engine, build_overlapping])
def test_proposals_are_copied_only_where_somebody_traces(make, build):
    engine = build("eagle3", make, max_running=2)
    plans = []
    engine.trace = lambda event, plan: plans.append(plan) if event == "launched" else None
    run(engine, requests_of(2))
    assert not any(plan.returns_proposals for plan in plans)
    plans.clear()
    requests = requests_of(2)
    run(engine, [*with_speculation(requests[:1], TRACE), *requests[1:]])
    assert plans[0].returns_proposals
    assert not plans[-1].returns_proposals


def test_what_cannot_be_asked():
    for value, message in (
        ({"enable": True}, "speculation.enable does not exist; valid: enabled, trace"),
        ({"enabled": 1}, "speculation.enabled is 1; it must be true or false"),
        (False, "speculation is False; it must be Speculation or a mapping of enabled and trace"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(max_tokens=1, speculation=value)
    params = SamplingParams(max_tokens=1, speculation={"trace": True})
    assert params.speculation == TRACE
