"""A run that is killed at any moment continues as if it had not been: weights, checkpoints and records, bit for bit."""

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import PreTrainedModel

from slipstream.models.files.checkpoint import read_json
from slipstream.models.files.outputs import step_folders
from slipstream.tests.pairwise import gate_of
from slipstream.tests.sources import ROOT
from slipstream.tests.train.runs import Program, records, start_program
from slipstream.train import dflash, eagle, eagle3, mtp
from slipstream.train.eagle3 import main

KILLS_IN_START = 3
KILLS_ANYWHERE = 8
KILLS_IN_WRITING = 9
LAST_STEP = 160


def answered(target: PreTrainedModel, count: int) -> Dataset:
    """Random prompts with the target's own greedy answers: a draft that learns is accepted more often."""
    torch.manual_seed(5)
    prompts = torch.randint(5, target.config.vocab_size, (count, 4))
    ids = target.generate(prompts, min_new_tokens=20, max_new_tokens=20, do_sample=False).tolist()
    return Dataset.from_dict({"input_ids": ids, "loss_mask": [[False] * 4 + [True] * 20] * count})


# A draft with each head and flag that changes what a run keeps -> its program and options.
BLOCKS = {"draft__num_layers": 2, "draft__block_size": 5, "draft__anchors": 6, "draft__mask_token_id": 7}
EVERY_HEAD: dict[str, tuple[Program, dict[str, Any]]] = {
    "eagle3": (eagle3.main, {"draft__ttt_steps": 2}),
    "eagle": (eagle.main, {"draft__ttt_steps": 2}),
    "mtp": (mtp.main, {"draft__ttt_steps": 2}),
    "dflash2": (dflash.main, BLOCKS | {"draft__conv": "true", "draft__selector_rank": 4}),
    "dspark": (
        dflash.main,
        BLOCKS | {"draft__sample_from_anchor": "true", "draft__markov_rank": 4, "draft__confidence_head": "true"},
    ),
    "lilicorr": (dflash.main, BLOCKS | {"draft__lilicorr": '{"candidate_topk": 4}'}),
}


def newest_step(output: Path) -> int:
    return max((int(path.name[5:]) for path in output.glob("step-*")), default=0)


def is_writing(output: Path) -> bool:
    return any(path.is_dir() for path in output.glob(".*"))


def wait(program: subprocess.Popen[str], is_over: Callable[[], bool]):
    deadline = time.monotonic() + 120
    while program.poll() is None and not is_over():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def wait_for_moment(program: subprocess.Popen[str], output: Path, kind: str, moments: random.Random):
    """`start`: while it starts or in its first steps. The others: a few checkpoints on, and while one is written, or
    anywhere in the steps, evaluations and checkpoints that follow."""
    target_step = newest_step(output) + moments.randint(1, 6)
    if kind == "start":
        end = time.monotonic() + moments.uniform(0, 5)
        wait(program, lambda: time.monotonic() > end or newest_step(output) >= target_step)
        return
    wait(program, lambda: newest_step(output) >= target_step)
    if kind == "writing":
        wait(program, lambda: is_writing(output))
    time.sleep(moments.uniform(0, 0.001 if kind == "writing" else 0.15))


def kinds(moments: random.Random) -> Iterator[str]:
    """The first kill comes before the first step, and most come after the first checkpoint."""
    later = ["start"] * (KILLS_IN_START - 1) + ["anywhere"] * KILLS_ANYWHERE + ["writing"] * KILLS_IN_WRITING
    moments.shuffle(later)
    yield from ("start", *later)


def assert_checkpoint(checkpoint: Path, expected: Path):
    """All that serves and all that a run continues from, against the run that nothing disturbed."""
    assert {path.name for path in checkpoint.rglob("*")} == {path.name for path in expected.rglob("*")}
    for file in expected.rglob("*.safetensors"):
        tensors = load_file(checkpoint / file.relative_to(expected))
        for name, tensor in load_file(file).items():
            assert torch.equal(tensors[name], tensor), (checkpoint, name)
    for file in expected.rglob("*.bin"):
        states = [
            torch.load(path, weights_only=True)["state"] for path in (checkpoint / file.relative_to(expected), file)
        ]
        for number, state in states[1].items():
            assert all(torch.equal(states[0][number][name], value) for name, value in state.items()), (
                checkpoint,
                number,
            )
    for file in expected.glob("state/progress.json"):
        progress = [json.loads((path / "state" / file.name).read_text())["progress"] for path in (checkpoint, expected)]
        assert progress[0] == progress[1]


