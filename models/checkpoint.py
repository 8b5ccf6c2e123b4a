"""Checkpoints in and out: strict, in the public key names (midlayer.*, d2t, t2d, fc, norm, lm_head).

Inside, projections that read the same input are fused (qkv_proj, gate_up_proj); files keep them apart, and are read
either way.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.models import hub
from slipstream.models.weight_files import weight_files

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def is_checkpoint(name: str) -> bool:
    """True for a local folder or a hub id (owner/name); False for the bare name of a drafter."""
    return "/" in name or (name != "" and Path(name).is_dir())


def resolve(name: str, revision: str | None = None, *, trust_remote_code: bool = False, weights: bool = True) -> Path:
    """The local folder of a checkpoint. A hub id is downloaded: its small files and the weights that will be read.

    `trust_remote_code` also fetches the Python files; `weights` False leaves the weights out.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise ValueError(f"checkpoint {name} does not exist; name a folder or a hub id such as owner/model")
    return hub.download(name, revision, trust_remote_code=trust_remote_code, weights=weights)


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; is {path.parent} a complete checkpoint?") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not a JSON object")
    return values


def named_target(draft: Path) -> str:
    """The target that the draft in the folder `draft` names: a hub id or a folder, "" where it names none.

    A folder that is not found from the working directory is taken from where it lay in training, which run.json tells.
    Raises ValueError if it is not there either.
    """
    values = read_json(draft / "config.json")
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    name = str(values.get("target") or verifier.get("name_or_path") or "")
    run = read_json(draft / "run.json") if (draft / "run.json").exists() else {}
    folder = run.get("target_path")
    if not name or not folder or Path(name).is_dir():
        return name
    if not Path(folder).is_dir():
        raise ValueError(f"target {name} is no folder here, and {folder}, where it was in training, does not exist")
    return str(folder)


def check_numbers(values: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises ValueError for fields of a draft's config.json that are absent, null or no numbers."""
    missing = [name for name in names if values.get(name) is None]
    if missing:
        raise ValueError(f"draft config lacks {', '.join(missing)}")
    for name in names:
        if not isinstance(values[name], int | float):
            raise ValueError(f"draft config: {name} is {values[name]!r}; it must be a number")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's weight files. Raises ValueError for none, or for a damaged file."""
    files = weight_files(path)
    if not files:
        raise ValueError(f"{path} holds no *.safetensors file; convert the checkpoint to safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except Exception as error:
            raise ValueError(f"{file} is damaged or cut short ({error}); fetch or train it again") from error
    return tensors


def read_draft_tensors(path: Path) -> dict[str, Tensor]:
    """As `read_tensors`; without safetensors those of pytorch_model.bin, as EAGLE's authors publish, read as data."""
    pickled = path / "pytorch_model.bin"
    if not pickled.exists() or weight_files(path):
        return read_tensors(path)
    try:
        return torch.load(pickled, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{pickled} is damaged or holds more than tensors ({error}); fetch it again") from error


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Joins q/k/v and gate/up along their output rows; a group that is not whole is left for `load_strict` to name."""
    fused = dict(tensors)
    for joined, parts in FUSED.items():
        for key in [key for key in tensors if f".{parts[0]}." in key]:
            names = [key.replace(parts[0], part) for part in parts]
            if all(name in fused for name in names):
                fused[key.replace(parts[0], joined)] = torch.cat([fused.pop(name) for name in names])
    return fused


def unfuse(tensors: Mapping[str, Tensor], sizes: Mapping[str, list[int]]) -> dict[str, Tensor]:
    """Inverse of `fuse`; `sizes` holds the output rows of each part by fused name."""
    parts: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        joined = next((name for name in FUSED if f"{name}." in key), None)
        if joined is None:
            parts[key] = tensor
            continue
        for name, part in zip(FUSED[joined], tensor.split(sizes[joined]), strict=True):
            parts[key.replace(joined, name)] = part
    return parts


def public_tensors(config: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A draft's state_dict by public names; `config` has num_heads, num_kv_heads, head_dim and intermediate_size."""
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    sizes = {
        "qkv_proj": [count * config.head_dim for count in heads],
        "gate_up_proj": [config.intermediate_size] * 2,
    }
    return unfuse(state, sizes)


def load_strict(module: nn.Module, tensors: Mapping[str, Tensor], source: Path | str) -> None:
    """Loads `tensors` into `module`. Raises ValueError that names every missing, unexpected or misshapen key."""
    expected = module.state_dict()
    faults = [f"missing {key}" for key in sorted(expected.keys() - tensors.keys())]
    faults += [f"unexpected {key}" for key in sorted(tensors.keys() - expected.keys())]
    faults += [
        f"{key} is {list(tensors[key].shape)}, the config says {list(expected[key].shape)}"
        for key in sorted(expected.keys() & tensors.keys())
        if tensors[key].shape != expected[key].shape
    ]
    if faults:
        raise ValueError(f"{source} does not fit its config: {'; '.join(faults)}")
    module.load_state_dict(dict(tensors), assign=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises OSError where safetensors and torch.save, writing `path`, raise errors of their own: on a full disk."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise OSError(f"{path} could not be written ({error}); make room and run the same command again") from error


def write_checkpoint(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], run: Mapping[str, Any]
) -> None:
    """Writes config.json, model.safetensors and run.json (provenance) into the existing folder `path`."""
    weights = path / "model.safetensors"
    with disk_errors(path):
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, weights)
    weights.chmod(0o644)  # safetensors makes files that nobody else may read
    for name, values in (("config.json", config), ("run.json", run)):
        (path / name).write_text(json.dumps(values, indent=2) + "\n")


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of what maps text to ids: the fast tokenizer's own description, else the vocabulary."""
    if not tokenizer.is_fast:
        return _hash_json(tokenizer.get_vocab())
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    return _hash_json(description | {"truncation": None, "padding": None})  # these remember the last call's arguments


def _hash_json(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def weights_fingerprint(path: Path) -> str:
    """sha256 over every tensor's name, shape and a sample of its bytes, so that a re-tuned target is noticed quickly.

    At most 4,096 bytes are read from each end and the middle of a tensor: seconds for a target of any size.
    """
    digest = hashlib.sha256()
    for file in weight_files(path):
        with safe_open(file, "pt") as tensors:
            names = sorted(tensors.keys())
        with file.open("rb") as stream:
            (header_size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(header_size))
            for name in names:
                start, end = header[name]["data_offsets"]
                digest.update(f"{name} {header[name]['dtype']} {header[name]['shape']}".encode())
                digest.update(_sample(stream, 8 + header_size, start, end))
    return digest.hexdigest()


def _sample(stream: Any, base: int, start: int, end: int, size: int = 4096) -> bytes:
    spots: Iterable[int] = {start, (start + end) // 2, max(start, end - size)}
    pieces = []
    for spot in sorted(spots):
        stream.seek(base + spot)
        pieces.append(stream.read(min(size, end - spot)))
    return b"".join(pieces)
