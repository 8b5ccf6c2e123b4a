"""Tokens of answers that a server gave, read from its logs: what a draft of that server will meet.

A row is one of these, looked for in this order:

    an OpenAI response          `choices` of message, text or token_ids; also inside `response` and `body` (batch files)
    token ids                   `token_ids` or `output_ids`, the end token included
    a logged answer             `response`, a text
    what `regenerate` writes    `input_ids` + `loss_mask`, else `messages`, of which every answer counts
    plain text                  `text`, or `prompt` + `completion`

Text is tokenised as it is, without a chat template. An answer that `finish_reason` does not call cut ends in the end
token, which counts like any other.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.data_tools.conversations import to_example
from slipstream.data_tools.options import ConversationOptions
from slipstream.data_tools.rows import Row, RowError, matches
from slipstream.data_tools.target_tokenizer import TargetTokenizer
from slipstream.data_tools.tokenization import Outcome
from slipstream.models.messages import Message, check_text

CHUNK_ROWS = 1024
ID_COLUMNS = ("token_ids", "output_ids")
WRAPPERS = ("response", "body")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """`token_ids` as they were emitted; where they are unknown, `texts` that are tokenised one by one."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[int, ...] | None = None
    ended: bool = True  # by an end token, which texts do not show


def tokenize_answers(rows: Iterable[Row], target: TargetTokenizer, options: ConversationOptions) -> Iterator[Outcome]:
    """One outcome per row, in the order of `rows`, with every token supervised; stops after `limit` rows that `where`
    lets through. Raises RowError at the first malformed row unless `skip_bad`."""
    rows, taken = iter(rows), 0
    while chunk := list(itertools.islice(rows, CHUNK_ROWS)):
        for outcome in _tokenize_chunk(chunk, target, options):
            if outcome.status == "bad" and not options.skip_bad:
                raise RowError(f"{outcome.detail} (--skip-bad counts such rows instead)")
            yield outcome
            taken += outcome.status != "filtered"
            if taken == options.limit:
                return


def read_answers(row: Row, columns: Mapping[str, Any], target: TargetTokenizer) -> list[ServedAnswer]:
    """The answers of one row; none if the request failed. Raises RowError for a row that holds something else."""
    while "choices" not in columns and (inner := _wrapped(columns)):
        columns = inner
    if columns.get("choices") is not None:
        return [_choice(row, choice, target) for choice in _list(row, "choices", columns["choices"])]
    for name in ID_COLUMNS:
        if columns.get(name) is not None:
            return [ServedAnswer(token_ids=_ids(row, name, columns[name], target), ended=False)]
    if isinstance(columns.get("response"), str):
        return [ServedAnswer(texts=(columns["response"],), ended=columns.get("finish_reason") != "length")]
    if columns.get("error") is not None:
        return []
    return _example(row, columns, target)


def _wrapped(columns: Mapping[str, Any]) -> dict[str, Any] | None:
    """The object inside one that a batch file or a log has put around it."""
    return next((columns[key] for key in WRAPPERS if isinstance(columns.get(key), dict)), None)


def _tokenize_chunk(chunk: Sequence[Row], target: TargetTokenizer, options: ConversationOptions) -> Iterator[Outcome]:
    """Tokenises the texts of many rows in one call, which the tokenizer spreads over its threads."""
    read: list[list[ServedAnswer] | Outcome] = [_read(row, target, options) for row in chunk]
    answers = [answer for entry in read if isinstance(entry, list) for answer in entry]
    texts = [text for answer in answers for text in answer.texts if text]
    encoded = target.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    pieces = iter(encoded)
    for entry in read:
        yield entry if isinstance(entry, Outcome) else _outcome(entry, pieces, target)


def _read(row: Row, target: TargetTokenizer, options: ConversationOptions) -> list[ServedAnswer] | Outcome:
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
    """The token that ends an answer: the tokenizer's own, else the first that the generation config names."""
    own = target.tokenizer.eos_token_id
    return [own] if own in target.end_ids else sorted(target.end_ids)[:1]


def _choice(row: Row, choice: Any, target: TargetTokenizer) -> ServedAnswer:
    if not isinstance(choice, dict) or "delta" in choice:
        raise RowError(f"{row.place}: holds a piece of a stream; log whole answers, or their text")
    for name in ID_COLUMNS:
        if choice.get(name):
            return ServedAnswer(token_ids=_ids(row, name, choice[name], target), ended=False)
    message = choice.get("message") or {"content": choice.get("text")}
    return ServedAnswer(texts=_message_texts(row, message), ended=choice.get("finish_reason") != "length")


def _example(row: Row, columns: Mapping[str, Any], target: TargetTokenizer) -> list[ServedAnswer]:
    """Answers of a row in one of the formats that conversations come in."""
    example = to_example(row, columns, has_template=False)
    ended = not example.is_cut
    if example.input_ids is not None:
        if example.tokenizer_hash not in (None, target.hash):
            raise RowError(f"{row.place}: its input_ids come from another tokenizer than that of the target")
        ids = _ids(row, "input_ids", list(example.input_ids), target)
        supervised = tuple(token for token, counts in zip(ids, example.loss_mask, strict=True) if counts)
        return [ServedAnswer(token_ids=supervised, ended=False)]
    if example.messages is None:
        return [ServedAnswer(texts=(example.text or "",), ended=ended)]
    turns = [message for message in example.messages if message["role"] == "assistant"]
    last = len(turns) - 1
    return [
        ServedAnswer(texts=_message_texts(row, turn), ended=ended or number < last) for number, turn in enumerate(turns)
    ]


def _message_texts(row: Row, message: Any) -> tuple[str, ...]:
    """What the target wrote, its reasoning first, where a parser has split the two."""
    if not isinstance(message, dict):
        raise RowError(f"{row.place}: message holds a {type(message).__name__}, not an object")
    parts: Message = {"reasoning": message.get("reasoning_content") or message.get("reasoning")}
    parts["content"] = message.get("content")
    for name, text in parts.items():
        if text is not None and not isinstance(text, str):
            raise RowError(f"{row.place}: {name} holds a {type(text).__name__}, not text")
        try:
            check_text(name, text)
        except ValueError as error:
            raise RowError(f"{row.place}: {error}") from error
    return tuple(text for text in parts.values() if text)


def _ids(row: Row, name: str, ids: Any, target: TargetTokenizer) -> tuple[int, ...]:
    for token in _list(row, name, ids):
        if type(token) is not int or not 0 <= token < target.vocab_size:
            raise RowError(
                f"{row.place}: {name} holds {token!r}, no token id of the target's vocabulary of {target.vocab_size}"
            )
    return tuple(ids)


def _list(row: Row, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RowError(f"{row.place}: {name} holds a {type(value).__name__}, not a list")
    return value
