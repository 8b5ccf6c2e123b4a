"""The logits stage in the engine: penalties and bias with every drafter, masks of a pass, rows that cannot be sampled.

tests/serve/test_lossless.py has requests with processors among its samplings; tests/kernels/test_processors.py compares
the numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.kernels.speculation.ragged import BINS, admit
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.plan import Admission, StepPlan
from slipstream.serve.request import Request, SamplingParams
from slipstream.serve.runner.request_state import MOST_ENTRIES, RequestState
from slipstream.tests.pairwise import gate_of, some_of
from slipstream.tests.serve.engine_runs import (
    DRAFTERS,
    Build,
    acceptance,
    decoding,
    drafted_engines,
    generated,
    make_request,
    random_prompt,
    run,
    sized_requests,
    texts_of,
    tokens_of,
)

GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.9, "logit_bias": {5: 3.0, 9: -100.0, 40: 1.5}},
]


@pytest.fixture(scope="module")
def build(target, tmp_path_factory) -> Build:
    """(drafter, engine options) -> engine. The drafts know the greedy answers."""
    folder = tmp_path_factory.mktemp("drafts")
    texts = [text for params in GREEDY for text in texts_of(target, requests_of(params))]
    return drafted_engines(target, folder, texts)


def requests_of(params: dict[str, Any]) -> list[Request]:
    return sized_requests((1, 9, 33), max_tokens=30, ignore_eos=True, **params)


@pytest.mark.parametrize(
    ("drafter", "params"),
    gate_of(product(DRAFTERS, GREEDY), [("none", GREEDY[0]), ("eagle3 tree", GREEDY[1]), ("ngram", GREEDY[0])]),
)
def test_greedy_tokens_are_those_of_transformers_generate(drafter, params, build, target):
    engine = build(drafter)
    requests = requests_of(params)
    answers = run(engine, requests)
    if drafter == "ngram":  # it knows what it has seen
        answers = run(engine, requests)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    bias = {(token,): value for token, value in params.get("logit_bias", {}).items()}
    for request in requests:
        changes = {"repetition_penalty": params["repetition_penalty"], "sequence_bias": bias or None}
        assert answers[request.id].tokens == generated(model, request, eos_token_id=None, **changes)
    plain = run(build("none"), requests_of({}))
    assert tokens_of(plain) != tokens_of(answers), "the test needs parameters that matter"
    if drafter != "none":
        assert acceptance(answers) > 0


@pytest.mark.parametrize("drafter", some_of(DRAFTERS, ["none", "eagle3 tree", "ngram"]))
def test_counts_hold_what_was_emitted(drafter, build):
    """After every step, for requests with penalties, whichever of them are preempted meanwhile."""
    params = {"temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": -0.3}
    requests = requests_of(params) + [make_request("plain", random_prompt(12, 3), temperature=0.8, max_tokens=30)]
    engine = build(drafter, kv_cache_tokens=110, page_size=1)
    steps = 0
    state = engine.runner.state

    def check(*_):
        nonlocal steps
        for sequence in engine.scheduler._running:
            length = len(sequence.request.prompt)
            text = sequence.tokens
            counts = state.processors.counts[sequence.slot].tolist()
            if sequence.request.id == "plain":
                assert int(state.processors.flags[sequence.slot]) == 0
                continue
            assert counts == [2 * text[length:].count(t) + (t in text[:length]) for t in range(len(counts))]
            steps += 1

    answers = run(engine, requests, check)
    assert steps > 20
    assert engine.scheduler.num_preemptions > 0
    alone = build("none", max_running=1)
    assert tokens_of(answers) == tokens_of(run(alone, requests))


def started(engine: Engine, params: list[dict[str, Any]]) -> StepPlan:
    """The next step of requests whose prompts are computed: it verifies all that is proposed. The one after that has
    its pages, too."""
    for index, fields in enumerate(params):
        engine.add(make_request(str(index), random_prompt(9 + index, index), max_tokens=60, ignore_eos=True, **fields))
    engine.step()
    sequences = decoding(engine)
    reserve = engine.planner.limits.reserve
    assert len(sequences) == len(params)
    for sequence in sequences:
        assert engine.scheduler.cache.extend(sequence.table, sequence.num_computed + 2 * reserve)
    plan = engine.planner.plan()
    max_nodes = engine.planner.limits.most_nodes
    return replace(engine.planner.choose(plan, will_be_masked=True), nodes=len(plan.slots) * max_nodes, width=max_nodes)


@contextmanager
def changed_logits(engine: Engine, change: Callable[[Tensor], Tensor], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, the target's logits (rows, V) go through `change`."""
    logits = engine.runner.target.logits
    with patch.context() as scope:
        scope.setattr(type(engine.runner.target), "logits", lambda _, hidden: change(logits(hidden)))
        yield


