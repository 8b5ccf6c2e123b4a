"""The plot of bench/load_trace.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot_trace(rows: Sequence[Mapping[str, Any]], levels: Sequence[int], path: Path) -> None:
    """Left: tokens per second by phase, a line per setting. Right: its total time. `rows`: those of the table."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", width_ratios=(2, 1))
    colors = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    places = range(len(levels))
    for row, color in zip(rows, colors * (1 + len(rows) // len(colors)), strict=False):
        speeds = [row[f"phase {index}"] for index in places]
        style = "--" if row["setting"] == "none" else "-"
        left.plot(places, speeds, style, color=color, marker="o", markersize=4, label=row["setting"])
        bar = right.bar(row["setting"], row["total_s"], color=color, width=0.6)
        right.bar_label(bar, fmt="%.1f", padding=3)
    left.set_xticks(places, [str(level) for level in levels])
    left.set(xlabel="requests at once, phase by phase", ylabel="tokens per second", ylim=(0, None))
    left.legend(frameon=False)
    right.set(ylabel="total time, s")
    right.tick_params(axis="x", rotation=30)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
