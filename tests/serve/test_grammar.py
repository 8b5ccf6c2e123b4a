"""Structured output: the official JSON Schema tests under the mask, and answers of an engine with every drafter."""

import contextlib
import gzip
import itertools
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, reduce
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from slipstream.serve import logs
from slipstream.serve.engine import process
from slipstream.serve.grammar import grammars as grammars_module
from slipstream.serve.grammar.grammars import NO_TEXT, Grammars, Matcher, as_element, compile_with, translate
from slipstream.serve.grammar.json_schema import KEYWORDS, TYPES, UNIONS, rewrite, whole
from slipstream.serve.grammar.spelling import Spelling
from slipstream.serve.grammar.strings import FORMATS
from slipstream.serve.grammar.work import Unsupported
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Grammar, Request, SamplingParams
from slipstream.tests.pairwise import gate_of, some_of
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import Build, Tokens, engines_of, make_request, plain_answers, run, tokens_of
from slipstream.tests.serve.played_graphs import ATTENTION, play
from slipstream.tests.sources import TINY
from slipstream.tests.tables import each_case, table_of
from slipstream.tests.user_errors import user_error

SUITE = Path(__file__).parent / "data" / "json_schema_suite.jsonl.gz"  # draft 2020-12, MIT, licence beside it
END = 256  # after one token for each byte
PERSON = table_of(__file__, "person")


def structural_tag(element: dict[str, Any]) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": element}))


class Bytes:
    """A compiler for a vocabulary of bytes."""

    def __init__(self):
        vocabulary = [bytes([byte]) for byte in range(256)] + [NO_TEXT]
        info = xgrammar.TokenizerInfo(
            vocabulary, vocab_type=xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END]
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self.spelling = Spelling(None, vocabulary)

    def compile(self, schema: Any) -> Any:
        return compile_with(self.compiler, Grammar("json_schema", json.dumps(schema)))

    def matcher(self, compiled: Any) -> Matcher:
        return Matcher(xgrammar.GrammarMatcher(compiled), [END], END + 1, END + 1, self.spelling)

    def takes(self, compiled: Any, text: str) -> bool:
        matcher = self.matcher(compiled)
        for token in [*text.encode(), END]:
            is_allowed = token in allowed_after(matcher)
            assert matcher.push([token]) == is_allowed, "the mask says something else"
            if not is_allowed:
                return False
        return matcher.is_over

    def write(self, compiled: Any, rng: random.Random, limit: int = 600) -> str | None:
        """A text at random under the mask, mostly short; None if it does not end in time."""
        matcher = self.matcher(compiled)
        text = []
        while len(text) < limit:
            allowed = allowed_after(matcher)
            visible = [token for token in allowed if ord(" ") < token < 127 or token == END] or allowed
            [token] = rng.choices(visible, [LIKELY.get(token, 1.0) for token in visible])
            assert matcher.push([token])
            if token == END:
                return bytes(text).decode()
            text.append(token)
        return None


LIKELY = {ord('"'): 30.0, ord("}"): 20.0, ord("]"): 20.0, END: 200.0, ord(","): 0.3}


def allowed_after(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.allowed([0], [-1]).view(np.uint8), bitorder="little")[: END + 1]
    return np.flatnonzero(bits).tolist()


def written(value: Any) -> Iterator[str]:
    """Texts of a value: members in every order, since a schema fixes one, and whole numbers without a fraction."""
    if isinstance(value, dict) and len(value) < 6:
        for members in itertools.permutations(value.items()):
            yield json.dumps(plain(dict(members)), separators=(",", ":"), ensure_ascii=False)
    else:
        yield json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


def test_official_schemas_are_served_as_they_are_meant_or_refused_by_name():
    """A served schema admits every valid value and no invalid one."""
    served = Counter()
    refused = Counter()
    compiler = Bytes()
    with gzip.open(SUITE, "rt") as lines:
        cases = [json.loads(line) for line in lines]
    for case in cases:
        try:
            compiled = compiler.compile(case["schema"])
        except ValueError:
            refused[case["keyword"]] += 1
            continue
        served[case["keyword"]] += 1
        for test in case["tests"]:
            is_served = any(compiler.takes(compiled, text) for text in written(test["data"]))
            assert is_served == test["valid"], (case["keyword"], case["description"], test)
    assert served.total() >= 201
    assert served.total() + refused.total() == 383


@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(120, 600), marks=pytest.mark.slow)])
def test_schemas_that_users_send_are_served_and_every_text_under_the_mask_is_valid(seeds):
    compiler = Bytes()
    ended = 0
    formats = jsonschema.FormatChecker(["email", "date", "ipv4", "ipv6", "uuid"])
    for seed in seeds:
        rng = random.Random(seed)
        schema = user_schema(rng)
        compiled = compiler.compile(schema)
        validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
        text = compiler.write(compiled, rng)
        if text is not None:
            validator.validate(json.loads(text))
            ended += 1
    assert ended > 0.93 * len(seeds)


NAMES = ["name", "title", "city", "email", "age", "price", "tags", "status", "kind", "note", "id", "url", "when", "é"]


def nested(depth: int) -> Any:
    return [] if depth == 0 else [nested(depth - 1)]


