"""Tells whether drafts are accepted less than a record says: evidence by request, and a chart that adds it up.

A request is observed by one number, its acceptance rate. If rates have the record's mean m and variance v, then
    x = theta (m - rate) - v / m^2 (e^(theta m) - 1 - theta m)
has E[e^x] <= 1 whatever their distribution (Bennett's inequality, as rates lie between 0 and 1). A chart sums x over
requests and restarts at 0 (CUSUM); ordinary requests then reach THRESHOLD once in e^THRESHOLD requests at most (Lorden
1971; Shin, Ramdas and Rinaldo 2023 for sums of that kind). The rounds of a request are correlated, so the last value of
x of an open request replaces its earlier ones.

x cannot grow where ordinary rates vary, so a second sum is for drafts that have become useless: requests whose rate
collapses. Of ordinary ones a share q does; the logarithm of a likelihood ratio is added for each request, ln(.9 / q) or
ln(.1 / (1 - q)). Imports no torch.
"""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, NamedTuple

from slipstream.serve.engine.counts import RecentAcceptance

FALL = 0.25  # fall of the rate, as a share of the record's, that theta is best for; half of it is noticed in time
THRESHOLD = math.log(1e5)  # evidence for an alarm
DOUBT = 2.0  # evidence from which on requests wait outside the record
USELESS = 0.9  # share of requests that collapse if the draft is useless
LEAST_COLLAPSES = USELESS * math.exp(-THRESHOLD / 3 - 1e-6)  # least q: an alarm takes three requests
LEAST_VARIANCE = 0.01  # of rates
DAY = 24 * 3600.0  # seconds

Clients = Literal["one", "several"]


class Level(NamedTuple):
    """Mean and variance of the rates of ordinary requests."""

    mean: float
    variance: float

    def evidence(self, rate: float, weight: float) -> float:
        """Returns the evidence x of a request's rate for a fall. `weight`, 0 to 1: the share of a whole segment that
        was observed, which makes the variance larger by its reciprocal at most."""
        if self.mean <= 0:
            return 0.0
        exponent = math.log1p(self.mean * FALL * self.mean / self.variance)  # theta m
        bound = self.variance / self.mean**2 * (math.expm1(exponent) - exponent)
        return weight * (exponent * (1 - rate / self.mean) - bound)


def collapse_evidence(share: float, *, collapsed: bool) -> float:
    """Returns the evidence of a request for a useless draft. `share`: of ordinary requests that collapse."""
    share = min(max(share, LEAST_COLLAPSES), USELESS)
    return math.log(USELESS / share) if collapsed else math.log((1 - USELESS) / (1 - share))


@dataclass(slots=True)
class Cusum:
    """A sum of evidence that restarts at 0, with the part of each open request and of each client since then."""

    level: float = 0.0
    requests: dict[int, float] = field(default_factory=dict)
    clients: dict[str, float] = field(default_factory=dict)

    def update(self, request: int, client: str, evidence: float) -> None:
        """Replaces the evidence of a request."""
        change = evidence - self.requests.get(request, 0.0)
        self.level += change
        if self.level <= 0:
            self.level = 0.0
            self.requests.clear()
            self.clients.clear()
            return
        self.requests[request] = evidence
        self.clients[client] = self.clients.get(client, 0.0) + change


@dataclass(slots=True)
class Alarm:
    """A fall that was noticed. `suspect`: the client whose requests showed most of it; `other_falls` and
    `other_collapses`: evidence of all other clients; `recovery`: evidence that acceptance is back."""

    since: float
    suspect: str
    clients: Clients
    other_falls: Cusum = field(default_factory=Cusum)
    other_collapses: Cusum = field(default_factory=Cusum)
    recovery: Cusum = field(default_factory=Cusum)


@dataclass(slots=True)
class Chart:
    """The chart of a category. An alarm says whether one client's requests alone have fallen: "several" needs half of
    THRESHOLD from the others when it is raised, all of THRESHOLD later, or that there was no other client for a day."""

    fall: Cusum = field(default_factory=Cusum)
    collapse: Cusum = field(default_factory=Cusum)
    alarm: Alarm | None = None
    times: dict[str, float] = field(default_factory=dict)  # by client: time of its last request
    recent: RecentAcceptance = field(default_factory=RecentAcceptance)  # of its requests

    @property
    def share(self) -> float:
        """Evidence over THRESHOLD, 1 during an alarm."""
        return 1.0 if self.alarm is not None else self.worse.level / THRESHOLD

    @property
    def worse(self) -> Cusum:
        """The sum that is closer to an alarm."""
        return max(self.fall, self.collapse, key=attrgetter("level"))

    def doubts(self, client: str) -> bool:
        """Whether the client's requests may be part of a fall."""
        if self.alarm is None:
            return self.worse.level >= DOUBT
        level = max(self.alarm.other_falls.level, self.alarm.other_collapses.level)
        return client == self.alarm.suspect or self.alarm.clients == "several" or level >= DOUBT

    def update(self, request: int, client: str, evidence: float, now: float) -> None:
        """Replaces what the rate of a request shows."""
        self.times[client] = now
        alarm = self.alarm
        if alarm is None:
            self.fall.update(request, client, evidence)
            self._raise(now)
            return
        alarm.recovery.update(request, client, -evidence)
        if client != alarm.suspect:
            alarm.other_falls.update(request, client, evidence)
            if alarm.other_falls.level >= THRESHOLD:
                alarm.clients = "several"
        if alarm.recovery.level >= THRESHOLD / 2:
            self.clear()

    def update_collapse(self, request: int, client: str, evidence: float, now: float) -> None:
        """Replaces what it shows that the rate of a request has collapsed, or had not at its end."""
        if self.alarm is None:
            self.collapse.update(request, client, evidence)
            self._raise(now)
        elif client != self.alarm.suspect:
            self.alarm.other_collapses.update(request, client, evidence)
            if self.alarm.other_collapses.level >= THRESHOLD:
                self.alarm.clients = "several"

    def release(self, request: int) -> None:
        """Keeps the evidence of a request that has ended."""
        sums = [self.fall, self.collapse]
        if self.alarm is not None:
            sums += [self.alarm.recovery, self.alarm.other_falls, self.alarm.other_collapses]
        for evidence in sums:
            evidence.requests.pop(request, None)

    def clear(self) -> None:
        self.alarm = None
        self.fall = Cusum()
        self.collapse = Cusum()

    def _raise(self, now: float) -> None:
        """Raises the alarm if there is enough evidence."""
        worse = self.worse
        if worse.level < THRESHOLD:
            return
        self.times = {client: time for client, time in self.times.items() if now - time < DAY}
        parts = worse.clients
        suspect = max(parts, key=parts.__getitem__)
        remainder = max(worse.level - parts[suspect], 0.0)
        is_shared = len(self.times) == 1 or remainder >= THRESHOLD / 2
        self.alarm = Alarm(since=now, suspect=suspect, clients="several" if is_shared else "one")
        (self.alarm.other_falls if worse is self.fall else self.alarm.other_collapses).level = remainder
