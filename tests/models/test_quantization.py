"""Quantised checkpoints: each layout against transformers on dequantised weights, and refusals."""

import copy
import json
import re
from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.kernels.gemm.choose import Device, choose
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.gemm.tiling import part_inputs
from slipstream.models.layers.formats.fp8 import FP8Format, FP8Linear
from slipstream.models.layers.formats.int4 import Int4Format, Int4Linear
from slipstream.models.layers.formats.table import read_quantization
from slipstream.models.layers.linear import Linear
from slipstream.models.targets.adapt import adapt_values
from slipstream.models.targets.config import MoESpec
from slipstream.models.targets.decoder import Target, load_config
from slipstream.tests.pairwise import gate_of, grouped, some_of
from slipstream.tests.quantized_targets import (
    GPTQ,
    LAYOUTS,
    Tensors,
    change_tensors,
    check_logits,
    compressed,
    dequantized_weights,
    gptq,
    load,
    read_by_transformers,
    reference,
    save_in_two_files,
    save_quantized,
    w4,
    w8,
)
from slipstream.tests.random_targets import SHAPE, change_json, configs_of, logits, save_random_target
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

HEAD = "lm_head"
TOKENS = torch.randint(3, 120, (40,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain(make_target) -> Path:
    return make_target("wide")


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_logits_equal_transformers(name, plain, tmp_path):
    layout = LAYOUTS[name]
    folder = tmp_path / name
    values = save_quantized(layout, plain, folder)
    target = load(folder, name)
    layer = target.layers[1]
    assert isinstance(layer.mlp.down_proj, Int4Linear if layout.inputs == "exact" else FP8Linear)
    for block, fused in ((layer.self_attn, "qkv_proj"), (layer.mlp, "gate_up_proj")):
        weight = getattr(block, fused).dequantized()
        parts = getattr(block, fused).parts
        name = "self_attn" if fused == "qkv_proj" else "mlp"
        for part, rows in parts.items():
            torch.testing.assert_close(weight[rows], values[f"model.layers.1.{name}.{part}.weight"])
    tokens = torch.randint(3, 120, (70,), generator=torch.Generator().manual_seed(1))
    model = reference(layout, plain, folder, values)
    check_logits(target, model, plain, tokens, is_exact=layout.inputs == "exact")


WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2, "num_hidden_layers": 2}
ADAPTED = configs_of(__file__, "adapted", WIDE)


def save_adapted(family: str, name: str, folder: Path, ignored: Sequence[str] = ()) -> tuple[Path, Tensors]:
    """Saves the target in a layout beside a plain one, whose folder it returns, and the weights in fp32."""
    plain = folder / "plain"
    save_random_target(copy.deepcopy(ADAPTED[family]), plain)
    return plain, save_quantized(LAYOUTS[name], plain, folder / name, ignored)


def check_adapted(target: Target, name: str, plain: Path, values: Tensors):
    layout = LAYOUTS[name]
    model = reference(layout, plain, plain.with_name(name), values)
    check_logits(target, model, plain, TOKENS, is_exact=layout.inputs == "exact", is_adapted=True)


@grouped("family")
@pytest.mark.parametrize(
    ("family", "name"),
    gate_of(product(ADAPTED, LAYOUTS), [*zip(cycle(("ernie", "granite", "laguna", "qwen3-5")), LAYOUTS, strict=False)]),
)
@torch.no_grad()
def test_quantised_files_are_adapted_too(family, name, tmp_path):
    """Where rows are packed across outputs they cannot be reordered, and the error says so."""
    plain, values = save_adapted(family, name, tmp_path)
    if family.startswith("ernie") and (name.startswith(("awq", "gptq")) or name == "packed-asymmetric"):
        with user_error("rows of Ernie4_5ForCausalLM are reordered when they are loaded"):
            load(tmp_path / name, name)
        return
    if isinstance(load_config(plain).layers[-1].mlp, MoESpec) and name == "gptq-order":
        with user_error("experts has act order"):
            load(tmp_path / name, name)
        return
    target = load(tmp_path / name, name)
    check_adapted(target, name, plain, values)


IGNORED = {  # by family: modules that published files leave in 16 bits
    "qwen3-5": [r".*\.linear_attn\..*"],
    "qwen3-5-moe": [r".*\.self_attn\..*", r".*shared_expert.*"],
    "glm4-moe": [r".*layers\.0\..*", r".*shared_experts.*"],
    "gemma4-experts": [r".*\.self_attn\..*"],
    "minimax-m2": [r".*\.self_attn\.[qkv]_proj"],
}


@grouped("family")
@pytest.mark.parametrize("name", ["fp8-blocks", "compressed-channel", "packed"])
@pytest.mark.parametrize("family", some_of([name for name in IGNORED if name in ADAPTED], ["qwen3-5-moe", "glm4-moe"]))
@torch.no_grad()
def test_modules_that_a_config_lists_stay_in_16_bits(family, name, tmp_path):
    plain, values = save_adapted(family, name, tmp_path, IGNORED[family])
    target = load(tmp_path / name)
    formats = read_quantization(tmp_path / name)
    for path, module in target.named_modules():
        if isinstance(module, FP8Linear | Int4Linear):
            assert all(formats.listed_format(f"{path.rpartition('.')[0]}.{part}") for part in module.parts or
                       [path.rpartition(".")[2]]), path  # fmt: skip
    check_adapted(target, name, plain, values)


@pytest.mark.skipif("muse-glimmer" not in ADAPTED, reason="this transformers does not know it")
@each_case()
@torch.no_grad()
def test_a_gate_is_projected_with_queries_where_their_format_allows_it(name, ignored, is_joined, tmp_path):
    """And the norm before them quantises for one layer then."""
    plain, values = save_adapted("muse-glimmer", name, tmp_path, ignored)
    target = load(tmp_path / name, name)
    for layer in target.layers:
        mixer = layer.mixer
        assert mixer.can_join_gate != is_joined
        assert (mixer.gate_proj is None) == is_joined
        assert ("gate_proj" in mixer.qkv_proj.parts) == is_joined
        is_fp8 = isinstance(mixer.qkv_proj, FP8Linear)
        assert (layer.input_layernorm.quantize is not None) == (is_joined and is_fp8)
        assert (layer.pre_feedforward_layernorm.quantize is not None) == is_fp8
    check_adapted(target, name, plain, values)


@pytest.mark.skipif("muse-glimmer" not in ADAPTED, reason="this transformers does not know it")
def test_a_gate_may_have_another_order_of_inputs_than_queries(tmp_path):
    """Though the config says that no layer has an order: the files decide."""
    save_random_target(copy.deepcopy(ADAPTED["muse-glimmer"]), tmp_path / "plain")
    folder = tmp_path / "quantised"
    values = save_quantized(LAYOUTS["gptq-order"], tmp_path / "plain", folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in load_file(tmp_path / "plain" / "model.safetensors").items():
        if name.endswith("self_attn.gate_proj.weight"):
            stored, values[name] = gptq(weight, 32, symmetric=True, act_order=False, offset=1)
            tensors |= {name.removesuffix("weight") + end: part.contiguous() for end, part in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    change_json(folder / "config.json", quantization_config=LAYOUTS["gptq-order"].config | {"desc_act": False})
    weights = dequantized_weights(load(folder))
    assert any("self_attn.gate_proj" in name for name in weights)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, values[name.replace("model.", "model.language_model.", 1)])


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales", "g_idx"])
def test_rows_of_inputs_are_not_taken_for_rows_of_heads(name, tmp_path):
    """As many inputs as outputs: the shape alone does not tell."""
    save_random_target(copy.deepcopy(ADAPTED["ernie"]), tmp_path)
    key = f"layers.0.self_attn.q_proj.{name}"
    with user_error(f"{key} is .*reordered when they are loaded"):
        adapt_values({key: torch.zeros(256, 32)}, load_config(tmp_path))


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "compressed-channel", "compressed-blocks", "packed", "packed-asymmetric"]
)
def test_weights_equal_those_that_transformers_reads(name, plain, tmp_path):
    """It reads these layouts on a CPU, and rounds 4-bit weights to the type of their scales, fp16."""
    save_quantized(LAYOUTS[name], plain, tmp_path / name)
    weights = dequantized_weights(load(tmp_path / name))
    read = read_by_transformers(tmp_path / name)
    assert len(weights) == 4 * 7
    expected = {name: read.get_parameter(name).detach() for name in weights}
    rounding = 2**-11 if name.startswith("packed") else 0
    torch.testing.assert_close(weights, expected, rtol=rounding, atol=0)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-static", "fp8-blocks", "awq", "gptq-v2", "packed"])
