"""Notices that drafts are accepted less than before: than the last day on this server, or than in training.

What is observed is the acceptance rate of the first drafted token, by rounds that have a proposal. A proposal that the
pass did not verify counts with the probability of its acceptance bin, so a rate does not depend on how many nodes the
load allows. A request's rate is looked at after every SEGMENT rounds, its last segments counting most. It has collapsed
if two segments in a row, or all of a short answer, are far below the record.

The record of a day is kept for each kind of request: its labels, its client, and whether it is a first segment. So a
shift between kinds moves no rate against its record. A chart for each label, and one for all, adds up what the requests
of any kind show (control_charts.py). While a chart is in doubt, its requests wait outside the record. Imports no torch.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.contexts import context_class
from slipstream.serve.engine.control_charts import DAY, LEAST_VARIANCE, Alarm, Chart, Level, collapse_evidence
from slipstream.serve.engine.cost_files import text_hash
from slipstream.serve.engine.counts import AcceptanceView, CategoryState
from slipstream.serve.engine.draft_trial import DraftTrial
from slipstream.serve.engine.scheduler import Sequence
from slipstream.serve.request import Request

SEGMENT = 12  # rounds
COLLAPSED = 0.25  # share of the record's rate
LEAST_ROUNDS = 8  # of an answer that may have collapsed
LEAST_REQUESTS = 12  # of a record
HALF_LIFE = DAY / 2  # seconds after which a record counts half
PRIOR = 4.0  # segments that count with PRIOR_VARIANCE
PRIOR_VARIANCE = 0.06
TRAINED_SHARE = 0.5  # of the rate in training, which was measured on other texts
UNTRAINED = frozenset(("tools", "completion", "grammar", "penalties"))  # labels of texts that training has not seen
RECENT = 1 / 32  # weight of a segment in the figures of late
MOST_KINDS = 64  # records of a client; the oldest gives way
EDGE_LENGTHS = (1, 2, 3, 4)  # tokens of a prompt's beginning and end
MOST_FORMS = 256  # of an edge
FORM_DIGITS = 8  # of a form's hash: no text of a prompt is kept, in memory or in files
LEAST_FORM = 5  # requests from which on a form is not new
FORM_SHARE = 0.02  # likewise, as a share of all
RECENT_FORMS = 1 / 8  # weight of a request among the last ones
SELDOM = 0.1  # share of new forms up to which a template decides an edge
ALL = "all"

Key = tuple[tuple[str, ...], bool]  # labels, and whether it is a first segment
Memory = tuple[dict[str, dict[Key, "Record"]], "Baseline | None", Mapping[str, str]]

logger = logging.getLogger(__name__)


class Baseline(NamedTuple):
    """The acceptance that a record expects."""

    rate: float  # of the first drafted token
    length: float  # tokens a round


@dataclass(slots=True)
class Moments:
    """Sums: segments, of which parts count less, their rates and the squares of these, and requests; rounds and the
    tokens that they emitted; requests that have ended, and those that had collapsed."""

    segments: float = 0.0
    rates: float = 0.0
    squares: float = 0.0
    requests: float = 0.0
    rounds: float = 0.0
    tokens: float = 0.0
    ends: float = 0.0
    collapses: float = 0.0

    def add(self, other: "Moments") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def scale(self, factor: float) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * factor)

    @property
    def collapse_share(self) -> float:
        """The share of requests that collapse, two standard errors above the count with one more."""
        return (self.collapses + 1 + 2 * math.sqrt(self.collapses + 1)) / (self.ends + 4)

    @property
    def baseline(self) -> Baseline:
        return Baseline(self.rates / self.segments, self.tokens / self.rounds if self.rounds else 1.0)

    @property
    def level(self) -> Level:
        """The mean less two standard errors, and the variance."""
        mean = self.rates / self.segments
        spread = max(self.squares - self.segments * mean**2, 0.0)
        variance = max((spread + PRIOR * PRIOR_VARIANCE) / (self.segments + PRIOR), LEAST_VARIANCE)
        return Level(max(mean - 2 * math.sqrt(variance / self.requests), 0.0), variance)


@dataclass(slots=True)
class Record:
    """Acceptance of a kind of request. `waiting`: segments that came while a chart was in doubt."""

    moments: Moments = field(default_factory=Moments)
    waiting: Moments = field(default_factory=Moments)
    time: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.moments.requests >= LEAST_REQUESTS

    def add(self, segment: Moments, now: float, *, is_doubted: bool) -> None:
        self.moments.scale(0.5 ** ((now - self.time) / HALF_LIFE))
        self.time = now
        self.waiting.add(segment)
        if not is_doubted:
            self.moments.add(self.waiting)
            self.waiting = Moments()


@dataclass(slots=True)
class OpenRequest:
    """A request that is observed. `rounds` and `tokens`: its counts when the segment began."""

    number: int
    sequence: Sequence
    labels: tuple[str, ...]
    rate: float = 0.0
    last: float = 1.0  # rate of the last whole segment
    segments: int = 0
    num_observed: int = 0  # rounds
    collapsed: bool = False
    rounds: int = 0
    tokens: int = 0
    forms: dict[str, tuple[str, bool]] = field(default_factory=dict)  # of its prompt, by edge

    @property
    def labels_now(self) -> tuple[str, ...]:
        """The labels, with that of the context's length."""
        return (*self.labels, f"context {context_class(len(self.sequence.tokens))}")


