"""Conversations whose answers a model generates again, turn by turn.

Invariant: the prompt of an answer has exactly the tokens that a server would hold at that point. A row either holds the
tokens of its answers, or messages that the chat template renders as what the model wrote.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.data_tools.conversations import TOKEN_COLUMNS, Example, content_hash, read_category, to_example
from slipstream.data_tools.masking import Document, add_answer, is_empty, read_turn
from slipstream.data_tools.options import ConversationOptions
from slipstream.data_tools.rows import RowError, matches, read_rows
from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped
from slipstream.models.chat.messages import Message

SAMPLE_ID = re.compile(r"#\d+$")  # ends the ids of all samples of a row but the first


@dataclass(frozen=True, slots=True)
class Dialogue:
    id: str  # unique within a run
    # Before each answer: turns of the user, the system and tools, and calls of the latter.
    questions: list[list[Message]]
    tools: list[Any] | None = None
    sample_of: str | None = None  # id of the row's first sample; None for that one
    row_weight: float = 1.0
    category: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    messages: list[Message]
    tools: list[Any] | None
    token_ids: list[int]  # empty if the endpoint renders the messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    message: Message
    finish_reason: str  # "length" if max_tokens ended it
    num_tokens: int
    token_ids: list[int] | None = None  # with the end token; None if only text came back
    text: str = ""  # that came back, with or without special tokens; empty if `token_ids` or only a message did
    model: str | None = None  # as the endpoint names it


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one dialogue: a row to write, or why it was dropped or failed."""

    id: str
    row: Mapping[str, Any] | None = None
    dropped: str = ""
    failed: str = ""  # a retry may succeed


Conversing = Generator[Prompt, Answer, Result]  # send(None) starts it; send(answer) gives the next prompt


@dataclass(slots=True)
class DialogueReader:
    """The dialogues of the input in order, without duplicates, `samples` of each. Counts the rows it drops.

    The first sample has the row's id, the others `id#1`, `id#2` and so on: more samples change no earlier one.
    """

    options: ConversationOptions
    samples: int = 1
    ids: dict[str, int] = field(default_factory=dict)  # id -> position in the input, of every dialogue yielded
    dropped: Counter[str] = field(default_factory=Counter)
    _contents: dict[str, str] = field(default_factory=dict)  # id -> content hash

    def __iter__(self) -> Iterator[Dialogue]:
        for example in itertools.islice(self._examples(), self.options.limit):
            dialogue = None if example is None else self._dialogue(example)
            if dialogue is not None:
                yield from self._samples(dialogue)

    def _examples(self) -> Iterator[Example | None]:
        """Rows that `where` lets through; None for a malformed one."""
        for row in read_rows(self.options):
            try:
                columns = row.columns()
                if matches(columns, self.options.conditions, row.place):
                    # Without the tokens of an earlier run: the model answers again.
                    example = to_example(row, {**columns, **dict.fromkeys(TOKEN_COLUMNS)})
                    if example.messages is None:
                        raise RowError(f"{row.place}: is not a conversation; only those have answers to regenerate")
                    yield replace(example, category=read_category(columns, "category", row.place))
            except RowError as error:
                if not self.options.skip_bad:
                    raise RowError(f"{error} (--skip-bad counts such rows instead)") from error
                self.dropped["malformed"] += 1
                yield None

    def _dialogue(self, example: Example) -> Dialogue | None:
        assert example.messages is not None
        questions = split_questions(example.messages)
        if not questions:
            self.dropped["no_user_turn"] += 1
            return None
        content = content_hash(list(itertools.chain(*questions)), example.tools)
        identity = content if example.id is None else example.id
        if SAMPLE_ID.search(identity) or self._contents.get(identity, content) != content:
            # A sample of a row, or another conversation, has this id.
            identity = f"{identity}-{content[:12]}"
        if identity in self.ids:
            self.dropped["duplicate"] += 1
            return None
        self._contents[identity] = content
        return Dialogue(
            id=identity,
            questions=questions,
            tools=example.tools,
            row_weight=example.row_weight,
            category=example.category,
        )

    def _samples(self, dialogue: Dialogue) -> Iterator[Dialogue]:
        for number in range(self.samples):
            identity = f"{dialogue.id}#{number}" if number else dialogue.id
            self.ids[identity] = len(self.ids)
            yield replace(dialogue, id=identity, sample_of=dialogue.id if number else None)


