"""A conversation whose answers a model gives anew, turn by turn.

Invariant: an answer is asked for behind exactly the tokens that a server would hold at that point. Where the chat
template renders an earlier turn differently later on, the row is dropped.
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
from slipstream.models.messages import Message


@dataclass(frozen=True, slots=True)
class Dialogue:
    id: str  # unique in a run
    questions: list[list[Message]]  # what precedes each answer: user turns, with system turns before them
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    messages: list[Message]
    tools: list[Any] | None
    token_ids: list[int]  # empty where the endpoint renders the messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    finish_reason: str  # "stop" or "length"
    num_tokens: int
    token_ids: list[int] | None = None  # the end token included; None where only text came back
    reasoning: str | None = None  # where the endpoint returns it apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one dialogue: a row to write, or the reason why there is none."""

    id: str
    row: Mapping[str, Any] | None = None
    dropped: str = ""
    failed: str = ""  # may succeed when tried again


Conversing = Generator[Prompt, Answer, Result]  # send(None) starts it; send(answer) gives the next prompt


@dataclass(slots=True)
class DialogueReader:
    """The dialogues of the input in order, each once. Counts what it leaves out."""

    options: ConversationOptions
    ids: dict[str, int] = field(default_factory=dict)  # id -> position in the input, of every dialogue given out
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
            identity = f"{identity}-{content[:12]}"  # two conversations of one id: the later one gets a longer id
        if identity in self.ids:
            self.dropped["duplicate"] += 1
            return None
        self._contents[identity] = content
        self.ids[identity] = len(self.ids)
        return Dialogue(identity, questions, example.tools)


def split_questions(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages before each answer; every user turn gets one. Answers that answer no user turn are left out."""
    questions: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] != "assistant":
            questions[-1].append(message)
        elif any(earlier["role"] == "user" for earlier in questions[-1]):
            questions.append([])
    return [question for question in questions if any(message["role"] == "user" for message in question)]


def row_seed(seed: int, identity: str) -> int:
    """A row's own seed, 31 bits: the same whatever else is generated, and when."""
    return int.from_bytes(hashlib.sha256(f"{seed} {identity}".encode()).digest()[:4], "big") >> 1


def converse(dialogue: Dialogue, chat: ChatTemplate | None, *, keep_cut: bool) -> Conversing:
    """Yields the prompts of `dialogue`, takes their answers and returns the row.

    Without `chat` the endpoint renders the messages, and nothing can be checked. `keep_cut` keeps answers that
    max_tokens ended; such an answer is the last of its dialogue, since nobody goes on behind half a sentence.
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
            messages = [*messages, _assistant(answer)]
            is_last = is_cut or number == len(dialogue.questions)
            is_exact = is_last and number == 1 and answer.token_ids is not None
            if not is_exact:  # of an exact row the tokens are written, nobody will render it again
                history = _continue(chat, messages, dialogue.tools, prompt_ids, prompt=False)
            if is_last:
                break
    except RowDropped as error:
        return Result(id=dialogue.id, dropped=error.reason)
    row: dict[str, Any] = {"id": dialogue.id, "messages": messages, "finish_reason": answer.finish_reason}
    if dialogue.tools is not None:
        row["tools"] = dialogue.tools
    if chat is not None and is_exact and answer.token_ids is not None:
        row |= _exact_tokens(chat, prompt_ids, answer.token_ids)
    return Result(id=dialogue.id, row=row)


def _continue(
    chat: ChatTemplate | None, messages: list[Message], tools: list[Any] | None, before: list[int], *, prompt: bool
) -> list[int]:
    """Tokens of `messages`, which must go on where the tokens `before` ended; none where the endpoint renders them."""
    if chat is None:
        return []
    token_ids = chat.encode([chat.render(messages, tools, prompt=prompt)])[0]
    if token_ids[: len(before)] != before:
        raise RowDropped("history_rewritten", "the template renders an earlier turn differently later on")
    return token_ids


def _assistant(answer: Answer) -> Message:
    reasoning = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning}
    return {"role": "assistant", "content": answer.text, **reasoning}


def _exact_tokens(chat: ChatTemplate, prompt_ids: list[int], answer_ids: list[int]) -> dict[str, Any]:
    return {
        "input_ids": prompt_ids + answer_ids,
        "loss_mask": [0] * len(prompt_ids) + [1] * len(answer_ids),
        "tokenizer_hash": chat.tokenizer_hash,
    }
