"""A folder of captured target states: an index, and shards read through memory maps.

    index.json                the target, data and format of the capture, and the documents of each shard
    shard-00000.safetensors   states by document, not by packed row, so that any max_length and packing can read them

Invariant: a shard under its final name is complete, since it is written atomically; the index is written before the
first shard, so the files alone tell which shards are complete. A document's checksum is verified on its first read, in
one pass over its bytes; no file is read whole. Reads advise the kernel of a document's bytes first: page faults alone
read two to three times as much, and wait for every piece.
Letters: D documents, T tokens, M supervised tokens among them, K captured layers, Ht the target's hidden size.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_64

from slipstream.models.files.atomic import atomic_file, write_json
from slipstream.models.files.checkpoint import Values, read_header, read_json

INDEX = "index.json"
VERSION = 1
REMEDIES = {
    "target_fingerprint": "capture them from this target",
    "tokenizer_hash": "prepare the data with this target's tokenizer and capture them again",
    "data_hash": "train on the data that they were captured from, or capture them again",
}
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
FP8_MAX = 448.0  # largest finite number of float8_e4m3fn
TABLES = ("documents", "lengths", "checksums")
BY_TOKEN = ("tokens", "supervised", "features", "features_scales")
BY_SUPERVISED = ("last_hidden", "last_hidden_scales")
TYPES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "F32": torch.float32}  # safetensors' names
TYPES |= {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
READ_AHEAD_BYTES = 128 * 1024  # Linux cuts longer requests at a device's readahead, which this is unless it was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """Layer ids: 0..n-1 is the output of a layer, n the state after the final norm (models/targets/config.py)."""

    layers: tuple[int, ...]
    num_layers: int  # n
    hidden_size: int
    dtype: Literal["bf16", "fp8", "fp32"]
    last_hidden: bool  # also keep state n of supervised tokens

    def shapes(self, documents: int, tokens: int, supervised: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensors of a shard; T and M rows are ordered by document."""
        states = DTYPES[self.dtype]
        layers = len(self.layers)
        scaled = self.dtype == "fp8"
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "documents": ((documents,), torch.int64),  # numbers in their split
            "lengths": ((documents,), torch.int64),  # tokens kept of each
            "checksums": ((documents,), torch.int64),
            "tokens": ((tokens,), torch.int32),
            "supervised": ((tokens,), torch.bool),
            "features": ((tokens, layers, self.hidden_size), states),
        }
        if scaled:
            shapes["features_scales"] = ((tokens, layers), torch.float32)
        if self.last_hidden:
            shapes["last_hidden"] = ((supervised, self.hidden_size), states)
        if self.last_hidden and scaled:
            shapes["last_hidden_scales"] = ((supervised,), torch.float32)
        return shapes

    def num_bytes(self, documents: int, tokens: int, supervised: int) -> int:
        """Without the file's header."""
        shapes = self.shapes(documents, tokens, supervised).values()
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)


