"""Executes plans on the device. Only `InFlight.read` waits for it."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kernels.speculation.ragged import Chunks
from slipstream.models.files.cost_tables import CostTables
from slipstream.serve.drafters.base import DraftWeights
from slipstream.serve.engine.graph_keys import MODES, GraphKeys
from slipstream.serve.engine.plan import HostProposal, PromptChunk, StepOutput, StepPlan
from slipstream.serve.runner.chunks import pack_chunks, split_chunks
from slipstream.serve.runner.cuda_graphs import DraftGraphs, StepGraphs
from slipstream.serve.runner.step import EagerPass, Results, StepInputs, StepPasses

CLOCK_DECAY = 0.95  # weight of a CPU's step among the last ones, after one more
NOT_FINITE = "the target's logits are not finite at some token of this request; its weights or its dtype are at fault"


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A step on the device."""

    plan: StepPlan
    width: int  # nodes that a request slot stores
    started: torch.cuda.Event | None  # None on a CPU
    captured: int | None = None  # number of its captured target pass
    results: Results | None = None  # of S segments or more, on the host, written once `landed` has passed
    first_chunk: int = 0  # index of the first chunk's results; those of the plan's slots are the first
    proposed: Tensor | None = None  # (2, S, W) int32, likewise
    landed: torch.cuda.Event | None = None
    cpu_ms: float = 0.0  # duration on a CPU
    failure: str = ""  # the step could not run

    def read(self) -> StepOutput:
        """Waits for the results."""
        assert self.results is not None, "launched up to sampling"
        if self.landed is not None:
            self.landed.synchronize()  # sync
        plan = self.plan
        width = self.width
        results = self._of_plan(self.results.tokens.numpy().copy(), axis=0)  # later passes write there, too
        logprobs = self.results.logprobs
        of_prompts = self.results.prompt_logprobs
        counts = results[:, 0]
        tokens = results[:, 2 : 2 + width]
        accepted = results[:, 2 + 2 * width :] if plan.branches and not self.failure else None
        slots = plan.segments
        errors = dict.fromkeys(slots, self.failure) if self.failure else self._not_finite(slots, counts, tokens)
        return StepOutput(
            num_emitted=counts,
            num_verified=results[:, 1],
            tokens=tokens,
            bins=results[:, 2 + width : 2 + 2 * width],
            accepted=accepted,
            proposed=None if self.proposed is None else self.proposed.numpy(),
            errors=errors,
            logprobs=None if logprobs is None else self._of_plan(logprobs.numpy(), axis=1),
            prompt_logprobs=None if of_prompts is None else of_prompts.numpy(),
        )

    def _of_plan(self, results: NDArray[np.int32], axis: int) -> NDArray[np.int32]:
        """Returns the results of the plan's S segments, which lie along `axis`."""
        num_slots = len(self.plan.slots)
        num_chunks = len(self.plan.chunks)
        first = self.first_chunk
        if first == num_slots and results.shape[axis] == num_slots + num_chunks:
            return results
        return results.take([*range(num_slots), *range(first, first + num_chunks)], axis=axis)

    def _not_finite(self, slots: Sequence[int], counts: np.ndarray, tokens: np.ndarray) -> dict[int, str]:
        """Returns errors by slot: where a logit was NaN, the last token that was emitted is -1."""
        last = tokens[np.arange(len(tokens)), counts - 1]
        wrong = (last < 0) & (counts > 0)
        return {slots[index]: NOT_FINITE for index in np.flatnonzero(wrong).tolist()} if wrong.any() else {}

    def milliseconds(self) -> float:
        """The step's duration; call it after `read`."""
        if self.started is None or self.landed is None:
            return self.cpu_ms
        return self.started.elapsed_time(self.landed)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch has no class of errors for those of a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


