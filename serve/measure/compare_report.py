"""Reports what `compare` measured: figures of each server, ratios to the first with intervals, table and plot."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from string import ascii_uppercase
from typing import Any

from slipstream.serve.contexts import CLASSES
from slipstream.serve.load import percentile
from slipstream.serve.measure.intervals import Ratio, paired_ratio
from slipstream.serve.measure.tables import table

Pass = Mapping[str, Any]
GREY = "#57606a"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One server at one level; times in milliseconds, None where nothing was streamed. Ratios are to the first server,
    with 95 % intervals over the passes; None for the first server itself."""

    concurrency: int
    server: int
    passes: int
    requests: int
    tok_s: float
    speed: Ratio | None
    ttft_ms: float | None
    """Mean time to the first piece of text."""
    ttft_p99_ms: float | None
    ttft: Ratio | None
    token_ms: float | None
    """Mean time per token after the first piece."""
    gap_p99_ms: float | None
    """Gap between two pieces of text, which may hold several tokens."""
    token: Ratio | None
    accept_length: float | None
    """(tokens - 1) / rounds, if answers tell their rounds."""
    same_answers: int | None
    """Number of answers that equal the first server's."""
    contexts: list["Context"] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A server's answers of one class of context lengths, as in Comparison."""

    context: str
    answers: int
    token_ms: float | None
    accept_length: float | None


def compare_passes(passes: Sequence[Pass], num_servers: int) -> list[Comparison]:
    levels = dict.fromkeys(entry["concurrency"] for entry in passes)
    comparisons = []
    for level in levels:
        level_passes = [entry["sides"] for entry in passes if entry["concurrency"] == level]
        sides = [[blocks[place] for blocks in level_passes] for place in range(num_servers)]
        comparisons += [comparison(level, place, sides[place], sides[0]) for place in range(num_servers)]
    return comparisons


def comparison(level: int, place: int, blocks: Sequence[Pass], first: Sequence[Pass]) -> Comparison:
    """Returns the figures of one server. `blocks`: its passes; `first`: the same passes of the first server."""
    gaps, ttft = ([time for block in blocks for time in block[name]] for name in ("gaps_ms", "ttft_ms"))
    per_token = [time for block in blocks for time in block["token_ms"]]
    rounds = sum(block["rounds"] for block in blocks)
    pairs = [
        pair
        for base, block in zip(first, blocks, strict=True)
        for pair in zip(base["answers"], block["answers"], strict=True)
    ]
    is_first = place == 0
    return Comparison(
        concurrency=level,
        server=place,
        passes=len(blocks),
        requests=sum(len(block["answers"]) for block in blocks),
        tok_s=sum(block["tokens"] for block in blocks) / sum(block["wall_s"] for block in blocks),
        speed=None if is_first else paired_ratio([*map(speed, first)], [*map(speed, blocks)]),
        ttft_ms=mean(ttft) if ttft else None,
        ttft_p99_ms=percentile(ttft, 99),
        ttft=None if is_first else ratio_of_means(first, blocks, "ttft_ms"),
        token_ms=mean(per_token) if per_token else None,
        gap_p99_ms=percentile(gaps, 99),
        token=None if is_first else ratio_of_means(first, blocks, "token_ms"),
        accept_length=sum(block["decoded_tokens"] for block in blocks) / rounds if rounds else None,
        same_answers=None if is_first else sum(base == answer for base, answer in pairs),
        contexts=contexts_of(blocks),
    )


def contexts_of(blocks: Sequence[Pass]) -> list[Context]:
    """Returns the classes of context lengths that occur; none in files of earlier versions."""
    contexts = []
    for name in CLASSES:
        counts = [block["contexts"][name] for block in blocks if name in block.get("contexts", {})]
        if not counts:
            continue
        times = [time for part in counts for time in part["token_ms"]]
        rounds = sum(part["rounds"] for part in counts)
        contexts.append(
            Context(
                context=name,
                answers=sum(part["answers"] for part in counts),
                token_ms=mean(times) if times else None,
                accept_length=sum(part["decoded_tokens"] for part in counts) / rounds if rounds else None,
            )
        )
    return contexts


def speed(block: Pass) -> float:
    return block["tokens"] / block["wall_s"]


def ratio_of_means(baseline: Sequence[Pass], passes: Sequence[Pass], name: str) -> Ratio | None:
    """Returns the ratio of the mean times `name`, over the passes in which both servers have some: not 0, as behind a
    proxy that sends the pieces of an answer together."""
    return paired_ratio(*([mean(block[name] or [0.0]) for block in blocks] for blocks in (baseline, passes)))


def letter(server: int) -> str:
    return ascii_uppercase[server % len(ascii_uppercase)]


