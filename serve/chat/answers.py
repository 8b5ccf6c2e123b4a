"""Reads a target's answers: finds its forms of reasoning and calls, builds grammars and parses text as it comes.

The HTTP server and `LLM.chat` both use it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import regex

from slipstream.models.chat.messages import Message
from slipstream.models.chat.quotes import quote
from slipstream.serve.chat.arguments import ParameterTypes, parameter_types
from slipstream.serve.chat.forms import (
    AUTO,
    REASONING_FORMS,
    TOOL_FORMS,
    ReasoningForm,
    ToolForm,
    find_form,
    template_source,
)
from slipstream.serve.chat.markers import SPACE, Markers
from slipstream.serve.chat.parser import AnswerParser, Parts, Syntax, TextPiece
from slipstream.serve.chat.tags import AnswerGrammar
from slipstream.serve.chat.tools import Tool, ToolChoice, ToolError
from slipstream.serve.detokenize import Decoder
from slipstream.serve.grammar.work import Unsupported, Work
from slipstream.serve.request import Grammar

TAIL = 32  # tokens of a prompt that may begin or end the reasoning of its answer
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on or off


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Reads the answers of one request. `parser` makes a parser for each choice; None: the whole answer is content."""

    decoder: Decoder
    grammar: Grammar | None = None
    stop_ids: tuple[int, ...] = ()
    parser: Callable[[], AnswerParser] | None = None
    has_reasoning: bool = False
    reasons: bool = False  # the prompt leaves it to the answer to reason
    hidden: Callable[[str], str] = str  # spells a text as the decoder does
    grammar_field: str = "tools"  # field of the request that an error about the grammar names
    continues: bool = False  # the answer continues the prompt's text and is decoded with its end, unlike in a chat

    def parts_of(self, text: str) -> Parts:
        """Returns the parts of a whole answer."""
        if self.parser is None:
            return Parts([TextPiece("content", text, 0, len(text))])
        return self.parser().feed(text, final=True)

    def stops(self, stop: Sequence[str]) -> list[str]:
        """Returns the stop strings in each spelling that decoded text may have."""
        return list(dict.fromkeys([*stop, *map(self.hidden, stop)]))


class ChatFormat:
    """Reads the chat answers of one target. `tool_parser` and `reasoning_parser`: names of forms, auto or none."""

    def __init__(self, tokenizer: Any, tool_parser: str, reasoning_parser: str) -> None:
        self._source = template_source(tokenizer)
        self._is_auto = tool_parser == AUTO
        self.tools = find_form(TOOL_FORMS, tool_parser, self._source)
        self.reasoning = find_form(REASONING_FORMS, reasoning_parser, self._source)
        markers = Markers(tokenizer, [text for form in (self.tools, self.reasoning) for text in texts_of(form)])
        self._markers = markers
        self.decoder = Decoder(tokenizer, markers.by_id)
        self._plain = Decoder(tokenizer)
        self._with_tools = Syntax(self.tools, self.reasoning, markers)
        self._without_tools = Syntax(None, self.reasoning, markers)
        self._grammar = AnswerGrammar(self.tools, self.reasoning, markers)
        ends = markers.any_of(form.rstrip() for form in self.reasoning.end) if self.reasoning else "(?!)"
        self._closed = regex.compile(f"{ends}{SPACE}$")
        self._stop_ids: tuple[int, ...] = ()
        if self.tools is not None and self.tools.ends_answer:
            self._stop_ids = tuple(id for name, id in markers.ids.items() if self.tools.call[0].endswith(name))

    def answer(self, choice: ToolChoice, prompt: Sequence[int], content: Grammar | None) -> AnswerFormat:
        """Returns the format of a request's answers. `content`: the content's grammar, if any. Raises ToolError."""
        if choice.mode != "none":
            self._check_tools()
        if choice.mode == "none" and self.reasoning is None:
            return AnswerFormat(self._plain, content)
        tail = self.decoder(list(prompt[-TAIL:]))
        is_open = self.reasoning is not None and self._with_tools.opened.search(tail) is not None
        is_closed = self._closed.search(tail) is not None
        grammar = None
        work = Work()
        if content is not None or choice.is_enforced:
            grammar = self._grammar.build(choice, content, work, is_open=is_open, is_closed=is_closed)
        syntax = self._without_tools if choice.mode == "none" else self._with_tools
        types = {tool.name: self._types_of(tool, work) for tool in choice.callable_tools}
        return AnswerFormat(
            self.decoder,
            grammar,
            self._stop_ids,
            lambda: AnswerParser(syntax, types, is_open=is_open),
            self.reasoning is not None,
            self.reasoning is not None and not is_closed,
            self._markers.hidden,
        )

    def _types_of(self, tool: Tool, work: Work) -> ParameterTypes:
        """Returns the types of a tool's parameters, which only forms with tags need."""
        if self.tools is None or self.tools.arguments != "parameters":
            return {}
        try:
            return parameter_types(tool.parameters, work)
        except Unsupported as error:
            raise ToolError(tool.field, f"cannot be read: {error}") from error

    def _check_tools(self) -> None:
        if "tools" not in self._source:  # then no form helps
            remedy = "leave them out, or start the server with --chat-template and one that writes tools"
            raise ToolError("tools", f"cannot be served: the target's chat template takes no tools; {remedy}")
        if self.tools is None:
            why = (
                "the target's chat template does not tell the form of calls" if self._is_auto else "tool_parser is none"
            )
            remedy = f"start the server with --tool-parser and one of {', '.join(TOOL_FORMS)}, or leave tools out"
            raise ToolError("tools", f"cannot be served: {why}; {remedy}")

    def variables(self, effort: str | None, field: str) -> dict[str, Any]:
        """Returns the variables that set a chat template's reasoning effort, which the request has in `field`. Raises
        ToolError if the template has no such variable."""
        if effort is None:
            return {}
        if effort not in EFFORTS:
            raise ToolError(field, f"is {quote(effort)}; it must be one of {', '.join(EFFORTS)}")
        values: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in self._source}
        values |= {"reasoning_effort": effort} if "reasoning_effort" in self._source else {}
        if not values:
            raise ToolError(field, "has no effect with this target's chat template; leave it out")
        return values

    def named_reasoning(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages whose reasoning has the name that the template reads."""
        name = self.reasoning.message_field if self.reasoning else "reasoning_content"
        return [
            {name if key == "reasoning_content" else key: value for key, value in message.items()}
            for message in messages
        ]


def texts_of(form: ToolForm | ReasoningForm | None) -> list[str]:
    """Returns all texts of a form."""
    values = [] if form is None else [getattr(form, field.name) for field in fields(form) if field.name != "signs"]
    strings = [value if isinstance(value, tuple) else (value,) for value in values]
    return [text for group in strings for text in group if isinstance(text, str)]
