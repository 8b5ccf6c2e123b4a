"""The doctor's findings as a table, a page (one file that loads nothing else) and JSON."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from slipstream.doctor.diagnosis import SOUND_LENGTH, Finding, first_cause
from slipstream.doctor.examination import Examination
from slipstream.doctor.readings import STAGES
from slipstream.doctor.replay import Score
from slipstream.models.files.atomic import atomic_file, write_json
from slipstream.models.files.outputs import begins_with, check_output_file

START = "<!doctype html><html lang=en><meta charset=utf-8><meta name=generator content='slipstream doctor'>"
BOUNDS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens of context
KINDS = {"cause": "wrong", "risk": "at risk elsewhere", "note": "to know"}
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --pale: #57606a; --line: #d8dee4; --bad: #b3261e; --good: #1a7f4b;
  --warn: #9a6700; --back: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --pale: #9aa4af; --line: #30363d; --bad: #ff8a80;
  --good: #57d08f; --warn: #e3b341; --back: #0d1117 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 940px;
  margin: 28px auto; padding: 0 18px }
h1 { font-size: 24px; margin: 0 } h2 { font-size: 17px; margin: 30px 0 8px }
.verdict { font-size: 18px; margin: 14px 0 } .cause { color: var(--bad) } .good { color: var(--good) }
.risk { color: var(--warn) } .pale { color: var(--pale) }
ol.chain { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 6px; margin: 12px 0 }
ol.chain li { border: 1px solid var(--line); border-radius: 5px; padding: 3px 9px; font-size: 13px }
ol.chain li.cause { border-color: var(--bad); font-weight: 600 } ol.chain li.risk { border-color: var(--warn) }
article { border: 1px solid var(--line); border-left-width: 4px; border-radius: 5px; padding: 8px 14px; margin: 10px 0 }
article.cause { border-left-color: var(--bad) } article.risk { border-left-color: var(--warn) }
article.cause, article.risk { color: inherit }
article p { margin: 5px 0 } article h3 { margin: 2px 0; font-size: 15px }
table { border-collapse: collapse; font-size: 14px } th, td { text-align: left; padding: 3px 18px 3px 0 }
th { color: var(--pale); font-weight: 500 } td.number { text-align: right; font-variant-numeric: tabular-nums }
"""


def verdict(examination: Examination) -> str:
    """One sentence."""
    diagnosis = examination.diagnosis
    cause = first_cause(examination.findings)
    if cause is None:
        assert diagnosis.as_read is not None
        length = diagnosis.as_read.accept_length
        if length < SOUND_LENGTH:
            return f"The files are read as they are meant, but the draft is seldom right: accept length {length:.2f}."
        return f"Nothing is wrong: accept length {length:.2f}."
    if diagnosis.mended is None:
        return f"The draft cannot be read: {diagnosis.refusal}"
    before = cause.before
    after = cause.after
    if cause in diagnosis.findings:  # there may be several, each of which was mended after the one before
        before = None if diagnosis.as_read is None else diagnosis.as_read.accept_length
        after = diagnosis.mended.accept_length
    gain = "" if after is None else f": accept length {_length(before)} as it is, {after:.2f} mended"
    return f"First stage that differs: {cause.stage} ({cause.name}){gain}."


def _length(value: float | None) -> str:
    return "none (refused)" if value is None else f"{value:.2f}"


def print_report(examination: Examination) -> None:
    print(f"draft {examination.draft} ({examination.family}), target {examination.target}, ", end="")
    print(f"{len(examination.answered)} answers of the target\n\n{verdict(examination)}")
    for finding in examination.findings:
        print(f"\n{finding.kind.upper()}  {finding.stage}: {finding.name}")
        print(f"  why     {finding.cause}")
        print(f"  remedy  {finding.remedy}")
        if finding.after is not None:
            print(f"  accept length {_length(finding.before)} -> {finding.after:.2f}")
    for title, rows in tables(examination):
        print(f"\n{title}")
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            print(f"  {name:<{width}}  {value}")


