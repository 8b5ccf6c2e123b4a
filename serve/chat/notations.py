"""What arguments may be by a tool's schema, in each notation, as elements of xgrammar's structural tags."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from slipstream.serve.chat.forms import ToolForm
from slipstream.serve.chat.markers import Markers
from slipstream.serve.grammar.json_schema import rewrite
from slipstream.serve.grammar.work import Unsupported, Work

Element = dict[str, Any]
ANY_TEXT: Element = {"type": "any_text"}
KEY = r'[^<>"\n]{1,64}'  # in a tag
IDENTIFIER = r"[a-zA-Z_][a-zA-Z0-9_]{0,63}"
STEPS_OF_BRANCH = 8  # each, and each of its values, becomes an element
MOST_OPTIONAL = 64  # keywords: the grammar of more has more than 64 KiB
OBJECT_KEYWORDS = {"type", "properties", "required", "additionalProperties", "$defs"}


def sequence(*elements: Element) -> Element:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def one_of(elements: Sequence[Element]) -> Element:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(element: Element) -> Element:
    return {"type": "optional", "content": element}


def text(value: str) -> Element:
    return {"type": "const_string", "value": value}


def json_of(schema: Any) -> Element:
    return {"type": "json_schema", "json_schema": schema}


def arguments_of(form: ToolForm, schema: Any, markers: Markers, work: Work) -> list[Element]:
    """Raises Unsupported for a schema that cannot be enforced in this form, or not within the request's work."""
    rewritten = rewrite(schema, work)
    if form.arguments == "json":
        return [json_of(schema)]
    if form.arguments == "python":
        return keywords(rewritten)
    return Parameters(form.parameter, markers, work).elements(rewritten)


def properties(schema: Any) -> list[tuple[str, Any, bool]] | None:
    """Name, schema and whether it is required, of each property of a rewritten schema; None for any object. Others than
    those named are not written."""
    if "anyOf" in schema or "$ref" in schema or "enum" in schema:
        raise Unsupported("", "a union or reference", "is not supported in this form of calls; name properties")
    for keyword in schema.keys() - OBJECT_KEYWORDS:
        raise Unsupported("", keyword, "is not supported in this form of calls; leave it out")
    own = schema.get("properties", {})
    required = schema.get("required", [])
    if required and not set(required) <= own.keys():
        raise Unsupported("", "required", "names a property that properties lacks; add it there")
    if not own:
        return [] if schema.get("additionalProperties") is False else None
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return [(name, {**one, **definitions}, name in required) for name, one in own.items()]


def branches(schema: dict[str, Any], definitions: dict[str, Any], work: Work, place: str) -> Iterator[dict[str, Any]]:
    """The alternatives of a rewritten schema, references at their tops resolved. What a reference offers counts once,
    since it adds nothing another time."""
    rest = [schema]
    names = set[str]()
    while rest:
        work.charge(place, STEPS_OF_BRANCH)
        schema = rest.pop()
        if "anyOf" in schema:
            rest += reversed(schema["anyOf"])
        elif "$ref" not in schema:
            yield schema
        elif (name := schema["$ref"].removeprefix("#/$defs/")) not in names:
            names.add(name)
            rest.append(definitions[name])


class Parameters:
    """Tags with one parameter each, in the order of the schema."""

    def __init__(self, form: str, markers: Markers, work: Work) -> None:
        begin, _, self._end = form.partition("$value")
        self._before_key, _, self._after_key = begin.partition("$key")
        self._is_typed = "$type" in form
        self._literal = markers.elements
        self._work = work

    def elements(self, schema: Any) -> list[Element]:
        found = properties(schema)
        if found is None:
            key = {"type": "regex", "pattern": KEY}
            return [{"type": "star", "content": self._tag([key], {}, "")}]
        elements = []
        for name, own, is_required in found:
            if re.fullmatch(KEY, name) is None:
                raise Unsupported(f"/properties/{name}", "the name", "cannot be written in a tag; choose another")
            tag = self._tag([text(name)], own, f"/properties/{name}")
            elements.append(tag if is_required else optional(tag))
        return elements

    def _tag(self, key: list[Element], schema: Any, place: str) -> Element:
        is_free = False
        texts = list[Element]()
        others = list[Element]()
        definitions = schema.get("$defs", {})
        shared = {"$defs": definitions} if definitions else {}
        top = {keyword: value for keyword, value in schema.items() if keyword != "$defs"}
        for branch in branches(top, definitions, self._work, place):
            if branch in ({}, {"type": "string"}):
                is_free = True
            elif branch.get("type") == "string":
                names = " and ".join(sorted(branch.keys() - {"type"}))
                raise Unsupported(place, names, "is not supported for texts in this form of calls; leave it out")
            elif "enum" in branch:
                self._work.charge(place, STEPS_OF_BRANCH * len(branch["enum"]))
                texts += [text(value) for value in branch["enum"] if isinstance(value, str)]
                others += [text(json.dumps(value)) for value in branch["enum"] if not isinstance(value, str)]
            else:
                others.append(json_of({**branch, **shared}))
        if not is_free and not texts and not others:
            raise Unsupported(place, "$ref", "refers to itself alone, which allows nothing; correct it")
        if is_free and not self._is_typed:
            return self._tag_of(key, "true", None)
        kinds: list[tuple[str, list[Element] | None]] = [("true", None if is_free else texts), ("false", others)]
        if not self._is_typed:
            kinds = [("true", texts + others)]
        return one_of([self._tag_of(key, kind, values) for kind, values in kinds if values is None or values])

    def _tag_of(self, key: list[Element], kind: str, values: list[Element] | None) -> Element:
        """With one of these values; None: with any text."""
        begin = [*self._literal(self._before_key), *key, *self._literal(self._after_key.replace("$type", kind))]
        end = self._literal(self._end)
        if values is not None:
            return sequence(*begin, one_of(values), *end)
        token = next((element["token"] for element in end if element["type"] == "token"), None)
        if token is not None:
            return sequence(*begin, {"type": "any_tokens", "exclude_tokens": [token]}, *end)
        tag = {"type": "tag", "begin": begin[-1]["value"], "content": ANY_TEXT, "end": self._end}
        return sequence(*begin[:-1], tag)


def keywords(schema: Any) -> list[Element]:
    """Python's, those that are required first. Values are JSON, whose names for true, false and null are read, too."""
    found = properties(schema)
    if found is None:
        pair = sequence({"type": "regex", "pattern": IDENTIFIER}, text("="), json_of({}))
        return [optional(sequence(pair, {"type": "star", "content": sequence(text(", "), pair)}))]
    for name, _, _ in found:
        if re.fullmatch(IDENTIFIER, name) is None:
            raise Unsupported(f"/properties/{name}", "the name", "cannot be written as a keyword; choose another")
    pairs = [(sequence(text(f"{name}="), json_of(own)), is_required) for name, own, is_required in found]
    required = [pair for pair, is_required in pairs if is_required]
    others = [pair for pair, is_required in pairs if not is_required]
    if not required and len(others) > MOST_OPTIONAL:
        fault = f"has more than {MOST_OPTIONAL} optional ones and none that is required; require one"
        raise Unsupported("", "properties", fault)

    def following(elements: Sequence[Element], wrap: Any = lambda element: element) -> list[Element]:
        return [wrap(sequence(text(", "), element)) for element in elements]

    if required:
        return [required[0], *following(required[1:]), *following(others, optional)]
    first = [sequence(one, *following(others[index + 1 :], optional)) for index, one in enumerate(others)]
    return [optional(one_of(first))] if first else []
