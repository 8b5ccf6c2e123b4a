"""Drafts of every kind, run through `slipstream convert`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.data_tools.convert import main
from slipstream.models.drafts.base import write_draft
from slipstream.models.drafts.eagle3 import Eagle3, Eagle3Config
from slipstream.models.targets.decoder import load_config


class Runs:
    """Converts from folder to folder."""

    def __init__(self, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        self.target = target
        self.root = tmp_path
        self.capsys = capsys

    def target_fields(self) -> dict[str, Any]:
        """The config fields by which a draft names its target."""
        return {"target": str(self.target), "target_fingerprint": "f00", "tokenizer_hash": "ba5"}

    def convert(self, source: Path, layout: str, *options: str) -> tuple[Path, str]:
        """The output folder and the printed text; raises SystemExit where the program ends with a message."""
        output = self.root / f"{source.name}-{layout}"
        main(["--input", str(source), "--output", str(output), "--layout", layout, "--overwrite", *options])
        return output, self.capsys.readouterr().out

    def refused(self, source: Path, layout: str, *options: str) -> str:
        with pytest.raises(SystemExit):
            self.convert(source, layout, *options)
        return self.capsys.readouterr().err

    def assert_round_trips(self, draft: Path):
        """ours -> speculators -> speculators -> ours: the same files, bit by bit."""
        first, _ = self.convert(draft, "speculators")
        again, _ = self.convert(first, "speculators")
        back, _ = self.convert(again, "slipstream")
        assert_equal_checkpoints(draft, back)
        assert_equal_checkpoints(first, again)
        assert json.loads((back / "run.json").read_text())["converted"] == str(again)


def save_eagle3_draft(runs: Runs, aux_layers: Sequence[int], draft_vocab_size: int = 50, **fields: Any) -> Path:
    target = load_config(runs.target)
    torch.manual_seed(7)
    sizes = {"draft_vocab_size": draft_vocab_size, "aux_layers": tuple(aux_layers)}
    module = Eagle3(Eagle3Config.from_target(target, **sizes, **runs.target_fields() | fields))
    for parameter in module.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    module.set_vocabulary(torch.randperm(target.vocab_size)[:draft_vocab_size].sort().values)
    folder = runs.root / "draft"
    folder.mkdir()
    write_draft(module, module.state_dict(), folder, {})
    return folder


def assert_equal_checkpoints(first: Path, second: Path):
    assert json.loads((first / "config.json").read_text()) == json.loads((second / "config.json").read_text())
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].dtype == after[key].dtype
        assert torch.equal(before[key], after[key]), key
