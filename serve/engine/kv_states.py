"""States of layers with recurrent state, one entry of fixed size for each sequence, and snapshots of them. No torch.

A state is that after all tokens before some position, so a prefix hit is as deep as the deepest snapshot: a copy of the
state that was written when a chunk of a prompt passed a multiple of `grid` tokens, and that is attached to the node of
the tree which ends there. A chunk writes a snapshot

- at the last multiple of `grid` in it, so at the end of a prompt (nearly) and at the end of each part of a long one;
- where its text leaves one that the tree knows: the next text that begins like both hits there.

A layer may compute whole blocks of `grid` tokens of a prompt in another form than the tokens after them and those of an
answer, whose numbers then differ in their last bits. So a text shares no more than the whole blocks of its prompt
(`most_shared`), neither in what it finds nor in what it leaves; a preempted one computes its answer as before.

Running sequences have an entry each; snapshots take what is left, and those that were not used for longest give way.
Chunks that do not end their prompt end at multiples of `grid`, so that a layer may compute prompts in blocks of so many
tokens from the first one on, and a text's numbers do not depend on how it was cut.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from slipstream.serve.engine.kv_pools import AttachedPages
from slipstream.serve.request import MissReason


@dataclass(slots=True, eq=False)
class StateTable:
    """The entries of one sequence, which the device has in its page table, by the places of `columns`."""

    entry: int
    source: int  # the entry that its next chunk begins with
    snapshot: int = 0  # the entry that the chunk begun last writes a snapshot to; 0: none
    position: int = 0  # how many tokens the snapshot is of
    prompt: int = 0  # tokens of the prompt; 0: no answer follows
    branch: int = 0  # tokens after which the text leaves a known one; 0: the hit has all of it
    last_node: Hashable | None = None  # the node to which it attached a snapshot last
    named_columns: tuple[int, ...] = ()  # by plans

    @property
    def columns(self) -> tuple[int, ...]:
        """Numbers that a pass reads: the entries from which a chunk's state comes, to which states go, and to which a
        snapshot goes; of how many tokens the snapshot is; and how many the prompt has."""
        return self.source, self.entry, self.snapshot, self.position, self.prompt

    def changes(self) -> list[tuple[int, int]]:
        """Returns the index and the value of each column that has changed since the last call."""
        columns = self.columns
        before = self.named_columns or (None,) * len(columns)
        self.named_columns = columns
        return [(index, value) for index, value in enumerate(columns) if value != before[index]]


class StatePages(AttachedPages):
    """The entries of a model's recurrent layers. A page of this pool is one entry, whatever the size of other pages."""

    def __init__(self, num_pages: int, page_size: int, grid: int) -> None:
        """grid: a multiple of page_size."""
        super().__init__(num_pages, page_size)
        assert grid % page_size == 0, "snapshots are of whole pages"
        self.grid = grid

    def quota(self, limit: int) -> int:  # noqa: ARG002
        """Returns the entries that a sequence needs."""
        return 1

    def has_room(self, limit: int) -> bool:  # noqa: ARG002
        """Whether a sequence may be admitted."""
        return self.num_available > 0

    def reach(self, table: StateTable) -> int | None:  # noqa: ARG002
        """Returns None: a state is of any number of tokens."""
        return None

    def extend(self, table: StateTable, num_tokens: int) -> None:
        """Does nothing, likewise."""

    def most_shared(self, num_prompt: int) -> int | None:
        """Returns how many tokens of a text other texts may share: the whole blocks of its prompt. None: all, since no
        answer follows."""
        return num_prompt // self.grid * self.grid if num_prompt else None

    def longest_hit(self, nodes: Sequence[Hashable], limit: int) -> int:
        """Returns how many of the first `limit` nodes, a path of the tree, end with the deepest snapshot. 0 if a new
        sequence takes the last entry that is left, which may be that snapshot."""
        if self.num_available < 2:
            return 0
        step = self.grid // self.page_size
        counts = range(limit - limit % step, 0, -step)
        return next((count for count in counts if nodes[count - 1] in self._attached), 0)

    def miss_reason(self, nodes: Sequence[Hashable], hit: int) -> MissReason:
        """Returns why a hit on a path of the tree ends after `hit` nodes and not with the last."""
        step = self.grid // self.page_size
        if self.num_available < 2:
            return "no_entry"
        if hit == len(nodes) // step * step:
            return "grid"
        return "given_up" if not self._bereft.isdisjoint(nodes[hit:]) else "no_snapshot"

    def admit(
        self,
        nodes: Sequence[Hashable],
        limit: int,  # noqa: ARG002
        num_known: int,
        num_prompt: int,
        *,
        is_idle: bool = False,
        goes_on: bool = False,
    ) -> StateTable:
        """Returns the table of a sequence that computes the tokens after `nodes`, a hit. The tree knows the first
        `num_known` pages of the text, whose prompt has num_prompt tokens. `is_idle`: no request has it; `goes_on`: nor
        any the snapshot, whose entry it takes."""
        if goes_on:
            source = entry = self._attached[nodes[-1]]
            self.detach(nodes[-1])
            self._free.remove(entry)
            return StateTable(entry, source, prompt=num_prompt)
        source = self._hold(nodes[-1], is_idle=is_idle) if nodes else 0
        entry = self._take()
        branch = num_known * self.page_size // self.grid * self.grid
        has_branch = branch > len(nodes) * self.page_size
        return StateTable(
            entry,
            source or entry,
            prompt=num_prompt,
            branch=branch if has_branch else 0,
            last_node=nodes[-1] if is_idle and nodes else None,
        )

    def cut_chunk(self, table: StateTable, start: int, end: int, *, is_last: bool) -> int:
        """At a branch other texts may leave the known one, too, and find a snapshot."""
        if start < table.branch < end and self.num_available:
            return table.branch
        return end if is_last else end // self.grid * self.grid

    def begin_chunk(self, table: StateTable, start: int, end: int, num_keyed: int) -> None:
        """Finds an entry for the snapshot of a chunk, if there is one."""
        assert table.snapshot == 0, "the snapshot before was attached, or given back"
        position = min(end, num_keyed, table.prompt or end) // self.grid * self.grid
        if position > start and self.num_available:
            table.snapshot = self._take()
            table.position = position

    def attach(self, table: StateTable, index: int, node: Hashable) -> None:
        """Attaches the snapshot to `node`, the page `index` of the text, if it is of the tokens up to that page's end
        and the node has none."""
        if not table.snapshot or table.position != (index + 1) * self.page_size or node in self._attached:
            return
        self._attach_page(table.snapshot, node)
        self._give_back(table.snapshot)
        self._give_up_first(self._attached.get(table.last_node, 0))
        if table.position == table.branch:
            self._hit.add(table.snapshot)
        table.last_node = node
        table.snapshot = 0

    def hand_over(self, table: StateTable, node: Hashable) -> None:
        """Attaches the table's entry to `node`, if the node has none: a state of the tokens up to that page's end."""
        if node not in self._attached:
            self._attach_page(table.entry, node)
            self._give_up_first(self._attached.get(table.last_node, 0))

    def slide(self, table: StateTable, num_computed: int) -> None:
        """Gives back the snapshot that a first chunk began with, and one that no node took; its pass is launched, and
        whoever gets the entry writes it in a later one."""
        if num_computed and table.source != table.entry:
            self._give_back(table.source)
            table.source = table.entry
        self._drop_snapshot(table)

    def release(self, table: StateTable) -> None:
        """Empties the table of a sequence that ends."""
        self._drop_snapshot(table)
        if table.source != table.entry:
            self._give_back(table.source)
        self._give_back(table.entry)

    def _drop_snapshot(self, table: StateTable) -> None:
        if table.snapshot:
            self._give_back(table.snapshot)
            table.snapshot = 0
