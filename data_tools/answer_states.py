"""States of answers, kept while the engine writes them (`regenerate --states`), and found again by their tokens.

    index.json                 target, format and the documents of each shard, in the order in which they ended
    shard-NNNNN.safetensors    as in models/files/state_store.py

`capture-states --answers` copies them into a capture of the dataset that `prepare` makes of the answers, so that no
target runs twice. Invariant: a shard that the index lists is complete; what a killed run had not written is computed
when it is captured.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

from slipstream.data_tools.state_shards import Capturer, Document, empty_shard, keep, passes
from slipstream.models.files.checkpoint import Values
from slipstream.models.files.state_store import (
    INDEX,
    ShardRange,
    ShardTensors,
    StateIndex,
    checksum,
    encode,
    open_shard,
    write_shard,
)

SPLIT = "answers"


def key_of(tokens: Tensor, supervised: Tensor) -> bytes:
    """Names a document by its tokens (S,) and which of them are supervised (S,)."""
    return xxh3_128_digest(tokens.to(torch.int32).numpy().tobytes() + supervised.numpy().tobytes())


def open_index(folder: Path, identity: StateIndex) -> StateIndex:
    """The index in `folder`, or `identity`, which has no shards, if there is none. Raises ValueError for one of another
    target or format."""
    if not (folder / INDEX).exists():
        return identity
    index = StateIndex.read(folder)
    if replace(index, shards=(), command="") != replace(identity, command=""):
        raise ValueError(
            f"states {folder} holds states of another target, or in another format ({index.command}); name another"
        )
    return index


@dataclass(slots=True)
class Turn:
    """A text whose states the engine has kept: all tokens but the last."""

    tokens: list[int]
    values: Tensor  # (S - 1, K, Ht) in the stored dtype
    scales: Tensor | None  # (S - 1, K)


class AnswerStates:
    """Writes the states of dialogues as they end. `layers` are those of the engine: the format's and, if it has the
    state after the final norm apart, that."""

    def __init__(self, folder: Path, identity: StateIndex, shard_bytes: int) -> None:
        """Raises ValueError for a folder with other states."""
        self.folder = folder
        self.index = open_index(folder, identity)
        self.form = identity.form
        self.shard_bytes = shard_bytes
        self._turns: dict[str, list[Turn]] = {}  # of dialogues that have not ended
        self._documents: list[tuple[Turn, list[int]]] = []  # to write, with their loss masks
        self._bytes = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """The states that an engine keeps for the format."""
        form = self.form
        return (*form.layers, form.num_layers) if form.last_hidden else form.layers

    def note(self, identity: str, tokens: list[int], states: Tensor) -> None:
        """Keeps the states (S - 1, K, Ht) of a dialogue's text so far."""
        values, scales = encode(states, self.form.dtype)
        turn = Turn(tokens, values.cpu(), None if scales is None else scales.cpu())
        self._turns.setdefault(identity, []).append(turn)

    def end(self, identity: str, row: Values | None) -> None:
        """Takes the documents of a dialogue's row. Raises ValueError if the disk has no room."""
        turns = {tuple(turn.tokens): turn for turn in self._turns.pop(identity, [])}
        if row is None:
            return
        for entry in row.get("token_rows", [row]):
            turn = turns.get(tuple(entry["input_ids"])) if "input_ids" in entry else None
            if turn is not None and len(turn.values) >= len(turn.tokens) - 1:
                self._documents.append((turn, entry["loss_mask"]))
                self._bytes += turn.values.nbytes
        if self._bytes > self.shard_bytes:
            self.write()

    def write(self) -> None:
        """Writes a shard of what has ended since the last one."""
        if not self._documents:
            return
        documents = [Document.of(slot, turn.tokens, mask) for slot, (turn, mask) in enumerate(self._documents)]
        number = len(self.index.shards)
        first = sum(shard.count for shard in self.index.shards)
        num_tokens = sum(len(document.tokens) for document in documents)
        num_supervised = sum(int(document.supervised.sum()) for document in documents)
        span = ShardRange(SPLIT, first, len(documents), num_tokens, num_supervised)
        shard = empty_shard(span, documents, self.form, pinned=False)
        for document, (turn, _) in zip(documents, self._documents, strict=True):
            self._copy(shard.document(document.slot), document, turn)
        write_shard(self.folder, number, shard, replace(self.index, shards=()).digest)
        self.index = replace(self.index, shards=(*self.index.shards, span))
        self.index.write(self.folder)
        self._documents = []
        self._bytes = 0

    def _copy(self, place: dict[str, Tensor], document: Document, turn: Turn) -> None:
        count = len(document.tokens)
        layers = len(self.form.layers)
        scales = turn.scales
        keep(place, "features", turn.values[:count, :layers], None if scales is None else scales[:count, :layers])
        if self.form.last_hidden:
            rows = document.supervised.nonzero().squeeze(1)
            keep(place, "last_hidden", turn.values[rows, layers], None if scales is None else scales[rows, layers])


