"""The demo's table, plots and report.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from slipstream.bench.lines import table
from slipstream.models.files.atomic import write_json
from slipstream.serve.load import LoadResult

BLUE = "#1f6feb"
RED = "#c4373b"
DIFFERENCES = "on a GPU rounding in bf16 decides between equals; in fp32, as on a CPU, this is a fault"
COLUMNS = (  # heading, key of a row, format
    ("requests at once", "level", "d"),
    ("tok/s without", "without", ".0f"),
    ("tok/s with draft", "with", ".0f"),
    ("speed-up", "speed_up", ".2f"),
    ("accept length", "accept_length", ".2f"),
    ("accept rate by position", "rates", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    drafter: str
    baseline: dict[int, LoadResult]  # by concurrency
    drafted: dict[int, LoadResult]
    history: list[dict[str, Any]]  # the training run's metrics.jsonl
    total_s: float

    @property
    def simulated_accept_length(self) -> float:
        """The best of the training run's evaluations."""
        return max(record.get("eval_accept_length", 0.0) for record in self.history)

    @property
    def alone(self) -> LoadResult:
        """The drafted run of the fewest requests at once, whose acceptance is reported: with more, passes verify the
        likeliest nodes only."""
        return self.drafted[min(self.drafted)]

    @property
    def identical(self) -> tuple[int, int]:
        """How many answers with the draft equal those without it, at every concurrency; of how many."""
        runs = [(run.answers, self.baseline[level].answers) for level, run in self.drafted.items()]
        equal = [plain.text == drafted.text for pair in runs for plain, drafted in zip(*pair, strict=True)]
        return sum(equal), len(equal)

    def speed_up(self, level: int) -> float:
        return self.drafted[level].tokens_per_second / self.baseline[level].tokens_per_second


def write_report(comparison: Comparison, output: Path) -> None:
    """Prints the table; writes report.json and acceptance.png."""
    errors = [error for runs in (comparison.baseline, comparison.drafted) for r in runs.values() for error in r.errors]
    if errors:
        raise ValueError(f"{len(errors)} requests failed, the first with: {errors[0]}")
    print(summary(comparison))
    num_identical, num_answers = comparison.identical
    report = {
        "drafter": comparison.drafter,
        "total_s": round(comparison.total_s, 1),
        "baseline_tok_s": {str(level): round(r.tokens_per_second, 1) for level, r in comparison.baseline.items()},
        "draft_tok_s": {str(level): round(r.tokens_per_second, 1) for level, r in comparison.drafted.items()},
        "accept_length": round(comparison.alone.accept_length or 0.0, 3),
        "simulated_accept_length": round(comparison.simulated_accept_length, 3),
        "accept_rate_by_position": [round(rate, 4) for rate in comparison.alone.accept_rate_by_position],
        "identical": num_identical == num_answers,
        "num_identical": num_identical,
    }
    write_json(output / "report.json", report)
    plot_acceptance(comparison, output / "acceptance.png")


def summary(comparison: Comparison) -> str:
    """The table of all levels, and whether the outputs are identical."""
    rows = [
        {
            "level": level,
            "without": comparison.baseline[level].tokens_per_second,
            "with": drafted.tokens_per_second,
            "speed_up": comparison.speed_up(level),
            "accept_length": drafted.accept_length,
            "rates": " ".join(f"{rate:.2f}" for rate in drafted.accept_rate_by_position),
        }
        for level, drafted in comparison.drafted.items()
    ]
    num_identical, num_answers = comparison.identical
    verdict = "yes" if num_identical == num_answers else f"NO, {num_identical} of {num_answers} ({DIFFERENCES})"
    return (
        f"{table(COLUMNS, rows)}\n"
        f"outputs identical with and without the draft: {verdict}\n"
        f"accept length simulated in training: {comparison.simulated_accept_length:.2f}"
    )


def plot_acceptance(comparison: Comparison, path: Path) -> None:
    """Left: accept rates by position. Right: the speed-up by the number of requests."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = comparison.alone.accept_rate_by_position
    left.bar_label(left.bar(range(1, len(rates) + 1), rates, color=BLUE, width=0.6), fmt="%.2f")
    left.set(xlabel="position in the draft", ylabel="share of rounds that accepted it", ylim=(0, 1))
    left.set_xticks(range(1, len(rates) + 1))
    left.set_title(f"{comparison.drafter}: accept length {comparison.alone.accept_length:.2f}")
    plot_speed_up(comparison, right)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def plot_speed_up(comparison: Comparison, axes: Axes) -> None:
    """A bar per concurrency, red where it does not reach the line of serving without the draft."""
    levels = list(comparison.drafted)
    speed_ups = [comparison.speed_up(level) for level in levels]
    colors = [BLUE if value >= 1 else RED for value in speed_ups]
    bars = axes.bar(range(len(levels)), speed_ups, color=colors, width=0.5)
    axes.bar_label(bars, [f"{value:.2f}x" for value in speed_ups], padding=3)
    axes.axhline(1, color="#57606a", linewidth=1, linestyle="--")
    axes.text(
        0.99, 1, "without the draft", color="#57606a", ha="right", va="bottom", transform=axes.get_yaxis_transform()
    )
    axes.set_xticks(range(len(levels)), ["one at a time" if level == 1 else f"{level} at once" for level in levels])
    axes.set(xlabel="requests", ylabel="speed with the draft / without", ylim=(0, 1.25 * max(1.0, *speed_ups)))
    axes.set_xlim(-0.6, len(levels) + 0.3)  # room for the line's label
    axes.set_title("speed-up" if min(speed_ups) >= 1 else "speed-up; red: the draft costs speed")
