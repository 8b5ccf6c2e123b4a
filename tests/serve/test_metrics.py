"""Counters and their text form, which a strict reader of the Prometheus format takes apart."""

import re

from hypothesis import given
from hypothesis import strategies as st

from slipstream.serve.metrics import Histogram, Metrics
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


def test_counts_of_finished_requests() -> None:
    metrics = Metrics()
    stats = RequestStats(
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=9,
        prefills=1,
        rounds=4,
        drafted_tokens=12,
        accepted_by_position=[3, 1],
    )
    metrics.count_finished("stop", stats)
    metrics.count_finished("length", RequestStats(prompt_tokens=5, completion_tokens=1, prefills=1))
    metrics.responses[400] += 1
    kinds, values = read(metrics.render({"running": 2}, num_open=3, is_healthy=True))
    expected = {
        ("requests_total", 'finish_reason="stop"'): 1,
        ("requests_total", 'finish_reason="length"'): 1,
        ("requests_total", 'finish_reason="abort"'): 0,
        ("error_responses_total", 'status="400"'): 1,
        ("prompt_tokens_total", ""): 15,
        ("cached_tokens_total", ""): 4,
        ("completion_tokens_total", ""): 10,
        ("rounds_total", ""): 4,
        ("drafted_tokens_total", ""): 12,
        ("accepted_tokens_total", ""): 4,
        ("accepted_by_position_total", 'position="0"'): 3,
        ("accepted_by_position_total", 'position="1"'): 1,
        ("accept_length_count", ""): 1,
        ("accept_length_sum", ""): 2.0,
        ("open_requests", ""): 3,
        ("engine_up", ""): 1,
        ("engine_running", ""): 2,
    }
    for (name, labels), value in expected.items():
        assert values[f"slipstream_{name}", labels] == value, name
    assert kinds["slipstream_rounds_total"] == "counter"
    assert kinds["slipstream_open_requests"] == "gauge"
    assert kinds["slipstream_time_to_first_token_seconds"] == "histogram"


def test_tokens_of_a_round_share_its_time() -> None:
    metrics = Metrics()
    metrics.count_tokens(1, 0.3, is_first=True)
    metrics.count_tokens(4, 0.02, is_first=False)
    _, values = read(metrics.render({}, num_open=0, is_healthy=False))
    assert values["slipstream_time_to_first_token_seconds_count", ""] == 1
    assert values["slipstream_inter_token_latency_seconds_count", ""] == 4
    assert abs(values["slipstream_inter_token_latency_seconds_sum", ""] - 0.02) < 1e-9
    assert values["slipstream_inter_token_latency_seconds_bucket", 'le="0.004"'] == 0
    assert values["slipstream_inter_token_latency_seconds_bucket", 'le="0.006"'] == 4


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
