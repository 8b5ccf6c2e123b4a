"""Calls of tools that a grammar enforces, in every form, and reasoning before an answer with a grammar: by the mask
alone, and by an engine with every drafter."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar
from transformers import AutoTokenizer

from slipstream.serve.chat.answers import AnswerFormat, ChatFormat
from slipstream.serve.chat.parser import Parts
from slipstream.serve.chat.tools import ToolChoice, ToolError, read_choice
from slipstream.serve.grammar.grammars import Grammars, compile_with
from slipstream.serve.llm import LLM
from slipstream.serve.request import Grammar, Request, SamplingParams
from slipstream.tests.pairwise import some_of
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.chat_targets import TEMPLATES, load, write_target
from slipstream.tests.serve.engine_runs import Build, Tokens, engines_of, make_request, run, tokens_of

WEATHER = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["days"],
    "additionalProperties": False,
}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "now": NO_ARGUMENTS}
NAMED = {"type": "function", "function": {"name": "weather"}}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool(name, schema) for name, schema in SCHEMAS.items()]


class Sampler:
    """Answers at random under the mask, without a model."""

    def __init__(self, form: str, folder: Path):
        self.tokenizer = load(form, folder / "target")
        self.chat = ChatFormat(self.tokenizer, "auto", "auto")
        self.prompt = self.tokenizer("What now?\n").input_ids
        end = self.tokenizer.eos_token_id
        self.grammars = Grammars(lambda: self.tokenizer, len(self.tokenizer), [end])
        special = {0, 1, 3}
        likely = [self.tokenizer.convert_tokens_to_ids(letter) for letter in '"}/<[{'] + [
            *self.chat.decoder._markers,
            *self.tokenizer(" \n").input_ids,
        ]
        self._weights = np.full(len(self.tokenizer), 0.3)
        self._weights[likely] = 40.0
        self._weights[list(special)] = 1e-9
        self._weights[end] = 100.0

    def write(self, answers: AnswerFormat, seed: int, limit: int = 250) -> Parts | None:
        """The parts of an answer; None if it does not end in time."""
        assert answers.grammar is not None
        ends = [self.tokenizer.eos_token_id, *answers.stop_ids]
        rng = random.Random(seed)
        tokens = []
        matcher = self.grammars.matcher(self.grammars.compile(answers.grammar).result(), ends)
        while len(tokens) < limit and not matcher.is_over:
            bits = np.unpackbits(matcher.allowed([0], [-1]).view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(self.tokenizer)])
            sums = self._weights[allowed].cumsum()
            token = int(allowed[sums.searchsorted(rng.random() * sums[-1], side="right")])
            assert matcher.push([token])
            tokens.append(token)
        if not matcher.is_over:
            return None
        return answers.parts_of(answers.decoder(tokens[:-1]))


def check_calls(parts: Parts, schemas: dict[str, Any] = SCHEMAS):
    for call in parts.calls:
        assert re.search(r"\s{2}", re.sub(r'"(\\.|[^"\\])*"', '""', call.arguments)) is None, "white space is filled"
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.fixture(scope="module", params=TEMPLATES)
def sampler(request, tmp_path_factory) -> Iterator[Sampler]:
    new_sampler = Sampler(request.param, tmp_path_factory.mktemp(request.param))
    yield new_sampler
    new_sampler.grammars.close()


def test_calls_are_valid_in_every_form(sampler):
    ended = 0
    for tool_choice, is_parallel in (("required", True), ("required", False), (NAMED, False)):
        answers = sampler.chat.answer(read_choice(TOOLS, tool_choice, is_parallel), sampler.prompt, None)
        for seed in range(3):
            parts = sampler.write(answers, seed)
            if parts is None:
                continue
            ended += 1
            assert parts.calls
            assert parts.content == ""
            assert is_parallel or len(parts.calls) == 1
            assert tool_choice == "required" or parts.calls[0].name == "weather"
            check_calls(parts)
    assert ended >= 4


def test_strict_tools_are_called_as_their_schemas_say_and_content_is_free(sampler):
    tools = [tool("weather", WEATHER, strict=True), tool("now", NO_ARGUMENTS, strict=True)]
    answers = sampler.chat.answer(read_choice(tools, "auto", True), sampler.prompt, None)
    calls = 0
    for seed in range(8):
        parts = sampler.write(answers, seed)
        if parts is not None:
            check_calls(parts)
            calls += len(parts.calls)
    assert sampler.chat.tools is not None
    assert calls or sampler.chat.tools.at_start, "these begin with a call seldom"


def test_content_with_a_grammar_or_calls(sampler):
    is_strict = sampler.chat.tools.arguments == "quoted"  # others end too seldom by chance
    tools = [tool(name, schema, strict=is_strict) for name, schema in SCHEMAS.items()]
    answers = sampler.chat.answer(read_choice(tools, "auto", True), sampler.prompt, Grammar("regex", "[ab]{3}"))
    kinds = set()
    for seed in range(6):
        parts = sampler.write(answers, seed)
        if parts is not None:
            kinds.add("calls" if parts.calls else "content")
            assert parts.calls or len(parts.content) == 3
            assert not (parts.calls and parts.content)
    assert kinds


def test_quoted_arguments_are_valid_at_every_depth(tmp_path):
    inner = {"type": "object", "properties": {"on": {"type": "boolean"}, "tags": {"type": "array", "items": {"$ref":
             "#/$defs/tag"}}}, "required": ["tags"]}  # fmt: skip
    schema = {"type": "object", "properties": {"inner": inner, "last": {"type": ["null", "integer"]}},
              "required": ["inner"], "$defs": {"tag": {"enum": ["a", "b", 3]}}}  # fmt: skip
    sampler = Sampler("gemma4", tmp_path)
    answers = sampler.chat.answer(read_choice([tool("f", schema)], "required", False), sampler.prompt, None)
    answers_in_time = [parts for seed in range(8) if (parts := sampler.write(answers, seed)) is not None]
    sampler.grammars.close()
    assert len(answers_in_time) >= 3
    for parts in answers_in_time:
        check_calls(parts, {"f": schema})
    for part, words in (
        ({"type": "object"}, "an object at /properties/x has no properties"),
        ({"type": "string", "pattern": "a"}, '"pattern" at /properties/x is not supported'),
        ({"$ref": "#"}, "nests more than 8 deep"),
    ):
        odd = {"type": "object", "properties": {"x": part}, "required": ["x"]}
        with pytest.raises(ToolError, match=words):
            sampler.chat.answer(read_choice([tool("f", odd)], "required", False), sampler.prompt, None)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Path:
    return write_target("hermes", tmp_path_factory.mktemp("hermes") / "target")


DRAFTERS = ("none", "eagle3", "eagle3 tree", "ngram")


@pytest.fixture(scope="module")
def build(hermes, tmp_path_factory) -> Build:
    folder = tmp_path_factory.mktemp("drafts")
    save_random_draft(hermes, folder / "eagle3", 1500)
    return engines_of(hermes, folder, grammar_drafts=True)


@pytest.fixture(scope="module")
def mix(hermes) -> tuple[list[Request], dict[str, AnswerFormat]]:
    """Enforced calls, and JSON after reasoning: begun by the prompt, begun by the answer if it likes, ended before."""
    tokenizer = AutoTokenizer.from_pretrained(hermes)
    chat = ChatFormat(tokenizer, "auto", "auto")
    ids = tokenizer.convert_tokens_to_ids
    person = Grammar("json_schema", json.dumps(WEATHER))
    prompt = tokenizer("What is the weather?\n").input_ids
    opened = [*prompt, ids("<think>")]
    closed = [*prompt, ids("<think>"), ids("</think>")]
    kinds = {
        "required": (prompt, read_choice(TOOLS, "required", True), None),
        "named": (closed, read_choice(TOOLS, NAMED, False), None),
        "strict": (prompt, read_choice([tool("now", NO_ARGUMENTS, strict=True)], "auto", True), None),
        "opened": (opened, ToolChoice(), person),
        "optional": (prompt, ToolChoice(), person),
        "closed": (closed, ToolChoice(), person),
    }
    likely = {ids('"'): 3.0, ids("}"): 6.0, ids("<think>"): 6.0, ids("</think>"): 9.0, ids("</tool_call>"): 5.0}
    spaces = [token for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()]
    likely |= dict.fromkeys(spaces, -20.0)
    requests = []
    formats = {}
    for name, (tokens, choice, grammar) in kinds.items():
        formats[name] = chat.answer(choice, tokens, grammar)
        for seed in range(2):
            params = {"grammar": formats[name].grammar, "logit_bias": likely, "temperature": 1.0, "seed": seed}
            requests.append(make_request(f"{name} {seed}", list(tokens), max_tokens=36, **params))
    return requests, formats


@pytest.fixture(scope="module")
def expected(build, mix) -> Tokens:
    return tokens_of(run(build("none", grammar_drafts=False), mix[0]))


@pytest.mark.parametrize("drafter", some_of(DRAFTERS, ["eagle3 tree"]))
def test_answers_are_the_same_with_every_drafter(drafter, build, mix, expected):
    requests, formats = mix
    answers = run(build(drafter), requests)
    assert tokens_of(answers) == expected
    ends = 0
    for name, answer in answers.items():
        form = formats[name.split()[0]]
        is_whole = answer.finish_reason == "stop"
        parts = form.parts_of(form.decoder(answer.tokens[: -1 if is_whole else None]))
        if not is_whole:
            continue
        ends += 1
        check_calls(parts)
        if name.startswith(("required", "named")):
            assert parts.calls
        if form.grammar is not None and name.startswith(("opened", "optional", "closed")):
            jsonschema.validate(json.loads(parts.content), WEATHER)
    assert ends >= 6


def test_only_spaces_of_json_are_before_it(hermes):
    """After reasoning: readers of JSON refuse others."""
    tokenizer = AutoTokenizer.from_pretrained(hermes)
    prompt = [tokenizer.convert_tokens_to_ids("<think>")]
    grammar = Grammar("json_schema", json.dumps(WEATHER))
    answer = ChatFormat(tokenizer, "auto", "auto").answer(ToolChoice(), prompt, grammar)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    compiled = compile_with(xgrammar.GrammarCompiler(info), answer.grammar)
    for space in (*" \t\r\n", *"\v\f\u00a0\u2028\u3000\ufeff"):
        matcher = xgrammar.GrammarMatcher(compiled)
        assert matcher.accept_token(tokenizer.convert_tokens_to_ids("</think>"))
        assert matcher.accept_string(space) == (space in " \t\r\n"), ascii(space)


def test_chat_offline(hermes):
    with LLM(str(hermes), kv_cache_tokens=2048, max_running=4) as llm:
        question = [{"role": "user", "content": "What is the weather?"}]
        params = SamplingParams(
            max_tokens=80, temperature=1.0, seed=0, logprobs=1, logit_bias={llm.tokenizer.convert_tokens_to_ids('"'): 4}
        )
        options = {"chat_template_kwargs": {"enable_thinking": False}}
        [answer] = llm.chat(question, params, tools=TOOLS, tool_choice=NAMED, parallel_tool_calls=False, **options)
        assert answer.finish_reason in ("tool_calls", "length")
        assert answer.tool_calls[0].name == "weather"
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.tokens)
        first, second = llm.chat([question, question], params, **options)
        assert first.tokens != second.tokens
        assert not first.tool_calls
        with pytest.raises(ToolError, match="tool_choice.function.name is 'other'"):
            llm.chat(question, params, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}})


def test_tools_need_a_form_and_a_template(hermes):
    tokenizer = AutoTokenizer.from_pretrained(hermes)
    choice = read_choice(TOOLS, "auto", True)
    with pytest.raises(ToolError, match="tool_parser is none; start the server with --tool-parser and one of harmony"):
        ChatFormat(tokenizer, "none", "none").answer(choice, [5], None)
    tokenizer.chat_template = "{{ messages }}{{ tools }}"
    with pytest.raises(ToolError, match="does not tell the form of calls; start the server with --tool-parser"):
        ChatFormat(tokenizer, "auto", "auto").answer(choice, [5], None)
    tokenizer.chat_template = "{{ messages }}"
    for form in ("auto", "hermes", "none"):
        with pytest.raises(ToolError, match="template takes no tools; leave them out, or start .* --chat-template"):
            ChatFormat(tokenizer, form, "auto").answer(choice, [5], None)


FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.mark.parametrize(
    ("flat", "nested"),
    [
        (None, None),
        ("required", "required"),
        ({"type": "function", "name": "weather"}, NAMED),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
            },
        ),
    ],
)
def test_flat_tools_are_those_of_chat(flat, nested):
    null = {"async": None, "defer_loading": False, "allowed_callers": ["direct"], "output_schema": None}
    choice = read_choice([{**tool, **null} for tool in FLAT], flat, None, is_flat=True)
    expected = read_choice(TOOLS, nested, None)
    assert [tool.definition for tool in choice.tools] == [tool.definition for tool in expected.tools]
    assert (choice.mode, choice.allowed) == (expected.mode, expected.allowed)
    assert [tool.field for tool in choice.tools] == ["tools.0.parameters", "tools.1.parameters"]


def test_allowed_tools_are_those_that_may_be_called():
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = read_choice(TOOLS, {"type": "allowed_tools", "allowed_tools": allowed}, None)
    assert [tool.name for tool in choice.tools] == ["weather", "now"], "the prompt names all"
    assert [callable_tool.name for callable_tool in choice.callable_tools] == ["now"]
    assert choice.is_enforced
    assert not read_choice(TOOLS, "auto", None).is_enforced
    assert read_choice(TOOLS, "none", None) == ToolChoice()


def test_a_schema_that_cannot_be_enforced_is_named_and_refused_only_then(hermes):
    chat = ChatFormat(AutoTokenizer.from_pretrained(hermes), "auto", "auto")
    odd = tool("odd", {"type": "object", "properties": {"a": {"not": {}}}})
    assert chat.answer(read_choice([odd], "auto", None), [5], None).grammar is None
    for choice in (read_choice([odd], "required", None), read_choice([tool("x"), odd | {}], "required", None)):
        with pytest.raises(ToolError, match='"not" at /properties/a is not supported') as caught:
            chat.answer(choice, [5], None)
        assert caught.value.field.endswith(".function.parameters")


def alternatives(last: dict[str, Any]) -> dict[str, Any]:
    """9^6 times the last, by references, in 2 KiB."""
    definitions = {f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 9} for index in range(6)}
    definitions["d6"] = last
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "required": ["x"], "$defs": definitions}


@pytest.mark.parametrize("form", ["qwen3_coder", "deepseek_v3_2"])
def test_alternatives_that_are_one_are_written_once(form, tmp_path):
    chat = ChatFormat(load(form, tmp_path / "target"), "auto", "auto")
    for last in ({"type": "boolean"}, {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/d0"}]}):
        choice = read_choice([tool("f", alternatives(last), strict=True)], "required", True)
        grammar = chat.answer(choice, [5], None).grammar
        assert grammar.text.count('"json_schema": {"type": "boolean"') <= 2, "first and further calls"


def shared_definitions() -> dict[str, Any]:
    """14 KiB, referred to 300 times: 4 MB if each reference is written with what it may refer to."""
    definitions = {f"d{index}": {"enum": [f"{index:010d}"]} for index in range(400)}
    arrays = {f"p{index}": {"type": "array", "items": {"$ref": f"#/$defs/d{index}"}} for index in range(300)}
    return {"type": "object", "properties": arrays, "required": [*arrays], "$defs": definitions}


def optional_keywords() -> dict[str, Any]:
    """Any of them may come first: a grammar of 1500^2 / 2 elements."""
    return {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(1500)}}


@pytest.mark.parametrize(
    ("form", "schema", "words"),
    [
        ("qwen3_coder", alternatives({"$ref": "#/$defs/d0"}), '"\\$ref" at /properties/x refers to itself alone'),
        ("qwen3_coder", shared_definitions(), "the grammar of the answer has more than 65536 characters"),
        ("llama_pythonic", optional_keywords(), '"properties" at the root has more than 64 optional ones'),
    ],
)
def test_small_schemas_of_large_grammars_are_refused(form, schema, words, tmp_path):
    """Before their elements are made, which would take minutes and all memory."""
    chat = ChatFormat(load(form, tmp_path / "target"), "auto", "auto")
    with pytest.raises(ToolError, match=words):
        chat.answer(read_choice([tool("f", schema, strict=True)], "required", True), [5], None)