def user_schema(rng: random.Random) -> dict[str, Any]:
    """An object of the kind that functions and pydantic classes have."""
    definitions = {}
    if rng.random() < 0.4:
        following = {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
        node = {"type": "object", "properties": {"value": scalar(rng), "next": following}, "required": ["value"]}
        definitions["Node"] = {**node, "additionalProperties": False}
    if rng.random() < 0.3:
        definitions["Item"] = object_schema(rng, 1, {})
    schema = object_schema(rng, rng.randrange(1, 4), definitions)
    if definitions:
        schema["$defs"] = definitions
        name = rng.choice(sorted(definitions))
        schema["properties"]["ref"] = {"allOf": [{"$ref": f"#/$defs/{name}"}], "description": "with a text"}
        schema["properties"]["kept"] = {"$ref": f"#/$defs/{name}", "type": "object", "description": "and a type"}
    return schema


def object_schema(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    names = rng.sample(NAMES, 4)
    names = names[: rng.randrange(1, 5)]
    schema = {"type": "object", "title": "O"}
    schema["properties"] = {name: any_schema(rng, depth - 1, definitions) for name in names}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    return schema | ({"additionalProperties": False} if rng.random() < 0.7 else {})


def any_schema(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    kind = rng.random()
    if depth <= 0 or kind < 0.35:
        return scalar(rng)
    if kind < 0.6:
        return object_schema(rng, depth, definitions)
    if kind < 0.8:
        bounds = rng.choice([{}, {"minItems": 1}, {"maxItems": 3}, {"minItems": 1, "maxItems": 2}])
        return {"type": "array", "items": any_schema(rng, depth - 1, definitions), **bounds}
    if kind < 0.88:
        return {"anyOf": [any_schema(rng, depth - 1, definitions), {"type": "null"}]}
    if kind < 0.93 and definitions:
        return {"$ref": "#/$defs/" + rng.choice(sorted(definitions))}
    if kind < 0.97:
        branch = {"type": "object", "required": ["kind"], "additionalProperties": False}
        branches = [{**branch, "properties": {"kind": {"const": name}, "v": scalar(rng)}} for name in ("p", "q")]
        return {"oneOf": branches, "discriminator": {"propertyName": "kind"}}
    return {"type": "object", "additionalProperties": scalar(rng)}


def scalar(rng: random.Random) -> dict[str, Any]:
    formats = ["email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"]
    kinds = [
        {"type": "string", "description": "text"},
        {"type": "string", "minLength": 1, "maxLength": rng.choice([5, 40])},
        {"type": "string", "enum": ["red", "green", "x y", "é"]},
        {"type": "integer"},
        {"type": "integer", "minimum": 0, "maximum": rng.choice([5, 120])},
        {"type": "integer", "multipleOf": 5},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "minimum": -1.5, "maximum": 2.5},
        {"type": "boolean"},
        {"type": "null"},
        {"const": rng.choice(["a", 1, True])},
        {"type": "string", "format": rng.choice(formats)},
        {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]{3}$", "^\\d{5}(-\\d{4})?$", "[a-z]+", "^(a|b)c*$"])},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "T"},
    ]
    return rng.choice(kinds)


@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_a_format_are_those_of_its_pattern(name):
    """Also texts near the bounds of its parts and of their number, and after one change anywhere."""
    rights, wrongs = (texts.split() for texts in table_of(__file__, "formats")[name])
    compiler = Bytes()
    compiled = compiler.compile({"type": "string", "format": name})
    rng = random.Random(name)
    texts = [*rights, *wrongs]
    for count in (63, 64, 65):
        texts += [text.replace(part, part[0] * count, 1) for text in texts[:3] for part in re.findall(r"\w+", text)[:3]]
    for count in (8, 9, 10):
        texts += [text.replace(".", ".x" * count + ".", 1) for text in texts[:3]]
    for text in texts[:]:
        for _ in range(5):
            place = rng.randrange(len(text) + 1)
            texts.append(
                text[:place] + rng.choice(["", ".", "-", "@", "a", "%", "0", ":"]) + text[place + rng.randrange(2) :]
            )
    verdicts = [re.fullmatch(FORMATS[name], text) is not None for text in texts]
    assert all(verdicts[: len(rights)])
    assert not any(verdicts[len(rights) :][: len(wrongs)])
    for text, is_right in zip(texts, verdicts, strict=True):
        assert compiler.takes(compiled, json.dumps(text)) == is_right, text


@pytest.mark.parametrize("text", ['a"b\\c', "\n\t\x01\x7f", "é👍", "</script>"])
def test_strings_may_hold_any_character(text):
    compiler = Bytes()
    for schema in ({"type": "string"}, {"type": "string", "maxLength": len(text)}, {"const": text}):
        compiled = compiler.compile(schema)
        assert compiler.takes(compiled, json.dumps(text, ensure_ascii=False)) or "\x7f" in text
        assert not compiler.takes(compiled, f'"{text}"') or json.dumps(text, ensure_ascii=False) == f'"{text}"'
    short = compiler.compile({"type": "string", "maxLength": len(text) - 1})
    assert not compiler.takes(short, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize("bounds", [(0, 0), (1, None), (0, 129)])
def test_lengths_of_strings_count_characters(bounds):
    min_length, max_length = bounds
    schema = {"type": "string", "minLength": min_length} | ({} if max_length is None else {"maxLength": max_length})
    compiler = Bytes()
    compiled = compiler.compile(schema)
    near = {max(0, edge + step) for edge in (min_length, max_length or 0, 127, 256) for step in (-1, 0, 1)}
    for character in ("a", '\\"', "\\u00e9", "é"):
        lengths = {length for length in near if compiler.takes(compiled, f'"{character * length}"')}
        assert lengths == {
            length for length in near if length >= min_length and (max_length is None or length <= max_length)
        }


@each_case(
    ({"enum": [nested(80)]}, '"enum" at the root has a value that nests deeper than 64 levels'),
    ({"type": "integer", "minimum": 10**400}, f"at the root is 1{'0' * 59}…, which is beyond 64 bits; choose one"),
    (
        {"type": "string", "maxLength": 10**400},
        f'"maxLength" at the root is 1{"0" * 59}…; at most 10000 is supported',
    ),
    ({"type": "array", "minItems": 10**400}, f'"minItems" at the root is 1{"0" * 59}…; at most 10000 is supported'),
    ({"type": "integer", "multipleOf": 10**400}, f"at the root is 1{'0' * 59}…; whole numbers from 1 to 1000 are"),
    ({"enum": ["a\ud800"]}, '"enum" at the root has a text with half of a surrogate pair'),
    ({"properties": {"a": {"const": {"\udfff": 1}}}}, '"const" at /properties/a has a text with half of a surr'),
    ({"properties": {"\ud800": {"not": {}}}}, '"properties" at the root has a text with half of a surrogate pair'),
    ({"required": ["\ud800"]}, '"required" at the root has a text with half of a surrogate pair'),
    ({"pattern": "a\udc00"}, '"pattern" at the root has a text with half of a surrogate pair'),
    ({"a\ud800": 1}, '"a\\ud800" at the root is not supported'),
    (reduce(lambda inner, _: {"items": inner}, range(100), {}), "nests deeper than 64 levels"),
)
def test_what_is_refused_is_named(schema, message):
    with pytest.raises(Unsupported, match=re.escape(message)):
        rewrite(schema)


EDGES = [sign * (2**power + step) for sign in (-1, 1) for power in (53, 63, 64) for step in (-1025, -1024, -1, 0, 1)]
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
BOUNDED = [(kind, name) for kind in ("number", "integer") for name in (*BOUNDS, "const")]
BOUNDED += [("string", "maxLength"), ("array", "minItems"), ("object", "maxProperties")]


@pytest.mark.parametrize(("kind", "name"), BOUNDED)
@settings(max_examples=60, deadline=None)
@given(value=st.sampled_from(EDGES) | st.integers(-(2**70), 2**70))
def test_what_a_refusal_of_a_number_proposes_is_accepted(kind, name, value):
    try:
        rewrite({"type": kind, name: value})
    except Unsupported as error:
        _, _, remedy = str(error).partition("; ")
        for proposal in re.findall("-?[0-9]+", remedy):
            rewrite({"type": kind, name: int(proposal)})


def test_two_schemas_that_contain_themselves_are_not_intersected_without_end():
    nodes = {
        name: {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/{name}"} for side in ("left", "right")},
            bound: 3,
        }
        for name, bound in (("a", "maxProperties"), ("b", "minProperties"))
    }
    with pytest.raises(Unsupported, match="two that contain themselves, is not supported"):
        rewrite({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": nodes})
    same = rewrite({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": nodes})
    assert set(same) == {"$ref", "$defs"}


def test_members_come_in_the_order_of_the_schema():
    """Where several schemas apply, the first one's order counts; members of a constant keep theirs, and are equal in
    any order."""
    compiler = Bytes()
    member = {"const": 1}
    for schema in (
        {"type": "object", "properties": {"b": member, "a": member}, "required": ["a", "b"]},
        {
            "type": "object",
            "properties": {"b": member},
            "allOf": [{"properties": {"a": member}, "required": ["a", "b"]}],
        },
        {"const": {"b": 1, "a": 1}},
    ):
        compiled = compiler.compile(schema)
        assert compiler.takes(compiled, '{"b":1,"a":1}')
        assert not compiler.takes(compiled, '{"a":1,"b":1}')
    values = [{"b": 1, "a": 1}, 2]
    assert rewrite({"enum": values, "anyOf": [{"const": {"a": 1, "b": 1}}]}) == {"enum": values[:1]}


def test_names_of_properties_are_no_keywords():
    """And texts of values are nothing but that."""
    names = ("enum", "required", "properties", "type", "pattern", "$ref", "items")
    kinds = {name: {"type": "string", "maxLength": 2} for name in names}
    compiler = Bytes()
    compiled = compiler.compile({"type": "object", "properties": kinds, "additionalProperties": False})
    for name in names:
        assert compiler.takes(compiled, json.dumps({name: 'a"'}, separators=(",", ":")))
        assert not compiler.takes(compiled, json.dumps({name: "abc"}, separators=(",", ":")))
    value = {"pattern": "(", "CHARACTER": "string_0", "type": "string", "maxLength": 2}
    compiled = compiler.compile({"type": "array", "items": {"enum": [value]}})
    assert compiler.takes(compiled, json.dumps([value], separators=(",", ":")))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**30)
    | st.floats()
    | st.sampled_from(["a", "#", "#/$defs/a", "email"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*TYPES, *KEYWORDS["object"], *KEYWORDS["array"], *KEYWORDS["string"], *UNIONS, "type"])
            | st.sampled_from([*KEYWORDS["number"], "$defs", "not", "if", "unevaluatedItems", "a", "$id"]),
            inner | st.sampled_from([*KEYWORDS]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(schema=JSON)
def test_any_json_is_served_or_refused_with_a_sentence(schema):
    with contextlib.suppress(ValueError):
        translate(Grammar("json_schema", json.dumps(schema)))


@each_case()
def test_patterns_match_anywhere_but_where_they_are_anchored(pattern):
    rng = random.Random(pattern)
    oracle = re.sub(r"(?<!\\)\$$", r"\\Z", pattern)  # Python's $ also matches before a last line break
    for _ in range(300):
        text = "".join(rng.choices("abcx$^\n", k=rng.randrange(5)))
        assert bool(re.fullmatch(whole(pattern), text)) == bool(re.search(oracle, text)), text


def check_taken(pattern: str, oracle: str, characters: str, longest: int):
    """Compares the strings that a schema's pattern takes with those that `oracle` matches whole."""
    compiler = Bytes()
    compiled = compiler.compile({"type": "string", "pattern": pattern})
    for size in range(longest + 1):
        for letters in itertools.product(characters, repeat=size):
            text = "".join(letters)
            is_taken = re.fullmatch(oracle, text) is not None
            assert compiler.takes(compiled, json.dumps(text)) == is_taken, text


@each_case()
def test_patterns_take_whole_strings_as_re_does(pattern):
    check_taken(pattern, pattern, "abx", longest=4)


@each_case()
def test_patterns_that_name_what_json_escapes_take_it_as_re_does(pattern):
    check_taken(pattern, whole(pattern), 'a"\\\n', longest=3)


def test_anchors_at_the_edges_of_a_regex_and_classes_with_a_null_are_taken():
    compiler = Bytes()
    for regex in ("^a$", "^(?:^a|b$)$", "(^|,)a|(b$)", r"\$[$^]", "a$|^b", r"[\x00-\x1f]", r"\\0", "[^\\0]", ""):
        compiled = compile_with(compiler.compiler, Grammar("regex", regex))
        for text in ("a", "b", ",a", "$^", "\0", "\\0", "ab", ""):
            assert compiler.takes(compiled, text) == (re.fullmatch(regex, text) is not None), (regex, text)
    compiled = compile_with(compiler.compiler, Grammar("ebnf", 'root ::= [\\0-\\x1f] "\\\\0" # "\\0'))
    assert compiler.takes(compiled, "\0\\0")


@pytest.mark.parametrize("word", ["größe", "Entrée", "👍a", "漢b", "\x01f", "\x7fa", "\xa00"])
def test_a_character_ends_before_letters_that_may_be_digits(word):
    units = word.encode("utf-16-be")
    codes = [int.from_bytes(units[place : place + 2]) for place in range(0, len(units), 2)]
    escapes = "".join(f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in codes)
    kinds = {"choice": json.dumps([word]), "regex": escapes, "ebnf": f'root ::= "{escapes}"'}
    texts = {Grammar(*kind): word for kind in kinds.items()}
    if word.isprintable():
        schemas = [{"enum": [word]}, {"pattern": f"^{escapes}$"}, {"pattern": f"^{word}$"}]
        texts |= {Grammar("json_schema", json.dumps(schema)): f'"{word}"' for schema in schemas}
        members = {"properties": {word: schemas[0]}, "required": [word], "type": "object"}
        texts[Grammar("json_schema", json.dumps(members))] = f'{{"{word}":"{word}"}}'
    compiler = Bytes()
    for grammar, text in texts.items():
        for whole_grammar in (grammar, structural_tag(as_element(grammar))):
            assert compiler.takes(compile_with(compiler.compiler, whole_grammar), text), whole_grammar


@each_case(
    ["json_schema", "[" * 60_000, "cannot be used: maximum recursion depth exceeded"],
    ["json_schema", f'{{"enum": [{"1" * 5000}]}}', "cannot be used: Exceeds the limit"],
    ["regex", "a" * 70_000, "has 70000 characters; the limit is 65536"],
)
def test_wrong_grammars_are_refused_with_a_sentence(kind, text, message):
    with user_error(message) as caught:
        translate(Grammar(kind, text))
    assert "/project/" not in str(caught.value)


def test_a_refusal_without_a_reason_is_a_sentence(monkeypatch):
    def fail(_text):
        raise RuntimeError("[12:00:00] /project/cpp/grammar.cc:7: ")

    monkeypatch.setattr(xgrammar.Grammar, "from_regex", fail)
    with user_error("cannot be used: the grammar library fails with RuntimeError and gives no"):
        translate(Grammar("regex", "a"))


def spaced(space: str) -> str:
    """JSON with this white space wherever JSON may have some within an object."""
    return "{_'a'_:_1_,_'b'_:_[_true_,_{_'c'_:_null_}_]_}".replace("'", '"').replace("_", space)


LISTED = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array"}}, "required": ["a", "b"]}
LETTER = {"type": "json_schema", "json_schema": LISTED}
CALL = {"type": "tag", "begin": "<call>", "content": LETTER, "end": "</call>"}
VALUE = {"type": "object", "properties": {"x": LISTED}, "required": ["x"]}
XML = "<parameter=x>", "</parameter>"


@pytest.mark.parametrize(
    ("grammar", "before", "after", "min_spaces"),
    [
        (Grammar("json_object"), "", "", 0),
        (Grammar("json_schema", "{}"), "", "", 0),
        (Grammar("json_schema", json.dumps(LISTED)), "", "", 0),
        (structural_tag(LETTER), "", "", 0),
        (structural_tag(CALL), "<call>", "</call>", 0),
        (structural_tag({"type": "qwen_xml_parameter", "json_schema": VALUE}), *XML, 1),
        (structural_tag({"type": "json_schema", "style": "qwen_xml", "json_schema": VALUE}), *XML, 1),
    ],
)
@pytest.mark.parametrize("max_spaces", [0, 1, 3])
def test_json_has_no_more_white_space_than_is_allowed(grammar, before, after, min_spaces, max_spaces):
    vocabulary = Bytes()
    compiled = compile_with(vocabulary.compiler, translate(grammar, max_spaces))

    def takes(value):
        assert json.loads(value)
        return vocabulary.takes(compiled, before + value + after)

    max_spaces = max(max_spaces, min_spaces)
    for space in (" " * max_spaces, ("\n" + " " * max_spaces)[:max_spaces], ""):
        assert takes(spaced(space))
    compact = spaced("")
    assert takes('{"a": 1, "b": [true]}') == (max_spaces > 0)
    for place in [match.start() for match in re.finditer(r"(?<=[{\[:,])|(?=[}\]:,])", compact)][1:-1]:
        wide = compact[:place] + " " * (max_spaces + 1) + compact[place:]
        assert not takes(wide), wide


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    engine_grammars = Grammars(lambda: tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    yield engine_grammars
    engine_grammars.close()


def test_masks_of_a_tree_are_those_of_its_paths(grammars):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rng = random.Random(0)
    grammar = Grammar("regex", "[ab]{2,6}c*")
    end = tokenizer.eos_token_id
    grammars.compile(grammar).result()
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcx"]
    for _ in range(20):
        matcher = grammars.matcher(grammars.compile(grammar).result(), [end])
        tokens = [letters[0]]
        parents = [-1]
        assert matcher.push(tokens)
        for node in range(1, 8):
            parents.append(rng.randrange(node))
            tokens.append(rng.choice([*letters, end]))
        masks = matcher.allowed(tokens, parents)
        paths = [[letters[0]]]
        for node in range(1, 8):
            paths.append([*paths[parents[node]], tokens[node]])
        for node, path in enumerate(paths):
            alone = grammars.matcher(grammars.compile(grammar).result(), [end])
            is_taken = alone.push(path)
            if is_taken and end not in path:
                assert np.array_equal(masks[node], alone.allowed([path[-1]], [-1])[0])
            else:
                assert (masks[node] == 2**32 - 1).all(), "never accepted, so anything"


Times = Callable[[str], float]  # seconds of a call, by the name of the function


def stub_times(monkeypatch: pytest.MonkeyPatch, times: Times):
    """Lets the library's work take `times`."""

    def timed(work, *arguments):
        return work(*arguments), times(work.__name__)

    monkeypatch.setattr("slipstream.serve.grammar.grammars.timed", timed)


@each_case()
def test_nodes_are_given_up_where_masks_take_too_long(mask_times, num_masks, is_slow, is_cheap, grammars, monkeypatch):
    """Only the mask after the answer ends it. The last of `mask_times` lasts for all further masks."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    compiled = grammars.compile(Grammar("regex", "[a-z ]*")).result()
    tokens = tokenizer(" the quick brown fox jumps over the dog", add_special_tokens=False).input_ids
    parents = range(-1, len(tokens) - 1)
    right = grammars.matcher(compiled, [tokenizer.eos_token_id]).allowed(tokens, parents)
    times = itertools.chain(mask_times, itertools.repeat(mask_times[-1]))
    stub_times(monkeypatch, lambda name: 0.0 if name == "_follow" else next(times))
    matcher = grammars.matcher(compiled, [tokenizer.eos_token_id])
    masks = matcher.allowed(tokens, parents)
    assert (len(masks), matcher.is_slow, matcher.is_cheap) == (num_masks, is_slow, is_cheap)
    assert np.array_equal(masks, right[:num_masks])
    assert matcher.push(tokens[:1]), "the walk has gone back"
    stub_times(monkeypatch, lambda _: 0.001)
    for _ in range(60):
        matcher.allowed(tokens[:1], [-1])
    assert matcher.is_cheap, "drafts come again"


def test_a_slow_token_ends_an_answer(grammars, monkeypatch):
    """However many come at a time."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    compiled = grammars.compile(Grammar("regex", "[a-z ]*")).result()
    tokens = tokenizer(" the quick brown fox", add_special_tokens=False).input_ids
    stub_times(monkeypatch, lambda _: 0.2)
    matcher = grammars.matcher(compiled, [tokenizer.eos_token_id])
    assert matcher.push(tokens)
    assert not matcher.is_slow
    stub_times(monkeypatch, lambda _: 0.3)
    assert matcher.push(tokens)
    assert matcher.is_slow


@pytest.mark.parametrize(
    ("grammar", "may_end"),
    [
        (Grammar("regex", ".+"), False),
        (Grammar("regex", "[^ab]{0,9}"), True),
        (Grammar("regex", "<.spare_1.>"), False),
        (Grammar("choice", '["<|im_end|>"]'), False),
        (structural_tag({"type": "any_text"}), True),
    ],
)
def test_names_of_control_tokens_are_no_text(grammar, may_end, grammars):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    end = tokenizer.eos_token_id
    mask = grammars.matcher(grammars.compile(grammar).result(), [end]).allowed([0], [-1])
    allowed = {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}
    assert allowed.intersection(tokenizer.all_special_ids) == ({end} if may_end else set())


def test_ids_without_text_are_forbidden_and_may_be_drafted(grammars):
    """Heads are often larger than vocabularies; by 93 ids here."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    size = len(tokenizer)
    grammar = Grammar("regex", "[ab]+")
    end = tokenizer.eos_token_id
    larger = Grammars(lambda: tokenizer, size + 93, [end])
    first, second = (tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    tokens = [first, second, size + 90, second]
    parents = [-1, 0, 1, 2]
    matcher = larger.matcher(larger.compile(grammar).result(), [end, size + 5])
    assert matcher.push([first])
    masks = matcher.allowed(tokens, parents)
    alone = grammars.matcher(grammars.compile(grammar).result(), [end])
    assert alone.push([first])
    right = alone.allowed(tokens[:2], parents[:2])
    words = -(-size // 32)
    assert masks.shape == (4, -(-(size + 93) // 32))
    assert np.array_equal(masks[:2, :words], right)
    assert not masks[:2, words:].any()
    larger.close()


def test_masks_of_many_requests_on_threads_are_those_of_each(grammars, monkeypatch):
    monkeypatch.setattr("slipstream.serve.grammar.grammars.WORTH_SHARING_S", -1.0)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rng = random.Random(1)
    letters = tokenizer.convert_tokens_to_ids(list("abc"))
    end = tokenizer.eos_token_id
    matchers = []
    trees = []
    for size in range(1, 6):
        matchers.append(grammars.matcher(grammars.compile(Grammar("regex", f"[ab]{{{size},9}}c*")).result(), [end]))
        assert matchers[-1].push(letters[:1])
        parents = [-1, *(rng.randrange(node) for node in range(1, size))]
        trees.append(([letters[0], *rng.choices([*letters, end], k=size - 1)], parents))
    for masks, matcher, tree in zip(grammars.allowed(matchers, trees), matchers, trees, strict=True):
        assert np.array_equal(masks, matcher.allowed(*tree))


GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(PERSON)),
    "object": Grammar("json_object"),
    "regex": Grammar("regex", "[a-c]{3,8}-[0-9]{1,3}"),
    "choice": Grammar("choice", json.dumps(["yes", 'no "x"', "perhaps\nnot", "é"])),
    "ebnf": Grammar("ebnf", 'root ::= "a" root "b" | "c"'),
}
DRAFTERS = ("none", "eagle3", "eagle3 tree", "ngram")
Expected = Callable[..., Tokens]


@pytest.fixture(scope="module")
def target(shallow) -> Path:
    return shallow


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("drafts") / "eagle3"
    save_random_draft(target, folder, 1500)
    return str(folder)


@pytest.fixture(scope="module")
def build(target, draft) -> Build:
    return engines_of(target, Path(draft).parent, grammar_drafts=True)


def requests_of(names: list[str], temperature: float) -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    prompt = tokenizer("Describe a person as JSON: ").input_ids
    quote = {tokenizer.convert_tokens_to_ids('"'): 3.0}  # so that strings end
    return [
        make_request(
            f"{name} {seed}", [*prompt, 5 + seed], max_tokens=60, temperature=temperature, seed=seed,
            grammar=GRAMMARS[name], logit_bias=quote,
        )
        for name in names
        for seed in range(2)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def expected(build) -> Expected:
    """(temperature, names in GRAMMARS) -> tokens by request id: no draft."""
    engine = build("none", grammar_drafts=False)

    @cache
    def answers(temperature):
        return tokens_of(run(engine, requests_of([*GRAMMARS], temperature)))

    def tokens(temperature, *names):
        return {request: tokens for request, tokens in answers(temperature).items() if request.split()[0] in names}

    return tokens


@pytest.mark.parametrize("drafter", some_of(DRAFTERS, ["eagle3 tree"]))
def test_answers_are_texts_of_their_grammar_and_the_same_with_every_drafter(drafter, build, expected, grammars):
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    free = make_request("free", tokenizer("What is 12 * 7?").input_ids, max_tokens=40, temperature=0.0)
    engine = build(drafter, kv_cache_tokens=95, page_size=1)
    constrained = requests_of([*GRAMMARS], 1.0)
    answers = run(engine, [*constrained, free])
    assert engine.scheduler.num_preemptions > 0
    assert {name: answer.tokens for name, answer in answers.items() if name != "free"} == expected(1.0, *GRAMMARS)
    ends = 0
    for request in constrained:
        answer = answers[request.id]
        grammar = request.params.grammar
        assert grammar is not None
        matcher = grammars.matcher(grammars.compile(grammar).result(), [tokenizer.eos_token_id])
        assert matcher.push(answer.tokens), "a beginning at least"
        if answer.finish_reason == "stop":
            ends += 1
            assert matcher.is_over
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            check_text(request.id.split()[0], text)
    assert ends >= 5


@pytest.mark.parametrize("drafter", some_of(DRAFTERS, ["eagle3 tree"]))
def test_stop_ids_change_no_token_before_them(drafter, build, expected):
    """Ids of ordinary tokens, which a grammar may need for its text."""
    rng = random.Random(0)
    cut = {}
    requests = []
    for request in requests_of([*GRAMMARS], 1.0):
        tokens = expected(1.0, *GRAMMARS)[request.id]
        stop = rng.choice(tokens)
        cut[request.id] = tokens[: tokens.index(stop) + 1]
        requests.append(replace(request, params=replace(request.params, stop_token_ids=(stop,))))
    answers = run(build(drafter), requests)
    assert tokens_of(answers) == cut
    assert {answer.finish_reason for answer in answers.values()} == {"stop"}


def check_text(name: str, text: str):
    if name == "schema":
        jsonschema.Draft202012Validator(PERSON).validate(json.loads(text))
    elif name == "object":
        assert isinstance(json.loads(text), dict)
    elif name == "regex":
        assert re.fullmatch("[a-c]{3,8}-[0-9]{1,3}", text)
    elif name == "choice":
        assert text in ["yes", 'no "x"', "perhaps\nnot", "é"]
    else:
        assert re.fullmatch("(a*)c(b*)", text)
        assert text.count("a") == text.count("b")


@pytest.mark.parametrize(
    ("drafter", "temperature"), gate_of(product(["none", "eagle3"], [0.0, 1.0]), [("eagle3", 1.0)])
)
def test_passes_begin_before_their_masks_are_there(drafter, temperature, target, draft, monkeypatch):
    """Once the grammar has forced nothing for a time; until then, and after forced text, a pass waits for proposals."""
    draft = "none" if drafter == "none" else draft
    sizes = {"max_running": 4, "kv_cache_tokens": 2048, "prefill_graph_tokens": 64}
    engine = play(EngineConfig(target=str(target), draft=draft, attention=ATTENTION, **sizes))
    started = set()
    masked = []
    launch = engine.runner.launch

    def watch(plan, *, up_to_sampling=False):
        if up_to_sampling:
            assert not any(mask.slot in plan.slots for mask in plan.edits.masks)
            started.add(plan.number)
        return launch(plan, up_to_sampling=up_to_sampling)

    def trace(event, plan):
        if event == "launched" and plan.edits.masks:
            masked.append(plan.number)

    monkeypatch.setattr(engine.runner, "launch", watch)
    engine.trace = trace
    forced = "the total number of apples in all the baskets"
    patterns = {"any text": r"[\s\S]*", "letters": "[a-z]*", "late": rf"[0-9]{{20}}{forced}[0-9]{{9}}{forced}[a-c]*"}
    requests = [
        make_request(name, [5, 6, index], max_tokens=60, temperature=temperature, grammar=Grammar("regex", regex))
        for index, (name, regex) in enumerate(patterns.items())
    ]
    free = make_request("free", [5, 6, 7], max_tokens=30, temperature=temperature, ignore_eos=True)
    answers = run(engine, [*requests, free])
    assert tokens_of(answers) == plain_answers(target, [*requests, free])
    assert len(started.intersection(masked)) > 20
    assert set(masked) - started
    assert answers["late"].counts.accepted_tokens > 6, "the second text was waited for"


@pytest.mark.parametrize("drafter", some_of(["none", "eagle3", "ngram"], ["eagle3"]))
def test_slow_masks_change_no_answer(drafter, build, expected, monkeypatch):
    """Requests get drafts at some times, and none at others."""
    rng = random.Random(0)
    stub_times(monkeypatch, lambda _: rng.choice([0.0, 0.0, 0.0, 0.0, 0.001, 0.04, 0.2]))
    names = ["schema", "object", "choice"]
    answers = run(build(drafter), requests_of(names, 1.0))
    assert tokens_of(answers) == expected(1.0, *names)
    for answer in answers.values():
        passes = answer.counts.rounds + answer.counts.prefills  # which end with a token, after restarts, too
        assert passes >= len(answer.tokens) - answer.counts.accepted_tokens


def test_requests_restart_where_a_pass_has_begun_with_slow_nodes(target, draft, monkeypatch):
    rng = random.Random(0)
    sizes = {"max_running": 4, "kv_cache_tokens": 2048, "prefill_graph_tokens": 64}
    engine = play(EngineConfig(target=str(target), draft=draft, attention=ATTENTION, **sizes))
    requests = [
        make_request(regex, [5, 6, 7], max_tokens=40, temperature=1.0, grammar=Grammar("regex", regex))
        for regex in (r"[\s\S]*", "[a-z]*", "[0-9a-z ]{70,}")
    ]
    free = make_request("free", [5, 6, 7], max_tokens=25, temperature=1.0, ignore_eos=True)
    expected = plain_answers(target, [*requests, free])
    stub_times(monkeypatch, lambda _: rng.choice([0.0] * 40 + [0.2]))
    answers = run(engine, [*requests, free])
    assert tokens_of(answers) == expected
    assert engine.scheduler.num_preemptions > 0
    assert not engine.has_work


@pytest.mark.parametrize("is_captured", some_of([False, True], [True]))
def test_no_request_waits_for_slow_masks_of_others(is_captured, target, draft, build, monkeypatch):
    """While none of them ends, a request without a grammar gets its whole answer."""
    sizes = {"max_running": 8, "kv_cache_tokens": 2048, "prefill_graph_tokens": 64}
    engine = build("none", max_running=8)
    if is_captured:
        engine = play(EngineConfig(target=str(target), draft=draft, attention=ATTENTION, **sizes))
    requests = [
        make_request(f"{index}", [5, 6, index], max_tokens=6, temperature=1.0, grammar=Grammar("regex", f"[a-{c}]*"))
        for index, c in enumerate("uvwxyz")
    ]
    free = make_request("free", [5, 6, 7], max_tokens=12, temperature=1.0, ignore_eos=True)
    expected = plain_answers(target, [*requests, free])
    is_open = threading.Event()
    fill = Matcher.fill

    def fill_late(matcher):
        assert is_open.wait(120)
        return fill(matcher)

    monkeypatch.setattr(Matcher, "fill", fill_late)
    monkeypatch.setattr(grammars_module, "STEP_SECONDS", 0.0)
    stub_times(monkeypatch, lambda _: 0.1)
    answers = {}
    for request in [*requests, free]:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] = answers.get(output.request_id, []) + list(output.tokens)
            if output.request_id == "free" and output.finish_reason:
                assert all(len(answers.get(request.id, [])) < 3 for request in requests)
                is_open.set()
    assert answers == expected
    assert engine.scheduler.num_preemptions > 0


def test_a_request_with_slow_masks_gets_no_drafts_and_others_do(build, expected, monkeypatch):
    engine = build("eagle3")
    free = make_request("free", [5, 6, 7], max_tokens=50, temperature=0.0, ignore_eos=True)
    stub_times(monkeypatch, lambda _: 0.03)
    answers = run(engine, [free, *requests_of(["object"], 1.0)])
    assert answers["free"].counts.drafted_tokens > 0
    assert {name: answer.tokens for name, answer in answers.items() if name != "free"} == expected(1.0, "object")
    for name, answer in answers.items():
        if name != "free":
            assert answer.counts.drafted_tokens == 0
            assert answer.counts.rounds == len(answer.tokens) - 1, "all count, though none has a draft"


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_captured_on_a_gpu(drafter, build):
    free = make_request("free", [5, 6, 7], max_tokens=50, temperature=0.0, ignore_eos=True)
    requests = [free, *requests_of([*GRAMMARS], 1.0)]
    engine = build(drafter, device="cuda", dtype="float32", attention="prefill=sdpa,verify=triton,draft=triton")
    assert tokens_of(run(engine, requests)) == tokens_of(run(build("none", device="cpu"), requests))


def test_a_request_that_waits_for_its_grammar_can_be_aborted(build):
    engine = build("none")
    request = make_request("0", [5, 6], max_tokens=9, grammar=GRAMMARS["schema"])
    engine.add(request)
    assert engine.has_work
    assert engine.num_open == 1
    output = engine.abort("0")
    assert (output.finish_reason, output.tokens) == ("abort", [])
    assert not engine.has_work
    assert engine.abort("0") is None


def test_a_server_has_loaded_what_its_first_grammar_needs(monkeypatch):
    """Others would wait while Python reads it."""
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    engine = process.build_engine(EngineConfig(target=str(TINY), device="cpu", kv_cache_tokens=512))
    monkeypatch.setattr(engine._grammars, "_load_tokenizer", None)
    request = make_request("a", [5, 6], max_tokens=9, temperature=0.0, grammar=Grammar("choice", '["yes"]'))
    assert run(engine, [request])["a"].finish_reason == "stop"


def test_a_grammar_is_compiled_once_for_its_request(build, monkeypatch):
    """Though the store forgets it before the request has a slot, and again while the request is preempted."""
    monkeypatch.setattr("slipstream.serve.grammar.grammars.MOST_COMPILED", 1)
    counts = Counter()

    def compile_counted(compiler, grammar, json_whitespace):
        counts[grammar] += 1
        return compile_with(compiler, grammar, json_whitespace)

    monkeypatch.setattr("slipstream.serve.grammar.grammars.compile_with", compile_counted)
    engine = build("none", max_running=2, kv_cache_tokens=60, page_size=1)
    patterns = [Grammar("regex", f"[ab]{{400}}{index}") for index in range(5)]
    requests = [make_request(pattern.text, [5, 6, 7], max_tokens=30, grammar=pattern) for pattern in patterns]
    assert {answer.finish_reason for answer in run(engine, requests).values()} == {"length"}
    assert engine.scheduler.num_preemptions > 0
    assert [counts[pattern] for pattern in patterns] == [1] * len(patterns)


def test_a_grammar_that_waits_is_cancelled_with_its_last_request(build, monkeypatch):
    monkeypatch.setattr("slipstream.serve.grammar.grammars.NUM_THREADS", 1)
    may_go = threading.Event()
    compiled = []

    def compile_slowly(compiler, grammar, json_whitespace):
        may_go.wait()
        compiled.append(grammar.text)
        return compile_with(compiler, grammar, json_whitespace)

    monkeypatch.setattr("slipstream.serve.grammar.grammars.compile_with", compile_slowly)
    engine = build("none")
    for name, text in (("first", "a"), ("left", "b"), ("one of two", "c"), ("other", "c")):
        engine.add(make_request(name, [5, 6], max_tokens=2, grammar=Grammar("regex", text)))
    engine.abort("left")
    engine.abort("one of two")
    may_go.set()
    ended = set()
    while engine.has_work:
        ended |= {output.request_id for output in engine.step() if output.finish_reason}
    assert ended == {"first", "other"}
    assert compiled == ["a", "c"]


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(build):
    engine = build("none")
    wrong = make_request("wrong", [5, 6], max_tokens=9, grammar=Grammar("regex", "(a"))
    free = make_request("free", [5, 6], max_tokens=9, ignore_eos=True)
    ended = {}
    for request in (wrong, free):
        engine.add(request)
    while engine.has_work:
        ended |= {output.request_id: output for output in engine.step() if output.finish_reason}
    assert ended["wrong"].is_refusal
    assert "cannot be used" in ended["wrong"].error
    assert ended["free"].finish_reason == "length"


def test_a_grammar_that_allows_nothing_says_so(build):
    endless = Grammar("ebnf", 'root ::= root "a"')
    for drafter in ("none", "eagle3"):
        engine = build(drafter)
        engine.add(make_request("0", [5, 6], max_tokens=9, grammar=endless))
        while engine.has_work:
            ended = [output for output in engine.step() if output.finish_reason]
        assert [(output.finish_reason, output.error, output.is_refusal) for output in ended] == [
            ("error", "the grammar allows no token here, not even an end; correct it", True)
        ]


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 2}, {"bad_words": [[5]]}])
def test_what_a_grammar_excludes(other):
    with user_error(f"{next(iter(other))} does not go with a grammar"):
        SamplingParams(max_tokens=9, grammar=Grammar("json_object"), **other)
