"""Quantised targets, through the real programs: drafts learn and start from them."""

import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.models.targets.decoder import load_config, load_target
from slipstream.tests.quantized_targets import CONFIG, LAYOUTS, per_tensor, save_quantized
from slipstream.tests.random_targets import save_random_target
from slipstream.tests.train.runs import assert_served, give_tokenizer, records
from slipstream.train import dflash, eagle3, plan

BLOCKS = {"num_layers": 2, "block_size": 5, "mask_token_id": 7, "anchors": 6}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, target_path) -> Path:
    """With the tokenizer that the data was prepared with."""
    folder = tmp_path_factory.mktemp("targets") / "plain"
    save_random_target(CONFIG, folder)
    return give_tokenizer(target_path, folder)


def quantise(name: str, plain: Path, folder: Path) -> dict[str, Tensor]:
    """Writes the target in a layout to `folder`, and beside it the same weights in 32 bits. Returns these."""
    values = save_quantized(LAYOUTS[name], plain, folder)
    shutil.copytree(plain, folder.with_name("same"))
    save_file(values, folder.with_name("same") / "model.safetensors", metadata={"format": "pt"})
    return values


@pytest.mark.parametrize("name", ["packed", "fp8-blocks"])
def test_drafts_learn_from_quantised_weights(name, plain, tmp_path, arguments):
    """As from the same weights in 32 bits; FP8 rounds inputs, too. The draft serves the target."""
    quantise(name, plain, tmp_path / name)
    changes = {"draft__vocabulary": "null", "optim__steps": 3, "checkpoint__every": 3}
    for target in (name, "same"):
        eagle3.main(arguments(tmp_path / f"{target}-run", target=tmp_path / target, **changes))
    tolerance = 1e-4 if LAYOUTS[name].inputs == "exact" else 0.05
    lines = [records(tmp_path / f"{target}-run") for target in (name, "same")]
    for record, expected in zip(*lines, strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert (lines[0] != lines[1]) or LAYOUTS[name].inputs == "exact"
    assert_served(tmp_path / name, tmp_path / f"{name}-run" / "step-3")


def test_a_draft_starts_from_dequantised_weights(plain, tmp_path, arguments):
    """Layers and the final norm; its embedding is the target's, which is never quantised."""
    values = quantise("fp8-blocks", plain, tmp_path / "fp8")
    changes = {f"draft__{name}": value for name, value in BLOCKS.items()}
    flags = arguments(tmp_path / "run", target=tmp_path / "fp8", optim__steps=1, checkpoint__every=1, **changes)
    dflash.main([*(flag for flag in flags if "ttt_steps" not in flag), "--optim.lr=1e-5"])
    draft = load_file(tmp_path / "run" / "step-1" / "model.safetensors")
    for layer, target_layer in ((0, 2), (1, 3)):
        for part in ("self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            weight, expected = (
                x[f"{p}layers.{i}.{part}.weight"] for x, p, i in ((draft, "", layer), (values, "model.", target_layer))
            )
            torch.testing.assert_close(weight.float(), expected.float(), rtol=0.01, atol=1e-3)


def test_a_quantised_head_is_dequantised_for_the_draft(plain, tmp_path, arguments):
    quantise("fp8-tensor", plain, tmp_path / "fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(file)
    quantised, head = per_tensor(tensors["lm_head.weight"])
    save_file(tensors | {f"lm_head.{end}": tensor for end, tensor in quantised.items()}, file)
    changes = {"draft__vocabulary": "null", "optim__steps": 1, "checkpoint__every": 1, "optim__lr": 1e-5}
    eagle3.main(arguments(tmp_path / "run", target=tmp_path / "fp8", **changes))
    draft = load_file(tmp_path / "run" / "step-1" / "model.safetensors")
    torch.testing.assert_close(draft["lm_head.weight"].float(), head, rtol=0.01, atol=1e-3)
    assert draft["lm_head.weight"].dtype.itemsize >= 2


def test_a_plan_counts_quantised_weights(plain, tmp_path, arguments, capsys, monkeypatch):
    """As the decoder keeps them; the config's files say what is quantised."""
    monkeypatch.setattr(plan, "_gb", lambda size: f"{size:.0f}")
    quantise("fp8-blocks", plain, tmp_path / "fp8")
    decoder = load_target(tmp_path / "fp8", load_config(tmp_path / "fp8"), torch.float32, torch.device("cpu"))
    expected = sum(x.nbytes for x in chain(decoder.parameters(), decoder.buffers()))
    (tmp_path / "fp8" / "model.safetensors").unlink()
    eagle3.main([*arguments(tmp_path, target=tmp_path / "fp8", draft__vocabulary="null"), "--dry-run"])
    printed = capsys.readouterr().out
    assert f"target {expected}, activations" in printed
    assert "parameters in fp8 in blocks, others float32" in printed
