"""Random operation sequences on a simulated engine: every answer equals the one computed alone and without a cache.

The simulated KV of a token is a digest of all text that a real one would depend on, so a page that is shared wrongly,
freed too early or published before it is complete shows as wrong content when a sequence reads it. A pass holds
nodes of sequences that decode and chunks of prompts. Passes are computed when they are launched; their tokens reach the
scheduler up to `max_in_flight` passes later. Pages are found by the page tables that passes have brought to the
device. What layers with a window or a state read and write is computed late, in launch order.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import pytest

from slipstream.serve.engine.idle import CHUNK_MS, IdlePrompts
from slipstream.serve.engine.kv_cache import Node, PageCache
from slipstream.serve.engine.kv_states import StatePages
from slipstream.serve.engine.kv_windows import WindowPages
from slipstream.serve.engine.scheduler import Chunk, Scheduler, Sequence
from slipstream.serve.request import FinishReason, Output, Request, RequestStats, SamplingParams
from slipstream.tests.pairwise import grouped, pairwise
from slipstream.tests.serve.cache_invariants import check_scheduler, nodes_of

VOCAB_SIZE = 40
STOP_IDS = frozenset({0})
WIDTH = 5  # most nodes of a request that a step verifies: at most 4 drafts accepted
SCRATCH = 2
RESERVE = WIDTH + SCRATCH
MAX_MODEL_LEN = 70
GARBAGE = -1


def next_token(tokens: list[int]) -> int:
    """The model: a function of all tokens and nothing else."""
    return hash(tuple(tokens)) % VOCAB_SIZE


class Digest(NamedTuple):
    """Stands for the beginning of a text."""

    target: int  # of whole blocks of a prompt it computes other numbers than of other tokens
    draft: int  # other weights compute other numbers


def digests(namespace: str, tokens: list[int], num_in_blocks: int, version: str) -> list[Digest]:
    """Entry i stands for the first i tokens, of which the first num_in_blocks are computed in blocks. `version`: of the
    draft's weights."""
    result = [Digest(hash(namespace), hash((namespace, version)))]
    for index, token in enumerate(tokens):
        last = result[-1]
        is_in_block = index < num_in_blocks
        result.append(Digest(hash((last.target, token, is_in_block)), hash((last.draft, token))))
    return result


def answer_alone(request: Request) -> tuple[list[int], FinishReason]:
    params = request.params
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else STOP_IDS)}
    answer = []
    while len(answer) < params.max_tokens:
        answer.append(next_token(request.prompt + answer))
        if answer[-1] in stop_ids:
            return answer, "stop"
    return answer, "length"


@dataclass(frozen=True, slots=True)
class Setting:
    page_size: int
    lookahead: int
    num_pages: int
    max_running: int
    max_in_flight: int
    max_chunks: int | None
    windows: tuple[int, ...] = field(repr=False)  # the seed, a setting's text, does not depend on them
    grid: int = field(default=0, repr=False)  # of states; 0: no layer has one

    @property
    def max_reserve(self) -> int:
        return RESERVE * (1 + (self.max_in_flight > 0))

    def window_pages(self, window: int) -> WindowPages:
        reserve = self.max_reserve + self.grid
        quota = WindowPages(2, self.page_size, window, reserve).quota(MAX_MODEL_LEN + self.max_reserve)
        num_pages = 2 + min(self.max_running, 5) * quota  # where there are 8 slots they wait for quotas
        return WindowPages(num_pages, self.page_size, window, reserve)


class Part(NamedTuple):
    """A pass's part of one sequence: tokens [start, end), of which drafting and rejected nodes write others up to
    `spoiled`."""

    sequence: Sequence
    tokens: list[int]  # those that the pass knows or samples
    start: int
    end: int
    spoiled: int
    is_chunk: bool = False


