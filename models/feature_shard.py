"""One file of captured states: safetensors, read through a memory map, with a checksum of every document's bytes.

Invariant: a shard that bears its name is complete; it is written under a temporary one. What is read is compared with
its checksum the first time, so a document costs one pass over its bytes and no file is ever read whole. The kernel is
asked for a document's bytes before they are touched: page faults alone read far around each, two to three times what
is needed, and wait for every piece.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_64

from slipstream.models.atomic import atomic_file
from slipstream.models.feature_format import FeatureFormat

TABLES = ("documents", "lengths", "checksums")
BY_TOKEN = ("tokens", "supervised", "features", "features_scales")
BY_SUPERVISED = ("last_hidden", "last_hidden_scales")
TYPES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "F32": torch.float32}  # safetensors' names
TYPES |= {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
READ_AHEAD_BYTES = 128 * 1024  # Linux cuts longer requests at a device's readahead, which this is unless it was changed


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The documents first .. first + count - 1 of a split, and what is kept of them."""

    split: str
    first: int
    count: int
    num_tokens: int
    num_supervised: int


class ShardTensors:
    """The tensors of a shard, in memory while it is captured or mapped from its file. D documents."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """`lengths` and `supervised` must hold their values already."""
        self.tensors = tensors
        self.token_bounds = [0, *accumulate(tensors["lengths"].tolist())]
        before = torch.cat((torch.zeros(1, dtype=torch.int64), tensors["supervised"].cumsum(0)))
        self.supervised_bounds = before[self.token_bounds].tolist()

    def document(self, slot: int) -> dict[str, Tensor]:
        """Views of one document's part of each tensor; `slot` counts the shard's documents."""
        tokens = slice(*self.token_bounds[slot : slot + 2])
        supervised = slice(*self.supervised_bounds[slot : slot + 2])
        parts = {name: self.tensors[name][tokens] for name in BY_TOKEN if name in self.tensors}
        return parts | {name: self.tensors[name][supervised] for name in BY_SUPERVISED if name in self.tensors}

    def checksum(self, slot: int) -> int:
        return checksum(self.document(slot))


class MappedShard(ShardTensors):
    """Tensors that are read from a file through its memory map."""

    def __init__(self, tensors: dict[str, Tensor], path: Path, start: int) -> None:
        """`start`: the address of the file's first byte."""
        super().__init__(tensors)
        self.path = path
        self.start = start

    def byte_ranges(self, slot: int) -> list[tuple[int, int]]:
        """Where in the file one document's part of each tensor lies: first byte, number of bytes."""
        parts = self.document(slot).values()
        return [(part.data_ptr() - self.start, part.nbytes) for part in parts if part.nbytes]

    def ask_for(self, slot: int) -> None:
        """Has the kernel read a document's bytes ahead; does not wait for them."""
        with suppress(FileNotFoundError):  # a map can be read when its file's name is gone
            will_need(self.path, self.byte_ranges(slot))


def checksum(tensors: dict[str, Tensor]) -> int:
    """64 bits of xxh3 over the tensors' bytes, signed, so that safetensors can hold it."""
    digest = xxh3_64()
    for tensor in tensors.values():
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "big", signed=True)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def new_shard(span: ShardRange, lengths: Tensor, supervised: Tensor, form: FeatureFormat, pinned: bool) -> ShardTensors:
    """A shard whose states are still to be filled in. `lengths` (D,) int64, `supervised` (T,) bool."""
    tensors = {
        name: torch.empty(shape, dtype=dtype, pin_memory=pinned and name in (*BY_TOKEN, *BY_SUPERVISED))
        for name, (shape, dtype) in form.shapes(span.count, span.num_tokens, span.num_supervised).items()
    }
    tensors["documents"].copy_(torch.arange(span.first, span.first + span.count))
    tensors["lengths"].copy_(lengths)
    tensors["supervised"].copy_(supervised)
    return ShardTensors(tensors)


def write_shard(folder: Path, number: int, shard: ShardTensors, capture: str) -> None:
    """`capture` names what the shard belongs to. Raises ValueError, and leaves no file, where it cannot be written."""
    tensors = shard.tensors
    for slot in range(len(tensors["documents"])):
        tensors["checksums"][slot] = shard.checksum(slot)
    metadata = {"shard": json.dumps([capture, number, table_checksum(tensors)])}  # one: several have no fixed order
    path = shard_path(folder, number)
    try:
        with atomic_file(path) as temporary:
            save_file(tensors, temporary, metadata)
            temporary.chmod(0o644)  # safetensors makes files that their owner alone may read
    except (SafetensorError, OSError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
        raise ValueError(
            f"{path} ({size:.2f} GB) could not be written ({error}); make room and run the same command again: it "
            "continues"
        ) from error


def open_shard(folder: Path, number: int, span: ShardRange, form: FeatureFormat, capture: str) -> MappedShard:
    """Raises ValueError that says what is wrong with the file."""
    path = shard_path(folder, number)
    try:
        will_need(path, [(0, READ_AHEAD_BYTES)])
        with safe_open(path, "pt"):  # whose get_tensor would read megabytes of every tensor, asked or not
            header, start = read_header(path)
        label = json.loads(header.pop("__metadata__", {}).get("shard", "[]"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if label[:2] != [capture, number]:
        raise ValueError(f"{path} belongs to another capture (other target, data, layers or dtype)")
    expected = form.shapes(span.count, span.num_tokens, span.num_supervised)
    if {name: (tuple(entry["shape"]), TYPES.get(entry["dtype"])) for name, entry in header.items()} != expected:
        raise ValueError(f"{path} is damaged (its tensors are not those that it was written with)")
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    bounds = {name: [start + end for end in entry["data_offsets"]] for name, entry in header.items()}
    tensors = {name: content[slice(*bounds[name])].view(dtype).view(shape) for name, (shape, dtype) in expected.items()}
    will_need(path, [(bounds[name][0], tensors[name].nbytes) for name in (*TABLES, "supervised")])
    if label[2:] != [table_checksum(tensors)]:
        raise ValueError(f"{path} is damaged (its list of documents has another checksum)")
    return MappedShard(tensors, path, content.data_ptr())


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Of a safetensors file that is whole: dtype, shape and place of each tensor, and where places count from."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def will_need(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Has the kernel read these ranges (first byte, number of bytes) of a file into memory; does not wait for them.
    Where the system takes no such advice (macOS), page faults read them."""
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb", buffering=0) as file:
        for start, size in ranges:
            for first in range(start, start + size, READ_AHEAD_BYTES):
                count = min(READ_AHEAD_BYTES, start + size - first)
                os.posix_fadvise(file.fileno(), first, count, os.POSIX_FADV_WILLNEED)


def table_checksum(tensors: dict[str, Tensor]) -> int:
    return checksum({name: tensors[name] for name in TABLES})