@pytest.mark.parametrize("drafter", ["none", "eagle3", "eagle3 tree", "dflash"])
def test_a_request_that_cannot_be_sampled_ends_alone(drafter, build, monkeypatch):
    """NaN in the rows of one request: its step emits -1 last, the next one runs, and the others do not notice."""
    params = [{"temperature": 0.7}, {}, {"presence_penalty": 0.5}]
    broken = build(drafter)
    sound = build(drafter)
    outputs = []
    for engine in (sound, broken):
        plan = started(engine, params)
        state = engine.runner.state
        rows = admit(state.stored.probabilities, torch.tensor(plan.slots), torch.tensor([plan.nodes]), 64).tolist()
        rows_of_request = slice(rows[0], rows[0] + rows[1])

        def poison(logits, rows_of_request=rows_of_request, is_broken=engine is broken):
            logits = logits.clone()
            logits[rows_of_request] = torch.nan if is_broken else logits[rows_of_request]
            return logits

        with changed_logits(engine, poison, monkeypatch):
            first = engine.runner.launch(plan).read()
        bounds = tuple(bound + rows[index] for index, bound in enumerate(plan.bounds))
        after = replace(plan, number=plan.number + 1, admissions=(), pages=(), bounds=bounds)
        outputs.append((first, engine.runner.launch(after).read()))
    (expected, later), (ending, after) = outputs
    assert ending.emitted(1) == [-1]
    assert list(ending.errors) == [plan.slots[1]]
    assert not expected.errors
    for emitted, other in ((ending, expected), (after, later)):
        for name in ("num_emitted", "num_verified", "tokens", "bins"):
            np.testing.assert_equal(getattr(emitted, name)[[0, 2]], getattr(other, name)[[0, 2]])


@pytest.mark.parametrize("drafter", ["none", "eagle3", "dflash"])
def test_a_prompt_that_cannot_be_sampled(drafter, build, monkeypatch):
    """Its pass gives -1 and the drafter proposes something all the same."""
    engine = build(drafter)
    engine.add(make_request("0", random_prompt(9, 0)))
    with changed_logits(engine, lambda logits: logits * torch.nan, monkeypatch):
        (output,) = engine.step()
    assert output.finish_reason == "error"
    assert "logits are not finite" in output.error
    assert not engine.has_work


@pytest.mark.parametrize("drafter", ["none", "eagle3 tree", "ngram"])
def test_nan_ends_a_request_and_the_next_one_is_served(drafter, build, monkeypatch):
    """In its third pass; what it had said before stands."""
    requests = requests_of({})
    expected = tokens_of(run(build("none"), requests))
    engine = build(drafter, max_running=1)
    passes = []

    def poison(logits):
        passes.append(len(logits))
        return logits * torch.nan if len(passes) == 3 else logits

    with changed_logits(engine, poison, monkeypatch):
        answers = run(engine, requests)
    first, *healthy = requests
    assert [answers[request.id].finish_reason for request in requests] == ["error", "length", "length"]
    assert "logits are not finite" in answers[first.id].error
    assert answers[first.id].tokens == expected[first.id][: len(answers[first.id].tokens)]
    assert answers[first.id].tokens
    assert all(answers[request.id].tokens == expected[request.id] for request in healthy)


def test_admission_fills_what_a_request_needs_and_nothing_else():
    state = RequestState(2, 4, 16, 4, torch.device("cpu"), vocab_size=8)

    def admit(prompt, tokens, **params):
        request = Request(id="", prompt=prompt, params=SamplingParams(max_tokens=9, **params))
        state.change([Admission(1, request, tuple(tokens))])
        state.write_changes()

    processors = state.processors
    admit([1, 2, 1], [1, 2, 1, 5, 5, 2], presence_penalty=0.5)  # resumed, with three tokens of its answer
    assert processors.flags.tolist() == [0, 1, 0]
    assert processors.counts[1].tolist() == [0, 1, 3, 0, 0, 4, 0, 0]
    assert [float(x[1]) for x in (processors.repetition, processors.frequency, processors.presence)] == [1, 0, 0.5]
    admit([3], [3], logit_bias={7: -2.5, 0: 1})
    assert processors.flags.tolist() == [0, 2, 0]
    assert processors.bias[1].tolist() == [1, 0, 0, 0, 0, 0, 0, -2.5]
    assert processors.counts[1].tolist() == [0, 1, 3, 0, 0, 4, 0, 0], "nothing reads them"
    admit([3], [3])
    assert processors.flags.tolist() == [0, 0, 0]
    admit([3], [3], repetition_penalty=1.5)
    assert processors.counts[1].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert not processors.counts[[0, 2]].any()
    assert not processors.bias[[0, 2]].any()


def test_the_state_knows_its_size():
    """Memory that is sized without it would be missing later."""
    small, large = (RequestState(3, 4, 16, 4, torch.device("cpu"), vocab_size).nbytes for vocab_size in (0, 1000))
    words = 32  # of a mask, for each of 3 * 4 rows
    assert large - small == 4 * 1000 * 8 + 4 * 12 * words
    a_slot = 4 + 4 * 8 + 4 * 4 * 4 + 8 + 8 + 4 + 8 + 4 + 4 + 4 * 4 + 4 * 4 + 4
    inputs = 2 + 2 * 4 + 2 + 4 * 8 + 2 * MOST_ENTRIES  # a budget, slots twice; a header, requests, entries of pages
    assert small == 4 * a_slot + 4 * BINS + 8 * inputs
