"""A folder of captured target states: an index, and shards that are read through memory maps.

    index.json                what was captured from which target and data, and which documents each shard holds
    shard-00000.safetensors   see feature_shard.py

States are kept by document, not by packed row, so that any max_length and any packing can read them. The index is
written before the first shard; which shards are complete shows from the files alone.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.models.atomic import atomic_file
from slipstream.models.checkpoint import read_json
from slipstream.models.feature_format import FeatureFormat
from slipstream.models.feature_shard import MappedShard, ShardRange, open_shard, shard_path

INDEX = "index.json"
VERSION = 1
REMEDIES = {
    "target_fingerprint": "capture them from this target",
    "tokenizer_hash": "prepare the data with this target's tokenizer and capture them again",
    "data_hash": "train on the data that they were captured from, or capture them again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureIndex:
    """What a capture is of. `command` repeats it."""

    target_fingerprint: str
    tokenizer_hash: str
    data_hash: str
    max_length: int
    form: FeatureFormat
    shards: tuple[ShardRange, ...]
    command: str

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "target_fingerprint": self.target_fingerprint,
            "tokenizer_hash": self.tokenizer_hash,
            "data_hash": self.data_hash,
            "max_length": self.max_length,
            "format": self.form.to_json(),
            "shards": [asdict(shard) for shard in self.shards],
            "command": self.command,
        }

    @classmethod
    def read(cls, folder: Path) -> "FeatureIndex":
        """Raises ValueError unless `folder` holds an index of this version."""
        if not (folder / INDEX).exists():
            raise ValueError(f"{folder} holds no captured features; make them with `slipstream capture-features`")
        values = read_json(folder / INDEX)
        if values.get("version") != VERSION:
            raise ValueError(
                f"{folder / INDEX} has version {values.get('version')}, this program reads {VERSION}; capture again"
            )
        names = ("target_fingerprint", "tokenizer_hash", "data_hash", "max_length", "command")
        return cls(
            **{name: values[name] for name in names},
            form=FeatureFormat.from_json(values["format"]),
            shards=tuple(ShardRange(**shard) for shard in values["shards"]),
        )

    def write(self, folder: Path) -> None:
        with atomic_file(folder / INDEX) as temporary:
            temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @property
    def digest(self) -> str:
        """Names the capture in its shards; another command line may give the same one."""
        values = {name: value for name, value in self.to_json().items() if name != "command"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def missing(self, folder: Path) -> list[int]:
        """Numbers of the shards that are not in `folder`."""
        return [number for number in range(len(self.shards)) if not shard_path(folder, number).exists()]

    def rebuild_command(self, number: int) -> str:
        return f"{self.command} --shards {number} --yes"

    def num_bytes(self, number: int) -> int:
        shard = self.shards[number]
        return self.form.num_bytes(shard.count, shard.num_tokens, shard.num_supervised)


class FeatureStore:
    """Reads the documents of a capture. Threads may share one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = FeatureIndex.read(folder)
        self.capture = self.index.digest
        self._opened: dict[int, MappedShard] = {}
        self._verified = [np.zeros(shard.count, bool) for shard in self.index.shards]
        self._numbers: dict[str, list[int]] = {}  # split -> its shards, ascending by first document
        for number, shard in enumerate(self.index.shards):
            self._numbers.setdefault(shard.split, []).append(number)

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raises ValueError where a run's target_fingerprint, tokenizer_hash or data_hash are others."""
        for name, remedy in REMEDIES.items():
            there, here = getattr(self.index, name), identity[name]
            if there != here:
                raise ValueError(f"features {self.folder}: {name} is {there[:12]}, the run's is {here[:12]}; {remedy}")

    def check_states(self, layers: tuple[int, ...], *, final_state: bool) -> None:
        """Raises ValueError unless it holds the states of `layers`, and that after the final norm if it is wanted."""
        form = self.index.form
        if not set(layers) <= set(form.layers):
            raise ValueError(
                f"features {self.folder} hold the states {list(form.layers)}, the draft reads {list(layers)}; capture "
                "with --layers, or set draft.feature_layers"
            )
        if final_state and not form.has_final_state:
            raise ValueError(
                f"features {self.folder} lack the state after the final norm, which the loss needs; capture them again "
                "with --last-hidden"
            )

    def find(self, split: str, document: int) -> tuple[int, int] | None:
        """Shard of a split's document and its slot there, None where it was not to be captured."""
        numbers = self._numbers.get(split, [])
        place = bisect_right(numbers, document, key=lambda number: self.index.shards[number].first) - 1
        if place < 0:
            return None
        shard = self.index.shards[numbers[place]]
        slot = document - shard.first
        return (numbers[place], slot) if slot < shard.count else None

    def is_complete(self, number: int) -> bool:
        return number in self._opened or shard_path(self.folder, number).exists()

    def length(self, number: int, slot: int) -> int:
        """Tokens kept of a document."""
        bounds = self.open(number).token_bounds
        return bounds[slot + 1] - bounds[slot]

    def read(self, number: int, slot: int) -> dict[str, Any]:
        """A document's tensors as views of the map. Raises ValueError for damage, with the command that repairs it."""
        shard = self.open(number)
        shard.ask_for(slot)
        if not self._verified[number][slot]:
            if shard.checksum(slot) != int(shard.tensors["checksums"][slot]):
                self.fail(number, f"is damaged (document {slot} of it has another checksum)")
            self._verified[number][slot] = True
        return shard.document(slot)

    def open(self, number: int) -> MappedShard:
        if number not in self._opened:
            span = self.index.shards[number]
            try:
                self._opened[number] = open_shard(self.folder, number, span, self.index.form, self.capture)
            except ValueError as error:
                raise ValueError(f"{error}; rebuild it: {self.index.rebuild_command(number)}") from error
        return self._opened[number]

    def close(self) -> None:
        """Lets go of the maps; the next read makes them again. What a map shows stays in the host's memory."""
        self._opened.clear()

    def fail(self, number: int, fault: str) -> None:
        command = self.index.rebuild_command(number)
        raise ValueError(f"{shard_path(self.folder, number)} {fault}; rebuild it: {command}")
