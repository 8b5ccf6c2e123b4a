"""Where the tokens of traced requests come from: what their passes verified, and what became of it.

A step verifies a beginning of the proposal that the step before it stored, or of the one that a host stage has put in
its place. The tracer keeps both until the step's tokens are there, for requests that ask, and for no others. Imports no
torch.
Letters: N nodes of a proposal, root included.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.plan import StepOutput, StepPlan, slots_of
from slipstream.serve.request import Output, TokenTrace

TARGET = "target"  # the source of tokens that nobody drafted


class Drafted(NamedTuple):
    """A stored proposal."""

    source: str
    nodes: NDArray[np.int32]  # (2, N): tokens, unused ones -1, and parents
    foreign: NDArray[np.bool_] | None = None  # (N,) nodes drawn from other requests' texts; None: none are


class Tracer:
    """`drafter`: the name of what proposes on the device; `fixed_tokens`: see Drafter. Both methods are called with the
    steps that have traced requests, each in the order of their numbers; `traced` are the places of these requests in
    the step, by id."""

    def __init__(self, drafter: str, fixed_tokens: Collection[int] | None = None) -> None:
        self._drafter = drafter
        self._fixed_tokens = None if fixed_tokens is None else sorted(fixed_tokens)
        self._stored: dict[int, Drafted] = {}  # by slot: what the last step that was read has proposed
        self._replaced: dict[int, dict[int, Drafted]] = {}  # by number of the plan and slot: what its edits bring

    def launched(self, plan: StepPlan, traced: Mapping[str, int]) -> None:
        """Keeps what host stages propose, whose arrays are used again."""
        slots = {plan.slots[place] for place in traced.values() if place < len(plan.slots)}
        found = self._replaced[plan.number] = {}
        for proposal in plan.edits.proposals:
            for index, (slot, count) in enumerate(zip(proposal.slots, proposal.counts, strict=True)):
                if count and slot in slots:
                    foreign = None if proposal.foreign is None else proposal.foreign[index, :count].copy()
                    found[slot] = Drafted(proposal.source, proposal.nodes[:2, index, :count].copy(), foreign)

    def add_traces(
        self,
        outputs: list[Output],
        plan: StepPlan,
        output: StepOutput,
        traced: Mapping[str, int],
        rounds: Mapping[str, int],
    ) -> list[Output]:
        """The Outputs of a step, with the traces of those that want one. `rounds`: how many each has had, by id."""
        slots = slots_of(plan)
        replaced = self._replaced.pop(plan.number, {})
        rows = num_rows(plan, output)
        found = list[Output]()
        for one in outputs:
            place = traced.get(one.request_id)
            if place is None or not one.tokens:  # it has failed
                found.append(one)
                continue
            entries = [TokenTrace(TARGET, position=0, round=0, rows=rows)]
            if place < len(plan.slots):
                drafted = replaced.get(slots[place]) or self._stored[slots[place]]
                entries = trace_round(drafted, output, place, rounds[one.request_id], rows)
            found.append(replace(one, trace=entries[: len(one.tokens)]))
        if output.proposed is not None:
            self._stored |= {slots[place]: self._drafted(output.proposed[:, place]) for place in traced.values()}
        return found

    def _drafted(self, nodes: NDArray[np.int32]) -> Drafted:
        """What the device has proposed, as (2, N) nodes."""
        foreign = None if self._fixed_tokens is None else np.isin(nodes[0], self._fixed_tokens, invert=True)
        return Drafted(self._drafter, nodes, foreign)


def num_rows(plan: StepPlan, output: StepOutput) -> int:
    """Of a step's pass that somebody uses: verified nodes, roots included, and tokens of prompts."""
    return int(output.num_verified[: len(plan.slots)].sum()) + sum(len(chunk.tokens) for chunk in plan.chunks)


def trace_round(drafted: Drafted, output: StepOutput, place: int, number: int, rows: int) -> list[TokenTrace]:
    """Of the tokens that segment `place` of a step has emitted, which verified the first nodes of `drafted`.

    Refused at a token's place are the children of the node before it that were verified, but the accepted one. Those
    that come from other requests' texts are counted, and not named.
    """
    emitted = output.emitted(place)
    num_verified = int(output.num_verified[place])
    path: Sequence[int] = range(len(emitted)) if output.accepted is None else output.accepted[place].tolist()
    children: dict[int, list[tuple[int, bool]]] = {}
    foreign = np.zeros(num_verified, dtype=np.bool_) if drafted.foreign is None else drafted.foreign
    for node, (token, parent) in enumerate(drafted.nodes[:, 1:num_verified].T.tolist(), 1):
        children.setdefault(parent, []).append((token, bool(foreign[node])))
    found = []
    for position, token in enumerate(emitted, 1):
        siblings = [child for child in children.get(path[position - 1], ()) if child[0] != token]
        refused = tuple(None if is_foreign else other for other, is_foreign in siblings)
        is_drafted = position < len(emitted)
        origin = (drafted.source, position) if is_drafted else (TARGET, 0)
        found.append(TokenTrace(*origin, number, refused, num_verified - 1, rows))
    return found
