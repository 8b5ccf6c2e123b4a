"""Datasets in folders: those that `slipstream prepare` wrote, and others that `datasets` saved."""

from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_from_disk

from slipstream.models.files.checkpoint import read_json
from slipstream.models.files.outputs import DATASET

REPORT = "report.json"


def is_prepared(path: Path) -> bool:
    return not missing(path)


def missing(path: Path) -> list[str]:
    """Files without which `path` is no prepared dataset."""
    return [name for name in DATASET.markers if not (path / name).is_file()]


def read_report(path: Path, option: str) -> dict[str, Any]:
    """The report of the prepared dataset that `option` names. Raises ValueError when `path` holds none."""
    for name in missing(path):
        raise ValueError(f"{option} {path} holds no {name}; make the folder with `slipstream prepare`")
    return read_json(path / REPORT)


def load_saved(path: Path) -> Any:
    """A Dataset or DatasetDict, memory-mapped. Raises ValueError for a folder of which a part is missing or damaged."""
    try:
        saved: Dataset | DatasetDict = load_from_disk(str(path))
    except (OSError, ValueError, TypeError, LookupError) as error:  # of datasets, pyarrow and json
        raise ValueError(f"{path} is damaged ({error}); write the dataset again") from error
    return saved
