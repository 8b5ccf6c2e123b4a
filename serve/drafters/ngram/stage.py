"""N-gram lookahead: drafts what has followed the last tokens before, in the request's own text or in others', without
a model.

It needs no target states, no KV and no GPU: a C++ core (csrc/) matches and drafts on the host between steps, which
wait for it while that pays. Requests see texts of their own client (the API key) and namespace (`cache_salt`) only.
Beside a draft network (`--drafter.ngram-first 5`) its proposals replace the network's where enough last tokens match.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, make_dataclass
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.kernels.speculation.verify import MAX_NODES
from slipstream.models.files.atomic import atomic_file
from slipstream.models.files.outputs import check_output_file
from slipstream.serve.drafters.base import widths_up_to
from slipstream.serve.drafters.ngram.ngram_core import NgramCore
from slipstream.serve.engine.host_stages import Emitted, HostStage, Proposed
from slipstream.serve.engine.plan import Edits, HostProposal
from slipstream.serve.request import Request

Ints = NDArray[np.int32]
SAVED_MAGIC = b"GMTRIE1"  # csrc/snapshot.cpp
CORPUS = "corpus"  # the namespace of texts that all requests see; names of clients and salts are digests
CORE_OPTIONS = ("capacity", "branch_length", "min_match", "max_match", "order", "breadth", "queue_tokens")


@dataclass(frozen=True, slots=True)
class NgramOptions:
    nodes: int = 16
    """Most nodes per proposal, root included."""
    min_match: int = 1
    """Fewest last tokens that count as a match."""
    max_match: int = 12
    """Most last tokens that are looked up; the longest match wins."""
    order: Literal["probability", "breadth"] = "probability"
    """Which nodes come first: the likeliest by counts, or level by level."""
    breadth: int = 4
    """Most children of a node; 1 drafts chains."""
    capacity: int = 1_000_000
    """Nodes kept of all texts, about 60 bytes each; the least recently used ones are evicted first."""
    branch_length: int = 18
    """Longest sequence of tokens that is kept."""
    queue_tokens: int = 65_536
    """Most tokens queued for insertion; further ones are dropped and counted."""
    share_between_keys: bool = False
    """Draft from texts of clients with other API keys, too, which measured speed and counts can tell them."""
    corpus: str | None = None
    """Texts to insert at the start: a prepared dataset (slipstream prepare), or .jsonl with `tokens` in each line."""
    load: str | None = None
    """File to load at the start, written by an earlier `save`."""
    save: str | None = None
    """File to write when the engine ends."""

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= MAX_NODES:
            raise ValueError(f"drafter.nodes is {self.nodes}; it must be between 2 and {MAX_NODES}")
        if self.load and not Path(self.load).is_file():
            raise ValueError(f"drafter.load {self.load} is not a file; name one written by drafter.save")
        if self.save and not Path(self.save).absolute().parent.is_dir():
            raise ValueError(f"drafter.save {self.save} is in a folder that does not exist; create it first")
        if self.save:
            inputs = {"drafter.corpus": [self.corpus]}
            check_output_file(
                self.save, is_saved_trie, "a file of saved n-grams", inputs, overwrite=True, option="drafter.save"
            )
        if self.corpus and not Path(self.corpus).exists():
            raise ValueError(f"drafter.corpus {self.corpus} does not exist; name a prepared dataset or a .jsonl file")
        self.core(1)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of nodes that a proposal may have."""
        return widths_up_to(self.nodes)

    @property
    def branches(self) -> bool:
        return self.breadth > 1

    def core(self, slots: int) -> NgramCore:
        """Raises ValueError for an option out of range."""
        values = asdict(self)
        try:
            return NgramCore(rows=slots, **{name: values[name] for name in CORE_OPTIONS})
        except ValueError as error:
            raise ValueError(f"drafter.{error}") from error


@dataclass(frozen=True)  # without slots: it is a second base of others
class NgramFirstOptions:
    """Options that every draft network has besides its own."""

    ngram_first: int = 0
    """Verify n-gram lookahead where at least so many last tokens have occurred before; 0: never."""
    ngram_nodes: int = 16
    """Most nodes of an n-gram proposal, root included."""
    ngram_breadth: int = 4
    """Most children of a node of an n-gram proposal; 1 drafts chains."""
    ngram_capacity: int = 1_000_000
    """Nodes kept of all texts."""
    ngram_share_between_keys: bool = False
    """Draft n-grams from texts of clients with other API keys, too."""

    def __post_init__(self) -> None:
        longest = NgramOptions().max_match
        if not 0 <= self.ngram_first <= longest:
            raise ValueError(f"drafter.ngram_first is {self.ngram_first}; it must be between 0 (never) and {longest}")
        if self.ngram_first:
            self.ngram_options()

    def ngram_options(self) -> NgramOptions:
        """Raises ValueError for a value out of range, with the name that it has here."""
        try:
            return NgramOptions(
                nodes=self.ngram_nodes,
                breadth=self.ngram_breadth,
                capacity=self.ngram_capacity,
                share_between_keys=self.ngram_share_between_keys,
            )
        except ValueError as error:
            raise ValueError(str(error).replace("drafter.", "drafter.ngram_", 1)) from error


