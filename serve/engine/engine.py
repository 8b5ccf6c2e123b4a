"""The engine's loop: plan, execute, let host stages work, read, commit. Imports no HTTP library.

A step is one pass over nodes of every request that decodes and over chunks of prompts. On a GPU its tokens are read a
step later (`overlap`): the planner plans with the tokens that it has, the device holds the rest.
serve/engine/build.py makes engines.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slipstream.serve.engine.counts import EngineCounts
from slipstream.serve.engine.engine_plan import EnginePlan
from slipstream.serve.engine.host_stages import Emitted, HostStage, Proposed
from slipstream.serve.engine.isolation import IsolatedStages
from slipstream.serve.engine.plan import MAX_STEPS_IN_FLIGHT, Edits, StepOutput, StepPlan, slots_of
from slipstream.serve.engine.planner import Planner
from slipstream.serve.engine.scheduler import Sequence
from slipstream.serve.grammar.grammars import Grammars
from slipstream.serve.request import EngineInfo, FinishReason, Output, Request, RequestStats, check_token_ids
from slipstream.serve.runner.model_runner import InFlight, ModelRunner

COMPILE_WAIT_S = 0.005  # for a grammar where there is nothing else to do
Trace = Callable[[str, StepPlan], None]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A step's output that the scheduler has not committed yet."""

    flight: InFlight
    output: StepOutput


