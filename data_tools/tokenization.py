"""Rows to tokens and loss masks, in one process or several, in the order of the rows."""

import itertools
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from os import sched_getaffinity
from typing import Literal

import numpy as np

from slipstream.data_tools.chat_template import ChatTemplate, RowDropped
from slipstream.data_tools.conversations import Example, to_example
from slipstream.data_tools.masking import mask_conversation, to_mask, token_ranges
from slipstream.data_tools.options import TokenizeOptions
from slipstream.data_tools.rows import Row, RowError, matches
from slipstream.data_tools.target_tokenizer import TargetTokenizer, load_target_tokenizer

CHUNK_ROWS = 64
ROWS_WORTH_PROCESSES = 2000  # fewer are done before a process has imported its libraries
CHUNKS_IN_FLIGHT = 4  # per process: bounds memory, and what an interrupt throws away


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one row. Arrays are empty unless it was kept."""

    status: Literal["kept", "dropped", "bad", "filtered"]
    reason: str = ""  # of a dropped row
    detail: str = ""  # place and fault of a dropped or bad row
    truncated: bool = False
    input_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # (S,) int32
    loss_mask: np.ndarray = field(default_factory=lambda: np.empty(0, np.bool_))  # (S,) bool


class RowTokenizer:
    """Turns rows into outcomes under fixed options."""

    def __init__(self, target: TargetTokenizer, options: TokenizeOptions) -> None:
        self.target = target
        self.options = options
        self.chat: ChatTemplate | None = None
        if target.tokenizer.chat_template:
            self.chat = ChatTemplate(target.tokenizer, date=options.date, variables=options.template)

    def __call__(self, row: Row) -> Outcome:
        try:
            columns = row.columns()
            if not matches(columns, self.options.conditions, row.place):
                return Outcome(status="filtered")
            example = to_example(row, columns, has_template=self.chat is not None)
            ids, mask = self._tokens(example, row.place)
            return self._outcome(ids, mask)
        except RowError as error:
            return Outcome(status="bad", detail=str(error))
        except RowDropped as error:
            return Outcome(status="dropped", reason=error.reason, detail=f"{row.place}: {error}")

    def _tokens(self, example: Example, place: str) -> tuple[list[int], list[bool]]:
        if example.input_ids is not None:
            self._check_ids(example.input_ids, example.tokenizer_hash, place)
            return list(example.input_ids), [bool(value) for value in example.loss_mask]
        if example.text is not None:
            return self._plain(example)
        if self.chat is None:
            raise ValueError("the target's tokenizer has no chat template; give one with --chat-template FILE")
        assert example.messages is not None
        return mask_conversation(
            self.chat,
            example.messages,
            example.tools,
            turns=self.options.turns,
            end_ids=self.target.end_ids,
            is_cut=example.is_cut,
        )

    def _check_ids(self, ids: Sequence[int], tokenizer_hash: str | None, place: str) -> None:
        if tokenizer_hash not in (None, self.target.hash):
            raise RowError(f"{place}: its input_ids come from another tokenizer than that of {self.options.target}")
        wrong = next((token for token in ids if not 0 <= token < self.target.vocab_size), None)
        if wrong is not None:
            raise RowError(f"{place}: token id {wrong} is outside the vocabulary of {self.target.vocab_size}")

    def _plain(self, example: Example) -> tuple[list[int], list[bool]]:
        """Text as it is, all of it supervised; or, behind a prompt, a completion, which the end token closes unless
        it was cut."""
        tokenizer, prompt, text = self.target.tokenizer, example.prompt, example.text
        assert text is not None
        if not prompt:
            ids = tokenizer(text, verbose=False)["input_ids"]
            return ids, [True] * len(ids)
        joined = prompt + text + ("" if example.is_cut else tokenizer.eos_token or "")
        span = (len(prompt), len(joined))
        ids, ranges = token_ranges(joined, [span], lambda texts: tokenizer(texts, verbose=False)["input_ids"])
        return ids, to_mask(len(ids), ranges)

    def _outcome(self, ids: list[int], mask: list[bool]) -> Outcome:
        length = self.options.max_length
        supervised = sum(mask[:length])
        if supervised < self.options.min_supervised:
            detail = f"{supervised} of {min(len(ids), length)}, min_supervised is {self.options.min_supervised}"
            raise RowDropped("too_few_supervised_tokens", detail)
        return Outcome(
            status="kept",
            truncated=len(ids) > length,
            input_ids=np.array(ids[:length], np.int32),
            loss_mask=np.array(mask[:length], np.bool_),
        )


def tokenize_rows(rows: Iterable[Row], tokenizer: RowTokenizer) -> Iterator[Outcome]:
    """One outcome per row, in the order of `rows`; stops after `limit` rows that `where` lets through.

    Raises RowError at the first malformed row unless `skip_bad`.
    """
    options = tokenizer.options
    rows = iter(rows)
    first = list(itertools.islice(rows, ROWS_WORTH_PROCESSES))
    rows, is_small = itertools.chain(first, rows), len(first) < ROWS_WORTH_PROCESSES
    processes = options.num_proc or (1 if is_small else len(sched_getaffinity(0)))
    outcomes = map(tokenizer, rows) if processes == 1 else _in_processes(rows, options, processes)
    taken = 0
    for outcome in outcomes:
        if outcome.status == "bad" and not options.skip_bad:
            raise RowError(f"{outcome.detail} (--skip-bad counts such rows instead)")
        yield outcome
        taken += outcome.status != "filtered"
        if taken == options.limit:
            return


def _in_processes(rows: Iterator[Row], options: TokenizeOptions, processes: int) -> Iterator[Outcome]:
    settings = pickle.dumps(options)
    pending: deque[Future[list[Outcome]]] = deque()
    # Spawned, because the parent holds threads (tokenizers, progress bars) that a fork does not survive.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
                pending.append(pool.submit(_tokenize_chunk, settings, chunk))
                if len(pending) >= processes * CHUNKS_IN_FLIGHT:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _tokenize_chunk(settings: bytes, chunk: list[Row]) -> list[Outcome]:
    tokenizer = _row_tokenizer(settings)
    return [tokenizer(row) for row in chunk]


@lru_cache(maxsize=1)
def _row_tokenizer(settings: bytes) -> RowTokenizer:
    """One per worker process, which lives as long as one call of `tokenize_rows`."""
    options = pickle.loads(settings)
    return RowTokenizer(load_target_tokenizer(options), options)
