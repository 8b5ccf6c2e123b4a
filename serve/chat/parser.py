"""Splits an answer, as it comes, into reasoning, content and calls of tools.

Invariant: the parts do not depend on how the text is cut into pieces. Only markers and the white space beside them are
lost: a call of a tool that the request does not have stays content.
"""

import secrets
import string
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple

import regex

from slipstream.serve.chat.arguments import (
    Arguments,
    JsonArguments,
    ParameterArguments,
    ParameterSyntax,
    ParameterTypes,
    PythonArguments,
    QuotedArguments,
)
from slipstream.serve.chat.forms import ReasoningForm, ToolForm
from slipstream.serve.chat.markers import SPACE, Markers

RUN_START = r"(?<!\s)"  # so that long white space is not searched from each of its characters
ARGUMENTS = "$arguments"
MOST_FED = 4096  # characters that are parsed at once, since the rest is copied after each part


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The beginning of a call, with its id and name, or a piece of its arguments, which are JSON text."""

    kind: ClassVar[Literal["call"]] = "call"

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the call as chats have it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class TextPiece(NamedTuple):
    """Text of the reasoning or the content: the characters from `start` to `end` of the decoded answer."""

    kind: Literal["reasoning", "content"]
    text: str
    start: int
    end: int


Piece = TextPiece | CallPiece


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an answer, or those that a piece of it adds, in order."""

    pieces: Sequence[Piece]

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    @property
    def content(self) -> str:
        return self._text("content")

    @property
    def calls(self) -> list[CallPiece]:
        """The calls, the pieces of each joined."""
        calls = joined(piece for piece in self.pieces if piece.kind == "call")
        return [call for call in calls if isinstance(call, CallPiece)]

    def _text(self, kind: Literal["reasoning", "content"]) -> str:
        return "".join([piece.text for piece in self.pieces if piece.kind == kind])


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Joins the pieces of each call, and each run of text of one kind."""
    runs = groupby(pieces, lambda piece: (piece.kind, piece.index if isinstance(piece, CallPiece) else None))
    return [joined_run(list(run)) for _, run in runs]


def joined_run(run: list[Any]) -> Piece:
    """Joins the pieces of one call, or of one kind of text."""
    first = run[0]
    if isinstance(first, CallPiece):
        return replace(first, arguments="".join([piece.arguments for piece in run]))
    return TextPiece(first.kind, "".join([piece.text for piece in run]), first.start, run[-1].end)


class Syntax:
    """The compiled forms of a model; either may be missing."""

    def __init__(self, tools: ToolForm | None, reasoning: ReasoningForm | None, markers: Markers) -> None:
        self.tools = tools
        self.markers = markers
        self.has_reasoning = reasoning is not None
        regions = {} if reasoning is None else {"reasoning": reasoning.begin, "content": reasoning.content}
        begins = {name: markers.any_of(form.rstrip() for form in forms) for name, forms in regions.items() if forms}
        self.skips_space = {name: forms[0] != forms[0].rstrip() for name, forms in regions.items() if forms}
        self.ends: dict[str, Any] = {}
        if reasoning is not None:
            ends = {"reasoning": reasoning.end, "content": reasoning.content_end}
            for name, forms in ends.items():
                before = RUN_START if forms and forms[0][0].isspace() else ""
                pattern = before + markers.any_of(form.rstrip() for form in forms)
                self.ends |= {name: regex.compile(pattern)} if forms else {}
        self.space_after_reasoning = reasoning is not None and reasoning.end[0] != reasoning.end[0].rstrip()
        self.opened = regex.compile(f"{begins.get('reasoning', '(?!)')}{SPACE}$")
        anywhere = {} if reasoning is None or reasoning.is_first else dict(begins)
        at_start = dict(begins) if reasoning is None or reasoning.is_first else {}
        if tools is not None:
            self._add_calls(tools, at_start if tools.at_start else anywhere)
        self.at_start = alternatives(at_start, SPACE)
        self.anywhere = alternatives(anywhere, RUN_START + SPACE)

    def _add_calls(self, form: ToolForm, places: dict[str, str]) -> None:
        any_of = self.markers.any_of
        begins = dict.fromkeys(call.partition(ARGUMENTS)[0] for call in form.call)
        ends = dict.fromkeys(call.partition(ARGUMENTS)[2] for call in form.call)
        call = any_of(begins) + self._after_name(form, begins, ends)
        first = any_of(form.first) + SPACE + call
        places["call"] = first
        between = {"last": any_of(form.last), "call": f"(?:{any_of([form.between])}{SPACE}{call}|{first})"}
        self.after_call = alternatives({name: text for name, text in between.items() if text != "(?:)"}, SPACE)
        self.call_end = regex.compile(SPACE + any_of(ends))
        if form.parameter:
            self.parameter = self._parameter_syntax(form.parameter, [part for text in ends for part in text.split()])

    def _after_name(self, form: ToolForm, begins: Iterable[str], ends: Iterable[str]) -> str:
        """Returns what must follow the beginning of a call: where no text of the form ends the name, a parameter or
        the call's end, without which a part of a name would be read as one."""
        if any(begin.rstrip().endswith("$name") for begin in begins):
            following = self.markers.any_of([form.parameter.partition("$key")[0], *ends])
            return f"(?={following})"
        return r"\{" if form.arguments == "json" else ""

    def _parameter_syntax(self, form: str, call_ends: Iterable[str]) -> ParameterSyntax:
        begin, _, end = form.partition("$value")
        following = self.markers.any_of([begin.partition("$key")[0], *call_ends])
        tag = self.markers.pattern(end.strip())
        return ParameterSyntax(
            regex.compile(self.markers.pattern(begin.rstrip())),
            regex.compile(tag),
            regex.compile(f"{tag}(?={SPACE}{following})"),
            begin.endswith("\n"),
        )

    def arguments(self, types: ParameterTypes) -> Arguments:
        """Returns a reader of a call's arguments."""
        assert self.tools is not None
        spell_markers = self.markers.shown
        if self.tools.arguments == "json":
            return JsonArguments(spell_markers, lambda character: spell_markers(character) != character)
        if self.tools.arguments == "quoted":
            return QuotedArguments(self.markers.hidden(self.tools.quote), spell_markers)
        if self.tools.arguments == "python":
            return PythonArguments(spell_markers)
        return ParameterArguments(self.parameter, types, spell_markers)


