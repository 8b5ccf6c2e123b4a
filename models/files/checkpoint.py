"""Checkpoints on disk: which files of a folder or of the hub hold the weights; reading, writing and naming them.

torch and the hub's client are imported where they are used: options are checked without them.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from slipstream.models.chat.quotes import json_type
from slipstream.models.files.atomic import put_json
from slipstream.models.files.names import check_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

Values = Mapping[str, Any]  # of a JSON object, such as config.json
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"-\d+-of-(\d+)\.safetensors$")
IGNORED_KEYS = ("rotary_emb.inv_freq",)  # buffers in old checkpoints that every loader recomputes


def resolve(name: str, revision: str | None = None, *, trust_remote_code: bool = False, weights: bool = True) -> Path:
    """The local folder of a checkpoint. A hub id is downloaded: its small files and the weights that will be read,
    which are safetensors only.

    `trust_remote_code` also fetches the Python files; `weights` False leaves the weights out. Raises ValueError for a
    name that leads nowhere, and if the hub can not be reached or refuses.
    """
    path = Path(name)
    if path.is_dir():
        return path
    check_checkpoint("checkpoint", name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    code = ("*.py",) if trust_remote_code else ()
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES, *code]))
        if weights:
            _fetch_weights(name, folder)
    except (LocalEntryNotFoundError, ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"checkpoint {name} is no folder in {Path.cwd()}, and the hub could not be reached ({reason(error)}); "
            "check the network, or give the path of a folder that holds the checkpoint"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(
            f"checkpoint {name} is no folder in {Path.cwd()}, and the hub does not give it out ({reason(error)}); "
            "check the name and the revision, and log in with `hf auth login` if it is private or gated"
        ) from error
    except OSError as error:
        raise ValueError(f"checkpoint {name} could not be downloaded ({reason(error)})") from error
    return folder


def _fetch_weights(name: str, folder: Path) -> None:
    """Fetches the files that `weight_files` will choose, from the same commit as the small files."""
    from huggingface_hub import snapshot_download

    index = folder / INDEX
    choices = [["model.safetensors"], ["model*.safetensors"], ["*.safetensors"]]
    for patterns in [indexed_names(index)] if index.exists() else choices:
        # Subfolders hold other formats (onnx/, original/).
        snapshot_download(name, revision=folder.name, allow_patterns=patterns, ignore_patterns=["*/*"])
        if any(any(folder.glob(pattern)) for pattern in patterns):
            return


def reason(error: Exception) -> str:
    """The first line of the underlying error; the hub client's own advice is about its environment variables."""
    return (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]


def weight_files(path: Path) -> list[Path]:
    """The files named by model.safetensors.index.json, else model.safetensors, else model*.safetensors, else the only
    safetensors file; sorted, empty if there is none. Public repositories hold others: the same weights once more
    (consolidated.safetensors), adapters, other precisions.

    Raises ValueError for a missing shard, and for several files that are not called model*.
    """
    if (path / INDEX).exists():
        names = indexed_names(path / INDEX)
        missing = [name for name in names if not (path / name).exists()]
        if missing:
            raise ValueError(f"{path / missing[0]} is missing, but {INDEX} names it; download the checkpoint again")
        return [path / name for name in names]
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    files = sorted(path.glob("model*.safetensors"))
    if files:
        _check_number(files)
        return files
    files = sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise ValueError(
            f"{path} holds {', '.join(file.name for file in files)} and no {INDEX}; name the one with the weights "
            "model.safetensors"
        )
    return files


def tensor_names(path: Path) -> set[str]:
    """Returns the names of the tensors in a folder's weight files: by the index, which may be there before them, else
    by the files, none without any."""
    if (path / INDEX).exists():
        return set(_weight_map(path / INDEX))
    return {name for file in weight_files(path) for name in read_header(file)[0] if name != "__metadata__"}


def _weight_map(index: Path) -> dict[str, Any]:
    """The file of each tensor. Raises ValueError for a file that is not an index."""
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is damaged: it has no weight_map; download the checkpoint again") from error


def indexed_names(index: Path) -> list[str]:
    """The distinct file names in an index, sorted. Raises ValueError for a file that is not an index."""
    try:
        names = sorted(set(_weight_map(index).values()))
    except TypeError as error:
        raise ValueError(f"{index} is damaged: it has no weight_map; download the checkpoint again") from error
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ValueError(f"{index}: weight_map must name files in the same folder; download the checkpoint again")
    return names


def _check_number(files: list[Path]) -> None:
    """Raises ValueError if shards are missing, by the number in their names."""
    totals = [int(match[1]) for file in files if (match := SHARD.search(file.name))]
    if totals and len(totals) != totals[0]:
        raise ValueError(
            f"{files[0].parent} holds {len(totals)} of the {totals[0]} shards of its weights; download the "
            "checkpoint again"
        )


def architecture_name(values: Values) -> str:
    names = values.get("architectures") or ["(none)"]
    if not isinstance(names, list):
        raise ValueError(f"config.json: architectures is {names!r}; it must be a list of a name")
    return str(names[0])


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        best = path.parent / "best"  # of a training run
        remedy = f"name {best}" if (best / path.name).exists() else f"is {path.parent} a complete checkpoint?"
        raise ValueError(f"{path} is missing; {remedy}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {json_type(values)}, not a JSON object")
    return values


