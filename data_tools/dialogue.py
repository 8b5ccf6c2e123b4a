"""Conversations whose answers a model generates again, turn by turn.

Invariant: the prompt of an answer has exactly the tokens that a server would hold at that point. A row is dropped if
the chat template renders an earlier turn differently in a later prompt.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.data_tools.conversations import Example, content_hash, to_example
from slipstream.data_tools.options import ConversationOptions
from slipstream.data_tools.rows import RowError, matches, read_rows
from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped
from slipstream.models.chat.messages import Message


@dataclass(frozen=True, slots=True)
class Dialogue:
    id: str  # unique within a run
    questions: list[list[Message]]  # before each answer: user turns, with system turns before them
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    messages: list[Message]
    tools: list[Any] | None
    token_ids: list[int]  # empty if the endpoint renders the messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    finish_reason: str  # "stop" or "length"
    num_tokens: int
    token_ids: list[int] | None = None  # with the end token; None if only text came back
    reasoning: str | None = None  # if the endpoint returns it separately


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
    """The dialogues of the input in order, without duplicates. Counts the rows it drops."""

    options: ConversationOptions
    ids: dict[str, int] = field(default_factory=dict)  # id -> position in the input, of every dialogue yielded
    dropped: Counter[str] = field(default_factory=Counter)
    _contents: dict[str, str] = field(default_factory=dict)  # id -> content hash

    def __iter__(self) -> Iterator[Dialogue]:
        for example in itertools.islice(self._examples(), self.options.limit):
            dialogue = None if example is None else self._dialogue(example)
            if dialogue is not None:
                yield dialogue

    def _examples(self) -> Iterator[Example | None]:
        """Rows that `where` lets through; None for a malformed one."""
        for row in read_rows(self.options):
            try:
                columns = row.columns()
                if matches(columns, self.options.conditions, row.place):
                    # Without the tokens of an earlier run: the model answers again.
                    example = to_example(row, {**columns, "input_ids": None, "loss_mask": None})
                    if example.messages is None:
                        raise RowError(f"{row.place}: is not a conversation; only those have answers to regenerate")
                    yield example
            except RowError as error:
                if not self.options.skip_bad:
                    raise RowError(f"{error} (--skip-bad counts such rows instead)") from error
                self.dropped["malformed"] += 1
                yield None

    def _dialogue(self, example: Example) -> Dialogue | None:
        assert example.messages is not None
        if any(message.get("tool_calls") for message in example.messages):
            self.dropped["tool_calls"] += 1
            return None
        questions = split_questions(example.messages)
        if not questions:
            self.dropped["no_user_turn"] += 1
            return None
        content = content_hash(list(itertools.chain(*questions)), example.tools)
        identity = content if example.id is None else example.id
        if self._contents.get(identity, content) != content:
            identity = f"{identity}-{content[:12]}"  # another conversation has this id: lengthen it
        if identity in self.ids:
            self.dropped["duplicate"] += 1
            return None
        self._contents[identity] = content
        self.ids[identity] = len(self.ids)
        return Dialogue(identity, questions, example.tools)


def split_questions(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages before each answer. Every user turn gets an answer; others are left out."""
    questions: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            questions[-1].append(message)
        elif any(earlier["role"] == "user" for earlier in questions[-1]):
            questions.append([])
    return [question for question in questions if any(message["role"] == "user" for message in question)]


def row_seed(seed: int, identity: str) -> int:
    """A row's seed, 31 bits; depends on the run's seed and the row's id alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {identity}".encode()).digest()[:4], "big") >> 1


def converse(dialogue: Dialogue, chat: ChatTemplate | None, *, keep_cut: bool) -> Conversing:
    """Yields the prompts of `dialogue`, takes their answers and returns the row.

    Without `chat` the endpoint renders the messages, unchecked. `keep_cut` keeps answers that max_tokens ended; a
    truncated answer ends its conversation.
    """
    assert dialogue.questions
    messages: list[Message] = []
    history: list[int] = []  # tokens up to and including the last answer
    try:
        for number, question in enumerate(dialogue.questions, 1):
            messages = messages + question
            prompt_ids = _continue(chat, messages, dialogue.tools, history, prompt=True)
            answer = yield Prompt(messages, dialogue.tools, prompt_ids)
            is_cut = answer.finish_reason == "length"
            if is_cut and not keep_cut:
                return Result(id=dialogue.id, dropped="cut_by_max_tokens")
            reasoning = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning}
            messages = [*messages, {"role": "assistant", "content": answer.text, **reasoning}]
            is_last = is_cut or number == len(dialogue.questions)
            is_exact = is_last and number == 1 and answer.token_ids is not None
            if not is_exact:  # the tokens of an exact row are written; nothing renders it again
                history = _continue(chat, messages, dialogue.tools, prompt_ids, prompt=False)
            if is_last:
                break
    except RowDropped as error:
        return Result(id=dialogue.id, dropped=error.reason)
    row: dict[str, Any] = {"id": dialogue.id, "messages": messages, "finish_reason": answer.finish_reason}
    if dialogue.tools is not None:
        row["tools"] = dialogue.tools
    if chat is not None and is_exact and answer.token_ids is not None:
        mask = [0] * len(prompt_ids) + [1] * len(answer.token_ids)
        row |= {"input_ids": prompt_ids + answer.token_ids, "loss_mask": mask, "tokenizer_hash": chat.tokenizer_hash}
    return Result(id=dialogue.id, row=row)


def _continue(
    chat: ChatTemplate | None, messages: list[Message], tools: list[Any] | None, before: list[int], *, prompt: bool
) -> list[int]:
    """Tokens of `messages`, which must begin with the tokens `before`; empty if the endpoint renders them."""
    if chat is None:
        return []
    token_ids = chat.encode([chat.render(messages, tools, prompt=prompt)])[0]
    if token_ids[: len(before)] != before:
        raise RowDropped("history_rewritten", "the template renders an earlier turn differently in a later prompt")
    return token_ids
