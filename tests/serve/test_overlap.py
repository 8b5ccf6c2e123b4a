"""Tokens are read a round late: answers stay the same through ends, preemption, prefix hits and aborts."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from slipstream.serve import llm as llm_module
from slipstream.serve.engine.budget import PATIENCE
from slipstream.serve.engine.build import Builder
from slipstream.serve.engine.engine import Engine
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request
from slipstream.tests.pairwise import rotating
from slipstream.tests.serve.engine_runs import build_engine, make_request, random_prompt, run, run_aborting, tokens_of


class OverlappingBuilder(Builder):
    """On the CPU nothing runs beside the host, but the order of launches and reads is the GPU's."""

    def pick_modes(self, phases: Iterable[str]) -> tuple[bool, bool]:
        return False, True


def build_overlapping(target: Path, draft: Path | str = "none", **options: Any) -> Engine:
    config: dict[str, Any] = {"target": str(target), "draft": str(draft), "max_running": 8, "kv_cache_tokens": 2048}
    return OverlappingBuilder(EngineConfig(**config | options)).build()


def kinds(engine: Engine) -> list[str]:
    """Of the passes in flight."""
    return ["prefill" if flight.plan.chunks else "round" for flight in engine._in_flight]


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
    ("options", "temperature"),
    rotating([{}, {"max_running": 2}, {"prefill_budget": 7}, {"page_size": 1}], [0.0, 1.0]),
)
def test_overlap_changes_no_token(options: dict[str, Any], temperature: float, target: Path, draft: Path) -> None:
    requests = requests_of(temperature)
    expected = run(build_engine(target), requests)
    for name in ("none", draft, "ngram"):
        answers = run(build_overlapping(target, name, **options), requests)
        assert tokens_of(answers) == tokens_of(expected)
        assert {key: answer.finish_reason for key, answer in answers.items()} == {
            key: answer.finish_reason for key, answer in expected.items()
        }


@pytest.mark.parametrize("name", ["draft", "ngram"])
def test_overlap_survives_preemption(name: str, target: Path, draft: Path) -> None:
    requests = [make_request(str(seed), random_prompt(30, seed), max_tokens=40, ignore_eos=True) for seed in range(4)]
    expected = tokens_of(run(build_engine(target), requests))
    engine = build_overlapping(target, draft if name == "draft" else name, kv_cache_tokens=150, page_size=1)
    assert tokens_of(run(engine, requests)) == expected
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", ["draft", "ngram"])
def test_aborts_with_passes_in_flight_leave_the_others_alone(name: str, target: Path, draft: Path) -> None:
    requests = [make_request(str(seed), random_prompt(20, seed), max_tokens=30, ignore_eos=True) for seed in range(8)]
    expected = tokens_of(run(build_engine(target), requests))
    engine = build_overlapping(target, draft if name == "draft" else name, max_running=4)
    run_aborting(engine, requests, {1: "1", 3: "3", 4: "7"}, expected)


def test_no_round_is_launched_for_a_request_whose_end_is_certain(target: Path) -> None:
    engine = build_overlapping(target)
    assert [len(answer.tokens) for answer in run(engine, [make_request("0", [5, 6], max_tokens=1)]).values()] == [1]
    assert not engine.num_in_flight


def test_a_first_token_does_not_wait_for_the_round_behind_it(target: Path) -> None:
    engine = build_overlapping(target)
    engine.add(make_request("0", [5, 6], max_tokens=9, ignore_eos=True))
    (first,) = engine.step()
    assert len(first.tokens) == 1
    assert kinds(engine) == ["round", "round"]


def test_a_second_round_waits_behind_the_running_one_whatever_came_before(target: Path) -> None:
    """The device never waits for the host once a caller has read all that was in flight."""
    engine = build_overlapping(target)
    engine.add(make_request("0", [5, 6], max_tokens=20, ignore_eos=True))
    engine.step()
    engine.drain()
    for _ in range(3):
        engine.step()
        assert kinds(engine) == ["round"]  # and the one that was read is over


def test_chunks_of_a_prompt_are_launched_without_reading_one_another(target: Path) -> None:
    engine = build_overlapping(target, prefill_budget=4)
    engine.add(make_request("0", random_prompt(20, 1), max_tokens=9, ignore_eos=True))
    engine.step()
    assert kinds(engine) == ["prefill"]


