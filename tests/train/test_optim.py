"""Steps, rows and learning rate of a run, for any number of processes, against a walk through it;
how Muon and AdamW share a draft's parameters."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from slipstream.tests.tables import each_case
from slipstream.train import optim
from slipstream.train.checkpoints import Progress
from slipstream.train.optim import FullPrecisionMuon, Schedule, build_optimizers, default_lr, lr_factor, orthogonalise
from slipstream.train.options import OptimOptions


def schedule(num_rows: int, *, size: int = 2, processes: int = 1, **optim: Any) -> Schedule:
    data = SimpleNamespace(batch_size=size, row_ranks=1)
    options = SimpleNamespace(data=data, optim=OptimOptions(**{"lr": 1e-4, **optim}))
    return Schedule.of(options, num_rows, processes)


def walk(plan: Schedule, progress: Progress, num_steps: int | None = None) -> list[tuple[int, float]]:
    """(rows, lr) of each step up to the end, or of `num_steps`; changes `progress` as a run does."""
    steps = []
    while progress.step < plan.num_steps(progress) and len(steps) != num_steps:
        steps.append((plan.next_rows(progress), plan.lr(progress)))
        progress.rows += steps[-1][0]
        progress.step += 1
    return steps


@pytest.mark.parametrize(("num_rows", "epochs", "accumulation"), [(31, 1, 1), (31, 3, 2), (30, 2, 3), (8, 1, 4)])
def test_epochs_end_at_their_last_row(num_rows, epochs, accumulation):
    steps = walk(schedule(num_rows, epochs=epochs, accumulation=accumulation), Progress())
    rows = [count for count, _ in steps]
    assert sum(rows) == epochs * num_rows
    assert all(count == 2 * accumulation for count in rows[:-1])
    expected = [
        1e-4 * lr_factor(step, len(steps), math.ceil(0.03 * len(steps)), OptimOptions()) for step in range(len(steps))
    ]
    assert [lr for _, lr in steps] == expected


@pytest.mark.parametrize("numbers", [(1, 4, 2), (3, 1, 5)])
@pytest.mark.parametrize(("warmup", "shape"), [(0.0, "cosine"), (0.4, "cosine"), (0.1, "wsd"), (0.1, "constant")])
def test_epochs_end_there_on_any_numbers_of_processes(numbers, warmup, shape, monkeypatch):
    """And the rate is, everywhere, within two steps' change of that of one process at the same row."""
    monkeypatch.setattr(optim, "WARMUP", warmup)
    settings = {"epochs": 2, "schedule": shape}
    alone = walk(schedule(501, size=1, **settings), Progress())
    progress = Progress()
    for number, num_steps in zip(numbers, (37, 53, None), strict=True):
        plan = schedule(501, size=1, processes=number, **settings)
        first = progress.rows
        rates = [lr for _, lr in walk(plan, progress, num_steps)]
        largest = 2 * number * max(abs(b - a) for (_, a), (_, b) in zip(alone, alone[1:], strict=False))
        for index, rate in enumerate(rates):
            assert 0 < rate <= 1e-4
            assert rate == pytest.approx(alone[first + index * number][1], abs=largest)
    assert progress.rows == 2 * 501
    assert progress.step == plan.num_steps(progress)


def test_a_number_of_steps_stays_on_any_number_of_processes():
    progress = Progress()
    first = walk(schedule(501, steps=20), progress, 12)
    second = walk(schedule(501, steps=20, processes=4), progress)
    assert [lr for _, lr in first + second] == [1e-4 * lr_factor(step, 20, 1, OptimOptions()) for step in range(20)]
    assert progress.rows == 12 * 2 + 8 * 8


@pytest.mark.parametrize("length", ["steps", "epochs"])
@pytest.mark.parametrize("shape", ["constant", "wsd", "cosine", "linear"])
def test_a_longer_run_goes_on_with_the_rows_and_the_rate_of_a_plan_so_long(shape, length, monkeypatch):
    """With the warm-up of its first plan. After a constant rate, or a decay that has not begun, nothing jumps."""
    monkeypatch.setattr(optim, "WARMUP", 0.1)
    settings = {"schedule": shape}
    short, middle, full = (
        schedule(40, **settings, **{length: value}) for value in ({"steps": (30, 60, 90), "epochs": (2, 3, 5)}[length])
    )
    progress = Progress(first_length={"steps": 30, "epochs": 2}[length])
    steps = walk(short, progress, 20) + walk(middle, progress, 20) + walk(full, progress)
    num_steps = len(steps)
    assert num_steps == {"steps": 90, "epochs": 100}[length]
    assert [rows for rows, _ in steps] == [2] * num_steps
    warmup = {"steps": 3, "epochs": 4}[length]
    expected = [1e-4 * lr_factor(step, num_steps, warmup, OptimOptions(**settings)) for step in range(num_steps)]
    assert [lr for _, lr in steps[40:]] == expected[40:]
    assert ([lr for _, lr in steps] == expected) == (shape in {"constant", "wsd"})
    sentence = full.extension(
        Progress(step=40, rows=80, first_length=progress.first_length), {length: getattr(middle.optim, length)}
    )
    assert f"continues at step 40 with optim.{length} {getattr(full.optim, length)}, before " in sentence
    assert ("stays 0.0001" in sentence) == (shape in {"constant", "wsd"})
    assert ("jumps from" in sentence) == (shape in {"cosine", "linear"})


