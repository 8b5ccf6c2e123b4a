"""Work that the host does between two passes: n-gram lookahead, grammars.

A stage reads either the tokens that the last step emitted, before the engine decides what the next one verifies, or the
proposals of the next step, before they are verified. It answers with edits: proposals, for which a pass waits only if
that pays, and masks, which the pass reads late. Imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.plan import Edits, HostProposal
from slipstream.serve.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Emitted:
    """Tokens that requests have gained. A request may end within them: `release` tells how many belong to it."""

    slots: list[int]  # (B,)
    results: NDArray[np.int32]  # (B, 1 + N): how many, then the tokens

    def at(self, indices: list[int]) -> "Emitted":
        return Emitted([self.slots[index] for index in indices], self.results[indices])

    def of(self, slots: Collection[int]) -> "Emitted":
        return self.at([index for index, slot in enumerate(self.slots) if slot in slots])


@dataclass(frozen=True, slots=True, eq=False)
class Proposed:
    """Nodes that the next step verifies for each request; before a first token, the prompt's last one as a root."""

    slots: list[int]  # (B,)
    nodes: NDArray[np.int32]  # (2, B, N): tokens, unused ones -1, and parents
    results: NDArray[np.int32]  # (B, 1 + N) as in Emitted: the tokens of the pass that proposed it, the last the root

    def at(self, indices: list[int]) -> "Proposed":
        return Proposed([self.slots[index] for index in indices], self.nodes[:, indices], self.results[indices])

    def after(self, proposals: Sequence[HostProposal]) -> "Proposed":
        """Returns a copy with the proposals that a host stage replaces."""
        nodes = self.nodes.copy()
        place = {slot: index for index, slot in enumerate(self.slots)}
        for proposal in proposals:
            for index, (slot, count) in enumerate(zip(proposal.slots, proposal.counts, strict=True)):
                if count and slot in place:
                    nodes[:, place[slot]] = -1
                    nodes[:, place[slot], : proposal.nodes.shape[2]] = proposal.nodes[:2, index]
        return Proposed(self.slots, nodes, self.results)


class HostStage(ABC):
    """A part of the host's work; `reads` names the input of `run`. If a method raises for a request, that request ends
    (`IsolatedStages` in serve/engine/host_work.py): the stage may see requests leave and come again."""

    reads: ClassVar[Literal["emitted", "proposal"]]
    widths: tuple[int, ...] = (1,)  # numbers of nodes that its proposals may have
    slots: Set[int]  # of the requests that it has work for now

    @property
    def undrafted(self) -> Set[int]:
        """Slots of requests whose drafts would hold up others, so that they should get none for now."""
        return frozenset()

    def attach(self, num_slots: int, *, pinned: bool) -> None:
        """Prepares slots 0..num_slots - 1; called once, before all other methods. `pinned`: proposals go to a GPU, so
        they should lie in pinned memory."""

    def admit(self, slot: int, request: Request, tokens: list[int]) -> None:
        """Takes a request that starts, or resumes, in `slot` with these tokens: its prompt and its answer so far. A
        stage that drafts proposes nothing for a request that does not want drafts."""

    @abstractmethod
    def run(self, inputs: Emitted | Proposed, width: int, *, late: bool = False) -> Edits:
        """Returns edits for the next step. `width`: most nodes of a proposal. If a request fails, the edits name its
        error. `late`: the pass has begun, so masks are for the present nodes, and proposals only show whether waiting
        would have paid."""

    def release(self, slot: int, tokens: list[int], *, resumes: bool = False) -> None:
        """Drops the request in `slot`, which ended, or was preempted and `resumes`; `tokens`: all its tokens, none
        after a fault."""

    def metrics(self) -> dict[str, int]:
        """Returns gauges by name, for /metrics."""
        return {}

    def close(self) -> None:
        """Saves state; called once, after all requests have ended. Raises OSError if it cannot be saved."""
