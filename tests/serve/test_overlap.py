"""Tokens are read a step late: answers stay the same through ends, preemption, prefix hits and aborts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipstream.serve import llm as llm_module
from slipstream.serve.engine.build import build
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.engine_plan import read_plan
from slipstream.serve.engine.step_costs import FittedCosts
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request
from slipstream.tests.pairwise import rotating, some_of
from slipstream.tests.serve.cache_invariants import check_scheduler
from slipstream.tests.serve.engine_runs import (
    build_engine,
    make_request,
    plain_answers,
    random_prompt,
    run,
    tokens_of,
)


def build_overlapped(config: EngineConfig) -> Engine:
    """On the CPU nothing runs beside the host, but the order of launches and reads is the GPU's."""
    return build(replace(read_plan(config), overlap=True))


def build_overlapping(target: Path, draft: Path | str = "none", **options: Any) -> Engine:
    config = {"target": str(target), "draft": str(draft), "max_running": 8, "kv_cache_tokens": 2048}
    return build_overlapped(EngineConfig(**config | options))


def kinds(engine: Engine) -> list[str]:
    """Returns the kinds of the steps in flight."""
    return ["chunks" if step.plan.chunks else "nodes" for step in engine._steps]


def requests_of(temperature: float) -> list[Request]:
    """Uneven prompts and ends; two share a long prefix; some stop at a token, some at the first."""
    shared = random_prompt(40, 99)
    requests = [
        make_request(str(seed), random_prompt(3 + 9 * seed, seed), max_tokens=1 + 7 * seed, temperature=temperature)
        for seed in range(6)
    ]
    requests += [make_request(f"shared {end}", [*shared, end], temperature=temperature) for end in (5, 6)]
    stops = tuple(range(3, 30))
    return [*requests, make_request("stops", shared[:20], temperature=temperature, stop_token_ids=stops, max_tokens=60)]


@pytest.mark.parametrize(
    ("options", "temperature", "name"),
    rotating([{}, {"max_running": 2}, {"prefill_budget": 7}, {"page_size": 1}], [0.0, 1.0], ["ngram", "none", "draft"]),
)
def test_overlap_changes_no_token(options, temperature, name, target, draft):
    requests = requests_of(temperature)
    expected = run(build_engine(target), requests)
    answers = run(build_overlapping(target, draft if name == "draft" else name, **options), requests)
    assert tokens_of(answers) == tokens_of(expected)
    assert {key: answer.finish_reason for key, answer in answers.items()} == {
        key: answer.finish_reason for key, answer in expected.items()
    }


def test_no_step_is_launched_for_a_request_whose_end_is_certain(target):
    engine = build_overlapping(target)
    assert [len(answer.tokens) for answer in run(engine, [make_request("0", [5, 6], max_tokens=1)]).values()] == [1]
    assert not kinds(engine)


def test_a_first_token_does_not_wait_for_the_step_behind_it(target):
    engine = build_overlapping(target)
    engine.add(make_request("0", [5, 6], max_tokens=9, ignore_eos=True))
    (first,) = engine.step()
    assert len(first.tokens) == 1
    assert kinds(engine) == ["nodes"]


def test_a_second_step_waits_behind_the_running_one_whatever_came_before(target):
    """The device never waits for the host once a caller has read all that was in flight."""
    engine = build_overlapping(target)
    engine.add(make_request("0", [5, 6], max_tokens=20, ignore_eos=True))
    engine.step()
    engine.drain()
    for _ in range(3):
        engine.step()
        assert kinds(engine) == ["nodes"]  # and the one that was read is over


def test_chunks_of_a_prompt_are_launched_without_reading_one_another(target):
    engine = build_overlapping(target, prefill_budget=4)
    engine.add(make_request("0", random_prompt(20, 1), max_tokens=9, ignore_eos=True))
    for _ in range(4):
        assert engine.step() == []
        assert kinds(engine) == ["chunks"]


class SlowSteps(FittedCosts):
    """A second each, so that a busy machine's waits for the host are short beside them; or a second by the row."""

    is_fitted = False
    by_row = False

    def targets(self, rows: NDArray[np.int64], *, filtered: bool) -> NDArray[np.float64]:
        return np.full(len(rows), 1000.0) * (rows if self.by_row else 1)

    def draft(self, requests: int, width: int, *, filtered: bool) -> float:
        return 0.0

    def time(self, rows: int, requests: int, width: int, *, filtered: bool) -> float:
        return self.target(rows, filtered=filtered)

    def observe(self, *_: Any, **__: Any): ...


