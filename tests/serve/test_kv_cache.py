"""The page cache against a plain dict of texts, and each rule of its docstrings by itself."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from slipstream.serve.engine.kv_cache import Node, PageCache, PageTable
from slipstream.serve.engine.kv_states import StatePages
from slipstream.serve.engine.kv_windows import WindowPages
from slipstream.tests.pairwise import grouped, pairwise
from slipstream.tests.serve.cache_invariants import check_cache, nodes_of
from slipstream.tests.tables import each_case

Text = tuple[str, tuple[int, ...]]


def store(cache: PageCache, tokens: list[int], namespace: str = "", lookahead: int = 0) -> None:
    """Stores pages as a sequence does that has computed all of `tokens` but the last one, and ended."""
    table = PageTable(namespace, lookahead)
    assert cache.admit(table, tokens, len(tokens), headroom=0)
    cache.release(table, tokens, len(tokens) - 1)


def num_matched_pages(cache: PageCache, tokens: list[int], namespace: str = "", lookahead: int = 0) -> int:
    return cache.look_up(tokens, namespace, lookahead)[1] // cache.page_size


def test_eviction_takes_the_longest_unused_leaf_first() -> None:
    cache = PageCache(7, 1)  # 6 pages
    old = [1, 2, 3, 0]
    new = [4, 5, 6, 0]
    for tokens in (old, new):
        table = PageTable("", 0)
        assert cache.admit(table, tokens, 3, headroom=0)
        cache.release(table, tokens, 3)
    assert (len(cache._free), len(cache._cached)) == (0, 6)
    table = PageTable("", 0)
    assert cache.admit(table, old[:2], 2, headroom=0)  # uses page [1], needs one more: [3] is the oldest leaf
    cache.release(table, old[:2], 1)
    assert [num_matched_pages(cache, tokens) for tokens in (old, new)] == [2, 3]
    first = PageTable("", 0)
    for expected in ([2, 3], [1, 3], [1, 2], [1, 1], [1, 0], [0, 0]):
        assert cache.extend(first, len(first.pages) + 1)
        assert [num_matched_pages(cache, tokens) for tokens in (old, new)] == expected
        check_cache(cache, [first])
    assert not cache.extend(first, 7)


FAULTS: dict[str, Callable[[PageCache, PageTable], object]] = {
    "a page is lost": lambda cache, _: cache._free.pop(),
    "a page in use is free": lambda cache, table: cache._free.append(table.pages[-1]),
    "a shared page is handed out": lambda cache, table: cache._free.__setitem__(0, table.pages[0]),
    "a reader is counted twice": lambda cache, _: setattr(nodes_of(cache)[0], "references", 2),
    "a node is cut off": lambda _, table: table.nodes[0].children.clear(),
    "pages are swapped": lambda _, table: table.pages.reverse(),
    "pages hold less": lambda _, table: setattr(table, "room", 16),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_notices(fault: str) -> None:
    cache = PageCache(20, 4)
    store(cache, list(range(30)))
    table = PageTable("", 0)
    assert cache.admit(table, list(range(15)), 20, headroom=0)
    check_cache(cache, [table])
    FAULTS[fault](cache, table)
    with pytest.raises(AssertionError):
        check_cache(cache, [table])


class TextModel:
    """A dict from pages to the tokens of their KV, and every text that a cache without eviction would know."""

    def __init__(self, page_size: int, lookahead: int) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.texts: dict[int, Text] = {}
        self.known: set[Text] = set()

    def text(self, table: PageTable, tokens: list[int], index: int) -> Text:
        """Returns the text that page `index` depends on: all tokens up to its end, and those looked ahead at."""
        return table.namespace, tuple(tokens[: (index + 1) * self.page_size + self.lookahead])

    def compute(self, table: PageTable, tokens: list[int], num_computed: int) -> None:
        """All full pages behind the shared ones become known."""
        for index in range(len(table.nodes), min(num_computed, len(tokens) - self.lookahead) // self.page_size):
            text = self.text(table, tokens, index)
            self.texts[table.pages[index]] = text
            self.known.add(text)


# Window groups

RESERVE = 3


def windowed(*windows: int, page_size: int = 4, num_pages: int = 60) -> PageCache:
    groups = [WindowPages(num_pages, page_size, window, RESERVE) for window in windows]
    return PageCache(100, page_size, groups)


def compute(cache: PageCache, tokens: list[int], num_answered: int = 0, lookahead: int = 0) -> PageTable:
    """A table whose sequence has computed `tokens`: a prompt in one chunk, then `num_answered` tokens one by one."""
    table = PageTable("", lookahead)
    end = len(tokens) - num_answered
    assert cache.admit(table, tokens[:end], end + RESERVE, headroom=0, limit=len(tokens) + RESERVE)
    cache.extend_groups(table, end + RESERVE)
    cache.publish(table, tokens[:end], end)
    cache.slide(table, end)
    for num_computed in range(end + 1, len(tokens) + 1):
        assert cache.extend(table, num_computed - 1 + RESERVE)
        cache.extend_groups(table, num_computed - 1 + RESERVE)
        cache.slide(table, num_computed)
    return table


@grouped()
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 11])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_answer_of_any_length_is_found_by_the_next_turn(window: int, lookahead: int) -> None:
    for length in range(12, 25):
        cache = windowed(window)
        text = list(range(length + 1))
        cache.release(compute(cache, text[:-1], length - 10, lookahead), text, length)
        check_cache(cache, [])
        assert num_matched_pages(cache, [*text, 99], lookahead=lookahead) == length // 4


def test_a_hit_ends_where_a_window_has_lost_its_pages() -> None:
    cache = windowed(4, 8, num_pages=12)
    cache.release(compute(cache, list(range(23))), list(range(23)), 23)
    assert num_matched_pages(cache, list(range(24))) == 5
    window = cache.groups[1]
    node = cache._known(list(range(24)), "", 0)[3]
    window._cached.move_to_end(window._attached[node], last=False)
    window._free.clear()
    window._take()
    assert num_matched_pages(cache, list(range(24))) == 3, "5 pages need pages 3 and 4, 4 pages 2 and 3"


def computed_with_states(cache: PageCache, tokens: list[int]) -> PageTable:
    """A table whose sequence has computed a prompt in one chunk."""
    table = PageTable("", 0)
    assert cache.admit(table, tokens, len(tokens), headroom=0)
    cache.begin_chunk(table, tokens, len(table.nodes) * cache.page_size, len(tokens))
    cache.publish(table, tokens, len(tokens))
    cache.slide(table, len(tokens))
    return table


@each_case()
def test_a_shorter_hit_has_a_reason(reason: str | None, num_entries: int, num_shared: int, num_hit: int) -> None:
    """Hits on a text of 23 tokens with a state after 16 of them, or of 28 with one after 24."""
    states = StatePages(1 + num_entries, 4, 8)
    cache = PageCache(100, 4, [states])
    text = list(range(28 if reason == "no_entry" else 23))
    cache.release(computed_with_states(cache, text), text, len(text))
    if reason == "given_up":
        entries = [states._take() for _ in range(num_entries)]
        states._free += entries
    table = PageTable("", 0)
    neighbours = [PageTable("", 0)] if reason == "no_entry" else []
    assert all(cache.admit(neighbour, [99], 1, headroom=0) for neighbour in neighbours)
    assert cache.admit(table, [*text[:num_shared], 99, 98, 97, 96], 30, headroom=0)
    assert (len(table.nodes) * 4, table.miss_reason) == (num_hit, reason)
    assert table.num_missed * 4 == (num_shared // 4 * 4 - num_hit if reason else 0)
    check_cache(cache, [table, *neighbours])


@pytest.mark.parametrize(("num_prompt", "num_hit"), [(0, 24), (12, 8), (26, 24)])
def test_an_answer_is_not_found_in_a_longer_prompt(num_prompt: int, num_hit: int) -> None:
    """Since a state after an answer's tokens has other bits than one after as many of a prompt."""
    cache = PageCache(100, 4, [StatePages(8, 4, 8)])
    text = list(range(27))
    for tokens in (text[:12], text):
        cache.release(computed_with_states(cache, tokens), tokens, len(tokens))
    resumed = PageTable("", 0, num_prompt)
    assert cache.admit(resumed, text, len(text), headroom=0)
    assert len(resumed.nodes) * 4 == num_hit
    check_cache(cache, [resumed])


