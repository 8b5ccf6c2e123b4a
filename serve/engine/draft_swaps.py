"""Changes of the draft's weights while an engine serves.

`stage` reads and checks a checkpoint on any thread; nothing changes before `swap`, which the engine's thread calls
between two steps. Weights are copied into the storage of those before, after the passes that are launched and before
those that follow, so captured passes go on. No token of an answer depends on them.

Running requests keep KV and states that earlier weights wrote: their drafts may be accepted less until they end. Pages
of other weights serve no prefix hit: each version has its prefix tree, which is there again if its weights come back.

From the first `stage` on, the host's memory has the weights that serve, too, so that a change never waits for a copy
to the host. Those before stay there as long as their successors are on trial (draft_trial.py), and return if these are
worse.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slipstream.models.drafts.source import source_of
from slipstream.models.files.learning import Outcome
from slipstream.serve.drafters.base import DraftWeights
from slipstream.serve.drafters.registry import read_weights
from slipstream.serve.engine.acceptance_alarm import AcceptanceAlarm, Baseline
from slipstream.serve.engine.acceptance_files import draft_facts, trained_record
from slipstream.serve.engine.counts import DraftState
from slipstream.serve.engine.engine_plan import EnginePlan
from slipstream.serve.engine.scheduler import Scheduler
from slipstream.serve.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StagedDraft:
    """Weights that fit, and what their files say of them."""

    name: str  # of the checkpoint
    weights: DraftWeights
    facts: Mapping[str, str]
    trained: Baseline | None  # acceptance in training


class DraftSwaps:
    """The draft's weights. `fingerprint`: of the files of those that serve."""

    def __init__(self, plan: EnginePlan, runner: ModelRunner, scheduler: Scheduler, alarm: AcceptanceAlarm) -> None:
        source = plan.draft.source
        self.fingerprint = source.fingerprint
        self.num_swaps = 0
        self.num_returns = 0
        self._plan = plan
        self._runner = runner
        self._scheduler = scheduler
        self._alarm = alarm
        self._first = self.fingerprint
        self._has_network = source.has_network
        self.on_verdict: Callable[[Outcome], None] = lambda _: None  # called at the end of each trial
        self._serving: DraftWeights | None = None  # from the first `stage` on
        self._saving = threading.Lock()
        self._before: DraftWeights | None = None  # while their successors are on trial
        scheduler.change_draft(self.fingerprint)

    @property
    def is_first(self) -> bool:
        """Whether the weights are those that the engine was built with."""
        return self.fingerprint == self._first

    @property
    def version(self) -> str:
        return self.state().version

    def state(self) -> DraftState:
        trial = self._alarm.trial
        verdict = "" if trial is None else trial.verdict
        return DraftState(self.fingerprint, self._has_network, self.num_swaps, self.num_returns, verdict)

    def stage(self, name: str) -> StagedDraft:
        """Reads the checkpoint `name`, a folder or a hub id, for `swap`. Raises ValueError, or OSError, for one that
        cannot be read or whose network is another."""
        plan = self._plan
        source = source_of(name, plan.config.target)
        drafter = self._runner.drafter
        weights = read_weights(source, plan.config.drafter, drafter, plan.draft.name, self._runner.target)
        facts = draft_facts(source, self._alarm.facts)
        with self._saving:  # no other weights serve before a `stage` has ended
            self._serving = self._serving or drafter.save_weights(self.fingerprint)
        return StagedDraft(name, weights, facts, trained_record(source))

    def swap(self, staged: StagedDraft, trial_rounds: int) -> None:
        """Lets the weights serve from the next step on, on trial for so many rounds; 0: without a trial. Weights that
        serve already change nothing. Raises ValueError for a trial within one."""
        if staged.weights.fingerprint == self.fingerprint:
            return
        if trial_rounds and self._before is not None:
            raise ValueError(
                f"draft {staged.name} cannot be tried: the weights that serve are on trial themselves; wait for its "
                "end, or set trial_rounds to 0"
            )
        before = self._load(staged.weights)
        self.num_swaps += 1
        self._before = before if trial_rounds else None
        self._alarm.change_draft(staged.trained, staged.facts, trial_rounds)
        logger.info("draft: the weights of %s serve now (version %s)", staged.name, self.version)

    def judge(self) -> None:
        """Ends a trial that is over: worse weights give way to those before."""
        trial = self._alarm.trial
        if trial is None or trial.verdict in ("", "open") or self._before is None:
            return
        before = self._before
        self._before = None
        if trial.verdict == "passed":
            self.on_verdict("passed")
            logger.info(
                "draft: version %s is no worse than the one before in %d rounds", self.version, trial.num_rounds
            )
            return
        worse = self.version
        self._load(before)
        self.num_returns += 1
        self._alarm.return_draft()
        self.on_verdict("worse")
        logger.warning(
            "draft: version %s is accepted less than %s, which serves again: %d rounds of the same kinds of requests",
            *(worse, self.version, trial.num_rounds),
        )

    def _load(self, weights: DraftWeights) -> DraftWeights:
        """Changes the weights, all or none of them. Returns those before."""
        before = self._serving
        assert before is not None, "weights have been staged"
        try:
            self._runner.load_draft(weights)
        except BaseException:
            self._runner.load_draft(before)
            raise
        self._serving = weights
        self.fingerprint = weights.fingerprint
        self._scheduler.change_draft(self.fingerprint)
        return before
