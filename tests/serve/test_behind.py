"""Rows that the drafter is extended by only when it reads what it makes of them. The oracle extends it by all."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.speculation.ragged import Layout, Verified
from slipstream.models.drafts.block_heads import LiLiCorrConfig
from slipstream.serve.drafters.base import Drafter
from slipstream.serve.engine.budget import Choice
from slipstream.serve.engine.engine import Engine
from slipstream.serve.request import Request
from slipstream.serve.runner import behind, model_runner, step
from slipstream.serve.runner.batch import DraftBatch, PassRows, Proposal
from slipstream.serve.runner.behind import DeferredRows
from slipstream.serve.runner.model_runner import ModelRunner
from slipstream.serve.runner.request_state import RequestState
from slipstream.serve.runner.step import Runner
from slipstream.tests.pairwise import rotating
from slipstream.tests.random_drafts import save_random_dflash, save_random_eagle
from slipstream.tests.serve.engine_runs import (
    Answer,
    build_engine,
    collect,
    decoding,
    make_request,
    random_prompt,
    record_proposals,
    run,
    texts_of,
    tokens_of,
)

# requests, pages with the dump page, tokens of a page
SLOTS = 4
PAGES = 24
SIZE = 4
MOST = 16  # rows of a pass, and of an extension


class Memory(Drafter):
    """A drafter that stores each row's number, its aux state, in place of KV, and of each request the last one."""

    def __init__(self) -> None:
        self.kept = [0] * PAGES * SIZE
        self.states = [0] * (SLOTS + 1)
        self.computed: list[int] = []
        self.observed: list[int] = []

    @classmethod
    def load(cls, draft: str, options: Any, target: Any) -> "Memory":
        raise AssertionError("tests build it")

    def observe(self, rows: PassRows) -> None:
        self.observed += rows.next_tokens.tolist()

    def extend(self, rows: PassRows, aux_states: Tensor) -> None:
        numbers = aux_states[:, 1].int().tolist()
        slots = rows.slots.of(0).tolist()
        assert len(numbers) <= MOST
        assert numbers == rows.next_tokens.tolist() == (rows.positions - 7).tolist()
        assert len(set(slots)) == len(slots)
        for slot, number in zip(slots, numbers, strict=True):
            self.kept[slot] = number
        for request, last in zip(rows.requests.tolist(), rows.last.tolist(), strict=True):
            self.states[request] = numbers[last]
        self.computed += numbers


@dataclass(slots=True)
class Text:
    """A request's."""

    pages: list[int]
    length: int = 0
    num_shared: int = 0  # pages


