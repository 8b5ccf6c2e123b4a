"""Pages of KV for layers that see the last `window` tokens only. Imports no torch.

Layers with one window form a group, which has page ids and page tables of its own. Prefix hits find its pages in the
tree of serve/engine/kv_cache.py: a node of the tree, a full page of text, has at most one page of each group attached.

Invariant: every page but page 0 (the dump page of padding, never handed out) is in exactly one of three places:
  free     the free list
  cached   attached to a node, held by no table; given up in order of last use, wherever its node is in the tree, but
           first those that only fell behind a window: ends of conversations, which may go on, outlive long prompts
  in use   held by tables: by any number if it is attached to a node, else by one, whose own it is
A pass over positions from c on reads positions c - window + 1 and later. A page before them is given back as soon as
the host knows that the tokens before c are committed, although older passes, launched when the host knew of fewer, may
still read it: passes run in launch order, and whoever gets the page next writes it in a later one.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class WindowTable:
    """One sequence's pages of a group. Token i lies in pages[i // page_size - first]; pages with a lower index were
    given back or never held."""

    quota: int
    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The index after the last page."""
        return self.first + len(self.pages)

    @property
    def claim(self) -> int:
        """Pages that no other table may count on."""
        return max(self.quota, len(self.pages))


def pages_of_window(window: int, reserve: int, page_size: int) -> int:
    """Returns the most pages of a table between passes, which write `reserve` tokens beyond the committed ones."""
    return -(-(window - 1) // page_size) + 1 - (-reserve // page_size)


class PagePool:
    """The pages 1..num_pages-1 of a group."""

    _cached: Sized  # pages that nobody uses and that have a text

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 2, since page 0 is never handed out")
        self.page_size = page_size
        self.total_pages = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


class WindowPages(PagePool):
    """The pages of a group of layers with one window.

    Every table has a quota: the most pages that it needs between passes, those of a window and of what the passes in
    flight write. A table claims its quota, or what it holds if that is more; claims never exceed the pool. A page in
    use is held by at least one table, so the pages that are not in use, free or cached, are at least those that tables
    may still take up to their quotas: none ever lacks a page. Chunks of a prompt take what nobody claims beyond.
    """

    def __init__(self, num_pages: int, page_size: int, window: int, reserve: int) -> None:
        """`reserve`: most KV tokens that the passes in flight write beyond the committed ones."""
        super().__init__(num_pages, page_size)
        if window < 1:
            raise ValueError(f"window is {window}; it must be at least 1")
        self.window = window
        self.reserve = reserve
        self._claimed = 0  # by all tables
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the order in which they are given up
        self._holders: dict[int, int] = {}  # by attached page: tables that hold it
        self._nodes: dict[int, Hashable] = {}  # by attached page
        self._attached: dict[Hashable, int] = {}  # by node
        self._hit: set[int] = set()  # attached pages that a hit has found

    def quota(self, limit: int) -> int:
        """Returns the quota of a table for a text of up to `limit` tokens.

        With n = num_computed // page_size, `slide` leaves pages_for(window - 1) pages before page n, and a pass over
        one more token of a prompt, or those in flight, write up to token num_computed + reserve, which lies at most
        pages_for(reserve) pages after it.
        """
        return min(self.pages_for(limit), pages_of_window(self.window, self.reserve, self.page_size))

    def has_room(self, limit: int) -> bool:
        """Whether such a table may be admitted."""
        return self._claimed + self.quota(limit) <= self.total_pages

    def reach(self, table: WindowTable) -> int:
        """Returns to how many tokens of its text the table may be extended."""
        num_pages = len(table.pages)
        spare = self.total_pages - self._claimed + max(0, table.quota - num_pages)
        return (table.end + spare) * self.page_size

    def longest_hit(self, nodes: Sequence[Hashable], limit: int) -> int:
        """Returns how many of the first `limit` nodes, a path of the tree, can serve a sequence: the pages that a pass
        over the tokens after them reads are attached."""
        index = hit = limit
        while index > self.first_read(hit * self.page_size):
            index -= 1
            if nodes[index] not in self._attached:
                hit = index
        return hit

    def admit(self, nodes: Sequence[Hashable], limit: int) -> WindowTable:
        """Returns a table of the pages that a pass over the tokens after `nodes`, a hit, reads."""
        table = WindowTable(self.quota(limit), self.first_read(len(nodes) * self.page_size))
        for node in nodes[table.first :]:
            page = self._attached[node]
            self._cached.pop(page, None)
            self._holders[page] += 1
            self._hit.add(page)
            table.pages.append(page)
        self._claimed += table.claim
        return table

    def extend(self, table: WindowTable, num_tokens: int) -> None:
        """Give the table own pages up to token `num_tokens`, at most `reach`."""
        before = table.claim
        for _ in range(table.end, self.pages_for(num_tokens)):
            table.pages.append(self._take())
        self._claimed += table.claim - before
        assert self._claimed <= self.total_pages, "the table was extended beyond its reach"

    def attach(self, table: WindowTable, index: int, node: Hashable) -> None:
        """Attach the table's page `index` to `node`, which has its text, if the table has it and the node none."""
        if table.first <= index < table.end and node not in self._attached:
            page = table.pages[index - table.first]
            assert page not in self._nodes, "a page has the text of one node"
            self._attached[node] = page
            self._nodes[page] = node
            self._holders[page] = 1

    def detach(self, node: Hashable) -> None:
        """The tree gives the node up. A page in use becomes its table's own again.

        That is a page which a running sequence attached to a node that it does not share (`PageCache.publish`). All
        others that hold it share the node, and a shared node is not given up: so this sequence alone is left.
        """
        page = self._attached.pop(node, None)
        if page is None:
            return
        del self._nodes[page]
        self._hit.discard(page)
        num_holders = self._holders.pop(page)
        assert num_holders <= 1, "a table holds a page of a node that the tree gives up"
        if num_holders == 0:
            del self._cached[page]
            self._free.append(page)

    def slide(self, table: WindowTable, num_computed: int) -> None:
        """Give back the pages that neither a pass over the tokens from `num_computed` on nor a hit on the full pages
        before them reads: the text may end here, and its continuation should find them."""
        num_passed = self.first_read(num_computed // self.page_size * self.page_size) - table.first
        if num_passed > 0:
            before = table.claim
            for page in table.pages[:num_passed]:
                self._give_back(page)
                if page in self._cached and page not in self._hit:
                    self._cached.move_to_end(page, last=False)
            del table.pages[:num_passed]
            table.first += num_passed
            self._claimed += table.claim - before

    def release(self, table: WindowTable) -> None:
        """Empty the table of a sequence that ends: attached pages stay cached, all others become free."""
        self._claimed -= table.claim
        for page in reversed(table.pages):
            self._give_back(page)

    def first_read(self, start: int) -> int:
        """Returns the index of the first page that a pass over positions from `start` on reads."""
        return max(0, start - self.window + 1) // self.page_size

    def _give_back(self, page: int) -> None:
        if page not in self._nodes:
            self._free.append(page)
            return
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._cached[page] = None

    def _take(self) -> int:
        """Takes a page to write: a free one, else the one that was cached longest without use."""
        if self._free:
            return self._free.pop()
        assert self._cached, "a table lacks a page: claims were counted wrong"
        page, _ = self._cached.popitem(last=False)
        del self._holders[page], self._attached[self._nodes.pop(page)]
        self._hit.discard(page)
        return page

    def check(self, tables: Iterable[tuple[WindowTable, AbstractSet[Hashable]]], nodes: AbstractSet[Hashable]) -> None:
        """Prove the module's invariant and that claims fit; `tables` are those of all running sequences, each with
        the nodes that it shares; `nodes` all those of the tree. Raises AssertionError."""
        holders: dict[int, int] = {}
        sharers: dict[int, int] = {}
        claimed = 0
        for table, shared in tables:
            claimed += max(table.quota, len(table.pages))
            for page in table.pages:
                holders[page] = holders.get(page, 0) + 1
                sharers[page] = sharers.get(page, 0) + (self._nodes.get(page) in shared)
        assert claimed == self._claimed <= self.total_pages, "claims are summed wrong, or exceed the pool"
        assert self._attached == {node: page for page, node in self._nodes.items()}, "attached both ways"
        assert self._attached.keys() <= nodes, "a page is attached to a node that the tree has lost"
        assert self._holders == {page: holders.get(page, 0) for page in self._nodes}, "holders are counted wrong"
        assert self._hit <= self._nodes.keys(), "a page without a node was hit"
        assert self._cached.keys() == {page for page, number in self._holders.items() if number == 0}, "cached in use"
        for page, number in holders.items():
            assert number - sharers[page] <= 1, "a page is held by two that do not share its node: an own one, by two"
        assert len(self._free) + len(self._cached) + len(holders) == self.total_pages, "pages were lost or given twice"
        assert {*self._free, *self._cached, *holders} == set(range(1, self.total_pages + 1)), "a page is in two places"
