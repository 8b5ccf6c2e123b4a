"""Loss masks: which tokens of a conversation the target itself would have generated.

Invariant: the tokens up to either end of a supervised span, tokenised alone, are a prefix of the tokens of the whole
text. So the tokens before an answer are exactly those that a server would have prefilled. The text itself is tokenised
as a whole; a row whose tokens merge across the edge of a span is dropped.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from slipstream.data_tools.target_tokenizer import ChatTemplate, RowDropped
from slipstream.models.chat.messages import Message


def mask_conversation(
    chat: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    *,
    turns: Literal["all", "last"],
    end_ids: frozenset[int],
    is_cut: bool = False,
) -> tuple[list[int], list[bool]]:
    """Token ids of `messages` up to the last answer, and the mask of the answers; `is_cut` says that max_tokens ended
    the last one: the template, not the target, then wrote its end token.

    The template's `{% generation %}` tags give the spans, else rendering turn by turn. Raises
    RowDropped.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RowDropped("no_assistant_turn", "nothing to supervise")
    used = messages[: answers[-1] + 1]
    if turns == "all" and chat.marks_generation(tools):
        text, spans = chat.generation_spans(used, tools)
        ids, ranges = token_ranges(text, spans, chat.encode)
    else:
        text, spans = rendered_spans(chat, used, tools, answers if turns == "all" else answers[-1:])
        ids, ranges = token_ranges(text, spans, chat.encode)
        ranges = [(start, end_of_answer(ids, start, end, end_ids)) for start, end in ranges]
    if is_cut:
        start, end = ranges[-1]
        ranges[-1] = (start, end_of_cut_answer(ids, start, end, end_ids))
    return ids, to_mask(len(ids), ranges)


def rendered_spans(
    chat: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any] | None, answers: Sequence[int]
) -> tuple[str, list[tuple[int, int]]]:
    """The text of `messages` and the character ranges of the messages `answers`, found by incremental rendering."""
    if answers[0] == 0:
        raise RowDropped("starts_with_assistant", "the first answer has no prompt")
    text = chat.render(messages, tools)
    spans = []
    for index in answers:
        prompt = chat.render(messages[:index], tools, prompt=True)
        turn = chat.render(messages[: index + 1], tools)
        if not text.startswith(turn):
            raise RowDropped("history_rewritten", f"the template renders message {index + 1} differently later on")
        if not turn.startswith(prompt):
            raise RowDropped("prompt_rewritten", f"message {index + 1} does not follow the template's own prompt")
        spans.append((len(prompt), len(turn)))
    return text, spans


def token_ranges(
    text: str, spans: Sequence[tuple[int, int]], encode: Callable[[Sequence[str]], list[list[int]]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of `text`, and `spans` in tokens instead of characters, both [start, end). Raises RowDropped."""
    ends = sorted({end for span in spans for end in span})
    ids, *prefixes = encode([text, *(text[:end] for end in ends)])
    position = {}
    for end, prefix in zip(ends, prefixes, strict=True):
        if ids[: len(prefix)] != prefix:
            raise RowDropped("unstable_boundary", f"tokens merge across {text[max(0, end - 12) : end + 12]!r}")
        position[end] = len(prefix)
    return ids, [(position[start], position[end]) for start, end in spans]


def end_of_answer(ids: Sequence[int], start: int, end: int, end_ids: frozenset[int]) -> int:
    """`end` moved back to just after the last end token: the target never generates what a template writes after it."""
    return next((index + 1 for index in range(end - 1, start - 1, -1) if ids[index] in end_ids), end)


def end_of_cut_answer(ids: Sequence[int], start: int, end: int, end_ids: frozenset[int]) -> int:
    """`end` moved back to just before the first end token: generation would have stopped there."""
    return next((index for index in range(start, end) if ids[index] in end_ids), end)


def to_mask(length: int, ranges: Sequence[tuple[int, int]]) -> list[bool]:
    mask = [False] * length
    for start, end in ranges:
        mask[start:end] = [True] * (end - start)
    return mask
