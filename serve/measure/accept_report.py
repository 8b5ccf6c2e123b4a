"""What `accept` finds: figures by category, their table and plot.

Accept length is (tokens - 1) / rounds, since the prompt's pass gives the first token. `by_rounds` divides the sums over
all answers, as vLLM's counters do; `by_answers` is the mean over a category's answers, each turn for itself, and over
categories, as SPEED-Bench defines it (arXiv 2604.09557). The first weights long answers and badly accepted ones more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from slipstream.serve.measure.conversations import Setting
from slipstream.serve.measure.tables import table

Row = Mapping[str, Any]
ALL = "all"
ESTIMATED = "estimated, a round for each streamed piece"
BLUE = "#1f6feb"
GREY = "#57606a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one category, or of all, at one setting. None: not known. Speeds are tokens per second of one conversation:
    tokens over the time from request to end, summed over answers."""

    setting: Setting
    category: str
    answers: int
    tokens: int
    by_rounds: float | None
    by_answers: float | None
    drafted: float | None = None
    """Drafted tokens that a round verified, on average."""
    accept_rates: list[float] = field(default_factory=list)
    """Share of rounds in which the draft token at each position was accepted."""
    conditional_rates: list[float] = field(default_factory=list)
    """The same, of the rounds that accepted the position before."""
    tok_s: float
    tok_s_without: float | None
    speed_up: float | None
    is_estimated: bool
    by_counters: float | None = None
    """Of all answers, by the server's counters; they count other clients' requests, too."""

    @property
    def is_whole(self) -> bool:
        return self.category == ALL

    @property
    def setting_text(self) -> str:
        thinking = "" if self.setting.thinking == "default" else f", thinking {self.setting.thinking}"
        return f"temperature {self.setting.temperature:g}{thinking}, {self.setting.concurrency} at once"


def figures_of(results: Sequence[Row], settings: Sequence[Setting]) -> list[Figures]:
    """For each setting its categories, in the order of their names, then all. Settings without answers are left out."""
    found: list[Figures] = []
    for setting in settings:
        rows = [row for row in results if setting_of(row) == setting]
        answers = [row for row in rows if "question" in row]
        drafted = [row for row in answers if row["drafted"]]
        without = [row for row in answers if not row["drafted"]]
        if not drafted:
            continue
        parts = []
        for category in sorted({row["category"] for row in drafted}):
            of = [[row for row in some if row["category"] == category] for some in (drafted, without)]
            parts.append(figures(setting, category, of[0], of[1]))
        lengths = [part.by_answers for part in parts if part.by_answers is not None]
        whole = {"by_answers": mean(lengths) if lengths else None, "by_counters": counted(rows, len(drafted))}
        found += [*parts, figures(setting, ALL, drafted, without, **whole)]
    return found


def setting_of(row: Row) -> Setting:
    return Setting(row["temperature"], row["thinking"], row["concurrency"])


def figures(setting: Setting, category: str, drafted: Sequence[Row], without: Sequence[Row], **whole: Any) -> Figures:
    """`whole`: the figures that those of all categories do not share with a category's. A speed-up compares the same
    questions, those that have been asked both ways."""
    with_rounds = [row for row in drafted if row["rounds"]]
    rounds, drafted_tokens = (sum(row[name] for row in with_rounds) for name in ("rounds", "drafted_tokens"))
    lengths = [row["decoded_tokens"] / row["rounds"] for row in with_rounds]
    positions = accepted_by_position([row for row in with_rounds if row["accepted_by_position"]])
    both = {place_of(row) for row in drafted} & {place_of(row) for row in without}
    pair = [[row for row in rows if place_of(row) in both] for rows in (drafted, without)]
    slow = speed(pair[1]) if both else None
    return Figures(
        setting=setting,
        category=category,
        answers=len(drafted),
        tokens=sum(row["completion_tokens"] for row in drafted),
        drafted=drafted_tokens / rounds if drafted_tokens else None,
        accept_rates=[count / rounds for count in positions],
        conditional_rates=[
            count / before for before, count in zip([rounds, *positions], positions, strict=False) if before
        ],
        tok_s=speed(drafted),
        tok_s_without=slow,
        speed_up=speed(pair[0]) / slow if slow else None,
        is_estimated=any(row["source"] == "pieces" for row in drafted),
        by_rounds=sum(row["decoded_tokens"] for row in with_rounds) / rounds if rounds else None,
        **{"by_answers": mean(lengths) if lengths else None, **whole},
    )


def place_of(row: Row) -> tuple[str, int]:
    return row["question"], row["turn"]


def speed(rows: Sequence[Row]) -> float:
    return sum(row["completion_tokens"] for row in rows) / sum(row["latency_s"] for row in rows)


def accepted_by_position(rows: Sequence[Row]) -> list[int]:
    depth = max((len(row["accepted_by_position"]) for row in rows), default=0)
    return [
        sum(row["accepted_by_position"][index] for row in rows if len(row["accepted_by_position"]) > index)
        for index in range(depth)
    ]


def counted(rows: Sequence[Row], num_answers: int) -> float | None:
    """The accept length by the server's counters; None unless they cover all answers, which those of an interrupted run
    do not."""
    counters = [row for row in rows if "counters" in row]
    rounds = sum(one["counters"]["rounds"] for one in counters)
    if not rounds or sum(one["answers"] for one in counters) != num_answers:
        return None
    return sum(one["counters"]["decoded_tokens"] for one in counters) / rounds


