"""The expected speed: against times by hand, and as the figure that chooses `best`."""

import json
from pathlib import Path

import pytest
from torch import tensor

from slipstream.models.files.cost_tables import CostTables
from slipstream.serve.engine import cost_files
from slipstream.tests.tables import each_case
from slipstream.tests.train.runs import records, refusal
from slipstream.train import eagle3
from slipstream.train.eagle3 import Eagle3Training
from slipstream.train.loop import Loop
from slipstream.train.options import EvaluationOptions
from slipstream.train.report import ReportConfig, write_report
from slipstream.train.speed import StepTimes

TARGET = {1: 10.0, 2: 10.5, 4: 11.0, 5: 30.0, 8: 16.0, 16: 24.0}  # 5 rows are slower than 8, which take their place
DRAFT = {(1, 2): 1.0, (1, 4): 2.0, (2, 2): 1.2, (4, 2): 1.5, (4, 4): 4.0}  # none of two requests with four nodes
TABLES = CostTables({"plain": TARGET, "all": TARGET}, {"plain": DRAFT, "all": DRAFT})


@pytest.fixture
def costs(tmp_path, monkeypatch) -> Path:
    """A file as a server keeps it."""
    monkeypatch.setenv(cost_files.FOLDER_VARIABLE, str(tmp_path / "cache"))
    key = cost_files.CostKey("H100", "2.11", "3.6", "0.1", "", "")
    cost_files.save(key, TABLES.to_json())
    return cost_files.cache_folder() / key.name()


@each_case()
def test_a_step_takes_the_passes_that_are_large_enough(costs, requests, plain, times):
    options = EvaluationOptions(costs=str(costs), requests=requests)
    step_times = StepTimes.read(options, 3)
    assert step_times == StepTimes(requests, plain, times)
    lengths = {1: 1.7, 2: 2.2, 3: 2.5}
    speed, depth = max((1000 * requests * lengths[depth] / ms, depth) for depth, ms in times.items())
    figures = step_times.metrics(lengths)
    assert figures == {
        "expected_speed": pytest.approx(speed),
        "expected_speedup": pytest.approx(speed / (1000 * requests / plain)),
        "fastest_depth": depth,
    }


def test_the_fastest_checkpoint_is_best(tmp_path, arguments, monkeypatch, capsys, costs):
    """The second evaluation accepts more at depth 3, and less at depth 1, which is fastest at four requests."""
    lengths = iter([(1.8, 1.9, 2.0), (1.7, 2.1, 2.4), (1.75, 1.9, 2.0)])
    script = []
    evaluate_all = Loop.evaluate

    def evaluate(_training, _batch):
        metrics = {f"accept_length_at_depth_{depth}": length for depth, length in enumerate(script[-1], 1)}
        metrics["accept_length"] = script[-1][-1]
        return {name: tensor([value, 1.0]) for name, value in metrics.items()}

    def next_lengths(loop):
        script.append(next(lengths))
        return evaluate_all(loop)

    monkeypatch.setattr(Eagle3Training, "evaluate", evaluate)
    monkeypatch.setattr(Loop, "evaluate", next_lengths)
    flags = {"evaluation__costs": costs, "evaluation__requests": 4}
    output = tmp_path / "run"
    main_flags = arguments(output, **flags, optim__steps=3, evaluation__every=1, evaluation__patience=2)
    eagle3.main(main_flags)
    speed = 4000 * 1.8 / 17.5
    assert f"best expected speed {speed:.1f} tokens/s, accept length 2.000 at step 1: " in capsys.readouterr().out
    assert json.loads((output / "best" / "run.json").read_text())["step"] == 1
    first, second, _ = records(output)
    assert first["eval_expected_speed"] == pytest.approx(speed, rel=1e-6)
    assert (first["eval_fastest_depth"], second["eval_fastest_depth"]) == (1, 1)
    text = write_report(ReportConfig(run=str(output))).read_text()
    assert f"<b>{speed:.3f}</b>best expected speed, step 1<" in text
    moved = costs.rename(costs.with_name("moved.json"))
    eagle3.main([flag.replace(str(costs), str(moved)) for flag in main_flags])  # the same times elsewhere
    moved.write_text(moved.read_text().replace("24.0", "25.0"))
    message = refusal([flag.replace(str(costs), str(moved)) for flag in main_flags])
    assert "pass the original evaluation.costs" in message


@each_case(
    (
        json.dumps({"format": 2, "tables": CostTables(TABLES.target, {"plain": {}, "all": {}}).to_json()}),
        {},
        "has no passes of a draft; name step times of a server with one",
    )
)
def test_other_files_and_sizes_are_named(tmp_path, arguments, costs, content, changes, message):
    if content is not None:
        costs.write_text(content)
    assert message in refusal(arguments(tmp_path / "run", evaluation__costs=costs, **changes))
