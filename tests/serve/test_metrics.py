"""Counts and times as a strict reader of Prometheus' text format takes them apart, and as the engine counts them."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serve.engine.counts import AcceptanceView, CategoryState, EngineCounts, Histogram, RecentAcceptance
from slipstream.serve.http.metrics import EngineView, Metrics
from slipstream.serve.request import RequestStats

HEAD = re.compile(r"# HELP (\w+) [^\n]+\n# TYPE \1 (counter|gauge|histogram)\n")
SAMPLE = re.compile(r'(\w+?)(_bucket|_sum|_count)?(?:\{((?:\w+="[^"\\]*",?)+)\})? (\S+)\n')


def read(text: str) -> tuple[dict[str, str], dict[tuple[str, str], float]]:
    """(type by family, value by (name, labels)); fails on anything that the format does not allow."""
    kinds = {}
    values = {}
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


def scrape(metrics: Metrics, gauges: dict[str, float], counts: EngineCounts, num_open: int = 0) -> str:
    text, kind = metrics.render(EngineView(gauges, counts, num_open=num_open, is_up=True, is_ready=False))
    assert kind.startswith("text/plain; version=")
    return text.decode()


def assert_samples(values: dict[tuple[str, str], float], expected: str):
    """`expected`: samples without their prefix, with their labels in alphabetical order."""
    samples = {(name, ",".join(sorted(labels.split(",")))): value for (name, labels), value in values.items()}
    for line in expected.split("\n")[1:-1]:
        name, suffix, labels, value = SAMPLE.fullmatch(f"slipstream_{line.strip()}\n").groups(default="")
        assert samples[name + suffix, labels] == pytest.approx(float(value)), line


def test_what_a_scrape_shows():
    metrics = Metrics()
    engine = EngineCounts(
        idle_tokens=128, kv_pages={("0", "used"): 7, ("1", "free"): 9}, rank_memory=[5, 6], rank_sum_seconds=[0.1, 0.2]
    )
    counts = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 9, "drafted_tokens": 12, "rounds": 4}
    counts |= {"missed_tokens": 3, "idle_tokens": 2, "prefills": 1}
    miss = {"miss_reason": "no_snapshot"}
    metrics.count_finished("stop", RequestStats(accepted_by_position=[3, 1], **counts, **miss), 2.0)
    metrics.count_finished("length", RequestStats(prompt_tokens=5, completion_tokens=1, prefills=1), 0.2)
    metrics.count_finished("abort", RequestStats(), 0.1)  # before its first token
    metrics.count_finished("length", RequestStats(completion_tokens=6, prefills=1), 0.2)  # without speculation
    metrics.count_error(400)
    metrics.count_tokens(1, 0.3, is_first=True)
    metrics.count_tokens(4, 0.02, is_first=False)  # tokens of a step share its time
    engine.add_step(budget=6, node_rows=5, prompt_rows=3, ms=8.0, predicted_ms=10.0)
    engine.add_round("eagle3", num_drafted=3, num_accepted=1, is_tree=False)
    engine.add_round("eagle", num_drafted=5, num_accepted=2, is_tree=True)
    engine.add_round("eagle", num_drafted=0, num_accepted=0, is_tree=True)  # not a proposal
    kinds, values = read(scrape(metrics, {"running": 2}, engine, num_open=3))
    assert_samples(
        values,
        """
        requests_total{finish_reason="stop"} 1
        requests_total{finish_reason="abort"} 1
        requests_total{finish_reason="error"} 0
        error_responses_total{status="400"} 1
        prompt_tokens_total 15
        cached_tokens_total 4
        completion_tokens_total 16
        decoded_tokens_total 8
        rounds_total 4
        prefix_hits_total{kind="shorter"} 1
        prefix_hits_total{kind="whole"} 0
        idle_hits_total{kind="shorter"} 1
        idle_hits_total{kind="whole"} 0
        idle_tokens_total 128
        idle_cached_tokens_total 2
        missed_tokens_total{reason="no_snapshot"} 3
        missed_tokens_total{reason="grid"} 0
        accept_length_count 1
        accept_length_sum 2
        request_duration_seconds_count 4
        request_duration_seconds_bucket{le="0.25"} 3
        time_to_first_token_seconds_count 1
        inter_token_latency_seconds_count 4
        inter_token_latency_seconds_sum 0.02
        inter_token_latency_seconds_bucket{le="0.004"} 0
        inter_token_latency_seconds_bucket{le="0.006"} 4
        open_requests 3
        engine_up 1
        ready 0
        engine_running 2
        steps_total 1
        rows_total{kind="node"} 5
        rows_total{kind="prompt"} 3
        step_seconds_sum 0.008
        step_budget_nodes_sum 6
        step_time_ratio_sum 0.8
        draft_rounds_total{source="eagle"} 1
        draft_rounds_total{source="eagle3"} 1
        drafted_tokens_total{position="1",source="eagle3"} 1
        drafted_tokens_total{position="2",source="eagle3"} 1
        drafted_tokens_total{position="3",source="eagle3"} 1
        accepted_tokens_total{position="1",source="eagle3"} 1
        drafted_tokens_total{position="tree",source="eagle"} 5
        accepted_tokens_total{position="1",source="eagle"} 1
        accepted_tokens_total{position="2",source="eagle"} 1
        kv_pages{group="0",state="used"} 7
        kv_pages{group="1",state="free"} 9
        rank_memory_bytes{rank="0"} 5
        rank_memory_bytes{rank="1"} 6
        rank_sum_seconds{rank="0"} 0.1
        rank_sum_seconds{rank="1"} 0.2
        """,
    )
    for name, kind in (("rounds_total", "counter"), ("open_requests", "gauge"), ("accept_length", "histogram")):
        assert kinds[f"slipstream_{name}"] == kind


def test_a_scrape_shows_the_acceptance_alarm():
    recent = RecentAcceptance()
    for rate in (0.2, 0.4):
        recent.add(1 / 32, rate, length=1.5, record_rate=0.7, record_length=2.5)
    states = (
        CategoryState("all", "day", "one", 1.0, recent),
        CategoryState("context <1k", "training", "", 0.25, recent),
    )
    acceptance = AcceptanceView(states, new_prompts=0.5, facts={"quantization": "none", "changed": "target"})
    _, values = read(scrape(Metrics(), {}, EngineCounts(acceptance=acceptance)))
    assert_samples(
        values,
        """
        accept_alarm{category="all",clients="one",record="day"} 1
        accept_alarm{category="all",clients="several",record="day"} 0
        accept_evidence{category="all",record="day"} 1
        accept_evidence{category="context <1k",record="training"} 0.25
        accept_segments{category="all",record="day"} 2
        accept_first_rate{category="all",record="day"} 0.3
        accept_record_first_rate{category="all",record="day"} 0.7
        accept_recent_length{category="all",record="day"} 1.5
        accept_record_length{category="all",record="day"} 2.5
        accept_new_prompts 0.5
        draft_info{changed="target",quantization="none"} 1
        """,
    )


def test_help_says_what_is_counted_and_the_process_is_seen():
    names = ["running", "ngram_nodes", "ngram_match_length_3", "draft_width"]
    view = EngineView(dict.fromkeys(names, 1.0), EngineCounts(), num_open=0, is_up=True, is_ready=True)
    text = Metrics().render(view)[0].decode()
    helps = dict(re.findall(r"# HELP (\w+) ([^\n]+)", text))
    descriptions = [helps[f"slipstream_engine_{name}"] for name in names]
    assert len(set(descriptions)) == len(names)
    assert not any(name in text for name, text in zip(names, descriptions, strict=True))
    assert re.search(r"\nprocess_resident_memory_bytes \d", text)
    assert re.search(r"\nprocess_open_fds \d", text)


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), max_size=30))
def test_buckets_are_cumulative(observed):
    engine = EngineCounts(seconds=Histogram((0.5, 1.0, 50.0)))
    for value in observed:
        engine.seconds.observe(value)
    _, values = read(scrape(Metrics(), {}, engine))
    for bound in ("0.5", "1", "50", "+Inf"):
        count = values["slipstream_step_seconds_bucket", f'le="{bound}"']
        assert count == sum(value <= float(bound) for value in observed)
