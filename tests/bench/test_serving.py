"""The serving benchmark: its figures against direct counts, its workloads, and what it passes on."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from slipstream.bench import serving_run
from slipstream.bench.serving import ServingConfig, against, main, table
from slipstream.bench.serving_http import run_http
from slipstream.bench.serving_options import flags
from slipstream.bench.serving_run import Run, milliseconds, run_offline
from slipstream.bench.workload import Task, Workload, read_chats
from slipstream.serve.cli import read_config
from slipstream.serve.engine import Engine
from slipstream.serve.llm import LLM
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.request import SamplingParams
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.fake_engine import ROUND, FakeEngine
from slipstream.tests.serve.fake_server import MODEL, serving, write_target

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"
SIZES = ["--input-len", "24", "--output-len", "12", "--range-ratio", "0.5", "--concurrency", "1,3", "--requests", "4"]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "draft"
    save_random_draft(TINY, folder, 1500)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def test_the_program_counts_what_the_engine_does(
    draft: Path, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--engine.kv_cache_tokens", "1024", "--engine.max_model_len", "64", "--drafter.depth", "2"]
    floors = ["--floor-ms", "1", "2", "3", "4.5", "--output", str(tmp_path / "lines.jsonl")]
    main(["--draft", str(draft), *SIZES, *options, *floors, "--prompts", "gsm8k"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-4:] == (tmp_path / "lines.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in printed[-4:]]
    assert [line["draft"] for line in lines] == ["none", "none", str(draft), str(draft)]
    assert [line["concurrency"] for line in lines] == [line["batch"] for line in lines] == [1, 3, 1, 3]
    assert [line["floor_ms"] for line in lines] == [1.0, 2.0, 3.0, 4.5]
    assert [line["width"] for line in lines] == [1, 1, 3, 3]
    assert [line["identical"] for line in lines] == [None, None, True, True]
    assert [line["num_identical"] for line in lines[2:]] == [4, 4]
    work = Workload(tokenizer=tokenizer, kind="gsm8k", input_len=24, output_len=12, range_ratio=0.5)
    for line in lines:
        check_line(line, work.tasks(4, f"0/{line['concurrency']}"))


def check_line(line: dict[str, Any], tasks: list[Task]) -> None:
    """Against LLM.generate over the same tasks."""
    drafter = {"depth": 2} if line["draft"] != "none" else {}
    llm = LLM(line["target"], line["draft"], drafter=drafter, kv_cache_tokens=1024, max_model_len=64)
    params = [SamplingParams(max_tokens=task.max_tokens, temperature=0.0, ignore_eos=True) for task in tasks]
    counts = [answer.stats for answer in llm.generate([task.prompt for task in tasks], params)]
    tokens, rounds = (sum(getattr(one, name) for one in counts) for name in ("completion_tokens", "rounds"))
    assert tokens == sum(task.max_tokens for task in tasks)
    assert (line["completion_tokens"], line["rounds"], line["requests"]) == (tokens, rounds, 4)
    assert line["accept_length"] == pytest.approx((tokens - 4) / rounds, abs=1e-4)
    assert line["tok_s"] == pytest.approx(tokens / line["wall_s"], rel=0.05)
    assert 0 < line["ms"] == line["itl_ms_p50"] <= line["itl_ms_p99"]
    assert 0 < line["ttft_ms_p50"] <= line["ttft_ms_p99"] < 1000 * line["wall_s"]
    assert {"bench", "device", "date", "revision", "target", "speed_up"} <= line.keys()


class Clock:
    """Time that passes only in the engine's steps: 1 s each."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class ClockedEngine(FakeEngine):
    def __init__(self, clock: Clock) -> None:
        super().__init__(EngineConfig(target="x"))
        self.clock = clock

    @property
    def num_open(self) -> int:
        return len(self.running)

    def check(self, request: Any) -> None:
        assert not self.running, "every request is checked before the first one begins"

    def step(self) -> Any:
        self.clock.now += 1.0
        return super().step()


def test_times_are_those_of_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(serving_run, "time", clock)
    engine: Any = ClockedEngine(clock)
    run = run_offline(engine, [Task([5, 6], length) for length in (1, 7, 4, 1)], 2, "test", temperature=0.0)
    # Steps: [0 1] [1 2] [1 2] [3]: request 0 takes one step, 1 and 2 take three and two, each from when it had room.
    assert run.wall_s == 4.0
    assert run.ttft_s == [1.0] * 4
    assert run.itl_s == [1.0] * 3
    assert run.answers == [[5], [5, 6, 5, 6, 5, 6, 5], [5, 6, 5, 6], [5]]
    assert (run.completion_tokens, run.rounds, run.decoded_tokens, run.accept_length) == (13, 3, 9, 3.0)
    assert run.width == ROUND
    assert engine.largest_batch == 2


def test_each_answer_has_noise_of_its_own() -> None:
    """One seed for all would let n-grams copy one answer into the next."""
    engine = Engine(EngineConfig(target=str(TINY), kv_cache_tokens=512, max_model_len=64, max_running=2))
    params: dict[str, Any] = {"temperature": 8.0, "ignore_eos": True}
    tasks = [Task([5, 6, 7], 8)] * 4
    run = run_offline(engine, tasks, 2, "test", seed=3, **params)
    assert len({tuple(answer) for answer in run.answers}) == 4
    assert run_offline(engine, tasks[:1], 2, "test", seed=5, **params).answers == [run.answers[2]]


