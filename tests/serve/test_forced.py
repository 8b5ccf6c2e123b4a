"""Drafts of what a grammar forces: spelled as the tokenizer spells them, and the same tokens with them and without."""

import json
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from slipstream.serve.engine.acceptance import KINDS, host_bins, is_forced
from slipstream.serve.engine.constraints import allowed_depth, goes_beyond
from slipstream.serve.engine.plan import FORCED, NodeMasks
from slipstream.serve.grammar import grammars as grammars_module
from slipstream.serve.grammar.grammars import Grammars, Matcher, tokens_in
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Grammar, Request
from slipstream.tests.pairwise import rotating, some_of
from slipstream.tests.serve.correctness import TARGET, features
from slipstream.tests.serve.engine_runs import (
    Tokens,
    accepted,
    build_engine,
    make_request,
    plain_answers,
    run,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import ATTENTION, play

TEXTS = [
    "Tom has 12 apples, and buys 345 more.",
    '"transaction_identifier": "invoice-2024"',
    "  def f(x):\n\treturn x  # naïve, 日本語, 👍",
    "the price in euros (€): 1,000.50",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Iterator[Grammars]:
    engine_grammars = Grammars(lambda: tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    yield engine_grammars
    engine_grammars.close()


def choice(*texts: str) -> Grammar:
    return Grammar("choice", json.dumps(texts))


@pytest.mark.parametrize("text", TEXTS)
def test_forced_tokens_are_the_tokenizers_own(text, tokenizer, grammars):
    """At every place of the only text; after it the end."""
    end = tokenizer.eos_token_id
    tokens = tokenizer(text).input_ids
    matcher = grammars.matcher(grammars.compile(choice(text)).result(), [end])
    for place, last in enumerate([0, *tokens]):
        forced, masks = matcher.forced(last, 64)
        rest = [*tokens[place:], end]
        starts_whole = tokenizer.decode(tokens[:place]) + tokenizer.decode(tokens[place:]) == text
        assert forced == rest if starts_whole else matcher.push(forced)
        assert masks.shape[0] == 1 + len(forced)
        if starts_whole:
            assert np.array_equal(masks, matcher.allowed([last, *forced], range(-1, len(forced))))
            assert matcher.forced(last, 3)[0] == rest[: len(matcher.forced(last, 3)[0])]
        else:
            return
        assert place == len(tokens) or matcher.push([tokens[place]])


def test_after_an_unusual_spelling_the_rest_is_spelled_as_usual(tokenizer, grammars):
    text = TEXTS[0]
    end = tokenizer.eos_token_id
    rng = random.Random(0)
    for _ in range(20):
        matcher = grammars.matcher(grammars.compile(choice(text)).result(), [end])
        text_before = ""
        last = 0
        while text_before != text:
            forced, _ = matcher.forced(last, 64)
            assert tokenizer.decode(forced, skip_special_tokens=True) == text[len(text_before) :]
            last = rng.choice(tokens_in(matcher.allowed([last], [-1])[0], 64))
            assert matcher.push([last])
            text_before += tokenizer.decode([last])


def test_a_token_that_may_run_on_is_left_out(tokenizer, grammars):
    """Where texts part, each of them begins with the forced tokens."""
    end = tokenizer.eos_token_id
    for texts in (
        ["the number of apples is 3", "the number of apples is 35", "the number of oranges"],
        ["there are", "the area", "these"],
        ["é1", "è2"],
        ["日本", "日木"],
    ):
        matcher = grammars.matcher(grammars.compile(choice(*texts)).result(), [end])
        forced, _ = matcher.forced(0, 64)
        spelled = [tokenizer(text).input_ids for text in texts]
        assert all(forced == spelling[: len(forced)] for spelling in spelled), texts
        together = next(i for i, column in enumerate(zip(*spelled, strict=False)) if len(set(column)) > 1)
        assert len(forced) >= together - 2, texts


def test_control_tokens_are_forced_and_text_that_spells_them_is_text(tokenizer, grammars):
    end = tokenizer.eos_token_id
    start = next(token for token in tokenizer.added_tokens_decoder if token != end)
    name = tokenizer.decode([start])
    elements = [
        {"type": "const_string", "value": "ab c"},
        {"type": "token", "token": start},
        {"type": "const_string", "value": "hello"},
    ]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    matcher = grammars.matcher(grammars.compile(Grammar("structural_tag", json.dumps(tag))).result(), [end])
    expected = [*tokenizer("ab c").input_ids, start, *tokenizer("hello").input_ids, end]
    assert matcher.forced(0, 64)[0] == expected
    spelled = grammars.matcher(grammars.compile(choice(f"a{name}b")).result(), [end]).forced(0, 64)[0]
    assert start not in spelled


def test_no_text_is_forced_whose_masks_take_threads(tokenizer, grammars, monkeypatch):
    """A thread would fill the mask before it, for which the step, and then the next tokens, would wait."""
    matcher = grammars.matcher(grammars.compile(choice(TEXTS[0])).result(), [tokenizer.eos_token_id])
    assert matcher.forced(0, 8)[0]
    monkeypatch.setattr(grammars_module, "timed", lambda work, *arguments: (work(*arguments), 2.5e-3))
    monkeypatch.setattr(Matcher, "fill", None)
    assert matcher.forced(0, 8)[0] == []
    assert matcher.mask is None


def test_a_text_without_end_is_cut(tokenizer, grammars):
    matcher = grammars.matcher(
        grammars.compile(Grammar("ebnf", 'root ::= "ab " root')).result(), [tokenizer.eos_token_id]
    )
    forced, _ = matcher.forced(0, 15)
    assert 8 <= len(forced) <= 15
    assert matcher.push(forced)


def test_what_is_free_is_not_forced(tokenizer, grammars):
    for grammar in (Grammar("regex", "[a-z]+"), Grammar("json_schema", '{"type": "integer"}'), choice("a", "b")):
        assert grammars.matcher(grammars.compile(grammar).result(), [tokenizer.eos_token_id]).forced(0, 15)[0] == []


def test_a_proposal_that_knows_more_is_kept():
    nodes = np.array([[9, 5, 6, 7, 8, -1], [-1, 0, 0, 2, 3, -1]], np.int32)
    assert goes_beyond(nodes, [6, 7])
    assert not goes_beyond(nodes, [6, 7, 8]), "and nothing after it"
    assert not goes_beyond(nodes, [5])
    assert not goes_beyond(nodes, [6, 8])
    masks = np.zeros((5, 2), np.uint32)
    masks[[0, 2, 3], 0] = 1 << np.array([6, 7, 9])
    assert allowed_depth(nodes, NodeMasks(0, [0, 1, 2, 3, 4], masks)) == 2


def test_forced_tokens_have_bins_of_their_own():
    bins = [host_bins(9, kind) for kind in range(1, KINDS)]
    assert [bool(is_forced(nodes[1:]).all()) for nodes in bins] == [kind == FORCED for kind in range(1, KINDS)]
    assert not is_forced(np.concatenate(([-1, 0, 255], *bins[:-1]))).any()


def requests(tokenizer: Any, names: tuple[str, ...], temperature: float) -> list[Request]:
    prompt = tokenizer("Describe an order as JSON: ").input_ids
    return [
        make_request(
            f"{name} {seed}", [*prompt, 5 + seed], max_tokens=48, temperature=temperature, seed=seed, **features()[name]
        )
        for name in names
        for seed in range(2)
    ]


NAMES = ("forced text", "choice")


@pytest.fixture(scope="module")
def expected(tokenizer) -> dict[float, Tokens]:
    return {heat: plain_answers(TARGET, requests(tokenizer, NAMES, heat), device="cpu") for heat in (0.0, 1.0)}


@pytest.mark.parametrize(
    ("temperature", "options"), rotating([0.0, 1.0], [{}, {"draft": "ngram", "drafter": {"nodes": 9}}])
)
def test_answers_are_those_without(temperature, options, tokenizer, expected):
    """Beside a request without a grammar; each engine answers twice, the second time after cached prompts."""
    free = make_request("free", tokenizer("What is 12 * 7?").input_ids, max_tokens=16, temperature=0.0)
    engine = build_engine(TARGET, device="cpu", grammar_drafts=True, **options)
    for _ in range(2):
        answers = run(engine, [*requests(tokenizer, NAMES, temperature), free])
        constrained = {name: answer for name, answer in answers.items() if name != "free"}
        assert tokens_of(constrained) == expected[temperature]
        assert accepted(constrained) > 20


@pytest.mark.parametrize("temperature", some_of([0.0, 1.0], [1.0]))
def test_captured_passes_have_room_for_them(temperature, tokenizer, expected):
    """Without a draft, where a pass over roots alone was enough."""
    sizes = {"max_running": 4, "kv_cache_tokens": 2048, "prefill_graph_tokens": 64}
    engine = play(EngineConfig(target=str(TARGET), attention=ATTENTION, **sizes))
    widest = 0

    def watch(event, plan):
        nonlocal widest
        if event == "launched":
            widest = max(widest, plan.nodes - len(plan.slots))
            pickle.dumps(plan)  # without the compiled grammar, which belongs to this process

    engine.trace = watch
    answers = run(engine, requests(tokenizer, NAMES, temperature))
    assert tokens_of(answers) == expected[temperature]
    assert widest > 1
    assert accepted(answers) > 20
    assert engine.runner.steps.sizes[-1] == 64


def test_they_teach_what_forced_tokens_accept(tokenizer):
    """Also beside requests without a grammar, whose drafts' bins stay theirs."""
    engine = build_engine(TARGET, device="cpu", grammar_drafts=True)
    free = make_request("free", tokenizer("What is 12 * 7?").input_ids, max_tokens=30, ignore_eos=True)
    run(engine, [free, *requests(tokenizer, ("forced text",), 0.0)])
    tried = engine.planner.policy.acceptance.num_tried
    assert tried[is_forced(np.arange(len(tried)))].sum() > 20
    assert tried[~is_forced(np.arange(len(tried)))].sum() == 0


@pytest.mark.parametrize("options", [{}, {"grammar_drafts": True, "width": 1}])
def test_there_are_none_where_nobody_wants_them(options, tokenizer):
    engine = build_engine(TARGET, device="cpu", **options)
    answers = run(engine, requests(tokenizer, ("choice",), 0.0))
    assert engine.planner.limits.most_nodes == 1
    assert all(answer.counts.drafted_tokens == 0 for answer in answers.values())


def test_the_last_tokens_of_an_answer_are_not_drafted_in_vain(tokenizer):
    prompt = tokenizer("Say: ").input_ids
    request = make_request("0", prompt, max_tokens=4, grammar=choice(TEXTS[0]))
    engine = build_engine(TARGET, device="cpu", grammar_drafts=True)
    answer = run(engine, [request])["0"]
    assert answer.finish_reason == "length"
    assert answer.counts.drafted_tokens <= 3
