"""Whole runs of the training programs: tests start them, read their outputs, and compare two runs."""

import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor, nn

from slipstream.serve.llm import LLM, Generation
from slipstream.serve.request import SamplingParams
from slipstream.tests.train.conftest import SaveData
from slipstream.train import eagle3
from slipstream.train.interrupts import NUMBERS
from slipstream.train.loop import Loop
from slipstream.train.trackers import read_metrics

Arguments = Callable[..., list[str]]
Program = Callable[[list[str]], None]
PROMPTS = [[5, 9, 33, 71, 20, 8, 64], [90, 14, 2, 45, 45, 45, 17, 3, 60, 101, 7]]


def records(output: Path) -> list[dict[str, float]]:
    """metrics.jsonl without the fields that differ between two equal runs."""
    lines = read_metrics(output / "metrics.jsonl")
    varying = ("tokens_per_second", "wait_share")
    return [{name: value for name, value in line.items() if name not in varying} for line in lines]


def weights(output: Path, step: int = 6) -> dict[str, Tensor]:
    """The fp32 weights that the run would continue from."""
    return load_file(output / f"step-{step}" / "state" / "model.safetensors")


def assert_same_run(run: Path, expected: Path, last_step: int = 6):
    """Compares records and weights bit for bit."""
    assert records(run) == records(expected)
    for name, tensor in weights(expected, last_step).items():
        assert torch.equal(weights(run, last_step)[name], tensor), name


def assert_like_run(run: Path, expected: Path, last_step: int = 6):
    """Compares records and weights up to the order of sums."""
    for line, other in zip(records(run), records(expected), strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    for name, tensor in weights(expected, last_step).items():
        torch.testing.assert_close(weights(run, last_step)[name], tensor, rtol=1e-3, atol=1e-4)


def assert_same_gradients(loss: Tensor, expected: Tensor, draft: nn.Module):
    """Compares losses and the gradients of every parameter up to the order of sums."""
    torch.testing.assert_close(loss, expected.float(), rtol=1e-4, atol=1e-4)
    parameters = list(draft.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    references = torch.autograd.grad(expected, parameters)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-3 * float(reference.abs().max()))


def save_answers(target: Path, params: SamplingParams, save_data: SaveData) -> tuple[list[list[int]], Path]:
    """The target's answers to PROMPTS, and a dataset of these, to train and to evaluate on."""
    answers = [answer.tokens for answer in LLM(str(target)).generate(PROMPTS, params)]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    masks = [[i >= len(prompt) for i in range(len(text))] for prompt, text in zip(PROMPTS, texts, strict=True)]
    return answers, save_data(*[Dataset.from_dict({"input_ids": texts, "loss_mask": masks})] * 2)


def assert_served(target: Path, draft: Path):
    """The answers are the target's own."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    alone, drafted = (LLM(str(target), name).generate(PROMPTS, params) for name in ("none", str(draft)))
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in alone]


def give_tokenizer(source: Path, target: Path) -> Path:
    """The tokenizer that the data was prepared with; returns the target's folder."""
    for file in source.glob("tokenizer*"):
        shutil.copy(file, target)
    return target


def emitted_per_round(answers: list[Generation]) -> float:
    emitted = sum(answer.stats.completion_tokens - answer.stats.prefills for answer in answers)
    return emitted / sum(answer.stats.rounds for answer in answers)


def refusal(flags: list[str], main: Program = eagle3.main) -> str:
    """The sentence, or the status, that the program ends with."""
    with pytest.raises(SystemExit) as stop, redirect_stderr(io.StringIO()) as messages:
        main(flags)
    sys.stderr.write(messages.getvalue())
    return messages.getvalue().rstrip().splitlines()[-1] if stop.value.code == 1 else str(stop.value.code)


def run_interrupted(flags: list[str], number: signal.Signals):
    """Sends the signal in the third step, after which the run saves and ends with status 130."""
    train_step = Loop.train_step

    def interrupted_step(loop, interrupted):
        if loop.progress.step == 2:
            os.kill(os.getpid(), number)
        return train_step(loop, interrupted)

    with pytest.MonkeyPatch.context() as patch, heeded_signals():
        patch.setattr(Loop, "train_step", interrupted_step)
        assert refusal(flags) == "130"


@contextmanager
def heeded_signals() -> Iterator[None]:
    """Signals that end a run have their usual effect, here and in processes that begin meanwhile. A shell's background
    jobs ignore Ctrl-C, and nohup lets them ignore the end of a terminal."""
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def start_program(program: Path, *arguments: str, num_processes: int = 1, on_cpu: bool = True) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"ACCELERATE_USE_CPU": "true"} if on_cpu else {})
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command = [sys.executable, *(launcher if num_processes > 1 else ()), str(program), *arguments]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def end_program(program: subprocess.Popen[str]):
    printed, _ = program.communicate(timeout=300)
    assert program.returncode == 0, printed