@dataclass(frozen=True, slots=True)
class WindowPart:
    """The same for a device."""

    slot: int
    pages: list[tuple[int, int]]  # (index, page) that no pass before has brought
    text: list[Digest]  # of the tokens that it knows or samples
    start: int
    end: int
    spoiled: int
    first_own: int  # the first token in a page that the tree lacks
    is_mixed: bool  # other weights may have computed the draft's KV


@dataclass(slots=True)
class WindowDevice:
    """The KV of one window group. Passes run in launch order, perhaps long after they were launched, by a page table
    of their own, which gains the pages that they bring. The KV of a token is its digest and that of its lookahead."""

    page_size: int
    window: int
    lookahead: int
    table: dict[tuple[int, int], int] = field(default_factory=dict)  # (request slot, index) -> page
    kv: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # (page, place) -> digests

    def run(self, parts: list[WindowPart]):
        for part in parts:
            self.table.update(((part.slot, index), page) for index, page in part.pages)
        for part in parts:
            for index in range(part.start, part.spoiled):
                self.kv[self._place(part, index)] = GARBAGE, GARBAGE
        for part in parts:
            self._read(part)
        for part in parts:
            for index in range(max(self._first(part), part.first_own, part.start - self.lookahead), part.end):
                ahead = index + 1 + self.lookahead
                draft = part.text[ahead].draft if ahead < len(part.text) else GARBAGE
                self.kv[self._place(part, index)] = part.text[index + 1].target, draft

    def _read(self, part: WindowPart):
        for index in range(self._first(part), part.start):
            target, draft = self.kv[self._place(part, index)]
            assert target == part.text[index + 1].target, "not the token that the window shows"
            is_drafted = index < part.first_own or index + self.lookahead <= part.start
            if self.window > self.lookahead and is_drafted and not part.is_mixed:
                assert draft == part.text[index + 1 + self.lookahead].draft

    def _first(self, part: WindowPart) -> int:
        return max(0, part.start - self.window + 1)

    def _place(self, part: WindowPart, index: int) -> tuple[int, int]:
        return self.table[part.slot, index // self.page_size], index % self.page_size


@dataclass(frozen=True, slots=True)
class StatePart:
    """The same for the device of a group of states."""

    slot: int
    columns: tuple[int, ...]  # source, entry, snapshot, position, tokens of the prompt
    text: list[Digest]
    start: int
    end: int
    is_chunk: bool


@dataclass(slots=True)
class StateDevice:
    """States of recurrent layers: the digests of texts. A node's pass replays what the last one accepted."""

    entries: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)  # by slot: accepted nodes that no pass has replayed

    def run(self, parts: list[StatePart]):
        for part in parts:
            source, entry, snapshot, position, prompt = part.columns
            assert entry > 0
            if not part.is_chunk:
                assert self.entries[entry] == part.text[part.start - self.pending[part.slot]].target
                self.entries[entry] = part.text[part.start].target
                self.pending[part.slot] = part.end - part.start
                continue
            assert part.start == 0 or self.entries[source] == part.text[part.start].target, "not the state of this text"
            if snapshot:
                assert part.start < position <= min(part.end, prompt)
                self.entries[snapshot] = part.text[position].target
            self.entries[entry] = part.text[part.end].target
            self.pending[part.slot] = 0


