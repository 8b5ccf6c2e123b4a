"""Which JSON Schemas (draft 2020-12) can be served, rewritten so that the grammar library takes them at their word.

The library ignores some keywords, and reads others only beside a `type`. So a schema is rewritten into one that names
the type of everything, and whatever would not be honoured is refused by its name. Imports no library.
"""

import re
from collections.abc import Mapping
from typing import Any

TYPES = ("object", "array", "string", "number", "boolean", "null")
ANNOTATIONS = {
    *("$schema", "$comment", "$vocabulary", "$defs", "definitions", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"),
}
KEYWORDS = {  # by type: those that the library honours
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "boolean": (),
    "null": (),
}
UNIONS = ("anyOf", "oneOf", "allOf", "enum", "const", "$ref")
HONOURED = frozenset(keyword for own in KEYWORDS.values() for keyword in own)
FORMATS = {
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("json-pointer", "relative-json-pointer"),
}
ANYTHING = r"(.|\n)*"  # as a pattern
MOST_DEPTH = 64
MOST_COUNT = 10_000  # of items or characters that a bound may name


class Unsupported(ValueError):
    """`keyword` at `place`, a JSON pointer, cannot be served."""

    def __init__(self, place: str, keyword: str, reason: str = "is not supported") -> None:
        super().__init__(f"{keyword} at {place or 'the root'} {reason}")
        self.place, self.keyword = place, keyword


def rewrite(schema: Any) -> Any:
    """A schema that means the same. Raises Unsupported naming a keyword that would not be honoured."""
    if not isinstance(schema, Mapping | bool):
        raise Unsupported("", "the schema", "must be an object, true or false")
    return _Rewriter(schema).run()


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self.root = root
        self.names: dict[str, str] = {}  # by pointer: names of definitions in the result
        self.definitions: dict[str, Any] = {}

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
        own = _without_effect(own, place)
        for name in own:
            if name not in HONOURED and name not in UNIONS and name != "type":
                raise Unsupported(place, name)
        unions = [name for name in UNIONS if name in own]
        if unions:
            return self.union(own, unions, place, depth)
        return self.typed(own, place, depth)

    def union(self, own: Mapping[str, Any], unions: list[str], place: str, depth: int) -> dict[str, Any]:
        """A schema that chooses among others, or among values."""
        [name, *more] = unions
        others = [other for other in own if other not in (name, "type")]
        if more or (others and name not in ("const", "enum")):
            raise Unsupported(place, name, f"beside {(more + others)[0]} is not supported")
        if name == "$ref":
            if "type" in own:
                raise Unsupported(place, "$ref", "beside type is not supported")
            return {"$ref": f"#/$defs/{self.definition(own['$ref'], place, depth)}"}
        if name in ("const", "enum"):
            values = [own["const"]] if name == "const" else own["enum"]
            if others:
                raise Unsupported(place, name, f"beside {others[0]} is not supported")
            if not isinstance(values, list) or not values:
                raise Unsupported(place, name, "must be a list of values, and not empty")
            types = self.types(own, place)
            kept = [value for value in values if any(_is(value, kind) for kind in types)]
            if not kept:
                raise Unsupported(place, name, "has no value of the schema's type")
            return {"enum": kept}
        branches = own[name]
        if not isinstance(branches, list) or not branches:
            raise Unsupported(place, name, "must be a list of schemas, and not empty")
        if "type" in own:
            branches = [self.narrow(branch, own["type"], f"{place}/{name}", name) for branch in branches]
        if name != "allOf" and any(branch is not False for branch in branches):
            branches = [branch for branch in branches if branch is not False]
        visited = [self.visit(branch, f"{place}/{name}/{i}", depth + 1) for i, branch in enumerate(branches)]
        if name == "allOf" and len(visited) > 1:
            raise Unsupported(place, "allOf", "of several schemas is not supported")
        if name == "oneOf" and not _are_disjoint(visited):
            raise Unsupported(place, "oneOf", "of schemas that may overlap is not supported; use anyOf")
        return visited[0] if len(visited) == 1 else {"anyOf": visited}

    def narrow(self, branch: Any, kind: Any, place: str, name: str) -> Any:
        """A branch beside a type: it must hold for it as well."""
        if isinstance(branch, Mapping) and "type" not in branch and not any(one in branch for one in UNIONS):
            return {**branch, "type": kind}
        if isinstance(branch, Mapping) and branch.get("type") == kind:
            return branch
        raise Unsupported(place, name, "beside type is not supported")

    def types(self, own: Mapping[str, Any], place: str) -> list[str]:
        asked = own.get("type", list(TYPES))
        kinds = [asked] if isinstance(asked, str) else asked
        if not isinstance(kinds, list) or not kinds or any(kind not in KEYWORDS for kind in kinds):
            raise Unsupported(place, "type", f"is {asked!r}; it must be one or some of {', '.join(KEYWORDS)}")
        return [kind for kind in dict.fromkeys(kinds) if kind != "integer" or "number" not in kinds]

    def typed(self, own: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        kinds = self.types(own, place)
        if not any(name in HONOURED for name in own) and "type" not in own:
            return {}
        # Without a type a format is an annotation; who names the type wants it to be kept.
        given = own if "type" in own else {name: value for name, value in own.items() if name != "format"}
        variants = [self.variant(kind, given, place, depth) for kind in kinds]
        return variants[0] if len(variants) == 1 else {"anyOf": variants}

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
                raise Unsupported(place, "properties", f"names {name!r}: quotes, backslashes and control characters")
        for name in dict.fromkeys(required):
            if name not in visited:
                raise Unsupported(place, "required", f"names {name!r}, which is not among the properties")
        found: dict[str, Any] = {}
        if properties:
            found["properties"] = visited
        if required:
            found["required"] = list(dict.fromkeys(required))
        more = own.get("additionalProperties", True)
        found["additionalProperties"] = (
            more if isinstance(more, bool) else self.visit(more, f"{place}/additionalProperties", depth + 1)
        )
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
        if "format" in own and own["format"] not in FORMATS:
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
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise Unsupported(place, name, "must be a number")
        return dict(own)

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
            self.definitions[name] = {}
            self.definitions[name] = self.visit(target, pointer[1:], depth + 1)
        return self.names[pointer]


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
    if "^" in inner or "$" in inner or "(?" in inner or ((starts or ends) and "|" in re.sub(r"\(.*\)", "", inner)):
        raise Unsupported(place, "pattern", "with anchors inside, or with lookaround, is not supported")
    own = pattern[starts : len(pattern) - ends]
    return ("" if starts else ANYTHING) + f"({own})" + ("" if ends else ANYTHING)


def _count(value: Any, place: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise Unsupported(place, name, "must be a whole number from 0 up")
    if value > MOST_COUNT:
        raise Unsupported(place, name, f"is {value}; at most {MOST_COUNT} is supported")
    return int(value)


def _is(value: Any, kind: str) -> bool:
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int | float) and value == int(value)
    classes = {"object": Mapping, "array": list, "string": str, "number": int | float, "null": type(None)}
    return isinstance(value, classes[kind])


def _are_disjoint(branches: list[dict[str, Any]]) -> bool:
    """Whether no value can hold for two rewritten schemas, by their types alone."""
    seen: set[str] = set()
    for branch in branches:
        kinds = _kinds(branch)
        if kinds is None or kinds & seen:
            return False
        seen |= kinds
    return True


def _kinds(branch: dict[str, Any]) -> set[str] | None:
    """Types of the values that a rewritten schema may hold for; None: not known."""
    if "type" in branch:
        return {"number" if branch["type"] == "integer" else branch["type"]}
    if "enum" in branch:
        return {kind for value in branch["enum"] for kind in TYPES if _is(value, kind)}
    found: set[str] = set()
    for one in branch.get("anyOf", []):
        kinds = _kinds(one)
        if kinds is None:
            return None
        found |= kinds
    return found or None