def encode(states: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """states (..., Ht) -> values (..., Ht) in the stored dtype, and for fp8 their scales (...) fp32.

    One scale per token and layer, because states of a few tokens and layers are hundreds of times larger than others.
    """
    if dtype != "fp8":
        return states.to(DTYPES[dtype]), None
    states = states.float()
    scales = states.abs().amax(dim=-1).clamp(min=torch.finfo(torch.float32).tiny * FP8_MAX) / FP8_MAX
    scaled = (states / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)  # a rounded quotient may exceed fp8's range
    return scaled.to(DTYPES[dtype]), scales


def decode(values: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Inverse of `encode`, up to rounding."""
    if scales is None:
        return values.to(dtype)
    return (values.float() * scales.unsqueeze(-1)).to(dtype)


def needed_tokens(supervised: Tensor) -> int:
    """How many of a document's states training reads, given its mask (S,) without the first token.

    Row t is read only if a supervised token follows it, so rows from the last supervised token on are not needed.
    """
    rows = supervised.nonzero()
    return int(rows[-1]) if len(rows) else 0


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Documents first .. first + count - 1 of a split, and the number of their tokens that are kept."""

    split: str
    first: int
    count: int
    num_tokens: int
    num_supervised: int


class ShardTensors:
    """The tensors of a shard, in memory during capture or mapped from its file."""

    def __init__(self, tensors: dict[str, Tensor], start: int = 0) -> None:
        """`lengths` and `supervised` must hold their values already. `start`: address of the mapped file, if any."""
        self.tensors = tensors
        self.start = start
        self.token_bounds = [0, *accumulate(tensors["lengths"].tolist())]
        before = torch.cat((torch.zeros(1, dtype=torch.int64), tensors["supervised"].cumsum(0)))
        self.supervised_bounds = before[self.token_bounds].tolist()

    def document(self, slot: int) -> dict[str, Tensor]:
        """Views of one document's part of each tensor; `slot` is its index in the shard."""
        tokens = slice(*self.token_bounds[slot : slot + 2])
        supervised = slice(*self.supervised_bounds[slot : slot + 2])
        parts = {name: self.tensors[name][tokens] for name in BY_TOKEN if name in self.tensors}
        return parts | {name: self.tensors[name][supervised] for name in BY_SUPERVISED if name in self.tensors}


def checksum(tensors: dict[str, Tensor]) -> int:
    """64 bits of xxh3 over the tensors' bytes, signed, so that safetensors can hold it."""
    digest = xxh3_64()
    for tensor in tensors.values():
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "big", signed=True)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def new_shard(span: ShardRange, lengths: Tensor, supervised: Tensor, form: StateFormat, pinned: bool) -> ShardTensors:
    """A shard without states yet. `lengths` (D,) int64, `supervised` (T,) bool."""
    tensors = {
        name: torch.empty(shape, dtype=dtype, pin_memory=pinned and name in (*BY_TOKEN, *BY_SUPERVISED))
        for name, (shape, dtype) in form.shapes(span.count, span.num_tokens, span.num_supervised).items()
    }
    tensors["documents"].copy_(torch.arange(span.first, span.first + span.count))
    tensors["lengths"].copy_(lengths)
    tensors["supervised"].copy_(supervised)
    return ShardTensors(tensors)


def write_shard(folder: Path, number: int, shard: ShardTensors, capture: str) -> None:
    """`capture` is the digest of the capture. Raises ValueError, and leaves no file, if it cannot be written."""
    tensors = shard.tensors
    for slot in range(len(tensors["documents"])):
        tensors["checksums"][slot] = checksum(shard.document(slot))
    label = json.dumps([capture, number, table_checksum(tensors)])  # one entry, since several have no fixed order
    save_tensors(shard_path(folder, number), tensors, {"shard": label})


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Raises ValueError, and leaves no file, if it cannot be written."""
    try:
        with atomic_file(path) as temporary:
            save_file(tensors, temporary, metadata)
            temporary.chmod(0o644)  # safetensors creates files that only their owner may read
    except (SafetensorError, OSError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
        raise ValueError(
            f"{path} ({size:.2f} GB) could not be written ({error}); make room and run the same command again: it "
            "continues"
        ) from error


def open_shard(folder: Path, number: int, span: ShardRange, form: StateFormat, capture: str) -> ShardTensors:
    """Raises ValueError for a missing, damaged or foreign file."""
    path = shard_path(folder, number)
    try:
        will_need(path, [(0, READ_AHEAD_BYTES)])
        header, start = read_header(path)  # get_tensor would read megabytes of every tensor
        label = json.loads(header.pop("__metadata__", {}).get("shard", "[]"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
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
    return ShardTensors(tensors, content.data_ptr())


def will_need(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Advises the kernel to read these ranges (first byte, number of bytes) of a file; does not wait. Without such
    advice (macOS), page faults read them."""
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb", buffering=0) as file:
        for start, size in ranges:
            for first in range(start, start + size, READ_AHEAD_BYTES):
                count = min(READ_AHEAD_BYTES, start + size - first)
                os.posix_fadvise(file.fileno(), first, count, os.POSIX_FADV_WILLNEED)


def table_checksum(tensors: dict[str, Tensor]) -> int:
    return checksum({name: tensors[name] for name in TABLES})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateIndex:
    """Identity and contents of a capture. `command` repeats it."""

    target_fingerprint: str
    tokenizer_hash: str
    data_hash: str
    max_length: int
    form: StateFormat
    shards: tuple[ShardRange, ...]
    command: str
    layout: Literal["slipstream", "speculators"] = "slipstream"  # speculators: data_tools/state_folders.py

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if not self.whole_documents:
            del values["layout"]  # captures made before there were two keep their digest
        return {"version": VERSION, "format": values.pop("form"), **values}

    @property
    def whole_documents(self) -> bool:
        """Whether states after the last supervised token are kept, too, which training here does not read."""
        return self.layout == "speculators"

    @classmethod
    def read(cls, folder: Path) -> "StateIndex":
        """Raises ValueError unless `folder` holds an index of this version."""
        if not (folder / INDEX).exists():
            raise ValueError(f"{folder} holds no captured states; make them with `slipstream capture-states`")
        values = read_json(folder / INDEX)
        if values.get("version") != VERSION:
            raise ValueError(
                f"{folder / INDEX} has version {values.get('version')}, this program reads {VERSION}; capture again"
            )
        form = values["format"]
        names = ("target_fingerprint", "tokenizer_hash", "data_hash", "max_length", "command")
        return cls(
            **{name: values[name] for name in names},
            form=StateFormat(**form | {"layers": tuple(form["layers"])}),
            shards=tuple(ShardRange(**shard) for shard in values["shards"]),
            layout=values.get("layout", "slipstream"),
        )

    def write(self, folder: Path) -> None:
        write_json(folder / INDEX, self.to_json(), indent=1)

    @property
    def digest(self) -> str:
        """Identifies the capture in its shards, whatever the command line."""
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


class StateStore:
    """Reads the documents of a capture. Threads may share one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = StateIndex.read(folder)
        if self.index.layout != "slipstream":
            raise ValueError(
                f"states {folder} have the layout of {self.index.layout}, which its own trainer reads; capture again "
                "without --layout"
            )
        self.capture = self.index.digest
        self._opened: dict[int, ShardTensors] = {}
        self._verified = [np.zeros(shard.count, bool) for shard in self.index.shards]
        self._numbers: dict[str, list[int]] = {}  # split -> its shards, ascending by first document
        for number, shard in enumerate(self.index.shards):
            self._numbers.setdefault(shard.split, []).append(number)

    def check(self, identity: Values) -> None:
        """Raises ValueError if a run's target_fingerprint, tokenizer_hash or data_hash differ."""
        for name, remedy in REMEDIES.items():
            expected = getattr(self.index, name)
            actual = identity[name]
            if expected != actual:
                raise ValueError(
                    f"states {self.folder}: {name} is {expected[:12]}, the run's is {actual[:12]}; {remedy}"
                )

    def check_states(self, layers: tuple[int, ...], *, final_state: bool) -> None:
        """Raises ValueError unless the states of `layers` and, if wanted, that after the final norm are captured."""
        form = self.index.form
        if not set(layers) <= set(form.layers):
            raise ValueError(
                f"states {self.folder} hold {list(form.layers)}, the draft reads {list(layers)}; capture with "
                "--layers, or set draft.aux_layers"
            )
        if final_state and not (form.last_hidden or form.num_layers in form.layers):
            raise ValueError(
                f"states {self.folder} lack the state after the final norm, which the loss needs; capture them "
                "again with --last-hidden"
            )

    def find(self, split: str, document: int) -> tuple[int, int] | None:
        """Shard of a split's document and its slot there; None if it is not part of the capture."""
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
        """A document's tensors as views of the map. Raises ValueError for damage, with the command to repair it."""
        shard = self.open(number)
        document = shard.document(slot)
        ranges = [(part.data_ptr() - shard.start, part.nbytes) for part in document.values() if part.nbytes]
        with suppress(FileNotFoundError):  # the map stays readable without the file's name
            will_need(shard_path(self.folder, number), ranges)
        if not self._verified[number][slot]:
            if checksum(document) != int(shard.tensors["checksums"][slot]):
                self.fail(number, f"is damaged (document {slot} of it has another checksum)")
            self._verified[number][slot] = True
        return document

    def open(self, number: int) -> ShardTensors:
        if number not in self._opened:
            span = self.index.shards[number]
            try:
                self._opened[number] = open_shard(self.folder, number, span, self.index.form, self.capture)
            except ValueError as error:
                raise ValueError(f"{error}; rebuild it: {self.index.rebuild_command(number)}") from error
        return self._opened[number]

    def fail(self, number: int, fault: str) -> None:
        command = self.index.rebuild_command(number)
        raise ValueError(f"{shard_path(self.folder, number)} {fault}; rebuild it: {command}")
