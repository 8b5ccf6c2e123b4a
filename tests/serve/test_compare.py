"""`slipstream compare`: its intervals against a table and simulations, its figures against plain sums, interruption."""

import asyncio
import json
import math
import random
from statistics import mean, median
from typing import Any

import pytest

from slipstream.serve.load import Answer, Client, LoadResult
from slipstream.serve.measure.compare import CompareConfig, Side, compare, main, measure_level
from slipstream.serve.measure.compare_report import compare_passes, shown_table
from slipstream.serve.measure.intervals import Ratio, critical_rank_sum, paired_ratio
from slipstream.serve.measure.journal import Journal
from slipstream.serve.measure.questions import read_questions
from slipstream.tests.serve.paced_server import length_of, paced, rounds_of
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

QUESTIONS = [f"Question number {index}: {'x' * (index % 5)}?" for index in range(10)]


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("questions") / "q.jsonl"
    file.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in QUESTIONS))
    return str(file)


def test_rank_sums():
    """Against a printed table of Wilcoxon's test, two-sided at 5 %."""
    table = {6: 0, 7: 2, 8: 3, 9: 5, 10: 8, 12: 13, 15: 25, 20: 52, 25: 89, 30: 137}
    assert {pairs: critical_rank_sum(pairs) for pairs in table} == table


def test_an_interval_by_hand():
    ratio = paired_ratio([1.0] * 6, [math.exp(log) for log in (-0.02, -0.01, 0.0, 0.01, 0.03, 5.0)])
    assert ratio.low == pytest.approx(math.exp(-0.02))
    assert ratio.high == pytest.approx(math.exp(5.0))
    assert ratio.value == pytest.approx(math.exp(0.01))  # of the 21 means, the eleventh
    assert paired_ratio([1.0] * 5, [2.0] * 5) == Ratio(pytest.approx(2.0), None, None)
    assert paired_ratio([1.0, 0.0, 3.0], [2.0, 5.0, 0.0]) == Ratio(pytest.approx(2.0), None, None)


@pytest.mark.parametrize("zero", ["tokens", "token_ms", "ttft_ms"])
@pytest.mark.parametrize("places", [(0,), (1,), (0, 1)])
def test_a_figure_that_is_0_has_no_ratio(zero, places):
    """A server that answers nothing, or a proxy that sends the pieces of an answer together."""
    times = {name: [1.0, 2.0] for name in ("ttft_ms", "token_ms", "gaps_ms")}
    block = {"wall_s": 1.0, "tokens": 9, "rounds": 0, "decoded_tokens": 0, "answers": ["a"], **times}
    none = {zero: 0 if zero == "tokens" else [0.0]}
    sides = [block | none if place in places else block for place in range(2)]
    comparisons = compare_passes([{"concurrency": 1, "sides": sides}] * 6, 2)
    ratios = {"tokens": "speed", "token_ms": "token", "ttft_ms": "ttft"}
    assert [name for name in ratios.values() if getattr(comparisons[1], name) is None] == [ratios[zero]]
    assert "| 1 | B |" in shown_table(comparisons, ["A", "B"], greedy=True)