class AnswersCapturer(Capturer):
    """A Capturer that copies the states of answers, and runs the target for other documents only."""

    def __init__(
        self, folder: Path, index: StateIndex, path: Path, device: torch.device, batch_tokens: int, trust: bool
    ) -> None:
        """`index` of the capture; `path` of the target. Raises ValueError for states of another target or format."""
        identity = replace(index, shards=(), data_hash="", max_length=0)
        self.answers = open_index(folder, identity)
        if not self.answers.shards:
            raise ValueError(f"answers {folder} holds no states; write them with `slipstream regenerate --states`")
        self.folder = folder
        self.form = index.form
        self.device = device
        self.batch_tokens = batch_tokens
        self._missing = set[bytes]()  # keys of documents without states
        self._target = (path, index.form, device, batch_tokens, trust)
        self._computing: Capturer | None = None
        self._shards: dict[int, ShardTensors] = {}
        self._places = dict(self._read_keys())

    def _read_keys(self) -> Iterator[tuple[bytes, tuple[int, int]]]:
        for number, span in enumerate(self.answers.shards):
            shard = self._open(number)
            for slot in range(span.count):
                document = shard.document(slot)
                yield key_of(document["tokens"], document["supervised"]), (number, slot)

    def _open(self, number: int) -> ShardTensors:
        if number not in self._shards:
            digest = replace(self.answers, shards=()).digest
            span = self.answers.shards[number]
            try:
                self._shards[number] = open_shard(self.folder, number, span, self.form, digest)
            except ValueError as error:
                raise ValueError(f"{error}; leave --answers out, and all states are computed anew") from error
        return self._shards[number]

    def run(self, batches: Iterable[list[Document]], shard: ShardTensors, advance: Callable[[int], object]) -> None:
        for batch in batches:
            missing = [document for document in batch if not self._copy(document, shard)]
            advance(sum(len(document.tokens) for document in batch) - sum(len(document.tokens) for document in missing))
            if missing:
                self._missing.update(key_of(document.tokens, document.supervised) for document in missing)
                self.num_missing = len(self._missing)
                self._computing = self._computing or Capturer(*self._target)
                self._computing.run(passes(missing, self.batch_tokens), shard, advance)

    def _copy(self, document: Document, shard: ShardTensors) -> bool:
        """Whether the document's states were there, undamaged, and are in `shard` now."""
        place = self._places.get(key_of(document.tokens, document.supervised))
        if place is None:
            return False
        number, slot = place
        stored = self._open(number).document(slot)
        if checksum(stored) != int(self._open(number).tensors["checksums"][slot]):
            return False
        states = shard.document(document.slot)
        for name in (name for name in stored if name.startswith(("features", "last_hidden"))):
            states[name].copy_(stored[name])
        return True
