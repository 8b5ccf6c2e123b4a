"""What `compare` finds: figures of each server, their ratios to the first one's with intervals, table and plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from string import ascii_uppercase
from typing import Any

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
    """Between two pieces of text, which may hold several tokens."""
    token: Ratio | None
    accept_length: float | None
    """(tokens - 1) / rounds, if answers tell their rounds."""
    same_answers: int | None
    """How many answers equal the first server's."""


def compare_passes(passes: Sequence[Pass], num_servers: int) -> list[Comparison]:
    levels = dict.fromkeys(one["concurrency"] for one in passes)
    found = []
    for level in levels:
        of = [one["sides"] for one in passes if one["concurrency"] == level]
        sides = [[sides[place] for sides in of] for place in range(num_servers)]
        found += [comparison(level, place, sides[place], sides[0]) for place in range(num_servers)]
    return found


def comparison(level: int, place: int, blocks: Sequence[Pass], first: Sequence[Pass]) -> Comparison:
    """`blocks`: those of the server, pass by pass, beside those of the first one."""
    gaps, ttft = ([time for block in blocks for time in block[name]] for name in ("gaps_ms", "ttft_ms"))
    per_token = [time for block in blocks for time in block["token_ms"]]
    rounds = sum(block["rounds"] for block in blocks)
    pairs = [pair for one, other in zip(first, blocks, strict=True) for pair in zip(*answers(one, other), strict=True)]
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
        same_answers=None if is_first else sum(one == other for one, other in pairs),
    )


def answers(*blocks: Pass) -> list[list[str]]:
    return [block["answers"] for block in blocks]


def speed(block: Pass) -> float:
    return block["tokens"] / block["wall_s"]


def ratio_of_means(ones: Sequence[Pass], others: Sequence[Pass], name: str) -> Ratio | None:
    """Of the times `name` in passes in which both servers have some."""
    both = [
        (mean(one[name]), mean(other[name]))
        for one, other in zip(ones, others, strict=True)
        if one[name] and other[name]
    ]
    return paired_ratio([one for one, _ in both], [other for _, other in both]) if both else None


def letter(server: int) -> str:
    return ascii_uppercase[server % len(ascii_uppercase)]


def shown(ratio: Ratio | None) -> str | None:
    if ratio is None or ratio.low is None:
        return None if ratio is None else f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def shown_table(comparisons: Sequence[Comparison], urls: Sequence[str], *, greedy: bool) -> str:
    """A Markdown table, and a sentence on each level and server."""
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
    for one in comparisons:
        texts = {"speed_text": shown(one.speed), "ttft_text": shown(one.ttft), "token_text": shown(one.token)}
        same = None if one.same_answers is None or not greedy else f"{one.same_answers} of {one.requests}"
        figures = ("concurrency", "tok_s", "ttft_ms", "ttft_p99_ms", "token_ms", "gap_p99_ms", "accept_length")
        lines.append(
            {"letter": letter(one.server), **texts, "same_text": same, **{n: getattr(one, n) for n in figures}}
        )
    optional = ("accept_length", "same_text", "speed_text", "ttft_text", "token_text")
    empty = {name for name in optional if all(line[name] is None for line in lines)}
    servers = [f"{letter(place)}: {url}" for place, url in enumerate(urls)]
    text = table([column for column in columns if column[1] not in empty], lines)
    return "\n".join([*servers, "", text, "", *(verdict(one) for one in comparisons if one.speed is not None)])


def verdict(one: Comparison) -> str:
    """Says in words whether the server is faster or slower than the first."""
    ratio = one.speed
    name = letter(one.server)
    assert ratio is not None
    where = f"{one.concurrency} at once, {one.passes} passes"
    if ratio.low is None or ratio.high is None:
        return f"{where}: too few passes for an interval"
    if not ratio.differs:
        ends = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
        return f"{where}: no difference between {name} and A is shown ({ends})"
    word = "faster" if ratio.value > 1 else "slower"
    least, most = sorted(abs(end - 1) for end in (ratio.low, ratio.high))
    return f"{where}: {name} is {abs(ratio.value - 1):.1%} {word} than A ({least:.1%} to {most:.1%})"


def plot(comparisons: Sequence[Comparison], urls: Sequence[str], path: Path) -> None:
    """Tokens per second by level and, of several servers, three ratios to the first with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    num_panels = 4 if len(urls) > 1 else 1
    figure, [axes] = plt.subplots(1, num_panels, figsize=(3.5 * num_panels, 4), layout="constrained", squeeze=False)
    levels = list(dict.fromkeys(one.concurrency for one in comparisons))
    titles = ("tokens per second, to A", "time to first token, to A", "time per token, to A")
    for place, url in enumerate(urls):
        own = [one for one in comparisons if one.server == place]
        color = plt.get_cmap("tab10")(place % 10)
        axes[0].plot(
            range(len(own)), [one.tok_s for one in own], marker="o", color=color, label=f"{letter(place)}: {url}"
        )
        for panel, name in zip(axes[1:], ("speed", "ttft", "token"), strict=False):
            draw_ratios(panel, [getattr(one, name) for one in own], color, 0.12 * (place - len(urls) / 2))
    for panel, title in zip(axes, ("tokens per second", *titles), strict=False):
        panel.set_title(title, fontsize=10)
        panel.set_xticks(range(len(levels)), [str(level) for level in levels])
        panel.set(xlabel="requests at once", xlim=(-0.5, len(levels) - 0.5))
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[1:]:
        panel.axhline(1, color=GREY, linewidth=1, linestyle="--")
    axes[0].set_ylim(0, None)
    figure.legend(loc="outside lower center", ncols=min(3, len(urls)), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)


def draw_ratios(axes: Any, ratios: Sequence[Ratio | None], color: Any, shift: float) -> None:
    """Points with their intervals, a little aside for each server."""
    for place, ratio in enumerate(ratios):
        if ratio is None:
            continue
        low = ratio.low or ratio.value
        high = ratio.high or ratio.value
        errors = [[ratio.value - low], [high - ratio.value]]
        axes.errorbar([place + shift], [ratio.value], yerr=errors, fmt="o", markersize=4, capsize=3, color=color)
