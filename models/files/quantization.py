"""How a checkpoint's weights are quantised, read from its own files.

Lists of modules in these files are not always right, so what a module's tensors are decides whether it is quantised
(models/layers/quantized.py); the files say how.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from slipstream.models.files.checkpoint import read_json

BLOCK = 128  # rows and columns of an FP8 block
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")  # that a file's names may have
GROUP_SIZES = (32, 64, 128)  # of int4; and multiples of 256, and -1
KNOWN = (
    "fp8 (per tensor, in blocks of 128 x 128), compressed-tensors (float-quantized per tensor, channel or block; "
    "pack-quantized of 4 bits), modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO), awq (gemm), gptq (4 bits, v1 and "
    "v2), mxfp4 (experts)"
)


@dataclass(frozen=True, slots=True)
class FP8Format:
    """e4m3 weights, multiplied by e4m3 inputs."""

    scales: Literal["tensor", "channel", "block"]
    """Scales of the weights: one, one per output, or one per block of 128 x 128. Inputs of blocks are scaled by row and
    128 inputs, others by row unless `static`."""
    scale_name: str = "weight_scale"
    static: bool = False
    """Whether the file has the inputs' scale."""
    on_the_fly: bool = False
    """Whether the file has 16-bit weights, which are quantised per output when they are loaded."""


@dataclass(frozen=True, slots=True)
class Int4Format:
    """4-bit weights, multiplied by 16-bit inputs: (code - zero) * scale."""

    layout: Literal["awq", "gptq", "packed"]
    group_size: int
    """Inputs that share a scale; -1: all."""
    symmetric: bool = False
    """All zeros are 8."""
    zero_offset: int = 0
    """Added to the file's zeros."""
    act_order: bool = False
    """Whether groups may be of inputs that are not neighbours (desc_act, actorder). The file's g_idx decides."""


Format = FP8Format | Int4Format


@dataclass(frozen=True, slots=True)
class Quantization:
    """The formats of a checkpoint."""

    name: str
    """For messages, fingerprints and times of steps."""
    groups: Sequence[tuple[Sequence[str], Format]]
    """Targets of a format: "Linear", names of modules or their ends, "re:" and a regular expression."""
    on_the_fly: bool = False
    ignored: Sequence[str] = ()
    """Modules of 16 bits: names, parts of names, wildcards, "re:" and a regular expression."""

    def ignores(self, module: str) -> bool:
        """Whether the config says that this module, or what holds it, is not quantised."""
        return any(_ignores(pattern, module) for pattern in self.ignored)

    def listed_format(self, module: str) -> Format | None:
        """Format of a linear layer by the config alone, for estimates without the file; None for 16 bits."""
        if self.ignores(module):
            return None
        formats = (format for targets, format in self.groups if any(_names(target, module) for target in targets))
        return next(formats, None)

    def format_of(self, module: str) -> Format:
        """Format of a quantised linear layer, by its name in files. Raises ValueError if no group names it."""
        for targets, format in self.groups:
            if any(_names(target, module) for target in targets):
                return format
        raise ValueError(
            f"{module} is quantised, but the quantisation config ({self.name}) names no format for it; its targets are "
            f"{[target for targets, _ in self.groups for target in targets]}"
        )


ON_THE_FLY = Quantization("fp8 on the fly", [(["Linear"], FP8Format("channel", on_the_fly=True))], on_the_fly=True)


def read_quantization(path: Path, option: str | None = None) -> Quantization | None:
    """Reads how the checkpoint in folder `path` is quantised; None if it is not. `option`: "fp8" to quantise it on the
    fly.

    Raises ValueError for unknown formats, malformed fields, and an `option` for a checkpoint that is quantised already.
    """
    try:
        values = _find_config(path)
        quantization = None if values is None else _read(values)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; known formats: {KNOWN}") from None
    if quantization is None:
        return ON_THE_FLY if option is not None else None
    if option is not None:
        raise ValueError(
            f"quantization is {option!r}, but {path} is quantised already ({quantization.name}); leave the option out"
        )
    return quantization


def has_fp8_cache(path: Path) -> bool:
    """Whether scales of the KV cache in the checkpoint, if it has any, are those of e4m3 codes."""
    values = _find_config(path) or {}
    scheme = _object(values, "kv_cache_scheme")
    algorithm = (_object(values, "quantization") or values).get("kv_cache_quant_algo") or "FP8"
    is_float8 = (scheme.get("num_bits", 8), scheme.get("type", "float")) == (8, "float")
    return is_float8 and str(algorithm).upper() == "FP8"


