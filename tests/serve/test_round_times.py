"""The times of eager rounds, which decide how many nodes are verified: what is timed, and what timing leaves behind."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.serve.engine.engine import Engine
from slipstream.serve.runner import round_times
from slipstream.serve.runner.round_times import time_modes, time_rounds
from slipstream.tests.serve.engine_runs import build_engine, make_request, random_prompt, run, tokens_of


@pytest.fixture(scope="module")
def engine(make_target: Callable[[str], Path]) -> Engine:
    return build_engine(make_target("qwen3"), "ngram", max_running=5)


def test_every_width_has_a_time_at_every_load(engine: Engine) -> None:
    ms = time_rounds(engine.runner.passes, 5, (1, 4, 16), "all")
    assert sorted(ms) == [(size, width) for size in (1, 2, 4, 5) for width in (1, 4, 16)]
    assert min(ms.values()) > 0


def test_what_there_is_no_time_for_costs_by_the_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def fake(_: object, size: int, width: int, __: str) -> float:
        seen.append((size, width))
        return 50.0

    monkeypatch.setattr(round_times, "_time", fake)
    ms = time_rounds(engine.runner.passes, 4, (1, 2, 8), "plain")
    timed = [(1, 1), (1, 2), (2, 1)]
    assert seen == [key for key in timed for _ in range(5)], "one of each makes ready; half a second is over"
    assert [ms[key] for key in timed] == [50.0] * 3
    assert (ms[2, 2], ms[4, 8]) == (4 * 25.0, 32 * 25.0)


def test_a_round_costs_no_more_than_a_larger_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request alone seems slow: something else ran while it was timed."""
    measured = {(1, 1): 9.0, (1, 2): 5.0, (1, 4): 6.0, (2, 1): 5.5, (2, 2): 8.0, (2, 4): 7.0}
    monkeypatch.setattr(round_times, "_time", lambda *key: measured[key[1], key[2]])
    ms = time_rounds(engine.runner.passes, 2, (1, 2, 4), "plain")
    assert ms == {(1, 1): 5.0, (1, 2): 5.0, (1, 4): 6.0, (2, 1): 5.5, (2, 2): 7.0, (2, 4): 7.0}


def test_nothing_is_left_behind(engine: Engine) -> None:
    requests = [make_request(str(seed), random_prompt(20, seed), temperature=1.0, seed=seed) for seed in range(3)]
    for request in requests:
        engine.add(request)
    outputs = [output for _ in range(4) for output in engine.step()]
    time_modes(engine.runner.passes, 5, engine.planner.widths.offered)
    tokens = {request.id: list[int]() for request in requests}
    while engine.has_work:
        outputs += engine.step()
    for output in outputs:
        tokens[output.request_id] += output.tokens
    assert tokens == tokens_of(run(build_engine(Path(engine.config.target)), requests))
    padding, state = engine.runner.state.padding, engine.runner.state
    assert (state.lengths[padding], state.temperature[padding], state.top_k[padding], state.top_p[padding]) == (
        0,
        0,
        0,
        1,
    )