def shown(ratio: Ratio | None) -> str | None:
    if ratio is None or ratio.low is None:
        return None if ratio is None else f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def shown_table(comparisons: Sequence[Comparison], urls: Sequence[str], *, greedy: bool) -> str:
    """Returns a Markdown table, one by context if several classes occur, and a sentence on each level and server."""
    columns = [
        ("at once", "concurrency", "d"),
        ("server", "letter", ""),
        ("tok/s", "tok_s", ".1f"),
        ("to A", "speed_text", ""),
        ("first token, ms", "ttft_ms", ".1f"),
        ("p99", "ttft_p99_ms", ".1f"),
        ("to A", "ttft_text", ""),
        ("ms per token", "token_ms", ".2f"),
        ("gap p99", "gap_p99_ms", ".2f"),
        ("to A", "token_text", ""),
        ("accept length", "accept_length", ".2f"),
        ("same answers", "same_text", ""),
    ]
    lines = []
    for row in comparisons:
        texts = {"speed_text": shown(row.speed), "ttft_text": shown(row.ttft), "token_text": shown(row.token)}
        same = None if row.same_answers is None or not greedy else f"{row.same_answers} of {row.requests}"
        figures = ("concurrency", "tok_s", "ttft_ms", "ttft_p99_ms", "token_ms", "gap_p99_ms", "accept_length")
        lines.append(
            {"letter": letter(row.server), **texts, "same_text": same, **{n: getattr(row, n) for n in figures}}
        )
    servers = [f"{letter(place)}: {url}" for place, url in enumerate(urls)]
    text = table(columns, lines, optional=("accept_length", "same_text", "speed_text", "ttft_text", "token_text"))
    if any(len(row.contexts) > 1 for row in comparisons):
        text += f"\n\n{context_table(comparisons)}"
    return "\n".join([*servers, "", text, "", *(verdict(row) for row in comparisons if row.speed is not None)])


def context_table(comparisons: Sequence[Comparison]) -> str:
    columns = [
        ("at once", "concurrency", "d"),
        ("server", "letter", ""),
        ("context", "context", ""),
        ("answers", "answers", "d"),
        ("ms per token", "token_ms", ".2f"),
        ("accept length", "accept_length", ".2f"),
    ]
    lines = [
        {"concurrency": row.concurrency, "letter": letter(row.server), **asdict(context)}
        for row in comparisons
        for context in row.contexts
    ]
    return table(columns, lines, optional=("accept_length",))


def verdict(comparison: Comparison) -> str:
    """Says in words whether the server is faster or slower than the first."""
    ratio = comparison.speed
    name = letter(comparison.server)
    assert ratio is not None
    setting = f"{comparison.concurrency} at once, {comparison.passes} passes"
    if ratio.low is None or ratio.high is None:
        return f"{setting}: too few passes for an interval"
    if not ratio.differs:
        ends = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
        return f"{setting}: no difference between {name} and A is shown ({ends})"
    word = "faster" if ratio.value > 1 else "slower"
    low, high = sorted(abs(end - 1) for end in (ratio.low, ratio.high))
    return f"{setting}: {name} is {abs(ratio.value - 1):.1%} {word} than A ({low:.1%} to {high:.1%})"


def plot(comparisons: Sequence[Comparison], urls: Sequence[str], path: Path) -> None:
    """Plots tokens per second by level and, for several servers, three ratios to the first with their intervals."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    num_panels = 4 if len(urls) > 1 else 1
    figure = Figure(figsize=(3.5 * num_panels, 4), layout="constrained")
    axes = figure.subplots(1, num_panels, squeeze=False)[0]
    levels = list(dict.fromkeys(entry.concurrency for entry in comparisons))
    titles = ("tokens per second", "tokens per second, to A", "time to first token, to A", "time per token, to A")
    for place, url in enumerate(urls):
        entries = [entry for entry in comparisons if entry.server == place]
        color = colormaps["tab10"](place % 10)
        axes[0].plot(
            range(len(entries)),
            [entry.tok_s for entry in entries],
            marker="o",
            color=color,
            label=f"{letter(place)}: {url}",
        )
        for panel, name in zip(axes[1:], ("speed", "ttft", "token"), strict=False):
            draw_ratios(panel, [getattr(entry, name) for entry in entries], color, 0.12 * (place - len(urls) / 2))
    for panel, title in zip(axes, titles, strict=False):
        panel.set_title(title, fontsize=10)
        panel.set_xticks(range(len(levels)), [str(level) for level in levels])
        panel.set(xlabel="requests at once", xlim=(-0.5, len(levels) - 0.5))
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[1:]:
        panel.axhline(1, color=GREY, linewidth=1, linestyle="--")
    axes[0].set_ylim(0, None)
    figure.legend(loc="outside lower center", ncols=min(3, len(urls)), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, format="png")


def draw_ratios(axes: Any, ratios: Sequence[Ratio | None], color: Any, shift: float) -> None:
    """Draws points with their intervals, a little aside for each server."""
    for place, ratio in enumerate(ratios):
        if ratio is None:
            continue
        low = ratio.low or ratio.value
        high = ratio.high or ratio.value
        errors = [[ratio.value - low], [high - ratio.value]]
        axes.errorbar([place + shift], [ratio.value], yerr=errors, fmt="o", markersize=4, capsize=3, color=color)
