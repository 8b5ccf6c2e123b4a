"""Draws a training run as one HTML page that loads nothing else: curves, options, provenance, sample answers.

    slipstream report runs/draft
    python train/report.py --run runs/draft --output report.html

Reads metrics.jsonl and, where there is a checkpoint, its run.json and options; a run that still goes on can be drawn.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from slipstream.config import parse
from slipstream.models.atomic import atomic_file
from slipstream.models.checkpoint import read_json
from slipstream.models.outputs import check_output_file
from slipstream.train.checkpoints import flatten, step_folders
from slipstream.train.report_style import STYLE
from slipstream.train.samples import Sample
from slipstream.train.svg_chart import Line, Points, chart, palette, smoothed
from slipstream.train.trackers import read_lines

POSITION = re.compile(r"(.+)_(\d+)")
ACCEPT_LENGTH = "eval_accept_length"
TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    ACCEPT_LENGTH: "Accept length on held-out answers",
    "eval_accept_rate": "Accept rate by position, held out: share of rounds",
    "accept_rate": "Agreement with the target's best token by step, training",
    "tokens_per_second": "Throughput: supervised tokens per second",
    "grad_norm": "Gradient norm before clipping",
    "skipped_steps": "Steps skipped because their gradient was not finite",
}
NOT_DRAWN = {"step", "tokens"}
SHOWN_ABOVE = {"step", "tokens", "best_step", "best_accept_length", "metrics", "argv"}
MAX_SAMPLES = 8
START = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Options of `slipstream report`."""

    run: str = ""
    """Output folder of a training run; may also stand first, without a flag."""
    output: str | None = None
    """HTML file to write. Default: report.html in that folder."""

    def __post_init__(self) -> None:
        if not self.run:
            raise ValueError("run is empty; name the output folder of a training run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str  # of the folder
    draft: Mapping[str, Any]  # config.json of the newest checkpoint; empty before the first one
    records: list[dict[str, Any]]  # one per optimizer step
    samples: list[tuple[int, Sample]]  # by rising step
    options: Mapping[str, Any]  # dotted names; empty before the first checkpoint
    provenance: Mapping[str, Any]  # run.json; empty before the first checkpoint

    @property
    def title(self) -> str:
        """What was trained for which target; the folder's name before the first checkpoint."""
        if not self.draft:
            return self.name
        target = str(self.draft.get("target", "")).rstrip("/")
        name = Path(target).name if Path(target).is_absolute() else target  # a hub id keeps its owner
        return f"{str(self.draft['drafter']).upper()} draft for {name}"

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation with the longest accept length, the first of equals."""
        evaluated = [record for record in self.records if ACCEPT_LENGTH in record]
        return max(evaluated, key=lambda record: record[ACCEPT_LENGTH], default=None)

    def points(self, name: str) -> Points:
        return [(record["step"], record[name]) for record in self.records if name in record]


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words[0] = f"--run={words[0]}"
    prog = "slipstream report"
    config = parse(ReportConfig, words, prog=prog, description="Draw a training run as an HTML page.")
    try:
        print(write_report(config))
    except (ValueError, OSError) as error:
        raise SystemExit(f"{prog}: error: {error}") from error


def write_report(config: ReportConfig) -> Path:
    """Writes the page and returns its path. Raises ValueError for a folder without a training run."""
    path = Path(config.output) if config.output else Path(config.run) / "report.html"
    check_output_file(str(path), is_report, "a report of a training run", {}, overwrite=True)
    page = render(load_run(Path(config.run)))
    with atomic_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(START)) == START.encode()


def load_run(folder: Path) -> Run:
    """Raises ValueError where there is no metrics.jsonl, or none with a whole line."""
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
    """Metrics to draw, those with a title first; accept_rate_0, accept_rate_1 and so on share a chart."""
    names = {name for record in run.records for name, value in record.items() if isinstance(value, int | float)}
    grouped: dict[str, list[str]] = {}
    for name in sorted(names - NOT_DRAWN, key=_by_position):
        match = POSITION.fullmatch(name)
        grouped.setdefault(match[1] if match else name, []).append(name)
    order = list(TITLES)
    known = sorted(grouped.keys() & TITLES.keys(), key=order.index)
    for family in [*known, *sorted(grouped.keys() - TITLES.keys())]:
        yield family, grouped[family]


def chart_of(run: Run, family: str, names: Sequence[str]) -> str:
    title, is_evaluated = TITLES.get(family, family), family.startswith("eval_")
    lines: list[Line] = []
    for name, color in zip(names, palette(len(names)), strict=True):
        points = run.points(name)
        label = "" if name == family else f"{'position' if is_evaluated else 'step'} {name.removeprefix(f'{family}_')}"
        if is_evaluated or family == "lr":
            lines.append(Line(points=points, color=color, name=label, has_dots=is_evaluated))
            continue
        if len(names) == 1:
            lines.append(Line(points=points, color=color, is_faint=True))
        lines.append(Line(points=smoothed(points), color=color, name=label))
    best = run.best if family == ACCEPT_LENGTH else None
    marked = None if best is None else (best["step"], best[ACCEPT_LENGTH], f"best: {best[ACCEPT_LENGTH]:.3f}")
    return chart(title, lines, run.records[-1]["step"], is_log=family == "loss", marked=marked)


def tiles(run: Run) -> str:
    last, best = run.records[-1], run.best
    rates = sorted(rate for _, rate in run.points("tokens_per_second"))
    figures = {"steps": f"{last['step']:,}", "supervised tokens": f"{last.get('tokens', 0):,}"}
    if best is not None:
        figures = {f"best accept length, step {best['step']:,}": f"{best[ACCEPT_LENGTH]:.3f}"} | figures
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
    shown = [sample for step, sample in run.samples if step == newest][:MAX_SAMPLES]
    articles = [
        f"<article><p class=prompt>{escape(sample.prompt)}</p><p>{sample.html()}</p>"
        f"<p class=share>{sample.accepted_share:.0%} of the text drafted</p></article>"
        for sample in shown
    ]
    legend = "<mark>Marked</mark>: drafted and accepted; the rest is the target's own."
    return f"<p>Step {newest:,}. {legend}</p>{''.join(articles)}"


def table(values: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}<td>{escape(str(value))}" for name, value in values.items())
    return f"<table>{rows}</table>" if rows else ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _by_position(name: str) -> tuple[str, int]:
    match = POSITION.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, -1)


if __name__ == "__main__":
    main()
