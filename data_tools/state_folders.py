"""The folders that captured states are written to: one for our trainer, one for that of speculators.

`ShardFolder` is models/files/state_store.py's. `SpeculatorsFolder` is what `speculators train` (0.9.0) reads offline:

    *.arrow, state.json, ...           a row per document, training first: input_ids, loss_mask, seq_len
    hidden_states/hs_I.safetensors     of row I: token_ids (S,) int64, hidden_states (S, K + 1, Ht)
    token_freq.pt                      {token id: its number in answers}, from which it chooses a draft vocabulary
    index.json                         what was captured, as in the other folder

Its drafts read K states and are taught by the (K + 1)-th, the last layer's output before the target's final norm. Its
layer ids count inputs of layers: its id i is our i - 1.
Invariant: the rows appear with the folder, and a file of states under its final name is complete.
"""

import shlex
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from safetensors import SafetensorError
from safetensors.torch import load_file

from slipstream.models.files.atomic import atomic_folder, recover, refuse_nonempty, staged_name
from slipstream.models.files.prepared import load_saved
from slipstream.models.files.state_store import (
    DTYPES,
    INDEX,
    ShardRange,
    ShardTensors,
    StateIndex,
    StateStore,
    save_tensors,
    shard_path,
    write_shard,
)

COUNTED_ROWS = 4096  # at once
WRITERS = 8  # files written at once: a small file waits for the disk (fsync) longer than it takes to copy
ROW = Features({"input_ids": List(Value("int64")), "loss_mask": List(Value("int64")), "seq_len": Value("int64")})


@dataclass(frozen=True)
class CaptureFolder:
    """A capture on disk. Shards are its parts that are computed, and repaired, one at a time."""

    path: Path
    index: StateIndex
    splits: Mapping[str, Dataset]


class ShardFolder(CaptureFolder):
    """Shards of many documents, without the states that our trainer does not read."""

    def check_new(self) -> None:
        """Raises ValueError if a new capture must not be written here."""
        foreign = sorted(path.name for path in self.path.glob("shard-*.safetensors"))
        if foreign:
            raise ValueError(f"output {self.path} holds {foreign[0]} but no {INDEX}; name another folder")

    def missing(self) -> list[int]:
        """Numbers of the shards that are not complete."""
        return self.index.missing(self.path)

    def prepare(self) -> None:
        """Writes what comes before the shards, or clears up after a killed writer."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in (self.path / INDEX, *(shard_path(self.path, number) for number in range(len(self.index.shards)))):
            recover(path)
        if not (self.path / INDEX).exists():
            self.index.write(self.path)

    def write(self, number: int, shard: ShardTensors) -> None:
        """Raises ValueError if the disk has no room."""
        write_shard(self.path, number, shard, self.index.digest)

    @cached_property
    def store(self) -> StateStore:
        return StateStore(self.path)

    def verify(self, number: int) -> None:
        """Reads a shard. Raises ValueError if it is missing or damaged, with the command that rebuilds it."""
        for slot in range(self.index.shards[number].count):
            self.store.read(number, slot)

    def use(self) -> str:
        """How to train from it."""
        return f"train with --data.aux_states {shlex.quote(str(self.path))}"


class SpeculatorsFolder(CaptureFolder):
    """A file per document, as the trainer of speculators reads them."""

    def check_new(self) -> None:
        if not all(map(len, self.splits.values())):
            raise ValueError(
                "data has no heldout rows, which speculators validates on; prepare it with --heldout, and capture "
                "some of them"
            )
        if self.path.exists():
            refuse_nonempty(self.path)

    def missing(self) -> list[int]:
        names = {path.name for path in self.states.glob("hs_*.safetensors")}
        shards = enumerate(self.index.shards)
        return [number for number, span in shards if any(self.file(row).name not in names for row in self.rows(span))]

    def prepare(self) -> None:
        if (self.path / INDEX).exists():
            for staging in self.states.glob(".*.tmp"):
                recover(staging.with_name(staged_name(staging.name) or ""))
            return
        with atomic_folder(self.path) as folder, TemporaryDirectory(dir=folder) as scratch:
            documents = concatenate_datasets([self.splits["train"], self.splits["heldout"]])
            rows = documents.select_columns(["input_ids", "loss_mask"]).map(
                cut_rows,
                batched=True,
                fn_kwargs={"max_length": self.index.max_length},
                features=ROW,
                cache_file_name=f"{scratch}/rows.arrow",
                desc="writing rows",
            )
            rows.with_format("torch").save_to_disk(folder)
            torch.save(count_answer_tokens(rows), folder / "token_freq.pt")
            (folder / self.states.name).mkdir()
            self.index.write(folder)

    def write(self, number: int, shard: ShardTensors) -> None:
        rows = self.rows(self.index.shards[number])
        with ThreadPoolExecutor(WRITERS) as writers:
            deque(writers.map(self.write_row, rows, range(len(rows)), repeat(shard)), maxlen=0)  # raises their errors

    def write_row(self, row: int, slot: int, shard: ShardTensors) -> None:
        document = shard.document(slot)
        save_tensors(self.file(row), {"token_ids": document["tokens"].long(), "hidden_states": document["features"]})

    def verify(self, number: int) -> None:
        for row in self.rows(self.index.shards[number]):
            fault = self.fault(row)
            if fault:
                raise ValueError(f"{self.file(row)} {fault}; rebuild it: {self.index.rebuild_command(number)}")

    def fault(self, row: int) -> str:
        """The fault of the states of `row`, or ""; the package's own check (offline.check_hidden_states) with
        shape and dtype."""
        form = self.index.form
        tokens = self.written[row]["input_ids"]
        if not self.file(row).exists():
            return "is missing"
        try:
            tensors = load_file(self.file(row))
            states = tensors["hidden_states"]
            ids = tensors["token_ids"]
        except (SafetensorError, OSError, KeyError) as error:
            return f"is damaged ({error})"
        if not torch.equal(ids, tokens):
            return f"is damaged (its tokens are not those of row {row})"
        if states.shape != (len(tokens), len(form.layers), form.hidden_size) or states.dtype != DTYPES[form.dtype]:
            return f"is damaged (its states are {tuple(states.shape)} in {states.dtype})"
        return "" if states.isfinite().all() else "holds states that are not finite"

    def use(self) -> str:
        return "train with speculators train " + shlex.join(trainer_flags(self.path, self.index))

    @property
    def states(self) -> Path:
        return self.path / "hidden_states"

    @cached_property
    def written(self) -> Dataset:
        return load_saved(self.path)

    def rows(self, span: ShardRange) -> range:
        """Numbers of a shard's documents among the rows of both splits."""
        first = span.first + (0 if span.split == "train" else len(self.splits["train"]))
        return range(first, first + span.count)

    def file(self, row: int) -> Path:
        return self.states / f"hs_{row}.safetensors"


