"""How Muon and AdamW share a draft's parameters, and that a run with both continues as if it had not stopped."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.train.eagle3 import Eagle3Training, main
from slipstream.train.optimizers import build_optimizers
from slipstream.train.options import OptimOptions


def test_adamw_has_everything(training: Eagle3Training) -> None:
    (optimizer,) = build_optimizers(training, OptimOptions())
    assert type(optimizer) is torch.optim.AdamW
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in training.parameters()
    }


def test_muon_has_the_hidden_matrices_only(training: Eagle3Training) -> None:
    names = {id(parameter): name for name, parameter in training.named_parameters()}
    adamw, muon = build_optimizers(training, OptimOptions(name="muon"))
    parts = [sorted(names[id(p)] for group in part.param_groups for p in group["params"]) for part in (adamw, muon)]
    assert sorted(parts[0] + parts[1]) == sorted(names.values())
    assert parts[1] == [
        "draft.fc.weight",
        "draft.midlayer.mlp.down_proj.weight",
        "draft.midlayer.mlp.gate_up_proj.weight",
        "draft.midlayer.self_attn.o_proj.weight",
        "draft.midlayer.self_attn.qkv_proj.weight",
    ]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_continues_bit_for_bit(tmp_path: Path, arguments: Callable[..., list[str]], name: str) -> None:
    main(arguments(tmp_path, optim__name=name))
    weights = load_file(tmp_path / "step-6" / "state" / "model.safetensors")
    shutil.rmtree(tmp_path / "step-6")
    main(arguments(tmp_path, optim__name=name))
    for key, tensor in load_file(tmp_path / "step-6" / "state" / "model.safetensors").items():
        assert torch.equal(tensor, weights[key]), key
