"""Pages of KV for layers that see the last `window` tokens only. Imports no torch.

Layers with one window form a group, which has page ids and page tables of its own. Prefix hits find its pages in the
tree of serve/engine/kv_cache.py, to whose nodes they are attached (kv_pools.py has the invariant).

Pages that only fell behind a window are the first that are given up. A pass over positions from c on reads positions c
- window + 1 and later. A page before them is given back as soon as the host knows that the tokens before c are
committed, although older passes, launched when the host knew of fewer, may still read it: passes run in launch order,
and whoever gets the page next writes it in a later one.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from slipstream.serve.engine.kv_pools import AttachedPages
from slipstream.serve.request import MissReason


@dataclass(slots=True, eq=False)
class WindowTable:
    """One sequence's pages of a group. Token i lies in pages[i // page_size - first]; pages with a lower index were
    given back or never held."""

    quota: int
    first: int = 0
    pages: list[int] = field(default_factory=list)
    num_sent: int = 0  # pages, and those before `first`, that plans have named

    def changes(self) -> list[tuple[int, int]]:
        """Returns the index and the page of each new entry since the last call."""
        start = max(self.num_sent, self.first)
        self.num_sent = max(self.num_sent, self.end)
        return [(index, self.pages[index - self.first]) for index in range(start, self.end)]

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


class WindowPages(AttachedPages):
    """The pages of a group of layers with one window.

    Every table has a quota: the most pages that it needs between passes, those of a window and of what the passes in
    flight write. A table claims its quota, or what it holds if that is more; claims never exceed the pool. A page in
    use is held by at least one table, so the pages that are not in use, free or cached, are at least those that tables
    may still take up to their quotas: none ever lacks a page. Chunks of a prompt take what nobody claims beyond.
    """

    def __init__(self, num_pages: int, page_size: int, window: int, reserve: int) -> None:
        """`reserve`: most KV tokens that the passes in flight write beyond the committed ones."""
        super().__init__(num_pages, page_size)
        self.window = window
        self.reserve = reserve
        self._claimed = 0  # by all tables

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

    def miss_reason(self, nodes: Sequence[Hashable], hit: int) -> MissReason:  # noqa: ARG002
        """Returns why a hit on a path of the tree ends after `hit` nodes and not with the last."""
        return "window"

    def admit(
        self,
        nodes: Sequence[Hashable],
        limit: int,
        num_known: int,  # noqa: ARG002
        num_prompt: int,  # noqa: ARG002
        *,
        is_idle: bool = False,
        goes_on: bool = False,  # noqa: ARG002
    ) -> WindowTable:
        """Returns a table of the pages that a pass over the tokens after `nodes`, a hit, reads. The tree knows the
        first `num_known` pages of the text, whose prompt has num_prompt tokens. `is_idle`: no request has it."""
        table = WindowTable(self.quota(limit), self.first_read(len(nodes) * self.page_size))
        for node in nodes[table.first :]:
            table.pages.append(self._hold(node, is_idle=is_idle))
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
            self._attach_page(table.pages[index - table.first], node)

    def slide(self, table: WindowTable, num_computed: int) -> None:
        """Give back the pages that neither a pass over the tokens from `num_computed` on nor a hit on the full pages
        before them reads: the text may end here, and its continuation should find them."""
        num_passed = self.first_read(num_computed // self.page_size * self.page_size) - table.first
        if num_passed > 0:
            before = table.claim
            for page in table.pages[:num_passed]:
                self._give_back(page)
                self._give_up_first(page)
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
