"""Grammars of whole answers, as xgrammar's structural tags: reasoning, content and calls, each in the model's own form.

Markers that the tokenizer has are tokens, so that what a grammar enforces is what the parser reads.
"""

import json
import re
from typing import Any

from slipstream.serve.chat.forms import ReasoningForm, ToolForm
from slipstream.serve.chat.markers import Markers
from slipstream.serve.chat.notations import ANY_TEXT, Element, any_until, arguments_of, one_of, optional, sequence
from slipstream.serve.chat.parser import ARGUMENTS
from slipstream.serve.chat.tools import Tool, ToolChoice, ToolError
from slipstream.serve.grammar.grammars import MOST_CHARS, as_element
from slipstream.serve.grammar.work import Unsupported, Work
from slipstream.serve.request import Grammar

# First character of an answer without calls, if calls stand at the beginning of an answer: brackets begin a call.
NOT_A_CALL: Element = {"type": "regex", "pattern": r"[^\s\[\]{}<]"}
SPACE: Element = {"type": "regex", "pattern": r"[ \t\r\n]{0,8}"}  # of JSON; `\s` has others, which its readers refuse


def written(tag: Element) -> str:
    """Returns a structural tag as JSON. Stops at the limit, since parts that several references share are written many
    times. Raises ToolError."""
    parts = list[str]()
    num_chars = 0
    for part in json.JSONEncoder().iterencode(tag):
        parts.append(part)
        num_chars += len(part)
        if num_chars > MOST_CHARS:
            raise ToolError(
                "tools", f"cannot be enforced: the grammar of the answer has more than {MOST_CHARS} characters"
            )
    return "".join(parts)


class AnswerGrammar:
    """Builds grammars of answers from a model's forms; either form may be missing."""

    def __init__(self, tools: ToolForm | None, reasoning: ReasoningForm | None, markers: Markers) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._markers = markers

    def build(
        self, choice: ToolChoice, content: Grammar | None, work: Work, *, is_open: bool, is_closed: bool
    ) -> Grammar:
        """Returns the grammar of an answer. `content`: the content's grammar, None if it is free. `is_open`: the prompt
        has begun the reasoning; `is_closed`: the prompt has ended it."""
        if choice.mode == "none":
            answer = self._content(content)
        elif choice.mode == "required":
            answer = self._calls(choice, work)
        elif content is not None:
            answer = one_of([self._calls(choice, work), self._content(content)])
        else:
            answer = self._free_or_calls(choice, work)
        before = self._before(is_open, is_closed)
        tag = {"type": "structural_tag", "format": sequence(*before, answer)}
        return Grammar("structural_tag", written(tag))

    def _literal(self, text: str) -> list[Element]:
        return self._markers.elements(text)

    def _before(self, is_open: bool, is_closed: bool) -> list[Element]:
        """Returns the reasoning and the text between it and the answer."""
        form = self._reasoning
        if form is None or is_closed:
            return []
        end = self._literal(form.end[0].strip())
        after = [*self._literal(form.next_message), *([SPACE] if form.end[0] != form.end[0].rstrip() else [])]
        inside = [any_until(end[0]), *end, *after]
        if is_open:
            return inside
        return [optional(sequence(*self._literal(form.begin[0].rstrip()), *inside))]

    def _content(self, grammar: Grammar | None) -> Element:
        begin = self._literal(self._reasoning.content[0]) if self._reasoning and self._reasoning.content else []
        return sequence(*begin, ANY_TEXT if grammar is None else as_element(grammar))

    def _calls(self, choice: ToolChoice, work: Work) -> Element:
        """Returns a grammar of one or several calls and nothing else."""
        return sequence(*self._literal(self._calls_form.first[0] + self._before_name), *self._from_name(choice, work))

    @property
    def _calls_form(self) -> ToolForm:
        assert self._tools is not None
        return self._tools

    @property
    def _before_name(self) -> str:
        return self._calls_form.call[0].partition("$name")[0]

    def _from_name(self, choice: ToolChoice, work: Work) -> list[Element]:
        """Returns the calls from the first one's name on."""
        form = self._calls_form
        call = one_of([self._call(tool, choice, work) for tool in choice.callable_tools])
        if form.ends_answer:  # with a stop token
            return [call]
        more = {"type": "star", "content": sequence(*self._literal(form.between + self._before_name), call)}
        return [call, *([more] if choice.is_parallel else []), *self._literal(form.last[0])]

    def _call(self, tool: Tool, choice: ToolChoice, work: Work) -> Element:
        """Returns a call from its name on."""
        form = self._calls_form
        middle, _, end = form.call[0].partition("$name")[2].partition(ARGUMENTS)
        schema = tool.parameters if choice.mode == "required" or tool.is_strict else {"type": "object"}
        try:
            arguments = arguments_of(form, schema, self._markers, work)
        except Unsupported as error:
            raise ToolError(tool.field, f"cannot be enforced: {error}") from error
        end_elements = [] if form.ends_answer else self._literal(end)
        return sequence(*self._literal(tool.name + middle), *arguments, *end_elements)

    def _free_or_calls(self, choice: ToolChoice, work: Work) -> Element:
        """Returns free content that may end with valid calls."""
        form = self._calls_form
        if form.at_start:
            return optional(one_of([self._calls(choice, work), sequence(NOT_A_CALL, ANY_TEXT)]))
        if self._reasoning is not None and self._reasoning.content:
            return one_of([self._calls(choice, work), self._content(None)])
        tokens = list[Any]()
        texts = list[Any]()
        calls = self._from_name(choice, work)
        for first in form.first:  # the model may leave out what is before its calls
            [head, *tail] = self._literal(first + self._before_name)
            if head["type"] == "token":
                tokens.append([head["token"], sequence(*tail, *calls)])
                continue
            trigger = re.split(r"[\s{]", head["value"])[0]
            rest = self._literal(head["value"].removeprefix(trigger))
            texts.append([trigger, sequence(*rest, *tail, *calls)])
        kind, rules = ("token_dispatch", tokens) if tokens else ("dispatch", texts)
        return {"type": kind, "rules": rules, "loop": False}