StateFolder = ShardFolder | SpeculatorsFolder


def states_of_speculators(layers: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The states of a folder for drafts that read `layers`. Raises ValueError for the state after the final norm."""
    if num_layers in layers:
        raise ValueError(
            f"layers is {list(layers)}; drafts of speculators do not read state {num_layers}, after the final norm: "
            f"name outputs of layers, 0..{num_layers - 1}"
        )
    return (*layers, num_layers - 1)


def trainer_flags(path: Path, index: StateIndex) -> list[str]:
    """Flags of `speculators train` for the folder `path`.

    The ratio lies between two rows, since the trainer cuts its product with their number to a whole number.
    """
    sizes = [sum(span.count for span in index.shards if span.split == name) for name in ("train", "heldout")]
    layers = [str(layer + 1) for layer in index.form.layers[:-1]]
    ratio = round((sizes[0] + 0.5) / sum(sizes), 9)
    words = ["--data-path", str(path.resolve()), "--target-layer-ids", *layers]
    return [*words, "--train-data-ratio", str(ratio), "--on-missing", "raise"]


def cut_rows(rows: Mapping[str, list[list[int]]], max_length: int) -> dict[str, list]:
    ids = [row[:max_length] for row in rows["input_ids"]]
    return {
        "input_ids": ids,
        "loss_mask": [list(map(int, row[:max_length])) for row in rows["loss_mask"]],
        "seq_len": list(map(len, ids)),
    }


def count_answer_tokens(rows: Dataset) -> dict[int, int]:
    """As the package's vocab_mapping.save_token_frequency_distribution counts: supervised tokens of all rows."""
    counts = Counter[int]()
    for table in rows.with_format("arrow").iter(batch_size=COUNTED_ROWS):
        ids, mask = (pc.list_flatten(table[name]).to_numpy() for name in ("input_ids", "loss_mask"))
        token_ids, numbers = np.unique(ids[mask == 1], return_counts=True)
        counts.update(dict(zip(token_ids.tolist(), numbers.tolist(), strict=True)))
    return dict(counts)
