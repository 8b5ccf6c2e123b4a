"""Engines that take turns answer the same, and a turn of one costs the others nothing."""

import time

import pytest

from slipstream.bench import sizing
from slipstream.bench.workload import Task
from slipstream.tests.random_targets import FAMILIES, save_random_target

TASKS = [Task([7, 11, 5, 3 + index, 7, 11], 12 + index) for index in range(5)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> sizing.SizingConfig:
    target = tmp_path_factory.mktemp("sizing")
    save_random_target(FAMILIES["qwen3"], target)
    return sizing.SizingConfig(target=str(target), draft="ngram", width=[2], engine={"max_model_len": 64})


def test_all_contenders_answer_all_questions(config: sizing.SizingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders: list[sizing.Contender] = []
    make = sizing.Contender
    monkeypatch.setattr(sizing, "Contender", lambda *args: contenders.append(make(*args)) or contenders[-1])
    found = sizing.compete(config, 2, TASKS[:1], TASKS)
    assert [line["nodes"] for line in found] == ["none", "2", "auto"]
    numbers = {one.tokens for one in contenders}
    assert len(numbers) == 1, "answers are the same, and warming up does not count"
    assert 0 < numbers.pop() <= sum(task.max_tokens for task in TASKS)
    assert max(line["to_best"] for line in found[:-1]) == 1.0
    assert not any(one.engine.has_work for one in contenders)


def test_what_others_compute_is_not_counted(config: sizing.SizingConfig) -> None:
    one = sizing.Contender("auto", config, 2)
    one.ask(TASKS, "measured")
    one.turn()
    seconds, began = one.seconds, time.thread_time()
    while time.thread_time() < began + 0.5:
        sum(range(10_000))
    one.turn()
    assert one.seconds < seconds + 0.5


def test_wrong_options_are_named() -> None:
    for options, message in (
        ({}, "draft is empty"),
        ({"draft": "ngram", "width": [0]}, "width has 0"),
        ({"draft": "ngram", "runs": 0}, "runs is 0"),
        ({"draft": "ngram", "batch": []}, "batch is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            sizing.SizingConfig(**options)
