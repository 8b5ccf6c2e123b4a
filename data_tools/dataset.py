"""Prepared datasets on disk: tokens and loss masks in two splits, and the report that says what they are.

A folder that `datasets` loads (DatasetDict with "train" and "heldout"; columns input_ids list<int32>, loss_mask
list<bool>) with report.json beside the splits. Where a supervised token has another weight than 1, there is also the
column loss_weights list<float32>, null in rows without such tokens; where a row has a category, the column category
string, null in rows without one. The folder appears whole or not at all, and replaces a prepared dataset only.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, DatasetDict

from slipstream.models.files.atomic import atomic_folder, put_json
from slipstream.models.files.checkpoint import Values
from slipstream.models.files.outputs import DATASET
from slipstream.models.files.prepared import REPORT

ROWS = "rows.arrow"
WRITE_ROWS = 1000
WEIGHTS = "loss_weights"
CATEGORY = "category"
WEIGHTS_TYPE = pyarrow.list_(pyarrow.float32())
SCHEMA = pyarrow.schema(
    [
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("loss_mask", pyarrow.list_(pyarrow.bool_())),
        (WEIGHTS, WEIGHTS_TYPE),
        (CATEGORY, pyarrow.string()),
    ]
)
# input_ids (S,) int32, and the loss mask (S,) bool, or weights (S,) fp32 if some are neither 0 nor 1
Tokens = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Conversation:
    documents: Sequence[Tokens]  # stay in one split
    category: str | None = None


class RowWriter:
    """Streams documents into one Arrow file, a row each, and keeps their count and hashes. A context manager."""

    def __init__(self, path: Path) -> None:
        self.rows = self.tokens = self.supervised = 0
        self.weighted = 0  # rows with weights
        self.categorized = 0  # rows with a category
        self.keys = array("Q")  # hash of each row's ids
        self.conversations = array("Q")  # number of each row's conversation
        self._digest = hashlib.sha256()
        self._pending: list[tuple[np.ndarray, np.ndarray, str | None]] = []
        self._writer = pyarrow.ipc.new_stream(str(path), SCHEMA)

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._writer.close()

    @property
    def data_hash(self) -> str:
        """sha256 of every row's length, ids and mask or weights, in the order written."""
        return self._digest.hexdigest()

    def write(self, conversation: Conversation) -> None:
        number = self.conversations[-1] + 1 if self.rows else 0
        for input_ids, loss_mask in conversation.documents:
            self.conversations.append(number)
            self._write(input_ids, loss_mask, conversation.category)

    def _write(self, input_ids: np.ndarray, loss_mask: np.ndarray, category: str | None) -> None:
        assert len(input_ids) == len(loss_mask)
        self._digest.update(len(input_ids).to_bytes(4, "little") + input_ids.tobytes() + loss_mask.tobytes())
        self.keys.append(int.from_bytes(hashlib.blake2b(input_ids.tobytes(), digest_size=8).digest(), "little"))
        self._pending.append((input_ids, loss_mask, category))
        self.rows += 1
        self.tokens += len(input_ids)
        self.supervised += int(np.count_nonzero(loss_mask))
        self.weighted += int(loss_mask.dtype != np.bool_)
        self.categorized += category is not None
        if len(self._pending) == WRITE_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        rows, masks, categories = zip(*self._pending, strict=True)
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        weights = [None if mask.dtype == np.bool_ else mask for mask in masks]
        supervised = np.concatenate([mask != 0 for mask in masks])
        columns = [
            pyarrow.ListArray.from_arrays(offsets, pyarrow.array(column))
            for column in (np.concatenate(rows), supervised)
        ]
        columns += [pyarrow.array(weights, WEIGHTS_TYPE), pyarrow.array(categories, pyarrow.string())]
        self._writer.write_batch(pyarrow.record_batch(columns, schema=SCHEMA))
        self._pending.clear()