def assert_whole(output: Path, expected: Path):
    """Every folder with a checkpoint's name equals the undisturbed run's, which kept all."""
    for folder in step_folders(output):
        assert_checkpoint(folder, expected / folder.name)
    best = output / "best"
    if best.exists():
        step = json.loads((best / "run.json").read_text())["step"]
        assert (best / "model.safetensors").read_bytes() == (
            expected / f"step-{step}" / "model.safetensors"
        ).read_bytes()


def test_what_a_kill_left_beyond_the_newest_is_dropped(tmp_path, arguments):
    """As if it had come when the last checkpoint was there and the older ones still were."""
    main(arguments(tmp_path, checkpoint__every=1, checkpoint__keep=9))
    assert len(step_folders(tmp_path)) == 6
    (tmp_path / ".step-1.tmp").mkdir()
    main(arguments(tmp_path, checkpoint__every=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "metrics.jsonl", "step-5", "step-6"]


@pytest.mark.parametrize("name", gate_of(((name,) for name in EVERY_HEAD), [("eagle3",), ("mtp",), ("dspark",)]))
def test_every_draft_continues_as_if_it_had_not_stopped(name, tmp_path, run_flags):
    """Every file of the next checkpoint, before the next evaluation."""
    program, options = EVERY_HEAD[name]
    options = options | {"optim__steps": 4, "checkpoint__every": 1, "evaluation__every": 2}
    program(run_flags(tmp_path / "whole", checkpoint__keep=9, **options))
    shutil.copytree(tmp_path / "whole" / "step-2", tmp_path / "stopped" / "step-2")
    program(run_flags(tmp_path / "stopped", checkpoint__keep=9, **options))
    checkpoint = tmp_path / "stopped" / "step-3"
    expected = tmp_path / "whole" / "step-3"
    assert_checkpoint(checkpoint, expected)
    for file in ("config.json", "run.json"):
        assert read_json(checkpoint / file) == read_json(expected / file)
    assert bool(read_json(checkpoint / "state" / "progress.json")["progress"]["fitted"]) == (name == "dspark")


@pytest.mark.slow
def test_killed_twenty_times(tmp_path, arguments, save_data, target_model):
    documents = answered(target_model, 8)
    changes = {
        "data__path": save_data(documents, documents),
        "draft__vocabulary": "null",
        "optim__steps": LAST_STEP,
        "evaluation__every": 4,
        "checkpoint__every": 2,
    }
    undisturbed = tmp_path / "undisturbed"
    output = tmp_path / "killed"
    main(arguments(undisturbed, **changes, checkpoint__keep=LAST_STEP))
    assert len({line["eval_accept_length"] for line in records(undisturbed) if "eval_accept_length" in line}) > 3
    moments = random.Random(7)
    num_in_writing = 0
    num_later = 0
    for kind in kinds(moments):
        program = start_program(ROOT / "train" / "eagle3.py", *arguments(output, **changes))
        wait_for_moment(program, output, kind, moments)
        program.kill()
        printed, _ = program.communicate()
        assert program.returncode == -9, f"no kill: the run was at step {newest_step(output)}\n{printed}"
        num_later += newest_step(output) > 0
        num_in_writing += is_writing(output)
        assert_whole(output, undisturbed)
    assert num_later >= 15
    assert num_in_writing > 0
    main(arguments(output, **changes))
    assert records(output) == records(undisturbed)
    assert_whole(output, undisturbed)
    assert_checkpoint(output / "best", undisturbed / "best")
    assert sorted(path.name for path in output.iterdir()) == ["best", "metrics.jsonl", "step-158", "step-160"]
