"""Rows to tokens and loss masks, in order: conversations, in one process or several, and served answers from a
server's logs, in threads.

A row of served answers has one of these forms, tried in this order:

    an OpenAI response          `choices` of message, text or token_ids; also inside `response` and `body` (batch files)
    token ids                   `token_ids` or `output_ids`, the end token included
    a logged answer             `response`, a text
    what `regenerate` writes    `input_ids` + `loss_mask`, or `token_rows` of both, else `messages`, of which answers
                                count, but for `weight` 0
    plain text                  `text`, or `prompt` + `completion`

Text is tokenised as it is, without a chat template. Unless `finish_reason` is length, an answer ends in the end token,
which counts like any other.
"""

from slipstream.runtime import blocked_signals, end_with_parent

import itertools
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from multiprocessing import active_children, get_context, resource_tracker
from os import sched_getaffinity
from typing import Any, Literal

import numpy as np

from slipstream.data_tools.conversations import Example, read_category, to_example
from slipstream.data_tools.dataset import CATEGORY, Tokens
from slipstream.data_tools.masking import Document, mask_conversation, token_ids
from slipstream.data_tools.options import ConversationOptions, TokenizeOptions
from slipstream.data_tools.rows import Columns, Row, RowError, matches
from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped, TargetTokenizer, load_target_tokenizer
from slipstream.data_tools.verb_options import PrepareConfig
from slipstream.models.chat.messages import MessageError, read_message
from slipstream.models.chat.quotes import json_type