@dataclass(slots=True)
class PromptEdge:
    """Counts the first or last few tokens of chats' prompts: `forms` of requests that ended while no chart was in
    doubt. A form is new below LEAST_FORM requests, or FORM_SHARE of all. `usual` and `recent`: shares of new ones among
    the requests that were counted, and among the last ones."""

    forms: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    usual: float = 0.0
    recent: float = 0.0

    def see(self, form: str) -> bool:
        """Counts a request among the last ones. Returns whether its form is new."""
        is_new = self.forms.get(form, 0.0) < max(LEAST_FORM, FORM_SHARE * self.total)
        self.recent += RECENT_FORMS * (is_new - self.recent)
        return is_new

    def learn(self, form: str, *, is_new: bool) -> None:
        self.forms[form] = self.forms.get(form, 0.0) + 1
        self.total += 1
        self.usual += max(1 / self.total, 1 / MOST_FORMS) * (is_new - self.usual)
        if len(self.forms) > MOST_FORMS or self.total > MOST_FORMS**2:
            self.forms = {name: count / 2 for name, count in self.forms.items() if count > 1}
            self.total = sum(self.forms.values())


class PromptForms:
    """Tells whether prompts of chats begin and end as before, which their template decides. How many tokens it decides
    is found out: edges of several lengths are counted, and those count whose forms are seldom new."""

    def __init__(self) -> None:
        self.edges = {f"{end} {length}": PromptEdge() for end in ("first", "last") for length in EDGE_LENGTHS}

    def see(self, request: Request) -> dict[str, tuple[str, bool]]:
        """Returns the form of each edge of the request's prompt, and whether it is new."""
        forms = {}
        for name, edge in self.edges.items():
            end, length = name.split()
            tokens = request.prompt[: int(length)] if end == "first" else request.prompt[-int(length) :]
            form = text_hash(" ".join(map(str, tokens)))[:FORM_DIGITS]
            forms[name] = form, edge.see(form)
        return forms

    def learn(self, forms: Mapping[str, tuple[str, bool]]) -> None:
        """Counts the forms of a request that has ended."""
        for name, (form, is_new) in forms.items():
            self.edges[name].learn(form, is_new=is_new)

    @property
    def new_share(self) -> float:
        """The share of new forms among the last requests, of the edge with the most."""
        shares = [edge.recent for edge in self.edges.values() if edge.total and edge.usual <= SELDOM]
        return max(shares, default=0.0)


