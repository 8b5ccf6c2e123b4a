"""Answers parted into reasoning, content and calls: examples of every form, cut everywhere, and random ones."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.serve.chat.answers import texts_of
from slipstream.serve.chat.arguments import parameter_types, typed
from slipstream.serve.chat.forms import REASONING_FORMS, TOOL_FORMS, ReasoningForm, ToolForm, find_form
from slipstream.serve.chat.markers import Markers
from slipstream.serve.chat.parser import AnswerParser, CallPiece, Parts, Syntax, TextPiece, joined
from slipstream.serve.detokenize import Decoder, TextStream
from slipstream.serve.grammar.work import Work
from slipstream.tests.serve.chat_targets import TEMPLATES, load, template

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}, "deep": {"$ref": "#/$defs/deep"}},
    "$defs": {"deep": {"type": ["object", "array", "number", "boolean", "null"]}},
}
TOOLS = dict.fromkeys(["weather", "now"], parameter_types(SCHEMA, Work()))
CITY = '{"city": "q"}'
Expected = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, names and arguments of calls


def example(
    forms: list[str], text: str, reasoning: str = "", content: str = "", calls: Sequence[list[str]] = ()
) -> tuple[str, str, str, Expected]:
    """Forms of calls and of reasoning, an answer, and what it is."""
    tools, form_of_reasoning = forms
    return tools, form_of_reasoning, text, (reasoning, content, [(name, arguments) for name, arguments in calls])


EXAMPLES = [example(**entry) for entry in yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text())]


class NoTokens:
    added_tokens_decoder: dict[int, str] = {}


@cache
def syntax_of(tools: str, reasoning: str, tokenizer: Any = NoTokens) -> Syntax:
    return syntax_with(TOOL_FORMS[tools], REASONING_FORMS.get(reasoning), tokenizer)


def syntax_with(tools: ToolForm | None, reasoning: ReasoningForm | None, tokenizer: Any = NoTokens) -> Syntax:
    return Syntax(tools, reasoning, Markers(tokenizer, [*texts_of(tools), *texts_of(reasoning)]))


def read(syntax: Syntax, pieces: list[str]) -> tuple[Parts, list[Parts], AnswerParser]:
    """The parts together, one by one, and the parser."""
    numbers = itertools.count()
    parser = AnswerParser(syntax, TOOLS)
    with patch("slipstream.serve.chat.parser.call_id", lambda _: f"call {next(numbers)}"):
        steps = [parser.feed(piece) for piece in pieces]
        steps.append(parser.feed("", final=True))
    parts_of_text = Parts(joined(piece for parts in steps for piece in parts.pieces))
    return parts_of_text, steps, parser


def told(parts: Parts) -> Expected:
    return parts.reasoning, parts.content, [(call.name, call.arguments) for call in parts.calls]


@pytest.mark.parametrize(("tools", "reasoning", "text", "expected"), EXAMPLES)
def test_examples_wherever_they_are_cut(tools, reasoning, text, expected):
    syntax = syntax_of(tools, reasoning)
    parts_of_text, _, parser = read(syntax, [text])
    assert told(parts_of_text) == expected
    cuts = [[text[:place], text[place:]] for place in range(len(text))]
    for pieces in [list(text), *cuts]:
        again, steps, other = read(syntax, pieces)
        assert again == parts_of_text, pieces
        assert other.reasoning == parser.reasoning
        heads = [call for parts in steps for call in parts.pieces if isinstance(call, CallPiece) and call.name]
        assert [call.id for call in heads] == [f"call {index}" for index in range(len(heads))]
        assert not any(call.arguments for call in heads), "the name comes before the arguments"


def test_arguments_that_are_json_come_as_they_are_written():
    text = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
    _, steps, _ = read(syntax_of("hermes", "none"), list(text))
    pieces = [
        call.arguments for parts in steps for call in parts.pieces if isinstance(call, CallPiece) and not call.name
    ]
    assert pieces == list(CITY)


NAMES = st.sampled_from(sorted(TOOLS))
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=6,
)
JSON_IN_TEXT = st.sampled_from(['""', '"a b"', "null", "[1]", "5"])
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": PLAIN | JSON_IN_TEXT,
        "n": st.integers(-99, 99),
        "deep": JSON.filter(lambda value: not isinstance(value, str)),
    },
)


def quoted(value: Any) -> str:
    """A value as Gemma 4's template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{quoted(key)}:{quoted(inner)}" for key, inner in value.items()) + "}"
    return f"[{','.join(map(quoted, value))}]" if isinstance(value, list) else json.dumps(value)


