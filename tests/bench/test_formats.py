"""Times of formats on a CPU, and converted checkpoints, which the target loads."""

from pathlib import Path

import pytest
import torch

from slipstream.bench.formats import FormatsConfig, formats
from slipstream.bench.lines import read_lines
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.tests.quantized_targets import CONFIG
from slipstream.tests.random_targets import save_random_target

CPU = torch.device("cpu")


def test_every_format_is_timed(tmp_path: Path) -> None:
    sizes = {"hidden": 256, "intermediate": 384, "qkv": 512, "layers": 1, "rows": [1, 3], "device": "cpu"}
    formats(FormatsConfig(**sizes, output=str(tmp_path / "lines.jsonl")))
    lines = read_lines(tmp_path / "lines.jsonl")
    names = ["bf16", "fp8", "fp8 blocks", "int4", "int4 zeros"]
    assert [(line["format"], line["rows"]) for line in lines] == [(name, rows) for name in names for rows in (1, 3)]
    assert all(line["of_bf16"] > 0 and line["floor_ms"] > 0 for line in lines)
    with pytest.raises(ValueError, match="formats holds 'int3'; choose of bf16, fp8"):
        FormatsConfig(formats=["int3"])


@pytest.mark.parametrize("name", ["fp8 blocks", "int4", "int4 zeros"])
def test_converted_checkpoints_are_close(name: str, tmp_path: Path) -> None:
    save_random_target(CONFIG, tmp_path / "plain")
    formats(FormatsConfig(convert=str(tmp_path / "plain"), to=name, folder=str(tmp_path / "new")))
    plain, found = (
        load_target(folder, load_config(folder), torch.float32, CPU)
        for folder in (tmp_path / "plain", tmp_path / "new")
    )
    for first, second in zip(plain.layers, found.layers, strict=True):
        weight, rounded = first.mlp.down_proj.weight, second.mlp.down_proj.dequantized()
        assert 0 < (weight - rounded).norm() < (0.04 if name == "fp8 blocks" else 0.15) * weight.norm()
