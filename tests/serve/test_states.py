"""States of recurrent layers under traffic with drafts, hits, preemption and aborts: after every step those of running
sequences, and all snapshots, are what their texts give from the first token on."""

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models.layers.recurrence import State
from slipstream.serve.engine import idle
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.kv_cache import Node
from slipstream.serve.engine.kv_states import StatePages
from slipstream.serve.engine.plan import StepOutput, StepPlan
from slipstream.serve.request import Request
from slipstream.serve.runner import recurrence
from slipstream.tests.pairwise import gate_of
from slipstream.tests.serve.engine_runs import (
    MOST_REQUESTS,
    make_request,
    random_prompt,
    run,
    serve_traffic,
    tokens_of,
    watch_outputs,
)
from slipstream.tests.serve.test_layer_kinds import DRAFTERS, GRIDS, SPECS, build_drafted, narrow, requests_of
from slipstream.tests.serve.test_lossless import preempt_some
from slipstream.tests.spec_targets import NaiveAttention, Reference, save_spec, save_spec_draft

HYBRIDS = ("delta nets", "recurrent")
NUM_REQUESTS = 10


@dataclass(slots=True)
class StateOracle:
    """States of texts by a plain reference, which computes each text once."""

    reference: Reference
    texts: list[tuple[list[int], NaiveAttention]] = field(default_factory=list)

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> list[State]:
        """After all tokens, of each layer."""
        attention = next((run for text, run in self.texts if text[: len(tokens)] == tokens), None)
        if attention is None:
            attention = NaiveAttention()
            self.reference.target(torch.tensor(tokens), attention)
            self.texts.append((tokens, attention))
        return [attention.states[id][len(tokens) - 1] for id in sorted(attention.states)]

    @torch.inference_mode()
    def replayed(self, state: Sequence[State], engine: Engine, slot: int) -> list[State]:
        """States after the accepted nodes of the last round."""
        device = engine.runner.passes.states
        layers = self.texts[0][1].layers
        result = list(state)
        for node in (node for node in device.replays[slot].tolist() if node >= 0):
            for id, layer in layers.items():
                record = {name: values[slot, node][None].cpu() for name, values in device.records[id].items()}
                result[id] = layer.step(result[id], record)
        return result

    def check(self, engine: Engine):
        """Compares all that is kept. Raises AssertionError."""
        place, pool = next(pair for pair in enumerate(engine.scheduler.cache.groups) if isinstance(pair[1], StatePages))
        for node, entry in pool._attached.items():
            compare(stored(engine, entry), self.states(text_of(node, pool.page_size)))
        for sequence in engine.scheduler._running:
            if sequence.num_computed == 0:
                continue
            expected = self.states(sequence.tokens[: sequence.num_computed])
            states = stored(engine, sequence.table.groups[place].source)
            compare(self.replayed(states, engine, sequence.slot) if sequence.decoding else states, expected)


def stored(engine: Engine, entry: int) -> list[State]:
    return [
        {name: values[entry][None].cpu() for name, values in layer.items()}
        for layer in engine.runner.passes.states.layers
    ]


def text_of(node: Node, page_size: int) -> list[int]:
    """The tokens from the root of the prefix tree to the end of a node's page."""
    pages = deque()
    while node.parent is not None:
        pages.appendleft([int(token) for token in node.key[1 : 1 + page_size]])
        node = node.parent
    return [token for page in pages for token in page]


def compare(states: Sequence[State], expected: Sequence[State]):
    torch.testing.assert_close(list(states), list(expected), atol=1e-4, rtol=1e-4)


@dataclass(slots=True)
class Situations:
    """Rounds that were seen: of requests without drafts."""

    had_drafts: dict[int, bool] = field(default_factory=dict)  # by slot: in its last round
    after_drafts: int = 0
    beside_drafts: int = 0

    def look(self, plan: StepPlan, output: StepOutput):
        has_drafts = [int(count) > 1 for count in output.num_verified[: len(plan.slots)]]
        for slot, drafted in zip(plan.slots, has_drafts, strict=True):
            self.after_drafts += self.had_drafts.get(slot, False) and not drafted
            self.beside_drafts += not drafted and any(has_drafts)
            self.had_drafts[slot] = drafted


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for name in HYBRIDS:
        folder = folders[name] = tmp_path_factory.mktemp("hybrids")
        save_spec(SPECS[name], folder / "target")
        for kind in ("eagle3", "dflash"):
            save_spec_draft(kind, SPECS[name], folder / "target", folder / kind)
    return folders


@pytest.fixture(scope="module")
def references(folders) -> dict[str, Reference]:
    return {name: Reference.load(SPECS[name], folders[name] / "target") for name in HYBRIDS}


def kinds_of(name: str) -> Iterator[Request]:
    """Greedy and sampled requests; every third without drafts."""
    for temperature in (0.0, 1.0):
        for index, request in enumerate(requests_of(name, temperature)):
            params = replace(request.params, speculation={"enabled": index % 3 != 1})
            yield replace(request, id=f"{request.id} {temperature}", params=params)


def check_traffic(
    name: str, drafter: str, folder: Path, reference: Reference, num_requests: int, **options: Any
) -> Situations:
    kinds = {request.id: request for request in kinds_of(name)}
    expected = reference.answers(list(kinds.values()))
    oracle = StateOracle(reference)
    for kind, request in kinds.items():
        oracle.states([*request.prompt, *expected[kind]])
    engine = build_drafted(SPECS[name], folder, drafter, **narrow(name) | options)
    engine.overlap = False  # so that the host knows of each step what the device has
    situations = Situations()
    watch_outputs(engine, situations.look)
    rng = random.Random(3)

    def more(number):
        is_rare = drafter == "ngram" and not situations.after_drafts
        return number < num_requests or (is_rare and number < MOST_REQUESTS)

    def check():
        oracle.check(engine)
        preempt_some(engine, rng)

    serve_traffic(engine, kinds, expected, rng, more, 7, check)
    return situations


