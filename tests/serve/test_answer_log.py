"""The log of answers: what it holds is what clients got, and `prepare` reads it."""

import json
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.data_tools.conversations import to_example
from slipstream.data_tools.rows import Row
from slipstream.data_tools.target_tokenizer import load_target_tokenizer
from slipstream.data_tools.verb_options import PrepareConfig
from slipstream.serve.http import answer_log
from slipstream.serve.http.answer_log import AnswerLog
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Request, SamplingParams
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, HELLO, client_of, serving, wait_until

REQUEST = Request(id="a", prompt=[1, 2], params=SamplingParams(max_tokens=9))


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "answers.jsonl"


@pytest.fixture
def client(byte_target, log) -> Iterator[httpx.Client]:
    config = ServeConfig(target=byte_target, port=0, answer_log=str(log))
    config.check_inputs()
    with serving(config) as server, client_of(server) as client:
        yield client
    config.check_inputs()  # what a server has written another one goes on with


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_answers_are_logged_as_clients_got_them(client, log, byte_target):
    """Whole or streamed, several choices, up to a stop string; neither those that opted out nor those that failed."""
    body = {"prompt": "abc", "max_tokens": 7, "return_token_ids": True}
    choices = client.post(COMPLETIONS, json={**body, "n": 2}).json()["choices"]
    stop = choices[0]["text"][3]
    choices += client.post(COMPLETIONS, json={**body, "stop": [stop]}).json()["choices"]
    chat = {"messages": HELLO, "max_tokens": 5, "stream": True}
    assert client.post(CHAT, json=chat).status_code == 200
    for salt in ("private", "fail"):
        client.post(COMPLETIONS, json={**body, "cache_salt": salt})
    last = client.post(COMPLETIONS, json={**body, "prompt": "xyz"}).json()["choices"]
    wait_until(lambda: len(lines_of(log)) == 5, "five answers")
    lines = lines_of(log)
    completions = [line for line in lines if line["kind"] == "completion"]
    answers = [[*line["input_ids"]][3:] for line in completions]
    assert sorted(answers) == sorted(choice["token_ids"] for choice in choices + last)
    assert {line["finish_reason"] for line in completions} == {"length", "stop"}
    (streamed,) = (line for line in lines if line["kind"] == "chat")
    assert sum(streamed["loss_mask"]) == 5
    options = PrepareConfig(data=(str(log),), target=byte_target, output="o")
    digest = load_target_tokenizer(options).hash
    for line in lines:
        example = to_example(Row("", line), line)
        assert example.documents is not None
        assert example.tokenizer_hash == digest
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_foreign_file_is_refused(log):
    log.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match="is not an answer log"):
        ServeConfig(target="someone/target", answer_log=str(log)).check_inputs()
    assert log.read_text() == '{"messages": []}\n'


def test_a_disk_that_cannot_be_written_costs_lines(tmp_path, monkeypatch, caplog):
    """It says so once. Where it is slow, lines are dropped, and nobody waits."""
    monkeypatch.setattr(answer_log, "MOST_UNWRITTEN", 4)
    path = tmp_path / "gone" / "answers.jsonl"
    log = AnswerLog(path, "hash")
    for _ in range(3):
        log.add(REQUEST, [3, 4], "stop")
    wait_until(lambda: log.num_lost == 3, "three lines")
    assert len(caplog.messages) == 1
    path.parent.mkdir()
    log.add(REQUEST, [5], "abort")
    log.add(REQUEST, [6], "length")
    log.close()
    assert [line["input_ids"] for line in lines_of(path)] == [[1, 2, 6]]
    for _ in range(6):
        log.add(REQUEST, [3, 4], "stop")
    assert log.num_lost == 3 + 2


def test_a_line_without_room_leaves_nothing_in_the_file(log):
    """The limit of a file's size stops a write in its middle, as a disk does that becomes full."""
    answers = AnswerLog(log, "hash")
    answers.add(REQUEST, [3], "stop")
    wait_until(lambda: len(lines_of(log)) == 1, "the first line")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 50, limits[1]))
    try:
        answers.add(REQUEST, [4], "stop")
        wait_until(lambda: answers.num_lost == 1, "the second line is lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    answers.add(REQUEST, [5], "stop")
    answers.close()
    assert [line["input_ids"] for line in lines_of(log)] == [[1, 2, 3], [1, 2, 5]]
