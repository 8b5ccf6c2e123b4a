"""Puts quantised layers into a network of plain ones, which is on the meta device, where a checkpoint's tensors are
quantised.

Lists of modules in configs are not always right, so what a module's tensors are decides whether it is quantised; the
config says how. Embeddings, norms and the head stay as they are; a quantised head is dequantised, since drafts share
it.
"""

import logging
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from slipstream.models.layers.attention import SelfAttention
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.formats.base import (
    FLOATS,
    Format,
    Quantization,
    QuantizedExperts,
    QuantizedLinear,
    Tensors,
)
from slipstream.models.layers.formats.linear_experts import PROJECTIONS, LinearExperts
from slipstream.models.layers.formats.table import FORMATS, tensor_dtypes
from slipstream.models.layers.linear import Head, Linear
from slipstream.models.layers.mlp import GatedMLP
from slipstream.models.layers.moe import Experts

logger = logging.getLogger(__name__)

# Small layers that are not quantised on the fly, as routers are not: the gate of a shared expert, and those by which
# delta nets forget.
GATES = (".shared_expert_gate", ".linear_attn.gate_proj")
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Ends of names of tensors for a KV cache in FP8 (models/targets/cache_scales.py)."""


def quantize(network: nn.Module, quantization: Quantization | None, tensors: Tensors, device: torch.device) -> None:
    """Puts quantised layers and experts into `network`, on the meta device, where `tensors` of its files are quantised.
    Gates of attention are joined with its other projections (`join_gates`).

    Heads stay as they are (`dequantize_head`). Raises ValueError for parts of a fused projection and experts of a layer
    that differ in format, formats that experts cannot have, and those that `device` does not multiply.
    """
    join_gates(network, quantization, tensors)
    for path, module in list(network.named_modules()):
        quantized: nn.Module | None = None
        if isinstance(module, Experts):
            quantized = _quantized_experts(path, module, quantization, tensors, device)
        elif isinstance(module, Linear) and not isinstance(module, Head):
            quantized = _quantized_linear(path, module, quantization, tensors)
        if quantized is not None:
            parent, _, name = path.rpartition(".")
            setattr(network.get_submodule(parent), name, quantized)
    for module in network.modules():
        for norm, reader in module.norm_readers if isinstance(module, DecoderLayer) else ():
            norm.quantize = reader.input_scaling()
            norm.keeps_rows = isinstance(reader, Experts) and norm.quantize is not None
        if isinstance(module, SelfAttention):
            module.quantize = module.o_proj.input_scaling()
        if isinstance(module, GatedMLP) and isinstance(module.gate_up_proj, QuantizedLinear):
            module.gate_up_proj.quantize = module.down_proj.input_scaling()


def join_gates(network: nn.Module, quantization: Quantization | None, tensors: Tensors) -> None:
    """Makes gates of attention's output parts of the projections of q, k and v, where `tensors` of the files of
    `network` have all of these apart and in one format that allows it."""
    for path, module in network.named_modules():
        if not isinstance(module, SelfAttention) or not module.can_join_gate:
            continue
        if any(f"{path}.qkv_proj.{kind}" in tensors for kind in ("weight", *tensor_dtypes())):
            continue
        names = [f"{path}.{part}".removeprefix(".") for part in (*module.qkv_proj.parts, "gate_proj")]
        formats = {format_in_file(name, quantization, tensors) for name in names}
        format = formats.pop()
        if not formats and (format is None or format.joins(module.qkv_proj.out_features, names, tensors)):
            module.join_gate()


def quantize_by_config(network: nn.Module, quantization: Quantization | None) -> None:
    """Puts quantised layers and experts into `network`, on the meta device, as if files had each in the format that
    their config lists for it: for estimates and random weights."""
    tensors = {} if quantization is None else listed_tensors(network, quantization)
    quantize(network, quantization, tensors, torch.device("cpu"))


def listed_tensors(network: nn.Module, quantization: Quantization) -> dict[str, Tensor]:
    """Stand-ins, by names in files, for the tensors by which quantised layers are known. Empty where weights are
    quantised on the fly: their files have 16 bits."""
    tensors: dict[str, Tensor] = {}
    if quantization.on_the_fly:
        return tensors
    ends = [end for _, format in quantization.groups for end in format.expert_tensors]
    for path, module in network.named_modules():
        for name, num_inputs in _file_linears(path, module):
            format = quantization.listed_format(name)
            if format is not None:
                tensors |= {f"{name}.{kind}": tensor for kind, tensor in format.stand_ins(num_inputs).items()}
        if isinstance(module, Experts) and not quantization.ignores(path):
            tensors |= {f"{path}.{name}{end}": torch.empty(0, device="meta") for name in PROJECTIONS for end in ends}
    return tensors


def _file_linears(path: str, module: nn.Module) -> Iterator[tuple[str, int]]:
    """Names and numbers of inputs of the linear layers that files have for a module."""
    if isinstance(module, Linear) and not isinstance(module, Head) and not path.endswith(GATES):
        parent = path.rpartition(".")[0]
        for name in [f"{parent}.{part}" for part in module.parts] or [path]:
            yield name, module.in_features
    elif isinstance(module, Experts):
        for matrix in PROJECTIONS:
            for part in module.parts(matrix):
                yield f"{path}.{part.removesuffix('.weight')}", module.get_parameter(matrix).shape[-1]


def _quantized_linear(
    path: str, linear: Linear, quantization: Quantization | None, tensors: Tensors
) -> QuantizedLinear | None:
    if quantization is not None and quantization.on_the_fly and path.endswith(GATES):
        return None
    parent, _, name = path.rpartition(".")
    names = [f"{parent}.{part}".removeprefix(".") for part in linear.parts]
    if not names or any(f"{path}.{kind}" in tensors for kind in tensor_dtypes()):
        names = [path]
    format_of_part = {name: format_in_file(name, quantization, tensors) for name in names}
    formats = set(format_of_part.values())
    if len(formats) > 1:
        raise ValueError(f"parts of {path} differ in format, and it multiplies them at once: {format_of_part}")
    (format,) = formats
    if format is None:
        return None
    with torch.device("meta"):
        return format.layer(linear, names, tensors)


def format_in_file(
    name: str, quantization: Quantization | None, tensors: Tensors, is_quantized: bool | None = None
) -> Format | None:
    """Format of the linear layer with this name in files; None for 16 or 32 bits. `is_quantized`: whether its tensors
    are, where they have other names than a layer's."""
    if is_quantized is None:
        stored = ((tensors.get(f"{name}.{kind}"), dtypes) for kind, dtypes in tensor_dtypes().items())
        is_quantized = any(tensor is not None and tensor.dtype in dtypes for tensor, dtypes in stored)
    if quantization is not None and quantization.on_the_fly != is_quantized:
        return quantization.format_of(name)
    if is_quantized:
        raise _quantized_already(name, quantization)
    return None


