"""The texts by which a draft is judged: conversations, rendered and tokenised as the server does, and their answers.

What counts is how well a draft predicts the target's own answers, so these are made anew, greedily, whatever answers
the conversations have. The latter are replayed, too: a draft that predicts them better has learnt from another model.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.data_tools.conversations import to_example
from slipstream.data_tools.masking import read_turn
from slipstream.data_tools.options import ConversationOptions
from slipstream.data_tools.rows import matches, read_rows
from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped, TargetTokenizer
from slipstream.models.chat.messages import Message
from slipstream.models.chat.template import PromptTemplate, TemplateRefused
from slipstream.train.batches import Batch, collate

TOGETHER = 8  # texts of a batch
GRAM = 8  # tokens of a piece whose repetition counts
SWITCHES: tuple[Mapping[str, Any], ...] = (
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"thinking": True},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "high"},
)
SYSTEM: Message = {"role": "system", "content": "You are a helpful assistant."}


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: tuple[Message, ...]  # up to a user's turn
    category: str = ""
    answer: str = ""  # the file's own, if there is one

    @property
    def language(self) -> str:
        """The script of most letters of the last turn."""
        letters = Counter(
            unicodedata.name(letter, "UNKNOWN").split()[0]
            for letter in str(self.messages[-1].get("content", ""))
            if letter.isalpha()
        )
        return letters.most_common(1)[0][0].lower() if letters else "none"


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and its answer, as token ids."""

    prompt: list[int]
    answer: list[int]
    conversation: Conversation = field(repr=False)

    @property
    def repeats(self) -> float:
        """Share of the answer's pieces of GRAM tokens that occurred before in it."""
        pieces = [tuple(self.answer[i : i + GRAM]) for i in range(len(self.answer) - GRAM + 1)]
        return 1 - len(set(pieces)) / len(pieces) if pieces else 0.0


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to render prompts that is not the server's default."""

    name: str
    variables: Mapping[str, Any] = field(default_factory=dict)
    system: Message | None = None


def read_conversations(options: ConversationOptions, limit: int | None) -> list[Conversation]:
    """The first `limit` rows (None: all), each up to the user's last turn. Raises ValueError if no row has any."""
    conversations = []
    for row in read_rows(options):
        columns = row.columns()
        if not matches(columns, options.conditions, row.place):
            continue
        example = to_example(row, columns)
        messages = list(example.messages or ())
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None:
            continue
        after = messages[last + 1] if last + 1 < len(messages) else {}
        answer = str(after.get("content", "")) if after.get("role") == "assistant" else ""
        category = str(columns.get("category") or columns.get("sub_category") or "")
        conversations.append(Conversation(tuple(messages[: last + 1]), category, answer))
        if len(conversations) == limit:
            break
    if not conversations:
        raise ValueError("no row of data has a user's turn; give conversations with messages, as training data has")
    return conversations


class Renderer:
    """Prompts as the server renders and tokenises them."""

    def __init__(self, target: TargetTokenizer, date: str, variables: Mapping[str, Any]) -> None:
        self.tokenizer = target.tokenizer
        self.end_ids = target.end_ids
        tokenizer = self.tokenizer
        self.template = PromptTemplate(tokenizer, date=date, variables=variables)
        self.chat = ChatTemplate(tokenizer, date=date, variables=variables)

    def prompt(self, conversation: Conversation, variant: Variant | None = None) -> str:
        messages = list(conversation.messages)
        if variant is not None and variant.system is not None and messages[0]["role"] != "system":
            messages = [variant.system, *messages]
        variables = {} if variant is None else variant.variables
        return self.template.render(messages, prompt=True, variables=variables)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def variants(self, conversation: Conversation) -> Iterator[Variant]:
        """Yields the variants that render it otherwise than the default."""
        plain = self.prompt(conversation)
        texts = {plain}
        for variables in SWITCHES:
            name = ", ".join(f"{key} {str(value).lower()}" for key, value in variables.items())
            yield from self._if_new(Variant(name, variables), conversation, texts)
        yield from self._if_new(Variant("a system prompt", system=SYSTEM), conversation, texts)

    def _if_new(self, variant: Variant, conversation: Conversation, texts: set[str]) -> Iterator[Variant]:
        try:
            text = self.prompt(conversation, variant)
        except TemplateRefused:
            return
        if text not in texts:
            texts.add(text)
            yield variant

    def given(self, conversation: Conversation) -> Answered | None:
        """The conversation with the file's own answer; None if it has none."""
        if not conversation.answer:
            return None
        messages = [*conversation.messages, {"role": "assistant", "content": conversation.answer}]
        try:
            turn = read_turn(self.chat, messages, None, self.end_ids)
        except RowDropped:
            return None
        return Answered(turn.ids[: turn.start], turn.ids[turn.start :], conversation)


def batches_of(answered: Sequence[Answered], max_length: int) -> list[Batch]:
    """The texts in their order, some documents to a batch, the answers supervised."""
    documents = [
        ([*answer.prompt, *answer.answer], [False] * len(answer.prompt) + [True] * len(answer.answer))
        for answer in answered
    ]
    return [collate([documents[i : i + TOGETHER]], max_length) for i in range(0, len(documents), TOGETHER)]


def usable(answered: Sequence[Answered]) -> list[Answered]:
    """The texts whose answers have at least two tokens: a round needs one to begin at and one to draft."""
    return [answer for answer in answered if len(answer.answer) > 1]