def test_fused_projections_and_several_files(name, plain, tmp_path):
    """Projections fused on disk, in files with an index."""
    save_quantized(LAYOUTS[name], plain, tmp_path / "apart")
    tensors = load_file(tmp_path / "apart" / "model.safetensors")
    fused = tmp_path / "fused"
    expected = load(tmp_path / "apart")
    along = {"awq": 1, "gptq-v2": 1}.get(name, 0)
    for index in range(4):
        prefix = f"model.layers.{index}.self_attn."
        for end in {key.rpartition(".")[2] for key in tensors if key.startswith(f"{prefix}q_proj.")}:
            parts = [tensors.pop(f"{prefix}{part}_proj.{end}") for part in "qkv"]
            if end in ("g_idx", "weight_shape", "weight_scale", "input_scale") and parts[0].dim() < 2:
                parts = parts[:1]  # of one tensor
                if name in ("fp8-tensor", "fp8-static"):
                    parts = [torch.tensor(0.5)]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=along)
            tensors[f"{prefix}qkv_proj.{end}"] = joined.contiguous()
            if end == "weight_shape":
                del tensors[f"{prefix}qkv_proj.{end}"]
    save_in_two_files(tensors, tmp_path / "apart", fused)
    layer, expected_layer = (target.layers[2].self_attn.qkv_proj for target in (load(fused), expected))
    if name.startswith("fp8") and name != "fp8-blocks":
        assert torch.equal(layer.weight_scale, torch.full((len(layer.weight),), 0.5))
        assert torch.equal(layer.weight.float(), expected_layer.weight.float())
    else:
        assert torch.equal(layer.dequantized(), expected_layer.dequantized())


