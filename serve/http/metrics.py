"""Counts and times of the server, rendered in Prometheus' text format (version 0.0.4)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.serve.request import RequestStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # s
TOKEN_BOUNDS = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # s
ACCEPT_BOUNDS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)  # tokens per round


class Histogram:
    """Counts observations in buckets, each up to and including its bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last bucket is above all bounds
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


class Metrics:
    """Counters that every request adds to. Aborted requests count with what they had."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()  # sequences by finish reason; "error": the engine failed
        self.responses: Counter[int] = Counter()  # error responses by status
        self.totals = RequestStats()
        self.time_to_first_token = Histogram(TTFT_BOUNDS)
        self.inter_token_latency = Histogram(TOKEN_BOUNDS)
        self.accept_length = Histogram(ACCEPT_BOUNDS)

    def count_tokens(self, num_tokens: int, seconds: float, is_first: bool) -> None:
        """Tokens that arrived together, `seconds` after the request (`is_first`) or after the previous ones.

        Tokens of one round share its time, so the histogram's mean is the time per token of an answer.
        """
        if is_first:
            self.time_to_first_token.observe(seconds)
        else:
            self.inter_token_latency.observe(seconds / num_tokens, num_tokens)

    def count_finished(self, reason: str, stats: RequestStats) -> None:
        self.finished[reason] += 1
        self.totals.add(stats)
        if stats.rounds:
            self.accept_length.observe((stats.completion_tokens - stats.prefills) / stats.rounds)

    def render(self, gauges: Mapping[str, float], num_open: int, is_healthy: bool) -> str:
        """`gauges`: the engine's, rendered as slipstream_engine_<name>."""
        totals = self.totals
        reasons = {reason: self.finished[reason] for reason in ("stop", "length", "abort", "error")}
        statuses = dict(sorted(self.responses.items()))
        positions = dict(enumerate(totals.accepted_by_position))
        lines = [*family("requests_total", "counter", "Finished sequences by finish reason.", reasons, "finish_reason")]
        lines += family("error_responses_total", "counter", "Error responses by status.", statuses, "status")
        for name, value, text in (
            ("prompt_tokens", totals.prompt_tokens, "Prompt tokens of finished sequences."),
            ("cached_tokens", totals.cached_tokens, "Prompt tokens found in the prefix cache."),
            ("completion_tokens", totals.completion_tokens, "Generated tokens."),
            ("rounds", totals.rounds, "Rounds: target passes that verified a proposal."),
            ("drafted_tokens", totals.drafted_tokens, "Drafted tokens that a pass verified."),
            ("accepted_tokens", totals.accepted_tokens, "Drafted tokens that became part of an answer."),
        ):
            lines += family(f"{name}_total", "counter", text, {"": value})
        text = "Accepted tokens by position in the draft."
        lines += family("accepted_by_position_total", "counter", text, positions, "position")
        lines += histogram("accept_length", "Tokens per round of finished sequences.", self.accept_length)
        lines += histogram("time_to_first_token_seconds", "From request to first token.", self.time_to_first_token)
        lines += histogram("inter_token_latency_seconds", "Time per further token.", self.inter_token_latency)
        lines += family("open_requests", "gauge", "Sequences that have not ended.", {"": num_open})
        lines += family("engine_up", "gauge", "1 while the engine's process answers.", {"": int(is_healthy)})
        for name, gauge in gauges.items():
            lines += family(f"engine_{name}", "gauge", f"What the engine reports as {name}.", {"": gauge})
        return "\n".join(lines) + "\n"


def family(name: str, kind: str, text: str, counts: Mapping[Any, float], label: str = "") -> Iterator[str]:
    """One metric: a count for each value of `label`, or a single count without a label."""
    yield f"# HELP slipstream_{name} {text}"
    yield f"# TYPE slipstream_{name} {kind}"
    for value, count in counts.items():
        yield f'slipstream_{name}{{{label}="{value}"}} {count}' if label else f"slipstream_{name} {count}"


def histogram(name: str, text: str, values: Histogram) -> Iterator[str]:
    """Buckets are cumulative, as the format requires."""
    yield from family(name, "histogram", text, {})
    below = 0
    for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
        below += count
        label = "+Inf" if bound == float("inf") else f"{bound:g}"
        yield f'slipstream_{name}_bucket{{le="{label}"}} {below}'
    yield f"slipstream_{name}_sum {values.total:.9g}"
    yield f"slipstream_{name}_count {below}"
