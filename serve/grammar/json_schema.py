"""Which JSON Schemas (draft 2020-12) can be served, rewritten so that the grammar library takes them at their word.

The library ignores some keywords, and reads others only beside a `type`. So a schema is rewritten into one that names
the type of everything and has no keyword beside a union, and whatever would not be honoured is refused by its name.
Imports no library.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from slipstream.serve.grammar.strings import FORMATS

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
MOST_JOINED = 5_000  # intersections of one schema
MOST_FACTOR = 1_000
MOST_COUNT = 10_000  # of items or characters that a bound may name


class Unsupported(ValueError):
    """`keyword` at `place`, a JSON pointer, cannot be served."""

    def __init__(self, place: str, keyword: str, reason: str = "is not supported; leave it out") -> None:
        super().__init__(f"{keyword} at {place or 'the root'} {reason}")
        self.place, self.keyword = place, keyword


def rewrite(schema: Any) -> Any:
    """A schema that means the same, made of {}, {"type", its keywords}, {"enum"}, {"anyOf"} and {"$ref"}. Raises
    Unsupported naming a keyword that would not be honoured."""
    if not isinstance(schema, Mapping | bool):
        raise Unsupported("", "the schema", "must be an object, true or false")
    return _Rewriter(schema).run()


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self.root = root
        self.names: dict[str, str] = {}  # by pointer: names of definitions in the result
        self.definitions: dict[str, Any] = {}
        self.num_joined = self.num_joining = 0  # schemas that were intersected, and that are just now

    def run(self) -> Any:
        result = self.visit(self.root, "", 0)
        return {**result, "$defs": self.definitions} if self.definitions else result

    def visit(self, schema: Any, place: str, depth: int) -> dict[str, Any]:
        if depth > MOST_DEPTH:
            raise Unsupported(place, "the schema", f"nests deeper than {MOST_DEPTH} levels")
        if schema is True or schema == {}:
            return {}
        if schema is False:
            raise Unsupported(place, "false", "allows nothing")
        if not isinstance(schema, Mapping):
            raise Unsupported(place, "the schema", "must be an object, true or false")
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
            return {"enum": values}
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
        return any_of(visited)

    def are_disjoint(self, branches: list[dict[str, Any]], place: str) -> bool:
        """Whether it is clear that no value holds for two rewritten schemas: by types, values, or the values of a
        property that both require."""
        variants = [
            [self.resolved(one, place, "oneOf") for one in self.resolved(branch, place, "oneOf").get("anyOf", [branch])]
            for branch in branches
        ]
        return all(
            self.are_apart(left, right, place)
            for index, lefts in enumerate(variants)
            for rights in variants[index + 1 :]
            for left in lefts
            for right in rights
        )

    def are_apart(self, left: dict[str, Any], right: dict[str, Any], place: str) -> bool:
        if not left or not right or "anyOf" in left or "anyOf" in right:
            return False
        if "enum" in left or "enum" in right:
            return self.pair(left, right, place, "oneOf") is None
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
            target = self.definitions[schema["$ref"].rpartition("/")[2]]
            seen += 1
            if target is None or seen > MOST_DEPTH:
                raise Unsupported(place, name, "of a schema that contains itself, beside others, is not supported")
            schema = target
        return schema

    def both(self, one: dict[str, Any], other: dict[str, Any], place: str, name: str) -> dict[str, Any]:
        """What holds for two rewritten schemas. `name`: the keyword that asks for it."""
        if not one or not other or one == other:
            return one or other
        self.num_joined += 1
        if self.num_joining >= MOST_DEPTH or self.num_joined > MOST_JOINED:
            raise Unsupported(place, name, "of schemas so large, or of two that contain themselves, is not supported")
        self.num_joining += 1
        try:
            return self.join(one, other, place, name)
        finally:
            self.num_joining -= 1

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
        return any_of(found)

    def pair(self, left: dict[str, Any], right: dict[str, Any], place: str, name: str) -> dict[str, Any] | None:
        """What holds for two schemas without unions; None: nothing."""
        if "enum" in right:
            left, right = right, left
        if "enum" in left:
            kept = [value for value in left["enum"] if self.holds(value, right, place, name)]
            return {"enum": kept} if kept else None
        kinds = {left["type"], right["type"]}
        if kinds == {"number", "integer"}:
            left, right = {**left, "type": "integer"}, {**right, "type": "integer"}
        elif len(kinds) > 1:
            return None
        if left["type"] == "object":
            return self.pair_objects(left, right, place, name)
        if left["type"] == "array":
            return self.pair_arrays(left, right, place, name)
        return _pair_bounds(left, right, place, name)

    def pair_objects(self, left: dict[str, Any], right: dict[str, Any], place: str, name: str) -> dict[str, Any] | None:
        if "propertyNames" in left or "propertyNames" in right:
            raise Unsupported(place, name, "beside propertyNames is not supported")
        required = list(dict.fromkeys([*left.get("required", []), *right.get("required", [])]))
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
                raise Unsupported(place, name, f"forbids the property {key!r}, which is not supported") from error
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
            **({"required": required} if required else {}),
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

    def holds(self, value: Any, schema: dict[str, Any], place: str, name: str) -> bool:
        """Whether a value obeys a rewritten schema."""
        schema = self.resolved(schema, place, name)
        if not schema:
            return True
        if "anyOf" in schema:
            return any(self.holds(value, one, place, name) for one in schema["anyOf"])
        if "enum" in schema:
            return any(_same(value, one) for one in schema["enum"])
        if not _is(value, schema["type"]):
            return False
        for keyword in ("format", "pattern", "propertyNames"):  # a client's pattern may take Python's re for ever
            if keyword in schema:
                raise Unsupported(place, name, f"beside {keyword} is not supported")
        if schema["type"] == "object":
            fits = all(key in value for key in schema.get("required", []))
            for key, one in value.items():
                own = schema.get("properties", {}).get(key, schema["additionalProperties"])
                fits = fits and own is not False and (own is True or self.holds(one, own, place, name))
            return fits and _in_bounds(len(value), schema, "minProperties", "maxProperties")
        if schema["type"] == "array":
            prefix, rest = schema.get("prefixItems", []), schema.get("items", {})
            each = [prefix[index] if index < len(prefix) else rest for index in range(len(value))]
            fits = all(
                own is not False and self.holds(one, own, place, name) for one, own in zip(value, each, strict=True)
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
        if not isinstance(kinds, list) or not kinds or any(kind not in [*KEYWORDS] for kind in kinds):
            raise Unsupported(place, "type", f"is {asked!r}; it must be one or some of {', '.join(KEYWORDS)}")
        return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]

    def typed(self, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        kinds = self.types(own, place)
        if not any(name in HONOURED for name in own) and "type" not in own:
            return {}
        # Without a type a format is an annotation; who names the type wants it to be kept.
        given = own if "type" in own else {name: value for name, value in own.items() if name != "format"}
        if given.get("multipleOf", 1) != 1:  # of numbers only whole ones are supported
            kinds = ["integer" if kind == "number" else kind for kind in kinds]
        return any_of([self.variant(kind, given, place, depth) for kind in kinds])

    def variant(self, kind: str, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        found = {name: own[name] for name in KEYWORDS[kind] if name in own}
        check = {"object": self.object, "array": self.array, "string": self.string}.get(kind, self.number)
        return {"type": kind, **check(found, place, depth)}

    def object(self, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        properties, required = own.get("properties", {}), own.get("required", [])
        if not isinstance(properties, Mapping):
            raise Unsupported(place, "properties", "must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise Unsupported(place, "required", "must be a list of names")
        visited = {
            name: self.visit(value, f"{place}/properties/{name}", depth + 1) for name, value in properties.items()
        }
        for name in visited:
            if re.search(r'[\x00-\x1f"\\]', name):
                fault = "has a quote, a backslash or a control character; rename it"
                raise Unsupported(place, "properties", f"names {name!r}, which {fault}")
        more = own.get("additionalProperties", True)
        if not isinstance(more, bool):
            more = self.visit(more, f"{place}/additionalProperties", depth + 1)
        for name in dict.fromkeys(required):
            if name not in visited and more is False:
                raise Unsupported(place, "required", f"names {name!r}, which additionalProperties forbids")
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
        prefix, items = own.get("prefixItems", []), own.get("items", True)
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
            raise Unsupported(place, "format", f"{own['format']!r} is not supported")
        kinds = [name for name in ("pattern", "format") if name in own]
        if len(kinds) > 1 or (kinds and len(own) > 1):
            other = next(name for name in own if name != kinds[0])
            raise Unsupported(place, kinds[0], f"beside {other} is not supported")
        if "pattern" in own:
            found["pattern"] = whole(own["pattern"], place)
        return found

    def number(self, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        for name, value in own.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise Unsupported(place, name, "must be a number, and finite")
        factor = own.get("multipleOf", 1)
        if factor != int(factor) or factor <= 0 or factor > MOST_FACTOR:
            raise Unsupported(place, "multipleOf", f"is {factor}; whole numbers from 1 to {MOST_FACTOR} are supported")
        if factor != 1 and len(own) > 1:
            other = next(name for name in own if name != "multipleOf")
            raise Unsupported(place, "multipleOf", f"beside {other} is not supported")
        return {**own, **({"multipleOf": int(factor)} if "multipleOf" in own else {})}

    def definition(self, pointer: Any, place: str, depth: int) -> str:
        """The name of what a reference points to."""
        if not isinstance(pointer, str) or not pointer.startswith("#") or (pointer != "#" and pointer[:2] != "#/"):
            raise Unsupported(place, "$ref", f"to {pointer!r} is not supported; point to a place of this schema")
        if pointer not in self.names:
            target = self.root
            for part in pointer[2:].split("/") if pointer != "#" else []:
                key: Any = part.replace("~1", "/").replace("~0", "~")
                if "%" in key:
                    raise Unsupported(place, "$ref", f"to {pointer!r} is not supported: it has an escape")
                if isinstance(target, list) and key.isdigit() and int(key) < len(target):
                    target = target[int(key)]
                elif isinstance(target, Mapping) and key in target:
                    target = target[key]
                else:
                    raise Unsupported(place, "$ref", f"to {pointer!r} points nowhere")
            name = self.names[pointer] = f"d{len(self.names)}"
            self.definitions[name] = None  # on the way
            self.definitions[name] = self.visit(target, pointer[1:], depth + 1)
        return self.names[pointer]


def any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """What holds for one of some rewritten schemas."""
    if {} in schemas:
        return {}
    flat = [one for schema in schemas for one in schema.get("anyOf", [schema])]
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


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


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON: true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


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


def _without_effect(own: dict[str, Any], place: str) -> dict[str, Any]:
    """Without keywords that allow everything where they stand."""
    idle: dict[str, bool] = {
        "$id": place == "",
        "uniqueItems": own.get("uniqueItems") is False,
        "unevaluatedItems": own.get("unevaluatedItems") in (True, {}),
        "unevaluatedProperties": own.get("unevaluatedProperties") in (True, {}),
        "propertyNames": own.get("propertyNames") in (True, {}),
        "patternProperties": own.get("patternProperties") == {},
        "dependentRequired": own.get("dependentRequired") == {},
        "dependentSchemas": own.get("dependentSchemas") == {},
        "not": own.get("not") is False,
        "minContains": "contains" not in own,
        "maxContains": "contains" not in own,
        "if": "then" not in own and "else" not in own,
        "then": "if" not in own,
        "else": "if" not in own,
        "minProperties": own.get("minProperties") == 0,
    }
    return {name: value for name, value in own.items() if not idle.get(name, False)}


def whole(pattern: Any, place: str = "") -> str:
    """A pattern for whole strings that matches those in which `pattern` is found somewhere. Raises Unsupported for
    anchors anywhere but at its ends."""
    if not isinstance(pattern, str):
        raise Unsupported(place, "pattern", "must be a text")
    plain = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)  # no escapes, no classes
    starts, ends = plain.startswith("^"), plain.endswith("$")
    inner = plain[starts : len(plain) - ends]
    if "^" in inner or "$" in inner or "(?" in inner or ((starts or ends) and has_free_bar(inner)):
        raise Unsupported(place, "pattern", "with anchors inside, or with lookaround, is not supported")
    own = pattern[starts : len(pattern) - ends]
    return ("" if starts else ANYTHING) + f"({own})" + ("" if ends else ANYTHING)


def has_free_bar(pattern: str) -> bool:
    """Whether a pattern without escapes and classes offers alternatives outside all brackets."""
    depth = 0
    for character in pattern:
        if character == "|" and depth <= 0:
            return True
        depth += (character == "(") - (character == ")")
    return False


def _count(value: Any, place: str, name: str) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value != int(value) or value < 0:
        raise Unsupported(place, name, "must be a whole number from 0 up")
    if value > MOST_COUNT:
        raise Unsupported(place, name, f"is {value}; at most {MOST_COUNT} is supported")
    return int(value)


def _is(value: Any, kind: str) -> bool:
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    classes = {"object": Mapping, "array": list, "string": str, "number": int | float, "null": type(None)}
    return isinstance(value, classes[kind])