def test_scales_per_tensor_may_have_the_names_that_transformers_gives_them(plain, tmp_path):
    save_quantized(LAYOUTS["fp8-static"], plain, tmp_path / "fp8")
    file = tmp_path / "fp8" / "model.safetensors"
    expected = logits(load(tmp_path / "fp8"), torch.arange(3, 40))
    names = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}
    scales = {}
    for key, tensor in load_file(file).items():
        path, _, name = key.rpartition(".")
        scales[f"{path}.{names.get(name, name)}"] = tensor.reshape(()) if name in names else tensor
    save_file(scales, file)
    assert torch.equal(logits(load(tmp_path / "fp8"), torch.arange(3, 40)), expected)


def test_a_quantised_head_is_dequantised(plain, tmp_path):
    for name in ("gptq-order", "awq", "fp8-tensor"):
        layout = LAYOUTS[name]
        folder = tmp_path / name
        save_quantized(layout, plain, folder)
        tensors = load_file(folder / "model.safetensors")
        quantised, value = layout.quantize(tensors.pop(f"{HEAD}.weight"))
        quantised = {f"{HEAD}.{end}": tensor.contiguous() for end, tensor in quantised.items()}
        save_file(tensors | quantised, folder / "model.safetensors")
        torch.testing.assert_close(load(folder).shared[f"{HEAD}.weight"], value)


