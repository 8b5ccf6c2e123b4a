"""Arguments of a call, as they come: JSON is passed on as it is written, other notations become JSON."""

import ast
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

Read = tuple[str, str | None]
JSON_NAMES = {"true": True, "false": False, "null": None}


class Arguments(Protocol):
    """Reads the arguments of one call."""

    is_whole: ClassVar[bool]
    """They are passed on as a whole, or not at all."""

    def feed(self, text: str, final: bool) -> Read:
        """The new part of the arguments and, where they have ended, the text that follows; before that None. Raises
        ValueError where the text is no arguments after all; only if `is_whole`."""
        ...


class JsonArguments:
    """An object, which begins with the first character of the text. A marker outside its strings ends it, too."""

    is_whole: ClassVar[bool] = False

    def __init__(self, shown: Callable[[str], str], is_marker: Callable[[str], bool]) -> None:
        self._shown, self._is_marker = shown, is_marker
        self._depth, self._in_string, self._is_escaped = 0, False, False

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
                    return self._shown(text[: index + 1]), text[index + 1 :]
            elif self._is_marker(character):
                return self._shown(text[:index]), text[index:]
        return self._shown(text), None


class ParameterArguments:
    """Parameters between tags, typed by the tool's schema. Each is passed on when it is complete."""

    is_whole: ClassVar[bool] = False

    def __init__(self, begin: Any, end: Any, lines: bool, schema: Any, shown: Callable[[str], str]) -> None:
        """begin, end: compiled patterns. lines: a value has lines of its own."""
        self._begin, self._end, self._lines, self._schema, self._shown = begin, end, lines, schema, shown
        self._parameter: Any = None  # the match of the one that is read
        self._held, self._num_read = "", 0
        self._scanned = 0  # characters of a value that hold no beginning of its end

    def feed(self, text: str, final: bool) -> Read:
        self._held += text
        pieces = ""
        while True:
            if self._parameter is None:
                found = self._begin.match(self._held, partial=not final)
                if found is None and (not final or self._held.strip()):
                    return pieces + ("}" if self._num_read else "{}"), self._held
                if found is None or found.partial:
                    return pieces, None
                self._parameter, self._held = found, self._held[found.end() :]
            found = self._end.search(self._held, self._scanned, partial=not final)
            if found is None or found.partial:
                self._scanned = len(self._held) if found is None else found.start()
                return pieces + (self._cut() if final else ""), None
            pieces += self._written(self._value(self._held[: found.start()]))
            self._parameter, self._held, self._scanned = None, self._held[found.end() :], 0

    def _written(self, value: str) -> str:
        self._num_read += 1
        key = json.dumps(self._shown(self._parameter["key"]), ensure_ascii=False)
        return f"{'{' if self._num_read == 1 else ', '}{key}: {value}"

    def _value(self, text: str) -> str:
        """As JSON."""
        if self._lines:
            text = text.removeprefix("\n").removesuffix("\n")
        text, type_ = self._shown(text), self._parameter.groupdict().get("type")
        if type_ == "true":
            return json.dumps(text, ensure_ascii=False)
        schema = {} if type_ else property_schema(self._schema, self._parameter["key"])
        return json.dumps(typed(text, schema if type_ is None else None), ensure_ascii=False)

    def _cut(self) -> str:
        """The beginning of a parameter that the end of the answer has cut off."""
        text = self._shown(self._held.removeprefix("\n") if self._lines else self._held)
        return self._written(json.dumps(text, ensure_ascii=False)[:-1]) if text else ""


class PythonArguments:
    """Keyword arguments, up to the bracket that closes the call; passed on as a whole."""

    is_whole: ClassVar[bool] = True

    def __init__(self, shown: Callable[[str], str]) -> None:
        self._shown, self._held = shown, ""
        self._depth, self._quote, self._is_escaped, self._position = 0, "", False, 0

    def feed(self, text: str, final: bool) -> Read:
        self._held += text
        for index in range(self._position, len(self._held)):
            character = self._held[index]
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
                    return keyword_arguments(self._shown(self._held[:index])), self._held[index:]
                self._depth -= 1
        self._position = len(self._held)
        if final:
            raise ValueError("the call is cut off")
        return "", None


def keyword_arguments(text: str) -> str:
    """`a=1, b="x"` as a JSON object. Raises ValueError for anything but literal values of keywords."""
    try:
        call = ast.parse(f"f({text}\n)", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("arguments without a keyword")
        values = {str(keyword.arg): literal(keyword.value) for keyword in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, TypeError, RecursionError, MemoryError, AssertionError) as error:
        raise ValueError("no literal arguments") from error


def literal(node: ast.expr) -> Any:
    """Python's literals, and JSON's names for them."""
    if isinstance(node, ast.Name) and node.id in JSON_NAMES:
        return JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {str(literal(key)): literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)


def property_schema(schema: Any, key: str) -> Any:
    """The schema of a property, references resolved as far as they are to this schema. {} where there is none."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return {"$root": schema, **found} if isinstance(found, Mapping) else {}


def types_of(schema: Any, root: Any) -> set[str]:
    """Returns the JSON types that a schema allows; of one that says nothing about types, a string.

    Each part of the schema is visited once: alternatives that lead back to a part add nothing to it.
    """
    types = set[str]()
    visited = set[int]()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        named, alternatives = types_named_by(part, root)
        types |= named
        waiting += alternatives
    return types or {"string"}


def types_named_by(schema: Any, root: Any) -> tuple[set[str], list[Any]]:
    """Returns the types that a schema itself names, and the schemas that decide instead where it names none."""
    if not isinstance(schema, Mapping):
        return {"string"}, []
    named = schema.get("type")
    if isinstance(named, str | list):
        return {named} if isinstance(named, str) else {name for name in named if isinstance(name, str)}, []
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema[k] for k in ("const",) if k in schema]
    if values:
        return {json_type(value) for value in values}, []
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        place = root
        for part in reference[2:].split("/"):
            place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        return set(), [place]
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            return set(), schema[name]
    return {"string"}, []


def json_type(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    names = ((int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in names if isinstance(value, kind)), "object")


def typed(text: str, schema: Any) -> Any:
    """A value of a parameter's text: of the first type that its schema allows and the text has. Otherwise the text.
    Without a schema (None) any JSON."""
    allowed = None if schema is None else types_of(schema, schema.get("$root"))
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