def test_a_window_is_the_reason_of_a_shorter_hit() -> None:
    cache = windowed(4, num_pages=12)
    text = list(range(23))
    cache.release(compute(cache, text), text, 23)
    window = cache.groups[0]
    node = cache._known([*text, 99], "", 0)[-1]
    window.detach(node)
    table = PageTable("", 0)
    assert cache.admit(table, [*text, 99], 30, headroom=0)
    assert (len(table.nodes), table.num_missed, table.miss_reason) == (4, 1, "window")


def test_pages_behind_the_window_become_cached_or_free() -> None:
    cache = windowed(4)
    window = cache.groups[0]
    table = compute(cache, list(range(16)))
    assert (table.groups[0].first, len(window._cached), len(window._free)) == (3, 3, 59 - 5)
    other = compute(cache, list(range(16)))
    assert (len(other.nodes), other.groups[0].first) == (4, 3)
    assert other.groups[0].pages[0] != table.groups[0].pages[0], "a second copy, the token after it was left"
    for sharer in (table, other):
        cache.extend_groups(sharer, 24)
        cache.slide(sharer, 20)
    assert (len(window._cached), len(window._free)) == (4, 59 - 4 - 4), "the copy is free"
    check_cache(cache, [table, other])


def test_a_long_prompt_leaves_what_ended_texts_and_shared_beginnings_need() -> None:
    cache = windowed(8, num_pages=18)
    ended = list(range(20))
    shared = list(range(100, 112))
    cache.release(compute(cache, ended), ended, 20)
    for _ in range(2):  # the second finds the pages of the first
        cache.release(compute(cache, [*shared, *range(200, 212)]), [*shared, *range(200, 212)], 24)
    cache.release(compute(cache, [*shared, *range(300, 312)]), [*shared, *range(300, 312)], 24)
    long = list(range(400, 440))
    table = PageTable("", 0)
    assert cache.admit(table, long, 40 + RESERVE, headroom=0, limit=40 + RESERVE)
    for end in range(4, 44, 4):
        cache.extend_groups(table, end + RESERVE * (end == 40))
        cache.publish(table, long, end)
        cache.slide(table, end)
    check_cache(cache, [table])
    assert num_matched_pages(cache, [*ended, 99]) == 5
    assert num_matched_pages(cache, [*shared, 99]) == 3


