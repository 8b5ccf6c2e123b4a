"""Which safetensors files of a checkpoint's folder hold its weights.

Public repositories keep other files beside them: the same weights once more (consolidated.safetensors), adapters,
other precisions. Whoever reads weights asks `weight_files`, so loading and fingerprints agree.
"""

import json
import re
from pathlib import Path

INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"-\d+-of-(\d+)\.safetensors$")


def weight_files(path: Path) -> list[Path]:
    """The files named by model.safetensors.index.json, else model.safetensors, else model*.safetensors, else the only
    safetensors file; sorted, empty if the folder has none.

    Raises ValueError for a shard that is missing, and for several files none of which is called model*.
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


def indexed_names(index: Path) -> list[str]:
    """The distinct file names in an index, sorted. Raises ValueError for a file that is not an index."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: it has no weight_map; download the checkpoint again") from error
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ValueError(f"{index}: weight_map must name files in the same folder; download the checkpoint again")
    return names


def _check_number(files: list[Path]) -> None:
    """Raises ValueError unless shards that say how many they are are all there."""
    totals = [int(match[1]) for file in files if (match := SHARD.search(file.name))]
    if totals and len(totals) != totals[0]:
        raise ValueError(
            f"{files[0].parent} holds {len(totals)} of the {totals[0]} shards of its weights; download the "
            "checkpoint again"
        )
