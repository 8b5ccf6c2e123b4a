"""Each rule of the page cache's docstrings by itself. test_scheduler_simulation.py plays all of them."""

from collections.abc import Callable

import pytest

from slipstream.serve.engine.kv_cache import PageCache, PageTable
from slipstream.serve.engine.kv_states import StatePages
from slipstream.serve.engine.kv_windows import WindowPages
from slipstream.tests.pairwise import grouped
from slipstream.tests.serve.cache_invariants import check_cache, nodes_of
from slipstream.tests.tables import each_case


def store(cache: PageCache, tokens: list[int], namespace: str = "", lookahead: int = 0):
    """Stores pages as a sequence does that has computed all of `tokens` but the last one, and ended."""
    table = PageTable(namespace, lookahead)
    assert cache.admit(table, tokens, len(tokens), headroom=0)
    cache.release(table, tokens, len(tokens) - 1)


def num_matched_pages(cache: PageCache, tokens: list[int], namespace: str = "", lookahead: int = 0) -> int:
    return cache.look_up(tokens, namespace, lookahead)[1] // cache.page_size


def test_eviction_takes_the_longest_unused_leaf_first():
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
def test_check_notices(fault):
    cache = PageCache(20, 4)
    store(cache, list(range(30)))
    table = PageTable("", 0)
    assert cache.admit(table, list(range(15)), 20, headroom=0)
    check_cache(cache, [table])
    FAULTS[fault](cache, table)
    with pytest.raises(AssertionError):
        check_cache(cache, [table])


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
def test_an_answer_of_any_length_is_found_by_the_next_turn(window, lookahead):
    for length in range(12, 25):
        cache = windowed(window)
        text = list(range(length + 1))
        cache.release(compute(cache, text[:-1], length - 10, lookahead), text, length)
        check_cache(cache, [])
        assert num_matched_pages(cache, [*text, 99], lookahead=lookahead) == length // 4


def test_a_hit_ends_where_a_window_has_lost_its_pages():
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
def test_a_shorter_hit_has_a_reason(reason, num_entries, num_shared, num_hit):
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
def test_an_answer_is_not_found_in_a_longer_prompt(num_prompt, num_hit):
    """Since a state after an answer's tokens has other bits than one after as many of a prompt."""
    cache = PageCache(100, 4, [StatePages(8, 4, 8)])
    text = list(range(27))
    for tokens in (text[:12], text):
        cache.release(computed_with_states(cache, tokens), tokens, len(tokens))
    resumed = PageTable("", 0, num_prompt)
    assert cache.admit(resumed, text, len(text), headroom=0)
    assert len(resumed.nodes) * 4 == num_hit
    check_cache(cache, [resumed])


def test_a_window_is_the_reason_of_a_shorter_hit():
    cache = windowed(4, num_pages=12)
    text = list(range(23))
    cache.release(compute(cache, text), text, 23)
    window = cache.groups[0]
    node = cache._known([*text, 99], "", 0)[-1]
    window.detach(node)
    table = PageTable("", 0)
    assert cache.admit(table, [*text, 99], 30, headroom=0)
    assert (len(table.nodes), table.num_missed, table.miss_reason) == (4, 1, "window")


def test_pages_behind_the_window_become_cached_or_free():
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


def test_a_long_prompt_leaves_what_ended_texts_and_shared_beginnings_need():
    cache = windowed(8, num_pages=14)
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


def test_a_text_that_was_known_and_not_hit_is_shared_once_it_is_computed():
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


def test_sequences_are_admitted_by_quota():
    cache = windowed(8, num_pages=13)  # quota: 2 pages before the one being filled, and one after it
    tables = [PageTable("", 0) for _ in range(4)]
    assert [cache.admit(table, [1], 4, headroom=0, limit=40) for table in tables] == [True, True, True, False]
    assert cache.groups[0]._claimed == 12
    assert cache.num_available == 99 - 3, "a refused admission takes nothing"
    cache.release(tables[0], [1], 1)
    assert cache.admit(tables[0], [1], 4, headroom=0, limit=40)
    check_cache(cache, tables[:3])


def test_chunks_reach_as_far_as_pages_that_nobody_claims():
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
def test_check_notices_in_a_window_group(fault):
    cache = windowed(8)
    table = compute(cache, list(range(18)))
    check_cache(cache, [table])
    WINDOW_FAULTS[fault](cache.groups[0], table)
    with pytest.raises(AssertionError):
        check_cache(cache, [table])
