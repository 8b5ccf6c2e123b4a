"""The step with trees and with changing numbers of nodes: mask, positions, KV moves; the tokens stay those without a
draft."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.kernels.speculation.ragged import Chunks, lay_out, verify_rows
from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters import base, registry
from slipstream.serve.engine.budget import Choice
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.plan import StepOutput, StepPlan
from slipstream.serve.engine.scheduler import Sequence
from slipstream.serve.request import Request
from slipstream.serve.runner.batch import DraftBatch, PassRows, Proposal
from slipstream.serve.runner.request_state import RequestState
from slipstream.serve.runner.step import simulate
from slipstream.tests.attention_layers import asking_layer
from slipstream.tests.pairwise import rotating
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.random_targets import MakeTarget
from slipstream.tests.serve.engine_runs import (
    SAMPLINGS,
    VOCAB,
    Tokens,
    acceptance,
    build_engine,
    make_request,
    plain_answers,
    random_prompt,
    run,
    tokens_of,
    watch_outputs,
)
from slipstream.tests.serve.test_lossless import AnyPolicy

Tree = tuple[list[int], list[int]]


class TreeDrafter(base.Drafter):
    """Proposes random trees, part of them right because it has been told the answers.

    `texts`: prompt + answer of every request. Its own KV holds, as a number, the token of each KV slot; so what was
    moved can be recognised. `aux_states` (n, H) of `texts` are what its observed ones must be."""

    aux_layers = (1,)

    def __init__(self, texts: list[list[int]], aux_states: list[Tensor]) -> None:
        self.texts = texts
        self.aux_states = aux_states
        self.rng = random.Random(0)
        self.known: dict[int, int] = {}  # request slot -> index of its text
        self.start: dict[int, int] = {}  # request slot -> where its KV numbers begin
        self.committed: dict[int, int] = {}  # request slot -> tokens that `extend` has seen

    @classmethod
    def plan(cls, *_: Any, **__: Any) -> base.DraftPlan:
        layers = (asking_layer(head_dim=2).spec,)
        return base.DraftPlan(widths=(1, 2, 5, 8), scratch=tuple(range(9)), branches=True, layers=layers)

    @classmethod
    def load(cls, draft: str, options: Any, target: Target) -> "TreeDrafter":
        raise AssertionError("tests build it")

    def attach(self, target: Target, state: RequestState, attention: Backend | None) -> None:
        assert attention is not None
        self.state = state
        self.numbers = attention.kv.caches[0].flat[0, 0, :, 0, 0]

    def admit(self, slot: int, tokens: list[int]) -> None:
        (self.known[slot],) = (index for index, text in enumerate(self.texts) if text[: len(tokens)] == tokens)
        self.start[slot] = len(tokens)
        self.committed.pop(slot, None)

    def propose(self, batch: DraftBatch, width: int) -> Proposal:
        trees = []
        for slot, length, root in zip(
            batch.requests.tolist(), batch.lengths.tolist(), batch.roots.tolist(), strict=True
        ):
            truth = self.texts[self.known[slot]][length:] or [root]  # behind the end nothing is known
            assert truth[0] == root
            trees.append(self._grow(truth, width))
            slots = self.state.slots(torch.tensor(slot), torch.arange(length, length + width))
            self.numbers[slots] = torch.tensor(trees[-1][0], dtype=self.numbers.dtype)
        tokens, parents = (torch.tensor(nodes, dtype=torch.int32) for nodes in zip(*trees, strict=True))
        return Proposal(tokens, parents, torch.zeros(tokens.shape))

    def extend(self, rows: PassRows, aux_states: Tensor) -> None:
        for slot, last in zip(rows.requests.tolist(), rows.last.tolist(), strict=True):
            end = int(rows.positions[last]) + 1
            length = self.committed.get(slot)
            self.committed[slot] = end
            if length is None:  # it may begin with cached tokens
                continue
            first = last + 1 - (end - length)
            start = self.start[slot]
            text = self.texts[self.known[slot]]
            end = min(end, len(text))
            expected = self.aux_states[self.known[slot]][length:end]
            torch.testing.assert_close(aux_states[first : first + end - length], expected, atol=1e-4, rtol=1e-4)
            if length < start:  # of a prompt
                continue
            self.numbers[self.state.slots(torch.tensor(slot), torch.tensor(length))] = text[length]  # the root's
            stored_tokens = self.numbers[self.state.slots(torch.tensor(slot), torch.arange(start, end))]
            assert stored_tokens.long().tolist() == text[start:end], "KV was moved wrongly"

    def _grow(self, truth: list[int], width: int) -> Tree:
        """A tree below truth[0]: most nodes below a right one are right; some last ones are unused."""
        tokens = [truth[0]]
        parents = [-1]
        depths = [0]
        right = {0}
        children = {(0, truth[0])}
        for node in range(1, self.rng.randint(1, width)):
            parent = self.rng.choice([max(right), self.rng.randrange(node)])
            depth = depths[parent] + 1
            token = self.rng.randrange(VOCAB)
            if parent in right and depth < len(truth) and self.rng.random() < 0.7:
                token = truth[depth]
            while (parent, token) in children:
                token = self.rng.randrange(VOCAB)
            if parent in right and depth < len(truth) and token == truth[depth]:
                right.add(node)
            children.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        padding = [-1] * (width - len(tokens))
        return tokens + padding, parents + padding


def requests_of(sampling: dict[str, Any]) -> list[Request]:
    """Three, of unequal lengths and ends."""
    lengths = ((3, 20), (19, 33), (40, 9))
    return [
        make_request(str(seed), random_prompt(length, seed), max_tokens=answer, seed=seed, **sampling)
        for seed, (length, answer) in enumerate(lengths)
    ]


@torch.no_grad()
def aux_states_of(target: Path, texts: list[list[int]], layer: int) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return [model(torch.tensor([text]), output_hidden_states=True).hidden_states[layer + 1][0] for text in texts]


def build_tree_engine(
    target: Path, requests: list[Request], truth: Tokens, patch: pytest.MonkeyPatch, **options: Any
) -> tuple[Engine, TreeDrafter]:
    texts = [request.prompt + truth[request.id] for request in requests]
    drafter = TreeDrafter(texts, aux_states_of(target, texts, layer=1))
    with patch.context() as scope:
        scope.setattr(TreeDrafter, "load", classmethod(lambda *_: drafter))
        scope.setattr(registry, "find_drafter", lambda _: TreeDrafter)
        engine = build_engine(target, **options)
    admit = engine.scheduler.on_admit

    def admit_both(sequence: Sequence) -> None:
        drafter.admit(sequence.slot, sequence.tokens)
        admit(sequence)

    engine.scheduler.on_admit = admit_both
    return engine, drafter


def watch_moves(engine: Engine) -> list[int]:
    """Records from now on the accepted nodes whose KV had to be moved, by step."""
    moves = list[int]()

    def look(_: StepPlan, output: StepOutput) -> None:
        accepted = output.accepted
        assert accepted is not None
        moves.append(int(((accepted >= 0) & (accepted != np.arange(accepted.shape[1]))).sum()))

    watch_outputs(engine, look)
    return moves


@pytest.mark.parametrize(
    ("case", "options"),
    rotating(
        list(product(SAMPLINGS, ["qwen3", "llama"])),
        [{"page_size": 16}, {"page_size": 1}, {"prefill_budget": 7}, {"max_running": 1}],
    ),
)
def test_trees_change_no_token(
    case: tuple[str, str],
    options: dict[str, Any],
    make_target: MakeTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling, family = case
    target = make_target(family)
    requests = requests_of(SAMPLINGS[sampling])
    truth = plain_answers(target, requests)
    engine, _ = build_tree_engine(target, requests, truth, monkeypatch, **options)
    moves = watch_moves(engine)
    answers = run(engine, requests)
    assert tokens_of(answers) == truth
    assert 0 < acceptance(answers) < 1
    assert sum(moves) > 0


def test_trees_survive_preemption(make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target("qwen3")
    requests = requests_of({"temperature": 1.0})
    truth = plain_answers(target, requests)
    engine, _ = build_tree_engine(target, requests, truth, monkeypatch, kv_cache_tokens=70, page_size=1)
    assert tokens_of(run(engine, requests)) == truth
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("drafter", ["tree", "eagle3"])
def test_numbers_of_nodes_may_change_from_step_to_step(
    drafter: str, make_target: MakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target("qwen3")
    requests = requests_of({"temperature": 0.7})
    truth = plain_answers(target, requests)
    if drafter == "tree":
        engine, _ = build_tree_engine(target, requests, truth, monkeypatch)
    else:
        save_random_draft(target, tmp_path / "draft")
        engine = build_engine(target, tmp_path / "draft", drafter={"depth": 7})
    engine.planner.policy = AnyPolicy(engine.planner, random.Random(3))
    numbers = set[tuple[int, int]]()
    engine.trace = lambda event, plan: numbers.add((plan.nodes, plan.width)) if event == "launched" else None
    answers = run(engine, requests)
    assert tokens_of(answers) == truth
    assert any(answer.counts.accepted_tokens for answer in answers.values())
    assert len(numbers) > 5


@pytest.mark.parametrize("widths", [(8, 3, 8), (8, 1, 8), (4, 8, 2)])
def test_a_shorter_proposal_leaves_no_nodes_of_the_one_before(
    widths: tuple[int, ...], make_target: MakeTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_draft(make_target("llama"), tmp_path / "draft")
    engine = build_engine(make_target("llama"), tmp_path / "draft", drafter={"depth": 7})
    engine.add(make_request("0", random_prompt(5, 0), max_tokens=60, ignore_eos=True))
    for width in widths:
        monkeypatch.setattr(engine.planner.policy, "choose", lambda *_, width=width, **__: Choice(8, width))
        engine.step()
        (sequence,) = engine.scheduler._running
        stored = engine.runner.state.stored
        assert (stored.tokens[sequence.slot, :width] >= 0).all()
        assert (stored.probabilities[sequence.slot, :width] > 0).all()
        for unused in (stored.tokens, stored.parents, stored.bins):
            assert (unused[sequence.slot, width:] == -1).all()
        assert not stored.probabilities[sequence.slot, width:].any()


@pytest.mark.parametrize("accept_length", [1.0, 1.3, 2.99, 4.0])
def test_the_mean_is_the_one_asked_for(accept_length: float) -> None:
    """Beside a prompt, whose token stays as it is."""
    count = 1000
    width = 4
    state = RequestState(count + 1, 30, 4, width, torch.device("cpu"), vocab_size=90)
    stored = state.stored
    slots = torch.arange(count)
    prompt = torch.tensor([count])
    stored.lengths.copy_(torch.arange(count + 2) % 97)
    state.keys.copy_(torch.arange(count + 2))
    stored.tokens.copy_(torch.arange(4 * (count + 2)).view(-1, width) % 90)
    stored.parents.copy_(torch.arange(-1, width - 1))
    unit = torch.ones(1, dtype=torch.int64)
    tokens = torch.arange(7)
    chunks = Chunks(prompt, 0 * unit, 7 * unit, unit, tokens, -unit)
    widths = torch.full((count,), width)
    num_rows = 4 * count + 7
    layout = lay_out(stored, widths, slots, chunks, state.pages[0], state.page_size, num_rows, False, state.padding)
    sampled = simulate(torch.full((4 * count + 1,), 33), layout, count, state, accept_length)
    results = torch.empty(count + 1, 2 + 2 * width, dtype=torch.int32)
    verified = verify_rows(layout, sampled, stored, chunks, count, results, state.padding)
    assert float(verified.lengths[:-1].float().mean()) == pytest.approx(accept_length, abs=0.03)
    assert {int(accept_length), int(accept_length + 0.999)} >= set(verified.lengths[:-1].tolist())
    assert verified.tokens[-1].tolist() == [33, -1, -1, -1]
    for index in range(0, count, 97):
        number = int(verified.lengths[index])
        assert verified.nodes[index].tolist() == [*range(number), *[-1] * (4 - number)]


def test_an_engine_emits_that_many(make_target: MakeTarget, tmp_path: Path) -> None:
    save_random_draft(make_target("llama"), tmp_path / "draft")
    engine = build_engine(make_target("llama"), tmp_path / "draft", simulate_accept_length=3.0)
    (answer,) = run(engine, [make_request("0", random_prompt(9, 0), max_tokens=61, ignore_eos=True)]).values()
    assert (answer.counts.rounds, answer.counts.accepted_tokens) == (20, 40)