@dataclass(slots=True)
class World:
    """Passes at random over requests that come and end, whose pages are reused as they are, or computed anew."""

    rng: random.Random
    state: RequestState = field(default_factory=lambda: RequestState(SLOTS, PAGES, SIZE, 8, torch.device("cpu")))
    lazy: Memory = field(default_factory=Memory)
    eager: Memory = field(default_factory=Memory)
    running: dict[int, Text] = field(default_factory=dict)
    cached: list[list[int]] = field(default_factory=list)  # full pages of texts that ended
    num_rows: int = 0
    num_hits: int = 0
    deferred: DeferredRows = field(init=False)
    runner: Runner = field(init=False)  # of the lazy one

    def __post_init__(self) -> None:
        self.deferred = DeferredRows(self.state, PAGES * SIZE)
        self.runner = Runner(None, {}, self.lazy, self.state, (), deferred=self.deferred)  # type: ignore[arg-type]

    def admit(self) -> None:
        free = [slot for slot in range(SLOTS) if slot not in self.running]
        if not free:
            return
        shared: list[int] = []
        if self.cached and self.rng.random() < 0.5:
            shared = self.rng.choice(self.cached)
            shared = shared[: self.rng.randint(1, len(shared))]
            self.num_hits += 1
        slot = self.rng.choice(free)
        self.running[slot] = Text(list(shared), len(shared) * SIZE, len(shared))
        self.write_table(slot)

    def write_table(self, slot: int) -> None:
        pages = self.running[slot].pages
        self.state.pages[0, slot] = PAGES - 1  # stale entries
        self.state.pages[0, slot, : len(pages)] = torch.tensor(pages, dtype=torch.int64)

    def end(self, slot: int) -> None:
        text = self.running.pop(slot)
        if text.length >= SIZE and self.rng.random() < 0.7:
            self.cached.append(text.pages[: text.length // SIZE])

    def advance(self, *, later: bool) -> None:
        """A pass over one row or more of each of some requests."""
        active = [slot for slot in self.running if self.rng.random() < 0.8]
        counts = [self.rng.choice([1, 1, 1, self.rng.randint(1, MOST // SLOTS)]) for _ in active]
        places = list[int]()
        slots = list[int]()
        for slot, count in zip(active, counts, strict=True):
            text = self.running[slot]
            while text.length + count > len(text.pages) * SIZE:
                text.pages.append(self.new_page())
            positions = range(text.length, text.length + count)
            places += positions
            slots += [text.pages[place // SIZE] * SIZE + place % SIZE for place in positions]
            text.length += count
            self.write_table(slot)
        if not slots:
            return
        numbers = torch.arange(self.num_rows + 1, self.num_rows + 1 + len(slots))
        self.num_rows += len(slots)
        layout: Any = dict.fromkeys(Layout._fields) | {
            "places": numbers + 7,
            "kv_slots": torch.tensor(slots),
            "segment_slots": torch.tensor(active),
        }
        last = torch.tensor(list(itertools.accumulate(counts))) - 1
        verified: Any = dict.fromkeys(Verified._fields) | {"next_tokens": numbers.int(), "last": last}
        aux_states = torch.stack((torch.zeros(len(slots)), numbers.float()), dim=1)
        eager = Runner(None, {}, self.eager, self.state, ())  # type: ignore[arg-type]
        for runner, is_late in ((self.runner, later), (eager, False)):
            runner._extend(Layout(**layout), Verified(**verified), aux_states, later=is_late)

    def new_page(self) -> int:
        taken_pages = {page for text in self.running.values() for page in text.pages}
        free = [page for page in range(1, PAGES) if page not in taken_pages]
        page = self.rng.choice(free)
        self.cached = [pages for pages in self.cached if page not in pages]
        return page

    def draft(self, slots: list[int]) -> None:
        """Catches up for them, and compares what a draft would read."""
        numbers = self.runner.due(torch.tensor(slots), [self.running[slot].length for slot in slots])
        computed = {self.eager.kept[place] for slot in slots for place in self.places(slot)}
        num_computed = len(self.lazy.computed)
        self.runner.extend_by(numbers)
        assert computed.issuperset(self.lazy.computed[num_computed:]), "what nobody asked for, or what was replaced"
        for slot in slots:
            assert [self.lazy.kept[place] for place in self.places(slot)] == [
                self.eager.kept[place] for place in self.places(slot)
            ]
            if self.running[slot].length > self.running[slot].num_shared * SIZE:  # it had a pass
                assert self.lazy.states[slot] == self.eager.states[slot]

    def places(self, slot: int) -> list[int]:
        text = self.running[slot]
        return [text.pages[place // SIZE] * SIZE + place % SIZE for place in range(text.length)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("room", [MOST, 40, 1000])
def test_what_a_draft_reads_is_what_extending_in_every_pass_leaves(
    room: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are computed once at most, and only while they are the newest ones of their place."""
    monkeypatch.setattr(behind, "BUFFER_BYTES", 8 * room)
    monkeypatch.setattr(behind, "MOST_AT_ONCE", MOST)
    monkeypatch.setattr(step, "MOST_AT_ONCE", MOST)
    world = World(random.Random(seed))
    deferred = world.deferred
    rng = world.rng
    num_drafts = 0
    most_kept = 0
    for _ in range(400):
        if rng.random() < 0.3:
            world.admit()
        for slot, text in list(world.running.items()):
            if rng.random() < 0.03 or text.length > 5 * SIZE:
                world.end(slot)
        world.advance(later=rng.random() < 0.8)
        if (drafted := [slot for slot in world.running if rng.random() < 0.5]) and rng.random() < 0.05:
            world.draft(drafted)
            num_drafts += 1
        if rng.random() < 0.1:
            deferred.trim()
        assert deferred.size in (0, room)
        most_kept = max(most_kept, len(deferred.pending()))
    if world.running:
        world.draft(sorted(world.running))
    computed = world.lazy.computed
    assert len(set(computed)) == len(computed) < len(world.eager.computed)
    assert world.lazy.observed == list(range(1, world.num_rows + 1))
    assert num_drafts > 5
    assert world.num_hits > 5
    assert MOST // 2 < most_kept <= room
    world.runner.extend_by(deferred.oldest(room))
    assert world.lazy.kept == world.eager.kept, "nothing that is still in the cache was lost"
    assert deferred.is_empty


def test_rows_that_go_to_the_dump_page_are_never_computed() -> None:
    world = World(random.Random(0))
    world.running[1] = Text([0, 3])
    while world.running[1].length < 2 * SIZE:
        world.advance(later=True)
    world.runner.extend_by(world.deferred.oldest(100))
    assert [bool(number) for number in world.lazy.kept[: 4 * SIZE]] == [False] * 3 * SIZE + [True] * SIZE


DRAFTS: dict[str, Callable[..., None]] = {
    "eagle": partial(save_random_eagle, intermediate_size=48, fc_bias=False),
    "lilicorr": partial(
        save_random_dflash, lilicorr=LiLiCorrConfig(candidate_topk=4, hidden_size=32, num_heads=2, factor_dim=24)
    ),
}
Proposals = list[tuple[list[int], list[list[int]], Tensor]]  # request slots, tokens and scores


def traffic() -> list[Request]:
    """Prompts that begin alike."""
    return [
        make_request(
            str(index),
            random_prompt(20, index % 3)[: 20 - index % 2] + random_prompt(1 + 3 * index % 23, index),
            max_tokens=5 + 7 * index % 40,
            ignore_eos=True,
        )
        for index in range(18)
    ]


def serve(engine: Engine, check: Callable[[], None] = lambda: None) -> tuple[dict[str, Answer], Proposals]:
    """Answers to requests of which some are aborted, and all proposals, which are asked for now and then, for a while
    or for one step."""
    steps = itertools.count()
    proposals = Proposals()
    propose = engine.runner.drafter.propose

    def choose(num_decoding: int, *_: object, **__: object) -> Choice:
        number = next(steps)
        is_wide = [at % 17 == 3 or 60 < at < 70 for at in (number - 1, number)]
        return Choice(num_decoding * (4 if is_wide[0] else 1), 4 if is_wide[1] else 1)

    def recorded(batch: DraftBatch, width: int) -> Proposal:
        proposal = propose(batch, width)
        proposals.append((batch.requests.tolist(), proposal.tokens.tolist(), proposal.scores))
        return proposal

    def after(number: int, answers: dict[str, Answer]) -> None:
        if number in (23, 60, 80) and (output := engine.abort(decoding(engine)[-1].request.id)):
            collect([output], answers)
        check()

    policy = engine.planner.policy
    policy.choose = choose  # type: ignore[method-assign]
    policy.chunk_rows = lambda *_, **__: 32  # type: ignore[method-assign]
    engine.runner.drafter.propose = recorded  # type: ignore[method-assign]
    return run(engine, traffic(), after), proposals


@pytest.mark.parametrize(("drafter", "is_tight"), rotating(DRAFTS, [False, True]))
def test_proposals_equal_those_of_a_draft_that_is_never_behind(
    drafter: str, is_tight: bool, make_target: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preemption, aborts and prefix hits, and never more rows due or kept than allowed."""
    target = make_target("qwen3")
    draft = tmp_path / "draft"
    DRAFTS[drafter](target, draft, texts_of(target, traffic()[:6]))
    if is_tight:
        monkeypatch.setattr(model_runner, "MOST_BEHIND", 24)
        monkeypatch.setattr(model_runner, "MOST_DUE", 60)
        monkeypatch.setattr(behind, "BUFFER_BYTES", 0)
        monkeypatch.setattr(behind, "MOST_AT_ONCE", 96)
    build = partial(build_engine, target, draft, max_running=4, kv_cache_tokens=176, page_size=1 if is_tight else 16)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_extends_later", lambda *_: False)
        expected, references = serve(build())
    engine = build()
    passes = engine.runner.passes
    scheduler = engine.scheduler
    num_due = [0]
    num_pending = [0]
    deferred = passes.deferred
    assert deferred is not None

    def check() -> None:
        slots = torch.tensor([sequence.slot for sequence in scheduler._running], dtype=torch.int64)
        num_due.append(len(passes.due(slots, passes.state.lengths[slots].tolist())))
        num_pending.append(len(deferred.pending()))

    answers, proposals = serve(engine, check)
    assert tokens_of(answers) == tokens_of(expected)
    assert [answer.counts.accepted_tokens for answer in answers.values()] == [
        answer.counts.accepted_tokens for answer in expected.values()
    ]
    assert len(proposals) == len(references) > 15
    for (slots, tokens, scores), (reference_slots, reference_tokens, reference_scores) in zip(
        proposals, references, strict=True
    ):
        assert (slots, tokens) == (reference_slots, reference_tokens)
        torch.testing.assert_close(scores, reference_scores, atol=1e-4, rtol=1e-4)
    assert any(answer.counts.accepted_tokens for answer in answers.values())
    assert any(answer.counts.cached_tokens for answer in answers.values())
    assert scheduler.num_preemptions > 0
    assert 30 < max(num_due) <= model_runner.MOST_DUE
    assert max(num_due) < max(num_pending) <= deferred.size, "some belong to requests that have ended"


def hit(engine: Engine, width: int) -> tuple[list[list[int]], int]:
    """Returns the proposals for requests that begin with cached pages of others, for which nothing was proposed, and
    the largest number of rows that were due after a step. The others run one by one, in the same slot."""
    first = [make_request(str(index), random_prompt(33, index), max_tokens=2, ignore_eos=True) for index in range(4)]
    again = [make_request("new", random_prompt(3, 9)), *first]
    passes = engine.runner.passes
    scheduler = engine.scheduler
    policy = engine.planner.policy
    num_due = [0]

    def check(*_: object) -> None:
        slots = torch.tensor([sequence.slot for sequence in scheduler._running], dtype=torch.int64)
        num_due.append(len(passes.due(slots, passes.state.lengths[slots].tolist())))

    policy.choose = lambda num_decoding, **_: Choice(num_decoding, 1)  # type: ignore[method-assign]
    for request in first:
        run(engine, [request], check)
    policy.choose = lambda num_decoding, **_: Choice(num_decoding, width)  # type: ignore[method-assign]
    proposed = record_proposals(passes.drafter)
    answers = run(engine, again, check)
    assert {answers[request.id].counts.cached_tokens for request in first} == {32}
    return [proposed[slot][0] for slot in sorted(proposed)], max(num_due)


def test_rows_in_cached_pages_are_computed_for_requests_that_hit_them(
    make_target: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the draft proposes for them, and where it is not asked, as many as exceed the limit."""
    monkeypatch.setattr(model_runner, "MOST_DUE", 60)
    target = make_target("qwen3")
    draft = tmp_path / "draft"
    DRAFTS["eagle"](target, draft)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_extends_later", lambda *_: False)
        expected, _ = hit(build_engine(target, draft), width=4)
    proposals, num_due = hit(build_engine(target, draft), width=4)
    assert proposals == expected
    assert len(proposals) == 5
    assert num_due > 30
    proposals, num_due = hit(build_engine(target, draft), width=1)
    assert not proposals
    assert 30 < num_due <= 60
