"""The benchmark of a changing load: how many requests are open when, its figures, its settings."""

import json
from typing import Any

import numpy as np
import pytest

from slipstream.bench import load_trace, streams
from slipstream.bench.load_trace import (
    LoadTraceConfig,
    main,
    phase_figures,
    read_work,
    run_phases,
    summary,
    token_ms,
)
from slipstream.bench.streams import Arrival, Stream, Streams
from slipstream.bench.workload import Task
from slipstream.tests.bench.clocked_engine import Clock, ClockedEngine
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.sources import TINY
from slipstream.tests.tables import each_case


class Watched(Streams):
    """Remembers how many requests were open after each start, by the phase that its namespace names."""

    def __init__(self, clock: Clock):
        super().__init__(ClockedEngine(clock))
        self.levels: dict[str, list[int]] = {}

    def add(self, request: Any) -> Stream:
        stream = super().add(request)
        phase = request.namespace.split(", ")[1]
        self.levels.setdefault(phase, []).append(len(self.open))
        return stream


def tasks(count: int) -> list[Task]:
    return [Task([5, 6, 7 + index], 4 + index) for index in range(count)]


@pytest.fixture
def watched(monkeypatch) -> Watched:
    clock = Clock()
    for module in (load_trace, streams):
        monkeypatch.setattr(module, "time", clock)
    return Watched(clock)


def test_each_phase_keeps_its_number_of_requests_open(watched):
    config = LoadTraceConfig(target="x", settings=["none"], levels="1,3,2", requests=5)
    begins = run_phases(watched, config, [tasks(5)] * 3, "run")
    watched.finish()
    assert {phase: max(levels) for phase, levels in watched.levels.items()} == {
        "phase 0": 1,
        "phase 1": 3,
        "phase 2": 2,
    }
    assert watched.levels["phase 1"][:3] == [1, 2, 3]
    assert begins == sorted(begins)
    assert [len(stream.tokens) for stream in watched.all.values()] == [4, 5, 6, 7, 8] * 3
    assert all(stream.stats is not None for stream in watched.all.values())


def test_figures_of_a_phase():
    stream = Stream(0.0, arrivals=[Arrival(1.0, 1), Arrival(2.0, 3), Arrival(5.0, 2)])
    assert token_ms(stream) == 800.0
    figures = phase_figures([stream], 1, 0.0, 4.0)
    assert [figures[name] for name in ("requests", "tok_s", "gap_ms_p50", "gap_ms_p99")] == [1, 1.0, 1000.0, 1000.0]


def test_medians_are_compared_with_those_without_a_draft():
    def line(setting, tok_s, answers):
        phases = [{"tok_s": tok_s}, {"tok_s": 2 * tok_s}]
        figures = {"tok_s": tok_s, "total_s": 1.0, "accept_length": 1.0, "step_time_error": 0.01}
        times = {"token_ms": [1000 / tok_s, 50.0, None]}
        return {"setting": setting, **figures, "phases": phases, "answers": answers, **times}

    speeds = {"auto": (30.0, 20.0, 40.0), "none": (9.0, 11.0, 10.0)}
    lines = [line(name, speed, [1, 2, 3 + (speed == 20)]) for name, rates in speeds.items() for speed in rates]
    auto, none = summary(lines)
    assert (auto["tok_s"], auto["speed_up"], auto["num_identical"], auto["phase 1"]) == (30.0, 3.0, 8, 60.0)
    assert (none["tok_s"], none["speed_up"], none["num_identical"]) == (10.0, None, None)
    assert auto["regret"] == pytest.approx(np.mean([9 / 30 - 1, 11 / 20 - 1, 10 / 40 - 1, 0, 0, 0]))
    assert none["regret"] == pytest.approx(np.mean([30 / 9 - 1, 20 / 11 - 1, 40 / 10 - 1, 0, 0, 0]))
    (alone,) = summary([line("auto", 1.0, [1])])
    assert (alone["speed_up"], alone["regret"]) == (None, None)


def test_the_program_measures_the_same_questions_with_each_setting(tmp_path, capsys):
    draft, output = (tmp_path / name for name in ("draft", "lines"))
    save_random_draft(TINY, draft, 1500)
    sizes = ["--levels", "1,3,1", "--requests", "3", "--output-len", "8", "--engine.kv_cache_tokens", "2048"]
    settings = ["--settings", "none", "width=2"]
    main(["--target", str(TINY), "--draft", str(draft), *sizes, *settings, "--output", str(output)])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["setting"] for line in lines] == ["none", "width=2"]
    assert len({tuple(line["answers"]) for line in lines}) == 1
    for line in lines:
        assert [phase["level"] for phase in line["phases"]] == line["levels"] == [1, 3, 1]
        assert [phase["requests"] for phase in line["phases"]] == [3, 3, 3]
        assert sum(phase["seconds"] for phase in line["phases"]) == pytest.approx(line["total_s"], abs=0.01)
        summed = sum(phase["seconds"] * phase["tok_s"] for phase in line["phases"])
        assert summed == pytest.approx(line["tokens"], rel=0.01)
        assert {"bench", "device", "date", "revision"} <= line.keys()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("| at 1 | at 3 | at 1 |")
    assert printed[3].split(" | ")[6] == "9", "same answers"


def test_settings_are_options_of_engine_or_drafter():
    config = LoadTraceConfig(draft="d", target="t", levels="2,16", drafter={"depth": 3}, engine={"page_size": 1})
    none, auto, fixed = (config.engine_config(name) for name in ("none", "auto", "depth=5,width=4"))
    assert (none.draft, none.drafter, none.max_running, none.page_size) == ("none", {}, 16, 1)
    assert (auto.draft, auto.drafter, auto.width) == ("d", {"depth": 3}, None)
    assert (fixed.drafter, fixed.width) == ({"depth": 5}, 4)
    work = read_work(LoadTraceConfig(target=str(TINY), settings=["none"], levels="1,20"))
    assert [len(phase) for phase in work] == [8, 40]


@each_case()
def test_wrong_options_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        LoadTraceConfig(**{"draft": "d", **fields})
