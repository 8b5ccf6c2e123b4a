"""min_tokens and bad words: with every drafter the tokens of transformers' generate."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from slipstream.serve.engine.constraints import (
    CROWDED_OUT,
    GIVEN_UP,
    TOO_SLOW,
    BadWords,
    ConstrainedRequest,
    Constraints,
    TokenSet,
)
from slipstream.serve.engine.host_stages import Proposed
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Grammar, Request, SamplingParams
from slipstream.tests.serve.engine_runs import (
    DRAFTERS,
    VOCAB,
    Build,
    Tokens,
    acceptance,
    counted_bins,
    drafted_engines,
    generated,
    make_request,
    plain_answers,
    random_prompt,
    run,
    sized_requests,
    texts_of,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import ATTENTION, play
from slipstream.tests.tables import each_case


@pytest.fixture(scope="module")
def requests(target) -> list[Request]:
    """Returns requests with grammars that forbid their free answers."""
    free = sized_requests((5, 9, 33), max_tokens=40, ignore_eos=True, temperature=0.0)
    answers = plain_answers(target, free)
    requests_with_grammars = []
    for request in free:
        tokens = answers[request.id]
        words = [tuple(tokens[at : at + size]) for at, size in ((3, 2), (5, 3), (20, 2))] + [(tokens[23],)]
        params = replace(
            request.params,
            ignore_eos=False,
            stop_token_ids=tuple({tokens[2], tokens[11]} - {tokens[23]}),  # which generate would allow
            min_tokens=25,
            bad_words=tuple(word for word in words if request.prompt[-1] != word[0]),  # generate looks there, too
        )
        requests_with_grammars.append(replace(request, params=params))
    return requests_with_grammars


@pytest.fixture(scope="module")
def expected(requests, target) -> Tokens:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ends = list({*model.generation_config.to_dict().get("eos_token_id_list", []), 2})  # tests' end of text
    answers = {}
    for request in requests:
        params = request.params
        answers[request.id] = generated(
            model,
            request,
            min_new_tokens=params.min_tokens,
            eos_token_id=[*ends, *params.stop_token_ids],
            bad_words_ids=[list(word) for word in params.bad_words],
        )
    return answers


@pytest.fixture(scope="module")
def build(target, requests, tmp_path_factory) -> Build:
    """(drafter, options) -> engine; drafts know the answers."""
    return drafted_engines(target, tmp_path_factory.mktemp("drafts"), texts_of(target, requests))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_transformers_generate(drafter, build, requests, expected):
    engine = build(drafter)
    answers = run(engine, requests)
    if drafter == "ngram":  # it knows what it has seen
        answers = run(engine, requests)
    assert tokens_of(answers) == expected
    if drafter not in ("none", "eagle3"):
        assert acceptance(answers) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_passes_say_the_same(temperature, target, draft, requests, build):
    """Where the host reads tokens a step later, as long as nothing is constrained."""
    seeded = [replace(request, params=replace(request.params, temperature=temperature, seed=3)) for request in requests]
    free = make_request("free", random_prompt(20, 1), temperature=0.0, max_tokens=50)
    sizes = {"max_running": 4, "kv_cache_tokens": 2048, "prefill_graph_tokens": 64}
    engine = play(EngineConfig(target=str(target), draft=str(draft), attention=ATTENTION, **sizes))
    assert tokens_of(run(engine, [free, *seeded])) == tokens_of(run(build("none"), [free, *seeded]))


WORDS = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple), max_size=30)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), WORDS, st.sets(st.integers(0, 99)), st.integers(0, 9))
def test_a_token_is_forbidden_by_the_path_before_it(answer, path, words, ends, min_tokens):
    words = [(*(token % 3 for token in start), last) for *start, last in words]
    constrained = ConstrainedRequest(answer, 99, min_tokens, TokenSet.of(ends), BadWords.of(tuple(words)))
    mask = np.full(4, 2**32 - 1, np.uint32)
    for places, bits in constrained.forbidden_after(path):
        mask[places] &= bits
    text = (*answer, *path)
    expected = {last for *start, last in words if start and text[-len(start) :] == tuple(start)}
    expected |= ends if len(text) < min_tokens else set()
    assert {token for token in range(128) if not mask[token // 32] >> token % 32 & 1} == expected


class SlowGrammars:
    """Grammars that allow all, whose name says what takes too long. They force token 9."""

    def matcher(self, compiled: str, _: Any) -> Any:
        def forced(last, limit):  # noqa: ARG001
            return ([], np.empty((0, 3), np.uint32)) if compiled == "text" else ([9], full_masks(2))

        return SimpleNamespace(
            name=compiled,
            is_over=False,
            is_slow=compiled == "push",
            is_cheap=compiled != "average",
            push=lambda _: True,
            forced=forced,
        )

    def allowed(self, matchers: Any, trees: Any) -> Any:
        sizes = []
        for matcher, (tokens, _) in zip(matchers, trees, strict=True):
            matcher.is_slow |= matcher.name == "root"
            sizes.append({"root": 1, "nodes": 1, "crowded": 0}.get(matcher.name, len(tokens)))
        return list(map(full_masks, sizes))


def test_a_grammar_reads_a_text_once_though_its_request_is_preempted():
    read = []
    stage = Constraints({2}, vocab_size=96, grammars=SlowGrammars(), nodes=4)
    params = SamplingParams(max_tokens=9, grammar=Grammar("regex", "x"))
    request = Request(id="a", prompt=[4], params=params, compiled_grammar="quick")
    stage.admit(3, request, [4])
    matcher = stage._states[3].matcher
    matcher.push = lambda tokens: read.append(tokens) or True
    stage.run(Proposed([3], np.array([[[6]], [[-1]]], np.int32), np.array([[2, 5, 6]], np.int32)), 1)
    stage.release(3, [4, 5, 6], resumes=True)
    stage.admit(1, request, [4, 5, 6, 7])
    assert stage._states[1].matcher is matcher
    assert read == [[5, 6], [7]]
    for tokens, resumes in (([4, 5, 6, 7], False), ([4, 5, 8], True)):  # ended; or another text
        stage.release(1, [4, 5, 6, 7], resumes=resumes)
        stage.admit(1, request, tokens)
        assert stage._states[1].matcher is not matcher


def test_a_request_has_no_grammar_of_an_earlier_one_of_its_name():
    """`LLM` calls the requests of each call "0", "1" and so on, and one may be aborted before it resumes."""
    stage = Constraints({2}, vocab_size=96, grammars=SlowGrammars(), nodes=4)
    params = SamplingParams(max_tokens=9, grammar=Grammar("regex", "x"))
    stage.admit(3, Request(id="0", prompt=[4], params=params, compiled_grammar="quick"), [4])
    stage.release(3, [4], resumes=True)
    stage.admit(3, Request(id="0", prompt=[4], params=SamplingParams(max_tokens=9)), [4])
    assert not stage.slots


def full_masks(count: int) -> Any:
    return np.full((count, 3), 2**32 - 1, np.uint32)


@pytest.mark.parametrize("late", [False, True])
def test_what_takes_long_ends_its_request_or_its_drafts_alone(late):
    stage = Constraints({2}, vocab_size=96, grammars=SlowGrammars(), nodes=4)
    params = SamplingParams(max_tokens=9, grammar=Grammar("regex", "x"))
    push, root, nodes, average, text, quick, crowded = range(7)
    for slot, name in enumerate(("push", "root", "nodes", "average", "text", "quick", "crowded")):
        stage.admit(slot, Request(id="", prompt=[4], params=params, compiled_grammar=name), [4])
    assert stage.undrafted == {average}
    proposed = np.array([[[7, 8]] * 7, [[-1, 0]] * 7], np.int32)
    edits = stage.run(Proposed([*range(7)], proposed, np.array([[1, 5]] * 7, np.int32)), 4, late=late)
    masked = {mask.slot: mask.nodes for mask in edits.masks}
    chains = {}
    for proposal in edits.proposals:
        for slot, tokens, count in zip(proposal.slots, proposal.nodes[0].tolist(), proposal.counts, strict=True):
            chains[slot] = tokens[:count]
    if late:
        assert edits.errors == {push: TOO_SLOW, root: TOO_SLOW, nodes: GIVEN_UP, crowded: CROWDED_OUT}
        assert chains == {average: [7, 9], quick: [7, 9]}, "for the policy alone"
        assert [masked[slot] for slot in (average, text, quick)] == [[0, 1]] * 3
        assert stage.undrafted == {average}
        return
    assert edits.errors == {push: TOO_SLOW, root: TOO_SLOW, crowded: CROWDED_OUT}
    assert chains == {nodes: [7], average: [7], quick: [7, 9]}
    assert [masked[slot] for slot in (nodes, average, text, quick)] == [[0], [0], [0, 1], [0, 1]]
    assert stage.slots == {nodes, average, text, quick}


def test_masks_are_those_of_each_node():
    stage = Constraints({2}, 70, SlowGrammars(), nodes=1)
    params = SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=(69,), bad_words=((5, 6),))
    stage.admit(1, Request(id="", prompt=[4], params=params), [4])
    stage.admit(0, Request(id="", prompt=[4], params=SamplingParams(max_tokens=9)), [4])
    assert stage.slots == {1}
    nodes = np.array([[[3, 3, 3, -1], [5, 8, 5, -1]], [[-1, 0, 1, -1], [-1, 0, 0, -1]]], np.int32)
    [masks] = stage.run(Proposed([0, 1], nodes, np.array([[1, 3, -1], [1, 5, -1]], np.int32)), 4).masks
    assert masks.slot == 1
    bits = ((masks.allowed[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1).reshape(len(masks.nodes), -1)[:, :70]
    forbidden = {node: set(np.flatnonzero(row == 0).tolist()) for node, row in zip(masks.nodes, bits, strict=True)}
    assert forbidden == {0: {2, 69, 6}, 1: {2, 69}, 2: {2, 69, 6}}
    stage.release(1, [])
    assert not stage.slots


def test_a_request_that_may_end_is_free_again(build):
    engine = build("eagle3", max_running=2)
    stage = engine.stages[-1]
    counts = []
    run(engine, [make_request("0", [5, 6], max_tokens=30, min_tokens=6)], lambda *_: counts.append(len(stage.slots)))
    assert counts[0] == 1
    assert counts[-1] == 0


def test_constrained_requests_do_not_teach_what_others_accept(build, monkeypatch):
    engine = build("eagle3")
    counted = counted_bins(engine, monkeypatch)
    free = make_request("free", random_prompt(9, 1), max_tokens=10, ignore_eos=True)
    bound = [
        make_request(str(index), random_prompt(9, index), max_tokens=40, ignore_eos=True, frequency_penalty=0.1)
        for index in range(2)
    ]
    run(engine, [free, *bound])
    assert counted[0] == 1
    assert counted[-1] >= 1, "alone they count: nothing else is known"
    assert max(counted) == 2


@each_case()
def test_wrong_values_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(max_tokens=9, **params)


def test_bad_words_of_one_token_are_a_bias():
    params = SamplingParams(max_tokens=9, logit_bias={3: 1.0}, bad_words=[[4], [5, 6], [4]])
    assert params.biases == {3: 1.0, 4: -math.inf}
    assert params.bad_words == ((4,), (5, 6))
    assert params.changes_logits
    assert not SamplingParams(max_tokens=9, top_p=0.5).changes_logits


def test_random_bad_words_never_appear(build):
    rng = random.Random(0)
    words = tuple(tuple(rng.randrange(VOCAB) for _ in range(2)) for _ in range(400))
    requests = sized_requests((3, 17), max_tokens=60, ignore_eos=True, temperature=1.5, bad_words=words)
    answers = run(build("eagle3 tree"), requests)
    for answer in answers.values():
        assert not set(words) & set(zip(answer.tokens, answer.tokens[1:], strict=False))
    assert tokens_of(answers) == tokens_of(run(build("none"), requests))