def alternatives(patterns: Mapping[str, str], before: str) -> Any:
    """Compiles a pattern whose `lastgroup` names the alternative that matches; None if there are none."""
    if not patterns:
        return None
    inner = "|".join(f"(?P<is_{name}>{pattern})" for name, pattern in patterns.items())
    return regex.compile(f"{before}(?:{inner})")


class AnswerParser:
    """Parses one answer. `tools`: the parameter types of the request's tools, by name. `is_open`: the prompt has begun
    the reasoning."""

    def __init__(
        self,
        syntax: Syntax,
        tools: Mapping[str, ParameterTypes],
        *,
        is_open: bool = False,
    ) -> None:
        self._syntax = syntax
        self._tools = tools
        self._buffer = ""
        self._pieces = list[Piece]()
        self.num_consumed = 0  # characters before the buffer
        self.num_calls = 0
        self.reasoning: list[tuple[int, int]] = []  # its ranges in the text, markers included
        self._reads: Callable[[bool], bool] = self._text
        self._region: Literal["reasoning", "content"] = "content"
        self._region_start = 0
        # These say what may come next: the beginning of an answer or of another call, or white space to skip.
        self._is_start = True
        self._is_after_call = False
        self._skips_space = False
        self._space: list[str] = []  # further white space after that at the buffer's end
        # The current call.
        self._name = ""
        self._call_text = list[str]()
        self._arguments: Arguments | None = None
        if is_open:
            self._enter("reasoning", 0)

    def feed(self, text: str, final: bool = False) -> Parts:
        """Returns the parts that a piece of the answer adds; `final` releases all text that was held back."""
        self._pieces = []
        starts = range(MOST_FED, len(text), MOST_FED)
        for start in starts:
            self._read(text[start - MOST_FED : start], final=False)
        self._read(text[starts[-1] if starts else 0 :], final)
        if final and self._reads == self._in_region and self._region == "reasoning":
            self.reasoning.append((self._region_start, self.num_consumed))
        return Parts(self._pieces)

    def _read(self, text: str, final: bool) -> None:
        if not final and text.isspace() and self._buffer[-1:].isspace():  # decided with what follows
            self._space.append(text)
            return
        self._buffer += "".join(self._space) + text
        self._space.clear()
        while self._reads(final):
            pass

    def num_reasoning(self, starts: Sequence[int]) -> int:
        """Counts the tokens of the reasoning, markers included. `starts`: number of characters before each token."""
        return sum(bisect_left(starts, end) - bisect_left(starts, start) for start, end in self.reasoning)

    def _take(self, count: int) -> str:
        """Removes the first characters of the buffer and returns them."""
        text = self._buffer[:count]
        self._buffer = self._buffer[count:]
        self.num_consumed += count
        return text

    def _skip(self) -> None:
        if self._skips_space:
            self._take(len(self._buffer) - len(self._buffer.lstrip()))
            self._skips_space = not self._buffer

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> None:
        """Adds a piece of text, which must be the text that was taken last."""
        if text:
            start = self.num_consumed - len(text)
            self._pieces.append(TextPiece(kind, self._syntax.markers.shown(text), start, self.num_consumed))

    def _enter(self, region: Literal["reasoning", "content"], start: int) -> None:
        self._reads = self._in_region
        self._region = region
        self._region_start = start
        self._skips_space = self._syntax.skips_space[region]

    def _text(self, final: bool) -> bool:
        """Reads text outside of all markers. Returns whether the buffer can be parsed further."""
        if self._is_after_call:
            return self._between_calls(final)
        self._skip()
        if self._is_start and self._syntax.at_start is not None:
            match = self._syntax.at_start.match(self._buffer, partial=not final)
            if match is not None:
                return not match.partial and self._begin(match)
        if self._is_start and (not self._buffer or self._buffer.isspace()):
            return self._flush() if final else False  # white space waits until other text follows
        self._is_start = False
        anywhere = self._syntax.anywhere
        match = None if anywhere is None else anywhere.search(self._buffer, partial=not final)
        if match is None:
            return self._flush()
        if match.lastgroup != "is_call" and not (final or match.partial or self._buffer[match.end() :].strip()):
            return False  # a call may begin earlier and contain this marker, if a bracket follows
        self._emit("content", self._take(match.start()))
        return not match.partial and self._begin(match)

    def _flush(self) -> bool:
        self._emit("content", self._take(len(self._buffer)))
        return False

    def _between_calls(self, final: bool) -> bool:
        match = self._syntax.after_call.match(self._buffer, partial=not final)
        if match is not None and match.partial:
            return False
        if match is None:
            self._is_after_call = False
            self._skips_space = True
            return bool(self._buffer)
        if match["is_call"] is None:
            self._take(match.end())
            return True
        return self._begin(match)

    def _begin(self, match: Any) -> bool:
        """Begins a region or a call at the beginning of the buffer."""
        start = self.num_consumed
        length = match.end() - match.start()
        groups = match.groupdict()
        if groups.get("is_call") is None:
            self._take(length)
            self._enter("content" if groups.get("is_reasoning") is None else "reasoning", start)
            return True
        assert self._syntax.tools is not None
        self._is_start = self._is_after_call = False
        begin = self._take(length)
        if match["name"] not in self._tools:
            self._emit("content", begin)
            return True
        if self._syntax.tools.arguments == "json":  # the bracket belongs to the arguments
            self._buffer = begin[-1] + self._buffer
            self.num_consumed = self.num_consumed - 1
            begin = begin[:-1]
        self._name = match["name"]
        self._call_text = [begin]
        self._reads = self._in_call
        self._arguments = self._syntax.arguments(self._tools[self._name])
        if not self._arguments.is_whole:
            self._announce()
        return True

    def _announce(self) -> None:
        assert self._syntax.tools is not None
        self._pieces.append(CallPiece(self.num_calls, call_id(self._syntax.tools.id_len), self._name))
        self.num_calls += 1

    def _in_region(self, final: bool) -> bool:
        self._skip()
        end = self._syntax.ends.get(self._region)
        match = None if end is None else end.search(self._buffer, partial=not final)
        self._emit(self._region, self._take(len(self._buffer) if match is None else match.start()))
        if match is None or match.partial:
            return False
        self._take(match.end() - match.start())
        if self._region == "reasoning":
            self.reasoning.append((self._region_start, self.num_consumed))
        self._reads = self._text
        self._is_start = True
        self._skips_space = self._region == "reasoning" and self._syntax.space_after_reasoning
        return True

    def _in_call(self, final: bool) -> bool:
        assert self._arguments is not None
        text = self._take(len(self._buffer))
        piece, rest = self._arguments.feed(text, final)
        if rest is not None:
            self._buffer = rest
            self.num_consumed -= len(rest)
        if self._arguments.is_whole:
            self._call_text.append(text.removesuffix(rest or ""))
            if piece:
                self._announce()
            elif rest is not None:
                self._emit("content", "".join(self._call_text))
                self._reads = self._text
                return True
        if piece:
            self._pieces.append(CallPiece(self.num_calls - 1, arguments=piece))
        if rest is None:
            return False
        self._reads = self._after_arguments
        return True

    def _after_arguments(self, final: bool) -> bool:
        match = self._syntax.call_end.match(self._buffer, partial=True)
        if match is not None and match.partial and not final:
            return False
        if match is not None:  # a partial end at the end of the answer is dropped, too
            self._take(match.end())
        self._reads = self._text
        self._is_after_call = True
        return True


def call_id(length: int | None) -> str:
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))
