"""`slipstream compare`: its intervals against tables and simulations, its figures against plain sums, interruption."""

import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from slipstream.serve.measure.compare import CompareConfig, compare, main
from slipstream.serve.measure.compare_report import compare_passes
from slipstream.serve.measure.intervals import paired_ratio, t_quantile
from slipstream.tests.serve.paced_server import length_of, paced, rounds_of

QUESTIONS = [f"Question number {index}: {'x' * (index % 5)}?" for index in range(10)]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("questions") / "q.jsonl"
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in QUESTIONS))
    return str(file)


def test_students_quantiles() -> None:
    """Against a printed table."""
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 10: 2.2281, 11: 2.2010, 29: 2.0452, 60: 2.0003}
    for degrees, quantile in table.items():
        assert t_quantile(degrees) == pytest.approx(quantile, abs=6e-5)


@pytest.mark.parametrize(("slowed", "least", "low", "high"), [(1.0, 17, 0.9, 1.1), (1.05, 18, 0.93, 0.97)])
def test_intervals_of_simulated_servers(slowed: float, least: int, low: float, high: float) -> None:
    """Blocks whose machine drifts, is disturbed, and whose questions differ: the same server twice is within the
    interval, and one that is 5 % slower is found."""
    rng, right = random.Random(11), 0
    for _ in range(20):
        passes, clock = [], 0.0
        for _ in range(20):
            sides: list[dict[str, Any]] = [{"tokens": 0, "wall_s": 0.0} for _ in range(2)]
            for order in ((0, 1), (1, 0)):
                tokens = rng.randint(800, 1600)
                for place in order:
                    clock += 1
                    noise = rng.gauss(1, 0.02) + (0.1 if rng.random() < 0.03 else 0)
                    sides[place]["tokens"] += tokens
                    sides[place]["wall_s"] += tokens / 800 * (1 + clock / 200) * noise * (slowed if place else 1)
            empty = {"ttft_ms": [], "token_ms": [], "gaps_ms": [], "rounds": 0, "decoded_tokens": 0, "answers": []}
            passes.append({"concurrency": 8, "sides": [side | empty for side in sides]})
        speed = compare_passes(passes, 2)[1].speed
        assert speed is not None
        assert low < speed.value < high
        right += not speed.differs if slowed == 1 else speed.differs and speed.value < 1
    assert right >= least


