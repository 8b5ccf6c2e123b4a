"""The target's chat template for rows of data: text, the spans it marks as generated, tokens; rows it refuses."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from slipstream.models.chat_template import PROBE, PromptTemplate, TemplateRefused
from slipstream.models.messages import Message


class RowDropped(Exception):
    """A row that cannot be used, though it is well formed. `reason` is a name that is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class ChatTemplate(PromptTemplate):
    """Raises ValueError when there is no template or when its `{% generation %}` tags mark nothing or everything;
    RowDropped for messages that it refuses."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        date: str,
        variables: Mapping[str, Any],
        tokenizer_hash: str = "",  # taken before the tokenizer's first use, which may change it
    ) -> None:
        super().__init__(tokenizer, date=date, variables=variables)
        self.tokenizer_hash = tokenizer_hash
        if self.marks_generation(None):
            self._check_tags()

    def marks_generation(self, tools: Sequence[Any] | None) -> bool:
        """Does the template for conversations with these tools mark the assistant's spans?"""
        return has_generation_tag(self._source(tools))

    def generation_spans(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `messages` and the character ranges [start, end) that the template marks as generated."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            return super()._render(messages, tools, **options)
        except TemplateRefused as error:
            raise RowDropped("template_refuses", str(error)) from error

    def _check_tags(self) -> None:
        try:
            text, spans = self.generation_spans(PROBE, None)
        except RowDropped as error:
            raise ValueError(f"the chat template refuses a plain question and answer ({error})") from error
        if not 0 < sum(end - start for start, end in spans) < len(text):
            raise ValueError("the chat template's {% generation %} tags mark nothing, or everything; correct them")


@functools.lru_cache(maxsize=8)
def has_generation_tag(source: str) -> bool:
    """True if `{% generation %}` is a tag of the template rather than part of a comment or of its text."""
    try:
        tokens = [(kind, value) for _, kind, value in jinja2.Environment().lex(source) if kind != "whitespace"]
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error
    return any(
        kind == "block_begin" and following == ("name", "generation")
        for (kind, _), following in zip(tokens, tokens[1:], strict=False)
    )
