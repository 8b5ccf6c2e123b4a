"""`slipstream regenerate` with OpenAI-compatible endpoints: bodies, retries, failures, and a kill in the middle."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import load_from_disk
from transformers import AutoTokenizer

from slipstream.data_tools import prepare, regenerate
from slipstream.data_tools.dialogue import row_seed
from slipstream.tests.data_tools import fake_answers
from slipstream.tests.data_tools.chats import CHATML, build_tokenizer, chat, write_jsonl
from slipstream.tests.data_tools.fake_answers import EXPECTED, ROWS, FakeEndpoint, answered, error, lines, report, run
from slipstream.tests.data_tools.test_template_zoo import ZOO
from slipstream.tests.random_targets import change_json


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint() as endpoint:
        yield endpoint


def test_endpoints_get_messages(tmp_path, endpoint):
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
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert {row["model"] for row in rows} == {report(tmp_path)["options"]["model"]} == {"fake-model"}
    assert report(tmp_path)["tokens_this_run"] == 32 * 7


def test_endpoints_get_tokens_when_the_target_is_known(tmp_path, make_folder, endpoint):
    target = make_folder(CHATML)
    run(tmp_path, "--endpoint", endpoint.url, "--target", target, "--model", "fake-model", rows=ROWS[:3])
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompts = [tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True) for row in ROWS[:3]]
    assert endpoint.paths == {"/v1/completions": 3}
    assert sorted(body["prompt"] for body in endpoint.bodies) == sorted(prompt["input_ids"] for prompt in prompts)
    assert {body["model"] for body in endpoint.bodies} == {"fake-model"}
    assert all(body["return_token_ids"] and not body["skip_special_tokens"] for body in endpoint.bodies)


def test_requests_are_spread_over_endpoints(tmp_path, endpoint):
    with FakeEndpoint() as other:
        endpoint.delay_s = other.delay_s = 0.01
        run(tmp_path, "--endpoint", f"{endpoint.url},{other.url}/", "--concurrency", 2)
        assert len(endpoint.bodies) + len(other.bodies) == 32
        assert min(len(endpoint.bodies), len(other.bodies)) > 5
    # One of the two is down now: its requests go to the other.
    again = run(tmp_path, "--endpoint", endpoint.url, "--endpoint", other.url, "--retry-pause", 0.01, "--overwrite")
    assert [row["messages"] for row in again] == EXPECTED


@pytest.mark.parametrize("streams", [True, False])
def test_every_end_of_an_answer(tmp_path, streams, capsys):
    questions = ["fine", "flaky", "refused", "broken", "odd", "aborted", "filtered", "long", "thinks", "calls"]
    rows = [{"id": question, "messages": chat(question)} for question in questions]
    with FakeEndpoint(streams=streams) as endpoint:
        options = ["--endpoint", endpoint.url, "--retries", 4, "--retry-pause", 0.01]
        message = error(capsys, tmp_path, *options, rows=rows)
        assert "3 rows failed" in message
        assert "the same command tries them again" in message
        answers = {row["id"]: (row["finish_reason"], row["messages"][-1]) for row in lines(tmp_path)}
        assert list(answers) == ["fine", "flaky", "long", "thinks", "calls"]
        assert answers["thinks"] == ("length", {"role": "assistant", "content": "", "reasoning_content": "hm hm"})
        reason, called = answers["calls"]
        assert reason == "tool_calls"
        assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert answers["flaky"] == ("stop", answered(rows[1])[-1])
        counts = report(tmp_path)
        assert (counts["rows_kept"], counts["rows_failed"]) == (5, 3)
        assert counts["rows_dropped"] == {"refused_by_endpoint": 1, "no_answer": 1}
        expected = dict.fromkeys(questions, 1) | {"flaky": 5, "broken": 5}
        assert Counter(endpoint.questions) == expected
        error(capsys, tmp_path, *options, rows=rows)  # tries the failed rows again, and only those
        again = {"broken": 10, "odd": 2, "aborted": 2}
        assert Counter(endpoint.questions) == expected | again


def test_halves_of_surrogate_pairs_do_not_end_a_run(tmp_path, endpoint, monkeypatch):
    monkeypatch.setattr(fake_answers, "reply", lambda *_: "a\ud83d\ude00\ud800")  # in two pieces: a\ud83d, \ude00\ud800
    [row] = run(tmp_path, "--endpoint", endpoint.url, rows=ROWS[:1])
    assert row["messages"][-1]["content"] == "a\U0001f600\ufffd"


def test_rows_that_always_fail_do_not_hold_up_the_others(tmp_path, capsys):
    """Every fifth row; and more at the beginning than end a run."""
    options = ["--retries", 0, "--concurrency", 1, "--max-failures", 4]
    sound = [f"fine {n}" for n in range(20)]
    fifths = [question for n in range(0, 20, 4) for question in [f"broken {n}", *sound[n : n + 4]]]
    for questions, runs in ((fifths, 1), ([*(f"broken {n}" for n in range(6)), *sound], 2)):
        rows = [{"id": question, "messages": chat(question)} for question in questions]
        with FakeEndpoint() as endpoint:
            for number in range(runs):
                overwrite = [] if number else ["--overwrite"]
                error(capsys, tmp_path, *options, "--endpoint", endpoint.url, *overwrite, rows=rows)
            assert {row["id"] for row in lines(tmp_path)} == set(sound)
            assert Counter(endpoint.questions) >= Counter(sound)
            assert Counter(endpoint.questions)["fine 0"] == 1
            assert report(tmp_path)["rows_dropped"] == {}


def test_a_refusal_of_every_row_drops_none(tmp_path, capsys):
    for status, num_requests in ((404, 1), (401, 1), (400, 5), (503, 5)):
        with FakeEndpoint(status=status) as endpoint:
            options = ["--endpoint", endpoint.url, "--max-failures", 5, "--concurrency", 1, "--retries", 0]
            message = error(capsys, tmp_path, *options)
            assert f"answered {status}" in message
            assert len(endpoint.bodies) == num_requests
    with FakeEndpoint() as endpoint:
        assert [row["messages"] for row in run(tmp_path, "--endpoint", endpoint.url)] == EXPECTED


def test_a_silent_endpoint_is_not_asked_again_at_once(tmp_path, endpoint, capsys):
    rows = [{"id": "a", "messages": chat("silent")}]
    options = ["--endpoint", endpoint.url, "--timeout", 0.5, "--concurrency", 1]
    assert "sent nothing for 0.5 seconds; raise --timeout" in error(capsys, tmp_path, *options, rows=rows)
    assert endpoint.questions == ["silent"]
    error(capsys, tmp_path, *options, rows=rows)
    assert endpoint.questions == ["silent"] * 2


def test_one_model_answers_a_file(tmp_path, endpoint, capsys):
    with FakeEndpoint(model="other-model") as other:
        run(tmp_path, "--endpoint", endpoint.url, rows=ROWS[:3])
        message = error(capsys, tmp_path, "--endpoint", other.url)
        assert "model is 'other-model', but" in message
        assert "was started with 'fake-model'" in message
        message = error(capsys, tmp_path, "--endpoint", endpoint.url, other.url, "--overwrite")
        assert f"model 'fake-model' is not at endpoint {other.url}, which lists other-model" in message
        assert "model 'mine' is not at" in error(capsys, tmp_path, "--endpoint", other.url, "--model", "mine")
        assert other.bodies == []
    assert len(lines(tmp_path)) == 3


HARMONY = ["<|start|>", "<|end|>", "<|return|>", "<|channel|>", "<|message|>"]
HARMONY_TEMPLATE = (  # in small
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = (
    "<|channel|>analysis<|message|>Easy sum<|end|><|start|>assistant<|channel|>final<|message|>four"  # and <|return|>
)


def prepared_answers(folder: Path, target: Path) -> list[str]:
    """The text that `prepare` supervises in each document of the output."""
    out = folder / "prepared"
    prepare.main(["--data", str(folder / "out.jsonl"), "--target", str(target), "--output", str(out), "--heldout", "0"])
    tokenizer = AutoTokenizer.from_pretrained(target)
    return [
        tokenizer.decode([token for token, counts in zip(row["input_ids"], row["loss_mask"], strict=True) if counts])
        for row in load_from_disk(out)["train"]
    ]


@pytest.mark.parametrize(
    ("unknown", "fidelity"),
    [((), "exact"), (("return_token_ids",), "text"), (("return_token_ids", "skip_special_tokens"), "none")],
)
@pytest.mark.parametrize("turns", [1, 2])
def test_special_tokens_of_a_format_are_not_lost(tmp_path, unknown, fidelity, turns):
    tokenizer = build_tokenizer(HARMONY_TEMPLATE, "<|eot|>")
    tokenizer.add_special_tokens({"additional_special_tokens": HARMONY})
    tokenizer.eos_token = "<|return|>"
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"messages": [message for number in range(turns) for message in chat(f"What is {number}?", "")]}]
    with FakeEndpoint(tokenizer=tokenizer, render=lambda _: THOUGHT, unknown=unknown) as endpoint:
        answers = run(tmp_path, "--endpoint", endpoint.url, "--target", tmp_path / "target", rows=rows)
        assert len(endpoint.bodies) == turns + len(unknown)
    if fidelity == "none":
        assert (answers, report(tmp_path)["rows_dropped"]) == ([], {"answer_rewritten": 1})
        return
    [row] = answers
    message = {"role": "assistant", "content": "four", "reasoning_content": "Easy sum"}
    assert row["messages"][1::2] == [message] * turns
    assert ("input_ids" in row) == (fidelity == "exact" and turns == 1)
    assert prepared_answers(tmp_path, tmp_path / "target") == [f"{THOUGHT}<|return|>"] * turns


@pytest.mark.parametrize("unknown", [(), ("return_token_ids",)])
def test_thinking_is_removed_from_later_prompts_and_kept_in_answers(tmp_path, unknown):
    tokenizer = build_tokenizer(ZOO["qwen 3"].template.replace("[", "").replace("]", ""))
    tokenizer.save_pretrained(tmp_path / "target")
    thought = "<think>\nEasy sum\n</think>\n\nfour"
    rows = [{"messages": chat("What is 2 + 2?", "", "And 1 + 3?")}]
    with FakeEndpoint(tokenizer=tokenizer, render=lambda _: thought, unknown=unknown) as endpoint:
        [row] = run(tmp_path, "--endpoint", endpoint.url, "--target", tmp_path / "target", rows=rows)
        assert endpoint.questions[-1].count("Easy sum") == 0
    assert [message.get("reasoning_content") for message in row["messages"]] == [None, "Easy sum"] * 2
    assert prepared_answers(tmp_path, tmp_path / "target") == [f"{thought}<|im_end|>"] * 2


SHORT = [*ROWS[:2], {"id": "big", "messages": chat("What is it? " * 30)}]


def test_a_short_context_bounds_answers_and_drops_prompts(tmp_path):
    with FakeEndpoint(context=60) as endpoint:
        rows = run(tmp_path, "--endpoint", endpoint.url, "--max-failures", 1, rows=SHORT)
    assert [row["id"] for row in rows] == ["row0", "row1"]
    assert report(tmp_path)["rows_dropped"] == {"prompt_too_long": 1}
    assert [body.get("max_tokens") for body in endpoint.bodies].count(2048) == 3, "asked for first"


@pytest.mark.parametrize(("listed", "model"), [(60, ()), (60, ("--model", "fake-model")), (None, ())])
def test_the_room_is_the_listed_context_or_the_targets(tmp_path, make_folder, listed, model):
    target = make_folder(CHATML, 512)
    change_json(target / "config.json", max_position_embeddings=70)
    with FakeEndpoint(context=listed) as endpoint:
        run(tmp_path, "--endpoint", endpoint.url, "--target", target, "--max-failures", 1, *model, rows=SHORT)
    assert report(tmp_path)["rows_dropped"] == {"prompt_too_long": 1}
    assert [len(body["prompt"]) + body["max_tokens"] for body in endpoint.bodies] == [listed or 70] * 2


def test_an_endpoint_that_is_down_is_named(tmp_path, capsys):
    message = error(capsys, tmp_path, "--endpoint", "http://127.0.0.1:9/v1")
    assert "endpoint http://127.0.0.1:9/v1 does not list its models" in message


def test_a_run_goes_on_where_its_file_was_cut(tmp_path, endpoint):
    rows = [{"id": f"row{n}", "messages": chat(f"What is {n}?")} for n in range(9)]
    output = tmp_path / "out.jsonl"
    words = ["--data", str(write_jsonl(tmp_path / "rows.jsonl", rows)), "-o", str(output), "--endpoint", endpoint.url]
    regenerate.main(words)
    expected = output.read_bytes()
    output.write_bytes(expected[: len(expected) // 2])
    regenerate.main(words)
    assert output.read_bytes() == expected


@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path):
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
        prefix = output.read_bytes()
        assert 15 <= prefix.count(b"\n") < 80
        output.write_bytes(prefix + prefix.splitlines()[0][:30])  # and a row that was being written
        regenerate.main(words)
        survivors = output.read_bytes()
        regenerate.main([*words, "--overwrite"])
    assert survivors == output.read_bytes()
    assert [row["messages"] for row in lines(tmp_path)] == [answered(row) for row in rows]
