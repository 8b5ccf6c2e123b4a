"""A sweep's table and plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker
from matplotlib.axes import Axes

COLUMNS = (  # heading, key of a row, format
    ("draft", "label", "s"),
    ("requests at once", "batch", "d"),
    ("tok/s", "tok_s", ".1f"),
    ("speed-up", "speed_up", ".2f"),
    ("accept length", "accept_length", ".2f"),
    ("nodes", "width", ".2f"),
    ("ms per round", "ms", ".2f"),
    ("exact match", "accuracy", ".1%"),
    ("same answers", "num_identical", "d"),
)
PANELS = (  # key of a row, title, logarithmic
    ("tok_s", "tokens per second", True),
    ("speed_up", "speed-up over no draft", False),
    ("accept_length", "accept length (tokens per round)", False),
    ("accuracy", "exact match", False),
)
COLORS = ("#9aa5b1", "#1f6feb", "#d9730d", "#2da44e", "#8250df", "#cf222e", "#0a7ea4", "#6e5494")
MARKERS = "osD^vPX*"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(heading for heading, _, _ in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        cells = ["-" if row[key] is None else format(row[key], form) for _, key, form in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Four panels by concurrency, a line for each draft."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
    labels = list(dict.fromkeys(row["label"] for row in rows))
    for panel, (key, name, is_log) in zip(axes.flat, PANELS, strict=True):
        for index, label in enumerate(labels):
            draw(panel, [row for row in rows if row["label"] == label and row[key] is not None], key, label, index)
        panel.set_title(name, fontsize=11)
        if is_log:
            panel.set_yscale("log")
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        panel.grid(axis="y", color="#e5e7eb")
        panel.spines[["top", "right"]].set_visible(False)
        panel.minorticks_off()
    throughput, speed_up, accepted, accuracy = axes.flat
    speed_up.axhline(1.0, color=COLORS[0], linewidth=1)
    accepted.set_ylim(bottom=1.0)
    accuracy.set_ylim(0.0, 1.0)
    accuracy.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    levels = sorted({row["batch"] for row in rows})
    for panel in axes[1]:
        panel.set_xscale("log", base=2)
        panel.set_xticks(levels, labels=[str(level) for level in levels])
        panel.minorticks_off()  # which the new scale has switched on
        panel.set_xlabel("requests at once")
    lines, names = throughput.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw(panel: Axes, rows: Sequence[dict[str, Any]], key: str, label: str, index: int) -> None:
    style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
    levels, values = [row["batch"] for row in rows], [row[key] for row in rows]
    panel.plot(levels, values, label=label, **style)  # type: ignore[arg-type]