class Engine:
    """Adds, aborts and steps requests. Not thread-safe: one thread calls it.

    `trace`, if set, is called with a plan when it is "planned", "ready" (its edits are there), "launched", "read",
    "drafted" (host stages have seen its output) and "committed".
    """

    def __init__(
        self,
        plan: EnginePlan,
        info: EngineInfo,
        planner: Planner,
        runner: ModelRunner,
        stages: list[HostStage],
        check: Callable[[Request], None],
        grammars: Grammars,
    ) -> None:
        self.engine_plan = plan
        self.config = plan.config
        self.info = info
        self.planner = planner
        self.runner = runner
        self.scheduler = planner.scheduler
        self.stages = stages
        self.overlap = plan.overlap
        self.scheduler.on_admit = self._admit
        self.scheduler.on_release = self._release
        self.trace: Trace | None = None
        self._check = check  # the drafter's: raises ValueError
        self._grammars = grammars
        self._compiling: dict[str, tuple[Request, Future[Any]]] = {}  # by id: requests that wait for their grammar
        self._in_flight: deque[InFlight] = deque()
        self._begun: StepPlan | None = None  # its pass runs up to sampling, after the steps in flight
        self._edits = Edits()  # for the next plan
        self._isolated = IsolatedStages(stages, self._fail)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._compiling)

    @property
    def num_open(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting + len(self._compiling)

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched, or begun, and not read. While there are any, the device has work."""
        return len(self._in_flight) + (self._begun is not None)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that can never be served."""
        check_token_ids("prompt", request.prompt, self.info.vocab_size)
        request.params.check_token_ids(self.info.vocab_size)
        self._check(request)
        self.scheduler.validate(request, self._compiling.keys())

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError for one that can never be served."""
        self.check(request)
        if request.params.grammar is None:
            self.scheduler.add(request)
        else:
            self._compiling[request.id] = request, self._grammars.compile(request.params.grammar)

    def abort(self, request_id: str) -> Output | None:
        if request_id in self._compiling:
            return self._end_early(request_id, "abort")
        return self.scheduler.abort(request_id)

    def step(self) -> list[Output]:
        """Launches work, and returns new tokens.

        With overlap it waits for the oldest step in flight, while a newer one runs; otherwise for the step it launched.
        """
        return self._add_compiled() + self._step() if self._compiling else self._step()

    def _add_compiled(self) -> list[Output]:
        """Queues the requests whose grammars are ready. Where there is nothing else to do, waits a little for one."""
        if not self.scheduler.has_work:
            wait([future for _, future in self._compiling.values()], COMPILE_WAIT_S, FIRST_COMPLETED)
        failed = []
        for name, (request, future) in list(self._compiling.items()):
            if not future.done():
                continue
            error = future.exception()
            if error is None:
                del self._compiling[name]
                self.scheduler.add(replace(request, compiled_grammar=future.result()))
            else:
                is_refusal = isinstance(error, ValueError)
                failed.append(replace(self._end_early(name, "error", str(error)), is_refusal=is_refusal))
        return failed

    def _end_early(self, request_id: str, reason: FinishReason, error: str = "") -> Output:
        request, future = self._compiling.pop(request_id)
        if all(future is not other for _, other in self._compiling.values()):
            assert request.params.grammar is not None
            self._grammars.cancel(request.params.grammar)
        stats = RequestStats(prompt_tokens=len(request.prompt))
        return Output(request_id=request_id, tokens=[], finish_reason=reason, stats=stats, error=error)

    def _step(self) -> list[Output]:
        if not self.overlap:
            return self._finish(self._launch(self._plan()))
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            if self.waits_for_host:
                return self._step_after_host()
            if self._waits_for_masks:
                self._begun = self._begin(self._plan())
                break
            if not self._queue(self._launch(self._plan())):
                break
        return self._finish(self._in_flight.popleft() if self._in_flight else None)

    def drain(self) -> list[Output]:
        """Reads all steps in flight and launches nothing."""
        outputs: list[Output] = []
        while self._in_flight:
            outputs += self._finish(self._in_flight.popleft())
        return outputs

    def _step_after_host(self) -> list[Output]:
        """Lets the device wait for the host's edits and for nothing else: the next step gets its pages before the last
        one is read, and the scheduler gets the last one's tokens after the next is launched."""
        planned = self._plan()
        arrived = []
        while self._in_flight:
            arrived.append(self._read(self._in_flight.popleft()))
        landed = time.perf_counter()
        for index, arrival in enumerate(arrived):
            later = {slot for other in arrived[index + 1 :] for slot in slots_of(other.flight.plan)}
            self._let_stages_work(arrival, later, is_last=True)
        if self._queue(self._launch(planned)):
            self.planner.waited(1000 * (time.perf_counter() - landed))
        return [output for arrival in arrived for output in self._commit(arrival)]

    def _finish(self, flight: InFlight | None) -> list[Output]:
        if flight is None:
            return []
        arrived = self._read(flight)
        self._let_stages_work(arrived, is_last=not self._in_flight and self._begun is None)
        if self._begun is not None:
            now, self._edits = self._edits.of(slots_of(self._begun))
            self._queue(self._execute(replace(self._begun, edits=self._begun.edits + now)))
            self._begun = None
        return self._commit(arrived)

    def _queue(self, flight: InFlight | None) -> bool:
        """Queues a step; returns whether there is one."""
        if flight is not None:
            self._in_flight.append(flight)
        return flight is not None

    @property
    def waits_for_host(self) -> bool:
        """Whether the next step begins after a drafting stage has seen the steps in flight, as long as that pays."""
        slots = self._slots_in_flight
        drafting = (stage for stage in self.stages if max(stage.widths) > 1)
        return self.planner.waiting_pays and any(self._isolated.wants(stage, slots) for stage in drafting)

    @property
    def _waits_for_masks(self) -> bool:
        """Whether a stage wants the steps in flight before the next step samples."""
        return self._reads_proposals(self._slots_in_flight)

    def _reads_proposals(self, slots: list[int]) -> bool:
        """Whether a stage wants to see the nodes that a step of these requests verifies."""
        readers = (stage for stage in self.stages if stage.reads == "proposal")
        return any(self._isolated.wants(stage, slots) for stage in readers)

    @property
    def _slots_in_flight(self) -> list[int]:
        return [slot for flight in self._in_flight for slot in slots_of(flight.plan)]

    def _plan(self) -> StepPlan | None:
        plan = self.planner.plan()
        if plan is not None:
            self._mask_first_tokens(plan)
            self._tell("planned", plan)
            self.runner.prepare(plan)
        return plan

    def _launch(self, plan: StepPlan | None) -> InFlight | None:
        return None if plan is None else self._execute(self._choose(plan))

    def _begin(self, plan: StepPlan | None) -> StepPlan | None:
        if plan is not None:
            plan = self._choose(plan, will_be_masked=True)
            self.runner.begin(plan)
        return plan

    def _choose(self, plan: StepPlan, *, will_be_masked: bool = False) -> StepPlan:
        """Completes the plan, but for masks that come later."""
        needs_proposals = self._reads_proposals(list(slots_of(plan)))
        edits, self._edits = self._edits.of(slots_of(plan))
        plan = self.planner.choose(plan, "all" if edits.masks or will_be_masked else plan.mode)
        return replace(plan, edits=edits, returns_proposals=needs_proposals or plan.returns_proposals)

    def _execute(self, plan: StepPlan) -> InFlight:
        self._tell("ready", plan)
        flight = self.runner.execute(plan)
        self._tell("launched", plan)
        if not flight.failure:
            self.planner.launched(plan)
        return flight

    def _read(self, flight: InFlight) -> Arrived:
        arrived = Arrived(flight, flight.read())
        self._tell("read", flight.plan)
        return arrived

    def _let_stages_work(self, arrived: Arrived, later: Collection[int] = (), *, is_last: bool) -> None:
        """Shows stages the output of a step, and keeps their edits for the next plan, but for slots whose `later`
        tokens have arrived, too.

        A request may end within its new tokens. `_commit` notices that later, and calls `release` of stages. If the
        step was not the last, the next one runs already; the planner then learns whether waiting for proposals would
        have paid.
        """
        plan = arrived.flight.plan
        output = arrived.output
        for stage in self.stages:
            inputs: Emitted | Proposed
            if stage.reads == "emitted":
                inputs = self.planner.emitted(plan, output)
            elif output.proposed is not None and self._isolated.wants(stage, list(slots_of(plan))):
                inputs = self.planner.proposed(plan, output).after(self._edits.proposals)
            else:
                continue
            edits = self._isolated.run(stage, inputs, self.planner.limits.most_nodes, late=not is_last)
            if not is_last:
                self.planner.look_back(plan, edits)
                edits = replace(edits, proposals=())
            edits = edits.besides(later)
            self.planner.offer(edits)
            self._edits += edits
        if self.stages:
            self._tell("drafted", plan)

    def _mask_first_tokens(self, plan: StepPlan) -> None:
        """Masks the first tokens of answers: they have no proposal before them, so stages that read proposals get the
        last token of the prompt as a root."""
        ends = [chunk for chunk in plan.chunks if chunk.is_last]
        slots = [chunk.slot for chunk in ends]
        for stage in self.stages:
            if ends and stage.reads == "proposal" and self._isolated.wants(stage, slots):
                nodes = np.array([[[chunk.tokens[-1]] for chunk in ends], [[-1]] * len(ends)], np.int32)
                edits = self._isolated.run(stage, Proposed(slots, nodes, np.zeros((len(ends), 2), np.int32)), 1)
                self._edits += edits

    def _admit(self, sequence: Sequence) -> None:
        self.planner.admitted(sequence)
        self._isolated.admit(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._isolated.release(sequence)
        self._edits = self._edits.without(sequence.slot)

    def _fail(self, slot: int, error: str) -> None:
        """Ends a request with its next step."""
        self._edits += Edits(errors={slot: error})

    def _commit(self, arrived: Arrived) -> list[Output]:
        plan = arrived.flight.plan
        outputs = self.planner.commit(plan, arrived.output, arrived.flight.milliseconds())
        self._tell("committed", plan)
        return outputs

    def _tell(self, event: str, plan: StepPlan) -> None:
        if self.trace is not None:
            self.trace(event, plan)

    def close(self) -> None:
        """Lets the stages save their state. Do not use the engine afterwards. Raises OSError if a file cannot be
        written, and ValueError if another process is writing it."""
        with ExitStack() as closing:  # all of them, whichever fails
            for stage in self.stages:
                closing.callback(stage.close)

    def metrics(self) -> dict[str, float]:
        """Returns current gauges; a request's counts come with its last Output."""
        gauges: dict[str, float] = {
            "running": self.scheduler.num_running,
            "waiting": self.scheduler.num_waiting,
            "preemptions": self.scheduler.num_preemptions,
        }
        gauges |= self.planner.policy.metrics()
        for stage in self.stages:
            gauges |= stage.metrics()
        return gauges

    def counts(self) -> EngineCounts:
        """Returns all counts since the start, and the KV pages of this moment."""
        return replace(self.planner.counts, kv_pages=self.scheduler.cache.usage())