def test_figures_are_those_of_plain_sums(questions: str, tmp_path: Path) -> None:
    with paced("vllm-detailed", pace=0.001) as one, paced("plain", pace=0.002) as other:
        options: dict[str, Any] = {
            "questions": [questions],
            "concurrency": "1,3",
            "seconds": 0.0,
            "output": str(tmp_path),
        }
        compare(CompareConfig(url=[one.url, other.url], **options))
    found = json.loads((tmp_path / "compare.json").read_text())["figures"]
    assert [(line["concurrency"], line["server"], line["passes"]) for line in found] == [
        (1, 0, 3), (1, 1, 3), (3, 0, 3), (3, 1, 3),
    ]  # fmt: skip
    passes = [json.loads(line) for line in (tmp_path / "passes.jsonl").open()][1:]
    texts = [QUESTIONS[place % len(QUESTIONS)] for place in range(24)]  # three passes of two blocks of four
    lengths = [length_of(text) for text in texts]
    for line in found[:2]:
        blocks = [one["sides"][line["server"]] for one in passes if one["concurrency"] == 1]
        assert [block["tokens"] for block in blocks] == [sum(lengths[at : at + 8]) for at in (0, 8, 16)]
        assert line["tok_s"] == pytest.approx(sum(lengths) / sum(block["wall_s"] for block in blocks))
        assert line["ttft_ms"] == pytest.approx(mean(time for block in blocks for time in block["ttft_ms"]))
        assert line["requests"] == 24
    everything = [count for text in texts for count in rounds_of(length_of(text))]
    assert found[0]["accept_length"] == pytest.approx(mean(everything))
    assert found[1]["accept_length"] is None
    assert found[1]["same_answers"] == 24
    speeds = [[b["tokens"] / b["wall_s"] for b in (p["sides"][place] for p in passes[:3])] for place in (0, 1)]
    assert found[1]["speed"]["value"] == pytest.approx(paired_ratio(*speeds).value)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_servers_take_turns_and_a_run_continues(
    questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slipstream.serve.measure.compare.plot", lambda *words: words[-1].touch())
    with paced("vllm") as one, paced("vllm") as other:
        log: list[str] = []
        for name, server in (("A", one), ("B", other)):
            server.requests = Log(name, log)  # type: ignore[assignment]
        options: dict[str, Any] = {"url": [one.url, other.url], "questions": [questions], "concurrency": "2"}
        compare(CompareConfig(**options, seconds=0.0, output=str(tmp_path)))
        assert "".join(log[::4]) == "AB" + "ABBA" * 3
        file = tmp_path / "passes.jsonl"
        content = file.read_bytes()
        file.write_bytes(content[: content.rindex(b"\n", 0, -1) + 20])  # killed while it wrote the third pass
        del log[:]
        compare(CompareConfig(**options, seconds=0.0, output=str(tmp_path)))
        assert "".join(log[::4]) == "AB" + "ABBA"
    lines = [json.loads(line) for line in file.open()]
    assert [line["sides"][0]["answers"] for line in lines[1:]] == [
        line["sides"][0]["answers"] for line in map(json.loads, content.splitlines()[1:])
    ]
    assert len({body["cache_salt"] for body in one.requests}) == 7 + 3  # a warm-up, and two for each pass of a run
    assert "2 passes already" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match="temperature is 1.0, but .* was begun with 0.0; use that, name another output"
    ):
        compare(CompareConfig(**options, temperature=1.0, output=str(tmp_path)))


class Log(list[dict[str, Any]]):
    """Requests of a server, whose name is added to a log that servers share."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def append(self, body: dict[str, Any]) -> None:
        super().append(body)
        self.log.append(self.name)


def test_one_server_alone_is_measured(questions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with paced("plain") as server:
        options: dict[str, Any] = {"questions": [questions], "concurrency": "2", "seconds": 0.0}
        compare(CompareConfig(url=[f"{server.url}/v1"], **options, output=str(tmp_path)))
    [found] = json.loads((tmp_path / "compare.json").read_text())["figures"]
    assert found["speed"] is None
    assert found["requests"] == 24
    assert "to A" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "url is empty"),
        (["--url", "x", "y", "--concurrency", "two"], "concurrency"),
        (["--url", "x", "y", "--thinking", "deep"], "thinking"),
        (["--url", "x", "y", "--requests", "0"], "requests"),
    ],
)
def test_bad_options(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert word in capsys.readouterr().err


def test_a_server_that_fails_ends_it_with_a_sentence(questions: str, tmp_path: Path) -> None:
    with paced() as one, pytest.raises(ValueError, match="base_url http://127.0.0.1:9 is not"):
        compare(CompareConfig(url=[one.url, "http://127.0.0.1:9"], questions=[questions], output=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(("slowed", "least"), [(1.0, 17), (1.05, 18)])
def test_twenty_runs_over_http(slowed: float, least: int, questions: str, tmp_path: Path) -> None:
    right = 0
    pace, jitter = 0.004, 0.3
    with paced(pace=pace, jitter=jitter) as one, paced(pace=pace * slowed, jitter=jitter) as other:
        for attempt in range(20):
            output = tmp_path / str(attempt)
            options: dict[str, Any] = {"questions": [questions], "concurrency": "8", "seconds": 6.0}
            compare(CompareConfig(url=[one.url, other.url], **options, output=str(output)))
            speed = json.loads((output / "compare.json").read_text())["figures"][1]["speed"]
            differs = not speed["low"] <= 1 <= speed["high"]
            right += not differs if slowed == 1 else differs and speed["value"] < 1
    assert right >= least
