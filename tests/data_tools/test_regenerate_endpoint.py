"""`slipstream regenerate` with OpenAI-compatible endpoints: bodies, retries, failures, and a kill in the middle."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.data_tools import regenerate
from slipstream.data_tools.dialogue import row_seed
from slipstream.tests.data_tools.chats import CHATML, chat, write_jsonl
from slipstream.tests.data_tools.fake_answers import EXPECTED, ROWS, FakeEndpoint, answered, error, lines, report, run
from slipstream.tests.random_targets import change_json


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


def test_endpoints_get_messages(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    (tmp_path / "key").write_text("secret\n")
    rows = run(tmp_path, "--endpoint", endpoint.url, "--concurrency", 4, "--api-key-file", tmp_path / "key")
    assert [row["messages"] for row in rows] == EXPECTED
    assert endpoint.paths == {"/v1/chat/completions": 32}
    assert endpoint.most_open <= 4
    assert set(endpoint.headers) == {"Bearer secret"}
    body = next(body for body in endpoint.bodies if body["messages"] == ROWS[0]["messages"][:1])
    assert body == {
        "model": "fake-model",
        "messages": chat("What is 0?"),
        "max_tokens": 2048,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": row_seed(0, "row0"),
    }
    assert report(tmp_path)["tokens_this_run"] == 32 * 7


def test_endpoints_get_tokens_when_the_target_is_known(
    tmp_path: Path, make_folder: Callable[..., Path], endpoint: FakeEndpoint
) -> None:
    target = make_folder(CHATML)
    run(tmp_path, "--endpoint", endpoint.url, "--target", target, "--model", "mine", rows=ROWS[:3])
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True) for row in ROWS[:3]]
    assert endpoint.paths == {"/v1/completions": 3}
    assert sorted(body["prompt"] for body in endpoint.bodies) == sorted(prompt["input_ids"] for prompt in prompts)
    assert {body["model"] for body in endpoint.bodies} == {"mine"}


def test_requests_are_spread_over_endpoints(tmp_path: Path, endpoint: FakeEndpoint) -> None:
    with FakeEndpoint() as other:
        endpoint.delay_s = other.delay_s = 0.01
        run(tmp_path, "--endpoint", f"{endpoint.url},{other.url}/", "--concurrency", 2)
        assert len(endpoint.bodies) + len(other.bodies) == 32
        assert min(len(endpoint.bodies), len(other.bodies)) > 5
    # One of the two is down now: its requests go to the other.
    again = run(tmp_path, "--endpoint", endpoint.url, "--endpoint", other.url, "--retry-pause", 0.01, "--overwrite")
    assert [row["messages"] for row in again] == EXPECTED


def test_retries_and_failures(tmp_path: Path, endpoint: FakeEndpoint, capsys: pytest.CaptureFixture[str]) -> None:
    questions = ["flaky", "refused", "broken", "odd", "fine", "long"]
    rows = [{"id": question, "messages": chat(question)} for question in questions]
    options = ("--endpoint", endpoint.url, "--retries", 3, "--retry-pause", 0.01)
    message = error(capsys, tmp_path, *options, rows=rows)
    assert "3 rows failed" in message
    assert "the same command tries them again" in message
    assert [row["id"] for row in lines(tmp_path)] == ["flaky", "fine", "long"]
    assert (report(tmp_path)["rows_kept"], report(tmp_path)["rows_failed"]) == (3, 3)
    asked = [body["messages"][0]["content"] for body in endpoint.bodies]
    assert {question: asked.count(question) for question in questions} == {
        "flaky": 4, "refused": 1, "broken": 4, "odd": 1, "fine": 1, "long": 1
    }  # fmt: skip
    assert lines(tmp_path)[2]["finish_reason"] == "length"
    error(capsys, tmp_path, *options, rows=rows)  # tries the failed rows again, and only those
    asked = [body["messages"][0]["content"] for body in endpoint.bodies]
    assert (asked.count("fine"), asked.count("refused")) == (1, 2)


def test_too_many_failures_end_the_run(tmp_path: Path, endpoint: FakeEndpoint, capsys: Any) -> None:
    rows = [{"messages": chat(f"refused {number}")} for number in range(50)]
    message = error(capsys, tmp_path, "--endpoint", endpoint.url, "--max-failures", 5, "--concurrency", 2, rows=rows)
    assert "5 rows failed, the last: " in message
    assert "answered 400: " in message
    assert len(endpoint.bodies) <= 7


SHORT = [*ROWS[:2], {"id": "big", "messages": chat("What is it? " * 30)}]


def test_a_short_context_bounds_answers_and_drops_prompts(tmp_path: Path) -> None:
    with FakeEndpoint(context=60) as endpoint:
        rows = run(tmp_path, "--endpoint", endpoint.url, "--max-failures", 1, rows=SHORT)
    assert [row["id"] for row in rows] == ["row0", "row1"]
    assert report(tmp_path)["rows_dropped"] == {"prompt_too_long": 1}
    assert [body.get("max_tokens") for body in endpoint.bodies].count(2048) == 3, "asked for first"


@pytest.mark.parametrize(("listed", "model"), [(60, ()), (60, ("--model", "fake-model")), (None, ())])
def test_the_room_is_the_listed_context_or_the_targets(
    tmp_path: Path, make_folder: Callable[..., Path], listed: int | None, model: tuple[str, ...]
) -> None:
    target = make_folder(CHATML, 512)
    change_json(target / "config.json", max_position_embeddings=70)
    with FakeEndpoint(context=listed) as endpoint:
        run(tmp_path, "--endpoint", endpoint.url, "--target", target, "--max-failures", 1, *model, rows=SHORT)
    assert report(tmp_path)["rows_dropped"] == {"prompt_too_long": 1}
    assert [len(body["prompt"]) + body["max_tokens"] for body in endpoint.bodies] == [listed or 70] * 2


def test_an_endpoint_that_is_down_is_named(tmp_path: Path, capsys: Any) -> None:
    message = error(capsys, tmp_path, "--endpoint", "http://127.0.0.1:9/v1")
    assert "endpoint http://127.0.0.1:9/v1 does not list its models" in message


def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    rows = [{"id": f"row{n}", "messages": chat(f"What is {n}?", "", f"And {n}?")} for n in range(80)]
    data = write_jsonl(tmp_path / "rows.jsonl", [*rows, rows[3]])
    output = tmp_path / "out.jsonl"
    with FakeEndpoint(delay_s=0.01, held_after=80) as endpoint:  # of 160 answers: it is killed before its end
        script = str(Path(regenerate.__file__))
        words = ["--data", str(data), "-o", str(output), "--endpoint", endpoint.url, "--concurrency", "4"]
        process = subprocess.Popen([sys.executable, script, *words], stderr=subprocess.DEVNULL)
        while process.poll() is None and (not output.exists() or output.read_bytes().count(b"\n") < 15):
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        endpoint.go_on.set()
        begun = output.read_bytes()
        assert 15 <= begun.count(b"\n") < 80
        output.write_bytes(begun + begun.splitlines()[0][:30])  # and a row that was being written
        regenerate.main(words)
        survivors = output.read_bytes()
        regenerate.main([*words, "--overwrite"])
    assert survivors == output.read_bytes()
    assert [row["messages"] for row in lines(tmp_path)] == [answered(row) for row in rows]
