"""The demo's table, plots and report.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from slipstream.models.atomic import atomic_file
from slipstream.serve.load import LoadResult

DIFFERENCES = "on a GPU rounding in bf16 decides between equals; in fp32, as on a CPU, this is a fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    drafter: str
    baseline: dict[int, LoadResult]  # by concurrency
    drafted: dict[int, LoadResult]
    history: list[dict[str, Any]]  # the training run's metrics.jsonl
    install_s: float | None
    total_s: float

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [record for record in self.history if "eval_accept_length" in record]

    @property
    def best(self) -> dict[str, Any]:
        return max(self.evaluations, key=lambda record: record["eval_accept_length"])

    @property
    def first(self) -> LoadResult:
        """The drafted run at the lowest concurrency, whose acceptance is reported."""
        return self.drafted[min(self.drafted)]

    @property
    def identical(self) -> tuple[int, int]:
        """How many answers with the draft, at every concurrency, are the baseline's at the lowest one; of how many."""
        expected = [answer.text for answer in self.baseline[min(self.baseline)].answers]
        runs = self.drafted.values()
        equal = [answer.text == text for run in runs for answer, text in zip(run.answers, expected, strict=True)]
        return sum(equal), len(equal)


def write_report(comparison: Comparison, output: Path) -> None:
    """Prints the table; writes report.json, training.png and acceptance.png."""
    errors = [error for runs in (comparison.baseline, comparison.drafted) for r in runs.values() for error in r.errors]
    if errors:
        raise ValueError(f"{len(errors)} requests failed, the first with: {errors[0]}")
    print(table(comparison))
    num_identical, num_answers = comparison.identical
    report = {
        "drafter": comparison.drafter,
        "install_s": comparison.install_s,
        "total_s": round(comparison.total_s, 1),
        "baseline_tok_s": {str(level): round(r.tokens_per_second, 1) for level, r in comparison.baseline.items()},
        "draft_tok_s": {str(level): round(r.tokens_per_second, 1) for level, r in comparison.drafted.items()},
        "accept_length": round(comparison.first.accept_length or 0.0, 3),
        "simulated_accept_length": round(comparison.best["eval_accept_length"], 3),
        "accept_rate_by_position": [round(rate, 4) for rate in comparison.first.accept_rate_by_position],
        "identical": num_identical == num_answers,
        "num_identical": num_identical,
    }
    with atomic_file(output / "report.json") as temporary:
        temporary.write_text(json.dumps(report, indent=2) + "\n")
    plot_training(comparison, output / "training.png")
    plot_acceptance(comparison, output / "acceptance.png")


def table(comparison: Comparison) -> str:
    heading = [
        "requests at once",
        "tok/s without",
        "tok/s with draft",
        "speed-up",
        "accept length",
        "accept rate by position",
    ]
    rows = [heading]
    for level, drafted in comparison.drafted.items():
        before, after = comparison.baseline[level].tokens_per_second, drafted.tokens_per_second
        rates = " ".join(f"{rate:.2f}" for rate in drafted.accept_rate_by_position)
        rows.append(
            [
                str(level),
                f"{before:.0f}",
                f"{after:.0f}",
                f"{after / before:.2f}x",
                f"{drafted.accept_length or 0:.2f}",
                rates,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    num_identical, num_answers = comparison.identical
    verdict = "yes" if num_identical == num_answers else f"NO, {num_identical} of {num_answers} ({DIFFERENCES})"
    lines.append(f"outputs identical with and without the draft: {verdict}")
    lines.append(f"accept length simulated in training: {comparison.best['eval_accept_length']:.2f}")
    return "\n".join(lines)


def plot_training(comparison: Comparison, path: Path) -> None:
    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [record["step"] for record in comparison.history]
    left.plot(steps, [record["loss"] for record in comparison.history], color="#9aa5b1", linewidth=1)
    left.set(xlabel="optimizer step", ylabel="loss", title=f"{comparison.drafter}: training")
    right = left.twinx()
    evaluated = [(record["step"], record["eval_accept_length"]) for record in comparison.evaluations]
    right.plot(*zip(*evaluated, strict=True), color="#1f6feb", marker="o", markersize=4)
    right.set_ylabel("accept length on held-out answers", color="#1f6feb")
    right.set_ylim(1.0)
    save(figure, left, path)


def plot_acceptance(comparison: Comparison, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    rates = comparison.first.accept_rate_by_position
    bars = axes.bar(range(1, len(rates) + 1), rates, color="#1f6feb", width=0.6)
    axes.bar_label(bars, fmt="%.2f")
    axes.set(xlabel="position in the draft", ylabel="share of rounds that accepted it", ylim=(0, 1))
    axes.set_xticks(range(1, len(rates) + 1))
    levels = min(comparison.drafted)
    speed_up = comparison.first.tokens_per_second / comparison.baseline[levels].tokens_per_second
    axes.set_title(
        f"{comparison.drafter}, served: accept length {comparison.first.accept_length:.2f}, speed-up {speed_up:.2f}x"
    )
    save(figure, axes, path)


def save(figure: Any, axes: Axes, path: Path) -> None:
    axes.spines[["top"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
