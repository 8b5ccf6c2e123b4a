"""Messages to the text of a prompt through the target's chat template: one way for serving and training data.

Invariant: messages render to the same text whenever and wherever they are rendered: a template that asks for today's
date gets the date of the options.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.models.messages import Message, date_of

PROBE: list[Message] = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is four."}]
DATE_FUNCTION = "strftime_now"  # of transformers
DATE_VARIABLE = "date_string"  # of Llama's templates, which write a date of their own where it is not given
DATE_VARIABLE_FORMAT = "%d %b %Y"
DATE_DIRECTIVES = ("%A", "%a", "%B", "%b", "%-d", "%d", "%e", "%H", "%I", "%j", "%M", "%-m", "%m", "%S", "%Y", "%y")


class TemplateRefused(ValueError):
    """The template refused what it was given; the text is the template's own."""


class TemplateFailed(TemplateRefused):
    """The template broke on what it was given; the text is Python's."""


class PromptTemplate:
    """A tokenizer's chat template with its variables and its date: year-month-day, or `today`.

    Raises ValueError when there is none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, date: str, variables: Mapping[str, Any]) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the target's tokenizer has no chat template; give one with --chat-template FILE")
        self.tokenizer = tokenizer
        self._date = date
        self._variables = dict(variables)
        source = tokenizer.get_chat_template()
        self.inserts_date = DATE_FUNCTION in source or DATE_VARIABLE in source

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages`; with `prompt`, up to where the assistant's next answer begins. `variables` replace
        those of the template. Raises TemplateRefused, and ValueError for a template that is not valid Jinja."""
        return self._render(messages, tools, **{"add_generation_prompt": prompt, **(variables or {})})[0]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text and, with return_assistant_tokens_mask, the character ranges that `{% generation %}` tags mark.
        `options` are those of transformers' render_jinja_template, and variables."""
        if any("tool_calls" in message for message in messages) and self._wants_objects[tools is not None]:
            messages = [with_objects(message) for message in messages]
        return self._render_as_is(messages, tools, **options)

    def _render_as_is(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        # One level below apply_chat_template, whose token mask runs to the end of the row where an answer ends in
        # whitespace that the tokenizer's offsets leave out; character ranges do not have this fault.
        date, source = date_of(self._date), self._source(tools)
        dated = {DATE_VARIABLE: date.strftime(DATE_VARIABLE_FORMAT)} if DATE_VARIABLE in source else {}
        try:
            rendered: Any = render_jinja_template(
                [list(messages)],
                tools=None if tools is None else list(tools),
                chat_template=freeze_date(source, date),
                **{**self.tokenizer.special_tokens_map, **dated, **self._variables, **options},
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        except jinja2.TemplateError as error:
            raise TemplateRefused(str(error)) from error
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise TemplateFailed(str(error)) from error
        texts, ranges = rendered
        return texts[0], ranges[0] if ranges else []

    @functools.cached_property
    def _wants_objects(self) -> tuple[bool, bool]:
        """Without and with tools: whether calls' arguments must be objects. A template that writes JSON quotes OpenAI's
        text a second time; others, as DeepSeek's, put the text where it belongs and take no objects."""
        calls = [{"id": "call12345", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
        probe: list[Message] = [PROBE[0], {"role": "assistant", "content": "", "tool_calls": calls}]

        def quotes(tools: Sequence[Any] | None) -> bool:
            try:
                return r"{\"a\"" in self._render_as_is(probe, tools)[0]
            except TemplateRefused:
                return True

        return quotes(None), quotes([])

    def _source(self, tools: Sequence[Any] | None) -> str:
        return self._sources[tools is not None]

    @functools.cached_property
    def _sources(self) -> tuple[str, str]:
        """The template for conversations without and with tools."""
        get = self.tokenizer.get_chat_template
        return get(), get(tools=[{}])


@functools.lru_cache(maxsize=8)
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
