"""Tiny targets as libraries write them, quantised here by plain formulas, and transformers' outputs with them."""

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    GptOssConfig,
    PreTrainedModel,
)

from slipstream.models.layers.formats.base import QuantizedLinear
from slipstream.models.layers.formats.linear_experts import LinearExperts
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.tests.random_targets import CAPPED, SHAPE, WIDE, change_json, load_model, logits, save_random_target
from slipstream.tests.tables import table_of

CONFIG = WIDE["wide"]
MOE_CONFIG = WIDE["wide-moe"]
FP8 = torch.float8_e4m3fn
# Weights of linear layers of decoders, but for routers and gates of a few rows.
QUANTIZED = re.compile(r"^(?!.*\.vision_).*(_proj|\.w[123]|\.in_proj_(qkv|z|qkvz))\.weight$")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"))
EXPERT_INPUT_SCALES = tuple(
    tuple(f"{name}.input_scale" for name in names)
    for names in (("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2"))
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble
Tensors = dict[str, Tensor]
Quantized = tuple[Tensors, Tensor]  # of a layer: tensors of the file by the end of their names, and its weight in fp32


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is quantised."""

    quantize: Callable[[Tensor], Quantized]
    config: Mapping[str, Any]
    inputs: str = "exact"  # how inputs are rounded: exact, row, block or static
    file: str = "config.json"


def fp8(weight: Tensor, scale: Tensor, stored: Tensor, **tensors: Tensor) -> Quantized:
    """`scale` broadcasts; the file has it as `stored`."""
    codes = (weight / scale).clamp(-448, 448).to(FP8)
    return {"weight": codes, "weight_scale": stored, **tensors}, codes.float() * scale


def per_tensor(weight: Tensor) -> Quantized:
    scale = weight.abs().max() / 448
    return fp8(weight, scale, scale)


def per_tensor_static(weight: Tensor) -> Quantized:
    scale = weight.abs().max() / 400
    return fp8(weight, scale, scale.reshape(1), input_scale=0.02 + weight[0, 0].abs() / 100)


def per_channel(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return fp8(weight, scale, scale)


def blockwise(weight: Tensor, name: str = "weight_scale_inv") -> Quantized:
    rows, columns = weight.shape
    blocks = weight.reshape(rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    tensors, value = fp8(weight, spread, scale)
    return {"weight": tensors["weight"], name: scale}, value


def blockwise_modelopt(weight: Tensor) -> Quantized:
    tensors, value = blockwise(weight, "weight_scale")
    return tensors | {"weight_scale": tensors["weight_scale"][:, None, :, None]}, value


def int4(weight: Tensor, group: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (O, I), zeros and scales (O, G), and the weight; `group` of each input."""
    count = int(group.max()) + 1
    parts = [weight[:, group == index] for index in range(count)]
    low, high = (torch.stack([find(part) for part in parts], 1) for find in (lambda x: x.amin(1), lambda x: x.amax(1)))
    if symmetric:
        scales = torch.maximum(high, -low) / 7
        zeros = torch.full_like(high, 8)
    else:
        scales = (high - low) / 15
        zeros = (-low / scales).round().clamp(0, 15)
        zeros[0, 0] = 0  # as of a group without negative weights
    scales = scales.half().float()
    codes = (weight / scales[:, group] + zeros[:, group]).round().clamp(0, 15)
    return codes.int(), zeros.int(), scales.half(), (codes - zeros[:, group]) * scales[:, group]


def packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """(n, 8 * m) -> (n, m) int32: nibble i holds the column order[i] of its 8."""
    columns = numbers.long().unflatten(1, (-1, 8))
    return wrapped(sum(columns[..., column] << 4 * nibble for nibble, column in enumerate(order)))


def minus_ones(words: Tensor, offset: int) -> Tensor:
    """Takes `offset` from all nibbles at once, as GPTQ's first format: a nibble of 0 borrows from the next."""
    return wrapped(words.long() - 0x11111111 * offset)


def wrapped(words: Tensor) -> Tensor:
    words = words & 0xFFFFFFFF
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def awq(weight: Tensor, size: int = 128) -> Quantized:
    codes, zeros, scales, value = int4(weight, torch.arange(weight.shape[1]) // size, False)
    tensors = {"qweight": packed(codes.t(), AWQ_ORDER), "qzeros": packed(zeros.t(), AWQ_ORDER), "scales": scales.t()}
    return tensors, value


def gptq(weight: Tensor, size: int, symmetric: bool, act_order: bool, offset: int) -> Quantized:
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    group = (order if act_order else torch.arange(inputs)) // (size if size > 0 else inputs)
    codes, zeros, scales, value = int4(weight, group, symmetric)
    tensors = {"qweight": packed(codes).t(), "qzeros": minus_ones(packed(zeros.t()), offset), "scales": scales.t()}
    return tensors | {"g_idx": group.int()}, value


def pack_quantized(weight: Tensor, size: int, symmetric: bool) -> Quantized:
    codes, zeros, scales, value = int4(weight, torch.arange(weight.shape[1]) // size, symmetric)
    tensors = {"weight_packed": packed(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    return tensors if symmetric else tensors | {"weight_zero_point": packed(zeros.t()).t()}, value


def compressed(format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def w8(strategy: str, **fields: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **fields}


def w4(size: int, symmetric: bool) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": symmetric}


BLOCKS = {"weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4}
QUANTIZERS: dict[str, Callable[[Tensor], Quantized]] = {
    "fp8-blocks": blockwise,
    "fp8-tensor": per_tensor,
    "fp8-static": per_tensor_static,
    "compressed-channel": per_channel,
    "compressed-blocks": partial(blockwise, name="weight_scale"),
    "modelopt": per_tensor_static,
    "modelopt-blocks": blockwise_modelopt,
    "awq": awq,
    "awq-old": partial(awq, size=64),
    "gptq-order": partial(gptq, size=32, symmetric=True, act_order=True, offset=1),
    "gptq-v2": partial(gptq, size=-1, symmetric=False, act_order=False, offset=0),
    "gptq-old": partial(gptq, size=128, symmetric=False, act_order=False, offset=1),
    "packed": partial(pack_quantized, size=32, symmetric=True),
    "packed-asymmetric": partial(pack_quantized, size=128, symmetric=False),
    "on-the-fly": per_channel,
}
LAYOUTS = {name: Layout(QUANTIZERS[name], **fields) for name, fields in table_of(__file__, "layouts").items()}


def save_quantized(layout: Layout, plain: Path, folder: Path, ignored: Sequence[str] = ()) -> Tensors:
    """Writes the target of `plain` in another layout into `folder`; returns its weights in fp32. `ignored`: regular
    expressions of modules that stay in 16 bits, which the config lists."""
    folder.mkdir()
    for file in plain.glob("*.json"):
        (folder / file.name).write_text(file.read_text())
    tensors = {}
    values = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        values[name] = tensor
        tensors[name] = tensor
        module = name.removesuffix(".weight")
        if QUANTIZED.search(name) and not any(re.fullmatch(pattern, module) for pattern in ignored):
            stored, values[name] = layout.quantize(tensor)
            if layout.config:
                del tensors[name]
                base = name.removesuffix("weight")
                tensors |= {f"{base}{end}": part.contiguous().clone() for end, part in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if layout.file == "config.json":
        config = dict(layout.config)
        if ignored:
            field = "ignore" if config["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
            config[field] = [*config.get(field, ()), *(f"re:{pattern}" for pattern in ignored)]
        change_json(folder / "config.json", quantization_config=config or None)
    else:
        (folder / layout.file).write_text(json.dumps(layout.config))
    return values


def fuse_experts(tensors: Tensors, count: int = 3) -> Tensors:
    """As transformers 5 holds a layer's `count` experts in 16 bits and in FP8 blocks: all in a tensor."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for end, stored in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            if f"{prefix}.0.up_proj.{end}" not in tensors:
                continue
            parts = {
                part: torch.stack(
                    [tensors[f"{prefix}.{expert}.{part}.{end}"].view(torch.uint8) for expert in range(count)]
                )
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            dtype = tensors[f"{prefix}.0.up_proj.{end}"].dtype
            result[f"{prefix}.gate_up_proj{stored}"] = torch.cat(list(parts.values())[:2], dim=1).view(dtype)
            result[f"{prefix}.down_proj{stored}"] = parts["down_proj"].view(dtype)
    return result


def save_in_two_files(tensors: Tensors, apart: Path, folder: Path):
    """With an index, and the other files of `apart`."""
    folder.mkdir()
    for file in apart.glob("*.json"):
        (folder / file.name).write_text(file.read_text())
    files = {key: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, key in enumerate(sorted(tensors))}
    for name in set(files.values()):
        save_file({key: tensors[key] for key in files if files[key] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def dequantized_weights(target: Target) -> Tensors:
    """Weights of the linear layers that are quantised, experts included, by their names in files."""
    weights = {}

    def add(parent, name, linear):
        weight = linear.dequantized()
        for part, rows in (linear.parts or {name: slice(None)}).items():
            weights[f"model.{parent}.{part}.weight"] = weight[rows]

    for path, module in target.named_modules():
        parent, _, name = path.rpartition(".")
        if isinstance(module, QuantizedLinear):
            add(parent, name, module)
        if isinstance(module, LinearExperts):
            for expert in range(module.spec.num_experts):
                for fused in module.layers:
                    add(f"{path}.{expert}", fused, module.expert(fused, expert))
    return weights


def check_logits(
    target: Target, model: PreTrainedModel, plain: Path, tokens: Tensor, *, is_exact: bool, is_adapted: bool = False
) -> float:
    """Checks logits against the model's, and returns the effect of quantisation on them. An input on the edge between
    two codes may fall either way; a factor of an adapted family rounds the scales once more. `plain`: the target before
    it was quantised."""
    expected = model(tokens[None]).logits[0]
    output = logits(target, tokens)
    effect = (expected - logits(load(plain), tokens)).square().mean()
    assert effect > (1e-8 if is_adapted else 1e-4), "quantisation makes a difference"
    if is_exact and not is_adapted:
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-3)
    else:
        share = 0.1 if not is_adapted else 1e-5 if is_exact else 0.2
        assert (output - expected).square().mean() < share * effect
    return float(effect)


def read_by_transformers(folder: Path) -> PreTrainedModel:
    """The checkpoint in fp32, dequantised by transformers, and by compressed-tensors for it."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    read = {"fp8": FineGrainedFP8Config, "compressed-tensors": CompressedTensorsConfig}[method](dequantize=True)
    with warnings.catch_warnings():  # that all else is taken from the folder
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=read)


def save_gpt_oss(folder: Path, with_fields: bool = True, size: int = 160):
    """With random MXFP4 experts, whose inputs do not fill the last 128."""
    config = GptOssConfig(**CAPPED["gpt-oss"].to_dict() | {"hidden_size": 96, "intermediate_size": size})
    save_random_target(config, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, outputs, blocks in (("gate_up_proj", 2 * size, 3), ("down_proj", 96, size // 32)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[key]
            shape = [4, outputs, blocks]
            tensors[f"{key}_blocks"] = torch.randint(0, 256, [*shape, 16], generator=generator).byte()
            tensors[f"{key}_scales"] = torch.randint(121, 126, shape, generator=generator).byte()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if with_fields:
        change_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})


def rounded(x: Tensor, inputs: str, static: Tensor | None) -> Tensor:
    """Inputs of a layer after they were quantised and dequantised."""
    if inputs == "exact":
        return x
    if inputs == "static":
        assert static is not None
        return (x / static).clamp(-448, 448).to(FP8).float() * static
    parts = x if inputs == "row" else x.unflatten(-1, (-1, 128))
    scale = parts.abs().amax(-1, keepdim=True) / 448
    return ((parts / scale).clamp(-448, 448).to(FP8).float() * scale).reshape(x.shape)


def reference(layout: Layout, plain: Path, folder: Path, values: Tensors) -> PreTrainedModel:
    """transformers' model in fp32 with these weights, whose layers get rounded inputs."""
    dense = folder / "dequantised"
    dense.mkdir()
    (dense / "config.json").write_text((plain / "config.json").read_text())
    save_file(
        {name: value.contiguous() for name, value in values.items()}, dense / "model.safetensors", {"format": "pt"}
    )
    model = load_model(dense, dtype=torch.float32)
    stored = load_file(folder / "model.safetensors")
    for path, module in model.named_modules():
        weight = stored.get(f"{path}.weight") if layout.config else None
        is_ignored = weight is not None and weight.dtype == torch.float32
        if isinstance(module, nn.Linear) and QUANTIZED.search(f"{path}.weight") and not is_ignored:
            static = static_scale(path, stored)
            module.register_forward_pre_hook(
                lambda _module, args, static=static: (rounded(args[0], layout.inputs, static),)
            )
        if path.endswith(".experts"):
            layer = ".".join(path.split(".")[:3])
            names = [name for name in stored if name.startswith(f"{layer}.") and ".experts." in name]
            static = [
                max((stored[name] for name in names if name.endswith(ends)), default=None)
                for ends in EXPERT_INPUT_SCALES
            ]
            if not layout.config or any("scale" in name for name in names):
                module.forward = partial(mixed, module, layout.inputs, static)
    return model


def static_scale(path: str, stored: Tensors) -> Tensor | None:
    """The largest scale of inputs of the layers that read what `path` reads."""
    parent, _, name = path.rpartition(".")
    parts = next((group for group in FUSED if name in group), (name,))
    parents = {parent, parent.replace("shared_experts", "shared_expert")}  # the latter in files of Laguna
    keys = {f"{prefix}.{part}.input_scale" for prefix in parents for part in parts}
    return max((stored[key] for key in keys & stored.keys()), default=None)


def mixed(
    module: Any, inputs: str, static: Sequence[Tensor | None], x: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """The weighted sum of its experts (T, k), whose inputs are rounded, for each row (T, H)."""
    rows = []
    for row, row_experts, shares in zip(x, experts.tolist(), weights, strict=True):
        outputs = []
        for expert in row_experts:
            gate, up = F.linear(rounded(row, inputs, static[0]), module.gate_up_proj[expert]).chunk(2)
            outputs.append(F.linear(rounded(module.act_fn(gate) * up, inputs, static[1]), module.down_proj[expert]))
        rows.append(shares @ torch.stack(outputs))
    return torch.stack(rows)


def load(folder: Path, name: str = "", dtype: torch.dtype = torch.float32) -> Target:
    """A target of a layout. "on-the-fly": of plain weights."""
    quantization = "fp8" if name == "on-the-fly" else None
    return load_target(folder, load_config(folder), dtype, torch.device("cpu"), quantization=quantization)


def change_tensors(folder: Path, prefix: str, changes: Mapping[str, Any]):
    """Replaces tensors of a file by their names after `prefix`; None deletes, and a list is a value, a type and the
    shape of a tensor that holds this value alone."""
    tensors = load_file(folder / "model.safetensors")
    for key, change in changes.items():
        tensors.pop(f"{prefix}.{key}", None)
        if isinstance(change, list):
            value, dtype, *shape = change
            tensors[f"{prefix}.{key}"] = torch.full(shape, value).to(getattr(torch, dtype))
        elif change is not None:
            tensors[f"{prefix}.{key}"] = change
    save_file(tensors, folder / "model.safetensors")
