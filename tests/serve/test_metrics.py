"""Counters and their text form, which a strict reader of the Prometheus format takes apart."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serve.http.metrics import Histogram, Metrics
from slipstream.serve.request import RequestStats

HEAD = re.compile(r"# HELP (\w+) [^\n]+\n# TYPE \1 (counter|gauge|histogram)\n")
SAMPLE = re.compile(r'(\w+?)(_bucket|_sum|_count)?(?:\{(\w+="[^"\\]*")\})? (\S+)\n')


def read(text: str) -> tuple[dict[str, str], dict[tuple[str, str], float]]:
    """(type by family, value by (name, labels)); fails on anything that the format does not allow."""
    kinds: dict[str, str] = {}
    values: dict[tuple[str, str], float] = {}
    for part in re.split("(?=# HELP )", text)[1:]:
        head = HEAD.match(part)
        assert head, part
        family, kind = head.groups()
        assert family not in kinds, "a family stands in one place"
        kinds[family] = kind
        for line in part[head.end() :].splitlines(keepends=True):
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, suffix, labels, value = match.groups(default="")
            assert (name + suffix == family) if kind != "histogram" else (name == family and suffix)
            assert (name + suffix, labels) not in values
            values[name + suffix, labels] = float(value)
    return kinds, values


def test_what_a_scrape_shows() -> None:
    metrics = Metrics()
    counts = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 9, "drafted_tokens": 12, "rounds": 4}
    metrics.count_finished("stop", RequestStats(prefills=1, accepted_by_position=[3, 1], **counts))
    metrics.count_finished("length", RequestStats(prompt_tokens=5, completion_tokens=1, prefills=1))
    metrics.responses[400] += 1
    metrics.count_tokens(1, 0.3, is_first=True)
    metrics.count_tokens(4, 0.02, is_first=False)  # tokens of a step share its time
    kinds, values = read(metrics.render({"running": 2}, num_open=3, is_healthy=True))
    expected = {
        **{("requests_total", f'finish_reason="{name}"'): count for name, count in (("stop", 1), ("abort", 0))},
        ("error_responses_total", 'status="400"'): 1,
        **{(f"{name}_total", ""): value for name, value in counts.items()},
        ("prompt_tokens_total", ""): 15,
        ("completion_tokens_total", ""): 10,
        ("accepted_tokens_total", ""): 4,
        ("accepted_by_position_total", 'position="0"'): 3,
        ("accepted_by_position_total", 'position="1"'): 1,
        **{("accept_length_count", ""): 1, ("accept_length_sum", ""): 2.0},
        ("time_to_first_token_seconds_count", ""): 1,
        **{("inter_token_latency_seconds_count", ""): 4, ("inter_token_latency_seconds_sum", ""): 0.02},
        ("inter_token_latency_seconds_bucket", 'le="0.004"'): 0,
        ("inter_token_latency_seconds_bucket", 'le="0.006"'): 4,
        **{("open_requests", ""): 3, ("engine_up", ""): 1, ("engine_running", ""): 2},
    }
    assert {key: values["slipstream_" + key[0], key[1]] for key in expected} == pytest.approx(expected)
    for name, kind in (("rounds_total", "counter"), ("open_requests", "gauge"), ("accept_length", "histogram")):
        assert kinds[f"slipstream_{name}"] == kind


@given(st.lists(st.floats(0, 100), max_size=30))
def test_buckets_are_cumulative(observed: list[float]) -> None:
    metrics = Metrics()
    metrics.time_to_first_token = Histogram((0.5, 1.0, 50.0))
    for value in observed:
        metrics.time_to_first_token.observe(value)
    _, values = read(metrics.render({}, num_open=0, is_healthy=True))
    for bound in ("0.5", "1", "50", "+Inf"):
        count = values["slipstream_time_to_first_token_seconds_bucket", f'le="{bound}"']
        assert count == sum(value <= float(bound) for value in observed)