def test_percentiles_are_values_that_occurred() -> None:
    assert milliseconds([], 50) is None
    assert milliseconds([0.003, 0.001, 0.002], 50) == 2.0
    assert milliseconds([index / 1000 for index in range(1, 201)], 99) == 198.0
    assert milliseconds([0.004], 99) == 4.0


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    target = str(write_target(tmp_path_factory.mktemp("target")))
    with serving(ServeConfig(target=target, port=0, served_model_name=MODEL)) as server:
        yield server.url


def test_over_http(server_url: str) -> None:
    prompts = [[60 + index, 70] for index in range(5)]
    params: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "cache_salt": "slow"}
    run = run_http(server_url, [Task(prompt, 10) for prompt in prompts], 2, seed=0, **params)
    assert (run.completion_tokens, run.rounds, run.decoded_tokens) == (50, 15, 45)
    assert run.width == ROUND
    assert len(run.ttft_s) == 5
    assert 0 < len(run.itl_s) <= 15
    assert len(set(run.answers)) == 5


def test_a_failed_request_ends_the_measurement(server_url: str) -> None:
    with pytest.raises(ValueError, match="1 of 2 requests failed, the first with: .*300"):
        run_http(server_url, [Task([70], 4), Task([70] * 300, 4)], 1)


def test_lengths_and_prompts_come_from_the_seed(tokenizer: Any) -> None:
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


def test_questions_stand_at_the_end_of_answered_ones(tokenizer: Any) -> None:
    heldout = {chat[0]["content"] for chat in read_chats("heldout")}
    bare = Workload(tokenizer=tokenizer, kind="gsm8k", input_len=0, output_len=3).tasks(3, "a")
    long = Workload(tokenizer=tokenizer, kind="gsm8k", input_len=800, output_len=3).tasks(3, "a")
    assert {len(task.prompt) for task in long} == {800}
    for task, num_turns in [*((task, 1) for task in bare), *((task, 2) for task in long)]:
        turns = tokenizer.decode(task.prompt).split("<|im_start|>user\n")
        assert turns[-1].removesuffix("<|im_end|>\n<|im_start|>assistant\n") in heldout
        assert len(turns) > num_turns


def test_options_reach_the_engine_and_the_server(draft: Path) -> None:
    options: dict[str, Any] = {
        "draft": str(draft),
        "concurrency": "1,16",
        "engine": {"attention": "sdpa", "max_model_len": 99},
        "drafter": {"depth": 5},
    }
    config = ServingConfig(**options)
    assert config.drafts == ["none", str(draft)]
    drafted = EngineConfig(**config.engine_options(str(draft)))
    assert (drafted.max_running, drafted.max_model_len, drafted.drafter) == (16, 99, {"depth": 5})
    assert EngineConfig(**config.engine_options("none")).drafter == {}
    served = read_config(flags(ServingConfig(**options, mode="http").engine_options(str(draft))))
    assert (served.max_running, served.max_model_len, served.drafter["depth"]) == (16, 99, 5)
    assert served.target == str(TINY)


def test_simulation_is_for_the_draft_alone(draft: Path) -> None:
    options: dict[str, Any] = {"draft": str(draft), "simulate_accept_length": 2.5}
    for mode in ("offline", "http"):
        config = ServingConfig(**options, mode=mode)
        assert "simulate_accept_length" not in config.engine_options("none")
        words = flags(config.engine_options(str(draft)))
        assert "--simulate_accept_length=2.5" in words
        assert ("--unsafe_simulate=true" in words) == (mode == "http")
    run = Run(
        wall_s=1, answers=[[1]], completion_tokens=1, rounds=0, decoded_tokens=0, drafted_tokens=0, ttft_s=[1], itl_s=[]
    )
    assert against(run, str(draft), run, config) == {"speed_up": 1.0, "identical": None, "num_identical": None}
    assert run.figures()["accept_length"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": "1;2"}, "concurrency is '1;2'; give positive numbers"),
        ({"mode": "grpc"}, "mode is 'grpc'; choose offline or http"),
        ({"prompts": "poems"}, "prompts is 'poems'; choose one of random, gsm8k"),
        ({"input_len": 0}, "input_len is 0; it must be at least 1, or 0 with gsm8k"),
        ({"range_ratio": 0.0}, "range_ratio is 0.0; it must be above 0"),
        ({"answers": "a.jsonl", "mode": "http"}, "answers is 'a.jsonl'; over HTTP they are text: give --mode offline"),
        ({"floor_ms": [1.0, 2.0]}, "give 4 values, one per line"),
    ],
)
def test_bad_options_are_sentences(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServingConfig(**options)
    assert ServingConfig(prompts="gsm8k", input_len=0).num_lines == 4


def test_the_table_shows_what_is_missing() -> None:
    empty = dict.fromkeys(("speed_up", "floor_ms", "num_identical", "accept_length", "ttft_ms_p50", "ttft_ms_p99"))
    line = {"draft": "runs/best", "concurrency": 8, "requests": 32, "width": 4.0, "tok_s": 100.0, "ms": 5.5}
    heading, row = table([line | empty | {"itl_ms_p50": 5.5, "itl_ms_p99": 6.0}]).splitlines()
    assert len(heading) == len(row)
    assert row.split() == ["best", "8", "32", "4", "100.0", "-", "-", "5.50", "-", "-", "-", "5.50", "6.00", "-"]


def test_offline_needs_no_http_package() -> None:
    code = "import sys, slipstream.bench.serving; assert not {'httpx', 'starlette', 'uvicorn'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