def test_a_text_that_was_known_and_not_hit_is_shared_once_it_is_computed() -> None:
    cache = windowed(8)
    window = cache.groups[0]
    tokens = list(range(17))
    cache.release(compute(cache, tokens), tokens, 17)
    window._free = [window._take() for _ in range(window.total_pages)]  # the window has lost all, the tree nothing
    table = PageTable("", 0)
    assert cache.admit(table, tokens, 17 + RESERVE, headroom=0)
    assert (len(table.nodes), table.num_missed) == (0, 4)
    cache.extend_groups(table, 17 + RESERVE)
    before = dict(table.changes())
    cache.publish(table, tokens, 17)
    assert len(table.nodes) == 4
    after = dict(table.changes())
    assert (before.keys(), before[4]) == (after.keys(), after[4])
    assert not {before[index] for index in range(4)} - {*cache._free}, "its own pages are free"
    assert num_matched_pages(cache, [*tokens, 99]) == 4
    check_cache(cache, [table])


def test_sequences_are_admitted_by_quota() -> None:
    cache = windowed(8, num_pages=13)  # quota: 2 pages before the one being filled, and one after it
    tables = [PageTable("", 0) for _ in range(4)]
    assert [cache.admit(table, [1], 4, headroom=0, limit=40) for table in tables] == [True, True, True, False]
    assert cache.groups[0]._claimed == 12
    assert cache.num_available == 99 - 3, "a refused admission takes nothing"
    cache.release(tables[0], [1], 1)
    assert cache.admit(tables[0], [1], 4, headroom=0, limit=40)
    check_cache(cache, tables[:3])


