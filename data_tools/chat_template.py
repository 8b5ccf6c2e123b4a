"""Conversations to text and tokens through the target's chat template, the same on every day.

Invariant: a conversation renders to the same text whenever and wherever it is rendered: a template that asks for
today's date gets the date of the options.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.data_tools.conversations import Message

PROBE = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is four."}]
DATE_FUNCTION = "strftime_now"
DATE_DIRECTIVES = ("%A", "%a", "%B", "%b", "%-d", "%d", "%e", "%H", "%I", "%j", "%M", "%-m", "%m", "%S", "%Y", "%y")


class RowDropped(Exception):
    """A row that cannot be used, though it is well formed. `reason` is a name that is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class ChatTemplate:
    """A tokenizer's chat template with its variables and a fixed date.

    Raises ValueError when there is no template or when its `{% generation %}` tags mark nothing or everything.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        date: str,
        variables: Mapping[str, Any],
        tokenizer_hash: str = "",  # taken before the tokenizer's first use, which may change it
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template; give one with --chat-template FILE")
        self.tokenizer = tokenizer
        self.tokenizer_hash = tokenizer_hash
        self._date = datetime.date.fromisoformat(date)
        self._variables = dict(variables)
        self.inserts_date = DATE_FUNCTION in tokenizer.get_chat_template()
        if self.marks_generation(None):
            self._check_tags()

    def marks_generation(self, tools: Sequence[Any] | None) -> bool:
        """Does the template for conversations with these tools mark the assistant's spans?"""
        return has_generation_tag(self._source(tools))

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool = False) -> str:
        """The text of `messages`; with `prompt`, up to where the assistant's next answer begins."""
        return self._render(messages, tools, prompt=prompt, spans=False)[0]

    def generation_spans(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of `messages` and the character ranges [start, end) that the template marks as generated."""
        return self._render(messages, tools, prompt=False, spans=True)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def _check_tags(self) -> None:
        try:
            text, spans = self.generation_spans(PROBE, None)
        except RowDropped as error:
            raise ValueError(f"the chat template refuses a plain question and answer ({error})") from error
        if not 0 < sum(end - start for start, end in spans) < len(text):
            raise ValueError("the chat template's {% generation %} tags mark nothing, or everything; correct them")

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool, spans: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        if any("tool_calls" in message for message in messages) and self._wants_objects[tools is not None]:
            messages = [with_objects(message) for message in messages]
        return self._render_as_is(messages, tools, prompt=prompt, spans=spans)

    def _render_as_is(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, *, prompt: bool, spans: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        # One level below apply_chat_template, whose token mask runs to the end of the row where an answer ends in
        # whitespace that the tokenizer's offsets leave out; character ranges do not have this fault.
        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=self._source(tools),
                return_assistant_tokens_mask=spans,
                add_generation_prompt=prompt,
                **{**self.tokenizer.special_tokens_map, **self._variables},
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # the latter two: of what it cannot work with
            raise RowDropped("template_refuses", str(error)) from error
        texts, ranges = rendered
        return texts[0], ranges[0] if spans else []

    @functools.cached_property
    def _wants_objects(self) -> tuple[bool, bool]:
        """Without and with tools: whether calls' arguments must be objects. A template that writes JSON quotes OpenAI's
        text a second time; others, as DeepSeek's, put the text where it belongs and take no objects."""
        calls = [{"id": "call12345", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
        probe = [PROBE[0], {"role": "assistant", "content": "", "tool_calls": calls}]

        def quotes(tools: Sequence[Any] | None) -> bool:
            try:
                return r"{\"a\"" in self._render_as_is(probe, tools, prompt=False, spans=False)[0]
            except RowDropped:
                return True

        return quotes(None), quotes([])

    def _source(self, tools: Sequence[Any] | None) -> str:
        return self._sources[tools is not None]

    @functools.cached_property
    def _sources(self) -> tuple[str, str]:
        """The template for conversations without and with tools, the date frozen in both."""
        get = self.tokenizer.get_chat_template
        return freeze_date(get(), self._date), freeze_date(get(tools=[{}]), self._date)


def freeze_date(source: str, date: datetime.date) -> str:
    """Shadows the date function that transformers gives to templates by a macro that knows one day, 00:00:00."""
    if DATE_FUNCTION not in source:
        return source
    midnight = datetime.datetime.combine(date, datetime.time())
    filters = "".join(f"|replace('{name}', '{midnight.strftime(name)}')" for name in DATE_DIRECTIVES)
    # transformers renders with trim_blocks, which removes the newline behind the macro.
    return f"{{% macro {DATE_FUNCTION}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{source}"


def with_objects(value: Any) -> Any:
    """A message, or its calls, with arguments that are JSON text of an object as that object."""
    if isinstance(value, list):
        return [with_objects(call) for call in value]
    if not isinstance(value, dict):
        return value
    value = {key: with_objects(inner) if key in ("tool_calls", "function") else inner for key, inner in value.items()}
    try:
        arguments = json.loads(value["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):  # none, an object already, no JSON that can be read
        return value
    return value | {"arguments": arguments} if isinstance(arguments, dict) else value


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
