"""Rows to tokens and loss masks, in order: conversations, in one process or several, and served answers from a
server's logs.

A row of served answers has one of these forms, tried in this order:

    an OpenAI response          `choices` of message, text or token_ids; also inside `response` and `body` (batch files)
    token ids                   `token_ids` or `output_ids`, the end token included
    a logged answer             `response`, a text
    what `regenerate` writes    `input_ids` + `loss_mask`, else `messages`, of which every answer counts
    plain text                  `text`, or `prompt` + `completion`

Text is tokenised as it is, without a chat template. Unless `finish_reason` is length, an answer ends in the end token,
which counts like any other.
"""

import itertools
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import get_context
from os import sched_getaffinity
from typing import Any, Literal

import numpy as np

from slipstream.data_tools.conversations import Example, to_example
from slipstream.data_tools.masking import mask_conversation, to_mask, token_ranges
from slipstream.data_tools.options import ConversationOptions, TokenizeOptions
from slipstream.data_tools.rows import Row, RowError, matches
from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped, TargetTokenizer, load_target_tokenizer
from slipstream.models.messages import MessageError, read_message

CHUNK_ROWS = 64
CHUNK_ANSWERS = 1024
ROWS_WORTH_PROCESSES = 2000  # fewer are done before a worker has imported its libraries
CHUNKS_IN_FLIGHT = 4  # per process; bounds memory and the work that an interrupt loses
ID_COLUMNS = ("token_ids", "output_ids")  # of served answers
WRAPPERS = ("response", "body")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one row. Arrays are empty unless it was kept."""

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
            check_ids(example.input_ids, self.target, place, example.tokenizer_hash)
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

    def _plain(self, example: Example) -> tuple[list[int], list[bool]]:
        """Text as it is, all supervised; or a prompt and its supervised completion, closed by the end token unless it
        was cut."""
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


def check_ids(ids: Any, target: TargetTokenizer, place: str, tokenizer_hash: str | None = None) -> None:
    """Raises RowError unless `ids` is a list of the target's token ids; `tokenizer_hash` is the row's own."""
    if tokenizer_hash not in (None, target.hash):
        raise RowError(f"{place}: its input_ids come from another tokenizer than the target's")
    if not isinstance(ids, list):
        raise RowError(f"{place}: its token ids are a {type(ids).__name__}, not a list")
    wrong = next((token for token in ids if type(token) is not int or not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise RowError(f"{place}: {wrong!r} is not a token id of the target's vocabulary of {target.vocab_size}")


def limited(outcomes: Iterable[Outcome], options: ConversationOptions) -> Iterator[Outcome]:
    """Stops after `limit` rows that `where` lets through. Raises RowError at the first malformed row unless
    `skip_bad`."""
    taken = 0
    for outcome in outcomes:
        if outcome.status == "bad" and not options.skip_bad:
            raise RowError(f"{outcome.detail} (--skip-bad counts such rows instead)")
        yield outcome
        taken += outcome.status != "filtered"
        if taken == options.limit:
            return


def tokenize_rows(rows: Iterable[Row], tokenizer: RowTokenizer) -> Iterator[Outcome]:
    """One outcome per row, in the order of `rows`, up to `limit`. Raises RowError as `limited` does."""
    options, rows = tokenizer.options, iter(rows)
    first = list(itertools.islice(rows, ROWS_WORTH_PROCESSES))
    processes = options.num_proc or (1 if len(first) < ROWS_WORTH_PROCESSES else len(sched_getaffinity(0)))
    rows = itertools.chain(first, rows)
    yield from limited(map(tokenizer, rows) if processes == 1 else _in_processes(rows, options, processes), options)


def _in_processes(rows: Iterator[Row], options: TokenizeOptions, processes: int) -> Iterator[Outcome]:
    settings = pickle.dumps(options)
    pending: deque[Future[list[Outcome]]] = deque()
    # Spawned: the parent has threads (tokenizers, progress bars), which do not survive a fork.
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
    """One per worker process; workers live for one call of `tokenize_rows`."""
    options = pickle.loads(settings)
    return RowTokenizer(load_target_tokenizer(options), options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """`token_ids` as emitted; if unknown, `texts` to be tokenised one by one."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None
    ended: bool = True  # with an end token, which texts do not show


def tokenize_answers(rows: Iterable[Row], target: TargetTokenizer, options: ConversationOptions) -> Iterator[Outcome]:
    """One outcome per row of served answers, with every token supervised, up to `limit`. Raises RowError as `limited`
    does."""
    rows = iter(rows)
    chunks = iter(lambda: list(itertools.islice(rows, CHUNK_ANSWERS)), [])
    yield from limited((one for chunk in chunks for one in _answer_outcomes(chunk, target, options)), options)


