"""Trains a draft for the bundled target and serves with it: answers, token map, training, comparison, report.

    python bench/demo.py [--drafter eagle3] [--target hybrid] [--output runs/demo]

Each step is an ordinary command of this repository, printed before it runs, with as many threads as there are cores
that nothing else uses. Ends with a table, a plot, report.json and the training run's page in the output folder. The
same command continues a demo that was interrupted.
"""

import gzip
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream import runtime
from slipstream.bench.demo_report import Comparison, write_report
from slipstream.bench.server import running_server
from slipstream.config import parse
from slipstream.models.files.atomic import remove_folder
from slipstream.models.files.outputs import CHECKPOINT, DATASET, STEP, FolderKind, Inputs, check_output_folder
from slipstream.serve.load import LoadResult, run_load
from slipstream.serve.options import check_at_least
from slipstream.train.trackers import read_metrics

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "assets"
TARGETS = {
    "dense": ASSETS / "tiny-target",
    "moe": ASSETS / "tiny-moe-target",
    "hybrid": ASSETS / "tiny-hybrid-target",
}
QUESTIONS = ASSETS / "gsm8k.jsonl.gz"
QUESTIONS_FILE = "questions.jsonl"
VOCABULARY = 1024  # tokens that the draft may guess
MARKER = "demo.json"  # written first; identifies a demo's folder
MADE = FolderKind(
    "an earlier demo",
    (MARKER,),
    (
        r"(questions|train|heldout|answers|samples)\.jsonl|(answers|samples)\.jsonl\.(dropped|report)",
        r"token_map\.safetensors|report\.json|(training|acceptance)\.png|draft/(metrics\.jsonl|report\.html)",
        r"target/[\w.-]+\.(json|jinja|safetensors|txt)|accept/(answers\.jsonl|accept\.(json|png))",
        *DATASET.below("dataset"),
        *CHECKPOINT.below("draft/best"),
        *STEP.below(r"draft/step-\d+"),
    ),
)
LEVELS = {1: 16, 8: None}  # requests at once: how many of the held-out questions, since one at a time is slow
CHOSEN_THREADS = os.environ.get("OMP_NUM_THREADS")
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Options of the demo."""

    drafter: str = "eagle3"
    """Draft to train: a program of train/ with a recipe configs/DRAFTER/tiny.yaml, or a recipe tiny-DRAFTER.yaml."""
    target: Literal["dense", "moe", "hybrid"] = "dense"
    """Bundled target: dense, a mixture of experts, or a hybrid of gated delta nets and attention."""
    output: str = "runs/demo"
    """Folder for all results. Replaces an earlier demo, or continues it where it was interrupted."""
    train_questions: int = 1100
    """Questions whose answers the draft learns from."""
    heldout_questions: int = 40
    """Questions for evaluation; neither target nor draft has seen them."""
    max_tokens: int = 192
    """Longest answer."""

    @property
    def target_path(self) -> Path:
        return TARGETS[self.target]

    def __post_init__(self) -> None:
        check_drafter(self.drafter, "tiny")
        check_at_least(self, 1, "train_questions", "heldout_questions", "max_tokens")


def recipes(target: str) -> dict[str, Path]:
    """The recipes for a target, by the draft that they train, in folders that are called as their programs."""
    paths = sorted((ROOT / "configs").glob(f"*/{target}*.yaml"))
    return {path.stem.removeprefix(target).removeprefix("-") or path.parent.name: path for path in paths}


def check_drafter(drafter: str, target: str) -> None:
    """Raises ValueError unless `target` has a recipe for such a draft."""
    if drafter not in recipes(target):
        raise ValueError(f"drafter is {drafter!r}; recipes exist for {', '.join(sorted(recipes(target)))}")


def demo(config: DemoConfig) -> None:
    began = time.perf_counter()
    output = Path(config.output)
    rows = choose_questions(bundled_rows(QUESTIONS), train=config.train_questions, heldout=config.heldout_questions)
    open_output(config.output, asdict(config), {"target": [str(config.target_path)], "data": [str(QUESTIONS)]})
    write_questions(rows, output)
    questions = [row["messages"][0]["content"] for row in rows if row["split"] == "heldout"]
    with step("1/5 The target answers the questions itself"):
        program("data_tools/regenerate.py", data=output / QUESTIONS_FILE, target=config.target_path,
                output=output / "answers.jsonl", max_tokens=config.max_tokens,
                **{"engine.max_running": 128})  # fmt: skip
        prepare(["answers.jsonl"], config.target_path, output)
    accelerate = Path(sys.executable).parent / "accelerate"
    launcher = [str(accelerate), "launch", "--config_file", "configs/accelerate/cpu.yaml"]
    draft = train(recipes("tiny")[config.drafter], config.target_path, output, launcher, VOCABULARY)
    with step("4/5 Serve the held-out questions, without the draft and with it"):
        baseline = measure("none", questions, config)
        drafted = measure(str(draft), questions, config)
    with step("5/5 Report"):
        program("train/report.py", run=output / "draft")
        comparison = Comparison(
            drafter=config.drafter,
            baseline=baseline,
            drafted=drafted,
            history=read_metrics(output / "draft" / "metrics.jsonl"),
            total_s=time.perf_counter() - began,
        )
        write_report(comparison, output)
    print_next_steps(draft, output, time.perf_counter() - began)


def open_output(output: str, options: dict[str, Any], inputs: Inputs) -> None:
    """Makes the output folder and notes the options in it; what an interrupted demo with these options has made stays.
    Raises ValueError if it holds files of others."""
    check_output_folder(output, MADE, inputs, overwrite=True)
    folder = Path(output).resolve()
    note = json.dumps(options, indent=2) + "\n"
    marker = folder / MARKER
    if marker.exists() and marker.read_text() == note and not (folder / "report.json").exists():
        print(f"continues the demo in {output}, which was interrupted; to begin anew, remove that folder", flush=True)
        return
    if folder.exists():
        remove_folder(folder)
    folder.mkdir(parents=True)
    marker.write_text(note)


def bundled_rows(file: Path) -> Iterator[Row]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def choose_questions(rows: Iterable[Row], *, train: int, heldout: int) -> list[Row]:
    """The first rows of both splits, in their order. Raises ValueError if they are fewer."""
    sizes = {"heldout": heldout, "train": train}
    counts = Counter[str]()
    questions = []
    for row in rows:
        counts[row["split"]] += 1
        if counts[row["split"]] <= sizes[row["split"]]:
            questions.append(row)
    for split, count in sizes.items():
        if count > counts[split]:
            raise ValueError(f"{split}_questions is {count}; the bundled questions are {counts[split]}")
    return questions


def write_questions(rows: Sequence[Row], output: Path) -> None:
    (output / QUESTIONS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


def split_answers(output: Path, names: Sequence[str]) -> tuple[Path, Path]:
    """Splits files of answers into those for training and evaluation, as their questions are split."""
    split_of = {row["id"]: row["split"] for row in map(json.loads, (output / QUESTIONS_FILE).open())}
    paths = {split: output / f"{split}.jsonl" for split in ("train", "heldout")}
    lines: dict[str, list[str]] = {split: [] for split in paths}
    for name in names:
        with (output / name).open() as answers:
            for line in answers:
                row = json.loads(line)
                lines[split_of[row.get("sample_of", row["id"])]].append(line)
    for split, path in paths.items():
        path.write_text("".join(lines[split]))
    return paths["train"], paths["heldout"]


@contextmanager
def step(title: str) -> Iterator[None]:
    """Prints what begins and how long it took; sets the threads of the programs in between."""
    print(f"\n=== {title}", flush=True)
    os.environ["OMP_NUM_THREADS"] = CHOSEN_THREADS or str(runtime.free_cores())  # accelerate would give one thread
    began = time.perf_counter()
    yield
    print(f"--- {duration(time.perf_counter() - began)}", flush=True)


def duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min {remainder} s"


def program(script: str, **options: Any) -> None:
    flags = [f"--{name}={value}" for name, value in options.items()]
    call([sys.executable, script, *flags])


def prepare(names: Sequence[str], target: Path, output: Path) -> None:
    """Makes the dataset from files of answers, unless it is there."""
    if (output / "dataset").exists():
        return
    train_file, heldout_file = split_answers(output, names)
    program("data_tools/prepare.py", data=train_file, heldout_data=heldout_file, target=target,
            output=output / "dataset")  # fmt: skip


def train(recipe: Path, target: Path, output: Path, launcher: Sequence[str], vocabulary: int) -> Path:
    """Runs steps 2 and 3 and returns the best checkpoint. `launcher`: words that begin the command; `vocabulary`: how
    many tokens the draft may guess."""
    token_map = output / "token_map.safetensors"
    with step("2/5 Which tokens does it use?"):
        if not token_map.exists():
            program("data_tools/frequency_map.py", data=output / "dataset", target=target, size=vocabulary,
                    output=token_map)  # fmt: skip
    with step("3/5 Train the draft"):
        call([*launcher, f"train/{recipe.parent.name}.py", "--config", relative(str(recipe)),
              "--target", relative(str(target)), "--data.path", str(output / "dataset"),
              "--draft.vocabulary", str(token_map), "--output", str(output / "draft")])  # fmt: skip
    return output / "draft" / "best"


def call(command: Sequence[str]) -> None:
    print_command(command)
    subprocess.run(command, check=True, cwd=ROOT)


def print_command(command: Sequence[str]) -> None:
    words = [relative(word) for word in command]
    print("$ " + shlex.join(words), flush=True)


def relative(word: str) -> str:
    return word.replace(f"{ROOT}/", "")


def measure(draft: str, questions: Sequence[str], config: DemoConfig) -> dict[int, LoadResult]:
    """Results by concurrency."""
    prompts = [[{"role": "user", "content": question}] for question in questions]
    command = [str(Path(sys.executable).parent / "serve"), "--target", str(config.target_path), "--draft", draft]
    print_command(command)
    with running_server(command) as server:
        return {
            concurrency: run_load(
                server.url,
                prompts[:count],
                concurrency=concurrency,
                num_warmup=2,
                max_tokens=config.max_tokens,
                temperature=0.0,
            )
            for concurrency, count in LEVELS.items()
        }


def print_next_steps(draft: Path, output: Path, seconds: float) -> None:
    print(
        f"\nDone in {duration(seconds)}. Look at:\n"
        f"  {output}/draft/report.html     the training run: curves, answers, options\n"
        f"  {output}/acceptance.png        accept rates and speed-up\n"
        f"  {output}/report.json           the figures above\n"
        "Try next:\n"
        f"  .venv/bin/serve --draft {draft}           # then open http://127.0.0.1:8000/ in a browser:\n"
        "                                     a chat that shows which words the draft guessed\n"
        f"  .venv/bin/serve --draft {draft} --help    # every option, those of this draft included\n"
        '  README.md, "A real model": the same steps for a model from the hub'
    )


def main(argv: Sequence[str] | None = None) -> None:
    config = parse(DemoConfig, argv, prog="demo", description="Trains a draft for the bundled target and measures it.")
    with errors_as_messages():
        demo(config)


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Ends the program with a sentence and status 1 where a command failed or options do not fit."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"demo: this command failed with status {error.returncode}: {shlex.join(error.cmd)}"
        ) from error
    except (ValueError, OSError) as error:
        raise SystemExit(f"demo: error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # the interrupted command has printed its own message


if __name__ == "__main__":
    main()
