"""Rewrites JSON Schemas (draft 2020-12) so that the grammar library enforces every keyword, and refuses others.

The library ignores some keywords, and reads others only beside a `type`. So the result names every type and has no
keyword beside a union, and a keyword that the library would not honour is refused by its name.
Each step is charged to the request's Work. Imports no library.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

from slipstream.models.chat.quotes import quote
from slipstream.serve.grammar.regexes import fault_of, parts_of, with_long_escapes
from slipstream.serve.grammar.strings import FORMATS
from slipstream.serve.grammar.work import Unsupported, Work

Keywords = Mapping[str, Any]
Schema = dict[str, Any]
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
HONOURED = frozenset(keyword for keywords in KEYWORDS.values() for keyword in keywords)
APPLICATORS = (  # keywords that apply other schemas, on whose results `unevaluated...` depends
    *("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef", "if", "then", "else", "not"),
    *("contains", "patternProperties", "dependentSchemas"),
)
ANYTHING = r"[\s\S]*"  # as a pattern
MOST_DEPTH = 64
MOST_VARIANTS = 64  # of the intersection of two schemas
MOST_FACTOR = 1_000
MOST_COUNT = 10_000  # of items or characters, as a bound
# The library would round bounds beyond these.
LEAST_INTEGER = -(2**63)
MOST_INTEGER = 2**63 - 1
MOST_DOUBLE = 2**63 - 2**10  # the greatest double among them
STEPS_OF_SCHEMA = 8  # reading a schema takes as long as comparing some values
CHARS_OF_STEP = 32


def rewrite(schema: Any, work: Work | None = None) -> Any:
    """Returns an equivalent schema of {}, {"type", its keywords}, {"enum"}, {"anyOf"} and {"$ref"}. Raises Unsupported
    naming a keyword that the library would not honour, or if the schema needs more than is left of `work`."""
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
        self.names: dict[str, str] = {}  # names of definitions in the result, by pointer
        self.definitions: Schema = {}
        self.num_joining = 0  # depth of nested intersections in progress
        # By the id of an enum's list: the list, and its values by canonical text.
        self.values: dict[int, tuple[list[Any], Schema]] = {}

    def run(self) -> Any:
        result = self.visit(self.root, "", 0)
        result = {**result, "$defs": self.definitions} if self.definitions else result
        self.measure(result)
        return result

    def measure(self, result: Any) -> None:
        """Charges the size of a result, whose shared parts are written many times."""
        parts = [result]
        while parts:
            part = parts.pop()
            self.work.charge("", 1 + (len(part) // CHARS_OF_STEP if isinstance(part, str) else 0))
            if isinstance(part, dict):
                parts += part
                parts += part.values()
            elif isinstance(part, list):
                parts += part

    def visit(self, schema: Any, place: str, depth: int) -> Schema:
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
        keywords = {name: value for name, value in schema.items() if name not in ANNOTATIONS}
        keywords = _without_effect(_with_evaluated(keywords), place)
        for name in keywords:
            if name not in HONOURED and name not in UNIONS and name != "type":
                raise Unsupported(place, name)
        unions = [name for name in UNIONS if name in keywords]
        if unions:
            return self.union(keywords, unions, place, depth)
        return self.typed(keywords, place, depth)

    def union(self, keywords: Keywords, unions: list[str], place: str, depth: int) -> Schema:
        """Returns the intersection of the schema's plain keywords and its unions."""
        base = {name: value for name, value in keywords.items() if name not in unions}
        if unions == ["$ref"] and not base:
            return {"$ref": f"#/$defs/{self.definition(keywords['$ref'], place, depth)}"}
        result = self.typed(base, place, depth)
        for name in unions:
            result = self.both(result, self.branch(name, keywords[name], place, depth), place, name)
        return result

    def branch(self, name: str, value: Any, place: str, depth: int) -> Schema:
        if name == "$ref":
            return self.resolved({"$ref": f"#/$defs/{self.definition(value, place, depth)}"}, place, name)
        if name in ("const", "enum"):
            values = [value] if name == "const" else value
            if not isinstance(values, list) or not values:
                raise Unsupported(place, name, "must be a list of values, and not empty")
            return self.enum({canonical(value, place, name, self.work): value for value in values})
        if not isinstance(value, list) or not value:
            raise Unsupported(place, name, "must be a list of schemas, and not empty")
        drops_false = name != "allOf" and any(part is not False for part in value)
        visited = [
            self.visit(part, f"{place}/{name}/{index}", depth + 1)
            for index, part in enumerate(value)
            if part is not False or not drops_false
        ]
        if name == "allOf":
            result: Schema = {}
            for part in visited:
                result = self.both(result, part, place, name)
            return result
        if name == "oneOf" and len(visited) > 1 and not self.are_disjoint(visited, place):
            raise Unsupported(place, "oneOf", "of schemas that may overlap is not supported; use anyOf")
        return self.any_of(visited, place)

    def any_of(self, schemas: list[Schema], place: str) -> Schema:
        """Returns the union of rewritten schemas."""
        self.work.charge(place, len(schemas))
        if {} in schemas:
            return {}
        flat = [variant for schema in schemas for variant in schema.get("anyOf", [schema])]
        self.work.charge(place, len(flat))
        return flat[0] if len(flat) == 1 else {"anyOf": flat}

    def enum(self, values: Schema) -> Schema:
        """Returns a schema of values. `values`: by their canonical texts."""
        listed = list(values.values())
        self.values[id(listed)] = (listed, values)
        return {"enum": listed}

    def values_of(self, schema: Schema) -> Schema:
        """Returns the values of a schema that `enum` made, by their canonical texts."""
        return self.values[id(schema["enum"])][1]

    def are_disjoint(self, branches: list[Schema], place: str) -> bool:
        """Whether the rewritten schemas clearly have no value in common: by types, values, or the values of a property
        that both require."""
        listed = dict[str, tuple[int, Any]]()  # branch and value, by canonical text
        objects = list[tuple[int, Schema]]()
        kinds = list[tuple[int, Schema]]()
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
        names = objects[0][1].get("required", []) if objects else []
        is_told = any(self.is_discriminator(name, objects, place) for name in names)
        return (is_told or self.are_apart_in_pairs(objects, place)) and self.are_apart_in_pairs(kinds, place)

    def variants_of(self, branch: Schema, place: str) -> Iterator[Schema]:
        for variant in self.resolved(branch, place, "oneOf").get("anyOf", [branch]):
            yield self.resolved(variant, place, "oneOf")

    def is_discriminator(self, name: str, objects: list[tuple[int, Schema]], place: str) -> bool:
        """Whether the values of a property tell the branches of these objects apart."""
        branches = dict[str, int]()  # by canonical text of a value of the property
        for index, variant in objects:
            required = variant.get("required", [])
            schema = variant.get("properties", {}).get(name, {})
            self.work.charge(place, 1 + len(required) + len(schema.get("enum", [])))
            if name not in required or "enum" not in schema:
                return False
            if any(branches.setdefault(text, index) != index for text in self.values_of(schema)):
                return False
        return True

    def are_apart_in_pairs(self, kinds: list[tuple[int, Schema]], place: str) -> bool:
        return all(
            self.are_apart(left, right, place)
            for number, (index, left) in enumerate(kinds)
            for other, right in kinds[number + 1 :]
            if index != other
        )

    def are_apart(self, left: Schema, right: Schema, place: str) -> bool:
        """Whether two schemas without unions and values clearly have no value in common."""
        self.work.charge(place, 1 + len(left.get("required", [])) + len(right.get("required", [])))
        if left["type"] != right["type"]:
            return {left["type"], right["type"]} != {"number", "integer"}
        names = set(left.get("required", [])) & set(right.get("required", []))
        pairs = [[side.get("properties", {}).get(key, {}) for side in (left, right)] for key in names]
        return any(
            "enum" in first and "enum" in second and self.pair(first, second, place, "oneOf") is None
            for first, second in pairs
        )

    def resolved(self, schema: Schema, place: str, name: str) -> Schema:
        """Returns a rewritten schema with its top-level references resolved."""
        num_references = 0
        while "$ref" in schema:
            self.work.charge(place)
            target = self.definitions[schema["$ref"].rpartition("/")[2]]
            num_references += 1
            if target is None or num_references > MOST_DEPTH:
                raise Unsupported(place, name, "of a schema that contains itself, beside others, is not supported")
            schema = target
        return schema

    def both(self, first: Schema, second: Schema, place: str, name: str) -> Schema:
        """Returns the intersection of two rewritten schemas. `name`: the keyword that requires it."""
        self.work.charge(place, STEPS_OF_SCHEMA)
        if not first or not second or self.are_equal(first, second, place):
            return first or second
        if self.num_joining >= MOST_DEPTH:
            raise Unsupported(place, name, "of schemas so deep, or of two that contain themselves, is not supported")
        self.num_joining += 1
        try:
            return self.join(first, second, place, name)
        finally:
            self.num_joining -= 1

    def are_equal(self, first: Any, second: Any, place: str) -> bool:
        """Whether two parts of rewritten schemas are the same JSON, in the order of their lists."""
        self.work.charge(place)
        if first is second:
            return True
        if isinstance(first, dict) and isinstance(second, dict):
            return first.keys() == second.keys() and all(
                self.are_equal(first[key], second[key], place) for key in first
            )
        if isinstance(first, list) and isinstance(second, list):
            pairs = zip(first, second, strict=False)
            return len(first) == len(second) and all(self.are_equal(*pair, place) for pair in pairs)
        return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)

    def join(self, first: Schema, second: Schema, place: str, name: str) -> Schema:
        variants = [
            [self.resolved(variant, place, name) for variant in side.get("anyOf", [side])]
            for side in (self.resolved(first, place, name), self.resolved(second, place, name))
        ]
        if len(variants[0]) * len(variants[1]) > MOST_VARIANTS:
            raise Unsupported(place, name, f"makes more than {MOST_VARIANTS} combinations")
        schemas = []
        for left in variants[0]:
            for right in variants[1]:
                if "anyOf" in left or "anyOf" in right:
                    try:
                        joined = self.both(left, right, place, name)
                    except Unsupported as error:
                        if error.place == place and "allow nothing" in str(error):
                            continue
                        raise
                    schemas += joined.get("anyOf", [joined])
                elif not left or not right:
                    schemas.append(left or right)
                else:
                    pair = self.pair(left, right, place, name)
                    schemas += [] if pair is None else [pair]
        if not schemas:
            raise Unsupported(place, name, "and what is beside it allow nothing together")
        return self.any_of(schemas, place)

    def pair(self, left: Schema, right: Schema, place: str, name: str) -> Schema | None:
        """Returns the intersection of two schemas without unions; None if it is empty."""
        self.work.charge(place)
        if "enum" in right:
            left, right = right, left
        if "enum" in left:
            values = self.values_of(left)
            if "enum" in right:
                self.work.charge(place, len(values))
                allowed = self.values_of(right)
                values = {text: value for text, value in values.items() if text in allowed}
            else:
                values = {text: value for text, value in values.items() if self.holds(value, right, place, name)}
            return self.enum(values) if values else None
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

    def pair_objects(self, left: Schema, right: Schema, place: str, name: str) -> Schema | None:
        if "propertyNames" in left or "propertyNames" in right:
            raise Unsupported(place, name, "beside propertyNames is not supported")
        required = dict.fromkeys([*left.get("required", []), *right.get("required", [])])
        for side in (left, right):
            self.work.charge(place, len(side.get("properties", {})) + len(side.get("required", [])))
        properties: Schema = {}
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
        bounds = _pair_counts(left, right, "Properties", place, name)
        if bounds is None:
            return None
        forbidden = set(left.get("properties", {})) | set(right.get("properties", {}))
        if False in [schema for schema in more if isinstance(schema, bool)]:
            rest: Any = False
        elif forbidden - set(properties):
            raise Unsupported(place, name, "forbids a property beside others that are free, which is not supported")
        else:
            schemas = [{} if schema is True else schema for schema in more]
            rest = self.both(schemas[0], schemas[1], f"{place}/additionalProperties", name) or True
        return {
            "type": "object",
            **bounds,
            **({"properties": properties} if properties else {}),
            **({"required": list(required)} if required else {}),
            "additionalProperties": rest,
        }

    def pair_arrays(self, left: Schema, right: Schema, place: str, name: str) -> Schema | None:
        length = max(len(side.get("prefixItems", [])) for side in (left, right))

        def item(side: Schema, index: int) -> Any:
            prefix = side.get("prefixItems", [])
            return prefix[index] if index < len(prefix) else side.get("items", {})

        bounds = _pair_counts(left, right, "Items", place, name)
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
        is_closed = any(schema is False for schema in rest)
        items = False if is_closed else self.both(rest[0], rest[1], f"{place}/items", name)
        result = {"type": "array", **bounds, **({"prefixItems": prefix} if prefix else {})}
        return result if items == {} else {**result, "items": items}

    def holds(self, value: Any, schema: Schema, place: str, name: str, depth: int = 0) -> bool:
        """Whether a value obeys a rewritten schema."""
        self.work.charge(place, 3)
        if depth > MOST_DEPTH:
            raise Unsupported(place, name, "beside a schema that contains itself is not supported")
        schema = self.resolved(schema, place, name)
        if not schema:
            return True
        if "anyOf" in schema:
            return any(self.holds(value, variant, place, name, depth + 1) for variant in schema["anyOf"])
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
            for key, member in value.items():
                part = schema.get("properties", {}).get(key, schema["additionalProperties"])
                fits = fits and part is not False and (part is True or self.holds(member, part, place, name, depth + 1))
            return fits and _in_bounds(len(value), schema, "minProperties", "maxProperties")
        if schema["type"] == "array":
            self.work.charge(place, len(value))
            prefix = schema.get("prefixItems", [])
            rest = schema.get("items", {})
            parts = [prefix[index] if index < len(prefix) else rest for index in range(len(value))]
            fits = all(
                part is not False and self.holds(item, part, place, name, depth + 1)
                for item, part in zip(value, parts, strict=True)
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

    def types(self, keywords: Keywords, place: str) -> list[str]:
        type_ = keywords.get("type", list(TYPES))
        kinds = [type_] if isinstance(type_, str) else type_
        if isinstance(kinds, list):
            self.work.charge(place, len(kinds))
        if not isinstance(kinds, list) or not kinds or any(kind not in [*KEYWORDS] for kind in kinds):
            raise Unsupported(place, "type", f"is {quote(type_)}; it must be one or some of {', '.join(KEYWORDS)}")
        return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]

    def typed(self, keywords: Keywords, place: str, depth: int) -> Schema:
        kinds = self.types(keywords, place)
        if not any(name in HONOURED for name in keywords) and "type" not in keywords:
            return {}
        if "type" not in keywords:  # then a format is an annotation
            keywords = {name: value for name, value in keywords.items() if name != "format"}
        if keywords.get("multipleOf", 1) != 1:  # supported for whole numbers only
            kinds = ["integer" if kind == "number" else kind for kind in kinds]
        return self.any_of([self.variant(kind, keywords, place, depth) for kind in kinds], place)

    def variant(self, kind: str, keywords: Keywords, place: str, depth: int) -> Schema:
        self.work.charge(place, 2)
        keywords = {name: keywords[name] for name in KEYWORDS[kind] if name in keywords}
        if kind in ("integer", "number"):
            return {"type": kind, **self.number(keywords, place, kind)}
        if kind in ("boolean", "null"):
            return {"type": kind}
        check = {"object": self.object, "array": self.array, "string": self.string}[kind]
        return {"type": kind, **check(keywords, place, depth)}

    def object(self, keywords: Keywords, place: str, depth: int) -> Schema:
        properties = keywords.get("properties", {})
        required = keywords.get("required", [])
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
        more = keywords.get("additionalProperties", True)
        if not isinstance(more, bool):
            more = self.visit(more, f"{place}/additionalProperties", depth + 1)
        for name in dict.fromkeys(required):
            if name not in visited and more is False:
                raise Unsupported(place, "required", f"names {quote(name)}, which additionalProperties forbids")
            if name not in visited:
                visited[name] = {} if more is True else more
        result = _counts(keywords, place, "Properties")
        if "propertyNames" in keywords:
            if visited or "additionalProperties" in keywords or result:
                raise Unsupported(place, "propertyNames", "beside other keywords is not supported")
            result["propertyNames"] = self.names_of(keywords["propertyNames"], place, depth)
        if visited:
            result["properties"] = visited
        if required:
            result["required"] = list(dict.fromkeys(required))
        result["additionalProperties"] = more
        return result

    def names_of(self, schema: Any, place: str, depth: int) -> Schema:
        """Returns the schema of names, which are strings."""
        place = f"{place}/propertyNames"
        result = self.both({"type": "string"}, self.visit(schema, place, depth + 1), place, "propertyNames")
        if "anyOf" in result:
            raise Unsupported(place, "anyOf")
        return result

    def array(self, keywords: Keywords, place: str, depth: int) -> Schema:
        result = _counts(keywords, place, "Items")
        prefix = keywords.get("prefixItems", [])
        items = keywords.get("items", True)
        if not isinstance(prefix, list):
            raise Unsupported(place, "prefixItems", "must be a list of schemas")
        if prefix:
            result["prefixItems"] = [
                self.visit(schema, f"{place}/prefixItems/{index}", depth + 1) for index, schema in enumerate(prefix)
            ]
        if items is not True:
            result["items"] = False if items is False else self.visit(items, f"{place}/items", depth + 1)
        return result

    def string(self, keywords: Keywords, place: str, depth: int) -> Schema:
        result = {**keywords, **_counts(keywords, place, "Length")}
        if "format" in keywords and keywords["format"] not in [*FORMATS]:
            raise Unsupported(place, "format", f"{quote(keywords['format'])} is not supported")
        kinds = [name for name in ("pattern", "format") if name in keywords]
        if len(kinds) > 1 or (kinds and len(keywords) > 1):
            other = next(name for name in keywords if name != kinds[0])
            raise Unsupported(place, kinds[0], f"beside {other} is not supported")
        if "pattern" in keywords:
            if isinstance(keywords["pattern"], str):
                self.work.charge(place, len(keywords["pattern"]) // CHARS_OF_STEP)
            result["pattern"] = whole(keywords["pattern"], place)
        return result

    def number(self, keywords: Keywords, place: str, kind: str) -> Schema:
        for name, value in keywords.items():
            check_number(value, place, name)
            if name != "multipleOf":
                check_bound(value, kind, place, name)
        factor = keywords.get("multipleOf", 1)
        if factor != int(factor) or factor <= 0 or factor > MOST_FACTOR:
            remedy = f"whole numbers from 1 to {MOST_FACTOR} are supported"
            raise Unsupported(place, "multipleOf", f"is {quote(factor)}; {remedy}")
        if factor != 1 and len(keywords) > 1:
            other = next(name for name in keywords if name != "multipleOf")
            raise Unsupported(place, "multipleOf", f"beside {other} is not supported")
        return {**keywords, **({"multipleOf": int(factor)} if "multipleOf" in keywords else {})}

    def definition(self, pointer: Any, place: str, depth: int) -> str:
        """Returns the name of the definition that a reference points to."""
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
            self.definitions[name] = None  # in progress
            self.definitions[name] = self.visit(target, pointer[1:], depth + 1)
        return self.names[pointer]


def _pair_counts(left: Schema, right: Schema, kind: str, place: str, name: str) -> Schema | None:
    """Returns the narrower bounds of a number of `kind`, Items or Properties; None if they exclude every number."""
    keys = (f"min{kind}", f"max{kind}")
    ends = [{key: side[key] for key in keys if key in side} for side in (left, right)]
    return _pair_bounds(ends[0], ends[1], place, name)


def _pair_bounds(left: Schema, right: Schema, place: str, name: str) -> Schema | None:
    """Returns the narrower bounds; None if they exclude every value. Other keywords must be equal, or on one side
    only."""
    bounds = {**left, **right}
    for key in left.keys() & right.keys():
        lower = key.lower()
        if "min" in lower:
            bounds[key] = max(left[key], right[key])
        elif "max" in lower:
            bounds[key] = min(left[key], right[key])
        elif left[key] != right[key]:
            raise Unsupported(place, name, f"of two schemas with {key} is not supported")
    for key in ("pattern", "format", "multipleOf"):
        if key in bounds and len(bounds.keys() - {"type", key}):
            raise Unsupported(place, name, f"of schemas with {key} and others is not supported")
    for counted in ("Items", "Length", "Properties"):
        if bounds.get(f"min{counted}", 0) > bounds.get(f"max{counted}", math.inf):
            return None
    if bounds.get("minimum", -math.inf) > bounds.get("maximum", math.inf):
        return None
    return bounds


def _in_bounds(number: float, schema: Schema, low: str, high: str) -> bool:
    return bool(schema.get(low, -math.inf) <= number <= schema.get(high, math.inf))


def canonical(value: Any, place: str, name: str, work: Work) -> str:
    """Returns a JSON text that is the same for equal values: 1 and 1.0, members in any order, but not 1 and true.
    Raises Unsupported for values that cannot be written."""
    return json.dumps(_plain(value, place, name, work, 0), sort_keys=True)


def _plain(value: Any, place: str, name: str, work: Work, depth: int) -> Any:
    work.charge(place, 1 + (len(value) // CHARS_OF_STEP if isinstance(value, str) else 0))
    if depth > MOST_DEPTH:
        raise Unsupported(place, name, f"has a value that nests deeper than {MOST_DEPTH} levels")
    if isinstance(value, str):
        check_text(value, place, name)
    elif isinstance(value, list):
        return [_plain(item, place, name, work, depth + 1) for item in value]
    elif isinstance(value, Mapping):
        return {
            _plain(key, place, name, work, depth): _plain(member, place, name, work, depth + 1)
            for key, member in value.items()
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


def _with_evaluated(keywords: Schema) -> Schema:
    """Replaces `unevaluated...` by `items` and `additionalProperties`, which mean the same unless another keyword
    applies schemas."""
    if any(name in keywords for name in APPLICATORS):
        return keywords
    for name, plain in (("unevaluatedItems", "items"), ("unevaluatedProperties", "additionalProperties")):
        if name in keywords:
            keywords = {key: value for key, value in {plain: keywords[name], **keywords}.items() if key != name}
    return keywords


def _allows_everything(schema: Any) -> bool:
    return schema is True or schema == {}  # 1 equals True in Python, and is no schema


def _without_effect(keywords: Schema, place: str) -> Schema:
    """Removes keywords that have no effect."""
    idle: dict[str, bool] = {
        "$id": place == "",
        "uniqueItems": keywords.get("uniqueItems") is False,
        "unevaluatedItems": _allows_everything(keywords.get("unevaluatedItems")),
        "unevaluatedProperties": _allows_everything(keywords.get("unevaluatedProperties")),
        "propertyNames": _allows_everything(keywords.get("propertyNames")),
        "patternProperties": keywords.get("patternProperties") == {},
        "dependentRequired": keywords.get("dependentRequired") == {},
        "dependentSchemas": keywords.get("dependentSchemas") == {},
        "not": keywords.get("not") is False,
        "minContains": "contains" not in keywords,
        "maxContains": "contains" not in keywords,
        "if": "then" not in keywords and "else" not in keywords,
        "then": "if" not in keywords,
        "else": "if" not in keywords,
        "minProperties": keywords.get("minProperties") == 0 and keywords["minProperties"] is not False,
    }
    return {name: value for name, value in keywords.items() if not idle.get(name, False)}


def whole(pattern: Any, place: str = "") -> str:
    """Returns a pattern that matches whole strings in which `pattern` matches somewhere. Raises Unsupported for anchors
    inside the pattern."""
    if not isinstance(pattern, str):
        raise Unsupported(place, "pattern", "must be a text")
    pattern = with_long_escapes(pattern)
    check_text(pattern, place, "pattern")
    parts = parts_of(pattern)
    fault = fault_of(parts)
    if fault:
        raise Unsupported(place, "pattern", f"has {fault}")
    starts = parts[:1] == ["^"]
    ends = parts[-1:] == ["$"]
    body = parts[starts : len(parts) - ends]
    if not {"^", "$"}.isdisjoint(body) or ("(", "?") in pairwise(body):
        raise Unsupported(place, "pattern", "with anchors inside, or with lookaround, is not supported")
    depths = accumulate((part[0] == "(") - (part == ")") for part in body)
    if (starts or ends) and ("|", 0) in zip(body, depths, strict=True):
        raise Unsupported(place, "pattern", "with an anchor in one alternative is not supported; put all into brackets")
    return ("" if starts else ANYTHING) + f"({''.join(body)})" + ("" if ends else ANYTHING)


def _counts(keywords: Keywords, place: str, kind: str) -> Schema:
    """Returns the bounds of a number of `kind`: Items, Length or Properties."""
    counts = {}
    for name in (f"min{kind}", f"max{kind}"):
        if name in keywords:
            value = keywords[name]
            check_number(value, place, name)
            if value != int(value) or value < 0:
                raise Unsupported(place, name, "must be a whole number from 0 up")
            if value > MOST_COUNT:
                raise Unsupported(place, name, f"is {quote(value)}; at most {MOST_COUNT} is supported")
            counts[name] = int(value)
    return counts


def _is(value: Any, kind: str) -> bool:
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int | float) and math.isfinite(value) and value == int(value)
    classes = {"object": Mapping, "array": list, "string": str, "number": int | float, "null": type(None)}
    return isinstance(value, classes[kind])
