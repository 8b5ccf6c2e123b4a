"""Reads the acceptance alarm of a running server, and names the likely cause: `slipstream doctor --live URL`.

The server's /metrics say which requests are accepted less than their record, and facts of draft and target. A cause is
likely if a fact explains the alarm, or if requests that have one property fell and those without it did not.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.serve.contexts import BOUNDS, CLASSES
from slipstream.serve.load import Client

SAMPLE = re.compile(r"slipstream_(\w+?)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="([^"]*)"')
FALLEN = 0.85  # share of the record's rate below which a category may be the cause of an alarm
SOUND = 0.93  # share from which on it is not
LEAST_SEGMENTS = 32
NEW_PROMPTS = 0.3  # share of chats with new beginnings or ends that speaks for a new template
CONTEXT = "context "
FIGURES = {  # of a category -> their metrics
    **{"evidence": "evidence", "segments": "segments", "rate": "first_rate", "record_rate": "record_first_rate"},
    **{"length": "recent_length", "record_length": "record_length"},
}

Facts = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """A chart of the server. `clients`: one or several during an alarm, else empty; `evidence`: 1 is an alarm."""

    name: str
    record: str
    clients: str
    evidence: float
    segments: float
    rate: float
    record_rate: float
    length: float
    record_length: float

    @property
    def share(self) -> float:
        return self.rate / self.record_rate if self.record_rate else 1.0


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveReport:
    """`causes`: the likeliest first; empty without an alarm."""

    url: str
    model: str
    facts: Facts
    new_prompts: float
    categories: tuple[Category, ...]
    causes: tuple[Cause, ...]

    @property
    def is_wrong(self) -> bool:
        return any(category.clients for category in self.categories)


def examine_live(url: str, api_key: str | None = None) -> LiveReport:
    """Raises ValueError for a server that does not answer, or has no acceptance alarm."""

    async def read() -> tuple[str, str]:
        async with Client(url, connections=1, api_key=api_key) as client:
            text = await client.read("/metrics")
            if text is None:
                raise ValueError(f"{client.root}/metrics gives nothing; ask the server itself, not a proxy before it")
            return client.model or "", text

    try:
        model, text = asyncio.run(read())
    except ValueError as error:
        raise ValueError(f"live is {url}: {error}") from error
    return report_of(url.rstrip("/").removesuffix("/v1"), model, text)


def report_of(url: str, model: str, text: str) -> LiveReport:
    """Reads a text of /metrics. Raises ValueError if it is not that of a server with an acceptance alarm."""
    try:
        facts, new_prompts, categories = read_alarm(text)
    except (LookupError, ValueError) as error:
        raise ValueError(
            f"live is {url}, whose /metrics have no acceptance alarm, or that of another version; name a server of "
            "Slipstream"
        ) from error
    return LiveReport(
        url=url,
        model=model,
        facts=facts,
        new_prompts=new_prompts,
        categories=categories,
        causes=tuple(find_causes(facts, new_prompts, categories)),
    )


def read_alarm(text: str) -> tuple[Facts, float, tuple[Category, ...]]:
    """Returns the facts of draft and target, the share of new prompts and the categories in a text of /metrics. Raises
    LookupError or ValueError for one that lacks any."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for match in map(SAMPLE.fullmatch, text.splitlines()):
        if match is not None and match[1].startswith(("accept_", "draft_info")):
            samples.setdefault(match[1], []).append((dict(LABEL.findall(match[2] or "")), float(match[3])))

    def values(name: str) -> dict[tuple[str, str], float]:
        return {(labels["category"], labels["record"]): value for labels, value in samples.get(f"accept_{name}", ())}

    alarms = {
        (labels["category"], labels["record"]): labels["clients"]
        for labels, value in samples.get("accept_alarm", ())
        if value
    }
    columns = {field: values(name) for field, name in FIGURES.items()}
    categories = tuple(
        Category(
            name=chart[0],
            record=chart[1],
            clients=alarms.get(chart, ""),
            **{field: column[chart] for field, column in columns.items()},
        )
        for chart in columns["evidence"]
    )
    facts = next((labels for labels, _ in samples.get("draft_info", ())), {})
    return facts, samples["accept_new_prompts"][0][1], categories


def find_causes(facts: Facts, new_prompts: float, categories: Sequence[Category]) -> list[Cause]:
    """Returns the likely causes of the alarms: facts first, then what has fallen alone, then the draft itself."""
    alarmed = [category for category in categories if category.clients]
    if not alarmed:
        return []
    causes = [*fact_causes(facts, new_prompts), *category_causes(facts, categories)]
    if all(category.clients == "one" for category in alarmed):
        causes.append(
            Cause(
                "one client",
                "the requests of one client alone are accepted less; others' are as before",
                "nothing is broken if that client asks for other texts than before",
            )
        )
    if not causes:
        causes.append(
            Cause(
                "the draft",
                "everything fell, and neither target, template nor kind of request explains it",
                "run `slipstream doctor --draft DRAFT --target TARGET --endpoint URL`, which replays the draft; "
                "if its files are right, texts have changed: train it on answers to requests of now",
            )
        )
    return causes