def with_ngram_first(options: type) -> type:
    """The options of a network's drafter together with NgramFirstOptions."""

    def check(self: Any) -> None:
        NgramFirstOptions.__post_init__(self)
        if hasattr(options, "__post_init__"):
            options.__post_init__(self)

    bases = (NgramFirstOptions, options)
    return make_dataclass(options.__name__, [], bases=bases, namespace={"__post_init__": check}, frozen=True)


class NgramStage(HostStage):
    """Proposes for every request; with `first`, replaces proposals where at least so many last tokens have occurred
    before."""

    reads = "emitted"

    def __init__(self, options: NgramOptions, vocab_size: int, first: int = 0) -> None:
        self.options = options
        self.vocab_size = vocab_size
        self.first = first
        self._left_out = set[int]()  # slots whose requests want no drafts: neither looked up nor learnt from
        self.widths = options.widths

    def attach(self, num_slots: int, *, pinned: bool) -> None:
        self.core = self.options.core(num_slots)
        # Pinned, so that copies to the device do not wait. Two buffers in turn: a step drafts at most twice, and before
        # the next step drafts, it reads a pass that was launched after these copies.
        size = 4 * num_slots * self.options.nodes
        memory = [torch.empty(size, dtype=torch.int32, pin_memory=pinned).numpy() for _ in range(2)]
        self.arrays = cycle([cache(partial(Arrays.within, buffer)) for buffer in memory])
        if self.options.load:
            self.core.load(self.options.load, self.vocab_size)
        for tokens in read_corpus(self.options.corpus, self.vocab_size) if self.options.corpus else ():
            self.core.insert(tokens, CORPUS)

    def admit(self, slot: int, request: Request, tokens: list[int]) -> None:
        if request.params.wants_drafts:
            client = "" if self.options.share_between_keys else request.client
            self.core.admit(slot, np.asarray(tokens, dtype=np.int32), client + request.namespace, CORPUS)
        else:
            self._left_out.add(slot)

    def wants(self, slots: list[int]) -> bool:
        return not self._left_out or not self._left_out.issuperset(slots)

    def run(self, inputs: Emitted | Proposed, width: int, *, late: bool = False) -> Edits:
        assert isinstance(inputs, Emitted)
        if self._left_out:
            inputs = inputs.without(self._left_out)
            if not inputs.slots:
                return Edits()
        arrays = next(self.arrays)(len(inputs.slots), min(width, self.options.nodes))
        counts = self.core.advance(inputs.slots, inputs.results, **arrays.outputs)
        lengths = arrays.outputs["matches"].tolist()
        if self.first:
            pairs = zip(counts, lengths, strict=True)
            counts = [count if count > 1 and length >= self.first else 0 for count, length in pairs]
        kinds = list(map(int.bit_length, lengths))
        foreign = arrays.outputs["foreign"]
        return Edits((HostProposal(inputs.slots, arrays.nodes, counts, kinds, source="ngram", foreign=foreign),))

    def release(self, slot: int, tokens: list[int]) -> None:
        if slot in self._left_out:
            self._left_out.remove(slot)
        else:
            self.core.release(slot, len(tokens))

    def metrics(self) -> dict[str, int]:
        stats = self.core.stats()
        lengths = stats["match_lengths"]
        numbers = {f"ngram_{name}": value for name, value in stats.items() if isinstance(value, int)}
        numbers |= {f"ngram_match_length_{length}": count for length, count in enumerate(lengths)}
        return {**numbers, "ngram_misses": lengths[0], "ngram_hits": sum(lengths[1:])}

    def close(self) -> None:
        if self.options.save:
            self.core.flush()
            with atomic_file(Path(self.options.save)) as file:
                self.core.save(file)


class Arrays(NamedTuple):
    """The arrays that a batch of B trees of N nodes is written into."""

    nodes: Ints  # (4, B, N), of which the core fills the first two
    outputs: dict[str, NDArray[Any]]  # of NgramCore.advance

    @classmethod
    def within(cls, memory: Ints, batch: int, width: int) -> "Arrays":
        nodes = memory[: 4 * batch * width].reshape(4, batch, width)
        outputs = {
            "tokens": nodes[0],
            "parents": nodes[1],
            "scores": np.empty((batch, width), dtype=np.float32),
            "matches": np.empty(batch, dtype=np.int32),
            "foreign": np.empty((batch, width), dtype=np.bool_),
        }
        return cls(nodes, outputs)


def is_saved_trie(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(SAVED_MAGIC)) == SAVED_MAGIC


def read_corpus(path: str, vocab_size: int) -> Iterator[np.ndarray]:
    """Yields the token ids of each text. Raises ValueError with the place for a text that is not a list of ids."""
    for place, tokens in _read_lines(Path(path)) if path.endswith(".jsonl") else _read_dataset(path):
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size and not (ids.dtype.kind == "i" and 0 <= ids.min() <= ids.max() < vocab_size):
            raise ValueError(
                f"drafter.corpus {place}: not a list of token ids 0..{vocab_size - 1}; check the tokenizer"
            )
        yield ids.astype(np.int32)


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            try:
                yield place, json.loads(line)["tokens"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"drafter.corpus {place}: not a JSON object with a list `tokens`") from error


def _read_dataset(path: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_from_disk  # here: nothing else in serving needs it

    try:
        rows = load_from_disk(path)["train"].select_columns("input_ids")
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"drafter.corpus {path} is not a prepared dataset ({error}); make one with slipstream prepare"
        ) from error
    for number, row in enumerate(rows):
        yield f"{path} row {number}", row["input_ids"]
