"""N-gram lookahead: drafts what has followed the last tokens before, in the request's own text or in others', without
a model.

It needs no target states, no KV and no GPU: a C++ core (csrc/) matches and drafts on the host between steps, which
wait for it while that pays. Requests see texts of their own client (the API key) and namespace (`cache_salt`) only.
Beside a draft network (`--drafter.ngram-first 5`) its proposals replace the network's where enough last tokens match.
"""

import json
from collections.abc import Iterator
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.models.files.atomic import atomic_file
from slipstream.serve.drafters.options import NgramOptions
from slipstream.serve.engine.host_stages import Emitted, HostStage, Proposed
from slipstream.serve.engine.plan import Edits, HostProposal
from slipstream.serve.request import Request

Ints = NDArray[np.int32]
CORPUS = "corpus"  # the namespace of texts that all requests see; names of clients and salts are digests


class NgramStage(HostStage):
    """Proposes for every request; with `first`, replaces proposals where at least so many last tokens have occurred
    before."""

    reads = "emitted"

    def __init__(self, options: NgramOptions, vocab_size: int, first: int = 0) -> None:
        self.options = options
        self.vocab_size = vocab_size
        self.first = first
        self.slots: set[int] = set()  # requests that want no drafts are neither looked up nor learnt from
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
            self.slots.add(slot)

    def run(self, inputs: Emitted | Proposed, width: int, *, late: bool = False) -> Edits:
        assert isinstance(inputs, Emitted)
        if not self.slots.issuperset(inputs.slots):
            inputs = inputs.of(self.slots)
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

    def release(self, slot: int, tokens: list[int], *, resumes: bool = False) -> None:
        if slot in self.slots:
            self.slots.remove(slot)
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


def read_corpus(path: str, vocab_size: int) -> Iterator[np.ndarray]:
    """Yields the token ids of each text. Raises ValueError with the place for a text that is not a list of ids."""
    for place, tokens in _read_lines(Path(path)) if path.endswith(".jsonl") else _read_dataset(path):
        try:
            ids = np.asarray(tokens)
        except ValueError:  # lists of several lengths
            ids = np.asarray(None)
        if ids.ndim != 1 or ids.size and not (ids.dtype.kind == "i" and 0 <= ids.min() <= ids.max() < vocab_size):
            raise ValueError(
                f"drafter.corpus {place}: not a list of token ids 0..{vocab_size - 1}; check the tokenizer"
            )
        yield ids.astype(np.int32)


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            try:
                yield place, json.loads(line)["tokens"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
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
