"""The page cache against a plain dict of texts, and each rule of its docstrings by itself."""

import random
from collections.abc import Callable

import pytest

from slipstream.serve.engine.kv_cache import PageCache, PageTable
from slipstream.tests.pairwise import pairwise

Text = tuple[str, tuple[int, ...]]


def store(cache: PageCache, tokens: list[int], namespace: str = "", lookahead: int = 0) -> None:
    """As if a sequence had computed all of `tokens` but the last one, and ended."""
    table = PageTable(namespace, lookahead)
    assert cache.admit(table, tokens, len(tokens), headroom=0)
    cache.release(table, tokens, len(tokens) - 1)


def num_matched_pages(cache: PageCache, tokens: list[int], namespace: str = "", lookahead: int = 0) -> int:
    return len(cache.match(tokens, namespace, lookahead))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_usable_pages_are_the_matched_tokens_less_the_lookahead(page_size: int, lookahead: int) -> None:
    cached = list(range(100, 100 + 4 * page_size + lookahead + 1))
    cache = PageCache(20, page_size)
    store(cache, cached, lookahead=lookahead)
    for matched in range(len(cached)):
        prompt = cached[:matched] + [7] * (page_size + 1)
        usable = max(matched - lookahead, 0) // page_size
        assert num_matched_pages(cache, prompt, lookahead=lookahead) == usable, matched


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_known_to_the_end_keeps_a_token_to_compute(lookahead: int) -> None:
    cache = PageCache(20, 4)
    store(cache, list(range(20)), lookahead=lookahead)
    assert num_matched_pages(cache, list(range(8)), lookahead=lookahead) == 1
    assert num_matched_pages(cache, list(range(9)), lookahead=lookahead) == 2
    assert num_matched_pages(cache, [0], lookahead=lookahead) == 0


def test_eviction_takes_the_longest_unused_leaf_first() -> None:
    cache = PageCache(7, 1)  # 6 pages
    old, new = [1, 2, 3, 0], [4, 5, 6, 0]
    for tokens in (old, new):
        table = PageTable("", 0)
        assert cache.admit(table, tokens, 3, headroom=0)
        cache.release(table, tokens, 3)
    assert (len(cache._free), len(cache._cached)) == (0, 6)
    table = PageTable("", 0)
    assert cache.admit(table, old[:2], 2, headroom=0)  # uses page [1], needs one more: [3] is the oldest leaf
    cache.release(table, old[:2], 1)
    assert [num_matched_pages(cache, tokens) for tokens in (old, new)] == [2, 3]
    taken = PageTable("", 0)
    for expected in ([2, 3], [1, 3], [1, 2], [1, 1], [1, 0], [0, 0]):
        assert cache.extend(taken, len(taken.pages) + 1)
        assert [num_matched_pages(cache, tokens) for tokens in (old, new)] == expected
        cache.check([taken])
    assert not cache.extend(taken, 7)


def test_a_refused_admission_takes_nothing() -> None:
    cache = PageCache(6, 4)
    store(cache, list(range(9)))
    before = len(cache._free), len(cache._cached)
    table = PageTable("", 0)
    assert not cache.admit(table, list(range(9)), 21, headroom=0)  # 6 pages of 5
    assert not cache.admit(table, list(range(9)), 20, headroom=1)
    assert (len(cache._free), len(cache._cached), table.pages, table.nodes) == (*before, [], [])
    cache.check([])
    assert cache.admit(table, list(range(9)), 20, headroom=0)
    cache.check([table])


@pytest.mark.parametrize("first_out", [0, 1])
def test_a_text_computed_twice_at_once_is_kept_once(first_out: int) -> None:
    cache = PageCache(20, 4)
    tokens = list(range(10))
    tables = [PageTable("", 1), PageTable("", 1)]
    for table in tables:
        assert cache.admit(table, tokens, 12, headroom=0)
    for table in tables:
        cache.publish(table, tokens, 10)
    assert [len(table.nodes) for table in tables] == [2, 0]
    assert set(tables[0].pages).isdisjoint(tables[1].pages)
    cache.check(tables)
    cache.release(tables.pop(first_out), tokens, 10)
    cache.check(tables)
    cache.release(tables.pop(), tokens, 10)
    cache.check([])
    assert (len(cache._free), len(cache._cached)) == (17, 2)


def test_page_zero_is_never_handed_out() -> None:
    cache = PageCache(6, 4)
    table = PageTable("", 0)
    assert cache.extend(table, 20)
    assert sorted(table.pages) == [1, 2, 3, 4, 5]
    assert not cache.extend(table, 21)


