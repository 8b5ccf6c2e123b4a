"""Examines a draft: replays conversations through trainer and server, and finds the first stage that differs.

Text, tokens, the target's states, the draft's network as its files are read: where another reading of the files is
accepted better, it names the first stage that differs, what that costs, and the remedy.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.data_tools.target_tokenizer import TargetTokenizer, load_target_tokenizer
from slipstream.doctor.answers import open_engine
from slipstream.doctor.diagnosis import SOUND_LENGTH, Diagnosis, Finding, diagnose
from slipstream.doctor.endpoint import Endpoint, ask_endpoint, check_endpoint
from slipstream.doctor.examination import Examination
from slipstream.doctor.mtp import facts
from slipstream.doctor.options import QUESTIONS, DoctorConfig
from slipstream.doctor.replay import FAMILIES, Replay, Subject
from slipstream.doctor.text_causes import (
    endpoint_findings,
    loops,
    off_policy,
    other_prompts,
    paired,
    parity,
    repetition,
)
from slipstream.doctor.texts import Answered, Conversation, Renderer, batches_of, read_conversations, usable
from slipstream.models.drafts.base import Choices, DraftFiles
from slipstream.models.drafts.mtp import MTP, MTPConfig, check_files, load_mtp
from slipstream.models.drafts.source import source_of
from slipstream.models.files.checkpoint import (
    read_draft_tensors,
    read_json,
    resolve,
    tokenizer_hash,
    weights_fingerprint,
)
from slipstream.models.files.text import read_key
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.options import EngineConfig, find_target

VARIANT_QUESTIONS = 24  # questions for each other way to render prompts
LONGEST = 1 << 20  # tokens of a text


def examine(config: DoctorConfig) -> Examination:
    """Raises ValueError for data without questions, for a draft of an unknown kind, and for an endpoint that does not
    answer."""
    if config.endpoint is not None:
        check_endpoint(config.endpoint, read_key(config.api_key_file))
    name, folder = find_target(EngineConfig(target=config.target, draft=config.draft, revision=config.revision))
    source = source_of(config.draft, config.target)
    path = folder if source.is_in_target else resolve(config.draft)
    if source.is_in_target:
        spec = load_config(folder, config.trust_remote_code)
        MTPConfig.of(spec, folder)  # raises ValueError for a target without a head
        check_files(spec, folder)
    config = replace(config, target=str(folder), data=config.data or (str(QUESTIONS),))
    if config.data == (str(QUESTIONS),):
        config = replace(config, where=(*config.where, "split=heldout"))
    tokenizer = load_target_tokenizer(config)
    renderer = Renderer(tokenizer, config.date, config.template)
    conversations = read_conversations(config, config.limit)
    family = family_of(config.draft, path)
    texts = read_texts(config, path, family, renderer, conversations)
    target = load(config, folder)
    if source.is_in_target:
        check_shared(load_mtp(target))

    depth = 63 if family == "dflash" else config.depth  # a block draft's depth is that of its block

    def replay(answered: Sequence[Answered]) -> Replay:
        return Replay(target, path, batches_of(answered, LONGEST), depth)

    files = DraftFiles({}, {})
    if not source.is_in_target:
        files = DraftFiles(read_json(path / "config.json"), read_draft_tensors(path))
    subject = Subject(family=family, files=files, choices=Choices.of(config), in_target=source.is_in_target)
    diagnosis = diagnose(subject, replay(texts.answered), path)
    notes = [
        *provenance(subject, folder, tokenizer),
        *parity(diagnosis, texts.served, texts.refusal),
        *little_training(path, diagnosis),
        *repetition(texts.answered),
        *(() if texts.endpoint is None else endpoint_findings(diagnosis, texts.endpoint)),
    ]
    examination = Examination(
        draft=config.draft,
        target=name,
        family=family,
        diagnosis=diagnosis,
        answered=texts.answered,
        served=texts.served,
        notes=tuple(notes),
        endpoint=texts.endpoint,
        facts=head_facts(diagnosis, replay(texts.answered)),
    )
    data_answers = usable([answer for answer in map(renderer.given, conversations) if answer is not None])
    return compare_texts(examination, texts.variants, data_answers, replay)


def check_shared(module: MTP) -> None:
    """Raises ValueError for a head that does not share its target's embedding and output head."""
    if module.embed_tokens is not None or module.lm_head is not None:
        raise ValueError(
            "draft is 'mtp', but this MTP head has an embedding or an output head of its own, which the doctor does "
            "not replay; `slipstream accept --draft mtp` measures it"
        )


