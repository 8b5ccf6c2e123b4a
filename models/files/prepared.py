"""Datasets in folders: those that `slipstream prepare` wrote, and others that `datasets` saved."""

from pathlib import Path
from typing import Any

from slipstream.models.files.checkpoint import read_json
from slipstream.models.files.outputs import DATASET

REPORT = "report.json"


def missing(path: Path) -> list[str]:
    """Files that `path` lacks to be a prepared dataset."""
    return [name for name in DATASET.markers if not (path / name).is_file()]


def read_report(path: Path, option: str, tokenizer_hash: str | None = None) -> dict[str, Any]:
    """The report of the prepared dataset that `option` names. Raises ValueError when `path` holds none, or one of
    another tokenizer than the target's, if its hash is known."""
    for name in missing(path):
        raise ValueError(f"{option} {path} holds no {name}; make the folder with `slipstream prepare`")
    report = read_json(path / REPORT)
    prepared_with = report["tokenizer_hash"]
    if tokenizer_hash not in (None, prepared_with):
        raise ValueError(
            f"{option} {path} was prepared with another tokenizer (hash {prepared_with[:12]}, the target's is "
            f"{tokenizer_hash[:12]}); prepare it again with --target set to this target"
        )
    return report


def load_saved(path: Path) -> Any:
    """A Dataset or DatasetDict, memory-mapped. Raises ValueError for a folder of which a part is missing or damaged."""
    from datasets import load_from_disk  # a server that only reads a report does without

    try:
        return load_from_disk(str(path))
    except (OSError, ValueError, TypeError, LookupError) as error:  # of datasets, pyarrow and json
        raise ValueError(f"{path} is damaged ({error}); write the dataset again") from error
