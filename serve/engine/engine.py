"""The engine's loop: plan, launch, read, let host stages work, commit. Imports no HTTP library.

A step is one pass over nodes of every request that decodes and over chunks of prompts. On a GPU its tokens are read a
step later (`overlap`): the planner plans with the tokens that it has, the device holds the rest. The next step may need
work of the host on the one before: then it waits, planned or launched up to where it samples, until that has been read.
serve/engine/build.py makes engines.
"""

import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.serve.engine.acceptance_files import load_record, record_path, save_record
from slipstream.serve.engine.counts import DraftState, EngineCounts
from slipstream.serve.engine.draft_adapters import with_adapter
from slipstream.serve.engine.draft_swaps import DraftSwaps, StagedDraft
from slipstream.serve.engine.engine_plan import EnginePlan
from slipstream.serve.engine.host_stages import HostStage
from slipstream.serve.engine.host_work import HostNeed, HostWork
from slipstream.serve.engine.idle import IdlePrompts
from slipstream.serve.engine.plan import MAX_STEPS_IN_FLIGHT, NO_EDITS, StepPlan
from slipstream.serve.engine.planner import Planner
from slipstream.serve.engine.scheduler import Sequence
from slipstream.serve.engine.state_passes import StatePasses
from slipstream.serve.engine.team import Team
from slipstream.serve.grammar.grammars import Grammars
from slipstream.serve.options import TRIAL_ROUNDS, EngineConfig, ServeConfig
from slipstream.serve.request import (
    NO_ADAPTER,
    EngineInfo,
    FinishReason,
    Output,
    Request,
    RequestStats,
    check_token_ids,
)
from slipstream.serve.runner.kept_states import KeptStates
from slipstream.serve.runner.model_runner import InFlight, ModelRunner

COMPILE_WAIT_S = 0.005  # for a grammar where there is nothing else to do
Trace = Callable[[str, StepPlan], None]
OnStates = Callable[[Sequence, Callable[[int], Tensor]], None]


class State(IntEnum):
    """States of a step, in their order; a step that the host owes nothing is never BEGUN."""

    PLANNED = 0  # the runner has its requests and pages; the plan lacks sizes and edits
    BEGUN = 1  # launched up to where it samples; the plan lacks masks
    LAUNCHED = 2
    READ = 3
    COMMITTED = 4  # the scheduler has its tokens


@dataclass(slots=True)
class Step:
    """A step, and how far it has come."""

    plan: StepPlan
    state: State = State.PLANNED
    flight: InFlight | None = None  # from BEGUN on


