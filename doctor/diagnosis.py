"""Finds the first stage at which a draft's files do not mean what they are read as, and what that costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from tqdm import tqdm

from slipstream.doctor.mtp import head_readings
from slipstream.doctor.readings import (
    STAGES,
    Case,
    Reading,
    anchor_fields,
    convention,
    readings,
    repairs,
    with_layers,
    without_flag,
)
from slipstream.doctor.replay import Replay, Score, Subject
from slipstream.models.drafts.eagle3 import FLAG_TENSORS, FLAGS

LEAST_GAIN = 1.03  # gain of accept length from which another reading is taken to be the right one
CERTAIN = 1.01  # the gain's 95 % interval must lie above it
ALIKE = 0.98  # share of the best gain: among readings that gain as much, the earliest stage's best is named
MOST_CAUSES = 3
FEW = 3  # batches by which readings are compared; the best one is confirmed by all
EARLY = 2  # steps of a chain: the first, and one that reads the draft's own state; training takes both
RISK = 0.97  # share of the accept length below which another way to read the files is called a risk

Kind = Literal["cause", "risk", "note"]
KINDS = get_args(Kind)
SOUND_LENGTH = 1.5  # tokens a round, below which a draft whose files are right is said to know little


@dataclass(frozen=True, slots=True)
class Finding:
    """cause: what is wrong; risk: read rightly here, but not by servers that read one field alone; note: neither."""

    kind: Kind
    stage: str
    name: str
    cause: str
    remedy: str
    before: float | None = None  # accept length as the files are read, for a risk as others may; None: refused
    after: float | None = None  # accept length after the remedy, applied in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`refusal`: why the files cannot be read as they are; empty: they can."""

    findings: tuple[Finding, ...]
    tried: tuple[tuple[str, str, float], ...]  # stage, reading, accept length
    refusal: str = ""
    as_read: Score | None = None
    mended: Score | None = None  # with every cause mended; as read where there is none
    subject: Subject | None = None  # as it was read for `mended`


def diagnose(subject: Subject, replay: Replay, path: Path) -> Diagnosis:
    """`path`: the draft's folder."""
    tried: list[tuple[str, str, float]] = []
    refusal = ""
    as_read = None
    try:
        as_read = replay.score(subject)
    except ValueError as error:
        refusal = str(error)
    causes: list[Finding] = []
    score = as_read
    while len(causes) < MOST_CAUSES:
        readings_tried: list[tuple[str, str, float]] = []
        best = best_reading(subject, score, replay, path, readings_tried)
        suffix = f" (after: {causes[-1].name})" if causes else ""
        tried += [(stage, name + suffix, length) for stage, name, length in readings_tried]
        if best is None:
            break
        reading, best_score = best
        before = None if score is None else score.accept_length
        causes.append(_finding("cause", reading, before, best_score.accept_length))
        subject = reading.subject
        score = best_score
    if score is None:
        causes.append(
            Finding(
                "cause",
                "files",
                "files that cannot be read",
                refusal,
                "do as this says; none of the other readings known here can be loaded either",
            )
        )
        return Diagnosis(findings=tuple(causes), tried=tuple(tried), refusal=refusal, subject=subject)
    risks = [*inherited(subject, score), *find_risks(subject, score, replay)]
    return Diagnosis(
        findings=(*causes, *risks),
        tried=tuple(tried),
        refusal=refusal,
        as_read=as_read,
        mended=score,
        subject=subject,
    )


def best_reading(
    subject: Subject, score: Score | None, replay: Replay, path: Path, tried: list[tuple[str, str, float]]
) -> tuple[Reading, Score] | None:
    """The reading that is accepted better than `score`, or at all; None if there is none."""
    target = replay.target.model
    candidates = list(repairs(subject, target, path, score is None))
    if score is not None:
        case = Case(subject, replay.build(subject), target)
        candidates += [*readings(case), *head_readings(case)]
    quick = None if score is None else replay.score(subject, FEW)
    better: list[tuple[float, Reading]] = []
    for reading in tqdm(candidates, desc="other readings", unit="reading", leave=False):
        try:
            other = replay.score(reading.subject, FEW)
        except (ValueError, RuntimeError, KeyError, IndexError):  # the files cannot mean this
            continue
        tried.append((reading.stage, reading.name, other.accept_length))
        gain, low = (other.accept_length, 1.0) if quick is None else other.ratio(quick)
        if quick is None or (gain >= LEAST_GAIN and low > 1):
            better.append((gain, reading))
    while better:
        best_gain = max(gain for gain, _ in better)
        near = [(STAGES.index(reading.stage), -gain, reading) for gain, reading in better if gain >= ALIKE * best_gain]
        first = min(near, key=lambda candidate: candidate[:2])[2]
        full_score = replay.score(first.subject)
        if score is None or (is_better(full_score, score) and is_better_early(first, subject, replay)):
            return first, full_score
        better = [candidate for candidate in better if candidate[1] is not first]
    return None


