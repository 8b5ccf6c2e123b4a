"""The demo's report says how many answers a draft left as they were."""

import json
from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from slipstream.bench.demo_report import BLUE, RED, Comparison, plot_speed_up, write_report
from slipstream.serve.load import Answer, LoadResult


def level(concurrency: int, texts: list[str], seconds: float) -> LoadResult:
    answers = [
        Answer(text=text, completion_tokens=10, rounds=4, decoded_tokens=10, accepted_by_position=[4, 2])
        for text in texts
    ]
    return LoadResult(concurrency=concurrency, wall_s=seconds, answers=answers)


@pytest.mark.parametrize(
    ("drafted", "verdict", "identical"),
    [(["a", "b"], "draft: yes", True), (["a", "c"], "draft: NO, 1 of 2 (on a GPU", False)],
)
def test_the_report(
    drafted: list[str], verdict: str, identical: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = Comparison(
        drafter="eagle3",
        baseline={1: level(1, ["a", "b"], 4.0)},
        drafted={1: level(1, drafted, 2.0)},
        history=[{"step": 1, "loss": 2.0, "eval_accept_length": 2.25}],
        install_s=None,
        total_s=9.0,
    )
    write_report(comparison, tmp_path)
    printed = capsys.readouterr().out
    assert verdict in printed
    assert "2.00x" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["identical"], report["num_identical"]) == (identical, 2 if identical else 1)
    assert report["accept_length"] == 2.5
    assert report["accept_rate_by_position"] == [1.0, 0.5]
    assert (tmp_path / "training.png").stat().st_size > 0
    assert (tmp_path / "acceptance.png").stat().st_size > 0


def test_a_loss_is_drawn_as_one() -> None:
    comparison = Comparison(
        drafter="eagle3",
        baseline={1: level(1, ["a"], 4.0), 8: level(8, ["a"], 0.87)},
        drafted={1: level(1, ["a"], 2.0), 8: level(8, ["a"], 1.0)},
        history=[],
        install_s=None,
        total_s=9.0,
    )
    _, axes = plt.subplots()
    plot_speed_up(comparison, axes)
    assert [(round(bar.get_height(), 2), to_hex(bar.get_facecolor())) for bar in axes.patches] == [
        (2.0, BLUE),
        (0.87, RED),
    ]
    assert [text.get_text() for text in axes.texts] == ["2.00x", "0.87x", "without the draft"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["one at a time", "8 at once"]
    plt.close()