def write_dataset(
    conversations: Iterable[Conversation],
    path: Path,
    *,
    heldout: float,
    seed: int,
    describe: Callable[[], Values],
    heldout_conversations: Iterable[Conversation] | None = None,
) -> dict[str, Any]:
    """Writes `conversations`, shuffled by `seed`, with the share `heldout` (at least one unless it is 0) in a split.

    `heldout_conversations` replace the share: they are the held-out split, in their order. Copies of held-out rows are
    left out of training. Returns the report: what `describe` says once all have passed, and the dataset's figures.
    Raises ValueError if no row is left to train on, or `heldout_conversations` is empty.
    """
    with atomic_folder(path, DATASET.check) as folder:
        rows_path = folder / ROWS
        with RowWriter(rows_path) as writer:
            for conversation in conversations:
                writer.write(conversation)
            num_rows = writer.rows
            for conversation in heldout_conversations or ():
                writer.write(conversation)
        described = describe()
        keys = np.array(writer.keys)
        numbers = np.array(writer.conversations, np.int64)
        if heldout_conversations is None:
            splits, num_copies = split_rows(keys, numbers, heldout, seed)
        elif writer.rows == num_rows:
            raise ValueError(
                "no row of heldout_data passes `where` and can be kept; name other files, or take a share of data by "
                "heldout"
            )
        else:
            train = shuffled_places(numbers[:num_rows], seed).argsort(kind="stable")
            splits, num_copies = without_copies(keys, train, np.arange(num_rows, writer.rows))
        sizes = {name: len(numbers) for name, numbers in splits.items()}
        report = {
            **described,
            **_figures(writer, heldout, seed, sizes),
            "split_rows": sizes,
            "copies_of_heldout": num_copies,
        }
        rows_file = Dataset.from_file(str(rows_path))
        empty = [name for name, count in ((WEIGHTS, writer.weighted), (CATEGORY, writer.categorized)) if not count]
        rows_file = rows_file.remove_columns(empty)
        dataset = DatasetDict(
            {  # datasets would name the rows by the time of their file
                name: rows_file.select(rows, new_fingerprint=f"{report['data_hash']:.32}-{name}")
                for name, rows in splits.items()
            }
        )
        categories = dataset["heldout"][CATEGORY] if writer.categorized else []
        report["heldout_categories"] = dict(Counter(name for name in categories if name is not None).most_common())
        # datasets saves an empty split in no file at all and then cannot load it.
        num_shards = {name: None if size else 1 for name, size in sizes.items()}
        dataset.save_to_disk(folder, num_shards=num_shards)
        rows_path.unlink()
        put_json(folder / REPORT, report)
    return report


def split_rows(
    keys: np.ndarray, conversations: np.ndarray, heldout: float, seed: int
) -> tuple[dict[str, np.ndarray], int]:
    """Row numbers of each split, shuffled by `seed` and the number of conversations alone; and how many rows are in
    neither because they equal a held-out one. `keys` and `conversations` are the rows'."""
    places = shuffled_places(conversations, seed)
    count = int(places.max(initial=-1)) + 1
    num_heldout = max(1, round(count * heldout)) if heldout > 0 else 0
    if count <= num_heldout:
        raise ValueError(f"heldout is {heldout}, which leaves none of {count} rows to train on; lower it or add data")
    order = places.argsort(kind="stable")
    edge = np.count_nonzero(places < num_heldout)
    return without_copies(keys, order[edge:], order[:edge])


def shuffled_places(conversations: np.ndarray, seed: int) -> np.ndarray:
    """The place of each row's conversation among all, shuffled. `conversations` are numbers from 0 on."""
    count = int(conversations.max(initial=-1)) + 1
    return np.random.default_rng(seed).permutation(count).argsort()[conversations]


def without_copies(keys: np.ndarray, train: np.ndarray, heldout: np.ndarray) -> tuple[dict[str, np.ndarray], int]:
    """The splits without training rows that equal a held-out one, and the number of these."""
    is_copy = np.isin(keys[train], keys[heldout])
    if is_copy.all():
        raise ValueError("every training row is also in the held-out split; add other data")
    return {"train": train[~is_copy], "heldout": heldout}, int(is_copy.sum())


def _figures(writer: RowWriter, heldout: float, seed: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    digest = hashlib.sha256(f"{writer.data_hash} {heldout} {seed} {sorted(sizes.items())}".encode())
    return {
        "tokens": writer.tokens,
        "supervised_tokens": writer.supervised,
        "supervised_share": round(writer.supervised / max(1, writer.tokens), 4),
        "weighted_rows": writer.weighted,
        "heldout": heldout,
        "seed": seed,
        "data_hash": digest.hexdigest(),
    }
