"""Traces where the tokens of requests come from: the nodes that their passes verified, accepted and refused.

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

from slipstream.serve.engine.plan import StepOutput, StepPlan
from slipstream.serve.request import Output, TokenTrace

TARGET = "target"  # the source of tokens that nobody drafted


class Drafted(NamedTuple):
    """A stored proposal."""

    source: str
    nodes: NDArray[np.int32]  # (2, N): tokens, unused ones -1, and parents
    foreign: NDArray[np.bool_] | None = None  # (N,) nodes drawn from other requests' texts; None: none are


class Tracer:
    """Makes traces. `drafter`: name of the drafter on the device; `fixed_tokens`: see Drafter. The planner calls both
    methods with the steps that have traced requests, in the order of their numbers; `traced`: the places of these
    requests in the step, by id."""

    def __init__(self, drafter: str, fixed_tokens: Collection[int] | None) -> None:
        self._drafter = drafter
        self._fixed_tokens = None if fixed_tokens is None else sorted(fixed_tokens)
        self._stored: dict[int, Drafted] = {}  # by slot: proposals of the last step that was read
        self._replaced: dict[int, dict[int, Drafted]] = {}  # by number of the plan and slot: proposals of its edits

    def launched(self, plan: StepPlan, traced: Mapping[str, int]) -> None:
        """Copies the proposals of host stages, which reuse their arrays."""
        slots = {plan.slots[place] for place in traced.values() if place < len(plan.slots)}
        proposals = self._replaced[plan.number] = {}
        for proposal in plan.edits.proposals:
            for index, (slot, count) in enumerate(zip(proposal.slots, proposal.counts, strict=True)):
                if count and slot in slots:
                    foreign = None if proposal.foreign is None else proposal.foreign[index, :count].copy()
                    proposals[slot] = Drafted(proposal.source, proposal.nodes[:2, index, :count].copy(), foreign)

    def add_traces(
        self,
        outputs: list[Output],
        plan: StepPlan,
        output: StepOutput,
        traced: Mapping[str, int],
        rounds: Mapping[str, int],
    ) -> list[Output]:
        """Adds traces to the Outputs of a step. `rounds`: how many each traced request has had, by id."""
        slots = plan.segments
        replaced = self._replaced.pop(plan.number, {})
        rows = num_rows(plan, output)
        traced_outputs = list[Output]()
        for result in outputs:
            place = traced.get(result.request_id)
            if place is None or not result.tokens:  # it has failed
                traced_outputs.append(result)
                continue
            entries = [TokenTrace(TARGET, position=0, round=0, rows=rows)]
            if place < len(plan.slots):
                drafted = replaced.get(slots[place]) or self._stored[slots[place]]
                entries = trace_round(drafted, output, place, rounds[result.request_id], rows)
            traced_outputs.append(replace(result, trace=entries[: len(result.tokens)]))
        if output.proposed is not None:
            for place in traced.values():
                nodes = output.proposed[:, place]
                foreign = None if self._fixed_tokens is None else np.isin(nodes[0], self._fixed_tokens, invert=True)
                self._stored[slots[place]] = Drafted(self._drafter, nodes, foreign)
        return traced_outputs


def num_rows(plan: StepPlan, output: StepOutput) -> int:
    """Returns the rows in use: verified nodes, roots included, plus prompt tokens."""
    return int(output.num_verified[: len(plan.slots)].sum()) + sum(len(chunk.tokens) for chunk in plan.chunks)


def trace_round(drafted: Drafted, output: StepOutput, place: int, number: int, rows: int) -> list[TokenTrace]:
    """Traces the tokens that segment `place` of a step has emitted; it verified the first nodes of `drafted`.

    The refused tokens at a place are the verified children of the node before it, except the accepted one. Tokens from
    other requests' texts are counted, and not named.
    """
    emitted = output.emitted(place)
    num_verified = int(output.num_verified[place])
    path: Sequence[int] = range(len(emitted)) if output.accepted is None else output.accepted[place].tolist()
    children: dict[int, list[tuple[int, bool]]] = {}
    foreign = np.zeros(num_verified, dtype=np.bool_) if drafted.foreign is None else drafted.foreign
    for node, (token, parent) in enumerate(drafted.nodes[:, 1:num_verified].T.tolist(), 1):
        children.setdefault(parent, []).append((token, bool(foreign[node])))
    traces = []
    for position, token in enumerate(emitted, 1):
        siblings = [child for child in children.get(path[position - 1], ()) if child[0] != token]
        refused = tuple(None if is_foreign else other for other, is_foreign in siblings)
        is_drafted = position < len(emitted)
        traces.append(
            TokenTrace(
                source=drafted.source if is_drafted else TARGET,
                position=position if is_drafted else 0,
                round=number,
                refused=refused,
                drafted=num_verified - 1,
                rows=rows,
            )
        )
    return traces