def _quantized_already(name: str, quantization: Quantization | None) -> ValueError:
    why = "leave quantization out" if quantization else "no file says how; add quantization_config to config.json"
    return ValueError(f"{name} is quantised already; {why}")


def dequantize_head(
    name: str, quantization: Quantization | None, tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Replaces the tensors of a quantised head, called `name`, by its weights in `dtype`: drafts share them."""
    keys = {key.removeprefix(f"{name}."): key for key in tensors if key.startswith(f"{name}.")}
    if quantization is None or quantization.on_the_fly:
        return
    format = format_in_file(name, quantization, tensors)
    if format is None:
        return
    shape = format.shape_in_file({key: tensors[full] for key, full in keys.items()})
    if shape is None:
        raise ValueError(
            f"{name} is quantised as {format.description}, but its tensors in the file are another format's"
        )
    outputs, inputs = shape
    with torch.device("meta"):
        layer = format.layer(Linear(inputs, outputs), [name], tensors)
    missing = [
        key for key, expected in layer.file_tensors(None).items() if key not in keys and not expected.is_optional
    ]
    if missing:
        raise ValueError(f"{name} is quantised, but the file lacks {', '.join(f'{name}.{key}' for key in missing)}")
    layer.to_empty(device="cpu")
    layer.load_part(None, {key: tensors.pop(full) for key, full in keys.items()})
    tensors[f"{name}.weight"] = layer.dequantized().to(dtype)
    logger.info("%s is quantised in the file; it is dequantised to %s, for drafts share it", name, dtype)


def _quantized_experts(
    path: str,
    experts: Experts,
    quantization: Quantization | None,
    tensors: Tensors,
    device: torch.device,
) -> QuantizedExperts | None:
    with torch.device("meta"):
        quantized = _experts_alone(path, experts, quantization, tensors)
        if quantized is None:
            quantized = _linear_experts(path, experts, quantization, tensors)
    for format in () if quantized is None or device.type != "cuda" else quantized.formats:
        if torch.cuda.get_device_capability(device) < format.expert_capability:
            needed = ".".join(map(str, format.expert_capability))
            raise ValueError(
                f"{path} is in {format.title}, and {torch.cuda.get_device_name(device)} does not multiply it: experts "
                f"in {format.title} need compute capability {needed} or later; use a checkpoint in another format"
            )
    return quantized


def _experts_alone(
    path: str, experts: Experts, quantization: Quantization | None, tensors: Tensors
) -> QuantizedExperts | None:
    """Experts in a format that linear layers do not have."""
    for format in FORMATS:
        names = [f"{path}.{name}{end}" for name in PROJECTIONS for end in format.expert_tensors]
        if format.experts is not None and any(name in tensors for name in names):
            if quantization is None or quantization.on_the_fly:
                raise _quantized_already(path, quantization)
            return format.experts(experts)
    return None


def _linear_experts(
    path: str, experts: Experts, quantization: Quantization | None, tensors: Tensors
) -> LinearExperts | None:
    formats = {name: _format_of_experts(path, name, experts, quantization, tensors) for name in PROJECTIONS}
    if None in formats.values():
        if set(formats.values()) != {None}:
            raise ValueError(f"projections of {path} differ, all or none must be quantised: {formats}")
        return None
    layers: dict[str, QuantizedLinear] = {}
    for name, parts in PROJECTIONS.items():
        hidden, size = experts.down_proj.shape[1:]
        linear = Linear(size, hidden) if name == "down_proj" else Linear(hidden, dict.fromkeys(parts, size))
        names = [f"{path}.{expert}.{part}" for expert in range(experts.spec.num_local) for part in parts]
        layers[name] = cast(Format, formats[name]).layer(linear, names, tensors)
        if "permutation" in layers[name]._buffers:
            raise ValueError(
                f"{path} has act order (groups of inputs that are not neighbours: g_idx), which is not supported for "
                "experts; use a checkpoint that was quantised with desc_act false"
            )
    return LinearExperts(experts, layers)


def _format_of_experts(
    path: str, name: str, experts: Experts, quantization: Quantization | None, tensors: Tensors
) -> Format | None:
    """Format of a projection of all experts."""
    fused = tensors.get(f"{path}.{name}")
    if fused is not None:
        is_quantized = fused.dtype not in FLOATS
        format = format_in_file(f"{path}.{name}", quantization, tensors, is_quantized)
        if format is not None and not format.is_fused:
            raise ValueError(
                f"{path}.{name} holds all experts, which is read for 16 bits and FP8 in blocks alone; use a checkpoint "
                "that has its experts apart"
            )
        return format
    examples: dict[Format | None, str] = {}
    for expert in range(experts.spec.num_local):
        for part in PROJECTIONS[name]:
            module = f"{path}.{expert}.{part}"
            examples.setdefault(format_in_file(module, quantization, tensors), module)
    if len(examples) > 1:
        raise ValueError(f"experts of {path} differ in format, and one kernel multiplies them: {examples}")
    return next(iter(examples))