def test_chunks_reach_as_far_as_pages_that_nobody_claims() -> None:
    cache = windowed(8, num_pages=11)
    first = PageTable("", 0)
    second = PageTable("", 0)
    assert cache.admit(first, [1], 4, headroom=0, limit=400)
    assert (cache.reach(first, 400), cache.reach(first, 13)) == (40, 13)
    assert cache.admit(second, [1], 4, headroom=0, limit=400)
    assert cache.reach(first, 400) == cache.reach(second, 400) == 4 * (4 + 2)
    cache.extend_groups(first, 24)
    assert cache.reach(second, 400) == 16, "its quota"
    check_cache(cache, [first, second])


WINDOW_FAULTS: dict[str, Callable[[WindowPages, PageTable], object]] = {
    "a page is lost": lambda window, _: window._free.pop(),
    "a page in use is free": lambda window, table: window._free.append(table.groups[0].pages[-1]),
    "a holder is not counted": lambda window, table: window._holders.update({table.groups[0].pages[0]: 0}),
    "a page is in use and cached": lambda window, table: window._cached.update({table.groups[0].pages[0]: None}),
    "an own page is held twice": lambda _, table: table.groups[0].pages.append(table.groups[0].pages[-1]),
    "a quota is forgotten": lambda window, _: setattr(window, "_claimed", 0),
    "a table holds too much": lambda window, table: table.groups[0].pages.extend([window._take() for _ in "12345"]),
    "a page of a lost node": lambda window, table: window._attached.pop(table.nodes[-1]),
}


@pytest.mark.parametrize("fault", WINDOW_FAULTS)
def test_check_notices_in_a_window_group(fault: str) -> None:
    cache = windowed(8)
    table = compute(cache, list(range(18)))
    check_cache(cache, [table])
    WINDOW_FAULTS[fault](cache.groups[0], table)
    with pytest.raises(AssertionError):
        check_cache(cache, [table])


@dataclass(slots=True, eq=False)
class Run:
    """A sequence of the random test below."""

    table: PageTable
    tokens: list[int]
    num_prompt: int
    num_computed: int
    pages: dict[tuple[int, int], int] = field(default_factory=dict)  # (group, index) -> page, as it was handed out


