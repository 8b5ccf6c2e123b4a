"""Times of formats on a CPU."""

from pathlib import Path

import pytest

from slipstream.bench.formats import FORMATS, FormatsConfig, formats
from slipstream.bench.lines import read_lines
from slipstream.bench.random_targets import CONFIGS

SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"head_dim": 64, "vocab_size": 100}


def test_every_format_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "small", CONFIGS["llama31-8b"] | SMALL | {"intermediate_size": 384})
    formats(FormatsConfig(shape="small", rows=[1, 3], device="cpu", output=str(tmp_path / "lines.jsonl")))
    lines = read_lines(tmp_path / "lines.jsonl")
    names = ["bf16", "fp8", "fp8 blocks", "int4", "int4 zeros"]
    assert [(line["format"], line["rows"]) for line in lines] == [(name, rows) for name in names for rows in (1, 3)]
    assert all(line["of_bf16"] > 0 and line["experts"] is None for line in lines)
    bits = {"bf16": 16, "fp8": 8, "fp8 blocks": 8, "int4": 4, "int4 zeros": 4}
    weights = 2 * (256 * 64 * (4 + 2 * 2) + 256 * 4 * 64 + 3 * 256 * 384)
    for line in lines[::2]:
        assert 0.99 < line["floor_ms"] / (1000 * weights * bits[line["format"]] / 8 / 1e10) < 1.2, "scales included"
    with pytest.raises(ValueError, match="formats holds 'int3'; choose of bf16, fp8"):
        FormatsConfig(formats=["int3"])
    with pytest.raises(ValueError, match="shape is 'huge'; choose of llama31-8b"):
        FormatsConfig(shape="huge")


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_timed_in_every_format(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = "gpt-oss-20b" if name == "mxfp4" else "qwen3-30b-a3b"
    sizes = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
    monkeypatch.setitem(CONFIGS, "small", CONFIGS[shape] | SMALL | sizes | {"moe_intermediate_size": 128})
    output = str(tmp_path / "lines.jsonl")
    formats(
        FormatsConfig(shape="small", layers=1, parts=["mlp"], formats=[name], rows=[1, 50], device="cpu", output=output)
    )
    single, many = read_lines(tmp_path / "lines.jsonl")[-2:]
    assert (single["format"], single["experts"]) == (name, 2)
    assert 2 < many["experts"] <= 8
    assert many["floor_ms"] / single["floor_ms"] == pytest.approx(many["experts"] / 2, rel=0.1), "a router is small"