def _find_config(path: Path) -> Mapping[str, Any] | None:
    """The quantisation config with `quant_method`, wherever the folder has it."""
    file = path / "config.json"
    config = read_json(file) if file.exists() else {}
    text = config.get("text_config")
    for values in (config, text if isinstance(text, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            if section := _object(values, name):
                return section
    for name, method in (
        ("hf_quant_config.json", "modelopt"),
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
    ):
        if (path / name).exists():
            return {"quant_method": method, **read_json(path / name)}
    return None


def _read(values: Mapping[str, Any]) -> Quantization:
    method = str(values.get("quant_method") or ("modelopt" if "quant_algo" in values else "")).lower()
    readers: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
        "fp8": _read_fp8,
        "compressed-tensors": _read_compressed_tensors,
        "compressed_tensors": _read_compressed_tensors,
        "modelopt": _read_modelopt,
        "awq": _read_awq,
        "gptq": _read_gptq,
        "mxfp4": lambda _: Quantization("mxfp4", []),
    }
    if method not in readers:
        raise ValueError(f"quant_method is {values.get('quant_method')!r}")
    return replace(readers[method](values), ignored=_read_ignored(values))


def _read_ignored(values: Mapping[str, Any]) -> list[str]:
    inner = _object(values, "quantization") or values
    names = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    skipped = [f"re:{key[2:]}" for key in _object(inner, "dynamic") if key.startswith("-:")]  # GPTQModel
    return [*(entry for name in names for entry in _modules(inner, name)), *_modules({"dynamic": skipped}, "dynamic")]


def _all(name: str, format: Format) -> Quantization:
    return Quantization(name, [(["Linear"], format)])


def _read_fp8(values: Mapping[str, Any]) -> Quantization:
    """DeepSeek's and Qwen's, and older ones with a scale per tensor."""
    _expect(values, "fmt", None, "e4m3", "float8_e4m3fn")
    _expect(values, "scale_fmt", None, "float")
    _expect(values, "activation_scheme", None, "dynamic", "static")
    is_static = values.get("activation_scheme") == "static"
    block = values.get("weight_block_size")
    if block is None:
        return _all("fp8 per tensor", FP8Format("tensor", static=is_static))
    _expect_blocks(values, "weight_block_size")
    if is_static:
        raise ValueError(f"weight_block_size is {block} with static activations; activation_scheme must be 'dynamic'")
    return _all("fp8 in blocks", FP8Format("block", "weight_scale_inv"))


def _read_modelopt(values: Mapping[str, Any]) -> Quantization:
    inner = _object(values, "quantization") or values
    algorithm = str(inner.get("quant_algo") or "").upper()
    if not algorithm and inner.get("kv_cache_quant_algo"):
        return Quantization("modelopt, KV cache alone", [])
    formats = {
        "FP8": FP8Format("tensor", static=True),
        "FP8_PER_CHANNEL_PER_TOKEN": FP8Format("channel"),
        "FP8_PB_WO": FP8Format("block"),
    }
    if algorithm not in formats:
        raise ValueError(f"quant_algo is {inner.get('quant_algo')!r}")
    return _all(f"modelopt {algorithm}", formats[algorithm])


def _read_compressed_tensors(values: Mapping[str, Any]) -> Quantization:
    sparsity = _object(values, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"sparsity_config.format is {sparsity!r}")
    if _object(values, "transform_config").get("config_groups"):
        raise ValueError("transform_config rotates weights")
    groups = _object(values, "config_groups")
    if not groups and _object(values, "kv_cache_scheme"):
        return Quantization("compressed-tensors, KV cache alone", [])
    if not groups:
        raise ValueError("config_groups is empty")
    read = []
    for name in groups:
        if not (group := _object(groups, name)):
            raise ValueError(f"config_groups.{name} is {groups[name]!r}; it must be an object with targets and weights")
        read.append((_modules(group, "targets") or ["Linear"], _read_group(values, group)))
    # Names and expressions say more than the name of a class.
    read.sort(key=lambda pair: pair[0] == ["Linear"])
    kinds = dict.fromkeys(_describe(format) for _, format in read)
    return Quantization(f"compressed-tensors {', '.join(kinds)}", read)


def _read_group(values: Mapping[str, Any], group: Mapping[str, Any]) -> Format:
    name = group.get("format") or values.get("format")
    weights = _object(group, "weights")
    inputs = None if group.get("input_activations") is None else _object(group, "input_activations")
    strategy = weights.get("strategy")
    bits = weights.get("num_bits")
    kind = weights.get("type")
    if name in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8 and inputs is not None:
        _expect(inputs, "num_bits", 8)
        _expect(inputs, "type", "float")
        is_static = not inputs.get("dynamic", False)
        if strategy == "block":
            _expect_blocks(weights, "block_structure")
            if is_static:
                raise ValueError(f"dynamic is {inputs.get('dynamic')!r}; inputs of weights in blocks must be dynamic")
            _expect(inputs, "group_size", BLOCK)
            return FP8Format("block")
        if strategy in ("tensor", "channel"):
            _expect(inputs, "strategy", "tensor", "token")
            return FP8Format(strategy, static=is_static)
    is_int4 = name == "pack-quantized" and kind == "int" and bits == 4 and inputs is None
    if is_int4 and strategy in ("group", "channel"):
        size = -1 if strategy == "channel" else _group_size(weights, "group_size")
        is_ordered = weights.get("actorder") in ("group", "dynamic")
        return Int4Format("packed", size, symmetric=bool(weights.get("symmetric", True)), act_order=is_ordered)
    with_inputs = "16-bit inputs" if inputs is None else f"inputs of {inputs.get('num_bits')} bits"
    raise ValueError(f"format is {name!r} with {kind} weights of {bits} bits per {strategy} and {with_inputs}")


def _read_awq(values: Mapping[str, Any]) -> Quantization:
    """config.json's names, or AutoAWQ's own ones of quant_config.json."""
    is_old = "bits" not in values and not values.keys().isdisjoint(("w_bit", "q_group_size"))
    _expect(values, "w_bit" if is_old else "bits", 4)
    version = str(values.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"version is {values['version']!r}")
    _expect(values, "zero_point", None, True)
    size = _group_size(values, "group_size" if "group_size" in values else "q_group_size")
    return _all(f"awq, groups of {size}", Int4Format("awq", size))


def _read_gptq(values: Mapping[str, Any]) -> Quantization:
    _expect(values, "bits", 4)
    _expect(values, "checkpoint_format", None, "", "gptq", "gptq_v2")
    _expect(values, "is_marlin_format", None, False)
    dynamic = _object(values, "dynamic")
    for pattern in dynamic:
        change = _object(dynamic, pattern)
        override = {name: change[name] for name in ("bits", "group_size", "sym") if name in change}
        if not pattern.startswith("-:") and any(values.get(name) != value for name, value in override.items()):
            raise ValueError(f"dynamic gives {pattern} another format, {override}")
    is_second = values.get("checkpoint_format") == "gptq_v2"
    size = _group_size(values, "group_size")
    is_symmetric = bool(values.get("sym", True))
    is_ordered = bool(values.get("desc_act", False))
    format = Int4Format("gptq", size, is_symmetric, zero_offset=0 if is_second else 1, act_order=is_ordered)
    return _all(f"gptq{'_v2' if is_second else ''}, groups of {size}", format)


def _group_size(values: Mapping[str, Any], name: str) -> int:
    size = values.get(name)
    if size in (-1, None):
        return -1
    if not isinstance(size, int) or (size not in GROUP_SIZES and (size <= 0 or size % 256)):
        raise ValueError(f"{name} is {size!r}; it must be {', '.join(map(str, GROUP_SIZES))}, k * 256 or -1")
    return size


def _expect(values: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """`allowed` has None if the field may be left out."""
    if values.get(name) not in allowed:
        choices = " or ".join(repr(value) for value in allowed if value not in (None, ""))
        raise ValueError(f"{name} is {values.get(name)!r}; it must be {choices}")


def _expect_blocks(values: Mapping[str, Any], name: str) -> None:
    size_field = values.get(name)
    sizes = size_field.split("x") if isinstance(size_field, str) else size_field
    if not isinstance(sizes, list) or [str(size) for size in sizes] != [str(BLOCK)] * 2:
        raise ValueError(f"{name} is {size_field!r}; it must be [{BLOCK}, {BLOCK}]")


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that holds an object; an empty one if it is left out, null or empty."""
    section = values.get(name) or {}
    if not isinstance(section, Mapping):
        raise ValueError(
            f"{name} is {section!r}; it must be an object, as the tool that quantised the weights wrote it"
        )
    return section


def _modules(values: Mapping[str, Any], name: str) -> list[str]:
    """A field that names modules; empty if it is left out. Entries that begin with "re:" are regular expressions."""
    entries = values.get(name) or []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"{name} is {entries!r}; it must be a list of strings: names of modules, or re:EXPRESSION")
    for entry in entries:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{name} has {entry!r}, which is no regular expression ({error}); correct it") from None
    return entries


def _describe(format: Format) -> str:
    if isinstance(format, FP8Format):
        return f"fp8 per {format.scales}{', static inputs' if format.static else ''}"
    return f"int4, groups of {format.group_size}"


def _names(target: str, module: str) -> bool:
    """Whether a target of a config group names this linear layer. Its name may lack the model's prefix."""
    if target == "Linear":
        return True
    names = [f"{prefix}{module}" for prefix in PREFIXES]
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in names)
    return any(name == target or name.endswith(f".{target}") for name in names)


def _ignores(pattern: str, module: str) -> bool:
    """Whether an entry of a list of 16-bit modules names this layer or what holds it."""
    names = [f"{prefix}{module}" for prefix in PREFIXES]
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    if "*" in pattern:
        return any(fnmatchcase(name, pattern) for name in names)
    return any(f".{pattern}." in f".{name}." for name in names)
