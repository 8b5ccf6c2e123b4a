"""The work of host stages on steps: what the next step waits for, and the edits that it gets. Imports no torch."""

from dataclasses import replace
from typing import Literal

import numpy as np

from slipstream.serve.engine.host_stages import Emitted, HostStage, Proposed
from slipstream.serve.engine.isolation import IsolatedStages
from slipstream.serve.engine.plan import Edits, HostProposal, StepOutput, StepPlan, slots_of
from slipstream.serve.engine.planner import Planner
from slipstream.serve.engine.scheduler import Sequence

HostNeed = Literal["nothing", "before launch", "before sampling"]


class HostWork:
    """Shows the outputs of steps to the stages, and collects their edits for the next plan."""

    def __init__(self, stages: list[HostStage], planner: Planner) -> None:
        self.stages = stages
        self.planner = planner
        self._edits = Edits()
        self._isolated = IsolatedStages(stages, self._fail)

    def need(self, slots: list[int]) -> HostNeed:
        """Returns the stages' work on the steps in flight, which are those of `slots`, that the next step waits for:
        proposals before its launch, as long as that pays, or masks before its sampling."""
        if not slots:
            return "nothing"
        drafting = (stage for stage in self.stages if max(stage.widths) > 1)
        if self.planner.waiting_pays and any(self._isolated.wants(stage, slots) for stage in drafting):
            return "before launch"
        return "before sampling" if self.reads_proposals(slots) else "nothing"

    def reads_proposals(self, slots: list[int]) -> bool:
        """Whether a stage wants to see the nodes that a step of these requests verifies."""
        readers = (stage for stage in self.stages if stage.reads == "proposal")
        return any(self._isolated.wants(stage, slots) for stage in readers)

    def look(self, plan: StepPlan, output: StepOutput, *, is_late: bool) -> tuple[HostProposal, ...]:
        """Shows stages the output of a step, and keeps their edits for the next one. `is_late`: that runs already, so
        their proposals come too late for it, and are returned.

        A request may end within its new tokens. The planner notices that later; then `release` is called.
        """
        late: tuple[HostProposal, ...] = ()
        for stage in self.stages:
            inputs: Emitted | Proposed
            if stage.reads == "emitted":
                inputs = self.planner.emitted(plan, output)
            elif output.proposed is not None and self._isolated.wants(stage, list(slots_of(plan))):
                inputs = self.planner.proposed(plan, output).after(self._edits.proposals)
            else:
                continue
            edits = self._isolated.run(stage, inputs, self.planner.limits.most_nodes, late=is_late)
            if is_late:
                late += edits.proposals
                edits = replace(edits, proposals=())
            self._edits += edits
        return late

    def mask_first_tokens(self, plan: StepPlan) -> None:
        """Masks the first tokens of answers: they have no proposal before them, so stages that read proposals get the
        last token of the prompt as a root."""
        ends = [chunk for chunk in plan.chunks if chunk.is_last]
        slots = [chunk.slot for chunk in ends]
        for stage in self.stages:
            if ends and stage.reads == "proposal" and self._isolated.wants(stage, slots):
                nodes = np.array([[[chunk.tokens[-1]] for chunk in ends], [[-1]] * len(ends)], np.int32)
                edits = self._isolated.run(stage, Proposed(slots, nodes, np.zeros((len(ends), 2), np.int32)), 1)
                self._edits += edits

    def take_edits(self, slots: tuple[int, ...]) -> Edits:
        """Returns the edits of a plan for these slots, and keeps the others."""
        edits, self._edits = self._edits.of(slots)
        return edits

    def admit(self, sequence: Sequence) -> None:
        self._isolated.admit(sequence)

    def release(self, sequence: Sequence) -> None:
        self._isolated.release(sequence)
        self._edits = self._edits.without(sequence.slot)

    def _fail(self, slot: int, error: str) -> None:
        """Ends a request with its next step."""
        self._edits += Edits(errors={slot: error})
