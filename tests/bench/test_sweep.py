"""The sweep over concurrency: grading, rows against direct counts, and going on where it was interrupted."""

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image
from transformers import AutoTokenizer

from slipstream.bench import sweep
from slipstream.bench.serving_run import Run
from slipstream.bench.sweep import Rows, SweepConfig, encode, label, main, split_draft
from slipstream.bench.sweep_questions import Question, final_number, is_right, read_questions
from slipstream.bench.sweep_report import plot, table
from slipstream.bench.workload import QUESTIONS, Task
from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams
from slipstream.tests.random_drafts import save_random_draft

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"
SMALL = ["--questions", "3", "--concurrency", "1,2", "--max-tokens", "10", "--engine.kv_cache_tokens", "2048"]
FIELDS = {"bench", "device", "date", "revision", "target", "draft", "batch", "width", "ms", "tok_s", "accept_length"}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "best"
    save_random_draft(TINY, folder, 1500)
    return folder


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234,567 dollars, 5 of them new", "1234567"),
        ("first #### 3, no: #### -12.50", "-12.5"),
        ("He pays $1,000.00.", "1000"),
        ("it is 3.5, or 7/2", "2"),
        ("between 3 and 9 apples.", "9"),
    ],
)
def test_the_last_number_counts(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)
    assert is_right(Question("", Decimal(number)), text)
    assert not is_right(Question("", Decimal(number) + 1), text)


def test_an_answer_without_a_number_is_wrong() -> None:
    for text in ("", "none", "12 apples\n#### many"):
        assert final_number(text) is None
        assert not is_right(Question("", Decimal(12)), text)


def test_questions_come_in_either_form_and_of_one_split(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "#### 2"}]
    rows: list[dict[str, Any]] = [
        {"question": "a?", "answer": "1"},
        {"messages": [{"role": "system", "content": "s"}, *turns], "split": "heldout"},
        {"question": "c?", "answer": "3", "split": "train"},
        {"question": "d?", "answer": "#### 4,000"},
    ]
    path = tmp_path / "questions.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    expected = [Question("a?", Decimal(1)), Question("b?", Decimal(2)), Question("d?", Decimal(4000))]
    assert read_questions(path, "heldout", 3) == expected
    assert read_questions(path, "train", 1) == expected[:1]
    with pytest.raises(ValueError, match="questions is 4; .* has 3 of split 'heldout': ask for fewer"):
        read_questions(path, "heldout", 4)
    for broken, message in (('{"question": "a?"}', "holds no question and answer"), ("[]", "holds no question")):
        (tmp_path / "broken.jsonl").write_text('{"question": "a?", "answer": "1"}\n' + broken + "\n")
        with pytest.raises(ValueError, match=f"broken.jsonl:2 {message}"):
            read_questions(tmp_path / "broken.jsonl", "heldout", 2)
    (tmp_path / "broken.jsonl").write_text('{"question": "a?", "answer": "who knows"}\n')
    with pytest.raises(ValueError, match="broken.jsonl:1: its answer holds no number"):
        read_questions(tmp_path / "broken.jsonl", "heldout", 1)


def test_rows_say_what_the_engine_did(draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--draft", f"{draft},depth=2,width=2", "--draft", "ngram,nodes=4", "--output", str(tmp_path)]
    main([*SMALL, *options])
    printed = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in printed[-6:]]
    labels = ("none", f"{draft.parent.name}/{draft.name}, depth=2, width=2", "ngram, nodes=4")
    assert [(row["label"], row["batch"]) for row in rows] == [(name, level) for name in labels for level in (1, 2)]
    assert {line for line in printed if line.startswith("|")} == {*(tmp_path / "table.md").read_text().splitlines()}
    picture = image.imread(tmp_path / "sweep.png")
    assert picture.shape[0] > 500
    assert picture.std() > 0.05
    questions = read_questions(QUESTIONS, "heldout", 3)
    llm = LLM(str(TINY), kv_cache_tokens=2048)
    prompts = encode(llm.tokenizer, questions, {})
    answers = llm.generate(prompts, SamplingParams(max_tokens=10, temperature=0.0))
    num_right = sum(map(is_right, questions, (answer.text for answer in answers)))
    for row in rows:
        assert row.keys() >= FIELDS | {"floor_ms", "accuracy"}
        assert row["completion_tokens"] == sum(len(answer.tokens) for answer in answers)
        assert row["accuracy"] == pytest.approx(num_right / 3, abs=1e-4)
        assert row["num_identical"] == (None if row["draft"] == "none" else 3)
        assert row["speed_up"] == (None if row["draft"] == "none" else pytest.approx(against(row, rows), abs=2e-3))
        assert row["accept_length"] == pytest.approx((row["completion_tokens"] - 3) / row["rounds"], abs=1e-4)
    assert {row["width"] for row in rows[2:4]} == {2.0}, "width=2 is the engine's option, for this draft alone"


