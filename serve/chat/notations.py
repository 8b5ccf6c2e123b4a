"""Grammars of a call's arguments from a tool's schema, in each notation, as elements of xgrammar's structural tags."""

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
MOST_NESTING = 8  # of values in "quoted" arguments, each a part of the grammar
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


def any_until(end: Element) -> Element:
    """Returns any text before the marker `end`."""
    if end["type"] == "token":
        return {"type": "any_tokens", "exclude_tokens": [end["token"]]}
    return {"type": "any_text", "excludes": [end["value"]]}


def json_of(schema: Any) -> Element:
    return {"type": "json_schema", "json_schema": schema}


def arguments_of(form: ToolForm, schema: Any, markers: Markers, work: Work) -> list[Element]:
    """Returns the elements of a call's arguments. Raises Unsupported for a schema that this form cannot enforce, or
    that exceeds the request's work."""
    rewritten = rewrite(schema, work)
    if form.arguments == "json":
        return [json_of(schema)]
    if form.arguments == "python":
        return keywords(rewritten)
    if form.arguments == "quoted":
        return QuotedMembers(form, markers, work).elements(rewritten)
    return Parameters(form.parameter, markers, work).elements(rewritten)


def properties(schema: Any) -> list[tuple[str, Any, bool]] | None:
    """Returns name, schema and whether it is required for each property of a rewritten schema; None for any object.
    Calls have no properties beyond these."""
    if "anyOf" in schema or "$ref" in schema or "enum" in schema:
        raise Unsupported("", "a union or reference", "is not supported in this form of calls; name properties")
    for keyword in schema.keys() - OBJECT_KEYWORDS:
        raise Unsupported("", keyword, "is not supported in this form of calls; leave it out")
    members = schema.get("properties", {})
    required = schema.get("required", [])
    if required and not set(required) <= members.keys():
        raise Unsupported("", "required", "names a property that properties lacks; add it there")
    if not members:
        return [] if schema.get("additionalProperties") is False else None
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return [(name, {**part, **definitions}, name in required) for name, part in members.items()]


def branches(schema: dict[str, Any], definitions: dict[str, Any], work: Work, place: str) -> Iterator[dict[str, Any]]:
    """Yields the alternatives of a rewritten schema with their top-level references resolved. Each reference is
    followed once, since a second time adds nothing. Raises Unsupported if there are none."""
    rest = [{keyword: value for keyword, value in schema.items() if keyword != "$defs"}]
    names = set[str]()
    is_empty = True
    while rest:
        work.charge(place, STEPS_OF_BRANCH)
        schema = rest.pop()
        if "anyOf" in schema:
            rest += reversed(schema["anyOf"])
        elif "$ref" not in schema:
            is_empty = False
            yield schema
        elif (name := schema["$ref"].removeprefix("#/$defs/")) not in names:
            names.add(name)
            rest.append(definitions[name])
    if is_empty:
        raise Unsupported(place, "$ref", "refers to itself alone, which allows nothing; correct it")


class Parameters:
    """Writes a tag for each parameter, in the order of the schema."""

    def __init__(self, form: str, markers: Markers, work: Work) -> None:
        begin, _, self._end = form.partition("$value")
        self._before_key, _, self._after_key = begin.partition("$key")
        self._is_typed = "$type" in form
        self._literal = markers.elements
        self._work = work

    def elements(self, schema: Any) -> list[Element]:
        members = properties(schema)
        if members is None:
            key = {"type": "regex", "pattern": KEY}
            return [{"type": "star", "content": self._tag([key], {}, "")}]
        elements = []
        for name, part, is_required in members:
            if re.fullmatch(KEY, name) is None:
                raise Unsupported(f"/properties/{name}", "the name", "cannot be written in a tag; choose another")
            tag = self._tag([text(name)], part, f"/properties/{name}")
            elements.append(tag if is_required else optional(tag))
        return elements

    def _tag(self, key: list[Element], schema: Any, place: str) -> Element:
        is_free = False
        texts = list[Element]()
        json_values = list[Element]()
        definitions = schema.get("$defs", {})
        shared = {"$defs": definitions} if definitions else {}
        for branch in branches(schema, definitions, self._work, place):
            if branch in ({}, {"type": "string"}):
                is_free = True
            elif branch.get("type") == "string":
                names = " and ".join(sorted(branch.keys() - {"type"}))
                raise Unsupported(place, names, "is not supported for texts in this form of calls; leave it out")
            elif "enum" in branch:
                self._work.charge(place, STEPS_OF_BRANCH * len(branch["enum"]))
                texts += [text(value) for value in branch["enum"] if isinstance(value, str)]
                json_values += [text(json.dumps(value)) for value in branch["enum"] if not isinstance(value, str)]
            else:
                json_values.append(json_of({**branch, **shared}))
        if is_free and not self._is_typed:
            return self._tag_of(key, "true", None)
        kinds: list[tuple[str, list[Element] | None]] = [("true", None if is_free else texts), ("false", json_values)]
        if not self._is_typed:
            kinds = [("true", texts + json_values)]
        return one_of([self._tag_of(key, kind, values) for kind, values in kinds if values is None or values])

    def _tag_of(self, key: list[Element], kind: str, values: list[Element] | None) -> Element:
        """Returns a tag that holds one of these values; None: any text."""
        begin = [*self._literal(self._before_key), *key, *self._literal(self._after_key.replace("$type", kind))]
        end = self._literal(self._end)
        if values is not None:
            return sequence(*begin, one_of(values), *end)
        token = next((element for element in end if element["type"] == "token"), None)
        if token is not None:
            return sequence(*begin, any_until(token), *end)
        tag = {"type": "tag", "begin": begin[-1]["value"], "content": ANY_TEXT, "end": self._end}
        return sequence(*begin[:-1], tag)


