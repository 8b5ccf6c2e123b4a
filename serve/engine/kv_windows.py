"""Pages of KV for layers that see the last `window` tokens only. Imports no torch.

Layers with one window form a group, which has page ids and page tables of its own. Prefix hits find its pages in the
tree of serve/engine/kv_cache.py: a node of the tree, a full page of text, has at most one page of each group attached.

Invariant: every page but page 0 (the dump page of padding, never handed out) is in exactly one of three places:
  free     the free list
  cached   attached to a node, held by no table; given up in order of last use, wherever its node is in the tree
  in use   held by tables: by any number if it is attached to a node, else by one, whose own it is
A pass over positions from c on reads positions c - window + 1 and later. A page before them is given back as soon as
the host knows that the tokens before c are committed, although older passes, launched when the host knew of fewer, may
still read it: passes run in launch order, and whoever gets the page next writes it in a later one.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
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


class WindowPages:
    """The pages 1..num_pages-1 of one group.

    Admission is by quota: the most pages that a table holds between passes. A table is admitted if the quotas of all
    and `transient` fit the pool, or if it is the only one. So no table ever lacks a page. Between passes tables hold at
    most their quotas. While a prefill pass is prepared, each of its chunks holds at most ceil(tokens / page_size) pages
    more, `transient` in all. A page in use is held by at least one table, so sharing only lowers the number of pages
    in use below the number held, and every other page is free or cached: there to be taken. A table that is the only
    one may need less than quota and `transient`: `most` says how much.
    """

    def __init__(self, num_pages: int, page_size: int, window: int, reserve: int, transient: int) -> None:
        """`reserve`: most KV tokens that the passes in flight write beyond the committed ones. `transient`: pages for
        the chunks of one prefill pass; k chunks of n tokens in all need at most (n - k) // page_size + k."""
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 2, since page 0 is never handed out")
        if window < 1:
            raise ValueError(f"window is {window}; it must be at least 1")
        self.page_size, self.window, self.reserve, self.transient = page_size, window, reserve, transient
        self.total_pages = num_pages - 1
        self._promised = 0  # the quotas of all tables
        self._free = list(range(num_pages - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the page longest unused first
        self._holders: dict[int, int] = {}  # by attached page: tables that hold it
        self._nodes: dict[int, Hashable] = {}  # by attached page
        self._attached: dict[Hashable, int] = {}  # by node

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def quota(self, limit: int) -> int:
        """The most pages that a table of a text of up to `limit` tokens holds between passes.

        With n = num_computed // page_size, `slide` leaves pages_for(window - 1) pages before page n, and the passes in
        flight write up to token num_computed + reserve - 1, which lies at most pages_for(reserve - 1) pages after it.
        """
        return min(self.pages_for(limit), self.pages_for(self.window - 1) + 1 + self.pages_for(self.reserve - 1))

    def most(self, limit: int) -> int:
        """The most pages that such a table holds at any time."""
        return min(self.pages_for(limit), self.quota(limit) + self.transient)

    def has_room(self, limit: int) -> bool:
        """Whether such a table may be admitted."""
        return not self._promised or self._promised + self.quota(limit) + self.transient <= self.total_pages

    def longest_hit(self, nodes: Sequence[Hashable], most: int) -> int:
        """How many of the first `most` nodes, a path of the tree, can serve a sequence: the pages that a pass over the
        tokens after them reads are attached."""
        index = hit = most
        while index > self.first_read(hit * self.page_size):
            index -= 1
            if nodes[index] not in self._attached:
                hit = index
        return hit

    def admit(self, nodes: Sequence[Hashable], limit: int) -> WindowTable:
        """A table of what a pass over the tokens after `nodes`, a hit, reads."""
        table = WindowTable(self.quota(limit), self.first_read(len(nodes) * self.page_size))
        self._promised += table.quota
        for node in nodes[table.first :]:
            page = self._attached[node]
            self._cached.pop(page, None)
            self._holders[page] += 1
            table.pages.append(page)
        return table

    def extend(self, table: WindowTable, num_tokens: int) -> None:
        """Give the table own pages up to token `num_tokens`. The class says why there are enough."""
        for _ in range(table.end, self.pages_for(num_tokens)):
            table.pages.append(self._take())

    def attach(self, table: WindowTable, index: int, node: Hashable) -> None:
        """`node` has the text of the table's page `index`: attach the page, if the table has it and the node none."""
        if table.first <= index < table.end and node not in self._attached:
            page = table.pages[index - table.first]
            assert page not in self._nodes, "a page has the text of one node"
            self._attached[node], self._nodes[page], self._holders[page] = page, node, 1

    def detach(self, node: Hashable) -> None:
        """The tree gives the node up. A page in use becomes its table's own again.

        That is a page which a running sequence attached to a node that it does not share (`PageCache.publish`). All
        others that hold it share the node, and a shared node is not given up: so this sequence alone is left.
        """
        page = self._attached.pop(node, None)
        if page is None:
            return
        del self._nodes[page]
        num_holders = self._holders.pop(page)
        assert num_holders <= 1, "a table holds a page of a node that the tree gives up"
        if num_holders == 0:
            del self._cached[page]
            self._free.append(page)

    def slide(self, table: WindowTable, num_computed: int) -> None:
        """Give back the pages that neither a pass over the tokens from `num_computed` on reads nor a hit on the full
        pages before them: the text may end here, and its continuation should find them."""
        num_passed = self.first_read(num_computed // self.page_size * self.page_size) - table.first
        if num_passed > 0:
            for page in table.pages[:num_passed]:
                self._give_back(page)
            del table.pages[:num_passed]
            table.first += num_passed

    def release(self, table: WindowTable) -> None:
        """The sequence ends: its attached pages stay cached, all others become free."""
        self._promised -= table.quota
        for page in reversed(table.pages):
            self._give_back(page)

    def first_read(self, start: int) -> int:
        """Index of the first page that a pass over positions from `start` on reads."""
        return max(0, start - self.window + 1) // self.page_size

    def _give_back(self, page: int) -> None:
        if page not in self._nodes:
            self._free.append(page)
            return
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._cached[page] = None

    def _take(self) -> int:
        """A page to write: a free one, else the one that was cached longest without use."""
        if self._free:
            return self._free.pop()
        assert self._cached, "a table lacks a page: quotas or `transient` are too small"
        page, _ = self._cached.popitem(last=False)
        del self._holders[page], self._attached[self._nodes.pop(page)]
        return page

    def check(self, tables: Iterable[tuple[WindowTable, AbstractSet[Hashable]]], nodes: AbstractSet[Hashable]) -> None:
        """Prove the module's invariant and that quotas are kept; `tables` are those of all running sequences, each with
        the nodes that it shares; `nodes` all those of the tree. Raises AssertionError."""
        holders: dict[int, int] = {}
        sharers: dict[int, int] = {}
        promised = excess = 0
        for table, shared in tables:
            promised, excess = promised + table.quota, excess + max(0, len(table.pages) - table.quota)
            for page in table.pages:
                holders[page] = holders.get(page, 0) + 1
                sharers[page] = sharers.get(page, 0) + (self._nodes.get(page) in shared)
        assert promised == self._promised, "quotas are summed wrong"
        assert excess <= self.transient, "tables hold more than quotas and the chunks of a pass"
        assert self._attached == {node: page for page, node in self._nodes.items()}, "attached both ways"
        assert self._attached.keys() <= nodes, "a page is attached to a node that the tree has lost"
        assert self._holders == {page: holders.get(page, 0) for page in self._nodes}, "holders are counted wrong"
        assert self._cached.keys() == {page for page, number in self._holders.items() if number == 0}, "cached in use"
        for page, number in holders.items():
            assert number - sharers[page] <= 1, "a page is held by two that do not share its node: an own one, by two"
        assert len(self._free) + len(self._cached) + len(holders) == self.total_pages, "pages were lost or given twice"
        assert {*self._free, *self._cached, *holders} == set(range(1, self.total_pages + 1)), "a page is in two places"
