"""Pages of the KV cache: an allocator and a radix prefix tree over full pages. Imports no torch.

Layers with one retention are a group, with page ids and page tables of its own; page_size is the same in all. The
first group keeps all tokens: its pages are those of this file, and hits are found by its tree. Each further one keeps
the last tokens of every sequence (serve/engine/kv_windows.py), or a state (kv_states.py).

Invariant: every page but page 0 (the dump page of padding, never handed out) is in exactly one of three places:
  free     the free list
  cached   a tree node that no running sequence references; given up in order of last use, leaves first
  in use   a tree node with references, or the own range of one running sequence's PageTable
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.serve.engine.kv_pools import PagePool
from slipstream.serve.engine.kv_states import StatePages
from slipstream.serve.engine.kv_windows import WindowPages
from slipstream.serve.request import MissReason

Key = tuple[str | int, ...]  # namespace, then tokens
GroupPages = WindowPages | StatePages


@dataclass(slots=True, eq=False)
class Node:
    """One full page in the prefix tree, below its parent by `key`: see `PageCache._key`. Not a node of a proposal."""

    key: Key
    page: int
    parent: "Node | None"  # None for the root alone
    references: int = 0  # running sequences that read this page
    is_idle: bool = False  # hits need what was computed in idle time, and no request has found it yet
    children: dict[Key, "Node"] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence; token i lies in pages[i // page_size]. Empty while the sequence waits. `lookahead`: of
    the drafter, see `PageCache._key`.

    Ownership, with S = len(nodes) and C = the number of computed tokens:
      pages[0:S)                  the tree's, page i being nodes[i].page; full, read only, referenced once by this table
      pages[S:C // page_size)     own, full: a step computed it, and `PageCache.release` hands it over; or no other
                                  text may share it
      pages[C // page_size:)      own: being filled, or reserved for the KV of the next steps
    """

    namespace: str
    lookahead: int
    num_prompt: int = 0  # tokens of the prompt, before the answer; 0: no answer follows
    is_idle: bool = False  # no request has it: see serve/engine/idle.py
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)  # a table of each further group, from admission to release
    room: int = 0  # tokens that the pages hold
    num_sent: int = 0  # pages that plans have named
    num_missed: int = 0  # pages that the tree knew when this was admitted, and a further group could not serve
    miss_reason: MissReason | None = None
    is_mixed: bool = False  # the draft's weights have changed since its first page
    num_idle: int = 0  # pages at the end of its hit that were computed in idle time, and that no request found before

    def changes(self) -> list[tuple[int, int]]:
        """Returns the index and the page of each page from the first that was added or changed since the last call."""
        start = self.num_sent
        if start == len(self.pages):
            return []
        self.num_sent = len(self.pages)
        return list(enumerate(self.pages[start:], start))


