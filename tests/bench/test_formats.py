"""Times of formats on a CPU."""

from pathlib import Path

import pytest

from slipstream.bench.formats import FormatsConfig, formats
from slipstream.bench.lines import read_lines


def test_every_format_is_timed(tmp_path: Path) -> None:
    sizes = {"hidden": 256, "intermediate": 384, "qkv": 512, "layers": 1, "rows": [1, 3], "device": "cpu"}
    formats(FormatsConfig(**sizes, output=str(tmp_path / "lines.jsonl")))
    lines = read_lines(tmp_path / "lines.jsonl")
    names = ["bf16", "fp8", "fp8 blocks", "int4", "int4 zeros"]
    assert [(line["format"], line["rows"]) for line in lines] == [(name, rows) for name in names for rows in (1, 3)]
    assert all(line["of_bf16"] > 0 and line["floor_ms"] > 0 for line in lines)
    with pytest.raises(ValueError, match="formats holds 'int3'; choose of bf16, fp8"):
        FormatsConfig(formats=["int3"])
