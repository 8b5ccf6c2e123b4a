"""Where a checkpoint says how its weights are quantised, and the fields of such configs.

Formats read their fields (models/layers/formats/).
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from slipstream.models.files.checkpoint import Values, read_json

BLOCK = 128  # rows and columns of an FP8 block
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.")  # that a file's names may have
GROUP_SIZES = (32, 64, 128)  # of int4; and multiples of 256, and -1


def has_fp8_cache(path: Path) -> bool:
    """Whether scales of the KV cache in the checkpoint, if it has any, are those of e4m3 codes."""
    values = find_config(path) or {}
    scheme = object_field(values, "kv_cache_scheme")
    algorithm = (object_field(values, "quantization") or values).get("kv_cache_quant_algo") or "FP8"
    is_float8 = (scheme.get("num_bits", 8), scheme.get("type", "float")) == (8, "float")
    return is_float8 and str(algorithm).upper() == "FP8"


def find_config(path: Path) -> Values | None:
    """The quantisation config with `quant_method`, wherever the folder has it."""
    file = path / "config.json"
    config = read_json(file) if file.exists() else {}
    text = config.get("text_config")
    for values in (config, text if isinstance(text, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            if section := object_field(values, name):
                return section
    for name, method in (
        ("hf_quant_config.json", "modelopt"),
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
    ):
        if (path / name).exists():
            return {"quant_method": method, **read_json(path / name)}
    return None


def read_ignored(values: Values) -> list[str]:
    inner = object_field(values, "quantization") or values
    names = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    skipped = [f"re:{key[2:]}" for key in object_field(inner, "dynamic") if key.startswith("-:")]  # GPTQModel
    return [
        *(entry for name in names for entry in module_field(inner, name)),
        *module_field({"dynamic": skipped}, "dynamic"),
    ]


def group_size_field(values: Values, name: str) -> int:
    size = values.get(name)
    if size in (-1, None):
        return -1
    if not isinstance(size, int) or (size not in GROUP_SIZES and (size <= 0 or size % 256)):
        raise ValueError(f"{name} is {size!r}; it must be {', '.join(map(str, GROUP_SIZES))}, k * 256 or -1")
    return size


def expect(values: Values, name: str, *allowed: Any) -> None:
    """`allowed` has None if the field may be left out."""
    if values.get(name) not in allowed:
        choices = " or ".join(repr(value) for value in allowed if value not in (None, ""))
        raise ValueError(f"{name} is {values.get(name)!r}; it must be {choices}")


def expect_blocks(values: Values, name: str) -> None:
    size_field = values.get(name)
    sizes = size_field.split("x") if isinstance(size_field, str) else size_field
    if not isinstance(sizes, list) or [str(size) for size in sizes] != [str(BLOCK)] * 2:
        raise ValueError(f"{name} is {size_field!r}; it must be [{BLOCK}, {BLOCK}]")


def object_field(values: Values, name: str) -> Values:
    """A field that holds an object; an empty one if it is left out, null or empty."""
    section = values.get(name) or {}
    if not isinstance(section, Mapping):
        raise ValueError(
            f"{name} is {section!r}; it must be an object, as the tool that quantised the weights wrote it"
        )
    return section


def module_field(values: Values, name: str) -> list[str]:
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


def names_module(target: str, module: str) -> bool:
    """Whether a target of a config group names this linear layer. Its name may lack the model's prefix."""
    if target == "Linear":
        return True
    names = [f"{prefix}{module}" for prefix in PREFIXES]
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in names)
    return any(name == target or name.endswith(f".{target}") for name in names)


def ignores(pattern: str, module: str) -> bool:
    """Whether an entry of a list of 16-bit modules names this layer or what holds it."""
    names = [f"{prefix}{module}" for prefix in PREFIXES]
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    if "*" in pattern:
        return any(fnmatchcase(name, pattern) for name in names)
    return any(f".{pattern}." in f".{name}." for name in names)
