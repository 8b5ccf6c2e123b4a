"""Counts and times of the server and its engine, as Prometheus reads them.

The server counts what requests see; the engine counts what its steps do and sends that with its gauges
(serve/engine/counts.py). Names and labels are an interface: docs/operations.md lists and docs/grafana.json draws them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.serve.engine import counts as engine_counts
from slipstream.serve.engine.counts import AcceptanceView, EngineCounts
from slipstream.serve.request import MissReason, RequestStats

PREFIX = "slipstream"
TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # s
TOKEN_BOUNDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # s
DURATION_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)  # s
ACCEPT_BOUNDS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)  # tokens per round
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)
HIT_KINDS = ("whole", "shorter")
FINISH_REASONS = ("stop", "length", "abort", "error")

# Engine counters without labels: the name at /metrics, the attribute of EngineCounts, the help text.
ENGINE_TOTALS = (
    ("steps", "steps", "Steps of the engine: passes of the target."),
    ("emitted_tokens", "emitted_tokens", "Tokens that steps have emitted, also for requests that have not ended."),
    ("draft_swaps", "draft.num_swaps", "Times that the draft got other weights."),
    ("draft_returns", "draft.num_returns", "Times that worse weights were taken back."),
    ("idle_tokens", "idle_tokens", "Tokens of ended conversations that were computed while no request was open."),
)
ENGINE_HISTOGRAMS = (
    ("step_seconds", "seconds", "Times of steps."),
    ("step_budget_nodes", "budget", "Nodes that the policy let a step verify, of all requests, roots included."),
    ("step_time_ratio", "time_ratio", "Measured times of steps over those that the cost model predicted."),
)

# The acceptance alarm's gauges: the attribute of its state, the name at /metrics, the help text.
ACCEPTANCE_GAUGES = (
    ("share", "accept_evidence", "Evidence for less acceptance, over what raises the alarm."),
    ("segments", "accept_segments", "Looks at requests, each after 12 rounds or at the end, since the start."),
    ("rate", "accept_first_rate", "Share of the last proposals whose first token was accepted."),
    ("record_rate", "accept_record_first_rate", "The same by the record, for the same requests."),
    ("length", "accept_recent_length", "Tokens a round of the last requests."),
    ("record_length", "accept_record_length", "The same by the record, for the same requests."),
)

# The engine's gauges: the beginning of the name, the help text. The first that fits is taken.
ENGINE_GAUGES = (
    ("running", "Requests that have a place in the engine's steps."),
    ("waiting", "Requests that wait for a place in the engine's steps."),
    ("preemptions", "Times that a request gave its KV pages up for others, since the start."),
    ("nodes_per_step", "Nodes that steps verify lately, of all requests."),
    ("draft_width", "Nodes that pay to be proposed for each request."),
    ("step_time_error", "Median relative error of the predicted times of steps."),
    ("step_time_p95_ratio", "Measured over predicted time that 95 % of steps stay within."),
    ("ngram_match_length_", "Lookups of the n-gram trie whose longest match has so many tokens, since the start."),
    ("ngram_hits", "Lookups of the n-gram trie that match a token or more, since the start."),
    ("ngram_misses", "Lookups of the n-gram trie that match nothing, since the start."),
    ("ngram_nodes", "Nodes of the n-gram trie."),
    ("ngram_", "A count of the n-gram trie."),
    ("", "A gauge of the engine or its drafter."),
)

disable_created_metrics()  # no second series per counter for when it began


class Metrics:
    """Counters that every request adds to. Aborted requests count with what they had."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # of the HTTP process: process_resident_memory_bytes, ...
        text = "Finished sequences by finish reason."
        self._finished = self._counter("requests", text, "finish_reason", FINISH_REASONS)
        self._errors = self._counter("error_responses", "Error responses by status.", "status")
        self._totals = {
            "prompt_tokens": self._counter("prompt_tokens", "Prompt tokens of finished sequences."),
            "cached_tokens": self._counter("cached_tokens", "Prompt tokens found in the prefix cache."),
            "idle_tokens": self._counter("idle_cached_tokens", "Those of them that were computed in idle time."),
            "completion_tokens": self._counter("completion_tokens", "Generated tokens of finished sequences."),
            "decoded_tokens": self._counter("decoded_tokens", "Those that rounds emitted, drafted or not."),
            "rounds": self._counter("rounds", "Rounds of finished sequences: passes that verified a proposal."),
        }
        text = "Finished sequences that found some of their prompt cached: all that was known of it, or less."
        self._prefix_hits = self._counter("prefix_hits", text, "kind", HIT_KINDS)
        text = "Those that found tokens computed in idle time first."
        self._idle_hits = self._counter("idle_hits", text, "kind", HIT_KINDS)
        text = "Prompt tokens that the prefix cache knew, but not what all layers need of them."
        self._missed_tokens = self._counter("missed_tokens", text, "reason", get_args(MissReason))
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From request to first token.", TTFT_BOUNDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time per further token.", TOKEN_BOUNDS
        )
        self.duration = self._histogram("request_duration_seconds", "From request to last token.", DURATION_BOUNDS)
        self._by_adapter = {
            "decoded_tokens": self._counter("adapter_decoded_tokens", "Decoded tokens by LoRA adapter.", "adapter"),
            "rounds": self._counter("adapter_rounds", "Rounds by LoRA adapter; none: the draft as it is.", "adapter"),
        }
        self.accept_length = self._histogram("accept_length", "Tokens per round of finished sequences.", ACCEPT_BOUNDS)

    def _counter(self, name: str, text: str, label: str = "", values: Sequence[str] = ()) -> Counter:
        """`values` of the label begin at 0, so that a rate is known from the first one on."""
        counter = Counter(f"{PREFIX}_{name}", text, [label] if label else [], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, buckets=bounds, registry=self.registry)

    def count_tokens(self, num_tokens: int, seconds: float, is_first: bool) -> None:
        """Tokens that arrived together, `seconds` after the request (`is_first`) or after the previous ones.

        Tokens of one round share its time, so the histogram's mean is the time per token of an answer.
        """
        if is_first:
            self.time_to_first_token.observe(seconds)
            return
        for _ in range(num_tokens):
            self.inter_token_latency.observe(seconds / num_tokens)

    def count_finished(self, reason: str, stats: RequestStats, seconds: float) -> None:
        """A sequence has ended, `seconds` after its request."""
        self._finished.labels(reason).inc()
        self.duration.observe(seconds)
        for name, total in self._totals.items():
            total.inc(getattr(stats, name))
        if stats.cached_tokens:
            kind = HIT_KINDS[stats.missed_tokens > 0]
            self._prefix_hits.labels(kind).inc()
            self._idle_hits.labels(kind).inc(stats.idle_tokens > 0)
        if stats.miss_reason is not None:
            self._missed_tokens.labels(stats.miss_reason).inc(stats.missed_tokens)
        if stats.draft_adapter:
            for name, total in self._by_adapter.items():
                total.labels(stats.draft_adapter).inc(getattr(stats, name))
        if stats.rounds:
            self.accept_length.observe(stats.decoded_tokens / stats.rounds)

    def count_failed(self) -> None:
        """A sequence has ended because the engine, or its step, failed."""
        self._finished.labels("error").inc()

    def count_error(self, status: int) -> None:
        """An error response."""
        self._errors.labels(str(status)).inc()

    def render(self, engine: "EngineView", accept: str = "") -> tuple[bytes, str]:
        """Returns all metrics and their content type: OpenMetrics if the `Accept` header asks for it, else Prometheus
        text."""
        collector = EngineCollector(engine)
        self.registry.register(collector)
        try:
            return encoded(self.registry, accept)
        finally:
            self.registry.unregister(collector)


