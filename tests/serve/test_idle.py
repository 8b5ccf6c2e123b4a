"""Ended conversations, computed as prompts in idle time: next turns find answers, and no answer changes."""

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from slipstream.serve.engine import idle, process
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.process import Ping, Step, serve_requests
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.request import Output, Request, SamplingParams
from slipstream.tests.pairwise import gate_of, some_of
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft
from slipstream.tests.random_targets import new_config, save_random_target
from slipstream.tests.serve.cache_invariants import check_scheduler, nodes_of
from slipstream.tests.serve.engine_runs import (
    DRAFTERS,
    build_engine,
    make_request,
    plain_answers,
    random_prompt,
    run,
    tokens_of,
)
from slipstream.tests.serve.fake_engine import FakeEngine
from slipstream.tests.serve.fake_server import COMPLETIONS, client_of, serving, wait_until
from slipstream.tests.sources import HYBRID, TINY

GRID = 64
ALL_DRAFTERS = DRAFTERS | {"mtp": {}}
LENGTHS = {"short": 20, "block": GRID, "long": 150}  # of first prompts
MOST_TOKENS = 70  # of an answer, more than GRID
SAVED = {"eagle3": save_random_draft, "dflash": save_random_dflash}  # makers of drafts
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "exact": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A target of two delta nets and an attention."""
    folder = tmp_path_factory.mktemp("targets") / "small"
    layers = ["linear_attention", "full_attention", "linear_attention"]
    config = new_config("qwen3-5", num_hidden_layers=3, layer_types=layers, max_position_embeddings=1024)
    save_random_target(config, folder)
    return folder


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """A block each, whatever time one takes."""
    monkeypatch.setattr(idle, "CHUNK_MS", 0.0)
    monkeypatch.setattr(idle, "LEAST_CHUNKS", 0.0)
    monkeypatch.setattr(idle, "SLOW_MS", math.inf)


def build(target: Path, draft: str = "none", **options: Any) -> Engine:
    return build_engine(target, draft, **{"kv_cache_tokens": 4096} | options)


def turn_of(name: str, text: list[int], temperature: float = 0.0, **params: Any) -> Request:
    return make_request(
        name, text, **{"max_tokens": MOST_TOKENS, "temperature": temperature, "ignore_eos": True} | params
    )


def work(engine: Engine) -> int:
    """Computes all that is left to compute. Returns the number of chunks."""
    count = 0
    while engine.work_idle():
        check_scheduler(engine.scheduler)
        count += 1
    return count


def uncached(target: Path, requests: list[Request], **options: Any) -> dict[str, list[int]]:
    """Answers of an engine without a draft that finds nothing cached."""
    apart = [replace(request, namespace=request.id) for request in requests]
    return plain_answers(target, apart, max_running=4, **options)


def found(engine: Engine, text: list[int]) -> int:
    """Tokens that the next turn of a text finds, which differs from anything after it."""
    return (len(text) - max(engine.scheduler.lookahead, 1)) // GRID * GRID


@pytest.mark.parametrize(
    ("drafter", "temperature"),
    gate_of(
        product(ALL_DRAFTERS, (0.0, 1.0)),
        [("eagle3", 1.0)],
    ),
)
def test_next_turns_find_answers_and_are_those_of_an_engine_that_never_cached(drafter, temperature, small, tmp_path):
    check_turns(HYBRID if drafter == "mtp" else small, drafter, temperature, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(("drafter", "temperature"), list(product(ALL_DRAFTERS, (0.0, 1.0))))
def test_next_turns_on_a_gpu(drafter, temperature, tmp_path):
    """Bit for bit, beside other requests."""
    check_turns(HYBRID, drafter, temperature, tmp_path, **ON_GPU)


def check_turns(target: Path, drafter: str, temperature: float, folder: Path, **options: Any):
    """`options`: also those of the engine that answers without a cache."""
    draft = drafter.split()[0]
    if draft in SAVED:
        SAVED[draft](target, folder / "draft")
        draft = str(folder / "draft")
    engine = build(target, draft, drafter=ALL_DRAFTERS[drafter], **options)
    texts = {name: random_prompt(length, length) for name, length in LENGTHS.items()}
    answered = {}
    for turn in range(3):
        requests = [turn_of(f"{name} {turn}", text, temperature, seed=turn) for name, text in texts.items()]
        answers = run(engine, requests)
        assert tokens_of(answers) == uncached(target, requests, **options)
        for request in requests:
            counts = answers[request.id].counts
            name = request.id.split()[0]
            assert counts.miss_reason is None
            if turn:
                num_found = found(engine, answered[name])
                assert counts.cached_tokens == num_found
                assert counts.idle_tokens == num_found - found(engine, answered[name][:-MOST_TOKENS])
            answered[name] = request.prompt + answers[request.id].tokens
            texts[name] = answered[name] + random_prompt(9, turn)
        engine.drain()
        computed = engine.counts()
        assert work(engine) >= len(requests)
        assert engine.counts().steps == computed.steps, "no step of a request"
        assert engine.counts().prompt_rows == computed.prompt_rows
        assert not engine.has_work
    counted = engine.counts().idle_tokens
    assert counted % GRID == 0
    assert counted >= 3 * len(LENGTHS) * GRID


def test_an_answer_that_passes_no_block_is_left_alone(small):
    engine = build(small)
    run(engine, [turn_of("short", random_prompt(GRID + 1, 1), max_tokens=GRID - 1)])
    assert not engine.work_idle()
    aborted = turn_of("aborted", random_prompt(20, 2))
    engine.add(aborted)
    while engine.has_work:
        engine.step()
        if any(sequence.stats.completion_tokens > GRID for sequence in engine.scheduler.running):
            engine.abort(aborted.id)
    assert not engine.work_idle(), "its client is gone"


@pytest.mark.parametrize(("target", "options"), [(TINY, {}), (HYBRID, {"idle_prompts": False})])
def test_some_engines_compute_nothing_in_idle_time(target, options):
    """Answers of other layers are kept as they are."""
    engine = build_engine(target, **options)
    run(engine, [turn_of("first", random_prompt(120, 1), max_tokens=10)])
    assert not engine.work_idle()


def test_an_engine_tells_whether_it_has_work(small):
    engine = build(small)
    loads = []
    engine.on_load = loads.append
    run(engine, [turn_of("first", random_prompt(120, 1), max_tokens=10)])
    assert loads == [True]
    chunks = work(engine)
    assert chunks > 0
    assert loads == [True] * (1 + chunks) + [False]


def test_a_namespace_finds_its_own_answers_only(small):
    engine = build(small)
    first = replace(turn_of("first", random_prompt(70, 1)), namespace="tenant")
    text = first.prompt + run(engine, [first])["first"].tokens
    work(engine)
    turns = [replace(turn_of(name, [*text, 9]), namespace=name) for name in ("tenant", "other", "")]
    answers = run(engine, turns)
    assert [answers[turn.id].counts.cached_tokens for turn in turns] == [found(engine, text), 0, 0]
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 1


@pytest.mark.parametrize("num_chunks", some_of([0, 1, 3], [1]))
def test_a_request_in_the_middle_goes_first_and_nothing_is_lost(num_chunks, small):
    engine = build(small)
    text = answered(engine, turn_of("first", random_prompt(120, 1), max_tokens=GRID * num_chunks + 10))
    for _ in range(num_chunks):
        assert engine.work_idle()
    other = turn_of("other", random_prompt(90, 2))
    answers = run(engine, [other], lambda *_: refuse_idle(engine))
    assert tokens_of(answers) == uncached(small, [other])
    turn = turn_of("turn", [*text, 5, 6])
    answers = run(engine, [turn])
    assert tokens_of(answers) == uncached(small, [turn])
    assert answers["turn"].counts.cached_tokens == GRID * (1 + num_chunks)
    assert answers["turn"].counts.idle_tokens == GRID * num_chunks
    before = engine.counts().idle_tokens
    work(engine)
    ends = [(turn.prompt, answers["turn"].tokens), (other.prompt, uncached(small, [other])["other"])]
    left = sum(found(engine, prompt + answer) - found(engine, prompt) for prompt, answer in ends)
    assert engine.counts().idle_tokens - before == left, "the turn has computed what was left of the first"


def refuse_idle(engine: Engine):
    assert not (engine.has_work and engine.work_idle()), "a request is open"


def answered(engine: Engine, request: Request) -> list[int]:
    """Prompt and answer."""
    return request.prompt + run(engine, [request])[request.id].tokens


def hit(engine: Engine, text: list[int]) -> int:
    """Tokens that the next turn of a text finds now."""
    return engine.scheduler.cache.look_up([*text, 5], "", engine.scheduler.lookahead)[1]


def test_nothing_is_given_up_where_no_page_is_free(small):
    engine = build(small, kv_cache_tokens=496)
    text = answered(engine, turn_of("first", random_prompt(70, 1)))
    cache = engine.scheduler.cache
    run(engine, [turn_of("filler", random_prompt(400, 2), max_tokens=1)])
    assert cache.num_free * cache.page_size < GRID
    nodes = nodes_of(cache)
    assert not engine.work_idle()
    assert nodes_of(cache) == nodes
    check_scheduler(engine.scheduler)
    assert hit(engine, text) == GRID


def test_answers_that_a_stop_string_ends_are_computed(small):
    """The server sees the string, and ends the request; those of clients that leave are not."""
    engine = build(small)
    texts = {is_whole: random_prompt(120, is_whole) for is_whole in (False, True)}
    for is_whole, text in texts.items():
        engine.add(turn_of(str(is_whole), [*text]))
        while len(text) < 130:
            text += [token for output in engine.step() for token in output.tokens]
        engine.abort(str(is_whole), is_whole=is_whole)
    assert work(engine) == 1
    assert [hit(engine, text) for text in texts.values()] == [GRID, 2 * GRID]


def test_the_newest_texts_come_first_and_the_oldest_are_forgotten(small, monkeypatch):
    monkeypatch.setattr(idle, "MOST_TEXTS", 2)
    engine = build(small)
    texts = [answered(engine, turn_of(str(seed), random_prompt(120, seed), max_tokens=10)) for seed in range(3)]
    assert engine.work_idle()
    assert [hit(engine, text) for text in texts] == [GRID, GRID, 2 * GRID]
    work(engine)
    assert [hit(engine, text) for text in texts] == [GRID, 2 * GRID, 2 * GRID]


def test_few_texts_are_computed_where_no_request_finds_one(small, monkeypatch):
    monkeypatch.setattr(idle, "PATIENCE", 2)
    monkeypatch.setattr(idle, "RARELY", 3)
    engine = build(small)
    texts = []
    computed = []
    for seed in range(8):
        texts.append(answered(engine, turn_of(str(seed), random_prompt(120, seed), max_tokens=10)))
        computed.append(work(engine))
    assert computed == [1, 1, 1, 0, 0, 1, 0, 0], "the third and the sixth of all are tried"
    assert run(engine, [turn_of("turn", [*texts[0], 5])])["turn"].counts.idle_tokens == GRID
    assert work(engine) > 0, "this text, since a text was found"


def test_a_slow_device_rarely_computes_a_text(small, monkeypatch):
    """A request that comes meanwhile would wait."""
    monkeypatch.setattr(idle, "SLOW_MS", 0.0)
    engine = build(small)
    computed = []
    for seed in range(4):
        answered(engine, turn_of(str(seed), random_prompt(120, seed), max_tokens=80 if seed == 0 else 10))
        computed.append(work(engine))
    assert computed == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("fixed_ms", "row_ms", "blocks"), [(1.0, 0.1, [1, 2, 3, 2, 3]), (36.0, 0.04, [*range(1, 10), 8, 9])]
)
def test_chunks_grow_while_they_take_little_longer_than_the_shortest(fixed_ms, row_ms, blocks, small, monkeypatch):
    """As on a GPU, where launches take most of a short pass."""
    monkeypatch.undo()
    scheduler = build(small, kv_cache_tokens=4096).scheduler
    prompts = idle.IdlePrompts(scheduler, GRID, 4096)
    end = GRID * sum(blocks)
    prompts._texts.append(idle.Text(turn_of("text", random_prompt(end + 1, 1)), 0, end))
    sizes = []
    for _ in blocks:
        chunk = prompts.begin()
        sizes.append(chunk.end - chunk.start)
        prompts.end(chunk, fixed_ms + row_ms * sizes[-1])
    assert sizes == [GRID * count for count in blocks]


def test_a_chunk_without_memory_ends_the_work_on_its_text_alone(small, monkeypatch):
    engine = build(small)
    text = answered(engine, turn_of("first", random_prompt(70, 1), max_tokens=130))
    assert engine.work_idle()

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_finish_target", fail)
        assert engine.work_idle()
    check_scheduler(engine.scheduler)
    assert not engine.work_idle()
    turn = turn_of("turn", [*text, 5])
    assert tokens_of(run(engine, [turn])) == uncached(small, [turn])


def test_a_server_with_one_place_keeps_the_state_of_the_last_turn(small):
    engine = build(small, max_running=1)
    text = random_prompt(120, 1)
    for turn in range(2):
        request = turn_of(str(turn), text, max_tokens=10)
        answer = run(engine, [request])[request.id]
        assert answer.tokens == uncached(small, [request])[request.id]
        assert answer.counts.cached_tokens == (found(engine, text[:-2]) if turn else 0)
        work(engine)
        text = [*request.prompt, *answer.tokens, 5, 6]


class BusyEngine(FakeEngine):
    """Has work for idle times, until it is told to stop."""

    def __init__(self):
        super().__init__(EngineConfig(target="x"))
        self.events: list[str] = []
        self.inbox: SimpleQueue[Any] = SimpleQueue()

    def work_idle(self) -> bool:
        self.events.append("idle")
        if self.events == ["idle"]:
            return True
        if self.events.count("step"):
            self.inbox.put(None)
        else:
            self.inbox.put(Request(id="a", prompt=[5], params=SamplingParams(max_tokens=1)))
        return True

    def step(self) -> list[Output]:
        self.events.append("step")
        return super().step()


class Sent:
    """A pipe."""

    def __init__(self):
        self.steps: list[Step] = []

    def send(self, message: Step):
        self.steps.append(message)


def test_messages_come_before_work_for_later(monkeypatch):
    """After each chunk, also the end."""
    monkeypatch.setattr(process, "QUIET_SECONDS", 0.001)
    pipe = Sent()
    engine = BusyEngine()
    serve_requests(engine, engine.inbox, pipe)
    assert engine.events == ["idle", "idle", "step", "idle"]
    assert [output.finish_reason for step in pipe.steps for output in step.outputs] == ["length"]
    engine = BusyEngine()
    engine.inbox.put(Ping())
    engine.inbox.put(None)
    serve_requests(engine, engine.inbox, pipe)
    assert engine.events == []


@pytest.mark.slow
def test_a_server_computes_answers_when_it_is_quiet():
    config = ServeConfig(target=str(HYBRID), port=0, max_running=4, kv_cache_tokens=4096)
    body = {"max_tokens": MOST_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with (
        serving(config, process.build_engine) as server,
        client_of(server) as client,
    ):

        def ask(prompt):
            answer = client.post(COMPLETIONS, json=body | {"prompt": prompt}).json()
            return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        def total(name):
            return float(re.findall(rf"^slipstream_{name} (\S+)$", client.get("/metrics").text, re.MULTILINE)[0])

        prompt = random_prompt(70, 1)
        tokens, _ = ask(prompt)
        wait_until(lambda: total("idle_tokens_total") == GRID, "the answer is computed")
        turn = [*prompt, *tokens, 5]
        assert ask(turn) == (uncached(HYBRID, [turn_of("turn", turn)])["turn"], 2 * GRID)
        assert total("idle_cached_tokens_total") == GRID
        assert total(r'idle_hits_total\{kind="whole"\}') == 1