class AcceptanceAlarm:
    """Observes the requests in the engine's slots. `trained`: acceptance on held-out answers in the draft's training;
    None: not known. `clock` gives seconds."""

    def __init__(self, num_slots: int, trained: Baseline | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.trained = trained
        self.facts: dict[str, str] = {}  # of draft and target, for doctors
        self.forms = PromptForms()
        self.charts: dict[str, dict[str, Chart]] = {"day": {}, "training": {}}  # by record and category
        self.records: dict[str, dict[Key, Record]] = {}  # by client; the last used last
        self.trial: DraftTrial | None = None  # of the draft's weights
        self._before: Memory = ({}, None, {})  # records, training and facts of the weights before
        self._clock = clock
        self._open: dict[int, OpenRequest] = {}  # by slot
        self._sums = np.zeros(num_slots)
        self._rounds = np.zeros(num_slots, np.int64)
        self._number = 0

    def change_draft(self, trained: Baseline | None, facts: Mapping[str, str], trial_rounds: int) -> None:
        """Begins anew for other weights of the draft, which are on trial for so many rounds: the records up to now are
        what they are compared with. `trained` and `facts` are theirs."""
        every = {(client, *key): record for client, records in self.records.items() for key, record in records.items()}
        levels = {kind: record.moments.level for kind, record in every.items() if record.is_known}
        pooled = Moments()
        for record in every.values():
            pooled.add(record.moments)
        level = pooled.level if pooled.requests >= LEAST_REQUESTS else None
        self.trial = DraftTrial(levels, level, trial_rounds) if trial_rounds else None
        self._before = self.records, self.trained, self.facts
        self._begin({}, trained, facts)

    def return_draft(self) -> None:
        """Goes on with the records of the weights before those that were on trial."""
        self._begin(*self._before)

    def _begin(self, records: dict[str, dict[Key, Record]], trained: Baseline | None, facts: Mapping[str, str]) -> None:
        """Begins to observe other weights with what is known of them. Requests that run are observed no more: their
        drafts read KV of both."""
        self._open.clear()
        self.records = records
        self.trained = trained
        self.facts = {**facts}
        self.charts = {"day": {}, "training": {}}

    def admit(self, sequence: Sequence) -> None:
        """Begins to observe a request, which has got its slot."""
        if not sequence.traits.wants_drafts:
            return
        self._number += 1
        stats = sequence.stats
        self._open[sequence.slot] = OpenRequest(
            number=self._number,
            sequence=sequence,
            labels=labels_of(sequence),
            rounds=stats.rounds,
            tokens=stats.decoded_tokens,
        )
        self._sums[sequence.slot] = 0.0
        self._rounds[sequence.slot] = 0
        if "chat" in sequence.request.labels and not sequence.num_preemptions:
            self._open[sequence.slot].forms = self.forms.see(sequence.request)

    def record(self, slots: NDArray[np.int64], rates: NDArray[np.float64]) -> None:
        """Counts a round of the requests in `slots` (n,), each once: (n,) whether the first drafted token was accepted,
        or the probability that it would have been."""
        self._sums[slots] += rates
        self._rounds[slots] += 1
        for slot in slots[self._rounds[slots] >= SEGMENT].tolist():
            if slot in self._open:
                self._end_segment(slot)

    def release(self, sequence: Sequence) -> None:
        """Ends the observation of a request that still has its slot."""
        request = self._open.get(sequence.slot)
        if request is None or request.sequence is not sequence:
            return
        if self._rounds[sequence.slot]:
            self._end_segment(sequence.slot)
        self._count_rounds(request)
        if request.num_observed >= LEAST_ROUNDS:
            self._end(request)
        if not self._is_doubted([ALL], sequence.request.client):
            self.forms.learn(request.forms)
        del self._open[sequence.slot]
        for charts in self.charts.values():
            for chart in charts.values():
                chart.release(request.number)

    def view(self) -> AcceptanceView:
        """Returns the state of every chart that has seen a request, and the draft's facts."""
        states = [
            CategoryState(
                category=category,
                record=record,
                clients="" if chart.alarm is None else chart.alarm.clients,
                share=chart.share,
                recent=chart.recent,
            )
            for record, charts in self.charts.items()
            for category, chart in charts.items()
        ]
        return AcceptanceView(tuple(states), self.forms.new_share, self.facts)

    def _end_segment(self, slot: int) -> None:
        """Adds the segment of the request in `slot` to charts and record."""
        request = self._open[slot]
        stats = request.sequence.stats
        num_rounds = int(self._rounds[slot])
        rate = float(self._sums[slot]) / num_rounds
        self._sums[slot] = 0.0
        self._rounds[slot] = 0
        weight = min(num_rounds / SEGMENT, 1.0)
        is_first = request.segments == 0
        request.rate = rate if is_first else request.rate + weight / 2 * (rate - request.rate)
        request.segments += 1
        if not is_first:
            weight = 1.0
        segment = Moments(
            segments=weight,
            rates=weight * request.rate,
            squares=weight * request.rate**2,
            requests=float(request.segments <= 2),
            rounds=stats.rounds - request.rounds,
            tokens=stats.decoded_tokens - request.tokens,
        )
        self._count_rounds(request)
        request.tokens = stats.decoded_tokens
        labels = request.labels_now
        client = request.sequence.request.client
        record = self._find(client, (labels, is_first))
        if record.is_known and not request.collapsed:
            is_short = is_first and LEAST_ROUNDS <= num_rounds < SEGMENT
            worst = rate if is_short else max(rate, request.last)
            if worst <= COLLAPSED * record.moments.baseline.rate:
                request.collapsed = True
                self._update_collapse(request)
        request.last = rate
        request.num_observed += num_rounds
        if self.trial is not None:
            self.trial.observe(request.number, (client, labels, is_first), request.rate, weight, num_rounds)
        self._compare(request, labels, segment, record)
        record.add(segment, self._clock(), is_doubted=self._is_doubted((ALL, *labels), client))

    def _count_rounds(self, request: OpenRequest) -> None:
        """Tells a trial of the rounds since the last call."""
        num_rounds = request.sequence.stats.rounds
        if self.trial is not None:
            self.trial.num_all += num_rounds - request.rounds
        request.rounds = num_rounds

    def _end(self, request: OpenRequest) -> None:
        """Counts a request that ends."""
        client = request.sequence.request.client
        labels = request.labels_now
        if not request.collapsed:
            self._update_collapse(request)
        end = Moments(ends=1.0, collapses=float(request.collapsed))
        record = self._find(client, (labels, True))
        record.add(end, self._clock(), is_doubted=self._is_doubted((ALL, *labels), client))

    def _update_collapse(self, request: OpenRequest) -> None:
        """Tells the charts of the day whether a request has collapsed."""
        client = request.sequence.request.client
        labels = request.labels_now
        record = self._find(client, (labels, True))
        if record.moments.ends < LEAST_REQUESTS:
            return
        evidence = collapse_evidence(record.moments.collapse_share, collapsed=request.collapsed)
        for category in (ALL, *labels):
            chart = self.charts["day"].get(category)
            if chart is not None:
                is_quiet = chart.alarm is None
                chart.update_collapse(request.number, client, evidence, self._clock())
                if is_quiet and chart.alarm is not None:
                    log_change(category, "day", chart)

    def _compare(self, request: OpenRequest, labels: tuple[str, ...], segment: Moments, record: Record) -> None:
        """Tells the charts what the segment shows, by each record that there is."""
        variance = PRIOR_VARIANCE
        if record.is_known:
            level = record.moments.level
            variance = level.variance
            evidence = level.evidence(request.rate, segment.segments)
            self._update("day", request, labels, segment, evidence, record.moments.baseline)
        if self.trained is not None and "chat" in labels and UNTRAINED.isdisjoint(labels):
            level = Level(TRAINED_SHARE * self.trained.rate, variance)
            evidence = level.evidence(request.rate, segment.segments)
            self._update("training", request, labels, segment, evidence, self.trained)

    def _update(
        self,
        record: str,
        request: OpenRequest,
        labels: tuple[str, ...],
        segment: Moments,
        evidence: float,
        baseline: Baseline,
    ) -> None:
        """Updates the charts of a record, day or training, and their figures of late."""
        now = self._clock()
        length = segment.tokens / segment.rounds if segment.rounds else 1.0
        client = request.sequence.request.client
        for category in (ALL, *labels):
            chart = self.charts[record].setdefault(category, Chart())
            chart.recent.add(RECENT, request.rate, length, baseline.rate, baseline.length)
            before = chart.alarm
            chart.update(request.number, client, evidence, now)
            if chart.alarm is not None and record == "day" and now - chart.alarm.since > DAY:
                self._forget(category, chart.alarm)
                chart.clear()
            if (chart.alarm is None) != (before is None):
                log_change(category, record, chart)

    def _forget(self, category: str, alarm: Alarm) -> None:
        """Drops the records of a category that an alarm has contradicted for a day; of one client, if it is theirs."""
        for client, records in self.records.items():
            if alarm.clients == "several" or client == alarm.suspect:
                self.records[client] = {
                    key: record for key, record in records.items() if category != ALL and category not in key[0]
                }

    def _is_doubted(self, categories: Iterable[str], client: str) -> bool:
        charts = (self.charts["day"].get(category) for category in categories)
        return any(chart.doubts(client) for chart in charts if chart is not None)

    def _find(self, client: str, key: Key) -> Record:
        records = self.records.setdefault(client, {})
        record = records.pop(key, None) or Record(time=self._clock())
        if len(records) >= MOST_KINDS:
            del records[next(iter(records))]
        records[key] = record
        return record

    def to_json(self) -> dict[str, Any]:
        """Returns the records of the day and the known prompts, for a file."""
        now = self._clock()
        rows = [
            {
                "client": client,
                "labels": labels,
                "is_first": is_first,
                "age": now - record.time,
                **asdict(record.moments),
            }
            for client, records in self.records.items()
            for (labels, is_first), record in records.items()
        ]
        return {"records": rows, "forms": {name: asdict(edge) for name, edge in self.forms.edges.items()}}

    def load(self, data: Mapping[str, Any]) -> None:
        """Takes what `to_json` returned. Raises KeyError, TypeError or ValueError for other data."""
        now = self._clock()
        records: dict[str, dict[Key, Record]] = {}
        for row in data["records"]:
            moments = Moments(**{name: float(row[name]) for name in asdict(Moments())})
            key = (tuple(map(str, row["labels"])), bool(row["is_first"]))
            records.setdefault(str(row["client"]), {})[key] = Record(moments, time=now - float(row["age"]))
        edges = {name: PromptEdge(**data["forms"][name]) for name in self.forms.edges}
        self.records = records
        self.forms.edges = edges


def labels_of(sequence: Sequence) -> tuple[str, ...]:
    """Returns the labels of a request but for its context: those of the front end, and how it is sampled."""
    traits = sequence.traits
    params = sequence.request.params
    labels = {
        "grammar": params.grammar is not None,
        "penalties": traits.has_processors,
        "greedy": traits.is_greedy,
        "sampled": not traits.is_greedy,
    }
    return tuple(chain(sequence.request.labels, (name for name, holds in labels.items() if holds)))


def log_change(category: str, record: str, chart: Chart) -> None:
    """Logs that an alarm begins or ends."""
    recent = chart.recent
    figures = (
        f"accept length {recent.length:.2f} lately, {recent.record_length:.2f} by the record; first drafted token "
        f"{100 * recent.rate:.0f} %, {100 * recent.record_rate:.0f} %"
    )
    source = {"day": "the last day here", "training": "training"}[record]
    if chart.alarm is None:
        logger.warning("drafts: requests (%s) are accepted as in %s again (%s)", category, source, figures)
        return
    alarm = chart.alarm
    whose = "of one client " if alarm.clients == "one" else ""
    logger.warning(
        "drafts: requests %s(%s) are accepted less than in %s, more than noise explains (%s); `slipstream doctor "
        "--live URL` looks for the cause",
        whose,
        category,
        source,
        figures,
    )