class Switched:
    """A policy that verifies nothing until it is told to."""

    width = 1
    wait_ms = 0.0

    def choose(self, offers: list[tuple[int, int]], least: int = 1, *, filtered: bool = False) -> int:
        return min(self.width, max(nodes for nodes, _ in offers))

    def record(self, *_: Any) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_wait_for_n_grams_only_while_those_pay(temperature: float, target: Path) -> None:
    """Switched to and fro, answers stay the same; while nothing is verified, a round waits behind the running one."""
    requests = [
        make_request(str(seed), [5, 6, 7] * 5 + [seed], max_tokens=150 + seed, temperature=temperature, ignore_eos=True)
        for seed in range(4)
    ]
    expected = tokens_of(run(build_engine(target), requests))
    engine = build_overlapping(target, "ngram", kv_cache_tokens=4096)
    engine.planner.policy = policy = Switched()
    ahead: dict[int, list[bool]] = {1: [], 2: []}

    def switch(step: int, _: object) -> None:
        if step % 20 >= PATIENCE + 4 and engine.num_open == len(requests):
            ahead[policy.width].append(bool(engine.num_in_flight) and not engine.waits_for_host)
        policy.width = 2 if (step + 1) // 20 % 2 else 1

    assert tokens_of(run(engine, requests, switch)) == expected
    assert all(ahead[1])
    assert len(ahead[1]) >= 8
    assert temperature or not any(ahead[2]), "greedy text repeats: there is always something to verify"
    assert len(ahead[2]) >= 8
    assert policy.wait_ms > 0


def test_n_grams_draft_before_the_accounts_of_the_last_round_are_done(target: Path) -> None:
    """What they propose is verified in the very next round, though its tokens are handed out after its launch."""
    engine, events = build_overlapping(target, "ngram"), list[str]()
    engine.trace = lambda event, plan: None if plan.chunks else events.append(event)
    engine.planner.policy = policy = Switched()  # measured times on a busy machine may speak against drafts
    policy.width = 16
    answers = run(engine, [make_request("0", [5, 6, 7] * 9, max_tokens=40, ignore_eos=True)])
    assert len(answers["0"].tokens) == 40
    assert [event for event in events if event in ("drafted", "launched", "committed")][1:10] == [
        "drafted",
        "launched",
        "committed",
    ] * 3
    assert answers["0"].counts.rounds < 39, "some drafts were accepted"


@pytest.mark.parametrize("build", [build_engine, build_overlapping])
def test_n_grams_learn_of_a_request_no_more_than_it_says(build: Callable[..., Engine], target: Path) -> None:
    """Also of one that ends within accepted drafts: at a stop id, or at its last token."""
    engine, prompts = build(target, "ngram"), [random_prompt(9, seed) for seed in range(4)]
    engine.planner.policy = None  # all is verified, however slow waiting is on a busy machine
    first = run(engine, [make_request(str(seed), prompt, max_tokens=40) for seed, prompt in enumerate(prompts)])
    requests = []
    for seed, prompt in enumerate(prompts):
        tokens = first[str(seed)].tokens
        stop = next(token for index, token in enumerate(tokens[8:], 8) if token not in tokens[:index])
        ends: dict[str, Any] = {"stop_token_ids": (stop,)} if seed % 2 else {"max_tokens": 11}
        requests.append(make_request(f"again {seed}", prompt, **{"max_tokens": 40} | ends))
    again = run(engine, requests)
    starts = [answer.starts[-1] for answer in again.values()]
    assert max(len(answer.tokens) - start for answer, start in zip(again.values(), starts, strict=True)) > 1
    engine.stages[0].core.flush()  # type: ignore[attr-defined]
    known = sum(9 + len(answer.tokens) for answer in [*first.values(), *again.values()])
    assert engine.metrics()["ngram_inserted_tokens"] == known


def test_closing_a_stream_early_ends_what_is_in_flight(
    target: Path, byte_target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llm_module.load_tokenizer(Path(byte_target))
    monkeypatch.setattr(llm_module, "build_engine", lambda config: OverlappingBuilder(config).build())
    monkeypatch.setattr(llm_module, "load_tokenizer", lambda *_: tokenizer)
    model = llm_module.LLM(str(target), max_running=4, kv_cache_tokens=2048)
    stream = model.stream([make_request(str(seed), random_prompt(9, seed), ignore_eos=True) for seed in range(3)])
    next(stream)
    stream.close()
    assert not model.engine.has_work
    model.engine.scheduler.check()
    again = run(model.engine, [make_request("again", random_prompt(9, 0))])
    assert tokens_of(again) == tokens_of(run(build_engine(target), [make_request("again", random_prompt(9, 0))]))
