"""Steps whose gradient is not finite: they have no effect, are counted, and end a run if there are many in a row."""

import itertools
import json
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from safetensors.torch import load_file
from torch.testing import assert_close

from slipstream.tests.train.runs import records, refusal, weights
from slipstream.train.checkpoints import Progress
from slipstream.train.eagle3 import Eagle3Training, main
from slipstream.train.loop import Loop
from slipstream.train.training import Metrics, add


def break_gradients(monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[int], bool]):
    """Makes the gradients of the n-th step, from 1, not finite where `is_broken(n)`; the loss stays as it is."""
    original_loss = Eagle3Training.loss
    steps = itertools.count(1)

    def loss(training, batch):
        value, metrics = original_loss(training, batch)
        zero = (training.draft.norm.weight * 0).sum()
        return value + (zero.sqrt() if is_broken(next(steps)) else zero), metrics  # sqrt has no derivative at 0

    monkeypatch.setattr(Eagle3Training, "loss", loss)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_whose_gradient_is_not_finite_has_no_effect(optimizer, tmp_path, arguments, monkeypatch, capsys):
    """The checkpoints before and after it hold the same weights and moments; the run goes on to its end."""
    options = {"optim__name": optimizer, "checkpoint__every": 1, "checkpoint__keep": 9}
    with monkeypatch.context() as patch:
        break_gradients(patch, lambda step: step == 3)
        main(arguments(tmp_path, **options))
    assert "step 3 is not finite (loss " in capsys.readouterr().out
    states = [tmp_path / name / "state" for name in ("step-2", "step-3")]
    assert_close(*(load_file(state / "model.safetensors") for state in states), rtol=0, atol=0)
    files = [file.name for file in states[0].glob("optimizer*.bin")]
    assert len(files) == (2 if optimizer == "muon" else 1)
    for file in files:
        assert_close(*(torch.load(state / file)["state"] for state in states), rtol=0, atol=0)
    lines = records(tmp_path)
    assert [line.get("skipped_steps") for line in lines] == [None, None, 1, 1, 1, 1]
    assert ["grad_norm" in line for line in lines] == [True, True, False, True, True, True]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())
    assert not all(torch.equal(weights(tmp_path)[name], tensor) for name, tensor in weights(tmp_path, 3).items())
    assert json.loads((tmp_path / "step-6" / "run.json").read_text())["skipped_steps"] == 1


def test_a_run_ends_after_ten_such_steps_in_a_row(tmp_path, arguments, monkeypatch):
    options = {"optim__steps": 40, "checkpoint__every": 20, "checkpoint__keep": 9, "evaluation__every": 40}
    break_gradients(monkeypatch, lambda step: 2 <= step <= 10 or step >= 15)
    error = refusal(arguments(tmp_path, **options))
    assert re.search(r"10 steps in a row, up to step 24, were not finite \(loss .*nan.*lower optim", error)
    assert records(tmp_path)[-1]["skipped_steps"] == 18
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path, 20).values())


def test_a_batch_that_is_not_new_adds_no_sum_that_is_not_finite():
    totals = Metrics()
    add(totals, {"loss": torch.tensor([float("nan"), 3.0])}, is_new=False)
    add(totals, {"loss": torch.tensor([2.0, 4.0])})
    assert totals["loss"].tolist() == [2.0, 4.0]


def test_deepspeed_skips_by_itself_or_the_run_ends():
    """It steps within `backward`; a version that does not look at the gradient has lost the weights by then."""
    deepspeed = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, is_main_process=True)
    optimizer = SimpleNamespace(step_was_skipped=True, step=lambda: None, zero_grad=lambda: None)
    loop = object.__new__(Loop)
    loop.accelerator = deepspeed
    loop.optimizers = [optimizer]
    loop.progress = Progress()
    loop.skipped_in_a_row = 0
    loop.schedule = SimpleNamespace(optim=SimpleNamespace(lr=0.1))
    for norm in (float("inf"), -1.0, 3.0):  # by version: the last one keeps that of the step before
        loop.update({"loss": 1.0, "grad_norm": norm})
    assert (loop.progress.skipped_steps, loop.skipped_in_a_row) == (3, 3)
    optimizer.step_was_skipped = False
    loop.update({"loss": 1.0})
    assert (loop.progress.skipped_steps, loop.skipped_in_a_row) == (3, 0)
    with pytest.raises(ValueError, match="this version of DeepSpeed has applied it"):
        loop.update({"loss": 1.0, "grad_norm": float("nan")})