def fact_causes(facts: Facts, new_prompts: float) -> Iterator[Cause]:
    changed = facts.get("changed", "").split()
    if facts.get("trained_target") == "other" or "target" in changed:
        since = "the record began" if "target" in changed else "the draft was trained"
        yield Cause(
            "target changed",
            f"the target's weights (fingerprint {facts.get('target')}) are others than when {since}",
            "serve the target that the draft was trained for, or train the draft on for this one (--init-from)",
        )
    if "draft" in changed:
        yield Cause(
            "draft changed",
            f"the draft's files (fingerprint {facts.get('draft')}) are others than when the record began",
            "serve the earlier draft, or compare both by `slipstream accept`",
        )
    if new_prompts >= NEW_PROMPTS:
        yield Cause(
            "template changed",
            f"{100 * new_prompts:.0f} % of the last chats begin or end with tokens that no chat had there before",
            "serve the chat template, date and system prompt of the training, or train the draft with the new",
        )
    formats = [facts.get(name, "") for name in ("quantization", "kv_cache")]
    is_new = not {"quantization", "kv_cache"}.isdisjoint(changed)
    if is_new or any(name not in ("", "none", "auto") for name in formats):
        since = ", which is new" if is_new else ""
        yield Cause(
            "quantised target",
            f"the target's weights are {formats[0]} and its KV cache is {formats[1]}{since}: the draft reads other "
            "states than in training",
            "compare by `slipstream accept` with and without, or train the draft on this target's states",
        )


def category_causes(facts: Facts, categories: Sequence[Category]) -> Iterator[Cause]:
    fallen = {chart.name for chart in categories if chart.clients and chart.share < FALLEN}
    stable = (chart for chart in categories if not chart.clients and chart.segments >= LEAST_SEGMENTS)
    sound = {chart.name for chart in stable if chart.share >= SOUND} - fallen
    long = [name for name in CLASSES if CONTEXT + name in fallen]
    short = [name for name in CLASSES if CONTEXT + name in sound]
    trained = int(facts.get("trained_length") or 0)
    starts = dict(zip(CLASSES, (0, *BOUNDS), strict=True))
    is_beyond = bool(trained and long) and starts[long[0]] >= trained
    if long and (is_beyond or (short and CLASSES.index(short[-1]) < CLASSES.index(long[0]))):
        yield Cause(
            "context longer than trained",
            f"contexts of {', '.join(long)} tokens fell"
            + (f", {', '.join(short)} did not" if short else "")
            + (f"; the draft was trained on texts of up to {trained:,} tokens" if trained else ""),
            "train it on longer texts (data.max_length); leave drafter.window auto",
        )
    if "sampled" in fallen and "greedy" in sound:
        yield Cause(
            "temperature",
            "sampled requests fell, greedy ones did not",
            "see whether clients raised the temperature; a draft trained on sampled answers loses less",
        )
    kinds = [name for name in ("tools", "reasoning", "grammar", "penalties", "completion", "chat") if name in fallen]
    single = [name for name in kinds if sound - {name} and "all" not in fallen]
    if single:
        yield Cause(
            "a category of its own",
            f"requests with {', '.join(single)} fell, others did not",
            "train the draft on answers to such requests, too",
        )


def live_text(report: LiveReport) -> str:
    """Returns one page."""
    facts = ", ".join(f"{name} {value}" for name, value in report.facts.items() if value)
    lines = [f"{report.url}: model {report.model}", f"{facts}", ""]
    alarmed = [category for category in report.categories if category.clients]
    if not report.categories:
        lines.append("No request has a record yet: a kind of request has one after 12 drafted requests.")
    elif not alarmed:
        lines.append("No alarm: drafts are accepted as their record says.")
    for category in alarmed:
        record = "the last day" if category.record == "day" else "training"
        whose = "one client" if category.clients == "one" else "several clients, or the only one"
        lines.append(
            f"ALARM  {category.name} ({whose}): less than in {record}: first drafted token "
            f"{100 * category.rate:.0f} %, {100 * category.record_rate:.0f} % by the record; accept length "
            f"{category.length:.2f}, {category.record_length:.2f}"
        )
    for place, cause in enumerate(report.causes):
        lines += ["", f"{'LIKELY' if place == 0 else 'OR'}  {cause.name}", f"  why     {cause.why}"]
        lines.append(f"  remedy  {cause.remedy}")
    if report.categories:
        lines += [
            "",
            f"{'requests':<16} {'record':<9} {'first token':>11} {'by record':>9} {'length':>7} {'evidence':>9}",
        ]
    lines += [
        f"{category.name:<16} {category.record:<9} {100 * category.rate:>9.1f} % {100 * category.record_rate:>7.1f} % "
        f"{category.length:>7.2f} {category.evidence:>9.2f}"
        for category in report.categories
    ]
    return "\n".join(lines)
