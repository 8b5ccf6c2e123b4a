"""Executes plans on the device. Only `InFlight.read` waits for it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.serve.engine.plan import HostProposal, StepOutput, StepPlan, slots_of
from slipstream.serve.runner.cuda_graphs import RoundGraphs
from slipstream.serve.runner.prefill import eager_prefill
from slipstream.serve.runner.prompt_graphs import PromptGraphs
from slipstream.serve.runner.round import Runner

NOT_FINITE = "the target's logits are not finite at some token of this request; its weights or its dtype are at fault"


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A launched pass."""

    plan: StepPlan
    results: Tensor  # (B, 1 + N), or (B, 1 + 2 * N) for trees, int32 on the host, written once `landed` has passed
    proposed: Tensor | None = None  # (2, B, N) int32, likewise
    started: torch.cuda.Event | float = 0.0  # or the milliseconds that it took
    landed: torch.cuda.Event | None = None
    failure: str = ""  # the pass could not run

    def read(self) -> StepOutput:
        """Waits for the results."""
        if self.landed is not None:
            self.landed.synchronize()  # sync
        plan, results = self.plan, self.results.numpy()
        slots = slots_of(plan)
        width = plan.width if plan.slots else 1
        counts, tokens = results[:, 0], results[:, 1 : 1 + width]
        errors = dict.fromkeys(slots, self.failure) if self.failure else self._not_finite(slots, counts, tokens)
        accepted = results[:, 1 + width :] if results.shape[1] > 1 + width else None
        proposed = None if self.proposed is None else self.proposed.numpy()
        return StepOutput(counts, tokens, accepted, proposed, errors)

    def _not_finite(self, slots: Sequence[int], counts: np.ndarray, tokens: np.ndarray) -> dict[int, str]:
        """Where a logit was NaN, the last token that was emitted is -1."""
        last = tokens[np.arange(len(tokens)), counts - 1]
        return {slots[index]: NOT_FINITE for index in np.flatnonzero(last < 0).tolist()} if (last < 0).any() else {}

    def milliseconds(self) -> float:
        """That the pass took, once it has been read."""
        if isinstance(self.started, float):
            return self.started
        assert self.landed is not None
        return self.started.elapsed_time(self.landed)


class ModelRunner:
    """`graphs`, `prompts`: captured rounds and prefills, or None. `on_launch` is called when the device has got a
    plan's pass."""

    def __init__(self, passes: Runner, graphs: RoundGraphs | None = None, prompts: PromptGraphs | None = None) -> None:
        self.passes, self.graphs, self.prompts = passes, graphs, prompts
        self.target, self.drafter, self.state = passes.target, passes.drafter, passes.state
        self.on_launch: Callable[[], None] | None = None
        self._prepared = 0  # number of the last plan whose slots and pages the device has
        self._started: torch.cuda.Event | None = None  # of that plan's pass, on a GPU
        self._slots: tuple[tuple[int, ...], Tensor] = ((), self.state.upload([]))  # uploaded last

    def prepare(self, plan: StepPlan) -> None:
        """Uploads what a plan says of slots and pages, while the pass before it runs. `execute` does so otherwise."""
        if plan.number <= self._prepared:
            return
        self._prepared = plan.number
        if self.state.device.type == "cuda":
            self._started = torch.cuda.Event(enable_timing=True)
        for admission in plan.admissions:
            self.state.admit(admission.slot, admission.request, admission.tokens)
        self.state.set_pages(plan.pages)
        if plan.slots:
            self._upload(plan.slots)
            if self.graphs is not None:
                self.graphs.expect(list(plan.slots))

    def execute(self, plan: StepPlan) -> InFlight:
        """Launches the plan's pass. Plans come in the order of their numbers.

        Where memory does not suffice for the pass, its requests fail and others go on.
        """
        self.prepare(plan)
        for proposal in plan.edits.proposals:
            self._store(proposal)
        self.state.set_masks(plan.edits.masks, slots_of(plan), plan.width if plan.slots else 1)
        began, started = time.perf_counter(), self._started
        if started is not None:
            started.record()
        try:
            results = self._prompts(plan) if plan.chunks else self._round(plan)
        except torch.OutOfMemoryError as error:
            return self._failed(plan, error)
        if self.on_launch is not None:
            self.on_launch()
        proposed = self._proposals(plan) if plan.returns_proposals else None
        if started is None:
            return InFlight(plan, results, proposed, 1000 * (time.perf_counter() - began))
        copies = [None if each is None else to_host(each) for each in (results, proposed)]
        landed = torch.cuda.Event(enable_timing=True)
        landed.record()
        assert copies[0] is not None
        return InFlight(plan, copies[0], copies[1], started, landed)

    def _failed(self, plan: StepPlan, error: Exception) -> InFlight:
        count = len(plan.slots or plan.chunks)
        message = f"the device has no memory for this step ({error}); lower max_running, prefill_budget or mem_fraction"
        return InFlight(plan, torch.zeros(count, 1 + plan.width, dtype=torch.int32), failure=message)

    def _upload(self, slots: tuple[int, ...]) -> Tensor:
        if self._slots[0] != slots:
            self._slots = slots, self.state.upload(slots)
        return self._slots[1]

    def _store(self, proposal: HostProposal) -> None:
        if any(proposal.counts):
            slots, last = tuple(proposal.slots), self._slots
            self.state.store(last[1] if slots == last[0] else self.state.upload(slots), proposal)

    def _proposals(self, plan: StepPlan) -> Tensor:
        """(2, B, N): the stored proposals."""
        return self.state.nodes[:, self.state.upload(slots_of(plan))]

    def _round(self, plan: StepPlan) -> Tensor:
        captured = self.graphs.round(list(plan.slots), plan.mode, plan.width) if self.graphs is not None else None
        if captured is not None:
            return captured
        return self.passes.round(self._upload(plan.slots), plan.bounds, plan.mode, plan.width)

    def _prompts(self, plan: StepPlan) -> Tensor:
        """Samples a token after each chunk; only the tokens after last chunks count."""
        sampled = self.prompts.prefill(plan.chunks, plan.mode) if self.prompts is not None else None
        if sampled is None:
            prompts = eager_prefill(self.state, plan.chunks, plan.mode)
            proposes = any(chunk.is_last for chunk in plan.chunks)
            sampled = self.passes.prefill(prompts, plan.width, proposes=proposes)
        sampled = sampled.int()
        return torch.stack((torch.ones_like(sampled), sampled), dim=1)


def to_host(values: Tensor) -> Tensor:
    """Starts a copy to pinned memory."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
