"""Loss masks: which tokens of a conversation the target itself would have generated.

Invariant: the tokens before an answer are exactly those of the prompt that a server would prefill, the template's
generation prompt included; those that follow are supervised up to the first end token, where generation would stop, and
have the weight of their answer.
Each conversation is tokenised as a whole; a row whose tokens merge across the beginning of an answer is dropped.

`{% generation %}` tags are not read: they say what fine-tuning trains on, which may be more (the header of the answer,
the newline after it) or other text than the target writes.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped
from slipstream.models.chat.messages import REASONING_FIELDS, Message
from slipstream.serve.chat.forms import ReasoningForm

END_OF_THINKING = "</think>"  # in contents
THINKING = "<think>"
Document = tuple[list[int], list[float]]  # token ids, and their weights: 0 where nothing is supervised


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer as the server meets it: `ids` are the tokens of its prompt and of itself, which begins at `start`."""

    ids: list[int]
    start: int


def mask_conversation(
    chat: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    *,
    turns: Literal["all", "last"],
    end_ids: Set[int],
    weights: Mapping[int, float] | None = None,
    is_cut: bool = False,
) -> list[Document]:
    """Documents that supervise the answers of `messages` with their `weights`, by index, where these are not 1.

    A document holds as many answers as follow each other in the tokens of a prompt. A template that renders an answer
    differently later, without its thinking for example, makes more documents. `is_cut`: max_tokens ended the last
    answer, so the end token is the template's, not the target's. Raises RowDropped.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    weights = weights or {}
    supervised = [index for index in answers if weights.get(index, 1) > 0]
    if not answers:
        raise RowDropped("no_assistant_turn", "the row has no answer; make answers with `slipstream regenerate`")
    if not supervised:
        raise RowDropped("no_assistant_turn", "every answer has weight 0")
    documents: list[Document] = []
    for index in supervised if turns == "all" else supervised[-1:]:
        turn = read_turn(chat, messages[: index + 1], tools, end_ids, is_cut=is_cut and index == answers[-1])
        add_answer(documents, turn.ids[: turn.start], turn.ids[turn.start :], weights.get(index, 1.0))
    return documents


def add_answer(documents: list[Document], prompt_ids: list[int], answer_ids: list[int], weight: float = 1.0) -> None:
    """Adds an answer and its prompt: to the last document if the prompt goes on with it, else, where the template
    renders an earlier answer otherwise, as another."""
    mask: list[float] = []
    if documents and prompt_ids[: len(documents[-1][0])] == documents[-1][0]:
        mask = documents.pop()[1]
    mask = mask + [0.0] * (len(prompt_ids) - len(mask)) + [weight] * len(answer_ids)
    documents.append((prompt_ids + answer_ids, mask))


def read_turn(
    chat: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    end_ids: Set[int],
    *,
    is_cut: bool = False,
) -> Turn:
    """The last of `messages`, an answer. Raises RowDropped."""
    answer = messages[-1]
    number = len(messages)
    if number == 1:
        raise RowDropped("starts_with_assistant", "the first answer has no prompt")
    prompt = chat.render(messages[:-1], tools, prompt=True)
    text = with_reasoning(chat.reasoning, answer, prompt, chat.render(messages, tools))
    if not text.startswith(prompt):
        raise RowDropped("prompt_rewritten", f"message {number} does not follow the template's own prompt")
    check_rendered(answer, text[len(prompt) :], number)
    if is_cut:
        text = prompt + cut_text(answer, text[len(prompt) :], number)
    ids, start = token_ids(prompt, text, chat.encode)
    # Just after the first end token of the answer; of a turn without one, its end.
    end = next((index + 1 for index in range(start, len(ids)) if ids[index] in end_ids), len(ids))
    if not is_cut and ids[end - 1] not in end_ids:  # as of GLM, whose answers end where the next message begins
        following = chat.first_ids["tool" if answer.get("tool_calls") else "user"][:1]
        ids += [token for token in following if token in end_ids]
        end = len(ids)
    return Turn(ids[: end - 1] if is_cut and ids[end - 1] in end_ids else ids[:end], start)


def with_reasoning(form: ReasoningForm | None, answer: Message, prompt: str, text: str) -> str:
    """`text` of a conversation, with the reasoning of its last answer where the template's form says that it leaves
    this out, as Gemma 4's: empty where the prompt ends it, else the answer's."""
    if form is None or form.is_rendered:
        return text
    empty = form.begin[0] + form.end[0]
    before = prompt.removesuffix(empty)
    rest = text.removeprefix(before)
    if rest == text or rest.startswith(form.begin[0]):
        return text
    reasoning = form.begin[0] + reasoning_of(answer) + form.end[0] if reasoning_of(answer) else ""
    return before + (reasoning if before == prompt else empty) + rest


def cut_text(answer: Message, text: str, number: int) -> str:
    """`text`, of an answer that max_tokens ended, up to what the target wrote last: a template closes the reasoning,
    and writes an end token. Raises RowDropped if that is not found."""
    if answer.get("tool_calls"):
        return text  # the end token of calls is found in the tokens
    answer_text = answer["content"] or reasoning_of(answer)
    for passage in (answer_text, answer_text.strip()):
        place = text.rfind(passage)
        if place >= 0:
            return text[: place + len(passage)]
    part = "content" if answer["content"] else "reasoning"
    raise RowDropped(f"cut_in_{part}", f"the template does not show where message {number} was cut")


def check_rendered(answer: Message, text: str, number: int) -> None:
    """Raises RowDropped if `text`, of the answer as rendered, lacks what the target wrote."""
    if is_empty(answer):
        raise RowDropped("empty_answer", f"message {number} has no content")
    thinking, _, content = answer["content"].rpartition(END_OF_THINKING)
    reasoning = reasoning_of(answer) or thinking.replace(THINKING, "")
    rendered = squeezed(text)
    for part, passage in (("reasoning", reasoning), ("content", content)):
        if squeezed(passage) not in rendered:
            raise RowDropped(f"{part}_not_rendered", f"the template leaves out the {part} of message {number}")
    for call in answer.get("tool_calls", ()):
        name = call.get("function", call).get("name", "")
        if squeezed(name) not in rendered:
            raise RowDropped("calls_not_rendered", f"the template leaves out the call of {name} in message {number}")


def is_empty(answer: Message) -> bool:
    """Whether an answer has neither content nor reasoning nor calls."""
    return not (answer["content"] or reasoning_of(answer) or answer.get("tool_calls"))


def reasoning_of(answer: Message) -> str:
    return answer.get(REASONING_FIELDS[0]) or answer.get("thinking") or ""


def squeezed(text: str) -> str:
    """Text without white space, which templates trim and move."""
    return "".join(text.split())


def token_ids(prompt: str, text: str, encode: Callable[[Sequence[str]], list[list[int]]]) -> tuple[list[int], int]:
    """Tokens of `text` and how many of them are those of `prompt`, with which it begins. Raises RowDropped."""
    before, ids = encode([prompt, text])
    if ids[: len(before)] != before:
        edge = text[max(0, len(prompt) - 12) : len(prompt) + 12]
        raise RowDropped("unstable_boundary", f"tokens merge across {edge!r}")
    return ids, len(before)
