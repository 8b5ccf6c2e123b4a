"""Renders messages to prompt text by the target's chat template, for serving and training data alike.

Invariant: messages render to the same text at any time and on any machine: a template that asks for today's date gets
the date of the options.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.models.chat.messages import Message, date_of

PROBE: list[Message] = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is four."}]
DATE_FUNCTION = "strftime_now"  # of transformers
DATE_VARIABLE = "date_string"  # of Llama's templates; without it they write a date of their own
DATE_VARIABLE_FORMAT = "%d %b %Y"
DATE_DIRECTIVES = ("%A", "%a", "%B", "%b", "%-d", "%d", "%e", "%H", "%I", "%j", "%M", "%-m", "%m", "%S", "%Y", "%y")


class TemplateRefused(ValueError):
    """The template refused its input; the text is the template's own."""


class TemplateFailed(TemplateRefused):
    """The template failed on its input; the text is Python's."""


class PromptTemplate:
    """A tokenizer's chat template with its variables and its date: year-month-day, or `today`.

    Raises ValueError if the tokenizer has no chat template.
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
        """The text of `messages`; `prompt` adds the beginning of the assistant's next answer. `variables` override the
        template's. Raises TemplateRefused, and ValueError for a template that is not valid Jinja."""
        return self._render(messages, tools, **{"add_generation_prompt": prompt, **(variables or {})})[0]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text and, with return_assistant_tokens_mask, the character ranges that `{% generation %}` tags mark.
        `options` are those of transformers' render_jinja_template, and variables."""
        return self._render_as_is(self.prepared(messages, tools), tools, **options)

    def prepared(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Sequence[Message]:
        """Messages whose calls have arguments as the template wants them, text or objects."""
        if any("tool_calls" in message for message in messages) and self._wants_objects[tools is not None]:
            return [with_objects(message) for message in messages]
        return messages

    def _render_as_is(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        # apply_chat_template extends the token mask to the end of the row if an answer ends in whitespace that the
        # tokenizer's offsets omit. This function below it gives character ranges, which are exact.
        date, source = date_of(self._date), self._sources[tools is not None]
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
        """Whether calls' arguments must be objects, without and with tools. Some templates write JSON and would quote
        OpenAI's text twice; others, such as DeepSeek's, insert the text and take no objects."""
        calls = [{"id": "call12345", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
        probe: list[Message] = [PROBE[0], {"role": "assistant", "content": "", "tool_calls": calls}]

        def quotes(tools: Sequence[Any] | None) -> bool:
            try:
                return r"{\"a\"" in self._render_as_is(probe, tools)[0]
            except TemplateRefused:
                return True

        return quotes(None), quotes([])

    @functools.cached_property
    def _sources(self) -> tuple[str, str]:
        """The template for conversations without and with tools."""
        get = self.tokenizer.get_chat_template
        return get(), get(tools=[{}])


@functools.lru_cache(maxsize=8)
def freeze_date(source: str, date: datetime.date) -> str:
    """Shadows transformers' date function by a macro that formats one day, 00:00:00."""
    if DATE_FUNCTION not in source:
        return source
    midnight = datetime.datetime.combine(date, datetime.time())
    filters = "".join(f"|replace('{name}', '{midnight.strftime(name)}')" for name in DATE_DIRECTIVES)
    # transformers renders with trim_blocks, which removes the newline after the macro.
    return f"{{% macro {DATE_FUNCTION}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{source}"


def with_objects(value: Any) -> Any:
    """A message, or its calls, with arguments parsed if they are the JSON text of an object."""
    if isinstance(value, list):
        return [with_objects(call) for call in value]
    if not isinstance(value, dict):
        return value
    value = {key: with_objects(inner) if key in ("tool_calls", "function") else inner for key, inner in value.items()}
    try:
        arguments = json.loads(value["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):  # missing, already an object, or invalid JSON
        return value
    return value | {"arguments": arguments} if isinstance(arguments, dict) else value