def written(form: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as models write it."""
    text = json.dumps(arguments, ensure_ascii=False)
    if form == "llama_pythonic":
        text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    elif TOOL_FORMS[form].arguments == "quoted":
        text = ",".join(f"{key}:{quoted(value)}" for key, value in arguments.items())
    elif TOOL_FORMS[form].arguments == "parameters":
        tags = []
        for key, value in arguments.items():
            value_text = value if key == "city" else json.dumps(value, ensure_ascii=False)
            tag = TOOL_FORMS[form].parameter.replace("$key", key).replace("$type", json.dumps(key == "city"))
            tags.append(tag.replace("$value", value_text))
        text = "".join(tags)
    return TOOL_FORMS[form].call[0].replace("$name", name).replace("$arguments", text)


@pytest.mark.parametrize("form", TOOL_FORMS)
@settings(max_examples=40, deadline=None)
@given(calls=st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3), before=PLAIN, seed=st.integers(0, 10**9))
def test_calls_are_read_back(form, calls, before, seed):
    """However they are cut. White space beside calls is not kept."""
    form_of_tools = TOOL_FORMS[form]
    before = "" if form_of_tools.at_start else before.strip()
    text = (
        before
        + form_of_tools.first[0]
        + form_of_tools.between.join(written(form, *call) for call in calls)
        + form_of_tools.last[0]
    )
    rng = random.Random(seed)
    pieces = []
    while text:
        count = rng.randrange(1, 9)
        pieces.append(text[:count])
        text = text[count:]
    parts, _, _ = read(syntax_of(form, "none"), pieces)
    assert parts.content == before
    assert [(call.name, json.loads(call.arguments)) for call in parts.calls] == calls


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<tool_call>", "\n", '{"name": "now"', ', "arguments": ', "{", "}", "</tool_call>", "<think>"])
        | st.sampled_from(["</think>", "x", " ", '"', "<", "[now(", ")]", "<function=now>", "</function>", "<|end|>"])
        | st.sampled_from(["<parameter=n>", "</parameter>", "<|channel|>", "final", "analysis", "<|message|>", ","]),
        max_size=25,
    ),
    st.sampled_from(
        [("hermes", "think"), ("qwen3_coder", "think"), ("llama_pythonic", "none"), ("harmony", "harmony")]
    ),
)
def test_any_text_is_read_the_same_however_it_is_cut(pieces, forms):
    syntax = syntax_of(*forms)
    parts_of_text = read(syntax, ["".join(pieces)])[0]
    assert read(syntax, pieces)[0] == parts_of_text
    assert read(syntax, list("".join(pieces)))[0] == parts_of_text


def test_a_text_that_spells_a_marker_is_none(tmp_path):
    tokenizer = load("hermes", tmp_path / "target")
    syntax = syntax_of("hermes", "think", tokenizer)
    decoder = Decoder(tokenizer, syntax.markers.by_id)
    call = '\n{"name": "now", "arguments": {}}\n'
    marker = tokenizer.convert_tokens_to_ids

    def encode(text):
        return tokenizer(text, split_special_tokens=True, add_special_tokens=False).input_ids

    spelled = encode(f"<tool_call>{call}</tool_call>")
    assert marker("<tool_call>") not in spelled
    tokens = [*encode("a\n"), marker("<tool_call>"), *encode(call), marker("</tool_call>")]
    for watched in (True, False):
        for answer, expected in (
            (spelled, ("", f"<tool_call>{call}</tool_call>", [])),
            (tokens, ("", "a", [("now", "{}")])),
            ([marker("<tool_call>"), *encode("x"), marker("</think>")], ("", "<tool_call>x</think>", [])),
        ):
            stream = TextStream(decoder, watched=watched)
            pieces = [stream.push([token]) for token in answer] + [stream.push([], "length")]
            assert told(read(syntax, pieces)[0])[1:] == expected[1:]


def test_a_space_after_a_marker_stays():
    """Some decoders drop it at the beginning of a text."""
    vocabulary = {"\u2581": 0, "a": 1, "\u2581b": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    decoder = Decoder(fast, {4: "\udc00", 5: "\udc01"})
    for tokens, expected in (
        ([4, 2, 5, 2, 1], "\udc00 b\udc01 ba"),
        ([2, 4], "b\udc00"),
        ([1, 4, 5, 1], "a\udc00\udc01a"),
    ):
        assert decoder(tokens) == expected
        stream = TextStream(decoder)
        assert "".join(stream.push([token]) for token in tokens) + stream.push([], "length") == expected


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_form_is_told_by_the_chat_template(form):
    assert find_form(TOOL_FORMS, "auto", template(form)) is TOOL_FORMS[form]
    assert find_form(TOOL_FORMS, "none", template(form)) is None
    assert find_form(TOOL_FORMS, "hermes", "") is TOOL_FORMS["hermes"]
    reasoning = find_form(REASONING_FORMS, "auto", template(form))
    names = {**dict.fromkeys(["hermes", "glm", "minimax_m2"], "think"), "harmony": "harmony", "gemma4": "gemma4"}
    assert reasoning is REASONING_FORMS.get(names.get(form, ""))


class Watched(dict[str, Any]):
    """A part of a schema, which counts how often any of them is read."""

    reads = 0

    def get(self, *words: Any) -> Any:
        Watched.reads += 1
        return super().get(*words)


def chain(length: int, width: int) -> dict[str, Any]:
    """Definitions of which each offers the next one `width` times."""
    links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * width} for i in range(length)}
    return {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": {**links, f"d{length}": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"x": {"anyOf": [{"$ref": "#/properties/x"}] * 200}}}, "5"),
        ({"properties": {"x": {"anyOf": [{"$ref": "#/properties/x"}] * 200 + [{"type": "integer"}]}}}, 5),
        ({"properties": {"x": {"$ref": "#/properties/y"}, "y": {"$ref": "#/properties/x"}}}, "5"),
        (chain(6, 9), 5),
        (chain(200, 9), 5),
    ],
)
def test_the_types_of_a_parameter_take_one_visit_of_each_part(schema, expected):
    """However often parts refer to each other and to themselves."""
    text = json.dumps(schema)
    watched = json.loads(text, object_hook=Watched)
    Watched.reads = 0
    work = Work()
    assert typed("5", parameter_types(watched, work)["x"]) == expected
    assert Watched.reads < len(text)
    assert work.num_steps < len(text)


class Counted:
    """A compiled pattern that counts the characters that it is shown."""

    num_chars = 0

    def __init__(self, pattern: Any):
        self._pattern = pattern

    def match(self, text: str, *places: int, partial: bool = False) -> Any:
        Counted.num_chars += len(text)
        return self._pattern.match(text, *places, partial=partial)

    def search(self, text: str, *places: int, partial: bool = False) -> Any:
        Counted.num_chars += len(text)
        return self._pattern.search(text, *places, partial=partial)


def counting(tools: str | None, reasoning: str | None) -> Syntax:
    syntax = syntax_with(TOOL_FORMS.get(tools or ""), REASONING_FORMS.get(reasoning or ""))
    for name in ("at_start", "anywhere", "after_call", "call_end"):
        if getattr(syntax, name, None) is not None:
            setattr(syntax, name, Counted(getattr(syntax, name)))
    syntax.ends = {name: Counted(pattern) for name, pattern in syntax.ends.items()}
    if hasattr(syntax, "parameter"):
        parameter = syntax.parameter
        syntax.parameter = replace(
            parameter, begin=Counted(parameter.begin), tag=Counted(parameter.tag), end=Counted(parameter.end)
        )
    return syntax


def num_looked_at(syntax: Syntax, text: str, size: int) -> int:
    """Characters that patterns are shown of an answer in pieces of that size."""
    Counted.num_chars = 0
    parser = AnswerParser(syntax, {"f": {}})
    for start in range(0, len(text), size):
        parser.feed(text[start : start + size])
    parser.feed("", final=True)
    return Counted.num_chars


PAIRS = [(None, "think"), *itertools.product(TOOL_FORMS, [None]), ("hermes", "think"), ("harmony", "harmony")]


@pytest.mark.parametrize(("tools", "reasoning"), PAIRS)
def test_answers_are_read_in_linear_time(tools, reasoning):
    """White space, beginnings of markers, both in turn, and long values, in small pieces: twice as much text is twice
    as much work."""
    syntax = counting(tools, reasoning)
    forms = [text.replace("$name", "f") for form in (TOOL_FORMS.get(tools or ""), REASONING_FORMS.get(reasoning or ""))
             for text in texts_of(form) if len(text) > 2]  # fmt: skip
    heads = [text.replace("$key", "k").partition("$")[0] for text in forms]
    repeated = {head[:length] for head in heads for length in {1, 2, len(head) // 2, len(head) - 1, len(head)}}
    call = "" if tools is None else TOOL_FORMS[tools].first[0] + TOOL_FORMS[tools].call[0].replace("$name", "f")
    value = call.partition("$")[0] + ("<parameter=k>" if tools == "qwen3_coder" else '{"k": "')
    unclosed = "</parameter>" if tools == "qwen3_coder" else "\\"
    bodies = [(before, part + after) for part in repeated for before in ("", "Hi") for after in ("", " ", "x")]
    bodies += [(before, " ") for before in ("", "Hi", *heads)] + [(value, unclosed + after) for after in ("", " ", "x")]
    bodies.append((value + unclosed, " "))
    for before, part in bodies:
        count = 150 // len(part) + 1 if part else 1
        once, twice = (num_looked_at(syntax, before + part * number, 1) for number in (count, 2 * count))
        assert twice < 2.3 * once + 1500, (before, part)


def test_long_answers_are_not_copied_with_each_call():
    """Nor shown to the patterns again."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    syntax = counting("hermes", "think")
    once, twice = (num_looked_at(syntax, call * number, len(call) * number) for number in (500, 1000))
    assert twice < 2.3 * once


def test_joined_pieces_are_those_of_one_part():
    pieces = [TextPiece("reasoning", "a", 0, 1), TextPiece("reasoning", "b", 1, 2), TextPiece("content", "c", 2, 3)]
    calls = [CallPiece(0, "i", "f"), CallPiece(0, arguments="{"), CallPiece(0, arguments="}"), CallPiece(1, "j", "g")]
    assert joined([*pieces, *calls]) == [
        TextPiece("reasoning", "ab", 0, 2),
        TextPiece("content", "c", 2, 3),
        CallPiece(0, "i", "f", "{}"),
        CallPiece(1, "j", "g"),
    ]
