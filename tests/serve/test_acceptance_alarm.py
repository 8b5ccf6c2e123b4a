"""The acceptance alarm: figures in simulated time, what one client can do, and a server whose draft is spoilt."""

import json
import logging
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.serve.engine import acceptance_files
from slipstream.serve.engine.acceptance_alarm import ALL, FORM_DIGITS, AcceptanceAlarm, Baseline, PromptForms
from slipstream.serve.engine.control_charts import DAY, THRESHOLD, Chart, Cusum, Level, collapse_evidence
from slipstream.serve.engine.engine import Engine
from slipstream.serve.request import Request
from slipstream.tests.pairwise import gate_of, some_of
from slipstream.tests.serve.acceptance_traffic import CHAT, MIXED, Kind, Traffic
from slipstream.tests.serve.engine_runs import build_engine, make_request, run
from slipstream.tests.sources import ROOT, TINY

HOUR = 3600.0
DRAFT = ROOT / "tests" / "assets" / "eagle3"
Alarms = dict[tuple[str, str], str]


def alarm_of(traffic: Traffic, trained: Baseline | None = None) -> AcceptanceAlarm:
    return AcceptanceAlarm(traffic.num_slots, trained, lambda: traffic.now)


def alarms_of(alarm: AcceptanceAlarm) -> Alarms:
    """Returns the clients of each alarm, by category and record."""
    return {
        (category, record): chart.alarm.clients
        for record, charts in alarm.charts.items()
        for category, chart in charts.items()
        if chart.alarm is not None
    }