@pytest.mark.parametrize(("num_pages", "page_size", "field"), [(1, 16, "num_pages"), (2, 0, "page_size")])
def test_sizes_are_checked(num_pages: int, page_size: int, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is .* at least"):
        PageCache(num_pages, page_size)


FAULTS: dict[str, Callable[[PageCache, PageTable], object]] = {
    "a page is lost": lambda cache, _: cache._free.pop(),
    "a page in use is free": lambda cache, table: cache._free.append(table.pages[-1]),
    "a shared page is handed out": lambda cache, table: cache._free.__setitem__(0, table.pages[0]),
    "a reader is counted twice": lambda cache, _: setattr(cache._nodes()[0], "references", 2),
    "a node is cut off": lambda _, table: table.nodes[0].children.clear(),
    "pages are swapped": lambda _, table: table.pages.reverse(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_notices(fault: str) -> None:
    cache = PageCache(20, 4)
    store(cache, list(range(30)))
    table = PageTable("", 0)
    assert cache.admit(table, list(range(15)), 20, headroom=0)
    cache.check([table])
    FAULTS[fault](cache, table)
    with pytest.raises(AssertionError):
        cache.check([table])


class TextModel:
    """What each page's KV was made of, as a dict; and every text that a cache without eviction would know."""

    def __init__(self, page_size: int, lookahead: int) -> None:
        self.page_size, self.lookahead = page_size, lookahead
        self.texts: dict[int, Text] = {}
        self.known: set[Text] = set()

    def text(self, table: PageTable, tokens: list[int], index: int) -> Text:
        """What page `index` depends on: all tokens up to its end, and those looked ahead at."""
        return table.namespace, tuple(tokens[: (index + 1) * self.page_size + self.lookahead])

    def check_admitted(self, table: PageTable, tokens: list[int], evicts: bool) -> None:
        num_shared = len(table.nodes)
        for index in range(num_shared):
            assert self.texts[table.pages[index]] == self.text(table, tokens, index)
        if evicts:
            return
        is_known = self.text(table, tokens, num_shared) in self.known
        fits = (num_shared + 1) * self.page_size + max(self.lookahead, 1) <= len(tokens)
        assert not (is_known and fits), "a known page was not found"

    def compute(self, table: PageTable, tokens: list[int], num_computed: int, ends: bool) -> None:
        """All full pages behind the shared ones become known; of a running sequence only up to a text known before."""
        is_new = True
        for index in range(len(table.nodes), min(num_computed, len(tokens) - self.lookahead) // self.page_size):
            text = self.text(table, tokens, index)
            self.texts[table.pages[index]] = text
            is_new = is_new and text not in self.known
            if is_new or ends:
                self.known.add(text)


@pytest.mark.parametrize(("page_size", "lookahead", "evicts"), pairwise([1, 4, 16], [0, 1, 2], [False, True]))
def test_random_operations_against_the_dict_of_texts(page_size: int, lookahead: int, evicts: bool) -> None:
    rng = random.Random(f"{page_size} {lookahead} {evicts}")
    cache = PageCache(24 if evicts else 4_000, page_size)
    model = TextModel(page_size, lookahead)
    stem = rng.choices(range(3), k=10 * page_size)
    running: list[tuple[PageTable, list[int]]] = []
    num_shared = num_refused = 0
    for _ in range(600):
        if rng.random() < 0.5:
            tail = rng.choices(range(3), k=rng.randrange(1, 2 * page_size + 2))
            tokens = stem[: rng.randrange(len(stem))] + tail
            table = PageTable(rng.choice("ab"), lookahead)
            if cache.admit(table, tokens, len(tokens), headroom=rng.randrange(3)):
                model.check_admitted(table, tokens, evicts)
                num_shared += len(table.nodes)
                running.append((table, tokens))
            else:
                num_refused += 1
        elif running and rng.random() < 0.5:
            table, tokens = rng.choice(running)
            num_computed = rng.randrange(len(table.nodes) * page_size, len(tokens) + 1)
            model.compute(table, tokens, num_computed, ends=False)
            cache.publish(table, tokens, num_computed)
        elif running:
            table, tokens = running.pop(rng.randrange(len(running)))
            num_computed = rng.randrange(len(table.nodes) * page_size, len(tokens) + 1)
            model.compute(table, tokens, num_computed, ends=True)
            cache.release(table, tokens, num_computed)
            assert not table.pages
        cache.check(table for table, _ in running)
    assert num_shared > 100
    assert (num_refused > 20) == evicts