def tables(examination: Examination) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Titles, and rows of names and values."""
    if examination.facts:
        yield "The MTP head", list(examination.facts)
    score = examination.diagnosis.mended
    scores = [("as the files are read", examination.diagnosis.as_read), ("mended", score)]
    rows = [(name, f"{reading.accept_length:.3f}") for name, reading in scores if reading is not None]
    if examination.served is not None:
        rows.append(("served here", f"{examination.served:.3f}"))
    if examination.endpoint is not None:
        endpoint = examination.endpoint
        figures = "not told" if endpoint.accept_length is None else f"{endpoint.accept_length:.3f}"
        figures += "" if endpoint.depth is None else f", of {endpoint.depth:.1f} drafted tokens a round"
        doubt = "" if endpoint.is_tested else " (read as its documentation says, never tried with a real one)"
        rows.append((f"{endpoint.server} at {endpoint.url}", figures + doubt))
    if examination.data_score is not None:
        rows.append(("on the conversations' own answers", f"{examination.data_score.accept_length:.3f}"))
    rows += [(f"prompts with {name}", f"{length:.3f}") for name, length in examination.variants]
    if rows:
        yield "Accept length", rows
    if score is None:
        return
    yield "Accepted, by drafted token", _places(score)
    categories = [answer.conversation.category or "all" for answer in examination.answered]
    languages = [answer.conversation.language for answer in examination.answered]
    for title, groups in (("By category", categories), ("By script", languages)):
        lengths_of_groups = score.by_group(groups)
        if len(lengths_of_groups) > 1:
            yield title, [(name, f"{length:.2f}") for name, length in sorted(lengths_of_groups.items())]
    yield "By context, tokens a round", [(name, f"{x:.2f}") for name, x in score.by_context(BOUNDS).items()]


def _places(score: Score) -> list[tuple[str, str]]:
    return [(f"token {place}", f"{100 * share:.1f} % of rounds") for place, share in enumerate(score.by_position, 1)]


def check_report(path: Path) -> None:
    """Raises ValueError for a file that is not an earlier page."""
    check_output_file(str(path), begins_with(START.encode()), "a page of the doctor", {}, overwrite=True)


def write_report(examination: Examination, path: Path) -> Path:
    """Writes the page, and the JSON beside it."""
    with atomic_file(path) as temporary:
        temporary.write_text(page(examination), encoding="utf-8")
    write_json(path.with_suffix(".json"), as_json(examination), indent=1)
    return path


def as_json(examination: Examination) -> dict[str, Any]:
    diagnosis = examination.diagnosis
    score = diagnosis.mended
    return {
        "draft": examination.draft,
        "target": examination.target,
        "family": examination.family,
        "is_wrong": examination.is_wrong,
        "refusal": diagnosis.refusal,
        "verdict": verdict(examination),
        "facts": dict(examination.facts),
        "findings": [asdict(finding) for finding in examination.findings],
        "accept_length": {
            "as_read": None if diagnosis.as_read is None else diagnosis.as_read.accept_length,
            "mended": None if score is None else score.accept_length,
            "served": examination.served,
            "given_answers": None if examination.data_score is None else examination.data_score.accept_length,
        },
        "endpoint": None if examination.endpoint is None else asdict(examination.endpoint),
        "by_position": [] if score is None else score.by_position,
        "tried": [{"stage": stage, "reading": name, "accept_length": x} for stage, name, x in diagnosis.tried],
        "variants": [{"prompts": name, "accept_length": length} for name, length in examination.variants],
    }


def page(examination: Examination) -> str:
    wrong = examination.is_wrong
    sections = "".join(_section(title, rows) for title, rows in tables(examination))
    return (
        f"{START}<meta name=viewport content='width=device-width'><title>Doctor: {escape(examination.draft)}</title>"
        f"<style>{STYLE}</style><h1>{escape(examination.draft)}</h1>"
        f"<p class=pale>{escape(examination.family)} draft, target {escape(examination.target)}, "
        f"{len(examination.answered)} answers of the target replayed</p>"
        f"<p class='verdict {'cause' if wrong else 'good'}'>{escape(verdict(examination))}</p>"
        f"{_chain(examination)}{''.join(map(_article, examination.findings))}{sections}"
        f"{_tried(examination)}</html>\n"
    )


def _chain(examination: Examination) -> str:
    """The stages in their order, those with findings marked."""
    kinds: dict[str, str] = {}
    for finding in examination.findings:
        kinds.setdefault(finding.stage, finding.kind)
    items = "".join(
        f"<li class='{kinds.get(stage, '')}'>{escape(stage)}{_mark(kinds.get(stage))}</li>" for stage in STAGES
    )
    return f"<ol class=chain aria-label='Stages'>{items}</ol>"


def _mark(kind: str | None) -> str:
    return "" if kind is None else f": {KINDS[kind]}"


def _article(finding: Finding) -> str:
    lengths = (
        "" if finding.after is None else f"<p>Accept length {_length(finding.before)} &rarr; {finding.after:.2f}</p>"
    )
    return (
        f"<article class={finding.kind}><h3>{escape(finding.stage)}: {escape(finding.name)} "
        f"<span class={finding.kind}>({KINDS[finding.kind]})</span></h3><p>{escape(finding.cause)}.</p>"
        f"<p><b>Remedy:</b> {escape(finding.remedy)}.</p>{lengths}</article>"
    )


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<h2>{escape(title)}</h2><table>{cells}</table>" if cells else ""


def _tried(examination: Examination) -> str:
    rows = sorted(examination.diagnosis.tried, key=lambda reading: -reading[2])
    cells = "".join(
        f"<tr><td>{escape(stage)}</td><td>{escape(name)}</td><td class=number>{length:.2f}</td></tr>"
        for stage, name, length in rows
    )
    head = "<tr><th>stage</th><th>reading</th><th>accept length</th></tr>"
    return f"<h2>Other readings of the files, over the first answers</h2><table>{head}{cells}</table>" if cells else ""