def serves(group: WindowPages | StatePages, nodes: list[Node]) -> bool:
    """Whether a group has what a pass after the tokens of `nodes` reads."""
    num_tokens = len(nodes) * group.page_size
    if isinstance(group, WindowPages):
        return group._attached.keys() >= {*nodes[max(0, num_tokens - group.window + 1) // group.page_size :]}
    return not nodes or (num_tokens % group.grid == 0 and nodes[-1] in group._attached and group.num_available > 1)


class Simulation:
    """An engine whose passes read and write digests; it checks all it reads."""

    def __init__(self, setting: Setting, rng: random.Random):
        self.rng = rng
        self.lookahead = setting.lookahead
        self.page_size = setting.page_size
        self.grid = setting.grid
        windows = [setting.window_pages(window) for window in setting.windows]
        states = [StatePages(setting.max_running + 4, setting.page_size, setting.grid)] if setting.grid else []
        self.cache = PageCache(setting.num_pages, setting.page_size, [*windows, *states])
        self.states = StateDevice()
        self.devices = [WindowDevice(setting.page_size, window, setting.lookahead) for window in setting.windows]
        self.queue: deque[Callable[[], None]] = deque()  # passes that the devices have not run
        self.page_table: dict[tuple[int, int], int] = {}  # (request slot, index) -> page
        self.columns: dict[int, dict[int, int]] = {}  # by request slot: of a group of states
        self.version = ""
        self.target_kv = [[GARBAGE] * setting.page_size for _ in range(setting.num_pages)]
        self.draft_kv = [[GARBAGE] * setting.page_size for _ in range(setting.num_pages)]
        self.max_in_flight = setting.max_in_flight
        self.slots: dict[int, Sequence] = {}
        self.known: dict[Sequence, list[int]] = {}  # what the device knows of a decoding sequence
        self.flights: deque[tuple[bool, Callable[[], None]]] = deque()  # whether anything decodes; the commit
        self.num_mixed = 0  # passes with nodes and chunks
        self.scheduler = Scheduler(
            cache=self.cache,
            max_running=setting.max_running,
            max_model_len=MAX_MODEL_LEN,
            stop_ids=STOP_IDS,
            lookahead=setting.lookahead,
            max_reserve=setting.max_reserve,
            max_chunks=setting.max_chunks,
        )
        self.scheduler.on_admit = self._admit
        self.scheduler.on_release = self._release
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        # Of each step: nodes that it verified, tokens emitted before and after the cut.
        self.steps: dict[str, list[tuple[int, int, int]]] = {}
        self.ended: dict[str, Output] = {}
        self.num_aborted = 0

    def _admit(self, sequence: Sequence):
        assert sequence.slot not in self.slots, "the slot was given before it was released"
        assert len(sequence.table.pages) * self.page_size >= len(sequence.tokens) + RESERVE
        self.slots[sequence.slot] = sequence

    def _release(self, sequence: Sequence):
        assert self.slots.pop(sequence.slot) is sequence
        assert sequence.table.pages, "pages are still held when the slot is released"

    def add(self, request: Request):
        self._check_hit(request)
        self.scheduler.add(request)
        self.requests[request.id] = request
        self.answers[request.id] = []
        self.steps[request.id] = []

    def _check_hit(self, request: Request):
        """A hit is the longest path of the tree after which each further group has what a pass reads."""
        cache = self.cache
        size = self.page_size
        prompt = request.prompt
        texts = {cache._root: []}
        by_text = {}  # with the tokens looked ahead at
        for node in nodes_of(cache):
            namespace, *tokens = node.key
            if node.parent in texts and namespace == request.cache_namespace:
                by_text[*texts[node.parent], *tokens] = node
                texts[node] = texts[node.parent] + tokens[:size]
        path = []
        for end in range(size, len(prompt) - max(self.lookahead, 1) + 1, size):
            node = by_text.get(tuple(prompt[: end + self.lookahead]))
            if node is None:
                break
            path.append(node)
        hits = (path[:count] for count in range(len(path), -1, -1))
        hit = next(nodes for nodes in hits if all(serves(group, nodes) for group in cache.groups))
        assert cache.look_up(prompt, request.cache_namespace, self.lookahead) == (len(path) * size, len(hit) * size)

    def change_draft(self):
        """To other weights, or back to those."""
        self.version = self.rng.choice(["", "other", "third"])
        self.scheduler.change_draft(self.version)

    def abort_one(self):
        alive = sorted(self.requests.keys() - self.ended.keys())
        if alive:
            output = self.scheduler.abort(self.rng.choice(alive))
            assert output is not None
            self._take([output])
            self.num_aborted += 1

    def step(self, *, decodes: bool, prompt_tokens: int, abort: bool = False):
        """One pass: nodes of what `decodes`, and so many tokens of prompts."""
        scheduler = self.scheduler
        rng = self.rng
        while decodes and sum(decoding for decoding, _ in self.flights) > 1:
            self.land(len(self.flights) - 1)
        reserve = rng.randrange(WIDTH, RESERVE + 1)
        sequences = scheduler.next_decodes(reserve) if decodes else []
        chunks = scheduler.next_chunks(prompt_tokens)
        assert sum(chunk.end - chunk.start for chunk in chunks) <= prompt_tokens
        assert scheduler.max_chunks is None or len(chunks) <= scheduler.max_chunks
        assert len({chunk.sequence for chunk in chunks}.union(sequences)) == len(chunks) + len(sequences)
        verified = [rng.randrange(1, WIDTH + 1) for _ in sequences]
        nodes = [self._verify(*pair, reserve) for pair in zip(sequences, verified, strict=True)]
        prompts = [self._compute(chunk) for chunk in chunks]
        self._run(rng.sample(nodes + prompts, len(nodes + prompts)))
        self.num_mixed += bool(nodes and prompts)
        scheduler.mark_launched(chunks)
        emitted = [part.tokens[part.start + 1 :] for part in nodes]
        firsts = [part.tokens[-1] if chunk.is_last else None for part, chunk in zip(prompts, chunks, strict=True)]
        for part in nodes + prompts:
            self.known[part.sequence] = part.tokens
        self.flights.append((bool(nodes), lambda: self._commit(sequences, verified, emitted, chunks, firsts)))
        if abort:
            self.abort_one()
        self.land(rng.randrange(self.max_in_flight + 1))

    def _verify(self, sequence: Sequence, num_verified: int, reserve: int) -> Part:
        """The nodes of a sequence. The root, some nodes after it and what the target adds belong to the text."""
        tokens = list(self.known[sequence])
        start = len(tokens) - 1
        for _ in range(self.rng.randrange(1, num_verified + 1)):
            tokens.append(next_token(tokens))
        return Part(sequence, tokens, start, len(tokens) - 1, start + reserve)

    def _compute(self, chunk: Chunk) -> Part:
        tokens = list(chunk.sequence.tokens)
        if not self.grid:  # no more is named by plans; where states decide, pages may lack a draft's last slots
            tokens = tokens[: chunk.end + 1]
        if chunk.is_last:
            assert chunk.end == len(tokens)
            tokens.append(next_token(tokens))
        spoiled = chunk.end + RESERVE * chunk.is_last
        return Part(chunk.sequence, tokens, chunk.start, chunk.end, spoiled, is_chunk=True)

    def _run(self, parts: list[Part]):
        """The parts of one pass compute side by side: none reads what another spoils or writes."""
        for part in parts:
            changes = part.sequence.table.changes()
            self.page_table.update(((part.sequence.slot, index), page) for index, page in changes)
        for part in parts:
            self._spoil(part.sequence, part.start, part.spoiled)
        for part in parts:
            self._read(part)
        for part in parts:
            self._write(part.sequence, part.start, part.end, part.tokens)
        for group, device in enumerate(self.devices):
            self.queue.append(partial(device.run, [self._of_window(part, group) for part in parts]))
        if len(self.cache.groups) > len(self.devices):
            self.queue.append(partial(self.states.run, [self._of_state(part) for part in parts]))

    def work_idle(self, prompts: IdlePrompts) -> bool:
        """One pass of a chunk that no request has; some fail and leave anything."""
        chunk = prompts.begin()
        if chunk is None:
            return False
        table = chunk.sequence.table
        has_failed = self.rng.random() < 0.1
        if has_failed:
            self.compute(0)
            self.states.entries[table.groups[-1].entry] = GARBAGE
        else:
            self._run([self._compute(chunk)])
        prompts.end(chunk, CHUNK_MS * self.rng.choice([0.3, 3]), has_failed=has_failed)
        return True

    def land(self, num_left: int):
        """Brings tokens home until `num_left` passes are in flight. What the device has run may be more."""
        while len(self.flights) > num_left:
            self.flights.popleft()[1]()
        if self.flights:
            self.compute(self.rng.randrange(len(self.queue) + 1))
        else:
            self.compute(0)

    def compute(self, num_left: int):
        while len(self.queue) > num_left:
            self.queue.popleft()()

    def _of_window(self, part: Part, group: int) -> WindowPart:
        """Returns the part as a window group computes it, with the pages that its plan would name."""
        sequence = part.sequence
        return WindowPart(
            slot=sequence.slot,
            pages=sequence.table.groups[group].changes(),
            text=self._digests(sequence, part.tokens),
            start=part.start,
            end=part.end,
            spoiled=part.spoiled,
            first_own=len(sequence.table.nodes) * self.page_size,
            is_mixed=sequence.table.is_mixed,
        )

    def _of_state(self, part: Part) -> StatePart:
        sequence = part.sequence
        text = self._digests(sequence, part.tokens)
        columns = self.columns.setdefault(sequence.slot, {})
        columns.update(sequence.table.groups[-1].changes())
        return StatePart(sequence.slot, tuple(columns.values()), text, part.start, part.end, part.is_chunk)

    def _digests(self, sequence: Sequence, tokens: list[int]) -> list[Digest]:
        num_in_blocks = len(sequence.request.prompt) // self.grid * self.grid if self.grid else 0
        return digests(sequence.request.namespace, tokens, num_in_blocks, self.version)

    def _commit(
        self,
        sequences: list[Sequence],
        verified: list[int],
        emitted: list[list[int]],
        chunks: list[Chunk],
        firsts: list[int | None],
    ):
        outputs = self.scheduler.commit_decodes(sequences, emitted, [count - 1 for count in verified])
        num_tokens = {output.request_id: len(output.tokens) for output in outputs}
        for sequence, count, tokens in zip(sequences, verified, emitted, strict=True):
            if sequence.request.id in num_tokens:
                self.steps[sequence.request.id].append((count, len(tokens), num_tokens[sequence.request.id]))
        self._take(outputs)
        self._take(self.scheduler.commit_chunks(chunks, firsts))

    def _read(self, part: Part):
        table = part.sequence.table
        text = self._digests(part.sequence, part.tokens)
        for index in range(part.start):
            page, slot = self._place(part.sequence, index)
            assert self.target_kv[page][slot] == text[index + 1].target
            is_drafted = index < len(table.nodes) * self.page_size or index + self.lookahead <= part.start
            if is_drafted and not table.is_mixed:
                assert self.draft_kv[page][slot] == text[index + 1 + self.lookahead].draft

    def _write(self, sequence: Sequence, start: int, end: int, tokens: list[int]):
        """Commits tokens [start, end); the drafter's KV as far as `tokens` allow, in its own pages only."""
        text = self._digests(sequence, tokens)
        first_own = len(sequence.table.nodes) * self.page_size
        assert start >= first_own, "a shared page is written"
        for index in range(max(start - self.lookahead, first_own), end):
            page, slot = self._place(sequence, index)
            self.target_kv[page][slot] = text[index + 1].target
            if index + 1 + self.lookahead < len(text):
                self.draft_kv[page][slot] = text[index + 1 + self.lookahead].draft

    def _spoil(self, sequence: Sequence, start: int, end: int):
        """Writes the leftovers of drafting and of rejected nodes."""
        for index in range(start, end):
            page, slot = self._place(sequence, index)
            self.target_kv[page][slot] = self.draft_kv[page][slot] = GARBAGE

    def _place(self, sequence: Sequence, index: int) -> tuple[int, int]:
        return self.page_table[sequence.slot, index // self.page_size], index % self.page_size

    def _take(self, outputs: list[Output]):
        for output in outputs:
            assert output.request_id not in self.ended, "an output after the last one"
            self.answers[output.request_id] += output.tokens
            assert (output.stats is None) == (output.finish_reason is None)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output

    def check_ended(self):
        """Every request ended with the answer that it gets alone, and with true statistics."""
        assert self.ended.keys() == self.requests.keys()
        for name, output in self.ended.items():
            answer, reason = answer_alone(self.requests[name])
            if output.finish_reason == "abort":
                assert self.answers[name] == answer[: len(self.answers[name])]
            else:
                assert (self.answers[name], output.finish_reason) == (answer, reason)
            assert output.stats is not None
            self._check_stats(name, output.stats)

    def _check_stats(self, name: str, stats: RequestStats):
        steps = self.steps[name]
        assert stats.prompt_tokens == len(self.requests[name].prompt)
        assert stats.completion_tokens == len(self.answers[name])
        num_first = stats.prefills if self.requests[name].params.max_tokens else 0
        assert stats.completion_tokens - num_first == sum(counted for _, _, counted in steps)
        assert stats.rounds == len(steps)
        assert stats.drafted_tokens == sum(verified - 1 for verified, _, _ in steps)
        assert stats.cached_tokens in range(0, stats.prompt_tokens, self.page_size)
        accepted = [
            sum(min(emitted - 1, counted) > position for _, emitted, counted in steps) for position in range(WIDTH)
        ]
        assert stats.accepted_by_position == [count for count in accepted if count]


def random_request(rng: random.Random, number: int, stems: list[list[int]]) -> Request:
    prompt = rng.choice(stems)[: rng.randrange(30)] + rng.choices(range(1, 4), k=rng.randrange(1, 8))
    max_tokens = rng.randrange(32)
    params = SamplingParams(
        max_tokens=max_tokens,
        prompt_logprobs=None if max_tokens else 0,
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(rng.randrange(VOCAB_SIZE),) if rng.random() < 0.2 else (),
    )
    return Request(id=f"request {number}", prompt=prompt, params=params, namespace=rng.choice(["", "", "other"]))


@grouped("sizes")
@pytest.mark.parametrize(
    ("sizes", "page_size", "lookahead", "max_in_flight", "windows", "grid"),
    [
        *pairwise(
            [(80, 4, 16), (112, 8, 64), (112, 8, 5), (600, 3, 1000)],
            [1, 4, 16],
            [0, 1, 2],
            [0, 3],
            [(), (1,), (3, 16), (22,)],
            [0, 1, 4],
        ),
        ((600, 3, 1000), 4, 1, 0, (), 4),  # pages of ends of prompts, which no other text may read
    ],
)
def test_random_operations(sizes, page_size, lookahead, max_in_flight, windows, grid):
    """sizes: tokens that the cache holds, max_running and the most prompt tokens of a step; grid: of states, in
    pages, at most 16 tokens."""
    tokens, max_running, prefill_budget = sizes
    num_pages = 1 + -(-tokens // page_size)
    max_chunks = 2 if prefill_budget == 64 else None
    setting = Setting(
        page_size, lookahead, num_pages, max_running, max_in_flight, max_chunks, windows, min(grid * page_size, 16)
    )
    rng = random.Random(f"{sizes} {setting}")
    simulation = Simulation(setting, rng)
    stems = [rng.choices(range(1, 4), k=40) for _ in range(3)]
    scheduler = simulation.scheduler
    number = 0
    num_steps = 1_500 if (windows or grid) and page_size == 16 else 500  # they make hits on such pages rare
    for _ in range(num_steps):
        kind = rng.choices(["add", "step", "abort", "restart", "change"], weights=[6, 11, 0.3, 0.3, 0.1])[0]
        if kind == "add":
            number += 1
            request = random_request(rng, number, stems)
            if scheduler.num_waiting < 6 + len(scheduler._free_slots):
                simulation.add(request)
        elif kind == "step":
            decodes = rng.random() < 0.8
            chunk = rng.choice([0, prefill_budget, rng.randrange(prefill_budget + 1)])
            chunk = max(chunk, setting.grid) if chunk else 0
            simulation.step(decodes=decodes, prompt_tokens=chunk, abort=rng.random() < 0.03)
        elif kind == "restart" and scheduler.running:
            scheduler.restart(rng.choice(scheduler.running))
        elif kind == "change":
            simulation.change_draft()
        else:
            simulation.abort_one()
        check_scheduler(scheduler)
    for _ in range(10_000):
        if not scheduler.has_work:
            break
        simulation.step(decodes=True, prompt_tokens=max(prefill_budget, setting.grid))
        check_scheduler(scheduler)
    simulation.land(0)
    simulation.check_ended()
    assert (scheduler.num_running, scheduler.num_waiting, simulation.slots) == (0, 0, {})
    for pool in (simulation.cache, *simulation.cache.groups):
        assert pool.num_available == pool.total_pages
    assert simulation.num_aborted > 0
    assert simulation.num_mixed > 0
    if not (windows and grid):  # a hit needs both at one place, which is rare in small pools
        assert any(output.stats and output.stats.cached_tokens for output in simulation.ended.values())
    if prefill_budget in (16, 64) and not grid:  # else prompts come too slowly to fill the cache, or it is large
        assert scheduler.num_preemptions > 0, "the cache was meant to be too small"


@grouped("sizes")
@pytest.mark.parametrize(
    ("sizes", "page_size", "lookahead", "max_in_flight", "windows", "grid"),
    pairwise([(112, 1), (160, 3), (600, 8)], [1, 4], [0, 1, 2], [0, 3], [(), (3, 16)], [4, 8]),
)
def test_random_arrivals_in_idle_time(sizes, page_size, lookahead, max_in_flight, windows, grid):
    """sizes: tokens that the cache holds, and max_running; grid: of states, in tokens. Requests, many of which go on
    with an ended text, come after any number of chunks."""
    tokens, max_running = sizes
    num_pages = 1 + -(-tokens // page_size)
    setting = Setting(page_size, lookahead, num_pages, max_running, max_in_flight, None, windows, grid)
    rng = random.Random(f"{sizes} {setting} {grid}")
    simulation = Simulation(setting, rng)
    scheduler = simulation.scheduler
    prompts = IdlePrompts(scheduler, grid, most_rows=16)
    ended = deque(maxlen=4)  # their next turns
    number = 0

    def note(sequence):
        prompts.note(sequence)
        turn = replace(sequence.request, prompt=sequence.tokens + rng.choices(range(1, 4), k=rng.randrange(1, 5)))
        if len(turn.prompt) + turn.params.max_tokens < MAX_MODEL_LEN:
            ended.append(turn)

    scheduler.on_finish = note
    stems = [rng.choices(range(1, 4), k=40) for _ in range(3)]

    def has_idle_hits():
        return any(output.stats and output.stats.idle_tokens for output in simulation.ended.values())

    while number < 80 or (number < 800 and not has_idle_hits()):
        for _ in range(rng.randrange(1, 4)):
            number += 1
            request = random_request(rng, number, stems)
            if ended and rng.random() < 0.6:
                request = replace(ended.pop(), id=request.id)
            simulation.add(request)
        while scheduler.has_work:
            simulation.step(decodes=True, prompt_tokens=rng.choice([grid, 24]), abort=rng.random() < 0.01)
            check_scheduler(scheduler)
        simulation.land(0)
        if rng.random() < 0.05:
            simulation.change_draft()
        nodes = nodes_of(simulation.cache)
        for _ in range(rng.randrange(8)):
            if not simulation.work_idle(prompts):
                break
            check_scheduler(scheduler)
        assert set(nodes) <= set(nodes_of(simulation.cache)), "a page was given up in idle time"
    simulation.check_ended()
    assert has_idle_hits()
    for pool in (simulation.cache, *simulation.cache.groups):
        assert pool.num_available == pool.total_pages
