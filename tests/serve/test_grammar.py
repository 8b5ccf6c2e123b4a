"""Structured output: the official JSON Schema tests under the mask, and answers of an engine with every drafter."""

import gzip
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar
from transformers import AutoTokenizer

from slipstream.serve.engine.engine import Engine
from slipstream.serve.grammar.grammars import Grammars, Matcher, _links, check
from slipstream.serve.grammar.json_schema import Unsupported, rewrite, whole
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Grammar, Request, SamplingParams
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import build_engine, make_request, run, tokens_of
from slipstream.tests.serve.played_graphs import ATTENTION, play

TINY = Path(__file__).parents[2] / "assets" / "tiny-target"
SUITE = Path(__file__).parent / "data" / "json_schema_suite.jsonl.gz"  # draft 2020-12, MIT, licence beside it
END = 256  # after one token for each byte
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/inner"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}


class Bytes:
    """A compiler for a vocabulary of bytes."""

    def __init__(self) -> None:
        vocabulary = [bytes([byte]) for byte in range(256)] + [b"<end>"]
        info = xgrammar.TokenizerInfo(
            vocabulary, vocab_type=xgrammar.VocabType.RAW, vocab_size=END + 1, stop_token_ids=[END]
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def takes(self, schema: Any, text: str) -> bool:
        compiled = self.compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        matcher = Matcher(xgrammar.GrammarMatcher(compiled), [END], END + 1)
        for token in [*text.encode(), END]:
            bits = matcher.allowed([0], [-1])[0]
            allowed = bits[token // 32] >> np.uint32(token % 32) & 1
            if matcher.push([token]) != bool(allowed):
                raise AssertionError("the mask says something else")
            if not allowed:
                return False
        return matcher.is_over


def written(value: Any) -> Iterator[str]:
    """Texts of a value: members in every order, since a schema fixes one, and whole numbers without a fraction."""
    if isinstance(value, dict) and len(value) < 6:
        for members in itertools.permutations(value.items()):
            yield json.dumps(plain(dict(members)), separators=(",", ":"), ensure_ascii=False)
    else:
        yield json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


def test_official_schemas_are_served_as_they_are_meant_or_refused_by_name() -> None:
    """Of a served one every valid value can be written, and no invalid one."""
    served, refused, compiler = Counter[str](), Counter[str](), Bytes()
    with gzip.open(SUITE, "rt") as lines:
        cases = [json.loads(line) for line in lines]
    for case in cases:
        try:
            schema = rewrite(case["schema"])
            check(Grammar("json_schema", json.dumps(case["schema"])))
        except ValueError:
            refused[case["keyword"]] += 1
            continue
        served[case["keyword"]] += 1
        for test in case["tests"]:
            found = any(compiler.takes(schema, text) for text in written(test["data"]))
            assert found == test["valid"], (case["keyword"], case["description"], test)
    assert served.total() >= 140
    assert served.total() + refused.total() == 383


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"contains": {}}, "contains at the root is not supported"),
        ({"properties": {"a": {"uniqueItems": True}}}, "uniqueItems at /properties/a is not supported"),
        ({"type": "text"}, "type at the root is 'text'; it must be one or some of object"),
        ({"$ref": "http://x.example/s"}, "to 'http://x.example/s' is not supported; point to a place of this schema"),
        ({"$ref": "#/$defs/a"}, "points nowhere"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "may overlap is not supported; use anyOf"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern at the root beside maxLength"),
        ({"pattern": "a(?=b)"}, "with anchors inside, or with lookaround"),
        ({"type": "array", "maxItems": 10**6}, "at most 10000 is supported"),
        ({"type": "object", "required": ["a"]}, "names 'a', which is not among the properties"),
        (False, "false at the root allows nothing"),
        ({"type": "string", "format": "color"}, "format at the root 'color' is not supported"),
    ],
)
def test_what_is_refused_is_named(schema: Any, message: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(message)):
        rewrite(schema)