class Engine:
    """Adds, aborts and steps requests. Not thread-safe: one thread calls it.

    `trace`, if set, is called with a plan when it is "planned", "ready" (its edits are there), "launched", "read",
    "drafted" (host stages have seen its output) and "committed". `on_states`, if set and the config has `keep_states`,
    is called with a request that ends and a function that copies the states (N, K, H) of its first N tokens on the
    device, or of those that it has computed; of the last token there are none. Call it at once.
    `on_load` is called with True when a request comes, and with False once there is neither one nor idle work.
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
        team: Team | None = None,
    ) -> None:
        self.engine_plan = plan
        self.config = plan.config
        self.info = info
        self.planner = planner
        self.runner = runner
        self.scheduler = planner.scheduler
        self.stages = stages
        self.host = HostWork(stages, planner)
        self.overlap = plan.overlap
        self.scheduler.on_admit = self._admit
        self.scheduler.on_release = self._release
        self.idle: IdlePrompts | None = None
        if plan.spec.recurrent and plan.config.idle_prompts:
            self.idle = IdlePrompts(self.scheduler, plan.limits.grid, plan.limits.prompt_rows)
            self.scheduler.on_finish = self.idle.note
        self.trace: Trace | None = None
        self.on_states: OnStates | None = None
        self.on_load: Callable[[bool], None] = lambda _: None
        self.team = team
        self.draft = DraftSwaps(plan, runner, self.scheduler, planner.alarm)
        self._record_path: Path | None = None  # of the acceptance
        self._check = check  # the drafter's: raises ValueError
        self._grammars = grammars
        self._compiling: dict[str, tuple[Request, Future[Any]]] = {}  # by id: requests that wait for their grammar
        self._steps: deque[Step] = deque()  # not read yet; between two calls of `step` all of them are launched

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._compiling)

    @property
    def num_open(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting + len(self._compiling)

    def check(self, request: Request) -> None:
        """Raises ValueError for a request that can never be served."""
        check_token_ids("prompt", request.prompt, self.info.vocab_size)
        request.params.check_token_ids(self.info.vocab_size)
        request.params.check_adapter(self.info.draft_adapters)
        self._check(request)
        self.scheduler.validate(request, self._compiling.keys())

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError for one that can never be served."""
        self.check(request)
        self.on_load(True)
        if self.info.draft_adapters:
            request = with_adapter(request, self.info.draft_adapters, self.engine_plan.draft.shares)
        if request.params.grammar is None:
            self.scheduler.add(request)
        else:
            self._compiling[request.id] = request, self._grammars.compile(request.params.grammar)

    def abort(self, request_id: str, *, is_whole: bool = False) -> Output | None:
        """Ends a request. `is_whole`: its answer has all that its client wants."""
        if request_id in self._compiling:
            return self._end_early(request_id, "abort")
        return self.scheduler.abort(request_id, is_whole=is_whole)

    def step(self) -> list[Output]:
        """Launches work, and returns new tokens.

        With overlap it waits for the oldest step in flight, while a newer one runs; otherwise for the step it launched.
        """
        self.runner.check()
        if self.planner.alarm.trial is not None:
            self.draft.judge()
        try:
            return self._add_compiled() + self._step() if self._compiling else self._step()
        finally:
            while self._steps and self._steps[-1].state < State.LAUNCHED:
                self._steps.pop()  # an interrupt came before its launch

    def work_idle(self) -> bool:
        """Computes a chunk of an ended conversation (serve/engine/idle.py), if no request is open, and waits for it.
        Returns whether there was one."""
        if self.has_work:
            return False
        has_worked = self.idle is not None and self._work_idle(self.idle)
        self.on_load(has_worked)
        return has_worked

    def _work_idle(self, idle: IdlePrompts) -> bool:
        self.drain()  # a step that was launched before the last request's end was known
        started = time.perf_counter()
        chunk = idle.begin()
        if chunk is None:
            return False
        flight = self.runner.launch(self.planner.plan_idle(chunk))
        flight.read()
        idle.end(chunk, 1000 * (time.perf_counter() - started), has_failed=bool(flight.failure))
        return True

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
        need: HostNeed = "nothing"
        while need == "nothing" and len(self._steps) < (MAX_STEPS_IN_FLIGHT if self.overlap else 1):
            need = self.host_need
            step = self._plan()
            if step is None:
                break
            if need != "before launch":
                self._launch(step, up_to_sampling=need == "before sampling")
        return self._finish_oldest()

    @property
    def host_need(self) -> HostNeed:
        """The host's work on the steps in flight that the next step waits for."""
        if not self.host.slots:
            return "nothing"
        return self.host.need([slot for step in self._steps for slot in step.plan.segments])

    def stage_draft(self, name: str) -> StagedDraft:
        """Reads other weights for the draft, on any thread (serve/engine/draft_swaps.py). Raises ValueError or
        OSError."""
        return self.draft.stage(name)

    def swap_draft(self, staged: StagedDraft, trial_rounds: int = TRIAL_ROUNDS) -> DraftState:
        """Lets them draft from the next step on; between two calls of `step`."""
        self.draft.swap(staged, trial_rounds)
        return self.draft.state()

    def drain(self) -> list[Output]:
        """Reads all steps in flight and launches nothing."""
        outputs: list[Output] = []
        while self._steps:
            outputs += self._finish_oldest()
        return outputs

    def _finish_oldest(self) -> list[Output]:
        """Reads the oldest step, lets the host work on it, and launches the step that waits for that, before the
        scheduler gets the tokens."""
        if not self._steps:
            return []
        step = self._steps.popleft()
        assert step.flight is not None
        output = step.flight.read()
        self.runner.note(step.plan, output)
        step.state = State.READ
        self._tell("read", step.plan)
        landed = time.perf_counter()
        is_late = bool(self._steps) and self._steps[-1].state > State.PLANNED
        late = self.host.look(step.plan, output, is_late=is_late) if self.host.slots else ()
        if self.stages:
            self._tell("drafted", step.plan)
        waited_ms = None
        if self._steps and self._steps[-1].state < State.LAUNCHED:
            is_idle = self._steps[-1].state == State.PLANNED
            self._launch(self._steps[-1], has_waited=is_idle)
            waited_ms = 1000 * (time.perf_counter() - landed) if is_idle else None
        outputs = self.planner.commit(step.plan, output, step.flight.milliseconds(), late, waited_ms)
        step.state = State.COMMITTED
        self._tell("committed", step.plan)
        return outputs

    def _plan(self) -> Step | None:
        plan = self.planner.plan()
        if plan is None:
            return None
        if plan.chunks:
            self.host.mask_first_tokens(plan)
        self._tell("planned", plan)
        self.runner.prepare(plan)
        step = Step(plan)
        self._steps.append(step)
        return step

    def _launch(self, step: Step, *, up_to_sampling: bool = False, has_waited: bool = False) -> None:
        """Launches a step, or what is left of one, with the edits that are there. `has_waited`: for proposals."""
        plan = step.plan
        if self.host.slots or self.host.edits is not NO_EDITS:  # proposals come with the next plan, whoever is in it
            plan = self.host.edit(plan)
        if step.state == State.PLANNED:
            plan = self.planner.choose(plan, will_be_masked=up_to_sampling, has_waited=has_waited)
        step.plan = plan
        if up_to_sampling:
            step.flight = self.runner.launch(plan, up_to_sampling=True)
            step.state = State.BEGUN
            return
        self._tell("ready", plan)
        step.flight = self.runner.launch(plan) if step.flight is None else self.runner.finish(step.flight, plan)
        step.state = State.LAUNCHED
        self._tell("launched", plan)
        if not step.flight.failure:
            self.planner.launched(plan)

    def _admit(self, sequence: Sequence) -> None:
        self.planner.admitted(sequence)
        self.host.admit(sequence)

    def _release(self, sequence: Sequence) -> None:
        sequence.stats.weight_version = self.draft.version
        if self.info.draft_adapters:
            sequence.stats.draft_adapter = (NO_ADAPTER, *self.info.draft_adapters)[sequence.request.adapter]
        store = self.runner.passes.kept_states
        if self.on_states is not None and store is not None and not sequence.resumes:
            self.on_states(sequence, partial(self._read_states, store, sequence))
        self.planner.alarm.release(sequence)
        self.host.release(sequence)

    def _read_states(self, store: KeptStates, sequence: Sequence, num_tokens: int) -> Tensor:
        num_kept = min(sequence.num_computed, len(sequence.tokens) - 1)
        page_ids = self.runner.state.upload(sequence.table.pages)  # the host does not wait
        return store.read(page_ids, min(num_tokens, num_kept))

    def _tell(self, event: str, plan: StepPlan) -> None:
        if self.trace is not None:
            self.trace(event, plan)

    def close(self) -> None:
        """Lets the stages save their state. Do not use the engine afterwards. Raises OSError if a file cannot be
        written, and ValueError if another process is writing it."""
        with ExitStack() as closing:  # all of them, whichever fails
            if self.team is not None:
                closing.callback(self.team.end)
            if self._record_path is not None and self.draft.is_first:
                closing.callback(save_record, self._record_path, self.planner.alarm)
            for stage in self.stages:
                closing.callback(stage.close)

    def keep_record(self) -> None:
        """Goes on with the record of acceptance of an earlier server, and has `close` keep it for the next one."""
        self._record_path = record_path(self.config.draft, self.config.target)
        if self._record_path is not None:
            load_record(self._record_path, self.planner.alarm)

    def load_grammars(self) -> None:
        """Loads what the first grammar would hold up other requests with."""
        self._grammars.load()

    def watch(self, report: Callable[[str], None]) -> None:
        """Calls `report` with a sentence, from another thread, if the engine cannot go on, be it idle or in a step."""
        if self.team is not None:
            self.team.watch(report)

    def open_states(
        self, config: EngineConfig, post: Callable[[Callable[[], None]], None], listener: socket.socket
    ) -> None:
        """Gives trainers states at a bound socket, between steps: `post` calls in the thread of `step`."""
        from slipstream.serve.engine.state_service import open_service  # here, since few servers need it

        assert isinstance(config, ServeConfig)
        open_service(config, self.engine_plan.path, self.state_passes(), post, listener)

    def state_passes(self) -> StatePasses:
        """Returns passes of the target for states alone, for the thread of `step`."""
        return StatePasses(self.runner.target, self.team)

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
        """Returns all counts since the start, and the KV pages, the ranks' memory and the acceptance of this moment."""
        return replace(
            self.planner.counts,
            kv_pages=self.scheduler.cache.usage(),
            idle_tokens=0 if self.idle is None else self.idle.num_tokens,
            rank_memory=[] if self.team is None else self.team.memory(),
            rank_sum_seconds=[] if self.team is None else self.team.sum_seconds,
            acceptance=self.planner.alarm.view(),
            draft=self.draft.state(),
        )
