"""n-gram lookahead against no draft: who is asked what, what is compared, and which time counts as the host's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.bench import host_clock
from slipstream.bench.host_clock import HostClock
from slipstream.bench.ngram_serving import BenchConfig, Turn, compare, main
from slipstream.bench.serving_run import Run
from slipstream.bench.workload import read_questions

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"


def test_both_engines_answer_the_same_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "lines.jsonl"
    options = ["--concurrency", "1,3", "--turns", "2", "--questions", "3", "--output-len", "12"]
    main([*options, "--drafter.nodes", "4", "--output", str(output)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == output.read_text().splitlines()
    for line, level in zip(map(json.loads, printed[-2:]), (1, 3), strict=True):
        assert (line["batch"], line["requests"], line["turns"], line["draft"]) == (level, 3, 2, "ngram")
        assert line["identical"] is True
        assert 1 <= line["accept_length"] <= line["width"] <= 4
        assert len(line["speed_up_cpu_turns"]) == 2
        assert 0 < line["drafter_us"] < line["host_us"] < 1000 * line["ms"]
        assert line["host_share"] == pytest.approx(line["host_us"] / 1000 / line["ms"], abs=0.01)


def test_no_question_is_asked_twice() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    turns = BenchConfig(turns=5).tasks(tokenizer, 8)
    assert [len(turn) for turn in turns] == [16] * 5
    assert len({tuple(task.prompt) for turn in turns for task in turn}) == 80
    most = len(read_questions())
    with pytest.raises(ValueError, match=f"there are {most} questions to ask once; lower questions, turns or conc"):
        BenchConfig(concurrency="1,64", turns=3)
    with pytest.raises(ValueError, match="concurrency is '0'"):
        BenchConfig(concurrency="0")
    BenchConfig(concurrency="64", turns=9, prompts="random")


def turn(wall_s: float, cpu_s: float, answers: list[list[int]]) -> Turn:
    counts = {"completion_tokens": 12, "rounds": 4, "decoded_tokens": 10, "drafted_tokens": 6}
    return Turn(Run(wall_s=wall_s, answers=answers, ttft_s=[], itl_s=[], **counts), cpu_s)  # type: ignore[arg-type]


def test_the_median_turn_counts() -> None:
    none = [turn(1.0, 1.0, [[1]]), turn(2.0, 2.0, [[2]]), turn(9.0, 3.0, [[3]])]
    ngram = [turn(1.0, 0.5, [[1]]), turn(1.0, 2.0, [[2]]), turn(3.0, 2.0, [[3]])]
    found = compare(none, ngram)
    assert (found["speed_up"], found["speed_up_cpu"], found["speed_up_cpu_turns"]) == (2.0, 1.5, [2.0, 1.0, 1.5])
    assert (found["accept_length"], found["width"], found["tok_s"], found["tok_s_none"]) == (2.5, 2.5, 12.0, 6.0)
    assert found["identical"]
    assert not compare(none[:1], [turn(1.0, 1.0, [[7]])])["identical"]


class Clock:
    """Time that passes only where it is told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float, result: Any = None) -> Any:
        def work(*_: Any) -> Any:
            self.now += seconds
            return result

        return work


def test_the_host_has_the_time_between_landing_and_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take 1 s, with a captured round 6 s more behind it, arrivals 10 s, drafting 4 + 5 s, other work 5 s."""
    for device, captured, host, period in (
        ("cpu", False, 14.0, 25.0),
        ("cuda", False, 15.0, 25.0),
        ("cuda", True, 15.0, 31.0),
    ):
        clock = Clock()
        monkeypatch.setattr(host_clock, "time", clock)
        flight = SimpleNamespace(read=clock.passes(10, "tokens"))
        graphs = SimpleNamespace(round=clock.passes(1)) if captured else None
        engine: Any = SimpleNamespace(
            device=SimpleNamespace(type=device),
            overlap=False,
            _in_flight=[],
            drafter=SimpleNamespace(draft=clock.passes(4)),
            policy=None,
            executor=SimpleNamespace(
                store=clock.passes(5),
                prefill=clock.passes(100),
                graphs=graphs,
                round=clock.passes(1, flight),
            ),
        )
        if graphs is not None:
            behind = clock.passes(6, flight)
            engine.executor.round = lambda _, width, g=graphs, b=behind: (g.round([], "plain", width), b())[1]
        watched = HostClock(engine, 2)
        for index, batch in enumerate((2, 2, 2, 1, 2, 2)):
            if index == 4:
                engine.executor.prefill([])
            assert engine.executor.round(SimpleNamespace(rows=[0] * batch), 8).read() == "tokens"
            for work in (engine.drafter.draft, engine.executor.store, clock.passes(5)):
                work()
        assert (watched.host_s, watched.drafter_s) == ([host] * 3, [9.0] * 3), "full batches without a prompt between"
        assert watched.rounds_s == [period] * 3
        engine._in_flight.append("a round that runs")
        engine.executor.round(SimpleNamespace(rows=[0, 0]), 8)
        assert watched.host_s[3:] == [0.0], "launched while another ran"
        del watched.rounds_s[3], watched.host_s[3], watched.drafter_s[3]
        assert watched.figures()["host_share"] == round(host / period, 4)
