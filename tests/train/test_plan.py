"""`--dry_run`: the numbers of a plan against the real draft, target and run, and no files needed or left."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.tests.tables import each_case
from slipstream.tests.train.runs import records
from slipstream.train import dflash, eagle, eagle3, plan
from slipstream.train.plan import Memory

PROGRAMS = {"eagle3": eagle3.main, "dflash": dflash.main, "eagle": eagle.main}
NOT_OF = {"dflash": ("draft.ttt_steps",), "eagle": ("draft.aux_layers",), "eagle3": ()}


@pytest.fixture
def empty_target(target_path, tmp_path) -> Path:
    """The target's folder without its weights."""
    return Path(shutil.copytree(target_path, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_weights_are_read_and_nothing_is_written(program, tmp_path, empty_target, arguments, capsys):
    flags = arguments(tmp_path / "output", target=empty_target)
    flags = [flag for flag in flags if not flag.startswith(tuple(f"--{name}" for name in NOT_OF[program]))]
    flags += ["--draft.mask_token_id=7"] if program == "dflash" else []
    PROGRAMS[program]([*flags, "--dry-run"])
    assert not (tmp_path / "output").exists()
    printed = capsys.readouterr().out
    for word in (
        "draft ",
        "target ",
        "memory ",
        "zero3, fsdp",
        "aux hidden states ",
        "steps     6 of 2 rows",
        "tokens ",
        "rate      0.01 at most, adamw",
    ):
        assert word in printed


def test_counts_are_those_of_the_real_run(tmp_path, arguments, training, target_model, capsys):
    flags = arguments(tmp_path, optim__accumulation=2)
    flags = [flag for flag in flags if not flag.startswith("--optim.steps")] + ["--optim.epochs=2"]
    eagle3.main([*flags, "--dry-run"])
    printed = capsys.readouterr().out
    draft, target = (sum(x.numel() for x in module.parameters()) for module in (training.draft, target_model))
    assert f"draft     {draft / 1e6:.1f}M parameters, vocabulary 40, target states [2, 0, 4]" in printed
    assert f"target    {target / 1e6:.1f}M parameters" in printed
    steps, tokens = (
        int(re.search(pattern, printed)[1].replace(",", ""))
        for pattern in (r"steps +([\d,]+) of 4 rows", r", ([\d,]+) of them supervised")
    )
    eagle3.main(flags)
    (newest,) = sorted(tmp_path.glob("step-*"), key=lambda path: int(path.name[5:]))[-1:]
    assert int(newest.name[5:]) == steps
    trained = int(re.search(r'"tokens": (\d+)', (newest / "run.json").read_text())[1])
    assert tokens == pytest.approx(trained, rel=0.25), "rows are as full as they are on average"


@pytest.mark.parametrize("epochs", [1, 300])
def test_few_tokens_for_the_drafts_size_are_warned_about(epochs, tmp_path, arguments, capsys):
    """By the plan and by the run, alike."""
    flags = arguments(tmp_path / "run", optim__steps="null", optim__epochs=epochs, draft__head="frozen")
    eagle3.main([*flags, "--dry-run"])
    planned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    if epochs == 300:
        assert not planned
        return
    eagle3.main(flags)
    assert planned == [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    (count,) = (int(part.replace(",", "")) for part in re.findall(r"for ([\d,]+) trainable parameters", planned[0]))
    state = load_file(next((tmp_path / "run").glob("step-*")) / "state" / "model.safetensors")
    shapes = [
        tensor.shape.numel()
        for name, tensor in state.items()
        if name not in {"draft.lm_head.weight", "draft.d2t", "draft.t2d"}
    ]
    assert count == sum(shapes)
    tokens = int(re.search(r"few tokens: ([\d,]+) supervised", planned[0])[1].replace(",", ""))
    assert f"{tokens / count:.2g} each; a draft is likely to need 1: prepare more data" in planned[0]
    assert tokens == pytest.approx(records(tmp_path / "run")[-1]["tokens"], rel=0.01)
    eagle3.main([*arguments(tmp_path / "next", draft__head="frozen", init_from=tmp_path / "run" / "best"), "--dry-run"])
    assert "warning" not in capsys.readouterr().out


@each_case()
def test_bytes_by_sharding(sharding, num_gpus, bf16, expected):
    memory = Memory(target=10**9, activations=10**8, parameters=1000, moments=2000, bf16=bf16)
    assert memory.per_gpu(sharding, num_gpus) == 10**9 + 10**8 + 1000 * expected


@pytest.mark.parametrize(("num_gpus", "expected"), [(1, 8000), (2, 4000 + 500), (8, 1000 + 500)])
def test_layers_are_sharded_but_two_are_gathered(num_gpus, expected):
    sizes = {"activations": 0, "parameters": 0, "moments": 0, "bf16": True}
    memory = Memory(target=100, **sizes, shared_layers=8000, gathered=500)
    assert memory.per_gpu("zero2", num_gpus) == 100 + expected


def test_the_layers_are_what_is_sharded(tmp_path, arguments, target_model, capsys, monkeypatch):
    """In one process, as on the machine where a run is planned."""
    monkeypatch.setattr(plan, "_gb", lambda size: f"{size:.0f}")
    eagle3.main([*arguments(tmp_path, target_sharding="machine"), "--dry-run"])
    sizes = re.search(r"target (\d+) and (\d+) sharded, (\d+) gathered at a time", capsys.readouterr().out)
    layers = sum(4 * x.numel() for layer in target_model.get_decoder().layers for x in layer.parameters())
    total = sum(4 * x.numel() for x in target_model.parameters())
    assert [int(size) for size in sizes.groups()] == [total - layers, layers, layers // 2]  # two of four alike
