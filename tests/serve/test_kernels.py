"""`slipstream kernels`: the table of a target whose config alone is there."""

import json
from pathlib import Path
from typing import Any

from slipstream.serve.kernels import report
from slipstream.serve.kernels_options import KernelsConfig
from slipstream.tests.quantized_targets import BLOCKS, compressed, w4, w8
from slipstream.tests.tables import table_of
from slipstream.tests.user_errors import user_error

LLAMA_8B = table_of(__file__, "llama_8b")
MOE = table_of(__file__, "moe")
ROWS = (1, 8, 16, 64, 128, 2048)


def table(folder: Path, config: dict[str, Any], **options: Any) -> dict[str, list[str]]:
    """Cells after the name, by the layer's name."""
    (folder / "config.json").write_text(json.dumps(config))
    lines = report(KernelsConfig(target=str(folder), rows=ROWS, **options)).splitlines()
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[2:-3]]
    return {name.rpartition(".")[2]: cells for name, *cells in rows}


def test_layers_of_16_bits(tmp_path):
    lines = table(tmp_path, LLAMA_8B)
    place = ["0-2", "16 bits", "6144 x 4096", "16.00"]
    assert lines["qkv_proj"] == [*place, "streamed", "streamed", "few rows", "few rows", "few rows", "many rows"]
    assert lines["down_proj"][4:] == [*["few rows"] * 5, "many rows"]
    fastest = table(tmp_path, LLAMA_8B, exact=False)
    assert fastest["qkv_proj"][4:] == ["streamed", "streamed", "few rows", "few rows", "library", "library"]
    assert fastest["gate_up_proj"][4:] == [*["few rows"] * 5, "library"]
    assert fastest["lm_head"][3:] == ["library"] * 6
    assert table(tmp_path, LLAMA_8B, gpu="b200")["qkv_proj"][4] == "few rows"
    assert table(tmp_path, LLAMA_8B, kv_cache_dtype="fp8")["qkv_proj"][4] == "few rows"


def test_quantised_layers(tmp_path):
    """4 bits with a scale of 16 bits for 128 weights take 4.125."""
    lines = table(tmp_path, LLAMA_8B | {"quantization_config": compressed("pack-quantized", w4(128, True))})
    wide = ["int4 wide", "int4 wide", "dequantised"]
    assert lines["qkv_proj"][1:] == [
        "int4, groups of 128", "6144 x 4096", "4.12", "int4 pipelined", "int4 pipelined", "int4", "int4", "int4",
        "dequantised",
    ]  # fmt: skip
    assert lines["o_proj"][4:] == ["int4 streamed"] * 3 + wide
    assert lines["lm_head"][0] == "16 bits"
    channel = compressed("float-quantized", w8("channel"), w8("token", dynamic=True))
    lines = table(tmp_path, LLAMA_8B | {"quantization_config": channel})
    assert lines["gate_up_proj"][4:] == ["fp8 mlp"] * 3 + ["fp8 few rows", "fp8 few rows", "fp8 many rows"]
    assert lines["down_proj"][4:] == ["fp8 mlp"] * 3 + ["fp8 few rows", "fp8 few rows", "fp8 many rows"]
    blocks = {"quant_method": "fp8", **BLOCKS, "modules_to_not_convert": ["model.layers.1.mlp"]}
    lines = table(tmp_path, LLAMA_8B | {"quantization_config": blocks}, exact=False)
    assert lines["o_proj"][4:] == ["streamed"] * 3 + ["fp8 few rows", "fp8 few rows", "library"]
    assert lines["o_proj"][:2] == ["0-2", "fp8 per block"]
    assert lines["down_proj"][:2] == ["1", "16 bits"]


def test_experts(tmp_path):
    lines = table(tmp_path, LLAMA_8B | MOE)
    assert lines["experts"][:3] == ["0-2", "16 bits", "128 of 768 x 2048"]
    assert lines["experts"][4:] == [*["experts"] * 5, "experts, large tiles"]
    lines = table(tmp_path, LLAMA_8B | MOE, quantization="fp8")
    assert lines["experts"][1] == "fp8 per channel"
    assert lines["experts"][4:] == [*["experts"] * 5, "experts, fp8 blocks"]
    assert "streamed" in lines["o_proj"], "queries and keys have norms, and another kernel rotates them"


def test_delta_nets_add_in_one_order(tmp_path):
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    kind = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    layers = {"layer_types": ["linear_attention"] * 2 + ["full_attention"]}
    config = LLAMA_8B | kind | heads | dims | layers | {"linear_conv_kernel_dim": 4}
    assert table(tmp_path, config, exact=True)["out_proj"][0] == "0-1"
    with user_error("exact is true, but layers with recurrent state"):
        table(tmp_path, config | {"linear_conv_kernel_dim": 3}, exact=True)


def test_what_does_not_fit_is_refused(tmp_path):
    for rows in (0, 2**31):
        with user_error(rf"rows is \[{rows}\]; give numbers from 1 to"):
            KernelsConfig(target="here", rows=(rows,))
    odd = LLAMA_8B | {"intermediate_size": 14336 + 32}
    with user_error("exact is true, but a layer has 14368 inputs, no multiple of 64"):
        table(tmp_path, odd, exact=True)
    assert table(tmp_path, odd)["down_proj"][4] == "library"
    with user_error("quant_method is 'other'; known formats"):
        table(tmp_path, LLAMA_8B | {"quantization_config": {"quant_method": "other"}})
    with user_error("XForCausalLM"):
        table(tmp_path, LLAMA_8B | {"architectures": ["XForCausalLM"]})
    (tmp_path / "config.json").unlink()
    with user_error(r"config.json"):
        report(KernelsConfig(target=str(tmp_path)))