def encoded(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Returns the text of a registry and its content type: OpenMetrics if `accept` asks for it, else Prometheus."""
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # the library fails on a version that is no number
        encode, content_type = choose_encoder("")
    return encode(registry), content_type


@dataclass(frozen=True, slots=True)
class EngineView:
    """The state of the engine at a scrape. `gauges`: by name; each becomes `engine_<name>`."""

    gauges: Mapping[str, float]
    counts: EngineCounts
    num_open: int
    is_up: bool
    is_ready: bool


class EngineCollector(Collector):
    """The engine's counts and gauges, as prometheus_client's metric families."""

    def __init__(self, engine: EngineView) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        counts = engine.counts
        yield gauge("open_requests", "Sequences that have not ended.", engine.num_open)
        yield gauge("engine_up", "1 while the engine's process answers.", float(engine.is_up))
        yield gauge("ready", "1 while new requests are taken, as /ready says.", float(engine.is_ready))
        for name, value in engine.gauges.items():
            text = next(text for beginning, text in ENGINE_GAUGES if name.startswith(beginning))
            yield gauge(f"engine_{name}", text, value)
        for name, attribute, text in ENGINE_TOTALS:
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=attrgetter(attribute)(counts))
        text = "Rows of passes: nodes of proposals, roots included, and prompt tokens."
        rows = {("node",): counts.node_rows, ("prompt",): counts.prompt_rows}
        yield family(CounterMetricFamily, "rows", text, ["kind"], rows)
        text = "Proposals of which a pass verified tokens."
        rounds = {(source,): count for source, count in counts.rounds.items()}
        yield family(CounterMetricFamily, "draft_rounds", text, ["source"], rounds)
        places = ["source", "position"]
        text = "Drafted tokens that passes verified."
        yield family(CounterMetricFamily, "drafted_tokens", text, places, counts.drafted)
        text = "Drafted tokens that became part of an answer."
        yield family(CounterMetricFamily, "accepted_tokens", text, places, counts.accepted)
        for name, attribute, text in ENGINE_HISTOGRAMS:
            yield histogram(name, text, getattr(counts, attribute))
        text = "KV pages by group of layers and state."
        yield family(GaugeMetricFamily, "kv_pages", text, ["group", "state"], counts.kv_pages)
        for name, text, values in (
            ("rank_memory_bytes", "Memory of each rank's device that its process holds.", counts.rank_memory),
            ("rank_sum_seconds", "Sums over ranks in a pass of one row, at start-up.", counts.rank_sum_seconds),
        ):
            by_rank = {(str(rank),): value for rank, value in enumerate(values)}
            yield family(GaugeMetricFamily, name, text, ["rank"], by_rank)
        yield from acceptance_metrics(counts.acceptance)


def acceptance_metrics(acceptance: AcceptanceView) -> Iterator[Metric]:
    """The acceptance alarm. The first drafted token's rates do not depend on the load, accept lengths do."""
    labels = ["category", "record"]
    states = {(state.category, state.record): state for state in acceptance.states}
    text = "1 while drafts are accepted less than the record says, of one client's requests alone or of several."
    alarms = {(*key, kind): state.clients == kind for key, state in states.items() for kind in ("one", "several")}
    yield family(GaugeMetricFamily, "accept_alarm", text, [*labels, "clients"], alarms)
    for attribute, name, text in ACCEPTANCE_GAUGES:
        read = attrgetter(attribute if attribute == "share" else f"recent.{attribute}")
        values = {key: read(state) for key, state in states.items()}
        yield family(GaugeMetricFamily, name, text, labels, values)
    text = "Share of the last chats whose prompts begin or end with tokens that no chat before had there."
    yield gauge("accept_new_prompts", text, acceptance.new_prompts)
    facts = {tuple(acceptance.facts.values()): 1} if acceptance.facts else {}
    yield family(GaugeMetricFamily, "draft_info", "Facts of draft and target.", list(acceptance.facts), facts)


def family(kind: type[Family], name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> Family:
    """Makes a family of metrics. `values`: by the values of its labels."""
    members = kind(f"{PREFIX}_{name}", text, labels=labels)
    for place, value in values.items():
        members.add_metric(place, value)
    return members


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def histogram(name: str, text: str, values: engine_counts.Histogram) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"{PREFIX}_{name}", text, buckets=cumulative(values), sum_value=values.total)


def cumulative(values: engine_counts.Histogram) -> list[tuple[str, float]]:
    """Returns the buckets as the format wants them: each holds those before it."""
    bounds = [f"{bound:g}" for bound in values.bounds] + ["+Inf"]
    return list(zip(bounds, accumulate(values.counts), strict=True))
