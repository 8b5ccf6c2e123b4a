"""`slipstream accept`: its counts against the servers' own and against plain sums, interruption, questions."""

import copy
import gzip
import json
import random
import re
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import openai
import pytest

from slipstream.serve.llm import LLM
from slipstream.serve.measure.accept import AcceptConfig, accept, main
from slipstream.serve.measure.conversations import Conversation
from slipstream.serve.measure.identity import read_identity
from slipstream.serve.measure.in_process import check_thinking
from slipstream.serve.measure.journal import Journal
from slipstream.serve.measure.questions import read_questions
from slipstream.serve.measure.server_counts import RoundCounts, read_counts
from slipstream.serve.request import SamplingParams
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.random_targets import FAMILIES, save_random_target
from slipstream.tests.serve.fake_engine import VOCABULARY
from slipstream.tests.serve.fake_server import MODEL, write_target
from slipstream.tests.serve.paced_server import length_of, paced, rounds_of
from slipstream.tests.tables import each_case, table_of
from slipstream.tests.user_errors import user_error

TURNS = table_of(__file__, "turns")


@pytest.fixture(autouse=True)
def no_plot(request, monkeypatch):
    """Plots take most of the time; one test draws one."""
    if request.function is not test_a_speed_up_against_another_server:
        monkeypatch.setattr("slipstream.serve.measure.accept.plot", lambda *words: words[-1].touch())


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("questions") / "question.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in TURNS))
    return str(file)


def figures(output: Path) -> list[dict[str, Any]]:
    return json.loads((output / "accept.json").read_text())["figures"]


def whole(output: Path) -> list[dict[str, Any]]:
    return [figure for figure in figures(output) if figure["category"] == "all" and figure["context"] == "all"]


# What is asked, in the words of paced_server.py, which does not read earlier turns.
ROUNDS = {
    (row["question_id"], place): rounds_of(length_of(text)) for row in TURNS for place, text in enumerate(row["turns"])
}


@each_case()
def test_accept_lengths_of_other_servers(questions, tmp_path, dialect, level, source, rates, capsys):
    with paced(dialect) as server:
        accept(AcceptConfig(url=server.url, questions=[questions], concurrency=str(level), output=str(tmp_path)))
    [figures_of_server] = whole(tmp_path)
    everything = [count for emitted in ROUNDS.values() for count in emitted]
    assert figures_of_server["by_rounds"] == pytest.approx(mean(everything))
    means = defaultdict(list)
    for (question, _), emitted in ROUNDS.items():
        means[TURNS[question - 1]["category"]].append(mean(emitted))
    assert figures_of_server["by_answers"] == pytest.approx(mean(mean(lengths) for lengths in means.values()))
    expected = [mean(count > place for count in everything) for place in (1, 2)] if rates else []
    assert figures_of_server["accept_rates"] == pytest.approx(expected)
    if rates:
        assert figures_of_server["conditional_rates"] == pytest.approx([expected[0], expected[1] / expected[0]])
    assert figures_of_server["by_counters"] == (None if dialect == "plain" else pytest.approx(mean(everything)))
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").open()][1:]
    assert {row["source"] for row in rows if "question" in row} == {source}
    printed = capsys.readouterr()
    assert ("~" in printed.out) == (source == "pieces")
    assert "--baseline-url" in printed.out + printed.err


def test_figures_by_context_length(questions, tmp_path, capsys):
    lengths = {"Write about rain and the sea.": 1020, "And twice that?": 16384, "Half of it?": 20000}
    with paced("vllm-detailed", prompt_lens=lengths) as server:
        accept(AcceptConfig(url=server.url, questions=[questions], output=str(tmp_path)))
    entries = {entry["context"]: entry for entry in figures(tmp_path) if entry["category"] == "all"}
    assert list(entries) == ["<1k", "1-4k", "16k+", "all"]  # rain: the middle of its answer lies beyond 1,024
    texts = {(row["question_id"], place): text for row in TURNS for place, text in enumerate(row["turns"])}
    classes = {turn: {1020: "1-4k", 5: "<1k"}.get(lengths.get(text, 5), "16k+") for turn, text in texts.items()}
    for name in ("<1k", "1-4k", "16k+"):
        counts = [count for turn, emitted in ROUNDS.items() if classes[turn] == name for count in emitted]
        assert entries[name]["by_rounds"] == pytest.approx(mean(counts))
        assert entries[name]["answers"] == [*classes.values()].count(name)
    printed = capsys.readouterr().out
    assert "| category | context |" in printed
    assert re.search(r"\| all +\| 16k\+ +\| 2 \|", printed)


