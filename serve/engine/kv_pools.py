"""Pools of pages, and pages that nodes of the prefix tree have attached. Imports no torch.

A node of the tree (serve/engine/kv_cache.py), a full page of text, has at most one page of each pool here attached.
Hits find it there.

Invariant of `AttachedPages`: every page but page 0 (the dump page of padding, never handed out) is in exactly one of
three places:
  free     the free list
  cached   attached to a node, held by no table; given up in order of last use, wherever its node is in the tree, but
           first those that nothing has hit and that a later page of their text has replaced: ends of conversations,
           which may go on, outlive long prompts
  in use   held by tables: by any number if it is attached to a node, else by one
"""

from collections import OrderedDict
from collections.abc import Hashable, Sized
from typing import Any


class PagePool:
    """The pages 1..num_pages-1 of a group."""

    _cached: Sized  # pages that nobody uses and that have a text

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 1, "page 0 is never handed out"
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


class AttachedPages(PagePool):
    """Pages that nodes of the prefix tree may have attached."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._cached: OrderedDict[int, None] = OrderedDict()  # in the order in which they are given up
        self._holders: dict[int, int] = {}  # by attached page: tables that hold it
        self._nodes: dict[int, Hashable] = {}  # by attached page
        self._attached: dict[Hashable, int] = {}  # by node
        self._hit: set[int] = set()  # attached pages that a hit has found
        self._bereft: set[Hashable] = set()  # nodes of the tree whose page was given up

    def most_shared(self, num_prompt: int) -> int | None:  # noqa: ARG002
        """Returns how many tokens of a text other texts may share, whose prompt has so many. None: all."""
        return None

    def cut_chunk(self, table: Any, start: int, end: int, *, is_last: bool) -> int:  # noqa: ARG002
        """Returns where a chunk from token `start` ends that could end at `end`, with its prompt if it `is_last`; not
        after `start` if it must wait."""
        return end

    def begin_chunk(self, table: Any, start: int, end: int, num_keyed: int) -> None:
        """Sees a chunk before its pass. Of the text, `num_keyed` tokens will be in full pages that have a key."""

    def hand_over(self, table: Any, node: Hashable) -> None:
        """Attaches to `node`, the last page of a text, what only the end of a text has."""

    def detach(self, node: Hashable) -> None:
        """The tree gives the node up. Whoever holds its page shares the node, so nobody does."""
        page = self._attached.pop(node, None)
        self._bereft.discard(node)
        if page is None:
            return
        del self._nodes[page]
        self._hit.discard(page)
        num_holders = self._holders.pop(page)
        assert num_holders == 0, "a table holds a page of a node that the tree gives up"
        del self._cached[page]
        self._free.append(page)

    def _attach_page(self, page: int, node: Hashable) -> None:
        """Attaches a page, which has the text of `node` and is held by one table."""
        assert page not in self._nodes, "a page has the text of one node"
        self._attached[node] = page
        self._bereft.discard(node)
        self._nodes[page] = node
        self._holders[page] = 1

    def _hold(self, node: Hashable, *, is_idle: bool = False) -> int:
        """Returns the page of a node that was hit, for one more table. `is_idle`: no request has it."""
        page = self._attached[node]
        self._cached.pop(page, None)
        self._holders[page] += 1
        if not is_idle:
            self._hit.add(page)
        return page

    def _give_back(self, page: int) -> None:
        """A table holds the page no more."""
        if page not in self._nodes:
            self._free.append(page)
            return
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._cached[page] = None

    def _give_up_first(self, page: int) -> None:
        """A later page of the text has replaced this one."""
        if page in self._cached and page not in self._hit:
            self._cached.move_to_end(page, last=False)

    def _take(self) -> int:
        """Takes a page to write: a free one, else the one that was cached longest without use."""
        if self._free:
            return self._free.pop()
        assert self._cached, "a table lacks a page: claims were counted wrong"
        page, _ = self._cached.popitem(last=False)
        node = self._nodes.pop(page)
        del self._holders[page], self._attached[node]
        self._bereft.add(node)
        self._hit.discard(page)
        return page
