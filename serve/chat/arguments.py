"""Reads the arguments of a call as they come: passes JSON on unchanged and turns other notations into JSON."""

import ast
import json
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from slipstream.serve.grammar.work import Work

ParameterTypes = Mapping[str, Set[str]]  # JSON types of a tool's parameters, by name
Read = tuple[str, str | None]
TEXT: Set[str] = frozenset(["string"])  # the types of a parameter whose schema names none
JSON_NAMES = {"true": True, "false": False, "null": None}


class Arguments(Protocol):
    """Reads the arguments of one call."""

    is_whole: ClassVar[bool]
    """The reader returns the arguments as a whole, or not at all."""

    def feed(self, text: str, final: bool) -> Read:
        """Returns the new part of the arguments and the text that follows them, which is None until they have ended. If
        `is_whole`, an end without arguments: the text up to there was none."""
        ...


class JsonArguments:
    """Reads a JSON object that begins at the start of the text. A marker outside its strings ends it, too."""

    is_whole: ClassVar[bool] = False

    def __init__(self, spell_markers: Callable[[str], str], is_marker: Callable[[str], bool]) -> None:
        self._spell_markers = spell_markers
        self._is_marker = is_marker
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str, final: bool) -> Read:
        for index, character in enumerate(text):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = not self._is_escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._spell_markers(text[: index + 1]), text[index + 1 :]
            elif self._is_marker(character):
                return self._spell_markers(text[:index]), text[index:]
        return self._spell_markers(text), None


@dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """Compiled patterns of a parameter's tags. `end`: a `tag` and a lookahead for the text that may follow it, since a
    value may contain tags. `lines`: a value has its own lines."""

    begin: Any
    tag: Any
    end: Any
    lines: bool


class ParameterArguments:
    """Reads parameters between tags, typed by the tool's schema. Returns each when it is complete."""

    is_whole: ClassVar[bool] = False

    def __init__(self, syntax: ParameterSyntax, types: ParameterTypes, spell_markers: Callable[[str], str]) -> None:
        self._syntax = syntax
        self._types = types
        self._spell_markers = spell_markers
        self._parameter: Any = None  # match of the begin tag of the current parameter
        self._value = list[str]()  # of the current parameter, without a possible beginning of its end tag
        self._buffer = ""
        self._space = list[str]()
        self._num_read = 0

    def feed(self, text: str, final: bool) -> Read:
        if not final and text.isspace() and self._buffer[-1:].isspace():  # decided with what follows
            self._space.append(text)
            return "", None
        self._buffer += "".join(self._space) + text
        self._space.clear()
        pieces = list[str]()
        while True:
            if self._parameter is None:
                self._buffer = self._buffer.lstrip()
                match = self._syntax.begin.match(self._buffer, partial=not final)
                if match is None and self._buffer:
                    return "".join([*pieces, "}" if self._num_read else "{}"]), self._buffer
                if match is None or match.partial:
                    return "".join(pieces), None
                self._parameter = match
                self._buffer = self._buffer[match.end() :]
            match = self._find_end(final)
            self._keep(len(self._buffer) if match is None else match.start())
            if match is None or match.partial:
                return "".join([*pieces, self._cut() if final else ""]), None
            pieces.append(self._written(self._json("".join(self._value))))
            self._buffer = self._buffer[match.end() - match.start() :]
            self._parameter = None
            self._value.clear()

    def _find_end(self, final: bool) -> Any:
        """Returns the match of the tag that ends a value, a partial match if more text has to decide, or None."""
        match = self._syntax.end.search(self._buffer, partial=True)
        if match is not None and match.partial and final:  # the end of the answer has cut off what follows the tag
            return self._syntax.tag.match(self._buffer, match.start())
        return match

    def _keep(self, count: int) -> None:
        """Moves the first `count` characters of the buffer to the value."""
        self._value.append(self._buffer[:count])
        self._buffer = self._buffer[count:]

    def _written(self, value: str) -> str:
        self._num_read += 1
        key = json.dumps(self._spell_markers(self._parameter["key"]), ensure_ascii=False)
        return f"{'{' if self._num_read == 1 else ', '}{key}: {value}"

    def _json(self, text: str) -> str:
        if self._syntax.lines:
            text = text.removeprefix("\n").removesuffix("\n")
        text = self._spell_markers(text)
        type_ = self._parameter.groupdict().get("type")
        if type_ == "true":
            return json.dumps(text, ensure_ascii=False)
        types = self._types.get(self._parameter["key"], TEXT) if type_ is None else None
        value = typed(text, types)
        return written(text if isinstance(value, str) else value)  # texts have no quotes: theirs are of the text

    def _cut(self) -> str:
        """Returns the beginning of a parameter that the end of the answer has cut off."""
        value = "".join(self._value)
        text = self._spell_markers(value.removeprefix("\n") if self._syntax.lines else value)
        return self._written(json.dumps(text, ensure_ascii=False)[:-1]) if text else ""


CLOSING = {"{": "}", "[": "]"}


