"""The round with trees and with changing widths: mask, positions, KV moves; the tokens stay those without a draft."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.serve.batch import SamplingMode
from slipstream.serve.drafters import base
from slipstream.serve.engine import Engine
from slipstream.serve.request import Request
from slipstream.serve.round import Runner, simulate
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import acceptance, build_engine, make_request, random_prompt, run, tokens_of
from slipstream.tests.serve.tree_drafter import TreeDrafter

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def requests_of(sampling: dict[str, Any]) -> list[Request]:
    """Three, of unequal lengths and ends."""
    lengths = ((3, 20), (19, 33), (40, 9))
    return [
        make_request(str(seed), random_prompt(length, seed), max_tokens=answer, seed=seed, **sampling)
        for seed, (length, answer) in enumerate(lengths)
    ]


@torch.no_grad()
def features_of(target: Path, texts: list[list[int]], layer: int) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return [model(torch.tensor([text]), output_hidden_states=True).hidden_states[layer + 1][0] for text in texts]


def build_tree_engine(
    target: Path, requests: list[Request], truth: dict[str, list[int]], patch: pytest.MonkeyPatch, **options: Any
) -> tuple[Engine, TreeDrafter]:
    texts = [request.prompt + truth[request.id] for request in requests]
    drafter = TreeDrafter(texts, features_of(target, texts, layer=1))
    with patch.context() as scope:
        scope.setattr(TreeDrafter, "load", classmethod(lambda *_: drafter))
        scope.setattr(base, "find_drafter", lambda _: TreeDrafter)
        return build_engine(target, **options), drafter


class VaryingWidths:
    """A runner that verifies and proposes a different number of nodes each time, as a roofline policy would."""

    def __init__(self, runner: Runner, widths: tuple[int, ...]) -> None:
        self.runner, self.widths, self.rng = runner, widths, random.Random(3)
        self.drafter = runner.drafter

    def prefill(self, *arguments: Any, **options: Any) -> Tensor:
        return self.runner.prefill(*arguments, **options)

    def round(self, rows: Tensor, bounds: tuple[int, ...], mode: SamplingMode, _: int) -> Tensor:
        return self.runner.round(rows, bounds, mode, self.rng.choice(self.widths))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "plain", "full"])
@pytest.mark.parametrize("options", [{"page_size": 16}, {"page_size": 1}, {"prefill_budget": 7}, {"max_running": 1}])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_trees_change_no_token(
    sampling: dict[str, Any],
    options: dict[str, Any],
    family: str,
    make_target: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, requests = make_target(family), requests_of(sampling)
    truth = tokens_of(run(build_engine(target), requests))
    engine, drafter = build_tree_engine(target, requests, truth, monkeypatch, **options)
    answers = run(engine, requests)
    assert tokens_of(answers) == truth
    assert 0 < acceptance(answers) < 1
    assert drafter.num_moved > 0


def test_trees_survive_preemption(make_target: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target, requests = make_target("qwen3"), requests_of({"temperature": 1.0})
    truth = tokens_of(run(build_engine(target), requests))
    engine, _ = build_tree_engine(target, requests, truth, monkeypatch, kv_cache_tokens=70, page_size=1)
    assert tokens_of(run(engine, requests)) == truth
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("drafter", ["tree", "eagle3"])
def test_widths_may_change_from_round_to_round(
    drafter: str, make_target: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, requests = make_target("qwen3"), requests_of({"temperature": 0.7})
    truth = tokens_of(run(build_engine(target), requests))
    if drafter == "tree":
        engine, _ = build_tree_engine(target, requests, truth, monkeypatch)
    else:
        save_random_draft(target, tmp_path / "draft")
        engine = build_engine(target, tmp_path / "draft", drafter={"depth": 7})
    engine.executor.runner = VaryingWidths(engine.executor.runner, (1, 2, 5, 8))
    answers = run(engine, requests)
    assert tokens_of(answers) == truth
    assert any(answer.counts.accepted_tokens for answer in answers.values())


@pytest.mark.parametrize("widths", [(8, 3, 8), (8, 1, 8), (4, 8, 2)])
def test_a_shorter_proposal_leaves_no_nodes_of_the_one_before(
    widths: tuple[int, ...], make_target: Callable[[str], Path], tmp_path: Path
) -> None:
    save_random_draft(make_target("llama"), tmp_path / "draft")
    engine = build_engine(make_target("llama"), tmp_path / "draft", drafter={"depth": 7})
    engine.add(make_request("0", random_prompt(5, 0)))
    engine.step()
    (sequence,) = engine.scheduler.next_round(engine.reserve)
    rows, bound = torch.tensor([sequence.row]), sequence.num_computed
    engine.executor.prepare([sequence])
    for width in widths:
        ((count, *_),) = engine.executor.runner.round(rows, (bound,), "greedy", width).tolist()
        bound += count
        stored = engine.state.tokens[sequence.row]
        assert (stored[:width] >= 0).all()
        assert (stored[width:] == -1).all()


@pytest.mark.parametrize("accept_length", [1.0, 1.3, 2.99, 4.0])
def test_the_mean_is_the_one_asked_for(accept_length: float) -> None:
    sampled = torch.arange(4000 * 4).view(4000, 4)
    keys, positions = torch.arange(4000), torch.arange(4000) % 97
    verdict = simulate(sampled, keys, positions, accept_length)
    assert float(verdict.lengths.float().mean()) == pytest.approx(accept_length, abs=0.03)
    assert {int(accept_length), int(accept_length + 0.999)} >= set(verdict.lengths.tolist())
    for index in range(0, 4000, 371):
        count = int(verdict.lengths[index])
        assert verdict.tokens[index].tolist() == sampled[index, :count].tolist() + [-1] * (4 - count)
        assert verdict.nodes[index].tolist() == [*range(count), *[-1] * (4 - count)]


def test_an_engine_emits_that_many(make_target: Callable[[str], Path], tmp_path: Path) -> None:
    save_random_draft(make_target("llama"), tmp_path / "draft")
    engine = build_engine(make_target("llama"), tmp_path / "draft", simulate_accept_length=3.0)
    (answer,) = run(engine, [make_request("0", random_prompt(9, 0), max_tokens=61, ignore_eos=True)]).values()
    assert (answer.counts.rounds, answer.counts.accepted_tokens) == (20, 40)
