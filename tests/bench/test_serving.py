"""The serving benchmark: its figures against direct counts, grading, going on where it was interrupted."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.bench import serving, serving_run, streams
from slipstream.bench.engines import label, split_draft
from slipstream.bench.lines import table
from slipstream.bench.server import serve_command
from slipstream.bench.serving import COLUMNS, ServingConfig, compare, main
from slipstream.bench.serving_run import Run, pool, run_http, run_offline, task_namespace
from slipstream.bench.workload import Question, Task, Workload, final_number, read_questions
from slipstream.serve.engine.build import build_engine
from slipstream.serve.llm import LLM
from slipstream.serve.load import Answer
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.request import SamplingParams
from slipstream.tests.bench.clocked_engine import Clock, ClockedEngine
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.fake_engine import ROUND
from slipstream.tests.serve.fake_server import MODEL, write_target
from slipstream.tests.serve.fake_server import serving as fake_serving
from slipstream.tests.sources import TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

SIZES = ["--output-len", "6", "--range-ratio", "0.5", "--concurrency", "1,3", "--requests", "4", "--prompts", "gsm8k"]


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "draft"
    save_random_draft(TINY, folder, 1500)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def test_the_program_counts_what_the_engine_does(draft, tokenizer, tmp_path, capsys):
    options = ["--engine.kv_cache_tokens", "1024", "--engine.max_model_len", "256", "--output", str(tmp_path / "lines")]
    drafts = [f"{draft},depth=2,width=2", "ngram,nodes=4"]
    main([*SIZES, *options, "--draft", drafts[0], "--draft", drafts[1], "--input-len", "0", "--ignore-eos", "false"])
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in printed[-6:]]
    rows = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line | {"answers": row["answers"]} for line, row in zip(lines, rows, strict=True)] == rows
    assert printed[:-6] == table(COLUMNS, [line | {"draft": label(line["draft"])} for line in lines]).splitlines()
    names = ["none", *drafts]
    assert [(line["draft"], line["concurrency"]) for line in lines] == [
        (name, level) for name in names for level in (1, 3)
    ]
    assert [line["width"] for line in lines[:4]] == [1, 1, 2, 2], "width=2 is the engine's option, for this draft alone"
    assert [line["identical"] for line in lines] == [None, None, True, True, True, True]
    assert [line["num_identical"] for line in lines[2:]] == [4] * 4
    work = Workload(tokenizer=tokenizer, kind="gsm8k", input_len=0, output_len=6, range_ratio=0.5)
    for name in names:
        draft_name, draft_options = split_draft(name)
        options = {"width": draft_options.pop("width")} if "width" in draft_options else {}
        llm = LLM(str(TINY), draft_name, drafter=draft_options, kv_cache_tokens=1024, max_model_len=256, **options)
        for line in (line for line in lines if line["draft"] == name):
            check_line(line, lines, llm, work.tasks(4, f"0/{line['concurrency']}"))


@pytest.mark.slow
def test_both_engines_answer_the_same_questions_in_turns(capsys):
    command = [*SIZES, "--target", str(TINY), "--input-len", "0", "--ignore-eos", "false", "--turns", "2"]
    main([*command, "--draft", "ngram,nodes=4"])
    printed = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in printed[-4:]]
    assert [(line["draft"], line["concurrency"]) for line in lines] == [
        (name, level) for name in ("none", "ngram,nodes=4") for level in (1, 3)
    ]
    for line in lines[2:]:
        assert (line["requests"], line["turns"], line["identical"], line["num_identical"]) == (4, 2, True, 8)
        assert 1 <= line["accept_length"] <= line["width"] <= 4
        assert len(line["speed_up_cpu_turns"]) == 2


def test_drafts_of_forced_tokens_are_compared(tmp_path):
    """Answers that follow a schema are the same with them and without, and take fewer rounds."""
    schema = tmp_path / "schema.json"
    output = tmp_path / "lines"
    schema.write_text(
        '{"type": "object", "properties": {"apples in each box": {"const": 12}}, "required": ["apples in each box"]}'
    )
    options = ["--target", str(TINY), "--prompts", "gsm8k", "--input-len", "0", "--output-len", "40"]
    options += ["--ignore-eos", "false", "--concurrency", "2", "--requests", "2", "--output", str(output)]
    main([*options, "--schema", str(schema), "--draft", "none,grammar_drafts=false", "--engine.max_model_len", "512"])
    drafted, plain = (json.loads(line) for line in output.read_text().splitlines())
    assert (plain["num_identical"], plain["accept_length"]) == (2, 1.0)
    assert drafted["rounds"] < plain["rounds"] == drafted["completion_tokens"] - 2


def test_the_median_turn_counts():
    config = ServingConfig(draft=["ngram"], target="x", turns=3)
    none = {"tok_s_turns": [12.0, 6.0, 1.5], "cpu_s_turns": [1.0, 2.0, 3.0], "answers": [1, 2, 3]}
    ngram = {"tok_s_turns": [12.0, 12.0, 4.5], "cpu_s_turns": [0.5, 2.0, 2.0], "answers": [1, 2, 3]}
    comparison = compare(config, ngram, none, "ngram")
    assert (comparison["speed_up"], comparison["speed_up_cpu"], comparison["speed_up_cpu_turns"]) == (
        2.0,
        1.5,
        [2.0, 1.0, 1.5],
    )
    assert comparison["identical"]
    assert not compare(config, ngram | {"answers": [1, 2, 7]}, none, "ngram")["identical"]
    answer = Answer(text="x", completion_tokens=12, rounds=4, decoded_tokens=10, drafted_tokens=6)
    runs = [Run(concurrency=1, wall_s=wall_s, answers=[answer]) for wall_s in (1.0, 5.0)]
    pooled = pool(runs)
    figures = pooled.figures()
    assert (figures["tok_s"], figures["accept_length"], figures["width"]) == (4.0, 2.5, 2.5)
    assert pooled.replies == ["x", "x"]


def check_line(line: dict[str, Any], lines: list[dict[str, Any]], llm: LLM, tasks: list[Task]):
    """Against LLM.generate over the same tasks."""
    name = split_draft(line["draft"])[0]
    params = [SamplingParams(max_tokens=task.max_tokens, temperature=0.0) for task in tasks]
    answers = llm.generate([task.prompt for task in tasks], params)
    tokens = sum(len(answer.tokens) for answer in answers)
    assert (line["completion_tokens"], line["requests"]) == (tokens, 4)
    if name != "ngram":  # which may know the answers that ended before
        assert line["rounds"] == sum(answer.stats.rounds for answer in answers)
    assert line["accuracy"] == sum(task.is_right(answer.text) for task, answer in zip(tasks, answers, strict=True)) / 4
    assert line["accept_length"] == pytest.approx((tokens - 4) / line["rounds"], abs=1e-4)
    assert line["tok_s"] == pytest.approx(tokens / line["wall_s"], rel=0.05)
    baseline = next(row for row in lines if (row["draft"], row["batch"]) == ("none", line["batch"]))
    assert line["speed_up"] == (None if name == "none" else pytest.approx(line["tok_s"] / baseline["tok_s"], abs=2e-3))
    assert 0 < line["ms"] == line["itl_ms_p50"] <= line["itl_ms_p95"] <= line["itl_ms_p99"]
    assert 0 < line["ttft_ms_p50"] <= line["ttft_ms_p99"] < 1000 * line["wall_s"]
    assert {"bench", "device", "date", "revision", "target"} <= line.keys()


class FakeEngines:
    """Answers at once, with the level as the answer; breaks off where it is told to."""

    def __init__(self):
        self.calls: list[tuple[str, int, int, str]] = []  # draft, tasks, concurrency, namespace
        self.interrupted_at: tuple[str, int] | None = None

    @contextmanager
    def measuring(self, _: Any, draft: str) -> Iterator[Any]:
        def run(tasks, level, namespace, _):
            self.calls.append((draft, len(tasks), level, namespace))
            if (draft, level) == self.interrupted_at:
                raise KeyboardInterrupt
            wall_s = 1.0 if draft == "none" else 0.5
            answer = Answer(
                text=f"#### {level}", completion_tokens=100, rounds=50, decoded_tokens=100, drafted_tokens=50
            )
            return Run(concurrency=level, wall_s=wall_s, cpu_s=wall_s, answers=[answer] * len(tasks))

        yield run


def test_it_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, exits):
    engines = FakeEngines()
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr(serving, "measuring", engines.measuring)
    command = [*SIZES, "--target", str(TINY), "--draft", "ngram", "--input-len", "0", "--ignore-eos", "false"]
    command += ["--output", str(path), "--resume"]
    engines.interrupted_at = ("ngram", 3)
    with exits("interrupted; with --output, add --resume to continue"):
        main(command)
    assert engines.calls == [
        ("none", 1, 1, "warm-up at 1"),
        ("none", 4, 1, "at 1"),
        ("none", 2, 3, "warm-up at 3"),
        ("none", 4, 3, "at 3"),
        ("ngram", 1, 1, "warm-up at 1"),
        ("ngram", 4, 1, "at 1"),
        ("ngram", 2, 3, "warm-up at 3"),
    ]
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    changed = json.loads(lines[1])
    changed["answers"][0] += 1
    path.write_text("\n".join([lines[0], json.dumps(changed), lines[2], '{"bench": "serv']))  # killed while it wrote
    engines.interrupted_at = None
    engines.calls = []
    main(command)
    assert [call[:1] + call[2:3] for call in engines.calls] == [("ngram", 3)] * 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["draft"], row["batch"]) for row in rows] == [("none", 1), ("none", 3), ("ngram", 1), ("ngram", 3)]
    assert [row["speed_up"] for row in rows] == [None, None, 2.0, 2.0]
    assert [row["num_identical"] for row in rows] == [None, None, 4, 3]
    engines.calls = []
    main(command)
    assert not engines.calls, "everything is there"
    main([*command, "--seed", "1", "--concurrency", "3"])
    assert [call[:1] for call in engines.calls] == [("none",)] * 2 + [("ngram",)] * 2, "other settings, other lines"


def test_times_are_those_of_outputs(monkeypatch):
    clock = Clock()
    for module in (serving_run, streams):
        monkeypatch.setattr(module, "time", clock)
    engine = ClockedEngine(clock)
    run = run_offline(engine, [Task([5, 6], length) for length in (1, 7, 4, 1)], 2, "test", temperature=0.0)
    # Steps: [0 1] [1 2] [1 2] [3]: request 0 takes one step, 1 and 2 take three and two, each from when it had room.
    assert run.wall_s == 4.0
    assert [answer.arrivals_s for answer in run.answers] == [[1.0], [1.0, 2.0, 3.0], [1.0, 2.0], [1.0]]
    assert run.replies == [[5], [5, 6, 5, 6, 5, 6, 5], [5, 6, 5, 6], [5]]
    assert (run.completion_tokens, run.rounds, run.decoded_tokens, run.accept_length) == (13, 3, 9, 3.0)
    assert run.figures()["width"] == ROUND
    assert engine.largest_batch == 2


def test_each_answer_has_noise_of_its_own():
    """One seed for all would let n-grams copy one answer into the next."""
    engine = build_engine(EngineConfig(target=str(TINY), kv_cache_tokens=512, max_model_len=64, max_running=2))
    params = {"temperature": 8.0, "ignore_eos": True}
    tasks = [Task([5, 6, 7], 8)] * 4
    run = run_offline(engine, tasks, 2, "test", seed=3, **params)
    assert len({tuple(reply) for reply in run.replies}) == 4
    assert run_offline(engine, tasks[:1], 2, "test", seed=5, **params).replies == [run.replies[2]]


@pytest.fixture(scope="module")
def server_url(tmp_path_factory) -> Iterator[str]:
    target = str(write_target(tmp_path_factory.mktemp("target")))
    with fake_serving(ServeConfig(target=target, port=0, served_model_name=MODEL)) as server:
        yield server.url


def test_over_http(server_url):
    prompts = [[60 + index, 70] for index in range(5)]
    params = {"temperature": 0.0, "ignore_eos": True, "cache_salt": "slow"}
    run = run_http(server_url, [Task(prompt, 10) for prompt in prompts], 2, seed=0, **params)
    assert (run.completion_tokens, run.rounds, run.decoded_tokens) == (50, 15, 45)
    assert run.figures()["width"] == ROUND
    assert all(0 < len(answer.arrivals_s) <= 4 for answer in run.answers)
    assert len(set(run.replies)) == 5


def test_a_failed_request_ends_the_measurement(server_url):
    with user_error("1 of 2 requests failed, the first with: .*300"):
        run_http(server_url, [Task([70], 4), Task([70] * 300, 4)], 1)


def test_lengths_and_prompts_come_from_the_seed(tokenizer):
    special = set(tokenizer.all_special_ids)
    for kind in ("random", "gsm8k"):
        work = Workload(tokenizer=tokenizer, kind=kind, input_len=300, output_len=40, range_ratio=0.5)
        tasks = work.tasks(50, "a")
        assert tasks == work.tasks(50, "a")
        assert not {tuple(task.prompt) for task in tasks} & {tuple(task.prompt) for task in work.tasks(50, "b")}
        for lengths, longest in (([len(t.prompt) for t in tasks], 300), ([t.max_tokens for t in tasks], 40)):
            assert longest / 2 <= min(lengths) < 0.6 * longest
            assert 0.9 * longest < max(lengths) <= longest
        if kind == "random":
            assert not special & {token for task in tasks for token in task.prompt}
    fixed = Workload(tokenizer=tokenizer, kind="random", input_len=7, output_len=3).tasks(5, "a")
    assert {(len(task.prompt), task.max_tokens) for task in fixed} == {(7, 3)}


def test_questions_stand_at_the_end_of_answered_ones(tokenizer):
    heldout = {question.text for question in read_questions()}
    bare = Workload(tokenizer=tokenizer, kind="gsm8k", input_len=0, output_len=3).tasks(3, "a")
    long = Workload(tokenizer=tokenizer, kind="gsm8k", input_len=800, output_len=3).tasks(3, "a")
    assert {len(task.prompt) for task in long} == {800}
    for task, num_turns in [*((task, 1) for task in bare), *((task, 2) for task in long)]:
        turns = tokenizer.decode(task.prompt).split("<|im_start|>user\n")
        assert turns[-1].removesuffix("<|im_end|>\n<|im_start|>assistant\n") in heldout
        assert len(turns) > num_turns


def test_questions_are_asked_again_in_other_namespaces(tokenizer, tmp_path):
    tasks = Workload(tokenizer=tokenizer, kind="gsm8k", input_len=0, output_len=3).tasks(2 * 381 + 1, "a")
    first = tasks[0]
    again = tasks[381]
    third = tasks[-1]
    assert first.prompt == again.prompt == third.prompt != tasks[1].prompt
    assert len({task_namespace("at 8", task) for task in (first, again, third)}) == 3
    assert task_namespace("at 8", tasks[1]) == "at 8"
    assert task_namespace("", again) == ""
    (empty := tmp_path / "questions.jsonl").write_text('{"question": "1+1?", "answer": "2", "split": "train"}\n')
    with user_error("questions.jsonl has no questions"):
        Workload(tokenizer=tokenizer, kind=str(empty), input_len=0, output_len=3).tasks(1, "a")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234,567 dollars, 5 of them new", "1234567"),
        ("first #### 3, no: #### -12.50", "-12.5"),
        ("He pays $1,000.00.", "1000"),
        ("it is 3.5, or 7/2", "2"),
        ("12 apples\n#### many", None),
        ("", None),
    ],
)
def test_the_last_number_counts(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))
    assert Task([], 1, Decimal(12)).is_right("#### 12")
    assert not Task([], 1, Decimal(12)).is_right(text)
    assert not Task([], 1).is_right(text)


def test_questions_come_in_either_form_and_of_one_split(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "#### 2"}]
    rows = [
        {"question": "a?", "answer": "1"},
        {"messages": [{"role": "system", "content": "s"}, *turns], "split": "heldout"},
        {"question": "c?", "answer": "3", "split": "train"},
    ]
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    assert read_questions(path) == [Question("a?", "1"), Question("b?", "#### 2")]
    assert read_questions(path, "train") == [Question("c?", "3")]
    for broken, message in (
        ('{"question": "a?"}', ":2 holds no question and answer"),
        ("[]", ":2 holds no question"),
        ('{"question": "a?", "answer": "who knows"}', ":2: its answer holds no number"),
    ):
        (tmp_path / "broken.jsonl").write_text('{"question": "a?", "answer": "1"}\n' + broken + "\n")
        with user_error(f"broken.jsonl{message}"):
            read_questions(tmp_path / "broken.jsonl")
    (tmp_path / "one.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    kind = str(tmp_path / "one.jsonl")
    sizes = {"input_len": 0, "output_len": 3}
    task, cut = (
        Workload(tokenizer=tokenizer, kind=kind, template=template, **sizes).tasks(1, "a")[0]
        for template in ({}, {"add_generation_prompt": False})
    )
    assert task.prompt[: len(cut.prompt)] == cut.prompt != task.prompt, "the template has its variables"
    assert "2 + 2?" in tokenizer.decode(cut.prompt)
    with user_error("input_len is 9; .* has no rows of split 'train' to use as examples: give 0"):
        Workload(tokenizer=tokenizer, kind=kind, input_len=9, output_len=3).tasks(1, "a")


def test_options_reach_the_engine_and_the_server(draft):
    drafted = f"{draft},max-model-len=98,depth=5"
    options = {
        "draft": [drafted],
        "concurrency": "1,16",
        "engine": {"attention": "sdpa", "max_model_len": 99},
        "drafter": {"depth": 4, "topk": 2},
    }
    config = ServingConfig(**options)
    assert config.drafts == ["none", drafted]
    engine = EngineConfig(**config.draft_options(drafted))
    assert (engine.max_running, engine.max_model_len, engine.drafter) == (16, 98, {"depth": 5, "topk": 2})
    baseline = EngineConfig(**config.draft_options("none"))
    assert (baseline.max_model_len, baseline.drafter) == (99, {})
    words = serve_command(ServingConfig(**options, mode="http").draft_options(drafted))
    served = ServeConfig(**json.loads(words[-1]))
    assert (served.max_running, served.max_model_len, served.drafter["depth"]) == (16, 98, 5)
    assert served.target == config.target_name == str(TINY)


def test_simulation_is_for_the_draft_alone(draft):
    options = {"draft": [str(draft)], "simulate_accept_length": 2.5}
    config = ServingConfig(**options)
    assert "simulate_accept_length" not in config.draft_options("none")
    assert config.draft_options(str(draft))["simulate_accept_length"] == 2.5
    line = {"tok_s_turns": [1.0], "cpu_s_turns": [1.0], "answers": [0]}
    comparison = compare(config, line, line | {"answers": [1]}, str(draft))
    assert (comparison["speed_up"], comparison["identical"], comparison["num_identical"]) == (1.0, None, None)
    run = Run(concurrency=1, wall_s=1.0, answers=[Answer(text="x", completion_tokens=1)])
    assert run.figures()["accept_length"] is None


@each_case()
def test_bad_options_are_sentences(options, message):
    with user_error(message):
        ServingConfig(**options)


def test_the_table_shows_what_is_missing():
    empty = dict.fromkeys(("speed_up", "speed_up_cpu", "num_identical", "accept_length", "ttft_ms_p50", "ttft_ms_p99"))
    line = {"draft": label("runs/x/draft/best,depth=3"), "concurrency": 8, "width": 4.0, "tok_s": 100.0, "ms": 5.5}
    row = table(COLUMNS, [line | empty | {"itl_ms_p95": 5.8, "itl_ms_p99": 6.0, "accuracy": 0.055}]).splitlines()[2]
    assert row == "| draft/best, depth=3 | 8 | 100.0 | - | - | 4.00 | 5.50 | - | - | 5.80 | 6.00 | - | 5.5% | - |"
    assert label("none") == "none"
    assert ServingConfig(draft=["ngram"]).drafts == ["none", "ngram"]
    with user_error("target is empty"):
        assert ServingConfig(draft=["ngram"]).target_name
