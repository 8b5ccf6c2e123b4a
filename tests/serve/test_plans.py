"""Steps by their plans: what a plan brings, and requests that fail and leave the others alone."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.serve.engine.acceptance import BINS, NETWORK_BINS
from slipstream.serve.engine.host_stages import Emitted, HostStage, Proposed
from slipstream.serve.engine.plan import Edits, HostProposal
from slipstream.serve.request import Request
from slipstream.tests.pairwise import gate_of, pairwise
from slipstream.tests.serve.engine_runs import build_engine, make_request, plain_answers, random_prompt, run, tokens_of
from slipstream.tests.serve.test_overlap import build_overlapping


def requests_of(**params: Any) -> list[Request]:
    return [
        make_request(str(seed), random_prompt(7 + 9 * seed, seed), seed=seed, max_tokens=20, **params)
        for seed in range(5)
    ]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"logit_bias": {5: 1.0}}, {"logprobs": 2}])
def test_prompts_are_limited_by_the_times_of_the_steps_that_they_share(params, target):
    engine = build_engine(target, max_running=3, prefill_budget=16)
    limited = []
    original = engine.planner.policy.chunk_rows

    def chunk_rows(num_decoding, *, filtered):
        limited.append(filtered)
        return original(num_decoding, filtered=filtered)

    engine.planner.policy.chunk_rows = chunk_rows
    run(engine, requests_of(temperature=0.8, **params))
    assert set(limited) == {bool(params)}


@pytest.mark.parametrize(
    ("place", "device", "build"),
    gate_of(
        product(
            [("step", 1), ("step", 2), ("step", 9), ("draft", 1), ("draft", 5)],
            ["cuda", "cpu"],
            [build_engine, build_overlapping],
        ),
        [
            (("step", 1), "cuda", build_engine),
            (("step", 2), "cpu", build_engine),
            (("step", 9), "cuda", build_overlapping),
            (("draft", 1), "cpu", build_overlapping),
            (("draft", 5), "cuda", build_engine),
        ],
    ),
)
def test_a_pass_without_memory_fails_its_requests_alone(build, place, device, target, draft, monkeypatch):
    which, number = place
    requests = requests_of()
    expected = plain_answers(target, requests)
    engine = build(target, draft, max_running=2, prefill_budget=16)
    original = getattr(type(engine.runner.passes), which)
    calls = 0

    def fail_once(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == number and device == "cpu":
            torch.empty(1 << 46)  # 256 TiB
        if calls == number:
            raise torch.OutOfMemoryError("tried to allocate 2 GB")
        return original(*arguments, **options)

    monkeypatch.setattr(type(engine.runner.passes), which, fail_once)
    answers = run(engine, requests)
    failed = {name for name, answer in answers.items() if answer.finish_reason == "error"}
    assert 1 <= len(failed) <= 2
    reason = "tried to allocate 2 GB" if device == "cuda" else r".*DefaultCPUAllocator.*"
    for name in failed:
        assert re.search(rf"no memory for this step \({reason}\); lower", answers[name].error)
    assert {name: answer.tokens for name, answer in answers.items() if name not in failed} == {
        name: tokens for name, tokens in expected.items() if name not in failed
    }


class Watching(HostStage):
    """Sees what is verified next of some requests, and fails the one that proposes a token."""

    reads = "proposal"

    def __init__(self, names: str = "01234", refused: int | None = None):
        self.seen: list[Proposed] = []
        self.names = names
        self.refused = refused
        self.slots: set[int] = set()  # of those requests

    def admit(self, slot: int, request: Request, tokens: list[int]):
        if request.id in self.names:
            self.slots.add(slot)

    def release(self, slot: int, tokens: list[int], *, resumes: bool = False):
        self.slots.discard(slot)

    def run(self, inputs: Emitted | Proposed, width: int, *, late: bool = False) -> Edits:
        assert isinstance(inputs, Proposed)
        self.seen.append(inputs)
        for (count, *tokens), root in zip(inputs.results.tolist(), inputs.nodes[0, :, 0].tolist(), strict=True):
            assert not count or tokens[count - 1] == root
        errors = {
            slot: f"token {self.refused} is refused"
            for index, slot in enumerate(inputs.slots)
            if self.refused in inputs.nodes[0, index].tolist()
        }
        return Edits(errors=errors)


@pytest.mark.parametrize(
    ("build", "name", "names"), pairwise([build_engine, build_overlapping], ["draft", "ngram"], ["01234", "3"])
)
def test_a_stage_sees_every_proposal_before_it_is_verified(build, name, names, target, draft):
    requests = requests_of()
    expected = plain_answers(target, requests)
    engine = build(target, draft if name == "draft" else name, max_running=3)
    stage = Watching(names)
    verified = []
    engine.stages.append(stage)

    def look(event, plan):
        if event == "ready" and plan.slots:
            engine.runner.prepare(plan)
            for proposal in plan.edits.proposals:
                engine.runner._store(proposal)
            nodes = engine.runner.state.stored.tokens[list(plan.slots)].tolist()
            pairs = zip(plan.slots, nodes, strict=True)
            verified.extend(pair for pair in pairs if pair[0] in stage.slots)

    engine.trace = look
    assert tokens_of(run(engine, requests)) == expected
    observed = {
        (slot, tuple(nodes))
        for proposed in stage.seen
        for slot, nodes in zip(proposed.slots, proposed.nodes[0].tolist(), strict=True)
    }
    assert {(slot, tuple(nodes)) for slot, nodes in verified} <= observed
    assert len(verified) > 5


@pytest.mark.parametrize("build", [build_engine, build_overlapping])
def test_a_stage_fails_one_request(build, target, draft):
    requests = requests_of()
    expected = plain_answers(target, requests)
    engine = build(target, draft)
    engine.stages.append(Watching(refused=requests[2].prompt[-1]))  # proposed in no other answer's place of a root
    answers = run(engine, requests)
    assert answers["2"].finish_reason == "error"
    assert answers["2"].error == f"token {requests[2].prompt[-1]} is refused"
    for name, answer in answers.items():
        assert answer.finish_reason == "error" or answer.tokens == expected[name]


def test_a_replaced_proposal_is_what_the_next_stage_sees():
    trees = np.array([[[5, 6, 8], [9, 10, 11]], [[-1, 0, 1], [-1, 0, 1]]], np.int32)
    proposed = Proposed([4, 7], trees, results=np.array([[1, 5], [1, 9]], np.int32))
    nodes = np.zeros((4, 2, 2), np.int32)
    nodes[0] = [[9, 3], [5, 2]]
    nodes[1] = [-1, 0]
    edit = HostProposal([7, 4], nodes, counts=[2, 0], kinds=[1, 1], source="ngram")
    after = proposed.after([edit])
    assert after.nodes.tolist() == [[[5, 6, 8], [9, 3, -1]], [[-1, 0, 1], [-1, 0, -1]]]
    assert proposed.nodes[0, 1].tolist() == [9, 10, 11], "the first one is kept"


@pytest.mark.parametrize("build", [build_engine, build_overlapping])
def test_the_runner_knows_what_the_policy_has_learned(build, target, draft):
    """A plan brings the table of probabilities where it has changed."""
    engine = build(target, draft)
    acceptance = engine.planner.policy.acceptance
    changes = []

    def look(event, plan):
        if event == "ready":
            changes.append(plan.acceptance_table is not None)
        if event == "launched":
            assert torch.equal(
                engine.runner.state.acceptance_table, torch.from_numpy(acceptance.table[:NETWORK_BINS].copy())
            )

    engine.trace = look
    run(engine, requests_of(temperature=1.0))
    assert changes[0]
    assert 1 < sum(changes) < len(changes) / 2, "seldom"
    assert changes.count(True) == 1 + acceptance.version


def test_proposals_of_the_host_are_calibrated(target, draft):
    """They are stored with their bins, and with probabilities that never rise, as the pass needs them."""
    engine = build_engine(target, draft, drafter={"ngram_first": 1})
    engine.add(make_request("0", [5, 6]))
    plan = engine.planner.plan()
    assert plan is not None
    acceptance = engine.planner.policy.acceptance
    acceptance.publish(np.random.default_rng(1).random(BINS, np.float32))
    for slot, (count, kind) in enumerate([(7, 1), (1, 3), (0, 2), (16, 20)]):
        nodes = np.full((4, 1, 16), 5, np.int32)
        edits = Edits((HostProposal([slot], nodes, [count], [kind], "ngram"),))
        engine.planner.choose(replace(plan, edits=edits))
        bins = nodes[2, 0]
        probabilities = nodes[3, 0].view(np.float32)
        assert (bins[max(count, 1) :] == -1).all()
        assert (probabilities[count:] == 0).all()
        if count:
            assert (bins[0], probabilities[0]) == (-1, 1)
            table = acceptance.table[bins[1:count]]
            assert (bins[1:count] >= NETWORK_BINS).all()
            assert probabilities[1:count].tolist() == np.minimum.accumulate(table).tolist()
    acceptance.publish(np.full(BINS, 0.25, np.float32))
    engine.planner.choose(replace(plan, edits=Edits((HostProposal([0], nodes, [16], [20], "ngram"),))))
    assert (nodes[3, 0, 1:].view(np.float32) == 0.25).all(), "by the table of now"