def test_nested_schemas_have_a_limit() -> None:
    schema: Any = {"type": "string"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(Unsupported, match="nests deeper than 64 levels"):
        rewrite(schema)


@pytest.mark.parametrize("pattern", ["a+", "^ab", "ab$", "^[a-c]{2}$", "a|b", "x\\$", "[$^]", "^(a|b)c"])
def test_patterns_match_anywhere_but_where_they_are_anchored(pattern: str) -> None:
    rng = random.Random(pattern)
    oracle = re.sub(r"(?<!\\)\$$", r"\\Z", pattern)  # Python's $ also matches before a last line break
    for _ in range(300):
        text = "".join(rng.choices("abcx$^\n", k=rng.randrange(5)))
        assert bool(re.fullmatch(whole(pattern), text)) == bool(re.search(oracle, text)), text


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "(a"), "cannot be used"),
        (Grammar("ebnf", "root ::= other"), "cannot be used"),
        (Grammar("json_schema", "{"), "cannot be used"),
        (Grammar("regex", "(a{1000}){1000}"), "repeats up to 1000000 times"),
        (Grammar("regex", "a" * 70_000), "has 70000 characters; the limit is 65536"),
        (Grammar("json_schema", json.dumps({"type": "string", "pattern": "^\\p{Letter}+$"})), "cannot be used"),
    ],
)
def test_wrong_grammars_are_refused_with_a_sentence(grammar: Grammar, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check(grammar)
    assert "/project/" not in str(caught.value)


def test_links_of_a_tree() -> None:
    """What follows an end, here 9, is left out."""
    tokens, parents = [1, 5, 6, 7, 9, 8, 5], [-1, 0, 0, 1, 1, 4, 0]
    assert _links(tokens, parents, {9}) == ([1, 3, -1, -1, -1, -1, -1], [-1, 2, 6, -1, -1, -1, -1])


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    found = Grammars(lambda: tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    yield found
    found.close()


def test_masks_of_a_tree_are_those_of_its_paths(grammars: Grammars) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rng, grammar, end = random.Random(0), Grammar("regex", "[ab]{2,6}c*"), tokenizer.eos_token_id
    grammars.compile(grammar).result()
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcx"]
    for _ in range(20):
        matcher, tokens, parents = grammars.matcher(grammar, [end]), [letters[0]], [-1]
        assert matcher.push(tokens)
        for node in range(1, 8):
            parents.append(rng.randrange(node))
            tokens.append(rng.choice([*letters, end]))
        found = matcher.allowed(tokens, parents)
        paths = [[letters[0]]]
        for node in range(1, 8):
            paths.append([*paths[parents[node]], tokens[node]])
        for node, path in enumerate(paths):
            alone = grammars.matcher(grammar, [end])
            taken = alone.push(path)
            if taken and end not in path:
                assert np.array_equal(found[node], alone.allowed([path[-1]], [-1])[0])
            else:
                assert (found[node] == 2**32 - 1).all(), "never accepted, so anything"


GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(PERSON)),
    "object": Grammar("json_object"),
    "regex": Grammar("regex", "[a-c]{3,8}-[0-9]{1,3}"),
    "choice": Grammar("choice", json.dumps(["yes", 'no "x"', "perhaps\nnot", "é"])),
    "ebnf": Grammar("ebnf", 'root ::= "a" root "b" | "c"'),
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "eagle3": {},
    "eagle3 tree": {"depth": 3, "topk": 3, "nodes": 8},
    "ngram": {"nodes": 9},
}
Build = Callable[..., Engine]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("drafts") / "draft"
    save_random_draft(TINY, folder, 1500)

    def make(drafter: str, **options: Any) -> Engine:
        name = drafter.split()[0]
        draft = name if name in ("none", "ngram") else folder
        return build_engine(TINY, draft, drafter=DRAFTERS[drafter], **options)

    return make


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
def expected(build: Build) -> Callable[[float], dict[str, list[int]]]:
    found: dict[float, dict[str, list[int]]] = {}

    def tokens(temperature: float) -> dict[str, list[int]]:
        if temperature not in found:
            found[temperature] = tokens_of(run(build("none", max_running=1), requests_of([*GRAMMARS], temperature)))
        return found[temperature]

    return tokens


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_are_texts_of_their_grammar_and_the_same_with_every_drafter(
    drafter: str, build: Build, expected: Callable[[float], dict[str, list[int]]], grammars: Grammars
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    free = make_request("free", tokenizer("What is 12 * 7?").input_ids, max_tokens=40, temperature=0.0)
    engine = build(drafter, kv_cache_tokens=130, page_size=1)
    asked = requests_of([*GRAMMARS], 1.0)
    answers = run(engine, [*asked, free])
    assert engine.scheduler.num_preemptions > 0
    assert {name: one.tokens for name, one in answers.items() if name != "free"} == expected(1.0)
    ends = 0
    for request in asked:
        answer, grammar = answers[request.id], request.params.grammar
        assert grammar is not None
        matcher = grammars.matcher(grammar, [tokenizer.eos_token_id])
        assert matcher.push(answer.tokens), "a beginning at least"
        if answer.finish_reason == "stop":
            ends += 1
            assert matcher.is_over
            text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
            check_text(request.id.split()[0], text)
    assert ends >= 5


def check_text(name: str, text: str) -> None:
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_passes_with_requests_that_are_free(
    temperature: float, build: Build, expected: Callable[[float], dict[str, list[int]]], tmp_path: Path
) -> None:
    save_random_draft(TINY, tmp_path / "draft", 1500)
    sizes: dict[str, Any] = {"max_running": 4, "kv_cache_tokens": 2048, "prefill_graph_tokens": 64}
    engine = play(EngineConfig(target=str(TINY), draft=str(tmp_path / "draft"), attention=ATTENTION, **sizes))
    free = make_request("free", [5, 6, 7], max_tokens=50, temperature=0.0, ignore_eos=True)
    names = ["schema", "choice"]
    answers = tokens_of(run(engine, [free, *requests_of(names, temperature)]))
    assert answers.pop("free") == tokens_of(run(build("none"), [free]))["free"]
    assert answers == {name: one for name, one in expected(temperature).items() if name.split()[0] in names}


def test_a_request_that_waits_for_its_grammar_can_be_aborted(build: Build) -> None:
    engine = build("none")
    request = make_request("0", [5, 6], max_tokens=9, grammar=GRAMMARS["schema"])
    engine.add(request)
    assert engine.has_work
    assert engine.num_open == 1
    output = engine.abort("0")
    assert output is not None
    assert (output.finish_reason, output.tokens) == ("abort", [])
    assert not engine.has_work
    assert engine.abort("0") is None


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(build: Build) -> None:
    engine = build("none")
    wrong = make_request("wrong", [5, 6], max_tokens=9, grammar=Grammar("regex", "(a"))
    free = make_request("free", [5, 6], max_tokens=9, ignore_eos=True)
    answers = run_all(engine, [wrong, free])
    assert answers["wrong"][0] == "error"
    assert "cannot be used" in answers["wrong"][1]
    assert answers["free"] == ("length", "")


def run_all(engine: Engine, requests: list[Request]) -> dict[str, tuple[str | None, str]]:
    for request in requests:
        engine.add(request)
    ended = {}
    while engine.has_work:
        ended |= {one.request_id: (one.finish_reason, one.error) for one in engine.step() if one.finish_reason}
    return ended


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 2}, {"bad_words": [[5]]}])
def test_what_a_grammar_excludes(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(other))} does not go with a grammar"):
        SamplingParams(max_tokens=9, grammar=Grammar("json_object"), **other)
