"""While tokens are awaited the host goes through what comes after them, then and only then; no answer changes."""

from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.serve import rehearsal
from slipstream.serve.batch import Rows
from slipstream.serve.drafters.base import Drafter
from slipstream.serve.executor import Arrival, Flight
from slipstream.serve.rehearsal import Rehearsal, paced
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import build_engine, make_request, random_prompt, run, tokens_of
from slipstream.tests.serve.test_overlap import build_overlapping, requests_of


class Event:
    """Has passed once it was asked about `queries` times, or was waited for."""

    def __init__(self, queries: int) -> None:
        self.left, self.has_waited = queries, False

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.left, self.has_waited = 0, True


def flight_of(event: Event | None) -> Flight:
    return Flight(Arrival(np.array([[1, 7]], np.int32), 1), event)  # type: ignore[arg-type]


@pytest.mark.parametrize("queries", [0, 1, 5])
def test_something_is_done_until_a_pass_has_landed(queries: int) -> None:
    event, calls = Event(queries), list[int]()
    assert flight_of(event).read(lambda: calls.append(1)).tokens() == [[7]]
    assert (len(calls), event.has_waited) == (queries, False)
    assert flight_of(None).read(lambda: calls.append(1)).tokens() == [[7]]
    assert len(calls) == queries, "nothing is in flight"


def test_without_anything_to_do_it_waits() -> None:
    event = Event(3)
    assert flight_of(event).read().tokens() == [[7]]
    assert event.has_waited


def test_steps_have_pauses_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 30 us and calls of 10 us: a step begins 20 us after the last one ended."""
    now, begun = [1.0], list[int]()

    def work() -> None:
        begun.append(round(1e6 * (now[0] - 1)))
        now[0] += 30e-6

    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: now[0])
    step = paced(cycle([work]))
    while now[0] < 1.0003:
        step()
        now[0] += 10e-6
    assert begun == [0, 50, 100, 150, 200, 250]
    paced(iter(()))()  # nothing to do


class Recorder(Drafter):
    def __init__(self) -> None:
        self.warmed: list[tuple[list[int], int]] = []

    @classmethod
    def load(cls, draft: str, options: Any, target: Any) -> "Recorder":
        return cls()

    def warm(self, rows: Any, width: int) -> None:
        self.warmed.append((list(rows), width))


def test_all_rows_come_in_turn_and_only_the_null_row_is_stored() -> None:
    state, drafter = Rows(11, 4, 16, 8, torch.device("cpu")), Recorder()
    state.nodes[:] = torch.arange(state.nodes.numel()).view_as(state.nodes)
    before = state.nodes.clone()
    steps = Rehearsal(drafter, state, 8).steps([3, 1, 4, 10, 5, 9], [(1, 0)] * 6, None)
    for step in islice(steps, rehearsal.STEPS_PER_STORE + 1):
        step()
    turns = [([3, 1, 4, 10], 8), ([5, 9], 8)] * rehearsal.STEPS_PER_STORE
    assert drafter.warmed == turns[: rehearsal.STEPS_PER_STORE - 1], "first, and after these, it stores"
    assert state.nodes[:, :-1].equal(before[:, :-1])
    assert not list(Rehearsal(drafter, state, 8).steps([], [], None))


@pytest.fixture(scope="module")
def target(make_target: Callable[[str], Path]) -> Path:
    return make_target("qwen3")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A pass seems to run until it was asked about 40 times; without pauses between steps. What happens."""
    happened: list[tuple[str, Any]] = []

    class Landing(Event):
        def query(self) -> bool:
            landed = super().query()
            happened.append(("landed" if landed else "flies", None))
            return landed

        def synchronize(self) -> None:
            happened.append(("landed", None))

    def launch(results: Tensor, width: int) -> Flight:
        return Flight(Arrival(results.numpy(), width), Landing(40))  # type: ignore[arg-type]

    monkeypatch.setattr(Flight, "launch", launch)
    monkeypatch.setattr(rehearsal, "PAUSE_S", 0.0)
    return happened


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_stay_the_same(mixed: bool, temperature: float, target: Path, tmp_path: Path, log: list[Any]) -> None:
    """And the drafter reads ahead for rows in flight alone, while they are."""
    requests = requests_of(temperature)
    requests += [make_request(f"again {seed}", random_prompt(12, seed), max_tokens=40) for seed in (1, 1, 2)]
    requests = list({request.id: request for request in requests}.values())
    expected = tokens_of(run(build_engine(target), requests))
    save_random_draft(target, tmp_path / "draft")
    options: dict[str, Any] = {"drafter": {"ngram_first": 2}} if mixed else {}
    engine = build_overlapping(target, tmp_path / "draft" if mixed else "ngram", kv_cache_tokens=4096, **options)
    warm = engine.drafter.warm

    def recorded(rows: Any, width: int) -> None:
        log.append(("warm", list(rows)))
        warm(rows, width)

    engine.drafter.warm = recorded  # type: ignore[method-assign]
    log.clear()
    assert tokens_of(run(engine, requests)) == expected
    warmed = [index for index, (event, _) in enumerate(log) if event == "warm"]
    assert len(warmed) > 100
    assert all(log[index - 1][0] == "flies" for index in warmed)


def test_a_row_whose_request_was_followed_by_another_counts_once(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of the one and the prompt of the other are in flight together, in a full engine."""
    engine = build_overlapping(target, "ngram", kv_cache_tokens=4096)
    most = engine.config.max_running
    for index in range(most):
        engine.add(make_request(str(index), random_prompt(9, index), max_tokens=40))
    while sum(sequence.decoding for sequence in engine.scheduler._running) < most:
        engine.step()
    policy, weighed, warmed = engine.policy, list[int](), list[int]()
    assert policy is not None
    weigh = policy.weigh
    monkeypatch.setattr(rehearsal, "PAUSE_S", 0.0)
    monkeypatch.setattr(policy, "weigh", lambda offers, least: (weighed.append(len(offers)), weigh(offers, least)))
    monkeypatch.setattr(engine.drafter, "warm", lambda rows, _: warmed.extend(rows))
    step = engine.executor.meanwhile([*range(most), 0], policy)
    for _ in range(rehearsal.STEPS_PER_STORE):
        step()
    assert set(weighed) == {most}
    assert set(warmed) == set(range(most))


def test_a_drafter_on_the_device_is_left_alone(target: Path, tmp_path: Path, log: list[Any]) -> None:
    save_random_draft(target, tmp_path / "draft")
    for name in ("none", tmp_path / "draft"):
        engine = build_overlapping(target, name)
        run(engine, requests_of(0.0))
        assert {event for event, _ in log} == {"landed"}, "it waits, and does nothing besides"
