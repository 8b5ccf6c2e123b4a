"""Schemas, tools and patterns of up to 64 KiB that aim at quadratic and exponential work: all are read, or refused,
within the steps that are counted, and what is served means what jsonschema says.

Lines of code that run are the measure, since they do not depend on how busy the machine is.
"""

import functools
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from referencing.exceptions import Unresolvable

from slipstream.serve.chat.answers import texts_of
from slipstream.serve.chat.arguments import parameter_types
from slipstream.serve.chat.forms import TOOL_FORMS
from slipstream.serve.chat.markers import Markers
from slipstream.serve.chat.tags import AnswerGrammar
from slipstream.serve.chat.tools import ToolError, read_choice
from slipstream.serve.grammar.grammars import MOST_CHARS
from slipstream.serve.grammar.json_schema import _Rewriter, rewrite, whole
from slipstream.serve.grammar.work import MOST_STEPS, Unsupported, Work
from slipstream.tests.sources import ROOT
from slipstream.tests.tables import table_of

SERVE = str(ROOT / "serve")
LINES_OF_STEP = 12
Schema = Any


def lines_of(work: Callable[[], object]) -> int:
    """Lines of serve/ that `work` runs. What it refuses is refused."""
    count = 0

    def trace_line(_frame, event, _):
        nonlocal count
        count += event == "line"
        return trace_line

    def trace_call(frame, _event, _):
        return trace_line if frame.f_code.co_filename.startswith(SERVE) else None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        work()
    except (Unsupported, ToolError):
        pass
    finally:
        sys.settrace(before)
    return count


def objects(size: int, **fields: Any) -> list[Schema]:
    """Told apart by a property."""
    return [
        {"type": "object", "properties": {"k": {"const": f"{i}"}}, "required": ["k"], **fields} for i in range(size)
    ]


def shared(size: int) -> Schema:
    """Each level is in 64 alternatives of the next."""
    schema = {"type": "string"}
    for level in range(size):
        alternatives = [{"type": "object", "required": [f"r{level}{index}"]} for index in range(8)]
        inner = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        schema = {"allOf": [{"anyOf": alternatives}, {"anyOf": alternatives[::-1]}, inner]}
    return schema


def chain(size: int, width: int) -> Schema:
    """Alternatives by references."""
    definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * width} for i in range(size)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{size}": {"type": "integer"}}}


def alternating(size: int) -> Schema:
    enums = {"a": {"enum": list(range(500))}, "b": {"enum": list(range(500))[::-1]}}
    return {"$defs": enums, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * size}


def loops(size: int) -> Schema:
    """Definitions that refer to all of them."""
    everything = [{"$ref": f"#/$defs/d{i}"} for i in range(size)]
    return {"$defs": {f"d{i}": {"anyOf": everything} for i in range(size)}, "enum": [1], "$ref": "#/$defs/d0"}