def split_questions(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages before each answer.

    Every user turn and every result of a tool gets an answer, except where the conversation goes on with calls of
    tools: these stay in it, since their results belong to them. Other answers are left out. Turns of a user that follow
    each other are a question together, unless the conversation has no answer at all.
    """
    is_answered = any(message["role"] == "assistant" for message in messages)
    questions: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "user" and not is_answered and is_question(questions[-1]):
            questions.append([])
        if message["role"] != "assistant" or message.get("tool_calls"):
            questions[-1].append(message)
        elif is_question(questions[-1]):
            questions.append([])
    while questions[-1] and questions[-1][-1]["role"] == "assistant":  # calls without results
        questions[-1].pop()
    return [question for question in questions if is_question(question)]


def is_question(messages: Sequence[Message]) -> bool:
    """Whether an answer may follow: to a user's turn, or to the results of an assistant's calls."""
    roles = [message["role"] for message in messages]
    return roles[-1:] != ["assistant"] and bool({"user", "assistant"} & set(roles))


def row_seed(seed: int, identity: str) -> int:
    """A row's seed, 31 bits; depends on the run's seed and the row's id alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {identity}".encode()).digest()[:4], "big") >> 1


def converse(
    dialogue: Dialogue, chat: ChatTemplate | None, *, keep_cut: bool, end_ids: Set[int] = frozenset()
) -> Conversing:
    """Yields the prompts of `dialogue`, takes their answers and returns the row.

    Without `chat` the endpoint renders the messages, unchecked. `keep_cut` keeps answers that max_tokens ended. A
    truncated answer ends its conversation, and so does one that calls a tool, whose result is not known.
    """
    assert dialogue.questions
    messages: list[Message] = []
    answers: list[tuple[int, Answer]] = []  # each with the number of messages up to it
    documents: list[Document] | None = []  # None once the tokens of an answer are not known
    try:
        for question in dialogue.questions:
            messages = [*messages, *question]
            prompt_ids = [] if chat is None else chat.encode([chat.render(messages, dialogue.tools, prompt=True)])[0]
            answer = yield Prompt(messages, dialogue.tools, prompt_ids)
            is_cut = answer.finish_reason == "length"
            if is_cut and not keep_cut:
                return Result(id=dialogue.id, dropped="cut_by_max_tokens")
            if is_empty(answer.message):
                return Result(id=dialogue.id, dropped="empty_answer")
            messages = [*messages, answer.message]
            answers.append((len(messages), answer))
            if answer.token_ids is None:
                documents = None
            elif documents is not None:
                add_answer(documents, prompt_ids, answer.token_ids)
            if is_cut or answer.message.get("tool_calls"):
                break
        if chat is not None and documents is None:
            for length, earlier in answers:
                check_written(chat, messages[:length], dialogue.tools, earlier, end_ids)
    except RowDropped as error:
        return Result(id=dialogue.id, dropped=error.reason)
    return Result(id=dialogue.id, row=_row(dialogue, messages, answers, documents if chat else None, chat))


def _row(
    dialogue: Dialogue,
    messages: Sequence[Message],
    answers: Sequence[tuple[int, Answer]],
    documents: list[Document] | None,
    chat: ChatTemplate | None,
) -> dict[str, Any]:
    """The row to write, with the weight of the row that it comes from. Calls that were in the input are not the
    model's: they get weight 0."""
    answer_places = {length - 1 for length, _ in answers}
    weighted = [
        {**message, "weight": 0} if message["role"] == "assistant" and index not in answer_places else message
        for index, message in enumerate(messages)
    ]
    last = answers[-1][1]
    row: dict[str, Any] = {"id": dialogue.id, "messages": weighted, "finish_reason": last.finish_reason}
    optional = {
        "sample_of": dialogue.sample_of,
        "weight": None if dialogue.row_weight == 1 else dialogue.row_weight,
        "category": dialogue.category,
        "tools": dialogue.tools,
        "model": last.model,
    }
    row |= {name: value for name, value in optional.items() if value is not None}
    if chat is not None and documents is not None:
        tokens = [{"input_ids": ids, "loss_mask": list(map(int, mask))} for ids, mask in documents]
        row |= tokens[0] if len(tokens) == 1 else {"token_rows": tokens}
        row["tokenizer_hash"] = chat.tokenizer_hash
    return row


def check_written(
    chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None, answer: Answer, end_ids: Set[int]
) -> None:
    """Raises RowDropped unless the template renders the last message as the text that the model wrote."""
    turn = read_turn(chat, messages, tools, end_ids, is_cut=answer.finish_reason == "length")
    rendered = _texts(chat, turn.ids[turn.start :], end_ids)
    texts = {answer.text} if answer.token_ids is None else _texts(chat, answer.token_ids, end_ids)
    if rendered.isdisjoint(texts):
        raise RowDropped("answer_rewritten", "the template renders the answer otherwise than the model wrote it")


def _texts(chat: ChatTemplate, ids: Sequence[int], end_ids: Set[int]) -> set[str]:
    """The text of an answer without its end token, with special tokens and without."""
    ids = [token for token in ids if token not in end_ids]
    return {str(chat.tokenizer.decode(ids, skip_special_tokens=skips)) for skips in (False, True)}
