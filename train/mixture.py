"""The prepared datasets of a run, one or several with weights: read, checked, and joined split by split."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import DatasetDict, concatenate_datasets

from slipstream.train.batches import PackedRows, Share, load_prepared
from slipstream.train.options import DataOptions


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
        """Prepared datasets by path. Raises ValueError for one that another tokenizer made, or that lacks a split."""
        folders = []
        for path, weight in weights.items():
            splits, report = load_prepared(Path(path), tokenizer_hash)
            folders.append(Folder(path, weight, splits, report["data_hash"]))
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
        return self._pack("train", options, [folder.passes for folder in self.folders])

    def heldout_rows(self, options: DataOptions, limit: int) -> PackedRows:
        """The first `limit` documents of each folder, whatever its weight."""
        return self._pack("heldout", options, [1.0] * len(self.folders), limit)

    def _pack(self, split: str, options: DataOptions, weights: Sequence[float], limit: int | None = None) -> PackedRows:
        parts = [folder.splits[split] for folder in self.folders]
        if limit is not None:
            parts = [part.select(range(min(limit, len(part)))) for part in parts]
        shares = [
            Share(folder.path, len(part), weight)
            for folder, part, weight in zip(self.folders, parts, weights, strict=True)
        ]
        documents = concatenate_datasets(parts) if len(parts) > 1 else parts[0]
        return PackedRows(documents, options.max_length, shares, is_split=options.splits_documents)
