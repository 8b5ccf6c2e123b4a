"""Every feature of a request with every drafter and kind of target: tokens, finish reasons and log-probabilities as
without a draft."""

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from slipstream.tests.pairwise import gate_of, grouped, some_of
from slipstream.tests.serve.correctness import (
    ASSETS,
    DRAFTERS,
    FEW,
    ROOM,
    TARGETS,
    all_cases,
    answers_alone,
    differences,
    engine_of,
    features,
    find_target,
    requests_of,
)
from slipstream.tests.serve.engine_runs import Answer, acceptance, run


class Subject(NamedTuple):
    target: Path
    expected: dict[str, Answer]
    drafts: Path


@pytest.fixture(scope="module")
def subject(tmp_path_factory) -> Callable[[str], Subject]:
    @cache
    def find(kind):
        folder = tmp_path_factory.mktemp(kind)
        target = find_target(kind, folder)
        return Subject(target, answers_alone(target), folder)

    return find


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "preempted", "kind"),
    gate_of(
        product(DRAFTERS, (True, False), TARGETS),
        [("ngram", True, "mixture")],
    ),
)
def test_answers_do_not_depend_on_the_draft(drafter, preempted, kind, subject):
    """The second time prompts are cached, and n-grams know the answers."""
    target, expected, drafts = subject(kind)
    requests = requests_of(target, all_cases())
    engine = engine_of(target, drafter, drafts, expected, **FEW if preempted else ROOM)
    for _ in range(2):
        answers = run(engine, requests)
        assert differences(answers, expected) == []
    assert (engine.scheduler.num_preemptions > 0) == preempted
    cached = [answers[request.id].counts.cached_tokens for request in requests]
    if not preempted and kind != "hybrid":  # hybrids share prompts up to a multiple of 64 tokens: these are shorter
        assert sum(count > 0 for count in cached) == len(cached) - 2, "prompt_logprobs share nothing"
    assert acceptance(answers) > 0


@pytest.mark.parametrize("kind", some_of(TARGETS, ["mixture"]))
def test_the_reference_has_every_way_to_end(kind, subject):
    expected = subject(kind).expected
    reasons = [answer.finish_reason for answer in expected.values()]
    assert min(reasons.count("stop"), reasons.count("length")) > 3
    assert any(answer.logprobs for answer in expected.values())


def test_the_page_has_every_feature_and_drafter():
    page = (ASSETS.parent / "docs" / "correctness.md").read_text().splitlines()
    assert {f"- {feature}" for feature in features()} <= set(page)
    assert [line.split(" | ")[0] for line in page if line.startswith("| ") and "." in line] == [
        f"| {drafter}" for drafter in DRAFTERS
    ]
