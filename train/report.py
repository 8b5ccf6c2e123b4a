"""Draws a training run as one HTML page that loads nothing else: curves, options, provenance, sample answers.

    slipstream report runs/draft
    python train/report.py --run runs/draft --output report.html

Reads metrics.jsonl and, where there is a checkpoint, its run.json and options; also draws a run that is still training.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from slipstream.config import flatten, run
from slipstream.models.files.atomic import atomic_file
from slipstream.models.files.checkpoint import Values, read_json
from slipstream.models.files.outputs import begins_with, check_output_file, step_folders
from slipstream.models.files.tables import read_tables
from slipstream.train.options import ReportConfig
from slipstream.train.samples import Sample
from slipstream.train.trackers import read_lines

POSITION = re.compile(r"(.+)_(\d+)")
ACCEPT_LENGTH = "eval_accept_length"
SPEED = "eval_expected_speed"
BY_DEPTH = "eval_accept_length_at_depth"
BY_CATEGORY = "eval_accept_length_by_category"
TITLES: dict[str, str] = read_tables(Path(__file__).with_suffix(".yaml"))
NOT_DRAWN = {"step", "tokens"}
SHOWN_ABOVE = {"step", "tokens", "best_step", "best_accept_length", "best_speed", "metrics", "argv"}
MAX_SAMPLES = 8
MAX_POINTS = 500  # of a line; longer ones are averaged in buckets, since there are no more pixels
# Of curves: contrasts of 3 and more to the page's background in both themes.
COLORS = ("#1f6feb", "#d9730d", "#2a9d5c", "#9b4f96", "#c4373b", "#0e8a8a", "#8a6d3b", "#5b6676")
SWEEP = ("#1f6feb", "#9b4f96", "#c4373b", "#d9730d")
# Of everything else in a chart: what matplotlib draws with becomes a color of the page's theme.
GREY = "#57606a"
PALE = "#e6eaee"
INK = "#1b1f24"
THEME = {GREY: "var(--pale)", PALE: "var(--grid)", INK: "var(--ink)"}
# Text stays text, and equal pages are equal bytes.
SVG: Any = {"svg.fonttype": "none", "svg.hashsalt": "slipstream", "font.size": 8}
START = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --pale: #57606a; --line: #d8dee4; --grid: #e6eaee; --box: #f6f8fa;
  --mark: #cfe6ff; --back: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --pale: #9aa4af; --line: #30363d; --grid: #21262d;
  --box: #161b22; --mark: #1d4373; --back: #0d1117 } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 1120px; margin: 24px auto; padding: 0 20px }
h1 { font-size: 24px; margin: 0 0 12px } h2 { font-size: 17px; margin: 28px 0 8px }
.tiles { display: flex; flex-wrap: wrap; gap: 12px }
.tiles div { border: 1px solid var(--line); border-radius: 6px; padding: 8px 14px; color: var(--pale); font-size: 13px }
.tiles b { display: block; font-size: 21px; color: var(--ink) }
.charts { display: flex; flex-wrap: wrap; gap: 18px; margin-top: 18px }
figure { flex: 1 1 440px; max-width: 540px; margin: 0 } figcaption { font-weight: 600 }
.legend { min-height: 20px; font-size: 13px; color: var(--pale) }
.legend span { display: inline-block; margin-right: 14px }
.legend i { display: inline-block; width: 14px; height: 3px; margin: 0 5px 4px 0 }
.legend i.ring { width: 8px; height: 8px; margin-bottom: 0; border: 1px solid var(--ink); border-radius: 50% }
svg { width: 100%; height: auto } svg text { font-family: system-ui, sans-serif !important }
article { border: 1px solid var(--line); border-radius: 6px; padding: 4px 14px; margin: 10px 0; white-space: pre-wrap }
article p { margin: 8px 0 } .prompt, .share { color: var(--pale) } .share { font-size: 13px }
mark { background: var(--mark); color: inherit; border-radius: 3px }
table { border-collapse: collapse; font-size: 13px }
th, td { text-align: left; padding: 2px 14px 2px 0; vertical-align: top }
th { font-weight: 500; color: var(--pale); white-space: nowrap } td { overflow-wrap: anywhere }
pre { background: var(--box); padding: 10px 14px; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere }
"""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str  # of the folder
    draft: Values  # config.json of the newest checkpoint; empty before the first one
    records: list[dict[str, Any]]  # one per optimizer step
    samples: list[tuple[int, Sample]]  # by rising step
    options: Values  # dotted names; empty before the first checkpoint
    provenance: Values  # run.json; empty before the first checkpoint

    @property
    def title(self) -> str:
        """Names what was trained for which target; the folder's name before the first checkpoint."""
        if not self.draft:
            return self.name
        target = str(self.draft.get("target", "")).rstrip("/")
        name = Path(target).name if Path(target).is_absolute() else target  # a hub id keeps its owner
        return f"{str(self.draft['drafter']).upper()} draft for {name}"

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation that is best by `best_by`, the first of equals."""
        evaluated = [record for record in self.records if self.best_by in record]
        return max(evaluated, key=lambda record: record[self.best_by], default=None)

    @property
    def best_by(self) -> str:
        """The metric that chooses `best`."""
        return SPEED if self.options.get("evaluation.costs") else ACCEPT_LENGTH

    def points(self, name: str) -> Points:
        return [(record["step"], record[name]) for record in self.records if name in record]


def write_report(config: ReportConfig) -> Path:
    """Writes the page, prints its path and returns it. Raises ValueError for a folder without a training run."""
    path = Path(config.output) if config.output else Path(config.run) / "report.html"
    check_output_file(str(path), begins_with(START.encode()), "a report of a training run", {}, overwrite=True)
    page = render(load_run(Path(config.run)))
    with atomic_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    print(path)
    return path


def load_run(folder: Path) -> Run:
    """Raises ValueError if metrics.jsonl is missing or holds no complete record."""
    lines = read_lines(folder / "metrics.jsonl")
    records = [line for line in lines if "sample" not in line]
    if not records:
        raise ValueError(f"run {folder} has no metrics.jsonl with a step in it; name the output of a training program")
    steps = step_folders(folder)
    saved = [*steps[-1:], folder / "best"]
    newest = next((path for path in saved if (path / "run.json").exists()), None)
    state = steps[-1] / "state" / "progress.json" if steps else None
    return Run(
        name=folder.resolve().name,
        draft=read_json(newest / "config.json") if newest is not None else {},
        records=records,
        samples=[(line["step"], Sample.from_record(line)) for line in lines if "sample" in line],
        options=read_json(state)["identity"] if state is not None and state.exists() else {},
        provenance=read_json(newest / "run.json") if newest is not None else {},
    )


def render(run: Run) -> str:
    charts = "".join(chart_of(run, family, names) for family, names in families(run))
    command = " ".join(run.provenance.get("argv", []))
    provenance = {name: value for name, value in run.provenance.items() if name not in SHOWN_ABOVE}
    sections = [
        f"<section class=tiles>{tiles(run)}</section>",
        f"<section class=charts>{charts}</section>",
        _section("Sample answers", samples(run)),
        _section("Command", f"<pre>{escape(command)}</pre>" if command else ""),
        _section("Options", table(run.options)),
        _section("Code, system and data", table(flatten(provenance))),
    ]
    return (
        f"{START}<title>{escape(run.title)}: {escape(run.name)}</title><style>{STYLE}</style>"
        f"<h1>{escape(run.title)}</h1><p>Training run {escape(run.name)}</p>{''.join(sections)}</html>\n"
    )


def families(run: Run) -> Iterator[tuple[str, list[str]]]:
    """Metrics to draw, those with a title first; accept_rate_0, accept_rate_1 and so on share a chart,
    and so do the categories."""
    names = {name for record in run.records for name, value in record.items() if isinstance(value, int | float)}
    grouped: dict[str, list[str]] = {}
    for name in sorted(names - NOT_DRAWN, key=_by_position):
        grouped.setdefault(_by_position(name)[0], []).append(name)
    order = list(TITLES)
    titled = sorted(grouped.keys() & TITLES.keys(), key=order.index)
    for family in [*titled, *sorted(grouped.keys() - TITLES.keys())]:
        yield family, grouped[family]


def chart_of(run: Run, family: str, names: Sequence[str]) -> str:
    """A <figure> with title, legend and curves; empty where no curve has a finite point."""
    is_evaluated = family.startswith("eval_")
    figure = Figure(figsize=(5.2, 2.5), layout="constrained")
    axes = figure.add_subplot()
    legend = []
    values = []
    for name, color in zip(names, palette(len(names)), strict=True):
        points = [point for point in run.points(name) if math.isfinite(point[1])]
        if len(names) > 1 or family == BY_CATEGORY:
            legend.append(f"<span><i style='background:{color}'></i>{escape(label_of(name))}</span>")
        draw(axes, points, color, is_smoothed=not is_evaluated and family != "lr", has_raw=len(names) == 1)
        for step, value in points if is_evaluated else ():
            axes.plot([step], [value], "o", color=color, markersize=3.5, clip_on=False, gid=f"{step}: {value:.4g}")
        values += [value for _, value in points]
    if not values:
        return ""
    title = TITLES.get(family, family)
    is_log = family == "loss" and min(values) > 0
    set_axes(axes, run.records[-1]["step"], min(values), max(values), is_log=is_log)
    if family == run.best_by and run.best is not None:
        step = run.best["step"]
        value = run.best[family]
        axes.plot([step], [value], "o", markersize=9, markerfacecolor="none", markeredgecolor=INK, clip_on=False)
        legend.append(f"<span><i class=ring></i>best: {value:.3f} at step {step:,}</span>")
    return (
        f"<figure><figcaption>{escape(title)}{' (logarithmic axis)' * is_log}</figcaption>"
        f"<div class=legend>{''.join(legend)}</div>{svg(figure)}</figure>"
    )


def label_of(name: str) -> str:
    """The legend of a curve that shares its chart."""
    family, number, category = _by_position(name)
    if family == BY_CATEGORY:
        return category
    return f"depth {number}" if family == BY_DEPTH else f"position {number + 1}"


def draw(axes: Axes, points: Points, color: str, *, is_smoothed: bool, has_raw: bool) -> None:
    """Draws a curve, smoothed or not; `has_raw`: over its pale raw values."""
    if is_smoothed and has_raw:
        axes.plot(*zip(*thinned(points), strict=True), color=color, linewidth=0.7, alpha=0.3)
    line = thinned(smoothed(points) if is_smoothed else points)
    if line:
        axes.plot(*zip(*line, strict=True), color=color, linewidth=1.3)


def set_axes(axes: Axes, num_steps: float, low: float, high: float, *, is_log: bool) -> None:
    """Numbers in full; y from 0 where that costs less than half of the height."""
    axes.set_xlim(0, max(num_steps, 1))
    if is_log:
        axes.set_yscale("log", subs=(2, 5))
    elif 0 <= low < 0.5 * high:
        axes.set_ylim(0, 1.06 * high)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_minor_formatter(axis.get_major_formatter())
    axes.set_xlabel("optimizer step", loc="right", color=GREY)
    axes.tick_params(which="both", length=0, colors=GREY)
    axes.grid(visible=True, axis="y", which="both", color=PALE)
    axes.set_axisbelow(True)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)


def svg(figure: Figure) -> str:
    """The figure as an SVG element, without XML namespaces, in the theme's colors. A gid that begins with a digit
    becomes a tooltip."""
    file = io.StringIO()
    with matplotlib.rc_context(SVG):
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    text = file.getvalue()
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :])
    for color, variable in THEME.items():
        text = text.replace(color, variable)
    return re.sub(r'<g id="(\d[^"]*)">', r"<g><title>\1</title>", text)


def palette(count: int) -> Sequence[str]:
    """Colors of so many lines: distinct ones, or, when there are many, a sweep from blue to orange."""
    if count <= len(COLORS):
        return COLORS[:count]
    sweep = matplotlib.colors.LinearSegmentedColormap.from_list("sweep", SWEEP)
    return [matplotlib.colors.to_hex(sweep(index / (count - 1))) for index in range(count)]


def smoothed(points: Points) -> Points:
    """The exponential moving average over about a 25th of the points, bias-corrected."""
    keep = 1 - 1 / max(1.0, len(points) / 25)
    total = weight = 0.0
    averaged = []
    for x, y in points:
        if math.isfinite(y):
            total = keep * total + y
            weight = keep * weight + 1
            averaged.append((x, total / weight))
    return averaged


def thinned(points: Points) -> Points:
    """At most MAX_POINTS means over neighbouring points."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return points
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in buckets]


