"""The formats of weights, and how a checkpoint's config is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.models.files.checkpoint import Values
from slipstream.models.files.quantization import find_config, module_field, object_field, read_ignored
from slipstream.models.layers.formats.base import Format, Quantization
from slipstream.models.layers.formats.fp8 import FP8Format
from slipstream.models.layers.formats.int4 import Int4Format
from slipstream.models.layers.formats.mxfp4 import MXFP4Format

FORMATS: list[type[Format]] = [FP8Format, Int4Format, MXFP4Format]
ON_THE_FLY = {
    "fp8": Quantization("fp8 on the fly", [(["Linear"], FP8Format("channel", on_the_fly=True))], on_the_fly=True)
}  # by the value of the option `quantization`


def read_quantization(path: Path, option: str | None = None) -> Quantization | None:
    """Reads how the checkpoint in folder `path` is quantised; None if it is not. `option`: "fp8" to quantise it on the
    fly.

    Raises ValueError for unknown formats, malformed fields, and an `option` for a checkpoint that is quantised already.
    """
    try:
        values = find_config(path)
        quantization = None if values is None else _read(values)
    except ValueError as error:
        variants = ", ".join(format.variants for format in FORMATS)
        raise ValueError(f"{path} cannot be read: {error}; known formats: {variants}") from None
    if quantization is None:
        return ON_THE_FLY[option] if option is not None else None
    if option is not None:
        raise ValueError(
            f"quantization is {option!r}, but {path} is quantised already ({quantization.name}); leave the option out"
        )
    return quantization


def tensor_dtypes() -> dict[str, tuple[Any, ...]]:
    """Tensors by which a quantised linear layer is known in files, with their dtypes."""
    return {name: dtypes for format in FORMATS for name, dtypes in format.tensors.items()}


def _read(values: Values) -> Quantization:
    method = str(values.get("quant_method") or ("modelopt" if "quant_algo" in values else "")).lower()
    if method in ("compressed-tensors", "compressed_tensors"):
        quantization = _read_compressed_tensors(values)
    else:
        quantization = _read_of_one_format(method, values)
    return replace(quantization, ignored=read_ignored(values))


def _read_of_one_format(method: str, values: Values) -> Quantization:
    inner = object_field(values, "quantization") or values
    if method == "modelopt" and not inner.get("quant_algo") and inner.get("kv_cache_quant_algo"):
        return Quantization("modelopt, KV cache alone", [])
    for format in FORMATS:
        quantization = format.read(method, values)
        if quantization is not None:
            return quantization
    if method == "modelopt":
        raise ValueError(f"quant_algo is {inner.get('quant_algo')!r}")
    raise ValueError(f"quant_method is {values.get('quant_method')!r}")


def _read_compressed_tensors(values: Values) -> Quantization:
    sparsity = object_field(values, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"sparsity_config.format is {sparsity!r}")
    if object_field(values, "transform_config").get("config_groups"):
        raise ValueError("transform_config rotates weights")
    groups = object_field(values, "config_groups")
    if not groups and object_field(values, "kv_cache_scheme"):
        return Quantization("compressed-tensors, KV cache alone", [])
    if not groups:
        raise ValueError("config_groups is empty")
    read = []
    for name in groups:
        if not (group := object_field(groups, name)):
            raise ValueError(f"config_groups.{name} is {groups[name]!r}; it must be an object with targets and weights")
        read.append((module_field(group, "targets") or ["Linear"], _read_group(values, group)))
    # Names and expressions say more than the name of a class.
    read.sort(key=lambda pair: pair[0] == ["Linear"])
    kinds = dict.fromkeys(format.description for _, format in read)
    return Quantization(f"compressed-tensors {', '.join(kinds)}", read)


def _read_group(values: Values, group: Values) -> Format:
    kind = group.get("format") or values.get("format")
    weights = object_field(group, "weights")
    inputs = None if group.get("input_activations") is None else object_field(group, "input_activations")
    for candidate in FORMATS:
        format = candidate.read_group(str(kind), weights, inputs)
        if format is not None:
            return format
    with_inputs = "16-bit inputs" if inputs is None else f"inputs of {inputs.get('num_bits')} bits"
    raise ValueError(
        f"format is {kind!r} with {weights.get('type')} weights of {weights.get('num_bits')} bits per "
        f"{weights.get('strategy')} and {with_inputs}"
    )