def head_facts(diagnosis: Diagnosis, replay: Replay) -> tuple[tuple[str, str], ...]:
    """Describes an MTP head as it was read for `mended`; empty for other drafts, and for one that cannot be read."""
    subject = diagnosis.subject
    if subject is None or subject.family != "mtp" or diagnosis.mended is None:
        return ()
    module = replay.build(subject)
    assert isinstance(module, MTP)
    return tuple(facts(module, replay.target.model, in_target=subject.in_target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The target's answers, by the engine here and by the endpoint."""

    answered: tuple[Answered, ...]
    served: float | None
    refusal: str
    variants: Mapping[str, list[Answered]]
    endpoint: Endpoint | None


def read_texts(
    config: DoctorConfig, path: Path, family: str, renderer: Renderer, conversations: Sequence[Conversation]
) -> Texts:
    options: dict[str, Any] = {"device": config.device} if config.device else {}
    options["trust_remote_code"] = config.trust_remote_code
    with open_engine(
        target=Path(config.target),
        draft="mtp" if source_of(config.draft).is_in_target else path,
        family=family,
        choices=Choices.of(config),
        depth=config.depth,
        max_tokens=config.max_tokens,
        **options,
    ) as engine:
        answered, served = engine.answer(list(map(renderer.prompt, conversations)), conversations)
        few = conversations[:VARIANT_QUESTIONS]
        variants = {}
        for variant in renderer.variants(few[0]):
            prompts = [renderer.prompt(conversation, variant) for conversation in few]
            variants[variant.name] = engine.answer(prompts, few)[0]
        endpoint = None
        if config.endpoint is not None:
            texts = [engine.text(answer) for answer in answered]
            endpoint = ask_endpoint(config.endpoint, answered, texts, config.max_tokens, read_key(config.api_key_file))
    return Texts(answered=tuple(answered), served=served, refusal=engine.refusal, variants=variants, endpoint=endpoint)


def compare_texts(
    examination: Examination,
    variants: Mapping[str, Sequence[Answered]],
    data_answers: Sequence[Answered],
    replay: Callable[[Sequence[Answered]], Replay],
) -> Examination:
    """Adds the findings of other prompts and of the data's own answers."""
    score = examination.diagnosis.mended
    subject = examination.diagnosis.subject
    answered = examination.answered
    if score is None or subject is None:
        return examination
    data_score = None
    notes = list(examination.notes)
    scores = {name: replay(answers).score(subject) for name, answers in variants.items()}
    pairs = {
        name: pair
        for name, answers in variants.items()
        if not loops(answers) and (pair := paired(answered, score, answers, scores[name])) is not None
    }
    if data_answers:
        data_score = replay(data_answers).score(subject)
        pair = paired(answered, score, data_answers, data_score)
        notes += off_policy(*pair) if pair is not None and not loops(answered) and not loops(data_answers) else ()
    notes += other_prompts(pairs) if not loops(answered) else ()
    lengths = tuple((name, variant_score.accept_length) for name, variant_score in scores.items())
    return replace(examination, notes=tuple(notes), data_score=data_score, variants=lengths)


def family_of(draft: str, path: Path) -> str:
    """Returns the draft's family by config.json or, where that names none that is known, by the tensors."""
    try:
        name = source_of(draft).drafter
    except ValueError:
        names = [key.removeprefix("model.") for key in read_draft_tensors(path)]
        name = "eagle3" if any(key.startswith("midlayer.") for key in names) else "dflash"
    if name not in FAMILIES:
        raise ValueError(f"draft {draft} is {name!r}; the doctor knows {', '.join(FAMILIES)}")
    return name


def load(config: DoctorConfig, folder: Path) -> Target:
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    spec = load_config(folder, config.trust_remote_code)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = load_target(folder, spec, dtype, device, config.trust_remote_code)
    target.tokenizer = load_tokenizer(folder, config.trust_remote_code)
    return target


def provenance(subject: Subject, folder: Path, tokenizer: TargetTokenizer) -> list[Finding]:
    """Whether the draft was trained for this target, where its config says."""
    values = subject.files.values
    findings = []
    trained_for = values.get("target_fingerprint")
    fingerprint = weights_fingerprint(folder)
    if trained_for and trained_for != fingerprint:
        findings.append(
            Finding(
                "note",
                "files",
                "other weights of the target",
                f"the draft was trained for other weights (fingerprint {trained_for[:12]}, the target's is "
                f"{fingerprint[:12]})",
                "serve the target that it was trained for, or train it on for this one (--init-from)",
            )
        )
    trained_with = values.get("tokenizer_hash")
    target_hash = tokenizer_hash(tokenizer.tokenizer)
    if trained_with and trained_with != target_hash:
        findings.append(
            Finding(
                "cause",
                "prompt text",
                "another tokenizer",
                f"the draft was trained with another tokenizer (hash {trained_with[:12]}, the target's is "
                f"{target_hash[:12]})",
                "serve the target whose tokenizer it was trained with",
            )
        )
    return findings


def little_training(path: Path, diagnosis: Diagnosis) -> list[Finding]:
    """Says how long the draft in `path` was trained, if its files are right and it is seldom accepted all the same."""
    score = diagnosis.as_read
    if score is None or diagnosis.findings or score.accept_length >= SOUND_LENGTH:
        return []
    cause = "nothing in its files explains this, so it was trained too briefly or on text of another kind"
    if (path / "run.json").exists():
        run = read_json(path / "run.json")
        if {"step", "tokens", "best_accept_length"} <= run.keys():
            cause = (
                f"its training ended after {run['step']:,} steps on {run['tokens']:,} supervised tokens, and measured "
                f"an accept length of {run['best_accept_length']:.2f} at best"
            )
    remedy = "train it longer, or on more answers of this target"
    return [Finding("note", "files", "little training", cause, remedy)]