def against(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float:
    baseline = next(one for one in rows if one["draft"] == "none" and one["batch"] == row["batch"])
    return row["tok_s"] / baseline["tok_s"]


class FakeEngines:
    """Answers at once, with the level as the answer; breaks off where it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, str]] = []  # draft, tasks, concurrency, namespace
        self.interrupted_at: tuple[str, int] | None = None

    @contextmanager
    def measuring(self, _: Any, draft: str) -> Iterator[Any]:
        def run(tasks: Sequence[Task], level: int, namespace: str = "") -> Run:
            self.calls.append((draft, len(tasks), level, namespace))
            if (draft, level) == self.interrupted_at:
                raise KeyboardInterrupt
            return Run(
                wall_s=1.0 if draft == "none" else 0.5,
                answers=[f"#### {level}"] * len(tasks),
                completion_tokens=100,
                rounds=50,
                decoded_tokens=100,
                drafted_tokens=50,
                ttft_s=[0.1],
                itl_s=[0.01],
            )

        yield run


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    fake = FakeEngines()
    monkeypatch.setattr(sweep, "measuring", fake.measuring)
    return fake


def test_it_goes_on_where_it_was_interrupted(engines: FakeEngines, tmp_path: Path) -> None:
    command = ["--target", str(TINY), "--draft", "ngram", *SMALL, "--output", str(tmp_path)]
    engines.interrupted_at = ("ngram", 2)
    with pytest.raises(SystemExit, match="interrupted; the same command goes on"):
        main(command)
    assert [call[:1] + call[2:] for call in engines.calls] == [
        (draft, level, name.format(level))
        for draft in ("none", "ngram")
        for level in (1, 2)
        for name in ("warm-up at {}", "at {}")
        if (draft, level, name) != ("ngram", 2, "at {}")
    ]
    assert [call[1] for call in engines.calls[:4]] == [1, 3, 2, 3], "as many to warm up as will be open at once"
    path = tmp_path / "rows.jsonl"
    assert len(path.read_text().splitlines()) == 3
    with path.open("a") as file:
        file.write('{"bench": "swe')  # killed while it wrote
    engines.interrupted_at, engines.calls = None, []
    main(command)
    assert [call[:1] + call[2:3] for call in engines.calls] == [("ngram", 2)] * 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["draft"], row["batch"]) for row in rows] == [("none", 1), ("none", 2), ("ngram", 1), ("ngram", 2)]
    engines.calls = []
    main(command)
    assert not engines.calls, "everything is there"
    main([*command, "--seed", "1", "--concurrency", "2"])
    assert [call[:1] for call in engines.calls] == [("none",)] * 2 + [("ngram",)] * 2, "other settings, other rows"


@pytest.mark.usefixtures("engines")
def test_each_row_stands_beside_its_own_baseline(tmp_path: Path) -> None:
    config = SweepConfig(target=str(TINY), draft=["ngram"], concurrency="1,3", questions=3, output=str(tmp_path))
    rows = sweep.sweep(config)
    assert [row["speed_up"] for row in rows] == [None, None, 2.0, 2.0]
    assert [row["num_identical"] for row in rows] == [None, None, 3, 3]
    path = tmp_path / "rows.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["answers"][0] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = Rows(path, config.settings(config.target_name)).compared(config.drafts, [1, 3])
    assert [row["num_identical"] for row in changed] == [None, None, 3, 2]
    questions = read_questions(QUESTIONS, "heldout", 3)
    right = [sum(question.answer == level for question in questions) / 3 for level in (1, 3)]
    assert [row["accuracy"] for row in rows] == pytest.approx(right * 2, abs=1e-4)


def test_drafts_are_read_with_their_options(draft: Path) -> None:
    assert split_draft("a/b,depth=3,min-match=2,order=breadth") == (
        "a/b",
        {"depth": 3, "min_match": 2, "order": "breadth"},
    )
    assert label("runs/x/draft/best,depth=3") == "draft/best, depth=3"
    config = SweepConfig(draft=[f"{draft},depth=3,width=2"], concurrency="1", engine={"max_model_len": 99})
    assert config.target_name == str(TINY)
    serving = config.serving(config.draft[0], "x")
    assert (serving.drafter, serving.engine) == ({"depth": 3}, {"max_model_len": 99, "width": 2})
    for wrong, message in (
        ({"draft": ["ngram,nodes"]}, "draft is 'ngram,nodes'; write NAME or NAME,option=value"),
        ({"concurrency": "1,80"}, "questions is 64; a level of concurrency cannot have more"),
        ({"concurrency": "x"}, "concurrency is 'x'"),
        ({"mode": "grpc"}, "mode is 'grpc'"),
    ):
        with pytest.raises(ValueError, match=message):
            SweepConfig(target="x", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target is empty"):
        assert SweepConfig(draft=["ngram"]).target_name


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    row: dict[str, Any] = {"label": "none", "batch": 8, "tok_s": 12.34, "width": 1.0, "ms": 2.0, "accuracy": 0.055}
    row |= dict.fromkeys(("speed_up", "accept_length", "num_identical"))
    assert table([row]).splitlines()[2] == "| none | 8 | 12.3 | - | - | 1.00 | 2.00 | 5.5% | - |"
    plot([row], "a title", tmp_path / "plot.png")
    assert image.imread(tmp_path / "plot.png").std() > 0.01


def test_the_chat_template_has_its_variables() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    (prompt,) = encode(tokenizer, [Question("2 + 2?", Decimal(4))], {"add_generation_prompt": False})
    (asked,) = encode(tokenizer, [Question("2 + 2?", Decimal(4))], {})
    assert asked[: len(prompt)] == prompt
    assert len(asked) > len(prompt)
    assert "2 + 2?" in tokenizer.decode(prompt)