def test_a_speed_up_against_another_server(questions, tmp_path):
    with paced("vllm-detailed") as drafting, paced("plain") as plain:
        urls = {"url": drafting.url, "baseline_url": plain.url}
        accept(AcceptConfig(**urls, questions=[questions], concurrency="2", temperature="0,1", output=str(tmp_path)))
        temperatures = [[body["temperature"] for body in server.requests] for server in (drafting, plain)]
    assert temperatures == [[0.0] * 8 + [1.0] * 7] * 2  # the first is a probe
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").open()][1:]
    for figure in figures(tmp_path):
        totals = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for row in rows:
            same = row["temperature"] == figure["setting"]["temperature"] and figure["category"] in (
                "all",
                row.get("category"),
            )
            if "question" in row and same:
                totals[row["drafted"]][0] += row["completion_tokens"]
                totals[row["drafted"]][1] += row["latency_s"]
        fast, slow = (tokens / seconds for tokens, seconds in (totals[True], totals[False]))
        assert figure["speed_up"] == pytest.approx(fast / slow)
        assert (figure["tok_s"], figure["tok_s_without"]) == (pytest.approx(fast), pytest.approx(slow))
    assert (tmp_path / "accept.png").read_bytes().startswith(b"\x89PNG")


@each_case()
def test_thinking_is_asked_for(questions, tmp_path, thinking, expected):
    with paced("vllm-detailed") as server:
        accept(AcceptConfig(url=server.url, questions=[questions], thinking=thinking, output=str(tmp_path)))
        bodies = server.requests[1:]
    names = ("chat_template_kwargs", "reasoning_effort")
    assert all({name: body[name] for name in names if name in body} == expected for body in bodies)


def test_our_server_its_counts_and_the_openai_client(server, client, tmp_path):
    """Multi-turn: every answer is what OpenAI's client gets that converses with the same seeds."""
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"id": "a", "turns": ["hi", "more"]}) + "\n" + json.dumps({"turns": ["abcde"]}) + "\n")
    before = read_counts(client.get("/metrics").text)
    config = AcceptConfig(
        url=f"{server.url}/v1/", questions=[str(file)], max_tokens=20, concurrency="1,2", temperature="0,1", seed=5,
        output=str(tmp_path / "out"), baseline=False,
    )  # fmt: skip
    accept(config)
    after = read_counts(client.get("/metrics").text)
    assert before is not None
    rows = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").open()][1:]
    answers = [row for row in rows if "question" in row]
    total = after.since(before)  # with the probe's 48 tokens
    assert total.rounds - 16 == sum(row["rounds"] for row in answers)
    assert total.decoded_tokens - 47 == sum(row["decoded_tokens"] for row in answers)
    for figures_of_mode in whole(tmp_path / "out"):
        assert figures_of_mode["by_rounds"] == pytest.approx(figures_of_mode["by_counters"], rel=0.005)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as other:
        for question in read_questions([str(file)]):
            conversation = Conversation(question)
            more = True
            while more:
                options = {"seed": conversation.seed(5), "max_tokens": 20, "temperature": 1.0}
                answer = other.chat.completions.create(model=MODEL, messages=conversation.prompt, **options)
                text = answer.choices[0].message.content
                texts = [
                    row["answer"]
                    for row in answers
                    if row["question"] == question.id and row["turn"] == conversation.turn
                ]
                assert texts == [text] * 4
                more = conversation.take(text)


def test_an_interrupted_run_continues_to_the_same_table(server, questions, tmp_path):
    """Killed at random points: a file that ends anywhere, in the middle of a line, too."""
    options = {"url": server.url, "questions": [questions], "max_tokens": 15, "concurrency": "1,3"}
    accept(AcceptConfig(**options, output=str(tmp_path / "once")))
    expected = figures(tmp_path / "once")
    content = (tmp_path / "once" / "answers.jsonl").read_bytes()
    rng = random.Random(3)
    first = content.index(b"\n") + 1
    timed = ("tok_s", "tok_s_without", "speed_up", "by_counters")
    for attempt in range(3):
        output = tmp_path / str(attempt)
        output.mkdir()
        (output / "answers.jsonl").write_bytes(content[: rng.randrange(first, len(content))])
        accept(AcceptConfig(**options, output=str(output)))
        for line, other in zip(figures(output), expected, strict=True):
            assert {k: v for k, v in line.items() if k not in timed} == {
                k: v for k, v in other.items() if k not in timed
            }
            assert other["speed_up"] is not None
    with user_error(r"max_tokens is 16, but .*answers.jsonl was begun with 15; use that, name"):
        accept(AcceptConfig(**{**options, "max_tokens": 16}, output=str(tmp_path / "once")))
    assert (tmp_path / "once" / "answers.jsonl").read_bytes().startswith(content)


