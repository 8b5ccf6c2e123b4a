"""Checkpoints that compressed-tensors writes itself, against the weights and logits that it computes from them."""

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.tests.quantized_targets import (
    LAYOUTS,
    check_logits,
    dequantized_weights,
    load,
    read_by_transformers,
)
from slipstream.tests.random_targets import logits

PRESETS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W4A16_ASYM")
TOKENS = torch.randint(3, 120, (40,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain(make_target) -> dict[str, Path]:
    return {"dense": make_target("wide"), "moe": make_target("wide-moe")}


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return layer


def take_experts_apart(model: PreTrainedModel):
    """Into linear layers, which alone are quantised, with the names of files."""
    for layer in model.model.layers:
        apart = []
        for gate_up, down in zip(layer.mlp.experts.gate_up_proj.data, layer.mlp.experts.down_proj.data, strict=True):
            weights = dict(zip(("gate_proj", "up_proj"), gate_up.chunk(2), strict=True), down_proj=down)
            apart.append(nn.ModuleDict({name: linear(weight) for name, weight in weights.items()}))
        layer.mlp.experts = nn.ModuleList(apart)


@torch.no_grad()
def observe(layer: nn.Module):
    """Sets scales and zeros of a layer's weight by its extremes, as a calibration does; those of inputs are given."""
    outputs, inputs = layer.weight.shape
    rows, columns = layer.weight_scale.shape if layer.weight_scale.dim() == 2 else (1, 1)
    blocks = layer.weight.reshape(rows, outputs // rows, columns, inputs // columns)
    qparams = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), layer.quantization_scheme.weights)
    for parameter, values in zip((layer.weight_scale, layer.weight_zero_point), qparams, strict=True):
        parameter.copy_(values.reshape(parameter.shape))
    if hasattr(layer, "input_scale"):
        layer.input_scale.fill_(0.02)


def save_compressed(preset: str, plain: Path, folder: Path, with_experts: bool = False) -> PreTrainedModel:
    """The quantised model, in which compressed-tensors has decompressed what it wrote into `folder`."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    if with_experts:
        take_experts_apart(model)
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]), show_progress=False)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            observe(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return model


def quantized_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    layers = {path: module for path, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    return {f"{path}.weight": layer.weight.detach() for path, layer in layers.items()}


@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_a_dense_model(preset, plain, tmp_path):
    """Weights and logits against the model that was written, whose layers round their inputs as the folder says, and
    weights against those that transformers reads."""
    model = save_compressed(preset, plain["dense"], tmp_path / "found")
    target = load(tmp_path / "found")
    weights = quantized_weights(model)
    assert len(weights) == 4 * 7
    torch.testing.assert_close(dequantized_weights(target), weights, rtol=0, atol=0)
    read = read_by_transformers(tmp_path / "found")
    torch.testing.assert_close({name: read.get_parameter(name) for name in weights}, weights, rtol=0, atol=0)
    assert check_logits(target, model, plain["dense"], TOKENS, is_exact=preset.startswith("W4A16")) > 1e-2


@pytest.mark.parametrize("preset", PRESETS)
def test_a_mixture(preset, plain, tmp_path):
    model = save_compressed(preset, plain["moe"], tmp_path / "found", with_experts=True)
    expected = quantized_weights(model)
    assert len(expected) == 2 * (4 + 3 * 3)
    torch.testing.assert_close(dequantized_weights(load(tmp_path / "found")), expected, rtol=0, atol=0)


@torch.no_grad()
def test_experts_that_transformers_holds_together_stay_in_16_bits(plain, tmp_path):
    model = save_compressed("W4A16", plain["moe"], tmp_path / "found")
    target = load(tmp_path / "found")
    expected = quantized_weights(model)
    assert len(expected) == 2 * 4
    torch.testing.assert_close(dequantized_weights(target), expected, rtol=0, atol=0)
    torch.testing.assert_close(logits(target, TOKENS), model(TOKENS[None]).logits[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["packed", "packed-asymmetric", "compressed-channel", "compressed-blocks"])
def test_layers_equal_those_of_plain_formulas(name):
    """Its own compressor of a layer, given the scales and zeros, against the tests' formulas."""
    layout = LAYOUTS[name]
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    expected, value = layout.quantize(weight)
    tensors = {"weight": value, "weight_scale": expected["weight_scale"].to(value.dtype)}
    if "weight_zero_point" in expected:
        zeros = expected["weight_zero_point"].t()[..., None] >> torch.arange(0, 32, 4) & 15
        tensors["weight_zero_point"] = (zeros.flatten(1).t() - 8).to(torch.int8)
    scheme = QuantizationScheme(**layout.config["config_groups"]["group_0"])
    kind = "pack-quantized" if name.startswith("packed") else "float-quantized"
    compressed = BaseCompressor.get_value_from_registry(kind).compress(tensors, scheme)
    assert compressed.keys() == expected.keys()
    for key in expected:
        assert torch.equal(compressed[key].float(), expected[key].float()), key
        assert compressed[key].dtype == expected[key].dtype or key == "weight_scale"