class CpuClock:
    """Times steps on a CPU, where other programs take their share of the cores.

    A step's time is what the calling thread has computed since the last step, the scheduler's work included, times
    wall-clock over computing time of recent passes. So a program that takes a core for a while slows all steps down
    alike, and none seems expensive for its size."""

    def __init__(self) -> None:
        self._ended = time.thread_time()
        self._began = (0.0, 0.0)
        self._wall = self._cpu = 0.0  # seconds of recent passes, decayed

    def start(self) -> None:
        """Begins the passes of a step."""
        self._began = time.perf_counter(), time.thread_time()

    def stop(self) -> float:
        """Ends the passes of a step. Returns the step's time in milliseconds."""
        wall = time.perf_counter()
        cpu = time.thread_time()
        self._wall = CLOCK_DECAY * self._wall + wall - self._began[0]
        self._cpu = CLOCK_DECAY * self._cpu + cpu - self._began[1]
        computed = cpu - self._ended
        self._ended = cpu
        return 1000 * computed * self._wall / max(self._cpu, 1e-9)


class ModelRunner:
    """`steps`, `drafts`: captured passes, or None."""

    def __init__(self, passes: StepPasses, steps: StepGraphs | None = None, drafts: DraftGraphs | None = None) -> None:
        self.passes = passes
        self.steps = steps
        self.drafts = drafts
        self.target = passes.target
        self.drafter = passes.drafter
        self.state = passes.state
        self.width = passes.state.proposals.shape[2]  # nodes that a request slot stores
        self._prepared = 0  # number of the last plan whose slots and pages the device has
        self._clock = CpuClock()
        self._no_chunks = self._put_chunks(())
        self._slots: dict[str, tuple[tuple[int, ...], Tensor]] = {}  # uploaded last, by purpose

    @property
    def graphs(self) -> GraphKeys:
        """The captured passes."""
        if self.steps is None:
            return GraphKeys()
        drafts = self.drafts.captured if self.drafts is not None else ()
        return GraphKeys(self.steps.captured, drafts, self.steps.num_chunks)

    def time_passes(self) -> CostTables:
        """Times the captured passes."""
        assert self.steps is not None
        drafts = {mode: {} for mode in MODES} if self.drafts is None else self.drafts.time_all()
        return CostTables(self.steps.time_all(), drafts)

    def time_sums(self) -> None:
        """Times sums over ranks, where there are some."""

    def drop(self, sizes: Collection[int]) -> None:
        """Frees captured target passes of these numbers of rows."""
        assert self.steps is not None
        self.steps.drop(sizes)

    def forget(self) -> None:
        """Lets the drafter forget what it has learnt from passes before the first request."""
        self.drafter.forget()

    def load_draft(self, weights: DraftWeights) -> None:
        """Gives the drafter other weights, which the passes read that are launched from now on."""
        self.drafter.load_weights(weights)

    def check(self) -> None:
        """Raises an error if what passes gave may be wrong."""

    def note(self, plan: StepPlan, output: StepOutput) -> None:
        """Sees the output of each step."""

    def prepare(self, plan: StepPlan) -> None:
        """Packs what a plan says of slots and pages, while the step before it runs. `launch` does so otherwise."""
        if plan.number > self._prepared:
            self._prepared = plan.number
            self.state.change(plan.admissions, plan.pages, plan.read_starts)

    def launch(self, plan: StepPlan, *, up_to_sampling: bool = False) -> InFlight:
        """Launches the plan's passes, in the order of the plans' numbers.

        `up_to_sampling`: of a captured pass only what it computes before it samples, of others nothing; `finish`
        launches the rest. Where memory does not suffice for the passes, their requests fail and others go on.
        """
        self.prepare(plan)
        if plan.acceptance_table is not None:
            self.state.set_acceptance_table(plan.acceptance_table)
        for proposal in plan.edits.proposals:
            self._store(proposal)
        if up_to_sampling:
            return self._launch_target(plan)
        self.state.set_masks(plan.edits.masks)
        return self._run(plan)

    def finish(self, flight: InFlight, plan: StepPlan) -> InFlight:
        """Launches the rest of a step. `plan`: the flight's, with masks that it has got since."""
        is_running = flight.captured is not None
        self.state.set_masks(plan.edits.masks, beside=is_running)
        return self._run(plan, flight if is_running else None)

    def _run(self, plan: StepPlan, flight: InFlight | None = None) -> InFlight:
        """Launches the plan's passes, or the rest of them."""
        try:
            flight = flight or self._launch_target(plan)
            results, first_chunk = self._finish_target(flight, plan)
            if results.logprobs is not None and plan.logprobs is not None:
                results = results._replace(logprobs=results.logprobs[: 2 + 2 * plan.logprobs])
            self._draft(plan)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return self._failed(plan, error)
        results = Results._make(None if values is None else to_host(values) for values in results)
        proposed = None
        if plan.returns_proposals:
            proposed = to_host(self.state.proposals[:2, self.state.upload(plan.segments)])
        landed = None
        cpu_ms = 0.0
        if flight.started is None:
            cpu_ms = self._clock.stop()
        else:
            landed = torch.cuda.Event(enable_timing=True)
            landed.record()
        return replace(
            flight,
            plan=plan,
            results=results,
            first_chunk=first_chunk,
            proposed=proposed,
            landed=landed,
            cpu_ms=cpu_ms,
        )

    def _launch_target(self, plan: StepPlan) -> InFlight:
        """Starts the step's time, and the captured target pass that takes the plan, if one does."""
        started = None
        if self.state.device.type == "cuda":
            started = torch.cuda.Event(enable_timing=True)
            started.record()
        else:
            self._clock.start()
        captured = None if self.steps is None or plan.graph is None else self.steps.launch(plan)
        return InFlight(plan, self.width, started, captured)

    def _finish_target(self, flight: InFlight, plan: StepPlan) -> tuple[Results, int]:
        """Launches the rest of the target pass. Returns the results, and the index of the first chunk's."""
        if self.steps is not None and flight.captured is not None:
            return self.steps.finish(plan, flight.captured)
        state = self.state
        chunks = self._put_chunks(plan.chunks) if plan.chunks else self._no_chunks
        inputs = StepInputs(state.upload([plan.nodes]), self._upload("step", plan.slots), chunks)
        results = self.passes.empty_results(
            len(plan.segments), has_logprobs=plan.logprobs is not None, branches=plan.branches
        )
        target_pass = EagerPass(inputs, plan.mode, results, plan.bounds, plan.chunks, plan.prompts_by, plan.branches)
        return self.passes.step(target_pass), len(plan.slots)

    def _put_chunks(self, chunks: tuple[PromptChunk, ...]) -> Chunks:
        """Copies chunks to the device."""
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        packed = pack_chunks(chunks, len(chunks), num_tokens, self.state.padding, self.state.device.type == "cuda")
        return split_chunks(packed.to(self.state.device, non_blocking=True), len(chunks), num_tokens)

    def _failed(self, plan: StepPlan, error: Exception) -> InFlight:
        count = len(plan.segments)
        message = f"the device has no memory for this step ({error}); lower max_running, prefill_budget or mem_fraction"
        results = Results(torch.zeros(count, 2 + 2 * self.width, dtype=torch.int32), None)
        return InFlight(plan, self.width, None, results=results, first_chunk=len(plan.slots), failure=message)

    def _upload(self, purpose: str, slots: tuple[int, ...]) -> Tensor:
        entry = self._slots.get(purpose)
        if entry is None or entry[0] != slots:
            entry = self._slots[purpose] = slots, self.state.upload(slots)
        return entry[1]

    def _store(self, proposal: HostProposal) -> None:
        if any(proposal.counts):
            self.state.store(self._upload("store", tuple(proposal.slots)), proposal)

    def _draft(self, plan: StepPlan) -> None:
        slots = plan.drafting
        if plan.width == 1 or not slots:
            return
        if self.drafts is not None and plan.draft_graph is not None:
            self.drafts.run(plan)
        else:
            bounds = [bound + self.width for bound in plan.bounds] + [chunk.end for chunk in plan.chunks]
            self.passes.draft(self._upload("draft", slots), plan.mode, plan.width, max(bounds))


def to_host(values: Tensor) -> Tensor:
    """Starts a copy to pinned memory, unless they lie on the host."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