def slow_down(engine: Engine) -> SlowSteps:
    policy = engine.planner.policy
    policy.costs = costs = SlowSteps(policy.costs.most_rows)
    return costs


@pytest.mark.parametrize("temperature", some_of([0.0, 1.0], [0.0]))
def test_steps_wait_for_n_grams_only_while_those_pay(temperature, target):
    """Switched to and fro, answers stay the same; while no node is worth its row, a step waits behind the last one."""
    requests = [
        make_request(str(seed), [5, 6, 7] * 5 + [seed], max_tokens=200 + seed, temperature=temperature, ignore_eos=True)
        for seed in range(4)
    ]
    expected = plain_answers(target, requests)
    engine = build_overlapping(target, "ngram", kv_cache_tokens=4096)
    costs = slow_down(engine)
    settling = 14  # steps after which the policy follows other times
    period = settling + 10
    ahead = {True: [], False: []}

    def switch(step, _):
        if step % period >= settling and engine.num_open == len(requests):
            ahead[costs.by_row].append(bool(kinds(engine)) and engine.host_need == "nothing")
        costs.by_row = (step + 1) // period % 2 == 0

    costs.by_row = True
    assert tokens_of(run(engine, requests, switch)) == expected
    assert all(ahead[True])
    assert len(ahead[True]) >= 8
    assert temperature or not any(ahead[False]), "greedy text repeats: there is always something to verify"
    assert len(ahead[False]) >= 8
    assert engine.planner.policy.host_wait.ms > 0


def test_n_grams_draft_before_the_accounts_of_the_last_step_are_done(target):
    """Their proposals are verified in the very next step, though its tokens are handed out after its launch."""
    engine = build_overlapping(target, "ngram")
    events = []
    engine.trace = lambda event, plan: None if plan.chunks else events.append(event)
    slow_down(engine)
    answers = run(engine, [make_request("0", [5, 6, 7] * 9, max_tokens=40, ignore_eos=True)])
    assert len(answers["0"].tokens) == 40
    assert [event for event in events if event in ("drafted", "launched", "committed")][1:10] == [
        "drafted",
        "launched",
        "committed",
    ] * 3
    assert answers["0"].counts.rounds < 39, "some drafts were accepted"


@pytest.mark.parametrize("build", [build_engine, build_overlapping])
def test_n_grams_learn_of_a_request_no_more_than_it_says(build, target):
    """Also of one that ends within accepted drafts: at a stop id, or at its last token."""
    engine = build(target, "ngram")
    prompts = [random_prompt(9, seed) for seed in range(4)]
    slow_down(engine)
    first = run(engine, [make_request(str(seed), prompt, max_tokens=40) for seed, prompt in enumerate(prompts)])
    requests = []
    for seed, prompt in enumerate(prompts):
        tokens = first[str(seed)].tokens
        stop = next(token for index, token in enumerate(tokens[8:], 8) if token not in tokens[:index])
        ends = {"stop_token_ids": (stop,)} if seed % 2 else {"max_tokens": 11}
        requests.append(make_request(f"again {seed}", prompt, **{"max_tokens": 40} | ends))
    again = run(engine, requests)
    starts = [answer.starts[-1] for answer in again.values()]
    assert max(len(answer.tokens) - start for answer, start in zip(again.values(), starts, strict=True)) > 1
    engine.stages[0].core.flush()
    num_tokens = sum(9 + len(answer.tokens) for answer in [*first.values(), *again.values()])
    assert engine.metrics()["ngram_inserted_tokens"] == num_tokens


def test_closing_a_stream_early_ends_what_is_in_flight(target, byte_target, monkeypatch):
    tokenizer = llm_module.load_tokenizer(Path(byte_target))
    monkeypatch.setattr(llm_module, "build_engine", build_overlapped)
    monkeypatch.setattr(llm_module, "load_tokenizer", lambda *_: tokenizer)
    model = llm_module.LLM(str(target), max_running=4, kv_cache_tokens=2048)
    stream = model.stream([make_request(str(seed), random_prompt(9, seed), ignore_eos=True) for seed in range(3)])
    next(stream)
    stream.close()
    assert not model.engine.has_work
    check_scheduler(model.engine.scheduler)
    again = run(model.engine, [make_request("again", random_prompt(9, 0))])
    assert tokens_of(again) == plain_answers(target, [make_request("again", random_prompt(9, 0))])