def named_target(draft: Path) -> str:
    """The target named by the draft in folder `draft`: a hub id, a folder, or "" if the draft names no target.

    A folder that does not exist relative to the working directory is replaced by its path in training, from run.json.
    Raises ValueError if that does not exist either.
    """
    values = read_json(draft / "config.json")
    name = config_target(values)
    run = read_json(draft / "run.json") if (draft / "run.json").exists() else {}
    folder = run.get("target_path")
    if not name or not folder or Path(name).is_dir():
        return name
    if not Path(folder).is_dir():
        raise ValueError(f"target {name} is not a folder here, and {folder}, its path in training, does not exist")
    return str(folder)


def target_path(name: str) -> dict[str, str]:
    """For run.json: the absolute path of a target that is a folder, for readers in other folders (`named_target`)."""
    return {"target_path": str(Path(name).resolve())} if Path(name).is_dir() else {}


def config_target(values: Mapping[str, Any]) -> str:
    """The target in a draft's config.json, of our layout or of speculators', or ""."""
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    return str(values.get("target") or verifier.get("name_or_path") or "")


def read_tensors(path: Path) -> dict[str, "Tensor"]:
    """Every tensor of a folder's weight files, by name, file after file. They are views of the mapped files: one takes
    memory once its values are read, and a file is released with the last of its tensors (weights.load_weights).

    Raises ValueError if there is no file or one is damaged.
    """
    files = weight_files(path)
    if not files:
        raise ValueError(f"{path} holds no *.safetensors file; convert the checkpoint to safetensors")
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except Exception as error:
            raise _damaged(file, error) from error
    return _without_ignored(tensors)


def read_draft_tensors(path: Path) -> dict[str, "Tensor"]:
    """As `read_tensors`; without safetensors reads pytorch_model.bin, EAGLE's published format, as plain data."""
    if (path / "adapter_config.json").exists():
        raise ValueError(f"{path} holds a LoRA adapter, not a whole draft; merge it with slipstream convert")
    pickled = path / "pytorch_model.bin"
    if not pickled.exists() or weight_files(path):
        return read_tensors(path)
    import torch

    try:
        return _without_ignored(torch.load(pickled, map_location="cpu", weights_only=True))
    except Exception as error:
        raise ValueError(f"{pickled} is damaged or holds more than tensors ({error}); fetch it again") from error


def _without_ignored(tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(IGNORED_KEYS)}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns the errors that safetensors and torch.save raise when writing `path` to a full disk into OSError."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise OSError(f"{path} could not be written ({error}); make room and run the same command again") from error


def write_checkpoint(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, "Tensor"], run: Mapping[str, Any]
) -> None:
    """Writes config.json, model.safetensors and run.json (provenance) into the existing folder `path`."""
    write_tensors(path / "model.safetensors", tensors)
    put_json(path / "config.json", config)
    put_json(path / "run.json", run)


def write_tensors(file: Path, tensors: Mapping[str, "Tensor"], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file, whose entries of `metadata` would have no fixed order if they were several."""
    from safetensors.torch import save_file

    assert not metadata or len(metadata) == 1
    with disk_errors(file.parent):
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, file, metadata)
    file.chmod(0o644)  # safetensors creates files that only their owner may read


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of a tokenizer's mapping: the fast tokenizer's description, else the vocabulary."""
    if not tokenizer.is_fast:
        return _hash_json(tokenizer.get_vocab())
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    return _hash_json(description | {"truncation": None, "padding": None})  # these remember the last call's arguments


def _hash_json(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def weights_fingerprint(path: Path) -> str:
    """sha256 over every tensor's name, shape and a sample of its bytes, which detects a re-tuned target.

    Reads at most 4,096 bytes at each end and the middle of a tensor: seconds for a target of any size.
    """
    digest = hashlib.sha256()
    for file in weight_files(path):
        header, base = read_header(file)
        with file.open("rb") as stream:
            for name in sorted(header.keys() - {"__metadata__"}):
                start, end = header[name]["data_offsets"]
                digest.update(f"{name} {header[name]['dtype']} {header[name]['shape']}".encode())
                digest.update(_sample(stream, base, start, end))
    return digest.hexdigest()


def checkpoint_fingerprint(path: Path) -> str:
    """Returns a sha256 of config.json and of what `weights_fingerprint` reads, or of samples of pickled weights."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    digest.update(weights_fingerprint(path).encode())
    pickled = path / "pytorch_model.bin"
    if pickled.exists():
        with pickled.open("rb") as stream:
            digest.update(_sample(stream, 0, 0, pickled.stat().st_size))
    return digest.hexdigest()


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header (dtype, shape and offsets of each tensor) and the position that offsets start at. Raises
    ValueError for a file that is damaged or cut short."""
    try:
        with safe_open(path, "np"):  # checks the header, and the file's length by it
            pass
    except SafetensorError as error:
        raise _damaged(path, error) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def _damaged(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} is damaged or cut short ({error}); fetch or train it again")


def _sample(stream: Any, base: int, start: int, end: int, size: int = 4096) -> bytes:
    spots: Iterable[int] = {start, (start + end) // 2, max(start, end - size)}
    pieces = []
    for spot in sorted(spots):
        stream.seek(base + spot)
        pieces.append(stream.read(min(size, end - spot)))
    return b"".join(pieces)