@pytest.mark.parametrize(
    ("name", "drafter", "num_requests"),
    gate_of(
        product(HYBRIDS, DRAFTERS, [NUM_REQUESTS, 100]),
        [("delta nets", "tree", NUM_REQUESTS), ("recurrent", "ngram", NUM_REQUESTS)],
    ),
)
def test_states_are_those_of_the_text(name, drafter, num_requests, folders, references):
    """Rounds of a request without drafts after others with, and beside those of others; slots used again."""
    situations = check_traffic(name, drafter, folders[name], references[name], num_requests)
    assert (situations.beside_drafts > 0) == (drafter != "none")
    if drafter == "ngram":
        assert situations.after_drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_states_of_captured_passes(drafter, folders, references):
    name = "recurrent"
    options = {"captured": True, "prefill_budget": 32, "prefill_graph_tokens": 32}
    check_traffic(name, drafter, folders[name], references[name], 3 * NUM_REQUESTS, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_states_on_a_gpu(drafter, folders, references):
    name = "delta nets"
    check_traffic(name, drafter, folders[name], references[name], 6 * NUM_REQUESTS, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "tree"])
def test_states_of_the_kernels(drafter, folders, references, monkeypatch):
    """The kernels that a GPU runs, interpreted."""
    monkeypatch.setattr(recurrence, "use_triton", lambda _: True)
    check_traffic("delta nets", drafter, folders["delta nets"], references["delta nets"], NUM_REQUESTS)


@pytest.mark.parametrize(
    ("name", "drafter", "captured"),
    gate_of(product(HYBRIDS, DRAFTERS, [False, True]), [("recurrent", "tree", True)]),
)
def test_states_of_idle_time(name, drafter, captured, folders, references, monkeypatch):
    """After each chunk of a conversation that has ended; its next turn goes on from the last one."""
    monkeypatch.setattr(idle, "SLOW_MS", math.inf)
    oracle = StateOracle(references[name])
    options = {"max_running": 8, "prefill_budget": 64, "prefill_graph_tokens": 64, "page_size": 1}
    engine = build_drafted(SPECS[name], folders[name], drafter, captured=captured, **options)
    grid = GRIDS[name]
    requests = requests_of(name, 1.0, max_tokens=grid + 10)
    for _ in range(2):
        answers = run(engine, requests)
        assert tokens_of(answers) == references[name].answers(requests)
        assert any(answer.counts.idle_tokens for answer in answers.values()) == ("next 0" in answers)
        texts = {request.id: request.prompt + answers[request.id].tokens for request in requests}
        for text in texts.values():
            oracle.states(text)
        while engine.work_idle():
            oracle.check(engine)
        requests = [
            make_request(f"next {index}", [*text, 5], seed=index, max_tokens=8, temperature=1.0)
            for index, text in enumerate(texts.values())
        ]


@pytest.mark.parametrize(
    ("name", "drafter"), gate_of(product(HYBRIDS, ["none", "chain"]), [("recurrent", "none"), ("recurrent", "chain")])
)
def test_conversations_behind_a_shared_beginning_are_hit(name, drafter, folders, references):
    """The beginning ends off the grid, where no state was kept: the second conversation keeps one there for others, and
    its own turns are found all the same."""
    oracle = StateOracle(references[name])
    engine = build_drafted(SPECS[name], folders[name], drafter, max_running=8, prefill_budget=200, page_size=1)
    grid = GRIDS[name]
    shared = random_prompt(grid + 3, 99)
    for number in range(3):
        text = shared + random_prompt(grid, number)
        num_found = grid * (number == 2)  # tokens of which the next turn finds a state
        for turn in range(3):
            request = make_request(f"{number} {turn}", text, seed=turn, max_tokens=4, temperature=1.0)
            answers = run(engine, [request], lambda *_: oracle.check(engine))
            assert tokens_of(answers) == references[name].answers([request])
            assert answers[request.id].counts.cached_tokens == num_found
            num_found = (len(text) - 1) // grid * grid
            text = [*text, *answers[request.id].tokens, 5]


@pytest.mark.parametrize("drafter", ["none", "tree"])
def test_an_abort_in_mid_prompt_leaves_nothing(drafter, folders, references):
    """The next request has its slot and its entry, and begins like it."""
    name = "recurrent"
    oracle = StateOracle(references[name])
    engine = build_drafted(SPECS[name], folders[name], drafter, **narrow(name) | {"max_running": 2})
    prompt = random_prompt(50, 7)
    for cut in (1, 2):
        engine.add(make_request(f"cut {cut}", prompt, max_tokens=4))
        for _ in range(cut):
            engine.step()
            oracle.check(engine)
        [sequence] = engine.scheduler._running
        assert 0 < sequence.num_computed < len(prompt)
        assert engine.abort(f"cut {cut}") is not None
    request = make_request("next", prompt[:40] + random_prompt(9, 8), max_tokens=12)
    answers = run(engine, [request], lambda *_: oracle.check(engine))
    assert answers["next"].tokens == references[name].answer(request)
    assert answers["next"].counts.cached_tokens > 0
