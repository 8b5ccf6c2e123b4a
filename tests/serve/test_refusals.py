"""Refusals stay sentences, with their remedies, however long what a client sent is."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serve.chat.tools import read_choice, read_tools
from slipstream.serve.grammar.grammars import translate
from slipstream.serve.grammar.json_schema import rewrite
from slipstream.serve.http.limits import MAX_ERROR_CHARS, ApiError
from slipstream.serve.http.responses_body import ResponsesBody
from slipstream.serve.http.schemas import NEUTRAL, ChatBody, CompletionBody, TokenizeBody, grammar_of, read_body
from slipstream.serve.request import SamplingParams

LONG = 3 * MAX_ERROR_CHARS
KINDS: list[Any] = [ChatBody, CompletionBody, ResponsesBody, TokenizeBody]
FIELDS = sorted(NEUTRAL.keys() | {name for kind in KINDS for name in kind.model_fields})
INNER = ["type", "function", "name", "role", "content", "format", "schema", "json_schema", "parameters", "$ref"]
INNER += ["structural_tag", "text", "tools", "mode", "regex", "enum", "required", "properties", "pattern", "multipleOf"]
WORDS = [
    "function",
    "message",
    "user",
    "allowed_tools",
    "json_schema",
    "structural_tag",
    "object",
    "string",
    "required",
]
NAMES = ["x" * LONG, "é" * LONG, '"' * LONG, "#/" + "a/" * LONG]
KEYS = st.sampled_from([*INNER, *NAMES])
SENT = st.recursive(
    st.sampled_from([*WORDS, *NAMES, 10**LONG, -(10**LONG), 1e300, True, None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from([*FIELDS, *NAMES]), SENT, max_size=2)
NEEDED = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(fields=BODIES)
def test_a_refused_body_is_a_sentence(kind, fields):
    needed = {name: value for name, value in NEEDED.items() if name in kind.model_fields and kind is not TokenizeBody}
    assert len(refusal(lambda: read_whole(kind, needed | fields))) <= MAX_ERROR_CHARS


def read_whole(kind: Any, fields: dict[str, Any]):
    """Everything that the server reads before it asks the engine."""
    body = read_body(kind, fields)
    if kind is not TokenizeBody and (grammar := grammar_of(body)) is not None:
        translate(grammar[0])
    if kind is TokenizeBody:
        read_tools(body.tools)
    elif kind is not CompletionBody:
        read_choice(body.tools or None, body.tool_choice, True, is_flat=kind is ResponsesBody)


def refusal(read: Callable[[], object]) -> str:
    """The text of the error, if there is one."""
    try:
        read()
    except (ApiError, ValueError) as error:
        return str(error)
    return ""


@settings(max_examples=200, deadline=None)
@given(schema=SENT)
def test_a_refused_schema_is_a_sentence(schema):
    assert len(refusal(lambda: rewrite(schema))) <= MAX_ERROR_CHARS


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from([field.name for field in fields(SamplingParams)]), fault=SENT)
def test_refused_sampling_params_are_a_sentence(name, fault):
    """Python's own integers have more digits than JSON's may."""
    for value in (fault, 10**10_000, [10**10_000]):
        values = {"max_tokens": 5, name: value}
        assert len(refusal(lambda values=values: SamplingParams(**values).check_token_ids(100))) <= MAX_ERROR_CHARS