class GroupsModel(TextModel):
    """The contents of each page of each window group, as the passes write them, and the nodes that have a page
    attached."""

    def __init__(self, page_size: int, lookahead: int, windows: list[int]) -> None:
        super().__init__(page_size, lookahead)
        self.windows = windows
        self.written: list[dict[int, Text | None]] = [{} for _ in windows]
        self.attached: list[set[Text]] = [set() for _ in windows]

    def first_read(self, window: int, start: int) -> int:
        return max(0, start - window + 1) // self.page_size

    def take_in(self, run: Run, neighbours: list[Run], is_hit: bool = False) -> None:
        """New pages of the run are of no use to others any more, and those it had are the same."""
        for group, pages in enumerate(run.table.groups):
            needed = {page for other in neighbours for page in self.needed(other, group)}
            for index, page in enumerate(pages.pages, pages.first):
                new = (group, index) not in run.pages
                assert page != 0
                assert run.pages.setdefault((group, index), page) == page, "an entry of the table has changed"
                assert is_hit or not new or page not in needed, "a page that another sequence needs"

    def needed(self, run: Run, group: int) -> Iterator[int]:
        first = self.first_read(self.windows[group], run.num_computed)
        yield from (page for (number, index), page in run.pages.items() if number == group and index >= first)

    def check_hit(self, run: Run, evicts: bool) -> None:
        """Shared pages have the run's text; exactly the pages of windows that the first pass reads are there, and have
        it, too; the hit is the longest there is."""
        table = run.table
        num_shared = len(run.table.nodes)
        for index in range(num_shared):
            assert self.texts[table.pages[index]] == self.text(table, run.tokens, index)
        for window, pages, texts_of_pages in zip(self.windows, table.groups, self.written, strict=True):
            assert pages.first == self.first_read(window, num_shared * self.page_size)
            assert pages.end == num_shared
            for index, page in enumerate(pages.pages, pages.first):
                assert texts_of_pages[page] == self.text(table, run.tokens, index)
        if evicts:
            return
        max_pages = max(0, len(run.tokens) - max(self.lookahead, 1)) // self.page_size
        texts = [self.text(table, run.tokens, index) for index in range(max_pages)]
        num_cached = next((index for index, text in enumerate(texts) if text not in self.known), max_pages)
        hits = [num for num in range(num_cached + 1) if self._has_windows(texts[:num])]
        assert num_shared == hits[-1], "not the longest hit"

    def _has_windows(self, texts: list[Text]) -> bool:
        firsts = [self.first_read(window, len(texts) * self.page_size) for window in self.windows]
        return all(attached.issuperset(texts[first:]) for first, attached in zip(firsts, self.attached, strict=True))

    def run_pass(self, run: Run, end: int, num_spoiled: int, tokens: list[int]) -> None:
        """Runs a pass over tokens [num_computed, end): it reads the pages of windows, and writes; `tokens` are all."""
        start = run.num_computed
        size = self.page_size
        for window, pages, texts_of_pages in zip(self.windows, run.table.groups, self.written, strict=True):
            for index in range(self.first_read(window, start), -(-start // size)):
                assert index >= pages.first, "a page was given back too early"
                read_end = min((index + 1) * size, start)
                text = run.table.namespace, tuple(tokens[: read_end + self.lookahead])
                assert texts_of_pages[pages.pages[index - pages.first]] == text
            for index in range(start // size, -(-(end + num_spoiled) // size)):
                text = run.table.namespace, tuple(tokens[: min((index + 1) * size, end) + self.lookahead])
                texts_of_pages[pages.pages[index - pages.first]] = text if index * size < end else None

    def share(self, run: Run, num_computed: int) -> None:
        """Records the texts of the tree and of the windows after a publish or a release."""
        table = run.table
        num_full = min(num_computed, len(run.tokens) - self.lookahead) // self.page_size
        shared = len(table.nodes)
        self.compute(table, run.tokens, num_computed)
        for index in range(shared, num_full):
            for pages, attached in zip(table.groups, self.attached, strict=True):
                if pages.first <= index < pages.end:
                    attached.add(self.text(table, run.tokens, index))


class CountingCache(PageCache):
    """Counts the hits that are shorter than what the tree has."""

    num_cut = 0

    def _longest_hit(self, nodes: list[Node]) -> int:
        hit = super()._longest_hit(nodes)
        self.num_cut += hit < len(nodes)
        return hit


class Play:
    """Random operations on a cache with window groups and on the model."""

    def __init__(self, page_size: int, lookahead: int, windows: list[int], evicts: bool, rng: random.Random) -> None:
        self.rng = rng
        self.evicts = evicts
        self.lookahead = lookahead
        longest = 18 * page_size + 20
        quotas = [WindowPages(2, page_size, window, RESERVE).quota(longest) for window in windows]
        sizes = [1 + (8 if evicts else 1_000) * quota for quota in quotas]
        pairs = zip(sizes, windows, strict=True)
        groups = [WindowPages(size, page_size, window, RESERVE) for size, window in pairs]
        self.cache = CountingCache(110 if evicts else 8_000, page_size, groups)
        self.model = GroupsModel(page_size, lookahead, windows)
        self.running: list[Run] = []
        self.texts = [rng.choices(range(3), k=10 * page_size) for _ in range(2)]  # that prompts begin with
        self.num_shared = self.num_refused = 0

    def admit(self) -> None:
        stem = self.rng.choice(self.texts)
        tokens = stem[: self.rng.randrange(len(stem))] + self.rng.choices(range(3), k=self.rng.randrange(1, 9))
        run = Run(PageTable(self.rng.choice("ab"), self.lookahead), tokens, len(tokens), 0)
        limit = len(tokens) + 20 + RESERVE
        if not self.cache.admit(run.table, tokens, len(tokens) + RESERVE, self.rng.randrange(3), limit):
            self.num_refused += 1
            return
        run.num_computed = len(run.table.nodes) * self.cache.page_size
        self.model.check_hit(run, self.evicts)
        self.model.take_in(run, self.running, is_hit=True)
        self.num_shared += len(run.table.nodes)
        self.running.append(run)

    def go_on(self, run: Run) -> None:
        """A chunk of its prompt, or nodes."""
        neighbours = [other for other in self.running if other is not run]
        if run.num_computed < run.num_prompt:
            end = self.rng.randrange(run.num_computed, run.num_prompt) + 1
            is_last = end == run.num_prompt
            reach = self.cache.reach(run.table, run.num_prompt + RESERVE)
            if end + RESERVE * is_last > reach:
                end = min(end, reach, run.num_prompt - 1)
                is_last = False
            assert end > run.num_computed, "a chunk has a token at least"
            self.cache.extend_groups(run.table, end + RESERVE * is_last)
            self.model.take_in(run, neighbours)
            sampled = self.rng.choices(range(3), k=is_last)
            self.model.run_pass(run, end, RESERVE * is_last, run.tokens + sampled)
            self.model.share(run, end)
            self.cache.publish(run.table, run.tokens, end)
            run.tokens += sampled
        else:
            if len(run.tokens) - run.num_prompt > 17 or not self.cache.extend(run.table, run.num_computed + RESERVE):
                self.end(run)
                return
            self.cache.extend_groups(run.table, run.num_computed + RESERVE)
            self.model.take_in(run, neighbours)
            run.tokens += self.rng.choices(range(3), k=self.rng.randrange(1, RESERVE + 1))
            end = len(run.tokens) - 1
            self.model.run_pass(run, end, run.num_computed + RESERVE - end, run.tokens)
        run.num_computed = end
        self.cache.slide(run.table, end)

    def end(self, run: Run) -> None:
        self.running.remove(run)
        self.model.share(run, run.num_computed)
        self.cache.release(run.table, run.tokens, run.num_computed)
        assert not run.table.groups
        if len(run.tokens) < 14 * self.cache.page_size:  # a question may follow
            self.texts = [*self.texts[:2], *self.texts[2:][-3:], run.tokens]

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.25 or not self.running:
            self.admit()
        elif kind < 0.9:
            self.go_on(self.rng.choice(self.running))
        else:
            self.end(self.rng.choice(self.running))


def cache_cases(page_sizes: list[int]) -> list[Any]:
    windows = [[(0, 1)], [(1, -1), (1, 0)], [(1, 1), (3, 0)], [(0, 1), (1, 0), (2, 3)]]  # (a, b): a pages and b tokens
    return [
        *pairwise(page_sizes, [[]], [0, 1, 2], [False, True]),
        *pairwise(page_sizes, windows, [0, 1], [False, True]),
    ]


@grouped()
@pytest.mark.parametrize(
    ("page_size", "windows", "lookahead", "evicts"),
    cache_cases([1, 4]) + [pytest.param(*case.values, marks=pytest.mark.slow) for case in cache_cases([16])],
)
def test_random_operations_against_the_dict_of_texts(
    page_size: int, windows: list[tuple[int, int]], lookahead: int, evicts: bool
) -> None:
    """Every pass finds the text that it reads, every hit has exactly what its first pass reads."""
    rng = random.Random(f"{page_size} {windows} {lookahead} {evicts}")
    sizes = [max(1, pages * page_size + tokens) for pages, tokens in windows]
    play = Play(page_size, lookahead, sizes, evicts, rng)
    for number in range(800):
        play.step()
        if number % 3 == 0:  # what is wrong stays wrong
            check_cache(play.cache, (run.table for run in play.running))
    for run in play.running.copy():
        play.end(run)
    check_cache(play.cache, [])
    assert all(window.num_available == window.total_pages for window in play.cache.groups)
    assert play.num_shared > 50
    assert play.cache.num_cut > 5 or not evicts or max(sizes, default=1) == 1
    assert (play.num_refused > 20) == evicts