class PageCache(PagePool):
    """Hands out pages 1..num_pages-1, each for `page_size` tokens, and remembers the text of full ones.

    A sequence references a node only together with all nodes above it, and gives them back deepest first. So
    references never grow from parent to child, and in `_cached` a node comes before its parent: the first entry, the
    one longest unused, is always a leaf, and both eviction and reuse take constant time per page.
    """

    def __init__(self, num_pages: int, page_size: int, groups: Sequence[GroupPages] = ()) -> None:
        """`groups`: the further ones."""
        super().__init__(num_pages, page_size)
        assert all(group.page_size == page_size for group in groups), "all groups have one page size"
        self.groups: tuple[Any, ...] = tuple(groups)
        self._has_states = any(isinstance(group, StatePages) for group in groups)
        self._cached: OrderedDict[int, Node] = OrderedDict()  # by page, the one longest unused first
        self._root = Node((), 0, None)
        self._roots = {"": self._root}  # by version of the draft's weights

    def change_draft(self, version: str, tables: Iterable[PageTable]) -> None:
        """Begins a prefix tree for weights of the draft, or goes on with theirs: its KV in other trees is that of other
        weights. `tables` of running sequences keep their pages, and publish none from now on."""
        for table in tables:
            table.is_mixed = True
        self._roots = {name: root for name, root in self._roots.items() if root.children}
        self._root = self._roots.setdefault(version, Node((), 0, None))

    def usage(self) -> dict[tuple[str, str], int]:
        """Counts pages by group (0: of all tokens) and state: used, cached, free."""
        counts = {}
        for group, pool in enumerate((self, *self.groups)):
            available = pool.num_available
            states = {"used": pool.total_pages - available, "cached": available - pool.num_free, "free": pool.num_free}
            counts.update({(str(group), state): count for state, count in states.items()})
        return counts

    def look_up(self, tokens: list[int], namespace: str, lookahead: int) -> tuple[int, int]:
        """Returns how many tokens at the start of `tokens` have pages in the tree, and of how many a hit is now.

        A text that agrees with a cached one on `matched` tokens can use floor((matched - lookahead) / page_size) of
        its pages, and at least one token is left to compute. Further groups must have attached what a pass over those
        left reads: a hit is the longest path for which they all have.
        """
        nodes = self._known(tokens, namespace, lookahead)
        return len(nodes) * self.page_size, self._longest_hit(nodes) * self.page_size

    def _known(self, tokens: list[int], namespace: str, lookahead: int) -> list[Node]:
        """Returns the nodes of the start of `tokens`, from the first page on."""
        nodes: list[Node] = []
        parent = self._root
        for index in range((len(tokens) - max(lookahead, 1)) // self.page_size):
            node = parent.children.get(self._key(tokens, index, namespace, lookahead))
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def admit(
        self,
        table: PageTable,
        tokens: list[int],
        num_tokens: int,
        headroom: int,
        limit: int | None = None,
        *,
        shares: bool = True,
    ) -> bool:
        """Fill an empty table: shared pages for the start of `tokens`, own ones up to `num_tokens` in all. The caller
        computes what follows the shared pages, len(table.nodes) of them. Further groups give what a hit reads;
        `extend_groups` adds the rest. `limit` (default: num_tokens): the most tokens that the table will ever be
        extended to. Without `shares` all pages are own ones, whatever is cached.

        Returns False, and takes nothing, if fewer than `headroom` available pages would be left, or if a further
        group has no room for its quota.
        """
        assert not table.pages, "admit takes an empty table"
        limit = num_tokens if limit is None else limit
        if not all(group.has_room(limit) for group in self.groups):
            return False
        nodes = self._known(tokens, table.namespace, table.lookahead) if shares else []
        nodes = nodes[: self._most_shared(table, len(tokens)) // self.page_size]
        hit = self._longest_hit(nodes)
        table.num_missed = len(nodes) - hit
        table.miss_reason = None
        if hit < len(nodes):  # by the further group that has the least of the path
            shortest = min(self.groups, key=lambda group: group.longest_hit(nodes, len(nodes)))
            table.miss_reason = shortest.miss_reason(nodes, hit)
        for node in nodes[:hit]:
            self._reference(table, node)
            table.pages.append(node.page)
        table.room = hit * self.page_size
        if self.extend(table, num_tokens, headroom):
            goes_on = table.is_idle and hit > 0 and nodes[hit - 1].is_idle
            table.groups = [
                group.admit(table.nodes, limit, len(nodes), table.num_prompt, is_idle=table.is_idle, goes_on=goes_on)
                for group in self.groups
            ]
            if not table.is_idle:
                table.num_idle = self._take_idle(table.nodes)
            return True
        self._unreference_all(table)
        table.pages.clear()
        table.room = 0
        return False

    def extend(self, table: PageTable, num_tokens: int, headroom: int = 0) -> bool:
        """Give the table own pages of the first group until it holds `num_tokens`. Returns False, and takes nothing, as
        `admit` does.
        """
        if num_tokens <= table.room:
            return True
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing + headroom > self.num_available:
            return False
        table.pages.extend(self._take() for _ in range(missing))
        table.room += missing * self.page_size
        return True

    def extend_groups(self, table: PageTable, num_tokens: int) -> None:
        """Give the table own pages of every further group up to token `num_tokens`, at most `reach`."""
        for group, pages in zip(self.groups, table.groups, strict=True):
            group.extend(pages, num_tokens)

    def reach(self, table: PageTable, num_tokens: int) -> int:
        """Returns to how many tokens, at most `num_tokens`, `extend_groups` may extend the table. Quotas guarantee one
        token of a prompt more than are computed, and the reserve of a sequence that decodes."""
        reaches = (group.reach(pages) for group, pages in zip(self.groups, table.groups, strict=True))
        return min([num_tokens, *(reach for reach in reaches if reach is not None)])

    def cut_chunk(self, table: PageTable, start: int, end: int, *, is_last: bool) -> int:
        """Returns where a chunk from token `start` ends that could end at `end`, with its prompt if it `is_last`; not
        after `start` if it must wait."""
        for group, pages in zip(self.groups, table.groups, strict=True):
            end = group.cut_chunk(pages, start, end, is_last=is_last)
        return end

    def begin_chunk(self, table: PageTable, tokens: list[int], start: int, end: int) -> None:
        """Prepares further groups for the pass of a chunk of `tokens`."""
        for group, pages in zip(self.groups, table.groups, strict=True):
            group.begin_chunk(pages, start, end, len(tokens) - max(table.lookahead, 1))

    def slide(self, table: PageTable, num_computed: int) -> None:
        """Give back what further groups need no more once `num_computed` tokens are committed."""
        for group, pages in zip(self.groups, table.groups, strict=True):
            group.slide(pages, num_computed)

    def publish(self, table: PageTable, tokens: list[int], num_computed: int) -> None:
        """Hand full computed pages to the tree, in order. Where it has their text, from a sequence that ran at the same
        time or because a hit was shorter, the table takes the tree's page and frees its own: passes that are launched
        still read that one, and whoever gets it writes it in a later one."""
        parent = table.nodes[-1] if table.nodes else self._root
        for index in range(len(table.nodes), self._num_full(table, tokens, num_computed)):
            key = self._key(tokens, index, table.namespace, table.lookahead)
            node = parent.children.get(key)
            if node is None:
                node = self._insert(table, parent, key, table.pages[index])
            else:
                self._free.append(table.pages[index])
                self._reference(table, node)
                table.pages[index] = node.page
                table.num_sent = min(table.num_sent, index)
            self._attach(table, index, node)
            parent = node

    def release(self, table: PageTable, tokens: list[int], num_computed: int, *, hands_over: bool = False) -> None:
        """Empty the table: computed full pages stay cached, all others become free. `hands_over`: so does the state of
        further groups after them, which is that after `num_computed` tokens."""
        self.publish(table, tokens, num_computed)
        self._free.extend(table.pages[len(table.nodes) :])
        for group, pages in zip(self.groups, table.groups, strict=True):
            if hands_over:
                group.hand_over(pages, table.nodes[-1])
            group.release(pages)
        self._unreference_all(table)
        table.pages.clear()
        table.groups.clear()
        table.room = 0
        table.num_sent = 0

    def _key(self, tokens: list[int], index: int, namespace: str, lookahead: int) -> Key:
        """Returns the key of page `index` below its parent: its tokens and the `lookahead` tokens after them.

        A drafter's KV at slot i depends on tokens up to i + lookahead. Two texts that differ right after a page
        therefore need two copies of it, and a page has a key only once the tokens after it are known.
        """
        start = index * self.page_size
        return (namespace, *tokens[start : start + self.page_size + lookahead])

    def _take_idle(self, nodes: list[Node]) -> int:
        """Returns how many pages at the end of a hit were computed in idle time. They count once."""
        count = 0
        for node in reversed(nodes):
            if not node.is_idle:
                break
            node.is_idle = False
            count += 1
        return count

    def _longest_hit(self, nodes: list[Node]) -> int:
        """Returns for how many of the nodes, a path from the root, all further groups have the pages."""
        hit = len(nodes)
        while self.groups and hit > (shorter := min(group.longest_hit(nodes, hit) for group in self.groups)):
            hit = shorter
        return hit

    def _attach(self, table: PageTable, index: int, node: Node) -> None:
        """Lets hits on `node` find the table's page `index` of every further group, too."""
        node.is_idle = table.is_idle
        for group, pages in zip(self.groups, table.groups, strict=True):
            group.attach(pages, index, node)

    def _num_full(self, table: PageTable, tokens: list[int], num_computed: int) -> int:
        """Returns how many pages have complete KV, the drafter's too: they may enter the tree. A pass knows of a text
        the token after its last row, so the KV of drafters that look further ahead lags behind; by that much a page
        may lack it where states count, which hits need at the page's end."""
        num_shared = self._most_shared(table, len(tokens) - table.lookahead)
        lag = 0 if self._has_states else max(table.lookahead - 1, 0)
        num_full = 0 if table.is_mixed else min(num_computed - lag, num_shared) // self.page_size
        return max(num_full, len(table.nodes))

    def _most_shared(self, table: PageTable, num_tokens: int) -> int:
        """Returns how many of so many tokens other texts may share."""
        limits = (group.most_shared(table.num_prompt) for group in self.groups)
        return min([num_tokens, *(limit for limit in limits if limit is not None)])

    def _insert(self, table: PageTable, parent: Node, key: Key, page: int) -> Node:
        """Adds the table's page to the tree; returns its node, which the table references."""
        node = Node(key, page, parent)
        parent.children[key] = node
        table.nodes.append(node)
        node.references = 1
        return node

    def _reference(self, table: PageTable, node: Node) -> None:
        """Adds a node of the tree to the end of the table's."""
        if node.references == 0:
            del self._cached[node.page]
        node.references += 1
        table.nodes.append(node)

    def _unreference_all(self, table: PageTable) -> None:
        """Gives the table's nodes back, deepest first; those that nobody else references stay cached."""
        while table.nodes:
            node = table.nodes.pop()
            node.references -= 1
            if node.references == 0:
                self._cached[node.page] = node

    def _take(self) -> int:
        """Takes a page to write: a free one, else the one that was cached longest without use."""
        if self._free:
            return self._free.pop()
        page, node = self._cached.popitem(last=False)
        assert node.parent is not None, "the root is never cached"
        assert not node.children, "only a leaf is evicted"
        del node.parent.children[node.key]
        for group in self.groups:
            group.detach(node)
        return page
