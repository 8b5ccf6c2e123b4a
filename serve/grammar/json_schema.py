"""Which JSON Schemas (draft 2020-12) can be served, rewritten so that the grammar library takes them at their word.

The library ignores some keywords, and reads others only beside a `type`. So a schema is rewritten into one that names
the type of everything and has no keyword beside a union, and whatever would not be honoured is refused by its name.
Each step is charged to the request's Work. Imports no library.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.models.chat.quotes import quote
from slipstream.serve.grammar.strings import FORMATS
from slipstream.serve.grammar.work import Unsupported, Work

TYPES = ("object", "array", "string", "number", "boolean", "null")
ANNOTATIONS = {
    *("$schema", "$comment", "$vocabulary", "$defs", "definitions", "title", "description", "default", "examples"),
    *("discriminator", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"),
}
KEYWORDS = {  # by type: those that the library honours
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties", "propertyNames"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "boolean": (),
    "null": (),
}
UNIONS = ("anyOf", "oneOf", "allOf", "enum", "const", "$ref")
HONOURED = frozenset(keyword for own in KEYWORDS.values() for keyword in own)
ANYTHING = r"(.|\n)*"  # as a pattern
MOST_DEPTH = 64
MOST_VARIANTS = 64  # that two schemas make together
MOST_FACTOR = 1_000
MOST_COUNT = 10_000  # of items or characters that a bound may name
# the library would round others
LEAST_INTEGER = -(2**63)
MOST_INTEGER = 2**63 - 1
MOST_DOUBLE = 2**63 - 2**10  # of these
STEPS_OF_SCHEMA = 8  # reading a schema takes as long as comparing some values
CHARS_OF_STEP = 32


def rewrite(schema: Any, work: Work | None = None) -> Any:
    """A schema that means the same, made of {}, {"type", its keywords}, {"enum"}, {"anyOf"} and {"$ref"}. Raises
    Unsupported naming a keyword that would not be honoured, or where the schema needs more than is left of `work`."""
    if not isinstance(schema, Mapping | bool):
        raise Unsupported("", "the schema", "must be an object, true or false")
    try:
        return _Rewriter(schema, work or Work()).run()
    except RecursionError as error:
        raise Unsupported("", "the schema", "nests too deeply; make it flatter") from error


class _Rewriter:
    def __init__(self, root: Any, work: Work) -> None:
        self.root = root
        self.work = work
        self.names: dict[str, str] = {}  # by pointer: names of definitions in the result
        self.definitions: dict[str, Any] = {}
        self.num_joining = 0  # schemas that are intersected just now, one within another
        self.values: dict[int, tuple[list[Any], dict[str, Any]]] = {}  # by id: an enum's list, and it by canonical text

    def run(self) -> Any:
        result = self.visit(self.root, "", 0)
        result = {**result, "$defs": self.definitions} if self.definitions else result
        self.measure(result)
        return result

    def measure(self, result: Any) -> None:
        """Charges the size of a result: what is shared in it is written many times."""
        rest = [result]
        while rest:
            part = rest.pop()
            self.work.charge("", 1 + (len(part) // CHARS_OF_STEP if isinstance(part, str) else 0))
            if isinstance(part, dict):
                rest += part
                rest += part.values()
            elif isinstance(part, list):
                rest += part

    def visit(self, schema: Any, place: str, depth: int) -> dict[str, Any]:
        self.work.charge(place, STEPS_OF_SCHEMA + len(place) // 1024)
        if depth > MOST_DEPTH:
            raise Unsupported(place, "the schema", f"nests deeper than {MOST_DEPTH} levels")
        if schema is True or schema == {}:
            return {}
        if schema is False:
            raise Unsupported(place, "false", "allows nothing")
        if not isinstance(schema, Mapping):
            raise Unsupported(place, "the schema", "must be an object, true or false")
        self.work.charge(place, len(schema))
        own = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
        own = _without_effect(_with_evaluated(own), place)
        for name in own:
            if name not in HONOURED and name not in UNIONS and name != "type":
                raise Unsupported(place, name)
        unions = [name for name in UNIONS if name in own]
        if unions:
            return self.union(own, unions, place, depth)
        return self.typed(own, place, depth)

    def union(self, own: Mapping[str, Any], unions: list[str], place: str, depth: int) -> dict[str, Any]:
        """What holds for the schema's own keywords and for each of its unions."""
        base = {name: value for name, value in own.items() if name not in unions}
        if unions == ["$ref"] and not base:
            return {"$ref": f"#/$defs/{self.definition(own['$ref'], place, depth)}"}
        found = self.typed(base, place, depth)
        for name in unions:
            found = self.both(found, self.branch(name, own[name], place, depth), place, name)
        return found

    def branch(self, name: str, value: Any, place: str, depth: int) -> dict[str, Any]:
        if name == "$ref":
            return self.resolved({"$ref": f"#/$defs/{self.definition(value, place, depth)}"}, place, name)
        if name in ("const", "enum"):
            values = [value] if name == "const" else value
            if not isinstance(values, list) or not values:
                raise Unsupported(place, name, "must be a list of values, and not empty")
            return self.enum({canonical(value, place, name, self.work): value for value in values})
        if not isinstance(value, list) or not value:
            raise Unsupported(place, name, "must be a list of schemas, and not empty")
        if name != "allOf" and any(one is not False for one in value):
            value = [one for one in value if one is not False]
        visited = [self.visit(one, f"{place}/{name}/{index}", depth + 1) for index, one in enumerate(value)]
        if name == "allOf":
            found: dict[str, Any] = {}
            for one in visited:
                found = self.both(found, one, place, name)
            return found
        if name == "oneOf" and len(visited) > 1 and not self.are_disjoint(visited, place):
            raise Unsupported(place, "oneOf", "of schemas that may overlap is not supported; use anyOf")
        return self.any_of(visited, place)

    def any_of(self, schemas: list[dict[str, Any]], place: str) -> dict[str, Any]:
        """What holds for one of some rewritten schemas."""
        self.work.charge(place, len(schemas))
        if {} in schemas:
            return {}
        flat = [one for schema in schemas for one in schema.get("anyOf", [schema])]
        self.work.charge(place, len(flat))
        return flat[0] if len(flat) == 1 else {"anyOf": flat}

    def enum(self, values: dict[str, Any]) -> dict[str, Any]:
        """A schema of values, which stand by their canonical texts."""
        listed = list(values.values())
        self.values[id(listed)] = (listed, values)
        return {"enum": listed}

    def values_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Values of what `enum` made, by their canonical texts."""
        return self.values[id(schema["enum"])][1]

    def are_disjoint(self, branches: list[dict[str, Any]], place: str) -> bool:
        """Whether it is clear that no value holds for two rewritten schemas: by types, values, or the values of a
        property that both require."""
        listed = dict[str, tuple[int, Any]]()  # by canonical text: a branch and its value
        # the others
        objects = list[tuple[int, dict[str, Any]]]()
        kinds = list[tuple[int, dict[str, Any]]]()
        for index, branch in enumerate(branches):
            for variant in self.variants_of(branch, place):
                if not variant or "anyOf" in variant:
                    return False
                if "enum" not in variant:
                    (objects if variant["type"] == "object" else kinds).append((index, variant))
                    continue
                for text, value in self.values_of(variant).items():
                    self.work.charge(place)
                    if listed.setdefault(text, (index, value))[0] != index:
                        return False
        for index, variant in (*objects, *kinds):
            for other, value in listed.values():
                if index != other and self.holds(value, variant, place, "oneOf"):
                    return False
        have_names = self.have_a_discriminator(objects, place) or self.are_apart_in_pairs(objects, place)
        return have_names and self.are_apart_in_pairs(kinds, place)

    def variants_of(self, branch: dict[str, Any], place: str) -> Iterator[dict[str, Any]]:
        for one in self.resolved(branch, place, "oneOf").get("anyOf", [branch]):
            yield self.resolved(one, place, "oneOf")

    def have_a_discriminator(self, objects: list[tuple[int, dict[str, Any]]], place: str) -> bool:
        """Whether a property's values tell the branches of these objects apart."""
        names = objects[0][1].get("required", []) if objects else []
        return any(self.is_discriminator(name, objects, place) for name in names)

    def is_discriminator(self, name: str, objects: list[tuple[int, dict[str, Any]]], place: str) -> bool:
        branches = dict[str, int]()  # by canonical text of the property's values
        for index, variant in objects:
            required = variant.get("required", [])
            schema = variant.get("properties", {}).get(name, {})
            self.work.charge(place, 1 + len(required) + len(schema.get("enum", [])))
            if name not in required or "enum" not in schema:
                return False
            if any(branches.setdefault(text, index) != index for text in self.values_of(schema)):
                return False
        return True

    def are_apart_in_pairs(self, kinds: list[tuple[int, dict[str, Any]]], place: str) -> bool:
        return all(
            self.are_apart(left, right, place)
            for number, (index, left) in enumerate(kinds)
            for other, right in kinds[number + 1 :]
            if index != other
        )

    def are_apart(self, left: dict[str, Any], right: dict[str, Any], place: str) -> bool:
        """Whether no value holds for two schemas without unions and values."""
        self.work.charge(place, 1 + len(left.get("required", [])) + len(right.get("required", [])))
        if left["type"] != right["type"]:
            return {left["type"], right["type"]} != {"number", "integer"}
        both = set(left.get("required", [])) & set(right.get("required", []))
        pairs = [[side.get("properties", {}).get(key, {}) for side in (left, right)] for key in both]
        return any(
            "enum" in one and "enum" in other and self.pair(one, other, place, "oneOf") is None for one, other in pairs
        )

    def resolved(self, schema: dict[str, Any], place: str, name: str) -> dict[str, Any]:
        """A rewritten schema that does not begin with a reference."""
        seen = 0
        while "$ref" in schema:
            self.work.charge(place)
            target = self.definitions[schema["$ref"].rpartition("/")[2]]
            seen += 1
            if target is None or seen > MOST_DEPTH:
                raise Unsupported(place, name, "of a schema that contains itself, beside others, is not supported")
            schema = target
        return schema

    def both(self, one: dict[str, Any], other: dict[str, Any], place: str, name: str) -> dict[str, Any]:
        """What holds for two rewritten schemas. `name`: the keyword that asks for it."""
        self.work.charge(place, STEPS_OF_SCHEMA)
        if not one or not other or self.are_equal(one, other, place):
            return one or other
        if self.num_joining >= MOST_DEPTH:
            raise Unsupported(place, name, "of schemas so deep, or of two that contain themselves, is not supported")
        self.num_joining += 1
        try:
            return self.join(one, other, place, name)
        finally:
            self.num_joining -= 1

    def are_equal(self, one: Any, other: Any, place: str) -> bool:
        """Whether two parts of rewritten schemas are the same JSON, in the order of their lists."""
        self.work.charge(place)
        if one is other:
            return True
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() == other.keys() and all(self.are_equal(one[key], other[key], place) for key in one)
        if isinstance(one, list) and isinstance(other, list):
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) and all(self.are_equal(*pair, place) for pair in pairs)
        return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)

    def join(self, one: dict[str, Any], other: dict[str, Any], place: str, name: str) -> dict[str, Any]:
        variants = [
            [self.resolved(each, place, name) for each in side.get("anyOf", [side])]
            for side in (self.resolved(one, place, name), self.resolved(other, place, name))
        ]
        if len(variants[0]) * len(variants[1]) > MOST_VARIANTS:
            raise Unsupported(place, name, f"makes more than {MOST_VARIANTS} combinations")
        found = []
        for left in variants[0]:
            for right in variants[1]:
                if "anyOf" in left or "anyOf" in right:
                    joined = self.both(left, right, place, name)
                    found += joined.get("anyOf", [joined])
                elif not left or not right:
                    found.append(left or right)
                else:
                    pair = self.pair(left, right, place, name)
                    found += [] if pair is None else [pair]
        if not found:
            raise Unsupported(place, name, "and what is beside it allow nothing together")
        return self.any_of(found, place)

    def pair(self, left: dict[str, Any], right: dict[str, Any], place: str, name: str) -> dict[str, Any] | None:
        """What holds for two schemas without unions; None: nothing."""
        self.work.charge(place)
        if "enum" in right:
            left, right = right, left
        if "enum" in left and "enum" in right:
            return self.pair_values(left, right, place)
        if "enum" in left:
            values = self.values_of(left).items()
            kept = {text: value for text, value in values if self.holds(value, right, place, name)}
            return self.enum(kept) if kept else None
        kinds = {left["type"], right["type"]}
        if kinds == {"number", "integer"}:
            left = {**left, "type": "integer"}
            right = {**right, "type": "integer"}
        elif len(kinds) > 1:
            return None
        if left["type"] == "object":
            return self.pair_objects(left, right, place, name)
        if left["type"] == "array":
            return self.pair_arrays(left, right, place, name)
        return _pair_bounds(left, right, place, name)

    def pair_values(self, left: dict[str, Any], right: dict[str, Any], place: str) -> dict[str, Any] | None:
        texts = self.values_of(left)
        others = self.values_of(right)
        self.work.charge(place, len(texts))
        kept = {text: value for text, value in texts.items() if text in others}
        return self.enum(kept) if kept else None

    def pair_objects(self, left: dict[str, Any], right: dict[str, Any], place: str, name: str) -> dict[str, Any] | None:
        if "propertyNames" in left or "propertyNames" in right:
            raise Unsupported(place, name, "beside propertyNames is not supported")
        required = dict.fromkeys([*left.get("required", []), *right.get("required", [])])
        for side in (left, right):
            self.work.charge(place, len(side.get("properties", {})) + len(side.get("required", [])))
        properties: dict[str, Any] = {}
        for key in dict.fromkeys([*left.get("properties", {}), *right.get("properties", {})]):
            sides = [side.get("properties", {}).get(key, side["additionalProperties"]) for side in (left, right)]
            if False in [side for side in sides if isinstance(side, bool)]:
                if key in required:
                    return None
                continue
            schemas = [{} if side is True else side for side in sides]
            try:
                properties[key] = self.both(schemas[0], schemas[1], f"{place}/properties/{key}", name)
            except Unsupported as error:
                if key in required or "allow nothing" not in str(error):
                    raise
                raise Unsupported(place, name, f"forbids the property {quote(key)}, which is not supported") from error
        more = [side["additionalProperties"] for side in (left, right)]
        found = _pair_bounds(
            {key: value for key, value in left.items() if key.endswith("Properties") and key[:3] in ("min", "max")},
            {key: value for key, value in right.items() if key.endswith("Properties") and key[:3] in ("min", "max")},
            place,
            name,
        )
        if found is None:
            return None
        forbidden = set(left.get("properties", {})) | set(right.get("properties", {}))
        if False in [one for one in more if isinstance(one, bool)]:
            rest: Any = False
        elif forbidden - set(properties):
            raise Unsupported(place, name, "forbids a property beside others that are free, which is not supported")
        else:
            schemas = [{} if one is True else one for one in more]
            rest = self.both(schemas[0], schemas[1], f"{place}/additionalProperties", name) or True
        return {
            "type": "object",
            **found,
            **({"properties": properties} if properties else {}),
            **({"required": list(required)} if required else {}),
            "additionalProperties": rest,
        }

    def pair_arrays(self, left: dict[str, Any], right: dict[str, Any], place: str, name: str) -> dict[str, Any] | None:
        length = max(len(side.get("prefixItems", [])) for side in (left, right))

        def item(side: dict[str, Any], index: int) -> Any:
            prefix = side.get("prefixItems", [])
            return prefix[index] if index < len(prefix) else side.get("items", {})

        names: tuple[str, ...] = ("minItems", "maxItems")
        ends = [{key: side[key] for key in names if key in side} for side in (left, right)]
        bounds = _pair_bounds(ends[0], ends[1], place, name)
        if bounds is None:
            return None
        prefix: list[Any] = []
        for index in range(length):
            sides = [item(side, index) for side in (left, right)]
            if any(side is False for side in sides):
                bounds["maxItems"] = min(bounds.get("maxItems", index), index)
                if bounds.get("minItems", 0) > index:
                    return None
                return {"type": "array", **bounds, **({"prefixItems": prefix} if prefix else {}), "items": False}
            prefix.append(self.both(sides[0], sides[1], f"{place}/prefixItems/{index}", name))
        rest = [side.get("items", {}) for side in (left, right)]
        items = False if any(one is False for one in rest) else self.both(rest[0], rest[1], f"{place}/items", name)
        found = {"type": "array", **bounds, **({"prefixItems": prefix} if prefix else {})}
        return found if items == {} else {**found, "items": items}

    def holds(self, value: Any, schema: dict[str, Any], place: str, name: str, depth: int = 0) -> bool:
        """Whether a value obeys a rewritten schema."""
        self.work.charge(place, 2)
        if depth > MOST_DEPTH:
            raise Unsupported(place, name, "beside a schema that contains itself is not supported")
        schema = self.resolved(schema, place, name)
        if not schema:
            return True
        if "anyOf" in schema:
            return any(self.holds(value, one, place, name, depth + 1) for one in schema["anyOf"])
        if "enum" in schema:
            return canonical(value, place, name, self.work) in self.values_of(schema)
        if not _is(value, schema["type"]):
            return False
        for keyword in ("format", "pattern", "propertyNames"):  # a client's pattern may take Python's re for ever
            if keyword in schema:
                raise Unsupported(place, name, f"beside {keyword} is not supported")
        if schema["type"] == "object":
            self.work.charge(place, len(schema.get("required", [])) + len(value))
            fits = all(key in value for key in schema.get("required", []))
            for key, one in value.items():
                own = schema.get("properties", {}).get(key, schema["additionalProperties"])
                fits = fits and own is not False and (own is True or self.holds(one, own, place, name, depth + 1))
            return fits and _in_bounds(len(value), schema, "minProperties", "maxProperties")
        if schema["type"] == "array":
            self.work.charge(place, len(value))
            prefix = schema.get("prefixItems", [])
            rest = schema.get("items", {})
            each = [prefix[index] if index < len(prefix) else rest for index in range(len(value))]
            fits = all(
                own is not False and self.holds(one, own, place, name, depth + 1)
                for one, own in zip(value, each, strict=True)
            )
            return fits and _in_bounds(len(value), schema, "minItems", "maxItems")
        if schema["type"] == "string":
            return _in_bounds(len(value), schema, "minLength", "maxLength")
        if schema["type"] in ("number", "integer"):
            fits = "multipleOf" not in schema or value % schema["multipleOf"] == 0
            fits = fits and value > schema.get("exclusiveMinimum", -math.inf)
            fits = fits and value < schema.get("exclusiveMaximum", math.inf)
            return fits and _in_bounds(value, schema, "minimum", "maximum")
        return True

    def types(self, own: Mapping[str, Any], place: str) -> list[str]:
        asked = own.get("type", list(TYPES))
        kinds = [asked] if isinstance(asked, str) else asked
        if isinstance(kinds, list):
            self.work.charge(place, len(kinds))
        if not isinstance(kinds, list) or not kinds or any(kind not in [*KEYWORDS] for kind in kinds):
            raise Unsupported(place, "type", f"is {quote(asked)}; it must be one or some of {', '.join(KEYWORDS)}")
        return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]

    def typed(self, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        kinds = self.types(own, place)
        if not any(name in HONOURED for name in own) and "type" not in own:
            return {}
        # Without a type a format is an annotation; who names the type wants it to be kept.
        given = own if "type" in own else {name: value for name, value in own.items() if name != "format"}
        if given.get("multipleOf", 1) != 1:  # of numbers only whole ones are supported
            kinds = ["integer" if kind == "number" else kind for kind in kinds]
        return self.any_of([self.variant(kind, given, place, depth) for kind in kinds], place)

    def variant(self, kind: str, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        self.work.charge(place, 2)
        found = {name: own[name] for name in KEYWORDS[kind] if name in own}
        if kind in ("integer", "number"):
            return {"type": kind, **self.number(found, place, kind)}
        if kind in ("boolean", "null"):
            return {"type": kind}
        check = {"object": self.object, "array": self.array, "string": self.string}[kind]
        return {"type": kind, **check(found, place, depth)}

    def object(self, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        properties = own.get("properties", {})
        required = own.get("required", [])
        if not isinstance(properties, Mapping):
            raise Unsupported(place, "properties", "must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise Unsupported(place, "required", "must be a list of names")
        self.work.charge(place, len(required) + len(properties) + sum(map(len, properties)) // CHARS_OF_STEP)
        for name in properties:
            check_name(name, place)
        visited = {
            name: self.visit(value, f"{place}/properties/{name}", depth + 1) for name, value in properties.items()
        }
        for name in required:
            check_text(name, place, "required")
        more = own.get("additionalProperties", True)
        if not isinstance(more, bool):
            more = self.visit(more, f"{place}/additionalProperties", depth + 1)
        for name in dict.fromkeys(required):
            if name not in visited and more is False:
                raise Unsupported(place, "required", f"names {quote(name)}, which additionalProperties forbids")
            if name not in visited:
                visited[name] = {} if more is True else more
        found: dict[str, Any] = {}
        for name in ("minProperties", "maxProperties"):
            if name in own:
                found[name] = _count(own[name], place, name)
        if "propertyNames" in own:
            if visited or "additionalProperties" in own or found:
                raise Unsupported(place, "propertyNames", "beside other keywords is not supported")
            found["propertyNames"] = self.names_of(own["propertyNames"], place, depth)
        if visited:
            found["properties"] = visited
        if required:
            found["required"] = list(dict.fromkeys(required))
        found["additionalProperties"] = more
        return found

    def names_of(self, schema: Any, place: str, depth: int) -> dict[str, Any]:
        """Of strings alone, since names are."""
        place = f"{place}/propertyNames"
        found = self.both({"type": "string"}, self.visit(schema, place, depth + 1), place, "propertyNames")
        if "anyOf" in found:
            raise Unsupported(place, "anyOf")
        return found

    def array(self, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("minItems", "maxItems"):
            if name in own:
                found[name] = _count(own[name], place, name)
        prefix = own.get("prefixItems", [])
        items = own.get("items", True)
        if not isinstance(prefix, list):
            raise Unsupported(place, "prefixItems", "must be a list of schemas")
        if prefix:
            found["prefixItems"] = [
                self.visit(one, f"{place}/prefixItems/{index}", depth + 1) for index, one in enumerate(prefix)
            ]
        if items is not True:
            found["items"] = False if items is False else self.visit(items, f"{place}/items", depth + 1)
        return found

    def string(self, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        found = dict(own)
        for name in ("minLength", "maxLength"):
            if name in own:
                found[name] = _count(own[name], place, name)
        if "format" in own and own["format"] not in [*FORMATS]:
            raise Unsupported(place, "format", f"{quote(own['format'])} is not supported")
        kinds = [name for name in ("pattern", "format") if name in own]
        if len(kinds) > 1 or (kinds and len(own) > 1):
            other = next(name for name in own if name != kinds[0])
            raise Unsupported(place, kinds[0], f"beside {other} is not supported")
        if "pattern" in own:
            if isinstance(own["pattern"], str):
                self.work.charge(place, len(own["pattern"]) // CHARS_OF_STEP)
            found["pattern"] = whole(own["pattern"], place)
        return found

    def number(self, own: Mapping[str, Any], place: str, kind: str) -> dict[str, Any]:
        for name, value in own.items():
            check_number(value, place, name)
            if name != "multipleOf":
                check_bound(value, kind, place, name)
        factor = own.get("multipleOf", 1)
        if factor != int(factor) or factor <= 0 or factor > MOST_FACTOR:
            remedy = f"whole numbers from 1 to {MOST_FACTOR} are supported"
            raise Unsupported(place, "multipleOf", f"is {quote(factor)}; {remedy}")
        if factor != 1 and len(own) > 1:
            other = next(name for name in own if name != "multipleOf")
            raise Unsupported(place, "multipleOf", f"beside {other} is not supported")
        return {**own, **({"multipleOf": int(factor)} if "multipleOf" in own else {})}

    def definition(self, pointer: Any, place: str, depth: int) -> str:
        """The name of what a reference points to."""
        if not isinstance(pointer, str) or not pointer.startswith("#") or (pointer != "#" and pointer[:2] != "#/"):
            raise Unsupported(place, "$ref", f"to {quote(pointer)} is not supported; point to a place of this schema")
        self.work.charge(place, pointer.count("/"))
        if pointer not in self.names:
            target = self.root
            for part in pointer[2:].split("/") if pointer != "#" else []:
                key: Any = part.replace("~1", "/").replace("~0", "~")
                if "%" in key:
                    raise Unsupported(place, "$ref", f"to {quote(pointer)} is not supported: it has an escape")
                if isinstance(target, list) and re.fullmatch("[0-9]{1,6}", key) and int(key) < len(target):
                    target = target[int(key)]
                elif isinstance(target, Mapping) and key in target:
                    target = target[key]
                else:
                    raise Unsupported(place, "$ref", f"to {quote(pointer)} points nowhere")
            name = self.names[pointer] = f"d{len(self.names)}"
            self.definitions[name] = None  # on the way
            self.definitions[name] = self.visit(target, pointer[1:], depth + 1)
        return self.names[pointer]


def _pair_bounds(left: dict[str, Any], right: dict[str, Any], place: str, name: str) -> dict[str, Any] | None:
    """The narrower of bounds; None if nothing is between them. Other keywords must be the same, or of one side."""
    found = {**left, **right}
    for key in left.keys() & right.keys():
        lower = key.lower()
        if "min" in lower:
            found[key] = max(left[key], right[key])
        elif "max" in lower:
            found[key] = min(left[key], right[key])
        elif left[key] != right[key]:
            raise Unsupported(place, name, f"of two schemas with {key} is not supported")
    for key in ("pattern", "format", "multipleOf"):
        if key in found and len(found.keys() - {"type", key}):
            raise Unsupported(place, name, f"of schemas with {key} and others is not supported")
    for counted in ("Items", "Length", "Properties"):
        if found.get(f"min{counted}", 0) > found.get(f"max{counted}", math.inf):
            return None
    if found.get("minimum", -math.inf) > found.get("maximum", math.inf):
        return None
    return found


def _in_bounds(number: float, schema: dict[str, Any], low: str, high: str) -> bool:
    return bool(schema.get(low, -math.inf) <= number <= schema.get(high, math.inf))


def canonical(value: Any, place: str, name: str, work: Work) -> str:
    """A JSON text that equal values have in common: 1 and 1.0, and members in any order, but not 1 and true. Raises
    Unsupported for values that cannot be written."""
    return json.dumps(_plain(value, place, name, work, 0), sort_keys=True)


def _plain(value: Any, place: str, name: str, work: Work, depth: int) -> Any:
    work.charge(place, 1 + (len(value) // CHARS_OF_STEP if isinstance(value, str) else 0))
    if depth > MOST_DEPTH:
        raise Unsupported(place, name, f"has a value that nests deeper than {MOST_DEPTH} levels")
    if isinstance(value, str):
        check_text(value, place, name)
    elif isinstance(value, list):
        return [_plain(one, place, name, work, depth + 1) for one in value]
    elif isinstance(value, Mapping):
        return {
            _plain(key, place, name, work, depth): _plain(one, place, name, work, depth + 1)
            for key, one in value.items()
        }
    elif isinstance(value, int | float) and not isinstance(value, bool):
        check_number(value, place, name)
        if isinstance(value, int) and not LEAST_INTEGER <= value <= MOST_INTEGER:
            remedy = f"choose one from {LEAST_INTEGER} to {MOST_INTEGER}, or a text"
            raise Unsupported(place, name, f"has an integer beyond 64 bits; {remedy}")
        return int(value) if value == int(value) else value
    return value


def check_name(name: str, place: str) -> None:
    check_text(name, place, "properties")
    if re.search(r'[\x00-\x1f"\\]', name):
        fault = "has a quote, a backslash or a control character; rename it"
        raise Unsupported(place, "properties", f"names {quote(name)}, which {fault}")


def check_text(text: str, place: str, name: str) -> None:
    """Raises Unsupported for half of a surrogate pair, which no text has."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise Unsupported(place, name, "has a text with half of a surrogate pair; correct it")


def check_number(value: Any, place: str, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unsupported(place, name, "must be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise Unsupported(place, name, "must be a finite number")


def check_bound(value: float, kind: str, place: str, name: str) -> None:
    """Raises Unsupported for a bound of numbers that the library would round."""
    is_whole = kind == "integer" or isinstance(value, int)
    if is_whole and not LEAST_INTEGER <= value <= MOST_INTEGER:
        remedy = f"choose one from {LEAST_INTEGER} to {MOST_DOUBLE}, or leave it out"
        raise Unsupported(place, name, f"is {quote(value)}, which is beyond 64 bits; {remedy}")
    if kind == "number" and isinstance(value, int) and int(float(value)) != value:
        nearest = min(int(float(value)), MOST_DOUBLE)
        raise Unsupported(place, name, f"is {value}, which is no double; choose {nearest}")


def _with_evaluated(own: dict[str, Any]) -> dict[str, Any]:
    """Where no keyword beside it looks into other schemas, `unevaluated...` means what `items` and
    `additionalProperties` do."""
    looks = (*UNIONS[:3], "$ref", "$dynamicRef", "if", "then", "else", "contains", "patternProperties", "not")
    if any(name in own for name in (*looks, "dependentSchemas")):
        return own
    for name, plain in (("unevaluatedItems", "items"), ("unevaluatedProperties", "additionalProperties")):
        if name in own:
            own = {key: value for key, value in {plain: own[name], **own}.items() if key != name}
    return own


def _allows_everything(schema: Any) -> bool:
    return schema is True or schema == {}  # 1 equals True in Python, and is no schema


def _without_effect(own: dict[str, Any], place: str) -> dict[str, Any]:
    """Without keywords that allow everything where they stand."""
    idle: dict[str, bool] = {
        "$id": place == "",
        "uniqueItems": own.get("uniqueItems") is False,
        "unevaluatedItems": _allows_everything(own.get("unevaluatedItems")),
        "unevaluatedProperties": _allows_everything(own.get("unevaluatedProperties")),
        "propertyNames": _allows_everything(own.get("propertyNames")),
        "patternProperties": own.get("patternProperties") == {},
        "dependentRequired": own.get("dependentRequired") == {},
        "dependentSchemas": own.get("dependentSchemas") == {},
        "not": own.get("not") is False,
        "minContains": "contains" not in own,
        "maxContains": "contains" not in own,
        "if": "then" not in own and "else" not in own,
        "then": "if" not in own,
        "else": "if" not in own,
        "minProperties": own.get("minProperties") == 0 and own["minProperties"] is not False,
    }
    return {name: value for name, value in own.items() if not idle.get(name, False)}


def whole(pattern: Any, place: str = "") -> str:
    """A pattern for whole strings that matches those in which `pattern` is found somewhere. Raises Unsupported for
    anchors anywhere but at its ends."""
    if not isinstance(pattern, str):
        raise Unsupported(place, "pattern", "must be a text")
    check_text(pattern, place, "pattern")
    starts = False
    ends = False
    depth = 0
    has_bar = False
    for index, part in _syntax(pattern):
        starts |= part == "^" and index == 0
        ends |= part == "$" and index == len(pattern) - 1
        is_inside = (part == "^" and index > 0) or (part == "$" and index < len(pattern) - 1)
        if is_inside or (part == "(" and pattern[index + 1 : index + 2] == "?"):
            raise Unsupported(place, "pattern", "with anchors inside, or with lookaround, is not supported")
        depth += (part == "(") - (part == ")")
        has_bar |= part == "|" and depth <= 0
    if (starts or ends) and has_bar:
        raise Unsupported(place, "pattern", "with an anchor in one alternative is not supported; put all into brackets")
    own = pattern[starts : len(pattern) - ends]
    return ("" if starts else ANYTHING) + f"({own})" + ("" if ends else ANYTHING)


def _syntax(pattern: str) -> Iterator[tuple[int, str]]:
    """The characters of a pattern that are neither escaped nor in a class, and their places."""
    is_escaped = in_class = False
    for index, character in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            yield index, character


def _count(value: Any, place: str, name: str) -> int:
    check_number(value, place, name)
    if value != int(value) or value < 0:
        raise Unsupported(place, name, "must be a whole number from 0 up")
    if value > MOST_COUNT:
        raise Unsupported(place, name, f"is {quote(value)}; at most {MOST_COUNT} is supported")
    return int(value)


def _is(value: Any, kind: str) -> bool:
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    classes = {"object": Mapping, "array": list, "string": str, "number": int | float, "null": type(None)}
    return isinstance(value, classes[kind])