@pytest.mark.parametrize(("slowed", "least_correct"), [(1.0, 17), (1.05, 18)])
def test_twenty_runs_of_simulated_servers(questions, tmp_path, slowed, least_correct, monkeypatch):
    """Two minutes each on a machine that drifts and is disturbed: the same server twice is within the interval, one
    that is 5 % slower is found, and the interval is at most 3 % to either side."""
    rng = random.Random(5)
    clock = [0.0]

    async def send(client, tasks, level):
        answers = [Answer(completion_tokens=length_of(prompt[0]["content"])) for prompt, _ in tasks]
        disturbed = rng.uniform(0.05, 0.5) if rng.random() < 0.06 else 0.0
        seconds = 0.1 + sum(answer.completion_tokens for answer in answers) / 250  # 16 answers: about a second
        seconds *= (1 + clock[0] / 2000) * (rng.gauss(1, 0.02) + disturbed) * (slowed if client.model == "B" else 1)
        clock[0] += seconds
        return LoadResult(concurrency=level, wall_s=seconds, answers=answers)

    monkeypatch.setattr("slipstream.serve.measure.compare.send_all", send)
    prompts = [question.first for question in read_questions([questions])]
    options = {"url": ["A", "B"], "questions": [questions], "concurrency": "8"}
    right = 0
    widths = []
    for attempt in range(20):
        config = CompareConfig(**options, output=str(tmp_path / str(attempt)))
        sides = [Side(Client(name, connections=8, model=name), salts=False) for name in "AB"]
        with Journal(tmp_path / str(attempt), "slipstream compare", config.result_options, None) as journal:
            asyncio.run(measure_level(config, prompts, 8, sides, journal))
            speed = compare_passes(journal.results, 2)[1].speed
        assert speed.low is not None
        assert speed.high is not None
        right += not speed.differs if slowed == 1 else speed.high < 1
        widths.append(max(speed.high / speed.value - 1, 1 - speed.low / speed.value))
    assert right >= least_correct
    assert median(widths) < 0.03


