"""The prepared datasets of a run, one or several with weights: read, checked, and joined split by split."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, concatenate_datasets

from slipstream.train.batches import PackedRows, Share, load_prepared
from slipstream.train.options import DataOptions

ROWS_AT_ONCE = 4096  # documents


@dataclass(frozen=True, slots=True)
class Folder:
    path: str
    passes: float  # times that an epoch has its rows: the weight
    splits: DatasetDict
    data_hash: str


@dataclass(frozen=True, slots=True)
class Mixture:
    """Folders in the order of the options."""

    folders: Sequence[Folder]

    @classmethod
    def load(cls, weights: Mapping[str, float], tokenizer_hash: str) -> "Mixture":
        """Prepared datasets by path. Raises ValueError for one that another tokenizer made or that lacks a split, or
        unless one of them holds out documents."""
        folders = []
        for path, weight in weights.items():
            splits, report = load_prepared(Path(path), tokenizer_hash)
            folders.append(Folder(path, weight, splits, report["data_hash"]))
        if not any(len(folder.splits["heldout"]) for folder in folders):
            raise ValueError(
                f"data.path {', '.join(weights)}: split heldout is empty; prepare with a larger --heldout or with "
                "--heldout-data"
            )
        return cls(folders)

    @property
    def data_hash(self) -> str:
        """Identifies folders and weights; the folder's own hash if there is one with weight 1."""
        if len(self.folders) == 1 and self.folders[0].passes == 1:
            return self.folders[0].data_hash
        parts = [[folder.data_hash, folder.passes] for folder in self.folders]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def provenance(self) -> dict[str, dict[str, Any]]:
        """For run.json, by path."""
        return {folder.path: {"data_hash": folder.data_hash, "weight": folder.passes} for folder in self.folders}

    def train_rows(self, options: DataOptions) -> PackedRows:
        """Without copies of documents that any folder holds out."""
        parts = [folder.splits["train"] for folder in self.folders]
        heldout = [folder.splits["heldout"] for folder in self.folders if len(folder.splits["heldout"])]
        copies = find_copies(parts, heldout) if len(parts) > 1 else [()]
        shares = [
            Share(folder.path, len(part), folder.passes, numbers)
            for folder, part, numbers in zip(self.folders, parts, copies, strict=True)
        ]
        return PackedRows(joined(parts), options.max_length, shares, is_split=options.splits_documents)

    def heldout_rows(self, options: DataOptions, limit: int) -> PackedRows:
        """The first `limit` documents of each folder, whatever its weight."""
        splits = [folder.splits["heldout"] for folder in self.folders]
        parts = [split.select(range(limit)) if len(split) > limit else split for split in splits]
        shares = [Share(folder.path, len(part)) for folder, part in zip(self.folders, parts, strict=True)]
        documents = joined(parts)
        rows = PackedRows(documents, options.max_length, shares, is_split=options.splits_documents)
        if "category" in documents.column_names:
            rows.categories = documents["category"][:]
        return rows


def joined(parts: Sequence[Dataset]) -> Dataset:
    parts = [part for part in parts if len(part)]
    return concatenate_datasets(parts) if len(parts) > 1 else parts[0]


def find_copies(train: Sequence[Dataset], heldout: Sequence[Dataset]) -> list[list[int]]:
    """Numbers of the training documents of each folder that equal a held-out document of any. `prepare` leaves out
    those of the same folder."""
    texts = {tuple(ids) for split in heldout for ids in split["input_ids"]}
    keys = np.concatenate([document_keys(table) for split in heldout for table in tables_of(split)])
    copies = []
    for split in train:
        parts = [np.isin(document_keys(table), keys) for table in tables_of(split)]
        candidates = np.flatnonzero(np.concatenate(parts)).tolist()
        copies.append([number for number in candidates if tuple(split[number]["input_ids"]) in texts])
    return copies


def tables_of(split: Dataset) -> Iterator[pyarrow.Table]:
    yield from split.select_columns("input_ids").with_format("arrow").iter(batch_size=ROWS_AT_ONCE)


def document_keys(table: pyarrow.Table) -> np.ndarray:
    """(D,) int64, equal for equal documents and seldom for others: made of the number and the sum of their tokens."""
    lengths = pc.list_value_length(table["input_ids"]).to_numpy().astype(np.int64)
    ends = np.cumsum(lengths)
    sums = np.concatenate(([0], np.cumsum(pc.list_flatten(table["input_ids"]).to_numpy(), dtype=np.int64)))
    return (lengths << 40) + sums[ends] - sums[ends - lengths]
