"""Proves the invariants of the scheduler's queue, slots and pages (serve/engine/scheduler.py, kv_cache.py, kv_pools.py,
kv_windows.py, kv_states.py). Walks everything."""

from collections.abc import Hashable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from slipstream.serve.engine.kv_cache import Node, PageCache, PageTable
from slipstream.serve.engine.kv_pools import AttachedPages
from slipstream.serve.engine.kv_states import StatePages, StateTable
from slipstream.serve.engine.kv_windows import WindowPages, WindowTable
from slipstream.serve.engine.scheduler import Scheduler

Tables = Iterable[tuple[Any, AbstractSet[Hashable]]]  # of all running sequences, each with the nodes that it shares


def check_scheduler(scheduler: Scheduler):
    check_cache(scheduler.cache, (sequence.table for sequence in scheduler._running))
    everyone = [*scheduler._running, *scheduler._waiting]
    assert {id(sequence) for sequence in everyone} == {id(sequence) for sequence in scheduler._sequences.values()}
    assert len(everyone) == len(scheduler._sequences), "a sequence is in two places"
    slots = [sequence.slot for sequence in scheduler._running] + scheduler._free_slots
    assert sorted(slots) == list(range(scheduler.max_running)), "a request slot was lost or given twice"
    for sequence in scheduler._running:
        num_rest = len(sequence.tokens) - sequence.num_computed
        assert num_rest == 1 or (sequence.in_flight and num_rest == 0 if sequence.decoding else num_rest > 1), (
            "num_computed is wrong"
        )
        assert len(sequence.table.pages) >= scheduler.cache.pages_for(len(sequence.tokens) - 1), "tokens without a page"
        for group, pages in zip(scheduler.cache.groups, sequence.table.groups, strict=True):
            check_table(group, pages, sequence.num_computed)
    for sequence in scheduler._waiting:
        assert not sequence.table.pages, "a waiting sequence holds pages"
        assert not sequence.table.groups, "a waiting sequence holds pages of further groups"
        assert (sequence.slot, sequence.num_computed, sequence.decoding) == (-1, 0, False)


def check_cache(cache: PageCache, tables: Iterable[PageTable]):
    """`tables` are those of all running sequences."""
    tables = list(tables)
    readers = {}
    private_pages = []
    for table in tables:
        parent = table.nodes[0].parent if table.nodes else None
        assert parent is None or parent in cache._roots.values(), "shared pages begin below a root"
        for index, node in enumerate(table.nodes):
            assert node.parent is parent, "shared pages are a path of the tree"
            assert node.page == table.pages[index], "a shared page is not its node's"
            readers[node] = readers.get(node, 0) + 1
            parent = node
        assert table.room == len(table.pages) * cache.page_size, "a table's room is not that of its pages"
        private_pages += table.pages[len(table.nodes) :]
    nodes = nodes_of(cache)
    assert len({id(node) for node in nodes}.union(map(id, readers))) == len(nodes), "a table holds a lost node"
    assert all(node.references == readers.get(node, 0) for node in nodes), "references are counted wrong"
    unused = {node.page: node for node in nodes if node.references == 0}
    assert unused == cache._cached, "cached pages are the nodes without references"
    gone = set[Node | None]()
    for node in cache._cached.values():
        assert node.parent not in gone, "a parent would go first"
        gone.add(node)
    in_use = private_pages + [node.page for node in nodes if node.references > 0]
    assert len(cache._free) + len(unused) + len(in_use) == cache.total_pages, "pages were lost or handed out twice"
    assert {*cache._free, *unused, *in_use} == set(range(1, cache.total_pages + 1)), "a page is in two places"
    for index, group in enumerate(cache.groups):
        check_group(group, [(table.groups[index], set(table.nodes)) for table in tables], set(nodes))


def nodes_of(cache: PageCache) -> list[Node]:
    """Returns all nodes but the roots, parents first."""
    nodes = [*cache._roots.values()]
    for parent in nodes:  # grows while it is walked
        for key, node in parent.children.items():
            assert (node.parent, node.key) == (parent, key), "a node hangs below the wrong parent"
            nodes.append(node)
    return nodes[len(cache._roots) :]


def check_table(group: WindowPages | StatePages, table: Any, num_computed: int):
    """The next pass of a sequence finds its pages, or its state."""
    if isinstance(group, WindowPages):
        num_full = num_computed // group.page_size * group.page_size
        assert table.first == group.first_read(num_full), "pages are those that a pass or a hit after it reads"
        assert table.end >= group.pages_for(num_computed), "tokens of a window without a page"
        return
    assert table.entry, "a sequence has no entry"
    assert table.source == table.entry or num_computed % group.grid == 0, "a snapshot off the grid"


def check_group(group: WindowPages | StatePages, tables: Tables, nodes: AbstractSet[Hashable]):
    """`nodes`: all those of the tree."""
    holders = check_windows(group, tables) if isinstance(group, WindowPages) else check_states(group, tables)
    check_attached(group, holders, nodes)


def check_windows(group: WindowPages, tables: Iterable[tuple[WindowTable, AbstractSet[Hashable]]]) -> dict[int, int]:
    """Claims fit. Returns how many tables hold each page."""
    holders = {}
    sharers = {}
    claimed = 0
    for table, shared in tables:
        claimed += max(table.quota, len(table.pages))
        for page in table.pages:
            holders[page] = holders.get(page, 0) + 1
            sharers[page] = sharers.get(page, 0) + (group._nodes.get(page) in shared)
    assert claimed == group._claimed <= group.total_pages, "claims are summed wrong, or exceed the pool"
    for page, number in holders.items():
        assert number - sharers[page] <= 1, "a page is held by two that do not share its node: an own one, by two"
    return holders


def check_states(group: StatePages, tables: Iterable[tuple[StateTable, AbstractSet[Hashable]]]) -> dict[int, int]:
    """Returns how many tables hold each entry."""
    holders = {}
    for table, shared in tables:
        assert table.entry not in group._nodes, "a running sequence writes a snapshot"
        assert table.source == table.entry or group._nodes.get(table.source) in shared, "a hit's node is not shared"
        for page in {table.entry, table.source, table.snapshot} - {0}:
            holders[page] = holders.get(page, 0) + 1
    return holders


def check_attached(group: AttachedPages, holders: dict[int, int], nodes: AbstractSet[Hashable]):
    """`holders`: how many tables hold each page in use."""
    assert group._attached == {node: page for page, node in group._nodes.items()}, "attached both ways"
    assert group._attached.keys() <= nodes, "a page is attached to a node that the tree has lost"
    assert group._bereft <= nodes - group._attached.keys(), "a node is bereft that the tree has lost, or that has one"
    assert group._holders == {page: holders.get(page, 0) for page in group._nodes}, "holders are counted wrong"
    assert group._hit <= group._nodes.keys(), "a page without a node was hit"
    assert group._cached.keys() == {page for page, number in group._holders.items() if number == 0}, "cached in use"
    assert len(group._free) + len(group._cached) + len(holders) == group.total_pages, "pages were lost or given twice"
    assert {*group._free, *group._cached, *holders} == set(range(1, group.total_pages + 1)), "a page is in two places"
