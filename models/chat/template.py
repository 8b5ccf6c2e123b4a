"""Renders messages to prompt text by the target's chat template, for serving and training data alike.

Invariant: messages render to the same text at any time and on any machine: a template that asks for today's date gets
the date of the options.
"""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from slipstream.models.chat.messages import Message, MessageError, check_text, date_of, joined_pairs

QUESTION: Message = {"role": "user", "content": "What is 2 + 2?"}
ARGUMENTS = {"first": "two"}  # of a call that tells in which form a template takes them
DATE_FUNCTION = "strftime_now"  # of transformers
DATE_VARIABLE = "date_string"  # of Llama's templates; without it they write a date of their own
DATE_VARIABLE_FORMAT = "%d %b %Y"
DATE_DIRECTIVES = ("%A", "%a", "%B", "%b", "%-d", "%d", "%e", "%H", "%I", "%j", "%M", "%-m", "%m", "%S", "%Y", "%y")


Conversion = Callable[[Any], Any]  # of a call's arguments


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
        options = {"add_generation_prompt": prompt, **(variables or {})}
        return self._render(self.prepared(messages, tools), tools, **options)

    def prepared(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Sequence[Message]:
        """Messages whose calls have arguments as the template takes them, objects or JSON text."""
        if not any("tool_calls" in message for message in messages):
            return messages
        convert = self._conversions[tools is not None]
        return messages if convert is None else [with_arguments(message, convert) for message in messages]

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, **options: Any) -> str:
        """`options`: those of transformers' render_jinja_template, and variables."""
        date = date_of(self._date)
        source = self._sources[tools is not None]
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
        texts, _ = rendered
        try:
            check_text("it", texts[0])
        except MessageError as error:
            raise TemplateRefused(str(error)) from error
        return texts[0]

    @functools.cached_property
    def _conversions(self) -> tuple[Conversion | None, Conversion | None]:
        """The conversion of calls' arguments, without and with tools; None where the template takes both forms alike.

        Objects are transformers' convention; templates that write JSON would quote OpenAI's text twice. Others, such
        as DeepSeek's, insert the text: they refuse an object, or write it in Python's form.
        """

        def rendering(arguments: object, tools: Sequence[Any] | None) -> str | None:
            call = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": arguments}}
            try:
                return self._render([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], tools)
            except TemplateRefused:
                return None

        def conversion(tools: Sequence[Any] | None) -> Conversion | None:
            with_object = rendering(ARGUMENTS, tools)
            with_text = rendering(json.dumps(ARGUMENTS), tools)
            if with_object == with_text:
                return None if with_text else as_object
            takes_text = with_object is None or str(ARGUMENTS) in with_object
            return as_text if takes_text and with_text is not None else as_object

        return conversion(None), conversion([])

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


def with_arguments(value: Any, convert: Conversion) -> Any:
    """A message, or its calls, with arguments converted."""
    if isinstance(value, list):
        return [with_arguments(call, convert) for call in value]
    if not isinstance(value, dict):
        return value
    changed = {
        key: with_arguments(inner, convert) if key in ("tool_calls", "function") else inner
        for key, inner in value.items()
    }
    return changed | {"arguments": convert(value["arguments"])} if "arguments" in value else changed


def as_object(arguments: Any) -> Any:
    """Arguments as an object if they are the JSON text of one. Models may write escapes of half of a surrogate pair,
    which no prompt can hold: they become U+FFFD."""
    try:
        parsed = json.loads(arguments)
        if "\\u" in arguments:
            parsed = joined_pairs(parsed)
    except (TypeError, ValueError, RecursionError):  # already an object, or invalid JSON
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def as_text(arguments: Any) -> Any:
    """Arguments as JSON text if they are an object."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