# By name: a schema for a size, and the size at which it has some 64 KiB, or all that it needs.
FAMILIES: dict[str, tuple[Callable[[int], Schema], int]] = {
    "constants": (lambda n: {"oneOf": [{"const": index} for index in range(n)]}, 4000),
    "enums": (lambda n: {"allOf": [{"enum": list(range(n))}, {"enum": list(range(n))[::-1]}]}, 5000),
    "values": (lambda n: {"enum": [[{"a": index}, 1.0, True] for index in range(n)]}, 2000),
    "enums by reference": (alternating, 1000),
    "discriminated": (lambda n: {"oneOf": objects(n)}, 900),
    "without a discriminator": (lambda n: {"oneOf": [{"type": "array", "minItems": i} for i in range(n)]}, 1500),
    "values and objects": (lambda n: {"oneOf": [{"enum": list(range(n))}, *objects(n // 2)]}, 1200),
    "alternatives by reference": (lambda n: chain(6, n), 300),
    "itself": (lambda n: {"anyOf": [{"$ref": "#"}] * n}, 4000),
    "loops": (loops, 50),
    "sharing": (shared, 20),
    "properties": (lambda n: {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}}, 2500),
    "joined properties": (
        lambda n: {"allOf": [{"properties": {f"p{i}": {"minimum": side} for i in range(n)}} for side in (1, 2)]},
        1000,
    ),
    "required": (lambda n: {"allOf": [{"required": [f"p{i}" for i in range(n)]}] * 2}, 3000),
    "long names": (lambda n: {"properties": {"n" * 20_000: {"properties": {f"p{i}": {} for i in range(n)}}}}, 3000),
    "types": (lambda n: {"type": ["string", "null"] * n}, 3000),
    "nested": (lambda n: functools.reduce(lambda inner, _: {"items": inner}, range(n), {"type": "null"}), 60),
    "items": (lambda n: {"allOf": [{"prefixItems": [{"minimum": 1}] * n}, {"items": {"maximum": 3}}]}, 1500),
    "references": (lambda n: {"properties": {f"p{i}": {"$ref": f"#/properties/p{i + 1}"} for i in range(n)}}, 1500),
    "long references": (lambda n: {"$ref": "#" + "/properties/p" * n, "properties": {"p": {"$ref": "#"}}}, 4000),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hostile_schemas_are_read_in_linear_time_or_refused(family):
    make, size = FAMILIES[family]
    counts = []
    for number in (max(size // 16, 1), max(size // 8, 2), size):
        schema = make(number)
        work = Work()
        assert len(json.dumps(schema)) < 2 * MOST_CHARS
        counts.append(lines_of(lambda schema=schema, work=work: rewrite(schema, work)))
        assert counts[-1] <= LINES_OF_STEP * min(work.num_steps, MOST_STEPS) + 200
    if family not in ("without a discriminator", "values and objects", "sharing", "loops"):
        assert counts[1] < 2.3 * counts[0] + 200


def test_what_people_send_is_far_from_the_limit():
    parts = [{"type": "string", "description": "a text " * 5}, {"type": ["integer", "null"], "minimum": 0}]
    fields = {f"field_{index}": parts[index % 2] for index in range(12)}
    definitions = {f"D{i}": {"type": "object", "properties": fields, "required": [*fields]} for i in range(40)}
    tables = {f"t{i}": {"type": "array", "items": {"$ref": f"#/$defs/D{i}"}} for i in range(40)}
    schema = {"type": "object", "properties": tables, "$defs": definitions}
    work = Work()
    assert len(json.dumps(schema)) > MOST_CHARS / 2
    rewrite(schema, work)
    assert work.num_steps < MOST_STEPS / 4
    for values in ({"enum": [f"value {index}" for index in range(4000)]}, {"oneOf": objects(200)}):
        rewrite(values)


PATTERNS: dict[str, Callable[[int], str]] = {
    "brackets": lambda n: "^" + "(" * n,
    "classes": lambda n: "[" * n,
    "open classes": lambda n: "^" + "[a" * n + "$",
    "escapes": lambda n: "^" + "\\(" * n,
    "alternatives": lambda n: "^(" + "a|" * n + "b)$",
    "repetitions": lambda n: "(a{1000}){1000}" * (n // 16 + 1),
    "anchors": lambda n: "$^" * n,
}


@pytest.mark.parametrize("family", PATTERNS)
def test_hostile_patterns_are_read_once(family):
    for number in (1000, 30_000):
        pattern = PATTERNS[family](number)
        assert lines_of(functools.partial(whole, pattern)) < 20 * len(pattern) + 200


SLOW_FORMS = [pytest.param(form, marks=pytest.mark.slow) for form in ("hermes", "deepseek_v3_2", "qwen3_coder")]


@pytest.mark.parametrize("form", ["llama_pythonic", *SLOW_FORMS])
def test_hostile_tools_are_read_in_counted_work(form):
    schemas = [make(max(size // 3, 1)) for make, size in FAMILIES.values()]
    tools = []
    for index, schema in enumerate(schemas):
        definitions = schema.pop("$defs", {}) if isinstance(schema, dict) else {}
        properties = {"x": schema, **{f"y{number}": {"$ref": "#/properties/x"} for number in range(50)}}
        tools.append((f"t{index}", {"type": "object", "properties": properties, "$defs": definitions}))
    for group in ([tool] for tool in tools):
        count_tools(form, group)
    count_tools(form, tools)


@pytest.mark.parametrize("family", FAMILIES)
def test_types_of_hostile_parameters_are_read_in_counted_work(family):
    make, size = FAMILIES[family]
    schema = make(size)
    definitions = schema.pop("$defs", {})
    properties = {"x": schema, **{f"y{number}": {"$ref": "#/properties/x"} for number in range(200)}}
    work = Work()
    count = lines_of(functools.partial(parameter_types, {"properties": properties, "$defs": definitions}, work))
    assert count <= 2 * LINES_OF_STEP * min(work.num_steps, MOST_STEPS) + 200


def count_tools(form: str, tools: list[tuple[str, Schema]]):
    functions = [{"name": name, "strict": True, "parameters": schema} for name, schema in tools]
    choice = read_choice([{"type": "function", "function": function} for function in functions], "required", True)
    tool_format = TOOL_FORMS[form]
    grammars = AnswerGrammar(tool_format, None, Markers(NoTokens, texts_of(tool_format)))
    work = Work()
    texts = []

    def build():
        texts.append(grammars.build(choice, None, work, is_open=False, is_closed=False).text)

    assert lines_of(build) <= LINES_OF_STEP * min(work.num_steps, MOST_STEPS) + 40 * MOST_CHARS
    assert all(len(text) <= MOST_CHARS for text in texts)


class NoTokens:
    added_tokens_decoder: dict[int, str] = {}


class Grower:
    """Grows small schemas of hostile kinds, whose meaning jsonschema can tell."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.definitions = {}

    def grow(self) -> Schema:
        for index in range(self.rng.randrange(3)):
            self.definitions[f"d{index}"] = self.schema(2)
        schema = self.schema(3)
        return {**schema, "$defs": self.definitions} if isinstance(schema, dict) else schema

    def value(self, depth: int = 2) -> Any:
        scalars = [0, 1, 1.0, -1, 2, 2.5, True, False, None, "", "a", "b", "1", 2**53, -(2**63), 1e300]
        if depth == 0 or self.rng.random() < 0.6:
            return self.rng.choice(scalars)
        if self.rng.random() < 0.5:
            return [self.value(depth - 1) for _ in range(self.rng.randrange(3))]
        return {name: self.value(depth - 1) for name in self.rng.sample("abc", self.rng.randrange(3))}

    def schema(self, depth: int) -> Schema:
        inner = functools.partial(self.schema, depth - 1)
        some = range(self.rng.randrange(1, 4))
        kinds = [
            lambda: {"enum": [self.value() for _ in some]},
            lambda: {"const": self.value()},
            lambda: {"type": self.rng.choice(["object", "array", "string", "integer", "number", "boolean", "null"])},
            lambda: {"$ref": f"#/$defs/d{self.rng.randrange(2)}"},
            lambda: self.rng.choice([{"minimum": 1}, {"maxItems": 1}, {"minLength": 1}, {"required": ["a"]}, {}, True]),
        ]
        if depth:
            kinds += [
                lambda: {"anyOf": [inner() for _ in some]},
                lambda: {"allOf": [inner() for _ in some]},
                lambda: {"oneOf": [{"const": self.value()} for _ in some]},
                lambda: {"oneOf": objects(len(some), additionalProperties=inner())},
                lambda: {"oneOf": [inner() for _ in some]},
                lambda: {"properties": {name: inner() for name in "ab"[: len(some)]}, "additionalProperties": inner()},
                lambda: {"prefixItems": [inner() for _ in some], "items": inner()},
                lambda: {"allOf": [inner()], "anyOf": [inner(), inner()], "type": ["object", "array", "number"]},
                lambda: {"$ref": "#/$defs/d0", "allOf": [inner(), {"enum": [self.value() for _ in some]}]},
            ]
        return self.rng.choice(kinds)()


def compare(cases: Iterable[tuple[Schema, list[Any]]]) -> int:
    """Compares whether schemas hold values, and returns the number of schemas."""
    compared = 0
    for schema, values in cases:
        rewriter = _Rewriter(schema, Work())
        validator = jsonschema.Draft202012Validator(schema)
        try:
            rewritten = {name: part for name, part in rewriter.run().items() if name != "$defs"}
        except Unsupported as error:
            if "allow nothing together" in str(error) and error.place == "":
                with suppress(RecursionError, Unresolvable):
                    assert not any(map(validator.is_valid, values)), schema
            continue
        for value in values:
            try:
                expected = validator.is_valid(value)
                rewriter.work = Work()
                holds = rewriter.holds(value, rewritten, "", "")
            except (RecursionError, Unsupported):  # a schema that refers to itself alone
                continue
            assert holds == expected, (schema, value, rewritten)
        compared += 1
    return compared


def grown(seeds: range) -> Iterator[tuple[Schema, list[Any]]]:
    for seed in seeds:
        grower = Grower(random.Random(seed))
        yield grower.grow(), [grower.value() for _ in range(25)]


@pytest.mark.parametrize("seeds", [range(500), pytest.param(range(500, 60_000), marks=pytest.mark.slow)])
def test_small_schemas_of_hostile_kinds_mean_what_jsonschema_says(seeds):
    assert compare(grown(seeds)) > 0.34 * len(seeds)


def test_what_is_beside_one_another_holds_together():
    """allOf, $ref and keywords beside them."""
    rng = random.Random(0)
    parts = table_of(__file__, "parts")
    values = table_of(__file__, "values")

    def joined():
        first, second, third = rng.choices(parts, k=3)
        return rng.choice(parts[:-1]) | {"allOf": [first, second], "$ref": "#/$defs/d", "$defs": {"d": third}}

    assert compare((joined(), values) for _ in range(300)) > 100


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 3000), marks=pytest.mark.slow)])
def test_mixed_hostile_schemas_are_read_or_refused_within_the_steps(seeds):
    """Two kinds at a time, one within the other where a place is left."""
    for seed in seeds:
        rng = random.Random(seed)
        (outer, outer_size), (inner, inner_size) = rng.choices([*FAMILIES.values()], k=2)
        schema = outer(rng.randrange(1, outer_size // 2 + 2))
        places = rng.sample(["x", "y", "z"], 2)
        part = inner(rng.randrange(1, inner_size // 2 + 2))
        definitions = {**schema.pop("$defs", {}), **part.pop("$defs", {}), "whole": schema, "part": part}
        properties = {name: {"$ref": f"#/$defs/{rng.choice(['whole', 'part'])}"} for name in places}
        mixed = rng.choice(
            [
                {"properties": properties, "required": places},
                {"allOf": [*properties.values()]},
                {"oneOf": [*properties.values(), {"const": "x"}]},
                {"anyOf": [{"properties": properties}, {"$ref": "#"}], **rng.choice([{}, {"enum": [1, {"x": 2}]}])},
            ]
        )
        work = Work()
        lines = lines_of(functools.partial(rewrite, {**mixed, "$defs": definitions}, work))
        assert lines <= LINES_OF_STEP * min(work.num_steps, MOST_STEPS) + 200, seed