class QuotedArguments:
    """Reads members of an object, up to the bracket that closes the call, as JSON whose keys are bare and whose texts
    stand between `quote`s. A marker outside texts ends them, too."""

    is_whole: ClassVar[bool] = False

    def __init__(self, quote: str, spell_markers: Callable[[str], str]) -> None:
        self._quote = quote
        self._spell_markers = spell_markers
        self._buffer = ""  # which may begin a quote
        self._word = list[str]()  # a bare key or value
        self._closing = list[str]()
        self._in_text = False
        self._is_begun = False

    def feed(self, text: str, final: bool) -> Read:
        self._buffer += text
        pieces = list[str]()
        if self._buffer and not self._is_begun:
            self._is_begun = True
            pieces.append("{")
        while True:
            place = self._buffer.find(self._quote)
            part_len = self._num_read(final) if place < 0 else place
            part = self._buffer[:part_len]
            self._buffer = self._buffer[part_len:]
            if self._in_text:
                pieces.append(written(self._spell_markers(part))[1:-1])
            elif (rest := self._read_bare(part, pieces)) is not None:
                return "".join(pieces), rest + self._buffer
            if place < 0:
                return "".join(pieces), None
            self._buffer = self._buffer[len(self._quote) :]
            self._in_text = not self._in_text
            pieces.append('"')

    def _num_read(self, final: bool) -> int:
        """Returns how many characters of the buffer, which has no quote, cannot begin one."""
        lengths = range(min(len(self._quote) - 1, len(self._buffer)), 0, -1)
        begun_len = next((length for length in lengths if self._buffer.endswith(self._quote[:length])), 0)
        return len(self._buffer) - (0 if final else begun_len)

    def _read_bare(self, text: str, pieces: list[str]) -> str | None:
        """Reads what stands outside of texts. Returns what follows the arguments, if they have ended."""
        for index, character in enumerate(text):
            if self._spell_markers(character) != character:
                pieces += [self._taken_word(), *reversed(self._closing), "}"]
                return text[index:]
            if character == ":":
                word = "".join(self._word).strip()
                self._word.clear()
                pieces.append(f"{written(self._spell_markers(word)) if word else ''}: ")
            elif character in CLOSING:
                self._closing.append(CLOSING[character])
                pieces.append(character)
            elif character in "]}":
                pieces += [self._taken_word(), self._closing[-1] if self._closing else "}"]
                if not self._closing:
                    return text[index:]
                self._closing.pop()
            elif character == ",":
                pieces += [self._taken_word(), ", "]
            else:
                self._word.append(character)
        return None

    def _taken_word(self) -> str:
        """Returns a bare value as JSON: a number, true, false, null, or else a text."""
        word = "".join(self._word).strip()
        self._word.clear()
        return written(typed(word, None)) if word else ""


class PythonArguments:
    """Reads keyword arguments up to the bracket that closes the call, and returns them as a whole."""

    is_whole: ClassVar[bool] = True

    def __init__(self, spell_markers: Callable[[str], str]) -> None:
        self._spell_markers = spell_markers
        self._pieces = list[str]()
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str, final: bool) -> Read:
        for index, character in enumerate(text):
            if self._quote:
                if not self._is_escaped and character == self._quote:
                    self._quote = ""
                self._is_escaped = not self._is_escaped and character == "\\"
            elif character in "'\"":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                if self._depth == 0:
                    arguments = self._spell_markers("".join(self._pieces) + text[:index])
                    return keyword_arguments(arguments) or "", text[index:]
                self._depth -= 1
        self._pieces.append(text)
        return "", "" if final else None


def keyword_arguments(text: str) -> str | None:
    """Converts `a=1, b="x"` to a JSON object; None unless all are keywords with literal values."""
    try:
        call = ast.parse(f"f({text}\n)", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        values = {str(keyword.arg): literal(keyword.value) for keyword in call.keywords}
        return written(values)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError, AssertionError):
        return None


def written(value: Any) -> str:
    """Returns a value as JSON. Half of a surrogate pair, which a model may write as an escape, stays one."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    is_text = text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
    return text if is_text else json.dumps(value)


def literal(node: ast.expr) -> Any:
    """Evaluates a literal of Python; `true`, `false` and `null` of JSON are literals, too."""
    if isinstance(node, ast.Name) and node.id in JSON_NAMES:
        return JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {str(literal(key)): literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


def parameter_types(schema: Any, work: Work) -> ParameterTypes:
    """Returns the JSON types of each property of a tool's parameters. Raises Unsupported where that takes more than is
    left of the request's work."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: types_of(part, schema, work, f"/properties/{name}") for name, part in properties.items()}


def types_of(schema: Any, root: Any, work: Work, place: str) -> Set[str]:
    """Returns the JSON types that a schema allows; of one that says nothing about types, a string.

    Each part of the schema is visited once: alternatives that lead back to a part add nothing to it.
    """
    types = set[str]()
    visited = set[int]()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        work.charge(place)
        if id(part) in visited:
            continue
        visited.add(id(part))
        names, alternatives = types_named_by(part, root, work, place)
        types |= names
        waiting += alternatives
    return types or TEXT


def types_named_by(schema: Any, root: Any, work: Work, place: str) -> tuple[Set[str], list[Any]]:
    """Returns the types that a schema itself names, and the schemas that decide instead where it names none."""
    if not isinstance(schema, Mapping):
        return TEXT, []
    type_ = schema.get("type")
    if isinstance(type_, str | list):
        names = [type_] if isinstance(type_, str) else type_
        work.charge(place, len(names))
        return {name for name in names if isinstance(name, str)}, []
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema[k] for k in ("const",) if k in schema]
    if values:
        work.charge(place, len(values))
        return {json_type(value) for value in values}, []
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        work.charge(place, reference.count("/"))
        for part in reference[2:].split("/"):
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return set(), [target]
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            return set(), schema[name]
    return TEXT, []


def json_type(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    names = ((int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")


def typed(text: str, allowed: Set[str] | None) -> Any:
    """Returns the text's JSON value if its type is allowed (None: any type is), otherwise the text itself."""
    plain = text.strip()
    plain = plain.lower() if plain in ("True", "False") else "null" if plain == "None" else plain
    try:
        value = json.loads(plain, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    kind = json_type(value)
    if allowed is None or kind in allowed or (kind == "integer" and "number" in allowed):
        return value
    if kind == "number" and "integer" in allowed and value == int(value):
        return int(value)
    return text


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no JSON")
    return value
