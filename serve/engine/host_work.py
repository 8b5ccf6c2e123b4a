"""The work of host stages on steps: what the next step waits for, the edits that it gets, and the end of a request for
which a stage raises. Imports no torch."""

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import numpy as np

from slipstream.serve.engine.host_stages import Emitted, HostStage, Proposed
from slipstream.serve.engine.plan import NO_EDITS, Edits, HostProposal, StepOutput, StepPlan
from slipstream.serve.engine.planner import Planner
from slipstream.serve.engine.scheduler import Sequence

logger = logging.getLogger(__name__)

HostNeed = Literal["nothing", "before launch", "before sampling"]


class HostWork:
    """Shows the outputs of steps to the stages, and collects their edits for the next plan."""

    def __init__(self, stages: list[HostStage], planner: Planner) -> None:
        self.stages = stages
        self.planner = planner
        self.slots = set[int]()  # of running requests that stages may have work for, and of those that they failed
        self.edits = NO_EDITS  # for the next plan
        self._isolated = IsolatedStages(stages, self._fail)

    def need(self, slots: list[int]) -> HostNeed:
        """Returns the stages' work on the steps in flight, which are those of `slots`, that the next step waits for:
        proposals before its launch, as long as that pays, or masks before its sampling."""
        drafting = (stage for stage in self.stages if max(stage.widths) > 1)
        if self.planner.policy.host_wait.pays and any(self._isolated.wants(stage, slots) for stage in drafting):
            return "before launch"
        return "before sampling" if self._reads_proposals(slots) else "nothing"

    def _reads_proposals(self, slots: Collection[int]) -> bool:
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
            elif output.proposed is not None and self._isolated.wants(stage, plan.segments):
                inputs = self.planner.proposed(plan, output).after(self.edits.proposals)
            else:
                continue
            edits = self._isolated.run(stage, inputs, self.planner.limits.most_nodes, late=is_late)
            if is_late:
                late += edits.proposals
                edits = replace(edits, proposals=())
            self.edits += edits
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
                self.edits += edits

    def edit(self, plan: StepPlan) -> StepPlan:
        """Adds the edits for the plan's requests, keeps the others, and asks for the proposals that a stage reads.
        Requests whose drafts would hold up others get none."""
        edits = plan.edits
        if self.edits is not NO_EDITS:
            present, self.edits = self.edits.of(plan.segments)
            edits += present
        returns_proposals = plan.returns_proposals or self._reads_proposals(plan.segments)
        drafting = plan.drafting
        if undrafted := set[int]().union(*(stage.undrafted for stage in self.stages)):
            drafting = tuple([slot for slot in drafting if slot not in undrafted])
        return replace(plan, edits=edits, returns_proposals=returns_proposals, drafting=drafting)

    def admit(self, sequence: Sequence) -> None:
        self._isolated.admit(sequence)
        if any(sequence.slot in stage.slots for stage in self.stages):
            self.slots.add(sequence.slot)

    def release(self, sequence: Sequence) -> None:
        self._isolated.release(sequence)
        self.slots.discard(sequence.slot)
        self.edits = self.edits.without(sequence.slot)

    def _fail(self, slot: int, error: str) -> None:
        """Ends a request with its next step."""
        self.slots.add(slot)
        self.edits += Edits(errors={slot: error})


class IsolatedStages:
    """Calls host stages so that an exception of a stage ends one request, and never the engine.

    A stage works for many requests at a time, and when it raises it may have taken in the tokens of some. So each of
    them is admitted anew with its text, as after a preemption, and runs alone: a request for which the stage raises
    again fails, all others go on. As long as no stage raises, this costs nothing. `fail` is called once for a request,
    with its slot and the stage's error; then the request is hidden from stages.
    """

    def __init__(self, stages: list[HostStage], fail: Callable[[int, str], None]) -> None:
        self.stages = stages
        self._fail = fail
        self._running: dict[int, Sequence] = {}  # by slot
        self._failed = set[int]()  # slots
        self._admitted = set[tuple[HostStage, int]]()  # stages and slots that they may hold

    def admit(self, sequence: Sequence) -> None:
        self._running[sequence.slot] = sequence
        for stage in self.stages:
            try:
                self._enter(stage, sequence)
            except Exception as error:
                self._end(stage, sequence.slot, error)

    def release(self, sequence: Sequence) -> None:
        """Releases a request that ends or is preempted, whatever stages raise."""
        slot = sequence.slot
        request = sequence.request
        for stage in self.stages:
            try:
                stage.release(slot, sequence.tokens, resumes=sequence.resumes)
                self._admitted.discard((stage, slot))
            except Exception as error:
                if slot not in self._failed:
                    logger.error("%s failed as request %s left", type(stage).__name__, request.id, exc_info=error)
        del self._running[slot]
        self._failed.discard(slot)

    def wants(self, stage: HostStage, slots: Collection[int]) -> bool:
        """Whether a stage has work for a step of these requests."""
        if self._failed:
            slots = [slot for slot in slots if slot not in self._failed]
        return not stage.slots.isdisjoint(slots)

    def run(self, stage: HostStage, inputs: Emitted | Proposed, width: int, *, late: bool = False) -> Edits:
        if self._failed:
            inputs = inputs.at([index for index, slot in enumerate(inputs.slots) if slot not in self._failed])
        if not inputs.slots:
            return Edits()
        try:
            return stage.run(inputs, width, late=late)
        except Exception as error:
            cause = error
            num_failed = len(self._failed)
        edits = Edits()
        for index in range(len(inputs.slots)):
            edits += self._run_one(stage, inputs.at([index]), width, late=late)
        if len(self._failed) == num_failed:
            logger.warning("%s raised for a step, but for none of its requests", type(stage).__name__, exc_info=cause)
        return edits

    def _run_one(self, stage: HostStage, inputs: Emitted | Proposed, width: int, *, late: bool) -> Edits:
        [slot] = inputs.slots
        try:
            # The scheduler may lack the tokens of a step that was read just before this one. A stage that reads
            # proposals never sees that, since both steps waited for it, and a stage that drafts may lack them, too.
            self._enter(stage, self._running[slot])
            edits = stage.run(inputs, width, late=late)
        except Exception as error:
            self._end(stage, slot, error)
            return Edits()
        # A stage may use the arrays of its proposals again in a call soon after.
        return replace(
            edits, proposals=tuple(replace(proposal, nodes=proposal.nodes.copy()) for proposal in edits.proposals)
        )

    def _enter(self, stage: HostStage, sequence: Sequence) -> None:
        key = stage, sequence.slot
        if key in self._admitted:  # by this request, or by an earlier one where admission or release have raised
            with suppress(Exception):
                stage.release(sequence.slot, [])
        self._admitted.add(key)
        stage.admit(sequence.slot, sequence.request, sequence.tokens)

    def _end(self, stage: HostStage, slot: int, error: Exception) -> None:
        """Fails a request, unless it has failed already."""
        if slot in self._failed:
            return
        self._failed.add(slot)
        name = type(stage).__name__
        request = self._running[slot].request
        logger.error("%s failed on request %s", name, request.id, exc_info=error)
        self._fail(slot, f"{name} failed on this request with {type(error).__name__}; its traceback is in the log")
