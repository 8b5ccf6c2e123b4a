"""Every feature of a request with every drafter: tokens, finish reasons and log-probabilities as without a draft."""

from itertools import product
from pathlib import Path

import pytest

from slipstream.tests.kernels.triton_runs import SLOW
from slipstream.tests.serve.correctness import (
    DRAFTERS,
    FEW,
    ROOM,
    all_cases,
    answers_alone,
    differences,
    engine_of,
    requests_of,
    save_drafts,
)
from slipstream.tests.serve.engine_runs import Answer, acceptance, run

# Every drafter once; the others are slow.
GATE = {(drafter, index % 2 == 0) for index, drafter in enumerate(DRAFTERS)}
CASES = [pytest.param(*case, marks=() if case in GATE else SLOW) for case in product(DRAFTERS, (True, False))]


@pytest.fixture(scope="module")
def expected() -> dict[str, Answer]:
    return answers_alone()


@pytest.fixture(scope="module")
def drafts(expected: dict[str, Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    save_drafts(folder, expected)
    return folder


@pytest.mark.parametrize(("drafter", "preempted"), CASES)
def test_answers_do_not_depend_on_the_draft(
    drafter: str, preempted: bool, expected: dict[str, Answer], drafts: Path
) -> None:
    """The second time prompts are cached, and n-grams know the answers."""
    requests = requests_of(all_cases())
    engine = engine_of(drafter, drafts, **FEW if preempted else ROOM)
    for _ in range(2):
        answers = run(engine, requests)
        assert differences(answers, expected) == []
    assert (engine.scheduler.num_preemptions > 0) == preempted
    cached = [answers[request.id].counts.cached_tokens for request in requests]
    assert preempted or sum(count > 0 for count in cached) == len(cached) - 2, "prompt_logprobs share nothing"
    assert acceptance(answers) > 0


def test_the_reference_has_every_way_to_end(expected: dict[str, Answer]) -> None:
    reasons = [answer.finish_reason for answer in expected.values()]
    assert min(reasons.count("stop"), reasons.count("length")) > 3
    assert any(answer.logprobs for answer in expected.values())
