"""Weights of a draft on trial: are they accepted less than those before, on the same kinds of requests?

The records of the weights before (acceptance_alarm.py) say what each kind of request showed of them. Each request that
begins after the change adds evidence for a fall, by Bennett's inequality (control_charts.py): of weights that are as
good, so much of it comes up once in e^WORSE requests at most. A kind without a record is compared with all kinds
together. Requests that were running at the change do not count, since their drafts read KV of both. Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slipstream.serve.engine.control_charts import Cusum, Level

WORSE = math.log(1e4)  # evidence that ends a trial
ROUNDS_PER_DRAFTED = 10  # rounds in all for each round of a trial, after which it ends though drafts seldom paid
Kind = tuple[str, tuple[str, ...], bool]  # client, labels, and whether it is a first segment
Verdict = Literal["", "open", "passed", "worse"]


@dataclass(slots=True)
class DraftTrial:
    """`levels`: of the weights before, by kind of request; `pooled`: of all kinds. The trial is over after `rounds`
    rounds with drafts, or ROUNDS_PER_DRAFTED times as many in all, at once if the weights are worse."""

    levels: Mapping[Kind, Level]
    pooled: Level | None
    rounds: int
    num_rounds: int = 0  # with drafts
    num_all: int = 0
    evidence: Cusum = field(default_factory=Cusum)

    @property
    def verdict(self) -> Verdict:
        if self.evidence.level >= WORSE:
            return "worse"
        return "open" if max(self.num_rounds, self.num_all // ROUNDS_PER_DRAFTED) < self.rounds else "passed"

    def observe(self, request: int, kind: Kind, rate: float, weight: float, rounds: int) -> None:
        """Adds `rounds` rounds of a request, whose acceptance rate is `rate` by now; `weight` as in Level.evidence."""
        if self.verdict != "open":
            return
        self.num_rounds += rounds
        level = self.levels.get(kind, self.pooled)
        if level is not None:
            self.evidence.update(request, kind[0], level.evidence(rate, weight))