def shown_figures(figures: Sequence[Figures]) -> Sequence[Figures]:
    """Those of all categories alone where there is one."""
    categories = {one.category for one in figures if not one.is_whole}
    return figures if len(categories) > 1 else [one for one in figures if one.is_whole]


def shown_table(figures: Sequence[Figures]) -> str:
    """A Markdown table. Where there is one category its lines are those of all."""
    columns = [
        ("temperature", "temperature", "g"),
        ("thinking", "thinking", ""),
        ("at once", "concurrency", "d"),
        ("category", "category", ""),
        ("answers", "answers", "d"),
        ("accept length", "by_rounds", ""),
        ("mean of answers", "by_answers", ""),
        ("by the server's counters", "by_counters", ".2f"),
        ("drafted", "drafted", ".2f"),
        ("tok/s", "tok_s", ".1f"),
        ("without", "tok_s_without", ".1f"),
        ("speed-up", "speed_up", ".2f"),
        ("accept rate by position", "rates", ""),
    ]
    lines = []
    for one in shown_figures(figures):
        setting = {name: getattr(one.setting, name) for name in ("temperature", "thinking", "concurrency")}
        mark = "~" if one.is_estimated else ""
        lengths = {name: getattr(one, name) for name in ("by_rounds", "by_answers")}
        shown = {name: None if length is None else f"{mark}{length:.2f}" for name, length in lengths.items()}
        rates = " ".join(f"{rate:.2f}" for rate in one.accept_rates) or None
        names = ("category", "answers", "drafted", "tok_s", "tok_s_without", "speed_up", "by_counters")
        lines.append({**setting, **shown, "rates": rates, **{name: getattr(one, name) for name in names}})
    optional = ("by_counters", "drafted", "tok_s_without", "speed_up", "rates")
    empty = {name for name in optional if all(line[name] is None for line in lines)}
    empty |= {"thinking"} if all(line["thinking"] == "default" for line in lines) else set()
    text = table([column for column in columns if column[1] not in empty], lines)
    return text + (f"\n~ {ESTIMATED}" if any(one.is_estimated for one in figures) else "")


def plot(figures: Sequence[Figures], name: str, path: Path) -> None:
    """Accept length by category, a color for each setting; accept rates by position; and the speed-up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    wholes = [one for one in figures if one.is_whole]
    has_rates = any(one.accept_rates for one in wholes)
    has_speed = any(one.speed_up is not None for one in wholes)
    figures = shown_figures(figures)
    categories = list(dict.fromkeys(one.category for one in figures))
    widths = [max(1.0, 0.25 * len(categories)), *[1.0] * (has_rates + has_speed)]
    figure, axes = plt.subplots(
        1, len(widths), figsize=(3.5 * sum(widths) + 1, 4.2), layout="constrained", width_ratios=widths, squeeze=False
    )
    panels = list(axes[0])
    colors = [plt.get_cmap("tab10")(index % 10) for index in range(len(wholes))]
    draw_lengths(panels[0], figures, wholes, categories, colors)
    if has_rates:
        draw_rates(panels[1], wholes, colors)
    if has_speed:
        draw_speed_ups(panels[-1], wholes, colors)
    for one in panels:
        one.spines[["top", "right"]].set_visible(False)
    figure.suptitle(name, fontsize=10)
    figure.legend(loc="outside lower center", ncols=min(4, len(wholes)), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)


def draw_lengths(
    axes: Any, figures: Sequence[Figures], wholes: Sequence[Figures], names: list[str], colors: Any
) -> None:
    """A group of bars for each category, and one for all."""
    width = 0.8 / len(wholes)
    for index, (whole, color) in enumerate(zip(wholes, colors, strict=True)):
        lengths = {one.category: one.by_answers or 0.0 for one in figures if one.setting == whole.setting}
        places = [place + width * (index + 0.5) - 0.4 for place in range(len(names))]
        bars = axes.bar(places, [lengths.get(name, 0.0) for name in names], width=width, color=color)
        if len(names) * len(wholes) <= 16:
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axes.plot([], [], "s", color=color, label=whole.setting_text)
    estimated = ", estimated" if any(one.is_estimated for one in wholes) else ""
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 4 else 0)
    axes.set(ylabel=f"accept length, mean of answers{estimated}")
    axes.margins(y=0.1)


def draw_rates(axes: Any, wholes: Sequence[Figures], colors: Any) -> None:
    for one, color in zip(wholes, colors, strict=True):
        places = range(1, len(one.accept_rates) + 1)
        axes.plot(places, one.accept_rates, marker="o", markersize=4, color=color)
    most = max(len(one.accept_rates) for one in wholes)
    axes.set_xticks(range(1, most + 1, 1 + most // 12))
    axes.set(xlabel="position in the draft", ylabel="share of rounds that accepted it", ylim=(0, 1))


def draw_speed_ups(axes: Any, wholes: Sequence[Figures], colors: Any) -> None:
    bars = axes.bar(range(len(wholes)), [one.speed_up or 0.0 for one in wholes], width=0.6, color=list(colors))
    axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    labels = [f"T {one.setting.temperature:g}\n{one.setting.concurrency} at once" for one in wholes]
    axes.set_xticks(range(len(wholes)), labels, fontsize=8)
    axes.set(ylabel="speed with the draft / without")
    axes.set_xlim(-0.7, len(wholes) - 0.3)
    axes.margins(y=0.15)
