"""Checkpoints with quantised experts: each layout against transformers on dequantised weights, and refusals."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.kernels.gemm.fp8 import QuantizedRows
from slipstream.models.layers.formats.linear_experts import LinearExperts
from slipstream.models.layers.formats.mxfp4 import MXFP4Experts
from slipstream.models.targets.frozen import DecoderTarget, load_frozen_target, read_model
from slipstream.tests.expert_targets import EXPERT_FAMILIES
from slipstream.tests.models.saved_drafts import CPU
from slipstream.tests.quantized_targets import (
    LAYOUTS,
    change_tensors,
    check_logits,
    dequantized_weights,
    fuse_experts,
    load,
    read_by_transformers,
    reference,
    save_gpt_oss,
    save_in_two_files,
    save_quantized,
)
from slipstream.tests.random_targets import change_json, logits, save_random_target
from slipstream.tests.serve.engine_runs import build_engine, make_request, run
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

TOKENS = torch.randint(3, 120, (40,), generator=torch.Generator().manual_seed(1))
EXPERT = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def plain(make_target) -> Path:
    return make_target("wide-moe")


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-static", "compressed-channel", "awq", "packed", "on-the-fly"])
@torch.no_grad()
def test_logits_equal_transformers(name, plain, tmp_path):
    """Rows of `fp8-static` are quantised by the largest scale of the experts."""
    layout = LAYOUTS[name]
    folder = tmp_path / name
    values = save_quantized(layout, plain, folder)
    target = load(folder, name)
    assert isinstance(target.layers[1].mlp.experts, LinearExperts)
    model = reference(layout, plain, folder, values)
    check_logits(target, model, plain, TOKENS, is_exact=layout.inputs == "exact")


@pytest.mark.parametrize("name", ["fp8-blocks", "compressed-channel", "packed"])
def test_weights_equal_those_that_transformers_reads(name, plain, tmp_path):
    """It reads these layouts on a CPU, and rounds 4-bit weights to the type of their scales, fp16."""
    save_quantized(LAYOUTS[name], plain, tmp_path / name)
    weights = dequantized_weights(load(tmp_path / name))
    read = read_by_transformers(tmp_path / name)
    assert len(weights) == 2 * (4 + 3 * 3)
    expected = {name: tensor.float() for name, tensor in read.state_dict().items()}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        gates_ups, downs = (expected.pop(f"{experts}.{part}_proj") for part in ("gate_up", "down"))
        for index, (gate_up, down) in enumerate(zip(gates_ups, downs, strict=True)):
            for part, weight in zip(("gate", "up", "down"), (*gate_up.chunk(2), down), strict=True):
                expected[f"{experts}.{index}.{part}_proj.weight"] = weight
    rounding = 2**-11 if name == "packed" else 0
    torch.testing.assert_close(weights, {name: expected[name] for name in weights}, rtol=rounding, atol=0)


@pytest.mark.parametrize("name", ["fp8-tensor", "modelopt", "modelopt-blocks", "compressed-blocks", "gptq-v2",
    "packed-asymmetric"])  # fmt: skip
def test_other_layouts_are_stored_as_they_mean(name, plain, tmp_path):
    values = save_quantized(LAYOUTS[name], plain, tmp_path / name)
    experts = load(tmp_path / name).layers[1].mlp.experts
    for part, rows in (("gate_proj", slice(0, 128)), ("up_proj", slice(128, 256)), ("down_proj", slice(None))):
        fused = "down_proj" if part == "down_proj" else "gate_up_proj"
        weight = experts.expert(fused, 2).dequantized()[rows]
        torch.testing.assert_close(weight, values[f"model.layers.1.mlp.experts.2.{part}.weight"])


def test_fused_experts_in_several_files(plain, tmp_path):
    save_quantized(LAYOUTS["fp8-blocks"], plain, tmp_path / "apart")
    fused = tmp_path / "fused"
    save_in_two_files(fuse_experts(load_file(tmp_path / "apart" / "model.safetensors")), tmp_path / "apart", fused)
    buffers, expected = (dict(load(folder).named_buffers()) for folder in (fused, tmp_path / "apart"))
    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffers[key].float(), expected[key].float()) for key in expected)


def test_gpt_oss_equals_transformers(tmp_path):
    """As served, as training reads it, and by the engine."""
    save_gpt_oss(tmp_path)
    reference = read_model(tmp_path, CPU, False).eval()
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    target = load(tmp_path)
    assert isinstance(target.layers[0].mlp.experts, MXFP4Experts)
    torch.testing.assert_close(logits(target, TOKENS), expected, atol=1e-3, rtol=1e-3)
    frozen = load_frozen_target(tmp_path, (1,), CPU)
    assert isinstance(frozen, DecoderTarget)
    prompt = TOKENS[:9].tolist()
    answer, drafted_answer = (
        run(build_engine(tmp_path, draft), [make_request("1", prompt, max_tokens=12, ignore_eos=True)])["1"].tokens
        for draft in ("none", "ngram")
    )
    assert answer == drafted_answer
    with torch.no_grad():
        text_logits = reference(torch.tensor([prompt + answer])).logits[0]
    assert text_logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_gpt_oss_in_16_bits_is_quantised_on_the_fly(tmp_path):
    """From transposed tensors of all experts, in which gates and ups alternate; routers and biases stay."""
    save_random_target(copy.deepcopy(EXPERT_FAMILIES["gpt-oss"]), tmp_path)
    expected = load(tmp_path)
    target = load(tmp_path, "on-the-fly")
    experts, quantised = (model.layers[1].mlp.experts for model in (expected, target))
    for name in ("gate_up_proj", "down_proj"):
        weight = quantised.expert(name, 3).dequantized()
        assert 0 < (weight - experts.matrix(name)[3]).norm() < 0.05 * weight.norm()
    assert torch.equal(quantised.gate_up_proj_bias, experts.gate_up_proj_bias)
    assert torch.equal(target.layers[1].mlp.gate.weight, expected.layers[1].mlp.gate.weight)


@pytest.mark.parametrize(("name", "is_quantised"), [("fp8-blocks", True), ("on-the-fly", True), ("awq", False)])
@torch.no_grad()
def test_a_norm_quantises_what_fp8_experts_read(name, is_quantised, plain, tmp_path):
    """And keeps it for their router."""
    folder = tmp_path / name
    save_quantized(LAYOUTS[name], plain, folder)
    norm = load(folder, name).layers[1].post_attention_layernorm
    x = torch.randn(3, 256)
    normed = norm(x)
    assert isinstance(normed, QuantizedRows) == is_quantised
    if is_quantised:
        assert torch.equal(normed.rows, torch.nn.functional.rms_norm(x, (256,), norm.weight, norm.eps))


def test_the_gate_of_a_shared_expert_stays_in_16_bits(tmp_path):
    save_random_target(copy.deepcopy(EXPERT_FAMILIES["qwen2-moe"]), tmp_path)
    mlp = load(tmp_path, "on-the-fly").layers[1].mlp
    assert type(mlp.shared_expert_gate).__name__ == "Linear"
    assert type(mlp.shared_expert.down_proj).__name__ == "FP8Linear"


@each_case()
def test_faults_of_files_are_named(name, change, message, plain, tmp_path):
    save_quantized(LAYOUTS[name], plain, tmp_path / name)
    change_tensors(tmp_path / name, EXPERT, change)
    with user_error(message):
        load(tmp_path / name)


def test_mxfp4_scales_above_two_are_known(tmp_path):
    """Kernels decode such weights in another way."""
    save_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{EXPERT}.gate_up_proj_scales"][1, 2, 0] = 128
    tensors[f"{EXPERT}.down_proj_scales"][1, 2, 0] = 129
    save_file(tensors, tmp_path / "model.safetensors")
    experts = load(tmp_path).layers[0].mlp.experts
    assert [experts.matrix(f"{name}_proj").is_wide for name in ("gate_up", "down")] == [False, True]


def test_mxfp4_needs_a_config_and_powers_of_two(tmp_path):
    save_gpt_oss(tmp_path, with_fields=False)
    with user_error("experts is quantised already; no file says how"):
        load(tmp_path)
    change_json(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{EXPERT}.down_proj_scales"][1, 2, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with user_error("down_proj_scales has 255"):
        load(tmp_path)
    del tensors[f"{EXPERT}.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with user_error("missing layers.0.mlp.experts.down_proj_scales"):
        load(tmp_path)