def test_learning_rate_is_torchs_after_the_warm_up():
    first, second, third, last = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0) for _ in range(4))
    stages = [lr_scheduler.ConstantLR(last, 1.0), lr_scheduler.LinearLR(last, 1.0, 0.0, total_iters=20)]
    oracles = {
        "cosine": lr_scheduler.CosineAnnealingLR(first, T_max=90),
        "linear": lr_scheduler.LinearLR(second, 1.0, 0.0, total_iters=90),
        "constant": lr_scheduler.ConstantLR(third, 1.0),
        "wsd": lr_scheduler.SequentialLR(last, stages, milestones=[70]),
    }
    for name, oracle in oracles.items():
        options = OptimOptions(schedule=name)
        for step in range(10, 100):
            assert lr_factor(step, 100, 10, options) == pytest.approx(oracle.get_last_lr()[0], abs=1e-9)
            oracle.optimizer.step()
            oracle.step()
        rising = [lr_factor(step, 100, 10, options) for step in range(10)]
        assert rising == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert schedule(10, steps=3, schedule="linear").lr(Progress(step=2)) == pytest.approx(1e-4 * (1 - 1 / 2))


def test_adamw_has_everything(training):
    (optimizer,) = build_optimizers(training, OptimOptions(name="adamw"))
    assert type(optimizer) is torch.optim.AdamW
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in training.parameters()
    }


@each_case()
def test_default_rate_follows_width_and_tokens(name, width, tokens, expected):
    assert default_lr({"muon": 0.02, "adamw": 0.004}, name, width, tokens, 0.25) == pytest.approx(expected)


def test_muon_has_the_hidden_matrices_only(training):
    names = {id(parameter): name for name, parameter in training.named_parameters()}
    adamw, muon = build_optimizers(training, OptimOptions(name="muon", momentum=0.7))
    assert (muon.defaults["momentum"], muon.defaults["weight_decay"]) == (0.7, 0.0)
    parts = [sorted(names[id(p)] for group in part.param_groups for p in group["params"]) for part in (adamw, muon)]
    assert sorted(parts[0] + parts[1]) == sorted(names.values())
    assert parts[1] == [
        "draft.fc.weight",
        "draft.midlayer.mlp.down_proj.weight",
        "draft.midlayer.mlp.gate_up_proj.weight",
        "draft.midlayer.self_attn.o_proj.weight",
        "draft.midlayer.self_attn.qkv_proj.weight",
    ]


def test_adamw_has_vectors_matrices_of_one_row_or_column_and_heads():
    shapes = {"norm": (8,), "gate": (1, 8), "column": (8, 1), "lm_head": (16, 8), "fc": (8, 24), "narrow": (2, 8)}
    model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})
    adamw, muon = build_optimizers(model, OptimOptions(name="muon"))
    names = {id(parameter): name for name, parameter in model.items()}
    parts = [{names[id(p)] for group in part.param_groups for p in group["params"]} for part in (adamw, muon)]
    assert parts == [{"norm", "gate", "column", "lm_head"}, {"fc", "narrow"}]


def test_muon_moves_alike_in_full_precision():
    """CPUs without bf16 products: torch's own iterations are the oracle, up to bf16 rounding."""
    steps = []
    for kind in (torch.optim.Muon, FullPrecisionMuon):
        generator = torch.Generator().manual_seed(0)
        matrix = nn.Parameter(torch.randn(24, 40, generator=generator))
        before = matrix.detach().clone()
        optimizer = kind([matrix], lr=0.1)
        matrix.grad = torch.randn(24, 40, generator=generator)
        optimizer.step()
        steps.append(matrix.detach() - before)
    assert (steps[0] - steps[1]).norm() < 0.02 * steps[0].norm()
    expected = orthogonalise(torch.eye(3, 5), (1.5, -0.5, 0.0), 30, 1e-7)  # the cubic iteration converges
    assert torch.allclose(expected @ expected.T, torch.eye(3), atol=1e-4)