@pytest.mark.parametrize("mean", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("variance", [0.01, 0.05])
def test_evidence_of_ordinary_requests_is_fair(mean, variance):
    """E[e^x] is at most 1 for the worst distributions with that mean and variance: those of two values, one of them 0
    or 1, and for a segment's share of the rounds."""
    level = Level(mean, variance)
    low_share = variance / (variance + mean**2)  # of rates 0
    high_share = variance / (variance + (1 - mean) ** 2)  # of rates 1
    for share, edge in ((low_share, 0.0), (high_share, 1.0)):
        other = (mean - share * edge) / (1 - share)
        for weight in (0.25, 1.0):
            expected = share * math.exp(level.evidence(edge, weight))
            expected += (1 - share) * math.exp(level.evidence(other, weight))
            assert expected <= 1 + 1e-9
    assert level.evidence(mean / 2, 1.0) > 0 > level.evidence(mean, 1.0)


@pytest.mark.parametrize("share", [0.0, 0.03, 0.3, 0.95])
def test_collapses_of_ordinary_requests_are_fair(share):
    expected = sum(
        part * math.exp(collapse_evidence(share, collapsed=collapsed))
        for part, collapsed in ((share, True), (1 - share, False))
    )
    assert expected <= 1 + 1e-9
    assert 2 * collapse_evidence(share, collapsed=True) < THRESHOLD <= 3 * collapse_evidence(0.0, collapsed=True) + 1e-9


def test_a_chart_is_the_sum_of_the_last_evidence_of_each_request_since_it_was_zero():
    generator = random.Random(3)
    cusum = Cusum()
    parts = {}
    for _ in range(2000):
        request = generator.randrange(8)
        evidence = generator.uniform(-1.5, 1.2)
        parts[request] = evidence
        cusum.update(request, str(request % 2), evidence)
        if sum(parts.values()) <= 0:
            parts.clear()
        assert cusum.level == pytest.approx(sum(parts.values()))
        assert sum(cusum.clients.values()) == pytest.approx(cusum.level)


@pytest.mark.parametrize(
    ("seed", "seconds"), gate_of([(0, HOUR / 6), (0, HOUR), (1, HOUR), (2, HOUR)], [(0, HOUR / 6)])
)
def test_mixed_traffic_whose_shares_drift_raises_nothing(seed, seconds):
    traffic = Traffic(MIXED, seed, drift_s=HOUR / 3)
    alarm = alarm_of(traffic, Baseline(0.75, 2.4))
    traffic.run(alarm, seconds)
    assert not traffic.raised
    kinds = {label for kind in MIXED for label in kind.labels}
    assert {state.category for state in alarm.view().states} > {ALL, "greedy", "sampled", "context 16k+", *kinds}


LONG = (replace(CHAT, answer_len=600),)


@pytest.mark.parametrize(
    ("kinds", "num_slots", "seed"),
    gate_of(
        [(MIXED, 16, 0), (MIXED, 16, 1), (MIXED, 8, 2), ((CHAT,), 1, 3), ((CHAT,), 64, 4), (LONG, 4, 5), (LONG, 64, 6)],
        [(MIXED, 16, 0)],
    ),
)
def test_a_useless_draft_is_told_within_a_thousand_tokens_and_a_mended_one_too(seed, num_slots, kinds, caplog):
    traffic = Traffic(kinds, seed, num_slots=num_slots, step_s=num_slots / 160)
    alarm = alarm_of(traffic)
    traffic.run(alarm, 300)
    assert not traffic.raised
    before = traffic.tokens
    traffic.quality = 0.02
    assert traffic.run(alarm, 600, lambda: (ALL, "day") in alarms_of(alarm))
    assert traffic.tokens - before <= 1000
    assert alarms_of(alarm)[ALL, "day"] == "several"  # there is one client, so the draft is as likely as its text
    assert "accepted less than in the last day here" in caplog.text
    state = next(state for state in alarm.view().states if state.category == ALL)
    assert state.share == 1
    assert state.recent.rate < state.recent.record_rate
    traffic.run(alarm, 300)
    traffic.quality = 1.0
    assert traffic.run(alarm, HOUR, lambda: not alarms_of(alarm))
    assert "again" in caplog.messages[-1]


def test_load_does_not_matter():
    """Where the policy verifies fewer proposals, those that are not verified count as likely as they are."""
    traffic = Traffic((CHAT,), 0)
    alarm = alarm_of(traffic)
    for verified in (1.0, 0.1, 0.6):
        traffic.verified = verified
        traffic.run(alarm, 150)
    assert not traffic.raised
    traffic.verified = 0.5
    traffic.quality = 0.02
    assert traffic.run(alarm, 200, lambda: bool(alarms_of(alarm)))


def test_small_falls_are_noticed_and_named_by_category():
    traffic = Traffic((CHAT, replace(CHAT, prompt_len=60000)), 1)
    alarm = alarm_of(traffic)
    traffic.run(alarm, HOUR / 6)
    long = Kind(CHAT.share, 0.5, prompt_len=60000)  # 0.68 before
    traffic.kinds = (CHAT, long)
    assert traffic.run(alarm, HOUR, lambda: ("context 16k+", "day") in alarms_of(alarm))
    assert ("context <1k", "day") not in traffic.raised


def test_training_is_a_record_from_the_first_request_on():
    for rate, labels, is_raised in (
        (0.68, ("chat",), False),
        (0.45, ("chat",), False),
        (0.2, ("chat",), True),
        (0.2, ("chat", "tools"), False),
        (0.2, ("completion",), False),
    ):
        traffic = Traffic((replace(CHAT, rate=rate, labels=labels),), 2)
        alarm = alarm_of(traffic, Baseline(0.75, 2.4))
        assert traffic.run(alarm, 100, lambda alarm=alarm: bool(alarms_of(alarm))) == is_raised
        if is_raised:
            assert {record for _, record in alarms_of(alarm)} == {"training"}


def test_after_a_day_the_new_level_is_the_record():
    traffic = Traffic((CHAT,), 0, num_slots=4, step_s=20.0)
    alarm = alarm_of(traffic)
    traffic.run(alarm, DAY)
    traffic.kinds = (replace(CHAT, rate=0.3),)
    assert traffic.run(alarm, DAY, lambda: (ALL, "day") in alarms_of(alarm))
    assert traffic.run(alarm, 2 * DAY, lambda: not alarms_of(alarm))
    traffic.raised.clear()
    traffic.run(alarm, DAY)
    assert not traffic.raised


TENANTS = tuple(replace(kind, client=client) for kind in MIXED[:3] for client in ("a", "b", "c"))


@pytest.mark.parametrize("seed", some_of(range(2), [0]))
def test_one_clients_flood_raises_no_alarm_of_others(seed):
    """It may say that one client's requests are accepted less, and must notice others' when their turn comes."""
    traffic = Traffic(TENANTS, seed, num_slots=12)
    alarm = alarm_of(traffic)
    traffic.run(alarm, 400)
    noise = replace(CHAT, rate=0.03, client="a", answer_len=400)
    traffic.kinds = (*TENANTS, replace(noise, share=20.0))
    traffic.run(alarm, 400)
    assert traffic.raised
    assert {clients for _, _, clients in traffic.raised} == {"one"}
    traffic.quality = 0.02
    assert traffic.run(alarm, 1200, lambda: "several" in alarms_of(alarm).values())


def test_one_client_cannot_move_the_record_of_others():
    """Texts that are drafted at once, then no longer: other clients' records are their own."""
    traffic = Traffic(TENANTS, 4, num_slots=12)
    alarm = alarm_of(traffic)
    traffic.run(alarm, 300)
    traffic.kinds = (*TENANTS, replace(CHAT, rate=0.995, client="a", share=20.0))
    traffic.run(alarm, 300)
    traffic.kinds = TENANTS
    traffic.run(alarm, 300)
    assert "several" not in {clients for _, _, clients in traffic.raised}


def test_a_client_alone_counts_for_all():
    chart = Chart()
    for request in range(30):
        chart.update(request, "a", THRESHOLD / 10, now=0.0)
    assert chart.alarm.clients == "several"
    chart = Chart()
    chart.update(-1, "b", -1.0, now=0.0)
    for request in range(30):
        chart.update(request, "a", THRESHOLD / 10, now=10.0)
    assert chart.alarm.clients == "one"
    assert chart.doubts("a")
    assert not chart.doubts("c")  # others' records go on
    for request in range(100, 111):
        chart.update(request, "c", THRESHOLD / 10, now=20.0)
    assert chart.alarm.clients == "several"
    assert chart.doubts("b")


def chat(prompt: list[int]) -> Request:
    return make_request("chat", prompt)


def test_a_new_template_is_noticed_whatever_users_write():
    """The template decides the first two tokens and the last three; texts the others."""
    generator = random.Random(0)

    def prompt(head, tail):
        return [*head, *(generator.randrange(100, 5000) for _ in range(generator.randrange(1, 40))), *tail]

    def serve(forms, head, tail, count, *, learns=True):
        for _ in range(count):
            edges = forms.see(chat(prompt(head, tail)))
            if learns:
                forms.learn(edges)

    for head, tail in (([1, 9], [3, 4, 5]), ([1, 2], [3, 8, 5]), ([7], [3, 4, 5])):
        forms = PromptForms()
        serve(forms, [1, 2], [3, 4, 5], 400)
        assert forms.new_share < 0.05
        serve(forms, head, tail, 4)  # before a chart is in doubt
        assert forms.new_share > 0.3
        serve(forms, head, tail, 40, learns=False)
        assert forms.new_share > 0.9
        serve(forms, head, tail, 60)  # it has come to stay
        assert forms.new_share < 0.1


def test_the_record_outlives_the_server(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_CACHE", raising=False)
    assert acceptance_files.record_path("draft", "target") is None
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    path = acceptance_files.record_path("draft", "target")
    assert path is not None
    assert path != acceptance_files.record_path("draft", "other")
    traffic = Traffic(MIXED, 0)
    first = alarm_of(traffic)
    first.facts = {"target": "abc", "quantization": "none", "changed": "target"}
    traffic.run(first, 300)
    acceptance_files.save_record(path, first)
    forms = [form for edge in json.loads(path.read_text())["forms"].values() for form in edge["forms"]]
    assert forms
    assert all(len(form) == FORM_DIGITS and " " not in form for form in forms), "no tokens of a prompt"
    traffic.running = [None] * traffic.num_slots
    second = alarm_of(traffic)
    second.facts = {"target": "abc", "quantization": "fp8", "changed": ""}
    acceptance_files.load_record(path, second)
    assert second.facts["changed"] == "quantization"
    assert second.to_json() == first.to_json()
    traffic.quality = 0.02
    assert traffic.run(second, 100, lambda: (ALL, "day") in alarms_of(second))
    for text in ("{", "[]", json.dumps({"format": 1, "facts": {}, "records": [{}], "forms": {}}), '{"format": 2}'):
        path.write_text(text)
        third = alarm_of(traffic)
        acceptance_files.load_record(path, third)
        assert not third.records


def questions(start: int, count: int) -> list[Any]:
    """Chats of the bundled target's own kind of text."""
    from transformers import AutoTokenizer

    from slipstream.serve.measure.questions import read_questions

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rows = read_questions(["gsm8k"])[start : start + count]
    prompts = [
        tokenizer.apply_chat_template(question.first, add_generation_prompt=True, tokenize=True, return_dict=False)
        for question in rows
    ]
    return [make_request(f"{start}-{i}", prompt, max_tokens=64) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("draft", "options", "width"),
    [
        pytest.param(DRAFT, {"depth": 3}, 4, marks=pytest.mark.slow),
        (DRAFT, {"depth": 3, "topk": 3, "nodes": 8}, 8),
        pytest.param(DRAFT.with_name("dflash"), {}, 6, marks=pytest.mark.slow),
        ("ngram", {"nodes": 9}, 9),
    ],
    ids=["chain", "tree", "block", "ngram"],
)
def test_rates_are_those_of_first_tokens(draft, options, width):
    """All proposals are verified. In a tree the first token is the best child of the root, one of those counted."""
    engine = build_engine(TINY, draft, drafter=options, width=width, kv_cache_tokens=8192)
    rates = []
    record = engine.planner.alarm.record

    def note(slots, values):
        rates.extend(values.tolist())
        record(slots, values)

    engine.planner.alarm.record = note
    run(engine, questions(0, 4))
    counts = engine.planner.counts
    accepted = sum(count for (_, place), count in counts.accepted.items() if place == "1")
    assert len(rates) == counts.rounds.total()
    assert set(rates) <= {0.0, 1.0}
    if (draft, width) == (DRAFT, 8) or draft == "ngram":
        assert 0.5 * accepted < sum(rates) <= accepted
    else:
        assert sum(rates) == accepted
    moments = [record.moments for record in engine.planner.alarm.records[""].values()]
    assert sum(part.ends for part in moments) == pytest.approx(4, abs=0.01)  # the first ones count a little less


def noise_weights(engine: Engine):
    generator = torch.Generator().manual_seed(0)
    for parameter in engine.runner.passes.drafter.module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.std() * 3


@pytest.mark.slow
def test_a_server_tells_that_its_draft_was_spoilt(caplog):
    caplog.set_level(logging.WARNING)
    engine = build_engine(TINY, DRAFT, kv_cache_tokens=8192)
    run(engine, questions(0, 16))
    assert not alarms_of(engine.planner.alarm)
    records = engine.planner.alarm.records[""]
    assert {labels for labels, _ in records} == {("greedy", "context <1k")}
    noise_weights(engine)
    tokens = 0
    for request in questions(16, 30):
        engine.add(request)
    while engine.has_work and not alarms_of(engine.planner.alarm):
        tokens += sum(len(output.tokens) for output in engine.step())
    assert alarms_of(engine.planner.alarm)[ALL, "day"]
    assert tokens <= 1000
    view = engine.counts().acceptance
    assert view.facts["trained_target"] == "same"