def test_networks_keep_their_dtype_beside_quantised_weights(plain, tmp_path):
    save_quantized(LAYOUTS["packed"], plain, tmp_path / "packed")
    target = load(tmp_path / "packed", dtype=torch.bfloat16)
    assert target.dtype == target.lm_head.weight.dtype == target.norm.weight.dtype == torch.bfloat16
    assert target.layers[0].mlp.down_proj.scales.dtype == torch.bfloat16, "in which weights are rounded"
    save_quantized(LAYOUTS["fp8-static"], plain, tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    cache = {f"model.layers.0.self_attn.{kind}_proj.{kind}_scale": torch.ones(1) for kind in "kv"}
    save_file(tensors | cache, tmp_path / "fp8" / "model.safetensors")
    layer = load(tmp_path / "fp8", dtype=torch.bfloat16).layers[0].self_attn.qkv_proj
    assert layer.weight_scale.dtype == torch.float32
    parts = [tensors[f"model.layers.0.self_attn.{part}_proj.input_scale"] for part in "qkv"]
    assert layer.input_scale == max(parts)


@each_case(("gptq-order", {"up_proj.g_idx": torch.arange(256).int() // 32}, "gate_proj, up_proj read one input, but"))
def test_faults_of_files_are_named(name, change, message, plain, tmp_path):
    save_quantized(LAYOUTS[name], plain, tmp_path / name)
    change_tensors(tmp_path / name, "model.layers.0.mlp", change)
    with user_error(message):
        load(tmp_path / name)


def test_parts_fill_blocks_and_words():
    with torch.device("meta"):
        with user_error("begin within a block of 128 outputs.*k_proj"):
            FP8Linear(Linear(256, {"q_proj": 192, "k_proj": 64}), FP8Format("block"))
        with user_error("weights of 12 x 256 do not fill words of 8"):
            Int4Linear(Linear(256, {"q_proj": 16, "k_proj": 12}), Int4Format("awq", 128), False)


@pytest.mark.parametrize("shape", [(2816, 2048), (28672, 4096)])
def test_a_gated_product_has_one_order_for_any_number_of_rows(shape):
    """Also where the activation's kernel quantises. The first one's plain product has two parts."""
    with torch.device("meta"):
        layer = FP8Linear(
            Linear(shape[1], {"gate_proj": shape[0] // 2, "up_proj": shape[0] // 2}), FP8Format("channel")
        )
    layer.quantize = layer.scales_of_inputs
    layer.order = FixedOrder()
    sizes = set()
    for rows in (1, 64, 65, 128, 129, 2000):
        product = layer.product(rows, layer.gated_kind(rows, "silu"), torch.bfloat16)
        sizes.add(part_inputs(shape[1], choose(product, Device()).tiling))
    assert sizes == {shape[1]}


def test_quantised_weights_need_a_config(plain, tmp_path):
    save_quantized(LAYOUTS["fp8-tensor"], plain, tmp_path / "fp8")
    with user_error(r"quantization is 'fp8', but .* is quantised already \(fp8 per tensor\)"):
        load(tmp_path / "fp8", "on-the-fly")
    change_json(tmp_path / "fp8" / "config.json", quantization_config=None)
    with user_error("q_proj is quantised already; no file says how"):
        load(tmp_path / "fp8")
    tensors = load_file(plain / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with user_error("embed_tokens.weight is float8_e4m3fn, not"):
        load(tmp_path / "fp8")


@each_case()
def test_other_formats_are_refused_with_the_known_ones(values, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": values}))
    with user_error(f"{message}.*; known formats: fp8 .*gptq"):
        read_quantization(tmp_path)


@each_case()
def test_malformed_fields_are_named_with_their_value_and_the_remedy(values, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": values}))
    with user_error(f"{tmp_path} cannot be read: {message}"):
        read_quantization(tmp_path)


@pytest.mark.parametrize(
    ("values", "format"),
    [
        (
            GPTQ | {"group_size": 512, "desc_act": True},
            Int4Format("gptq", 512, symmetric=True, zero_offset=1, act_order=True),
        ),
        (compressed("pack-quantized", w4(0, True) | {"strategy": "channel"}), Int4Format("packed", -1, symmetric=True)),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]}, FP8Format("channel")),
        (
            compressed(
                "float-quantized",
                w8("block", block_structure="128x128"),
                w8("group", group_size=128) | {"dynamic": True},
            ),
            FP8Format("block"),
        ),
        (
            compressed("naive-quantized", w8("channel"), w8("tensor", dynamic=False)),
            FP8Format("channel", static=True),
        ),
    ],
)
def test_variants_are_read(values, format, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": values}}))
    assert read_quantization(tmp_path).format_of("layers.0.mlp.up_proj") == format


def test_groups_name_layers(tmp_path):
    values = compressed("pack-quantized", w4(128, True))
    values["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$"], "weights": w4(32, False)}
    values["config_groups"]["group_2"] = {"targets": ["layers.3.mlp.up_proj"], "weights": w4(64, True)}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": values}))
    quantization = read_quantization(tmp_path)
    sizes = {name: quantization.format_of(f"layers.{name}").group_size for name in ("3.mlp.down_proj", "3.mlp.up_proj")}
    assert sizes == {"3.mlp.down_proj": 32, "3.mlp.up_proj": 64}
    assert quantization.format_of("layers.0.self_attn.q_proj") == Int4Format("packed", 128, symmetric=True)
    del values["config_groups"]["group_0"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": values}))
    with user_error(re.escape("q_proj is quantised, but the quantisation config (compressed")):
        read_quantization(tmp_path).format_of("layers.0.self_attn.q_proj")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    assert not [format for targets, format in read_quantization(tmp_path).groups if targets]