def read_answers(row: Row, columns: Mapping[str, Any], target: TargetTokenizer) -> list[ServedAnswer]:
    """The answers of one row; empty if the request failed. Raises RowError for other rows."""
    while "choices" not in columns and (inner := _wrapped(columns)):
        columns = inner
    if columns.get("choices") is not None:
        if not isinstance(columns["choices"], list):
            raise RowError(f"{row.place}: choices holds a {type(columns['choices']).__name__}, not a list")
        return [_choice(row, choice, target) for choice in columns["choices"]]
    for name in ID_COLUMNS:
        if columns.get(name) is not None:
            return [_served_ids(columns[name], target, row.place)]
    if isinstance(columns.get("response"), str):
        return [ServedAnswer(texts=(columns["response"],), ended=columns.get("finish_reason") != "length")]
    if columns.get("error") is not None:
        return []
    return _example(row, columns, target)


def _wrapped(columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """The object inside the wrapper of a batch file or a log."""
    return next((columns[key] for key in WRAPPERS if isinstance(columns.get(key), dict)), None)


def _answer_outcomes(chunk: Sequence[Row], target: TargetTokenizer, options: ConversationOptions) -> Iterator[Outcome]:
    """Tokenises the texts of many rows in one call, multithreaded by the tokenizer."""
    read: list[list[ServedAnswer] | Outcome] = [_read_row(row, target, options) for row in chunk]
    answers = [answer for entry in read if isinstance(entry, list) for answer in entry]
    texts = [text for answer in answers for text in answer.texts if text]
    encoded = target.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    pieces = iter(encoded)
    for entry in read:
        yield entry if isinstance(entry, Outcome) else _outcome(entry, pieces, target)


def _read_row(row: Row, target: TargetTokenizer, options: ConversationOptions) -> list[ServedAnswer] | Outcome:
    try:
        columns = row.columns()
        if not matches(columns, options.conditions, row.place):
            return Outcome(status="filtered")
        answers = read_answers(row, columns, target)
    except RowError as error:
        return Outcome(status="bad", detail=str(error))
    if not any(answer.texts or answer.token_ids for answer in answers):
        return Outcome(status="dropped", reason="no_answer", detail=f"{row.place}: no text, a tool call or an error")
    return answers


def _outcome(answers: Sequence[ServedAnswer], pieces: Iterator[list[int]], target: TargetTokenizer) -> Outcome:
    ids: list[int] = []
    for answer in answers:
        ids += answer.token_ids or itertools.chain.from_iterable(next(pieces) for text in answer.texts if text)
        if answer.texts and answer.ended and (not ids or ids[-1] not in target.end_ids):
            ids += _end_id(target)
    return Outcome(status="kept", input_ids=np.array(ids, np.int32), loss_mask=np.ones(len(ids), np.bool_))


def _end_id(target: TargetTokenizer) -> list[int]:
    """The token that ends an answer: the tokenizer's, else the lowest in the generation config."""
    own = target.tokenizer.eos_token_id
    return [own] if own in target.end_ids else sorted(target.end_ids)[:1]


def _choice(row: Row, choice: Any, target: TargetTokenizer) -> ServedAnswer:
    if not isinstance(choice, dict) or "delta" in choice:
        raise RowError(f"{row.place}: holds a chunk of a stream; log whole answers or their text")
    for name in ID_COLUMNS:
        if choice.get(name):
            return _served_ids(choice[name], target, row.place)
    message = choice.get("message") or {"content": choice.get("text")}
    return ServedAnswer(texts=_message_texts(row, message), ended=choice.get("finish_reason") != "length")


def _example(row: Row, columns: Mapping[str, Any], target: TargetTokenizer) -> list[ServedAnswer]:
    """Answers of a row in one of the formats that conversations come in."""
    example = to_example(row, columns, has_template=False)
    ended = not example.is_cut
    if example.input_ids is not None:
        check_ids(example.input_ids, target, row.place, example.tokenizer_hash)
        return [_served_ids(list(itertools.compress(example.input_ids, example.loss_mask)), target, row.place)]
    if example.messages is None:
        return [ServedAnswer(texts=(example.text or "",), ended=ended)]
    turns = [message for message in example.messages if message["role"] == "assistant"]
    last = len(turns) - 1
    return [
        ServedAnswer(texts=_message_texts(row, turn), ended=ended or number < last) for number, turn in enumerate(turns)
    ]


def _message_texts(row: Row, message: Any) -> tuple[str, ...]:
    """What the target wrote: reasoning, if the server split it off, then content."""
    if not isinstance(message, dict):
        raise RowError(f"{row.place}: message holds a {type(message).__name__}, not an object")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise RowError(f"{row.place}: reasoning holds a {type(reasoning).__name__}, not text")
    own = {"role": "assistant", "content": message.get("content"), "reasoning": reasoning}
    try:
        content = read_message(own, "message")["content"]
    except MessageError as error:
        raise RowError(f"{row.place}: {error}") from error
    return tuple(text for text in (reasoning, content) if text)


def _served_ids(ids: Any, target: TargetTokenizer, place: str) -> ServedAnswer:
    check_ids(ids, target, place)
    return ServedAnswer(token_ids=tuple(ids), ended=False)