def test_figures_are_those_of_plain_sums(questions, tmp_path):
    with paced("vllm-detailed", pace=0.001) as first, paced("plain", pace=0.002) as other:
        options = {
            "questions": [questions],
            "concurrency": "1,3",
            "seconds": 0.0,
            "output": str(tmp_path),
        }
        compare(CompareConfig(url=[first.url, other.url], **options))
    lines = json.loads((tmp_path / "compare.json").read_text())["figures"]
    assert [(line["concurrency"], line["server"], line["passes"]) for line in lines] == [
        (1, 0, 6), (1, 1, 6), (3, 0, 6), (3, 1, 6),
    ]  # fmt: skip
    passes = [json.loads(line) for line in (tmp_path / "passes.jsonl").open()][1:]
    texts = [QUESTIONS[place % len(QUESTIONS)] for place in range(48)]  # six passes of two blocks of four
    lengths = [length_of(text) for text in texts]
    for line in lines[:2]:
        blocks = [entry["sides"][line["server"]] for entry in passes if entry["concurrency"] == 1]
        assert [block["tokens"] for block in blocks] == [sum(lengths[at : at + 8]) for at in range(0, 48, 8)]
        assert line["tok_s"] == pytest.approx(sum(lengths) / sum(block["wall_s"] for block in blocks))
        assert line["ttft_ms"] == pytest.approx(mean(time for block in blocks for time in block["ttft_ms"]))
        assert line["requests"] == 48
    everything = [count for text in texts for count in rounds_of(length_of(text))]
    assert lines[0]["accept_length"] == pytest.approx(mean(everything))
    assert lines[1]["accept_length"] is None
    assert lines[1]["same_answers"] == 48
    speeds = [[b["tokens"] / b["wall_s"] for b in (p["sides"][place] for p in passes[:6])] for place in (0, 1)]
    ratio = paired_ratio(*speeds)
    assert lines[1]["speed"]["value"] == pytest.approx(ratio.value)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_servers_take_turns_and_a_run_continues(questions, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("slipstream.serve.measure.compare.plot", lambda *words: words[-1].touch())
    with paced("vllm") as first, paced("vllm") as other:
        log = []
        for name, server in (("A", first), ("B", other)):
            server.requests = Log(name, log)
        options = {"url": [first.url, other.url], "questions": [questions], "concurrency": "2"}
        compare(CompareConfig(**options, seconds=0.0, output=str(tmp_path)))
        assert "".join(log[::4]) == "AB" + "ABBA" * 6
        file = tmp_path / "passes.jsonl"
        content = file.read_bytes()
        file.write_bytes(content[: content.rindex(b"\n", 0, -1) + 20])  # killed while it wrote the last pass
        del log[:]
        compare(CompareConfig(**options, seconds=0.0, output=str(tmp_path)))
        assert "".join(log[::4]) == "AB" + "ABBA"
        message = "temperature is 1.0, but .* was begun with 0.0; use that, name another output"
        with user_error(message):
            compare(CompareConfig(**options, temperature=1.0, output=str(tmp_path)))
    lines = [json.loads(line) for line in file.open()]
    assert [line["sides"][0]["answers"] for line in lines[1:]] == [
        line["sides"][0]["answers"] for line in map(json.loads, content.splitlines()[1:])
    ]
    assert len({body["cache_salt"] for body in first.requests}) == 13 + 3  # a warm-up, and two for each pass of a run
    assert "5 passes already" in capsys.readouterr().out


def test_passes_of_another_server_are_not_continued(questions, tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.serve.measure.compare.plot", lambda *words: words[-1].touch())
    with paced("vllm", process_start=1.5e9) as server, paced("plain") as unknown:
        options = {"questions": [questions], "concurrency": "2", "seconds": 0.0}
        config = CompareConfig(url=[server.url], **options, output=str(tmp_path / "known"))
        compare(config)
        compare(config)
        server.process_start = 1.6e9
        with user_error("process_start of .* is not what .*passes.jsonl was begun with"):
            compare(config)
        mixed = CompareConfig(url=[server.url, unknown.url], **options, output=str(tmp_path / "mixed"))
        compare(mixed)
        with user_error("passes.jsonl is finished, but nothing tells whether"):
            compare(mixed)


class Log(list[dict[str, Any]]):
    """Requests of a server, whose name is added to a log that servers share."""

    def __init__(self, name: str, log: list[str]):
        self.name = name
        self.log = log

    def append(self, body: dict[str, Any]):
        super().append(body)
        self.log.append(self.name)


def test_figures_by_context_length(questions, tmp_path, capsys):
    lengths = {QUESTIONS[0]: 5000, QUESTIONS[1]: 5000}
    with paced("vllm-detailed", prompt_lens=lengths) as first, paced("plain", pace=0.001) as other:
        urls = [first.url, other.url]
        compare(CompareConfig(url=urls, questions=[questions], seconds=0.0, concurrency="2", output=str(tmp_path)))
    primary, second = json.loads((tmp_path / "compare.json").read_text())["figures"]
    texts = [QUESTIONS[place % len(QUESTIONS)] for place in range(48)]
    assert [part["context"] for part in primary["contexts"]] == ["<1k", "4-16k"]
    for part, is_long in zip(primary["contexts"], (False, True), strict=True):
        counts = [count for text in texts if (text in lengths) == is_long for count in rounds_of(length_of(text))]
        assert part["accept_length"] == pytest.approx(mean(counts))
        assert part["answers"] == sum((text in lengths) == is_long for text in texts)
    assert [(part["context"], part["accept_length"]) for part in second["contexts"]] == [("<1k", None)]
    assert "| at once | server | context |" in capsys.readouterr().out


def test_one_server_alone_is_measured(questions, tmp_path, capsys):
    with paced("plain") as server:
        options = {"questions": [questions], "concurrency": "2", "seconds": 0.0}
        compare(CompareConfig(url=[f"{server.url}/v1"], **options, output=str(tmp_path)))
    [line] = json.loads((tmp_path / "compare.json").read_text())["figures"]
    assert line["speed"] is None
    assert line["requests"] == 48
    assert "to A" not in capsys.readouterr().out


@each_case()
def test_bad_options(flags, word, exits):
    with exits(word, 2):
        main(flags)


def test_a_server_that_fails_ends_it_with_a_sentence(questions, tmp_path):
    with paced() as server, user_error("http://127.0.0.1:9 is not"):
        compare(CompareConfig(url=[server.url, "http://127.0.0.1:9"], questions=[questions], output=str(tmp_path)))