def tiles(run: Run) -> str:
    last = run.records[-1]
    best = run.best
    rates = sorted(rate for _, rate in run.points("tokens_per_second"))
    figures = {"steps": f"{last['step']:,}", "supervised tokens": f"{last.get('tokens', 0):,}"}
    if best is not None:
        name = "accept length" if run.best_by == ACCEPT_LENGTH else "expected speed"
        figures = {f"best {name}, step {best['step']:,}": f"{best[run.best_by]:.3f}"} | figures
    if "loss" in last:
        figures["loss, smoothed"] = f"{smoothed(run.points('loss'))[-1][1]:.3f}"
    if rates:
        figures["tokens per second, median"] = f"{rates[len(rates) // 2]:,.0f}"
    return "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in figures.items())


def samples(run: Run) -> str:
    """The newest step's answers, what was drafted and accepted with a background."""
    if not run.samples:
        return ""
    newest = run.samples[-1][0]
    newest_samples = [sample for step, sample in run.samples if step == newest][:MAX_SAMPLES]
    articles = [
        f"<article><p class=prompt>{escape(sample.prompt)}</p><p>{sample.html()}</p>"
        f"<p class=share>{sample.accepted_share:.0%} of the text drafted</p></article>"
        for sample in newest_samples
    ]
    legend = "<mark>Marked</mark>: drafted and accepted; the rest is the target's own."
    return f"<p>Step {newest:,}. {legend}</p>{''.join(articles)}"


def table(values: Values) -> str:
    rows = "".join(f"<tr><th>{escape(name)}<td>{escape(str(value))}" for name, value in values.items())
    return f"<table>{rows}</table>" if rows else ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _by_position(name: str) -> tuple[str, int, str]:
    """The chart of a metric, and its place there: a number, or -1, and a category, or nothing."""
    family, _, category = name.partition("/")
    match = POSITION.fullmatch(family)
    return (match[1], int(match[2]), category) if match else (family, -1, category)


main = partial(run, write_report, ReportConfig, "slipstream report")

if __name__ == "__main__":
    main()
