"""The trainer of speculators starts from a draft that `slipstream convert` wrote. Skipped where the package is not
installed; run by speculators_on_cpu.py, as it asks for an accelerator."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.drafts.source import drafter_of
from slipstream.models.targets.decoder import load_config
from slipstream.tests.data_tools.conversion import Runs, save_eagle3_draft
from slipstream.tests.random_drafts import save_random_dflash
from slipstream.tests.random_targets import SHAPE, save_random_target, target_states
from slipstream.tests.sources import ROOT

pytest.importorskip("speculators", reason="the package speculators is not installed")
LAYERS = (0, 1, 2)
ROWS = 10
LENGTH = 32
STEPS = 3
LR = 1e-4
CPU_FLAGS = ("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--num-workers", "0")
CPU = torch.device("cpu")
FLAGS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}


@pytest.fixture
def runs(tmp_path, capsys) -> Runs:
    save_random_target(Qwen3Config(**SHAPE, head_dim=16), tmp_path / "target")
    return Runs(tmp_path / "target", tmp_path, capsys)


def save_states(target: Path, folder: Path):
    """Random texts with the target's states, as their trainer reads them: the draft's, and the last before the norm."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    texts = torch.randint(3, 120, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": texts.tolist(), "loss_mask": [[1] * LENGTH] * ROWS, "seq_len": [LENGTH] * ROWS}
    Dataset.from_dict(rows).with_format("torch").save_to_disk(folder)
    (folder / "hidden_states").mkdir()
    for index, tokens in enumerate(texts):
        states = target_states(model, tokens)
        picked = torch.stack([states[layer] for layer in (*LAYERS, 3)], dim=1).bfloat16()
        save_file({"token_ids": tokens, "hidden_states": picked}, folder / "hidden_states" / f"hs_{index}.safetensors")


def train(kind: str, draft: Path, target: Path, output: Path) -> Path:
    """The checkpoint after a few steps."""
    save_states(target, output / "data")
    paths = {"data-path": output / "data", "save-path": output / "run", "log-dir": output / "logs"}
    options = {"speculator-type": kind, "verifier-name-or-path": target, "from-pretrained": draft, **paths}
    options |= {"total-seq-len": 2 * LENGTH, "train-data-ratio": 0.8, "on-missing": "raise", "epochs": 1, "lr": LR}
    options |= {"max-steps": STEPS, "max-anchors": 16}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-P", str(ROOT / "tests/data_tools/speculators_on_cpu.py"), *words, *CPU_FLAGS]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert process.returncode == 0, process.stderr[-3000:]
    return output / "run" / "0"  # the epoch's


def check_trained(network: Any, draft: Path, trained: Path, target: Path):
    """It is `draft` but for some small steps; a draft that began anew would share none of its weights."""
    values = json.loads((trained / "config.json").read_text())
    assert drafter_of(values, str(trained)) == values["speculators_model_type"]
    loaded = [load_draft(network, folder, load_config(target), torch.float32, CPU) for folder in (draft, trained)]
    assert loaded[1].config.aux_layers == LAYERS
    assert loaded[1].config.draft_vocab_size == 50
    before, after = (torch.cat([tensor.flatten() for tensor in module.parameters()]) for module in loaded)
    assert 0 < (after - before).norm() < 0.05 * before.norm()


def test_eagle3(runs):
    draft = save_eagle3_draft(runs, LAYERS, **FLAGS)
    converted, _ = runs.convert(draft, "speculators")
    trained = train("eagle3", converted, runs.target, runs.root)
    check_trained(Eagle3, draft, trained, runs.target)


def test_dflash(runs):
    draft = runs.root / "draft"
    fields = {"aux_layers": LAYERS, "draft_vocab_size": 50, **runs.target_fields()}
    save_random_dflash(runs.target, draft, **fields)
    converted, _ = runs.convert(draft, "speculators")
    trained = train("dflash", converted, runs.target, runs.root)
    check_trained(DFlash, draft, trained, runs.target)