def test_figures_of_another_draft_are_not_told_again(questions, tmp_path):
    """The server at a URL is started again with another draft, after a run or in the middle of it."""
    with paced("vllm-detailed", process_start=1.5e9) as server:
        options = {"url": server.url, "questions": [questions], "output": str(tmp_path)}
        accept(AcceptConfig(**options))
        num_requests = len(server.requests)
        accept(AcceptConfig(**options, fail_below=1.0))  # the same process: the figures stand
        assert len(server.requests) == num_requests + 1, "a probe"
        server.process_start = 1.6e9
        file = tmp_path / "answers.jsonl"
        content = file.read_bytes()
        for part in (content, content[: len(content) // 2]):
            file.write_bytes(part)
            with user_error(r"process_start of .* is not what .* 1500000000.0 then, 1600000000.0 now"):
                accept(AcceptConfig(**options, fail_below=1.0))
        accept(AcceptConfig(**options, overwrite=True))
        assert json.loads(file.read_text().splitlines()[0])["identity"][f"process_start of {server.url}"] == 1.6e9


def test_a_finished_run_of_a_server_that_may_be_another_is_refused(questions, tmp_path):
    with paced("vllm-detailed") as server:
        options = {"url": server.url, "questions": [questions], "output": str(tmp_path)}
        accept(AcceptConfig(**options))
        content = (tmp_path / "answers.jsonl").read_bytes()
        (tmp_path / "answers.jsonl").write_bytes(content[: len(content) // 2])
        accept(AcceptConfig(**options))  # an interrupted one continues
        with user_error("answers.jsonl is finished, but nothing tells whether"):
            accept(AcceptConfig(**options, fail_below=1.0))


@pytest.mark.parametrize("content", ['{"x": 1}', "null", '{"program": "p", "options": {}}\n5'])
def test_other_files_are_no_journal(content, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(content + "\n")
    with user_error("is not a file of p; name another output"):
        Journal(path, "p", {}, None)
    assert path.read_text() == content + "\n"


def test_a_server_without_usage_has_no_accept_length(questions, tmp_path, capsys):
    with paced("plain", has_usage=False) as server:
        accept(AcceptConfig(url=server.url, questions=[questions], output=str(tmp_path)))
    [entry] = whole(tmp_path)
    assert (entry["by_rounds"], entry["by_answers"]) == (None, None)
    assert entry["tokens"] == sum(1 + len(emitted) for emitted in ROUNDS.values()), "streamed pieces"
    printed = capsys.readouterr()
    assert "tell neither their rounds nor their tokens" in printed.out + printed.err


@each_case()
def test_identities(models, metrics, expected):
    assert read_identity(models and json.dumps({"data": [models]}), metrics, "m") == expected


@pytest.mark.parametrize("page", ["<html>", '{"object": "list"}', '{"data": ["m"]}', '{"data": null}', "[]"])
def test_a_page_in_place_of_models_tells_no_identity(page):
    assert read_identity(page, None, "m") is None


@pytest.fixture
def byte_draft(tmp_path) -> str:
    """An EAGLE3 draft of a random target that reads and writes bytes."""
    target, draft = (tmp_path / name for name in ("target", "draft"))
    config = copy.deepcopy(FAMILIES["qwen3"])
    config.vocab_size = VOCABULARY
    save_random_target(config, target)
    write_target(target)
    save_random_draft(target, draft)
    return str(draft)


def test_a_draft_in_this_process(byte_draft, questions, tmp_path):
    """Its counts are those of LLM.chat."""
    engine = {"width": 4, "kv_cache_tokens": 2048, "max_running": 1}
    options = {"draft": byte_draft, "engine": engine, "max_tokens": 12, "questions": [questions]}
    chat = LLM(draft=byte_draft, **engine)
    accept(AcceptConfig(**options, output=str(tmp_path / "out")))
    conversation = Conversation(read_questions([questions])[0])
    turns = []
    more = True
    while more:
        [answer] = chat.chat([conversation.prompt], SamplingParams(max_tokens=12, temperature=0.0))
        turns.append((answer.text, answer.stats.rounds, answer.stats.accepted_by_position))
        more = conversation.take(answer.text)
    rows = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").open()][1:]
    first = [row for row in rows if row["question"] == "1"]
    names = ("answer", "rounds", "accepted_by_position")
    assert [tuple(row[name] for name in names) for row in first if row["drafted"]] == turns
    assert [row["answer"] for row in first if not row["drafted"]] == [text for text, _, _ in turns]
    shutil.rmtree(byte_draft)
    save_random_draft(Path(byte_draft).parent / "target", Path(byte_draft), seed=1)
    with user_error("draft is not what .* was begun with"):
        accept(AcceptConfig(**options, output=str(tmp_path / "out")))
    message = "thinking is on, but the target's chat template reads none of enable_thinking"
    with user_error(message):
        check_thinking(chat, "on")


def test_it_fails_below_a_length_and_where_requests_fail(server, questions, tmp_path, exits):
    words = ["--url", server.url, "--questions", questions, "--max-tokens", "16", "--no-baseline"]
    for place, (options, word) in enumerate(
        [(["--fail-below", "2.9"], None), (["--fail-below", "3.1"], "below 3.1"), (["--max-tokens", "999"], "failed")]
    ):
        flags = [*words, *options, "--output", str(tmp_path / str(place))]
        if word is None:
            main(flags)
            continue
        with exits(word, 1):
            main(flags)


@each_case()
def test_bad_options(flags, word, exits):
    with exits(word, 2):
        main(flags)


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "q.parquet"])
def test_files_of_another_kind_are_named(name, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(b'{"prompt": "x"}')[:-9] if name.endswith(".gz") else b"\xff\xd8")
    with user_error(rf"^questions .*{name} cannot be read \(.+\); give JSON lines or a .parquet"):
        read_questions([str(tmp_path / name)])


def test_forms_of_questions(tmp_path):
    forms = table_of(__file__, "forms")
    file = tmp_path / "prompts.jsonl.gz"
    with gzip.open(file, "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in forms["rows"])
    questions = [
        [question.id, question.category, question.first, [*question.turns]] for question in read_questions([str(file)])
    ]
    assert questions == forms["questions"]
    assert [question.id for question in read_questions([str(file)], 2)] == ["prompts-1", "ids", "9"]
    assert len(read_questions(["gsm8k"])) == 381


@each_case()
def test_bad_questions_are_sentences(tmp_path, content, message):
    file = tmp_path / "q.jsonl"
    file.write_text(content)
    with user_error(message):
        read_questions([str(file)])


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "qualitative.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(TURNS), file)
    assert [(question.id, question.num_turns) for question in read_questions([str(file)])] == [
        ("1", 2),
        ("2", 1),
        ("3", 3),
        ("4", 1),
    ]


def test_counters_are_read():
    vllm = (
        'vllm:spec_decode_num_drafts{engine="0"} 10.0\nvllm:spec_decode_num_drafts{engine="1"} 20.0\n'
        'vllm:spec_decode_num_accepted_tokens{engine="0"} 7.0\nvllm:spec_decode_num_accepted_tokens{engine="1"} 8.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos{engine="0",position="0"} 5\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos{engine="1",position="0"} 6\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos{engine="1",position="1"} 4\n'
    )
    assert read_counts(vllm) == RoundCounts(30, 45, (11, 4))
    ours = (
        "slipstream_rounds_total 4\nslipstream_decoded_tokens_total 9\nslipstream_completion_tokens_total 16\n"
        'slipstream_requests_total{finish_reason="abort"} 3\n'
        'slipstream_accepted_tokens_total{source="eagle3",position="1"} 3\n'
        'slipstream_accepted_tokens_total{source="ngram",position="2"} 2\n'
    )
    assert read_counts(ours) == RoundCounts(4, 9, (3, 2))
    assert read_counts('vllm:num_requests_running{engine="0"} 1.0\n') is None
    assert read_counts(None) is None
    assert read_counts("sglang:token_usage NaN\nsglang:spec_accept_length 2.5\n") is None


def test_a_run_without_an_answer_does_not_bind_the_next(tmp_path: Path) -> None:
    for options in ({"depth": 1}, {"depth": 2}):
        with Journal(tmp_path / "answers.jsonl", "accept", options, None) as journal:
            assert not journal.results
