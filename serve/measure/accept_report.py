"""Reports what `accept` measured: figures by category, their table and plot.

Accept length is (tokens - 1) / rounds, since the prompt's pass gives the first token. `by_rounds` divides the sums over
all answers, as vLLM's counters do; `by_answers` is the mean over a category's answers, each turn for itself, and over
categories, as SPEED-Bench defines it (arXiv 2604.09557). The first weights long answers and badly accepted ones more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import mean
from typing import Any

from slipstream.serve.contexts import CLASSES, context_class
from slipstream.serve.measure.conversations import Setting
from slipstream.serve.measure.tables import table

Row = Mapping[str, Any]
ALL = "all"
ESTIMATED = "estimated, a round for each streamed piece"
BLUE = "#1f6feb"
GREY = "#57606a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one category, of one class of context lengths, or of all together, at one setting. None: not known.
    Speeds are tokens per second of one conversation: tokens over the time from request to end, summed over answers."""

    setting: Setting
    category: str
    context: str = ALL
    """Class of the context's length in the middle of answers."""
    answers: int
    tokens: int
    by_rounds: float | None
    by_answers: float | None
    drafted: float | None = None
    """Drafted tokens that a round verified, on average."""
    accept_rates: list[float] = field(default_factory=list)
    """Share of rounds in which the draft token at each position was accepted."""
    conditional_rates: list[float] = field(default_factory=list)
    """The same share among the rounds that accepted the position before."""
    tok_s: float
    tok_s_without: float | None
    speed_up: float | None
    is_estimated: bool
    by_counters: float | None = None
    """Accept length of all answers by the server's counters, which count other clients' requests, too."""

    @property
    def is_whole(self) -> bool:
        return self.category == ALL == self.context

    @property
    def name(self) -> str:
        """The category, or the class of contexts."""
        return self.category if self.context == ALL else f"context {self.context}"

    @property
    def setting_text(self) -> str:
        thinking = "" if self.setting.thinking == "default" else f", thinking {self.setting.thinking}"
        return f"temperature {self.setting.temperature:g}{thinking}, {self.setting.concurrency} at once"


def figures_of(results: Sequence[Row], settings: Sequence[Setting]) -> list[Figures]:
    """Returns the figures of each setting: its categories by name, its classes of context lengths, then all together.
    Leaves out settings without answers, and classes where a server does not tell the tokens of prompts."""
    entries: list[Figures] = []
    for setting in settings:
        fields = asdict(setting)
        rows = [row for row in results if fields.items() <= row.items()]
        answers = [row for row in rows if "question" in row]
        drafted = [row for row in answers if row["drafted"]]
        if not drafted:
            continue
        parts = [
            figures(setting, name, [row for row in answers if row["category"] == name])
            for name in sorted({row["category"] for row in drafted})
        ]
        present = set(map(context_of, drafted))
        contexts = [
            figures(setting, ALL, [row for row in answers if context_of(row) == name], context=name)
            for name in CLASSES
            if name in present
        ]
        lengths = [part.by_answers for part in parts if part.by_answers is not None]
        totals = {"by_answers": mean(lengths) if lengths else None, "by_counters": counted(rows, len(drafted))}
        entries += [*parts, *contexts, figures(setting, ALL, answers, **totals)]
    return entries


def context_of(row: Row) -> str | None:
    """Returns the class of an answer's context; None where the tokens of its prompt are not known, as in files of
    earlier versions."""
    prompt_tokens = row.get("prompt_tokens")
    return context_class(prompt_tokens + row["completion_tokens"] // 2) if prompt_tokens else None


def figures(setting: Setting, category: str, answers: Sequence[Row], **totals: Any) -> Figures:
    """Returns the figures of one category, of its answers with the draft and without. `totals`: fields that differ if
    the rows are of all categories. A speed-up compares the questions that were asked both ways."""
    drafted, without = ([row for row in answers if row["drafted"] == kind] for kind in (True, False))
    with_rounds = [row for row in drafted if row["rounds"]]
    rounds, drafted_tokens = (sum(row[name] for row in with_rounds) for name in ("rounds", "drafted_tokens"))
    lengths = [row["decoded_tokens"] / row["rounds"] for row in with_rounds]
    positions = [
        sum(counts) for counts in zip_longest(*(row["accepted_by_position"] for row in with_rounds), fillvalue=0)
    ]
    turns = {turn_of(row) for row in drafted} & {turn_of(row) for row in without}
    drafted_pairs, plain_pairs = ([row for row in rows if turn_of(row) in turns] for rows in (drafted, without))
    slow = speed(plain_pairs) if turns else None
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
        speed_up=speed(drafted_pairs) / slow if slow else None,
        is_estimated=any(row["source"] == "pieces" for row in drafted),
        by_rounds=sum(row["decoded_tokens"] for row in with_rounds) / rounds if rounds else None,
        **{"by_answers": mean(lengths) if lengths else None, **totals},
    )


def turn_of(row: Row) -> tuple[str, int]:
    return row["question"], row["turn"]


def speed(rows: Sequence[Row]) -> float:
    return sum(row["completion_tokens"] for row in rows) / sum(row["latency_s"] for row in rows)