def is_better(other: Score, score: Score) -> bool:
    gain, low = other.ratio(score)
    return gain >= LEAST_GAIN and low > CERTAIN


def is_better_early(reading: Reading, subject: Subject, replay: Replay) -> bool:
    """Whether the first steps of a chain are better, too. Steps beyond those that training took may gain by a reading
    that it did not mean, such as one that keeps states from growing."""
    if "dflash" in (subject.family, reading.subject.family):
        return True  # a block is drafted in one step
    _, low = replay.score(reading.subject, depth=EARLY).ratio(replay.score(subject, depth=EARLY))
    return low > 1


def inherited(subject: Subject, score: Score) -> Iterator[Finding]:
    """A quantisation that config.json names and the weights do not have. It is ignored here; servers that follow it
    read 16-bit weights as codes, and no drafted token is accepted."""
    if "quantization_config" in subject.files.values:
        yield Finding(
            "cause",
            "files",
            "a quantization_config without quantised weights",
            "config.json has a quantization_config, the target's, but the draft's weights are of 16 bits: "
            "servers that follow it read them as codes",
            "delete quantization_config from the draft's config.json",
            after=score.accept_length,
        )


def find_risks(subject: Subject, score: Score, replay: Replay) -> Iterator[Finding]:
    """Finds the readings that other servers may choose, and the accept lengths that they then have."""
    for reading in careless(subject, replay):
        try:
            other = replay.score(reading.subject).accept_length
        except (ValueError, RuntimeError):
            other = None
        if other is None or other < RISK * score.accept_length:
            yield _finding("risk", reading, other, score.accept_length)


def careless(subject: Subject, replay: Replay) -> Iterator[Reading]:
    """Readings of servers that are known to misread what these files leave out or say in another place."""
    values = subject.files.values
    target = replay.target.model.config
    config: Any = replay.build(subject).config
    limit = values.get("max_position_embeddings") or target.max_position_embeddings
    if limit < target.max_position_embeddings:
        yield Reading(
            "positions",
            f"{limit} positions",
            f"max_position_embeddings is {limit} in the draft and {target.max_position_embeddings} in its target; "
            "servers that size the draft's rotary embedding by it draft wrongly beyond",
            f"write max_position_embeddings {target.max_position_embeddings} in the draft's config.json",
            replace(subject, most_positions=limit),
        )
    if subject.family == "eagle3":
        yield from _careless_flags(subject)
        if not _names_layers(values) and config.has_fc and "drafter" not in values:
            guess = (2, target.num_layers // 2, target.num_layers - 3)
            if guess != config.aux_layers and len(guess) == len(config.aux_layers) and min(guess) >= 0:
                yield Reading(
                    "target's states",
                    f"states {list(guess)}",
                    "config.json does not name the target's states, and servers guess others than it was trained on",
                    f"name the layer outputs {list(config.aux_layers)} in config.json",
                    with_layers(subject, guess),
                )
    if subject.family == "dflash" and not anchor_fields(subject) and "drafter" not in values:
        value = str(config.sample_from_anchor).lower()
        yield replace(
            convention(subject, from_anchor=not config.sample_from_anchor),
            cause="config.json does not say whether the anchor's slot drafts a token, and servers differ",
            remedy=f"write sample_from_anchor {value} in config.json",
        )


def _careless_flags(subject: Subject) -> Iterator[Reading]:
    values = subject.files.values
    eagle = subject.section("eagle_config")
    for flag in FLAGS:
        tensor = FLAG_TENSORS.get(flag)
        outer = values.get(flag)
        inner = eagle.get(flag)
        has_tensor = tensor is not None and subject.tensor(tensor) is not None
        if outer or not (inner or has_tensor):
            continue
        place = "stands in eagle_config alone" if inner else f"is missing, though the files have {tensor}"
        dropped_tensors = {
            name: None
            for name in subject.files.tensors
            if tensor is not None and ".".join(tensor.split(".")[:1]) in name.split(".")
        }
        dropped = without_flag(subject, flag).with_tensors(**dropped_tensors)
        yield Reading(
            "fc and norms",
            f"without {flag}",
            f"{flag} {place}: servers that read the top level of config.json leave it out",
            f"write {flag} true at the top level of config.json",
            dropped,
        )


def _names_layers(values: Any) -> bool:
    name = "eagle_aux_hidden_state_layer_ids"
    return bool(values.get(name) or (values.get("eagle_config") or {}).get(name))


def _finding(kind: Kind, reading: Reading, before: float | None, after: float | None) -> Finding:
    return Finding(
        kind,
        reading.stage,
        reading.name,
        reading.cause,
        reading.remedy,
        before=before,
        after=after,
    )


def first_cause(findings: Sequence[Finding]) -> Finding | None:
    return next((finding for finding in findings if finding.kind == "cause"), None)