CHUNK_ROWS = 64
ROWS_WORTH_PROCESSES = 2000  # fewer are done before a worker has imported its libraries
CHUNKS_IN_FLIGHT = 4  # per process; bounds memory and the work that an interrupt loses
ID_COLUMNS = ("token_ids", "output_ids")  # of served answers
WRAPPERS = ("response", "body")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one row, which has documents if it was kept."""

    status: Literal["kept", "dropped", "bad", "filtered"]
    reason: str = ""  # of a dropped row
    detail: str = ""  # place and fault of a dropped or bad row
    truncated: bool = False
    documents: tuple[Tokens, ...] = ()
    id: str | None = None  # of a kept row
    category: str | None = None  # of a kept row that has one
    sample_of: str | None = None  # id of the first sample of the same prompt, where `regenerate` made several


class RowTokenizer:
    """Turns rows into outcomes under fixed options."""

    in_threads = False  # templates are rendered in Python, where threads wait for one another

    def __init__(self, target: TargetTokenizer, options: TokenizeOptions) -> None:
        self.target = target
        self.options = options

    @cached_property
    def chat(self) -> ChatTemplate | None:
        tokenizer = self.target.tokenizer
        options = self.options
        if not tokenizer.chat_template:
            return None
        return ChatTemplate(tokenizer, date=options.date, variables=options.template)

    def __call__(self, row: Row) -> Outcome:
        try:
            columns = row.columns()
            if not matches(columns, self.options.conditions, row.place):
                return Outcome(status="filtered")
            return self.outcome(row, columns)
        except RowError as error:
            return Outcome(status="bad", detail=str(error))
        except RowDropped as error:
            return Outcome(status="dropped", reason=error.reason, detail=f"{row.place}: {error}")

    def chunk(self, rows: Iterable[Row]) -> list[Outcome]:
        return [self(row) for row in rows]

    def outcome(self, row: Row, columns: Columns) -> Outcome:
        """Outcome of a row that `where` lets through. Raises RowError and RowDropped."""
        example = to_example(row, columns, has_template=self.chat is not None)
        documents = self._documents(example, row.place)
        length = self.options.max_length
        masks = [weigh(weights[:length], example.row_weight) for _, weights in documents]
        supervised = [np.count_nonzero(mask) for mask in masks]
        enough = [count >= self.options.min_supervised for count in supervised]
        if not any(enough):
            longest = max(len(ids) for ids, _ in documents)
            detail = f"{max(supervised)} of {min(longest, length)}, min_supervised is {self.options.min_supervised}"
            raise RowDropped("too_few_supervised_tokens", detail)
        return Outcome(
            status="kept",
            id=example.id,
            sample_of=None if columns.get("sample_of") is None else str(columns["sample_of"]),
            truncated=any(len(ids) > length for ids, _ in documents),
            documents=tuple(
                (np.array(ids[:length], np.int32), mask)
                for (ids, _), mask in itertools.compress(zip(documents, masks, strict=True), enough)
            ),
        )

    def _documents(self, example: Example, place: str) -> list[Document]:
        if example.documents is not None:
            for ids, _ in example.documents:
                check_ids(ids, self.target, place, example.tokenizer_hash)
            return [(list(ids), list(weights)) for ids, weights in example.documents]
        if example.text is not None:
            return [self._plain(example)]
        if self.chat is None:
            raise ValueError("the target's tokenizer has no chat template; give one with --chat-template FILE")
        assert example.messages is not None
        return mask_conversation(
            self.chat,
            example.messages,
            example.tools,
            turns=self.options.turns,
            end_ids=self.target.end_ids,
            weights=example.weights,
            is_cut=example.is_cut,
        )

    def _plain(self, example: Example) -> Document:
        """Text as it is, all supervised; or a prompt and its supervised completion, closed by the end token unless it
        was cut."""
        tokenizer = self.target.tokenizer
        prompt = example.prompt
        text = example.text
        assert text is not None
        if not prompt:
            ids = tokenizer(text, verbose=False)["input_ids"]
            return ids, [1.0] * len(ids)
        joined = prompt + text + ("" if example.is_cut else tokenizer.eos_token or "")
        ids, start = token_ids(prompt, joined, lambda texts: tokenizer(texts, verbose=False)["input_ids"])
        return ids, [0.0] * start + [1.0] * (len(ids) - start)


class CategoryTokenizer(RowTokenizer):
    """Also keeps the category of each row."""

    options: PrepareConfig

    def outcome(self, row: Row, columns: Columns) -> Outcome:
        outcome = RowTokenizer.outcome(self, row, columns)
        column = self.options.category_column
        if column is not None and column not in columns:
            names = ", ".join(sorted(columns))
            raise RowError(f"{row.place}: no column {column!r} as `category-column` asks; it has {names}")
        category = read_category(columns, column or CATEGORY, row.place)
        if column is not None and category is None and columns[column] is not None:
            raise RowError(f"{row.place}: {column} is no category: {columns[column]!r}; give a text or a number")
        return replace(outcome, category=category)


def weigh(weights: Sequence[float], row_weight: float) -> np.ndarray:
    """The loss mask (S,) bool of tokens with these weights; their weights (S,) fp32 if some are neither 0 nor 1."""
    mask = np.array(weights, np.float32) * np.float32(row_weight)
    return mask if ((mask != 0) & (mask != 1)).any() else mask.astype(np.bool_)


def check_ids(ids: Any, target: TargetTokenizer, place: str, tokenizer_hash: str | None = None) -> None:
    """Raises RowError unless `ids` is a list of the target's token ids; `tokenizer_hash` is the row's own."""
    if tokenizer_hash not in (None, target.hash):
        raise RowError(f"{place}: its input_ids come from another tokenizer than the target's")
    if not isinstance(ids, list):
        raise RowError(f"{place}: its token ids are {json_type(ids)}, not a list")
    wrong = next((token for token in ids if type(token) is not int or not 0 <= token < target.vocab_size), None)
    if wrong is not None:
        raise RowError(f"{place}: {wrong!r} is not a token id of the target's vocabulary of {target.vocab_size}")


def limited(outcomes: Iterable[Outcome], options: ConversationOptions) -> Iterator[Outcome]:
    """Stops after `limit` rows that `where` lets through. Raises RowError at the first malformed row unless
    `skip_bad`."""
    count = 0
    for outcome in outcomes:
        if outcome.status == "bad" and not options.skip_bad:
            raise RowError(f"{outcome.detail} (--skip-bad counts such rows instead)")
        yield outcome
        count += outcome.status != "filtered"
        if count == options.limit:
            return


def tokenize_rows(rows: Iterable[Row], tokenizer: RowTokenizer) -> Iterator[Outcome]:
    """One outcome per row, in the order of `rows`, up to `limit`. Raises RowError as `limited` does."""
    options = tokenizer.options
    rows = iter(rows)
    first = list(itertools.islice(rows, ROWS_WORTH_PROCESSES))
    processes = options.num_proc or (1 if len(first) < ROWS_WORTH_PROCESSES else len(sched_getaffinity(0)))
    rows = itertools.chain(first, rows)
    yield from limited(map(tokenizer, rows) if processes == 1 else _in_pool(rows, tokenizer, processes), options)


def _in_pool(rows: Iterator[Row], tokenizer: RowTokenizer, workers: int) -> Iterator[Outcome]:
    pool: Executor
    earlier_children = active_children()
    if tokenizer.in_threads:
        pool = ThreadPoolExecutor(workers)
        tokenize = tokenizer.chunk
        tokenizer.target.tokenizer("")  # the first call sets truncation and padding, which must not run beside another
    else:  # spawned: the parent has threads (tokenizers, progress bars), which do not survive a fork
        resource_tracker.ensure_running()  # or the first worker would start it, and that unblocks signals
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=end_with_parent)
        tokenize = partial(_tokenize_chunk, pickle.dumps((type(tokenizer), tokenizer.options)))
    pending: deque[Future[list[Outcome]]] = deque()
    with pool:
        try:
            while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
                with blocked_signals():  # in the workers, which the first call starts
                    pending.append(pool.submit(tokenize, chunk))
                if len(pending) >= workers * CHUNKS_IN_FLIGHT:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        except BrokenExecutor as error:
            raise ValueError(
                f"one of {workers} processes that tokenise was killed, perhaps for want of memory; lower num_proc"
            ) from error
        except BaseException:  # workers may take long over imports and chunks that nobody wants any more
            for worker in set(active_children()) - set(earlier_children):
                worker.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _tokenize_chunk(settings: bytes, chunk: list[Row]) -> list[Outcome]:
    return _row_tokenizer(settings).chunk(chunk)


@lru_cache(maxsize=1)
def _row_tokenizer(settings: bytes) -> RowTokenizer:
    """One per worker process; workers live for one call of `tokenize_rows`."""
    kind, options = pickle.loads(settings)
    return kind(load_target_tokenizer(options), options)


class AnswerTokenizer(RowTokenizer):
    """Turns rows of served answers into outcomes with every token supervised, whole."""

    in_threads = True  # nearly all the time goes to the tokenizers library, which runs without the GIL

    def outcome(self, row: Row, columns: Columns) -> Outcome:
        ids = list(itertools.chain.from_iterable(self._answers(row, columns)))
        if not ids:
            raise RowDropped("no_answer", "no text, a tool call or an error")
        return Outcome(status="kept", documents=((np.array(ids, np.int32), np.ones(len(ids), np.bool_)),))

    def _answers(self, row: Row, columns: Columns) -> Iterable[Sequence[int]]:
        """Token ids of each answer of one row; none if the request failed. Raises RowError for other rows."""
        while "choices" not in columns and (inner := _wrapped(columns)):
            columns = inner
        if columns.get("choices") is not None:
            if not isinstance(columns["choices"], list):
                raise RowError(f"{row.place}: choices holds {json_type(columns['choices'])}, not a list")
            return [self._choice(row, choice) for choice in columns["choices"]]
        if (ids := self._served_ids(row, columns)) is not None:
            return [ids]
        if isinstance(columns.get("response"), str):
            return [self._choice(row, {"text": columns["response"], "finish_reason": columns.get("finish_reason")})]
        if columns.get("error") is not None:
            return []
        return self._example(row, columns)

    def _choice(self, row: Row, choice: Any) -> Sequence[int]:
        if not isinstance(choice, dict) or "delta" in choice:
            raise RowError(f"{row.place}: holds a chunk of a stream; log whole answers or their text")
        if ids := self._served_ids(row, choice):
            return ids
        message = choice.get("message") or {"content": choice.get("text")}
        return self._text(_message_texts(row, message), choice.get("finish_reason") == "length")

    def _example(self, row: Row, columns: Columns) -> Iterable[Sequence[int]]:
        """Answers of a row in one of the formats that conversations come in."""
        example = to_example(row, columns, has_template=False)
        if example.documents is not None:
            for ids, _ in example.documents:
                check_ids(ids, self.target, row.place, example.tokenizer_hash)
            return [list(itertools.compress(ids, mask)) for ids, mask in example.documents]
        if example.messages is None:
            return [self._text((example.text or "",), example.is_cut)]
        answers = [index for index, message in enumerate(example.messages) if message["role"] == "assistant"]
        return [
            self._text(_message_texts(row, example.messages[index]), example.is_cut and index == answers[-1])
            for index in answers
            if example.weights.get(index, 1) > 0
        ]

    def _served_ids(self, row: Row, columns: Columns) -> Sequence[int] | None:
        ids = next((columns[name] for name in ID_COLUMNS if columns.get(name) is not None), None)
        if ids is not None:
            check_ids(ids, self.target, row.place)
        return ids

    def _text(self, texts: Iterable[str], is_cut: bool) -> list[int]:
        """Each text tokenised by itself, and unless the answer was cut the token that ends it: the tokenizer's, else
        the lowest in the generation config."""
        tokenizer = self.target.tokenizer
        end_ids = self.target.end_ids
        ids = [
            token for text in texts for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ]
        if is_cut or not ids or ids[-1] in end_ids:
            return ids
        return ids + ([tokenizer.eos_token_id] if tokenizer.eos_token_id in end_ids else sorted(end_ids)[:1])


def _wrapped(columns: Columns) -> dict[str, Any] | None:
    """The object inside the wrapper of a batch file or a log."""
    return next((columns[key] for key in WRAPPERS if isinstance(columns.get(key), dict)), None)


def _message_texts(row: Row, message: Any) -> tuple[str, ...]:
    """The target's text: reasoning, if the server split it off, then content."""
    if not isinstance(message, dict):
        raise RowError(f"{row.place}: message holds {json_type(message)}, not an object")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise RowError(f"{row.place}: reasoning holds {json_type(reasoning)}, not text")
    answer = {"role": "assistant", "content": message.get("content"), "reasoning": reasoning}
    try:
        content = read_message(answer, "message")["content"]
    except MessageError as error:
        raise RowError(f"{row.place}: {error}") from error
    return tuple(text for text in (reasoning, content) if text)