def counted(rows: Sequence[Row], num_answers: int) -> float | None:
    """Returns the accept length by the server's counters; None unless they cover all answers, as after a restart."""
    counters = [row for row in rows if "counters" in row]
    rounds = sum(counts["counters"]["rounds"] for counts in counters)
    if not rounds or sum(counts["answers"] for counts in counters) != num_answers:
        return None
    return sum(counts["counters"]["decoded_tokens"] for counts in counters) / rounds


def shown_figures(figures: Sequence[Figures]) -> Sequence[Figures]:
    """Returns all figures but those of the only category, or of the only class of contexts."""
    categories = {entry.category for entry in figures}
    contexts = {entry.context for entry in figures}
    lists_categories = len(categories) > 2
    lists_contexts = len(contexts) > 2
    return [
        entry
        for entry in figures
        if (lists_categories or entry.category == ALL) and (lists_contexts or entry.context == ALL)
    ]


def shown_table(figures: Sequence[Figures]) -> str:
    """Returns a Markdown table. A single category, or class of contexts, has no line of its own."""
    columns = [
        ("temperature", "temperature", "g"),
        ("thinking", "thinking", ""),
        ("at once", "concurrency", "d"),
        ("category", "category", ""),
        ("context", "context", ""),
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
    entries = shown_figures(figures)
    has_contexts = any(entry.context != ALL for entry in entries)
    for entry in entries:
        setting = {name: getattr(entry.setting, name) for name in ("temperature", "thinking", "concurrency")}
        mark = "~" if entry.is_estimated else ""
        lengths = {name: getattr(entry, name) for name in ("by_rounds", "by_answers")}
        length_texts = {name: None if length is None else f"{mark}{length:.2f}" for name, length in lengths.items()}
        rates = " ".join(f"{rate:.2f}" for rate in entry.accept_rates) or None
        names = ("category", "answers", "drafted", "tok_s", "tok_s_without", "speed_up", "by_counters")
        setting["context"] = entry.context if has_contexts else None
        lines.append({**setting, **length_texts, "rates": rates, **{name: getattr(entry, name) for name in names}})
    if all(line["thinking"] == "default" for line in lines):
        columns = [column for column in columns if column[1] != "thinking"]
    text = table(columns, lines, optional=("context", "by_counters", "drafted", "tok_s_without", "speed_up", "rates"))
    return text + (f"\n~ {ESTIMATED}" if any(entry.is_estimated for entry in figures) else "")


def plot(figures: Sequence[Figures], name: str, path: Path) -> None:
    """Plots accept lengths by category and context, in a color for each setting; accept rates by position; and the
    speed-up."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    totals = [entry for entry in figures if entry.is_whole]
    has_rates = any(entry.accept_rates for entry in totals)
    has_speed = any(entry.speed_up is not None for entry in totals)
    figures = shown_figures(figures)
    categories = list(dict.fromkeys(entry.name for entry in figures))
    widths = [max(1.0, 0.25 * len(categories)), *[1.0] * (has_rates + has_speed)]
    figure = Figure(figsize=(3.5 * sum(widths) + 1, 4.2), layout="constrained")
    panels = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    colors = [colormaps["tab10"](index % 10) for index in range(len(totals))]
    draw_lengths(panels[0], figures, totals, categories, colors)
    if has_rates:
        draw_rates(panels[1], totals, colors)
    if has_speed:
        draw_speed_ups(panels[-1], totals, colors)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(name, fontsize=10)
    figure.legend(loc="outside lower center", ncols=min(4, len(totals)), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, format="png")


def draw_lengths(
    axes: Any, figures: Sequence[Figures], totals: Sequence[Figures], names: list[str], colors: Any
) -> None:
    """Draws a group of bars for each category and class of contexts, and one for all together."""
    width = 0.8 / len(totals)
    for index, (total, color) in enumerate(zip(totals, colors, strict=True)):
        lengths = {entry.name: entry.by_answers or 0.0 for entry in figures if entry.setting == total.setting}
        places = [place + width * (index + 0.5) - 0.4 for place in range(len(names))]
        bars = axes.bar(places, [lengths.get(name, 0.0) for name in names], width=width, color=color)
        if len(names) * len(totals) <= 16:
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axes.plot([], [], "s", color=color, label=total.setting_text)
    estimated = ", estimated" if any(entry.is_estimated for entry in totals) else ""
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 4 else 0)
    axes.set(ylabel=f"accept length, mean of answers{estimated}")
    axes.margins(y=0.1)


def draw_rates(axes: Any, totals: Sequence[Figures], colors: Any) -> None:
    for total, color in zip(totals, colors, strict=True):
        places = range(1, len(total.accept_rates) + 1)
        axes.plot(places, total.accept_rates, marker="o", markersize=4, color=color)
    depth = max(len(total.accept_rates) for total in totals)
    axes.set_xticks(range(1, depth + 1, 1 + depth // 12))
    axes.set(xlabel="position in the draft", ylabel="share of rounds that accepted it", ylim=(0, 1))


def draw_speed_ups(axes: Any, totals: Sequence[Figures], colors: Any) -> None:
    bars = axes.bar(range(len(totals)), [total.speed_up or 0.0 for total in totals], width=0.6, color=list(colors))
    axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    labels = [f"T {total.setting.temperature:g}\n{total.setting.concurrency} at once" for total in totals]
    axes.set_xticks(range(len(totals)), labels, fontsize=8)
    axes.set(ylabel="speed with the draft / without")
    axes.set_xlim(-0.7, len(totals) - 0.3)
    axes.margins(y=0.15)