class QuotedMembers:
    """Writes members with bare keys, whose texts stand between quotes, in the order of the schema."""

    def __init__(self, form: ToolForm, markers: Markers, work: Work) -> None:
        self._quote = markers.elements(form.quote)
        self._call_end = markers.elements(form.call[0].partition("$arguments")[2])
        self._work = work

    def elements(self, schema: Any) -> list[Element]:
        if properties(schema) is None:
            return [any_until(self._call_end[-1])]
        return self._members(schema, schema.get("$defs", {}), "", 0)

    def _members(self, schema: Any, definitions: dict[str, Any], place: str, depth: int) -> list[Element]:
        members = properties(schema)
        if members is None:
            raise Unsupported(place, "an object", "has no properties, which this form of calls needs; name them")
        pairs = list[tuple[Element, bool]]()
        for name, part, is_required in members:
            path = f"{place}/properties/{name}"
            if re.fullmatch(IDENTIFIER, name) is None:
                raise Unsupported(path, "the name", "cannot be written without quotes; choose another")
            pairs.append((sequence(text(f"{name}:"), self._value(part, definitions, path, depth + 1)), is_required))
        return joined_pairs(pairs, ",")

    def _value(self, schema: Any, definitions: dict[str, Any], place: str, depth: int) -> Element:
        if depth > MOST_NESTING:
            raise Unsupported(place, "the schema", f"nests more than {MOST_NESTING} deep in this form; make it flatter")
        alternatives = branches(schema, definitions, self._work, place)
        return one_of(
            [value for branch in alternatives for value in self._values_of(branch, definitions, place, depth)]
        )

    def _values_of(self, branch: dict[str, Any], definitions: dict[str, Any], place: str, depth: int) -> list[Element]:
        any_string = sequence(*self._quote, any_until(self._quote[0]), *self._quote)
        kind = branch.get("type")
        if not branch:
            return [any_string, *(json_of({"type": name}) for name in ("number", "boolean", "null"))]
        if "enum" in branch:
            self._work.charge(place, STEPS_OF_BRANCH * len(branch["enum"]))
            return [self._constant(value, place) for value in branch["enum"]]
        if kind not in ("string", "array", "object"):
            return [json_of(branch)]
        keywords_of = {"string": set[str](), "array": {"items"}, "object": OBJECT_KEYWORDS}
        for keyword in sorted(branch.keys() - keywords_of[kind] - {"type"}):
            raise Unsupported(place, keyword, "is not supported in this form of calls; leave it out")
        if kind == "string":
            return [any_string]
        if kind == "object":
            return [sequence(text("{"), *self._members(branch, definitions, place, depth), text("}"))]
        item = self._value(branch.get("items", {}), definitions, f"{place}/items", depth + 1)
        more = {"type": "star", "content": sequence(text(","), item)}
        return [sequence(text("["), optional(sequence(item, more)), text("]"))]

    def _constant(self, value: Any, place: str) -> Element:
        if isinstance(value, str):
            return sequence(*self._quote, text(value), *self._quote)
        if isinstance(value, list | dict):
            raise Unsupported(place, "enum", "has an array or object, which this form of calls lacks; leave it out")
        return text(json.dumps(value))


def keywords(schema: Any) -> list[Element]:
    """Returns Python's keyword arguments, required ones first. Values are JSON; the parser reads its constants, too."""
    members = properties(schema)
    if members is None:
        pair = sequence({"type": "regex", "pattern": IDENTIFIER}, text("="), json_of({}))
        return [optional(sequence(pair, {"type": "star", "content": sequence(text(", "), pair)}))]
    for name, _, _ in members:
        if re.fullmatch(IDENTIFIER, name) is None:
            raise Unsupported(f"/properties/{name}", "the name", "cannot be written as a keyword; choose another")
    pairs = [(sequence(text(f"{name}="), json_of(part)), is_required) for name, part, is_required in members]
    return joined_pairs(pairs, ", ")


def joined_pairs(pairs: Sequence[tuple[Element, bool]], comma: str) -> list[Element]:
    """Returns pairs, each with whether it is required, with commas between them: required ones first."""
    required = [pair for pair, is_required in pairs if is_required]
    optional_pairs = [pair for pair, is_required in pairs if not is_required]
    if not required and len(optional_pairs) > MOST_OPTIONAL:
        fault = f"has more than {MOST_OPTIONAL} optional ones and none that is required; require one"
        raise Unsupported("", "properties", fault)

    def following(elements: Sequence[Element], wrap: Any = lambda element: element) -> list[Element]:
        return [wrap(sequence(text(comma), element)) for element in elements]

    if required:
        return [required[0], *following(required[1:]), *following(optional_pairs, optional)]
    first = [
        sequence(pair, *following(optional_pairs[index + 1 :], optional)) for index, pair in enumerate(optional_pairs)
    ]
    return [optional(one_of(first))] if first else []
