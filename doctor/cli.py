"""Says why a draft is accepted badly: `slipstream doctor --draft DRAFT --target TARGET`.

It replays conversations through trainer and server: text, tokens, the target's states, the draft's network as its files
are read. Where another reading of the files is accepted better, it names the first stage that differs, what that costs,
and the remedy. Writes a page, prints a table, and exits with status 1 where something is wrong.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.config import run
from slipstream.data_tools.options import ConversationOptions, check_at_least
from slipstream.data_tools.target_tokenizer import TargetTokenizer, load_target_tokenizer
from slipstream.doctor.diagnosis import Diagnosis, Finding, diagnose
from slipstream.doctor.endpoint import Endpoint, read_endpoint
from slipstream.doctor.replay import FAMILIES, Replay, Score, Subject
from slipstream.doctor.report import print_report, write_report
from slipstream.doctor.texts import Answered, Conversation, Renderer, batches_of, read_conversations, usable
from slipstream.models.drafts.base import Choices, DraftFiles
from slipstream.models.files.checkpoint import (
    read_draft_tensors,
    read_json,
    resolve,
    tokenizer_hash,
    weights_fingerprint,
)
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.drafters.registry import drafter_name
from slipstream.serve.llm import LLM
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.request import SamplingParams

QUESTIONS = Path(__file__).resolve().parent.parent / "assets" / "gsm8k.jsonl.gz"
VARIANT_QUESTIONS = 24  # of each other way to render prompts
VARIANT_GAIN = 1.15  # of its accept length: texts of other prompts differ in how hard they are, too
GIVEN_GAIN = 1.15
REPEATS = 0.3  # share of an answer's pieces that repeat earlier ones, above which a text says little
PARITY = 0.03  # relative difference of simulated and served accept length that is not said
LONGEST = 1 << 20  # tokens of a text


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig(ConversationOptions):
    """Says why a draft is accepted badly, and what to do."""

    draft: str = ""
    """Draft checkpoint, of any trainer whose files can be read."""
    limit: int | None = 64
    """Conversations to replay. Without data: held-out questions of GSM8K."""
    max_tokens: int = 128
    """Tokens of the target's answers."""
    depth: int = 5
    """Tokens that a chain draft proposes in a round. A block draft proposes its block."""
    endpoint: str | None = None
    """URL of a server with this draft: its accept length is read and compared."""
    aux_layers: tuple[int, ...] | None = None
    """Layer outputs that the draft reads, where its files leave it open."""
    norm_output: bool | None = None
    """Whether an EAGLE3 draft's next step reads the state after the final norm, where its files leave it open."""
    sample_from_anchor: bool | None = None
    """Whether slot 0 of a block draft predicts a token, where its files leave it open."""
    device: str = ""
    """cuda or cpu. Default: a GPU if there is one."""
    output: str = "doctor.html"
    """Page to write; beside it, the same as JSON."""

    def __post_init__(self) -> None:
        ConversationOptions.__post_init__(self)
        if not self.draft:
            raise ValueError("draft is empty; name a draft checkpoint, as a folder or a hub id")
        check_at_least(self, 2, "max_tokens")
        check_at_least(self, 1, "depth", "limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All that the report shows."""

    draft: str
    target: str
    family: str
    diagnosis: Diagnosis
    answered: tuple[Answered, ...]
    served: float | None  # accept length of the engine here; None where the draft could not be served
    variants: tuple[tuple[str, float], ...] = ()  # other ways to render prompts, and their accept lengths
    given: Score | None = None  # on the conversations' own answers
    notes: tuple[Finding, ...] = ()
    endpoint: Endpoint | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        return (*self.diagnosis.findings, *self.notes)

    @property
    def is_wrong(self) -> bool:
        return self.diagnosis.is_wrong or any(finding.kind == "cause" for finding in self.notes)


def main(argv: Sequence[str] | None = None) -> None:
    def program(config: DoctorConfig) -> None:
        examination = examine(config)
        print_report(examination)
        print(f"\n{write_report(examination, Path(config.output))}")
        if examination.is_wrong:
            raise SystemExit(1)

    run(program, DoctorConfig, argv, "slipstream doctor")


def examine(config: DoctorConfig) -> Examination:
    path = resolve(config.draft)
    name, folder = find_target(EngineConfig(target=config.target, draft=config.draft, revision=config.revision))
    config = replace(config, target=str(folder), data=config.data or (str(QUESTIONS),))
    if config.data == (str(QUESTIONS),):
        config = replace(config, where=(*config.where, "split=heldout"))
    tokenizer = load_target_tokenizer(config)
    renderer = Renderer(tokenizer, config.date, config.template)
    conversations = read_conversations(config, config.limit or 64)
    family = family_of(config.draft, path)
    answered, served = answer(config, str(path), [renderer.prompt(one) for one in conversations], conversations)
    target = load(config, folder)
    depth = 63 if family == "dflash" else config.depth
    replay = Replay(target, path, batches_of(answered, 1 << 20), depth)
    choices = Choices.of(config)
    subject = Subject(
        family=family, files=DraftFiles(read_json(path / "config.json"), read_draft_tensors(path)), choices=choices
    )
    diagnosis = diagnose(subject, replay, path)
    examination = Examination(
        draft=config.draft,
        target=name,
        family=family,
        diagnosis=diagnosis,
        answered=tuple(answered),
        served=served,
        notes=tuple(provenance(subject, folder, tokenizer)),
        endpoint=None if config.endpoint is None else read_endpoint(config.endpoint),
    )
    return examine_texts(examination, config, renderer, target, conversations, subject)


def family_of(draft: str, path: Path) -> str:
    """By config.json; where that names none that is known, by the tensors."""
    try:
        name = drafter_name(draft)
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


def answer(
    config: DoctorConfig, draft: str, prompts: Sequence[str], conversations: Sequence[Conversation]
) -> tuple[list[Answered], float | None]:
    """The target's answers, and the accept length at which the engine here made them with `draft`; None without one, or
    where it refuses the draft."""
    options: dict[str, Any] = {"target": config.target, "grammar_drafts": False}
    options |= {"device": config.device} if config.device else {}
    try:
        llm, is_served = LLM(draft=draft, **drafting(config, draft), **options), draft != "none"
    except ValueError:
        llm, is_served = LLM(draft="none", **options), False
    try:
        encoded = [llm.encode(text) for text in prompts]
        params = SamplingParams(temperature=0.0, max_tokens=config.max_tokens)
        generations = llm.generate(encoded, params, progress=True)
    finally:
        llm.engine.close()
        del llm
        gc.collect()
    pairs = zip(encoded, generations, conversations, strict=True)
    kept = usable([Answered(prompt, generation.tokens, own) for prompt, generation, own in pairs])
    if not kept:
        raise ValueError("the target's answers have fewer than two tokens each; give other conversations")
    rounds = sum(generation.stats.rounds for generation in generations)
    emitted = sum(len(generation.tokens) - 1 for generation in generations)
    return kept, emitted / rounds if is_served and rounds else None


def drafting(config: DoctorConfig, draft: str) -> dict[str, Any]:
    """Options of an engine that verifies all that the draft proposes, as the replay does."""
    if draft == "none":
        return {}
    values = read_json(Path(draft) / "config.json")
    choices = {name: getattr(config, name) for name in ("aux_layers", "norm_output", "sample_from_anchor")}
    drafter: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    if family_of(draft, Path(draft)) != "dflash":
        return {"drafter": {**drafter, "depth": config.depth}, "width": config.depth + 1}
    size = values.get("block_size") or (values.get("dflash_config") or {}).get("block_size")
    return {"drafter": drafter} | ({"width": size + bool(values.get("sample_from_anchor"))} if size else {})


def provenance(subject: Subject, folder: Path, tokenizer: TargetTokenizer) -> list[Finding]:
    """Whether the draft was trained for this target, where its config says."""
    values, found = subject.files.values, []
    said, own = values.get("target_fingerprint"), weights_fingerprint(folder)
    if said and said != own:
        found.append(
            Finding(
                kind="note",
                stage="files",
                name="other weights of the target",
                cause=f"the draft was trained for other weights (fingerprint {said[:12]}, the target's is {own[:12]})",
                remedy="serve the target that it was trained for, or train it on for this one (--init-from)",
            )
        )
    said, own = values.get("tokenizer_hash"), tokenizer_hash(tokenizer.tokenizer)
    if said and said != own:
        found.append(
            Finding(
                kind="cause",
                stage="prompt text",
                name="another tokenizer",
                cause=f"the draft was trained with another tokenizer (hash {said[:12]}, the target's is {own[:12]})",
                remedy="serve the target whose tokenizer it was trained with",
            )
        )
    return found


def examine_texts(
    examination: Examination,
    config: DoctorConfig,
    renderer: Renderer,
    target: Target,
    conversations: Sequence[Conversation],
    subject: Subject,
) -> Examination:
    """What the texts explain: other ways to render prompts, answers that are not the target's, repetition."""
    score, path = examination.diagnosis.mended, resolve(config.draft)
    notes = [*examination.notes, *disagreement(examination)]
    repeats = sum(one.repeats for one in examination.answered) / len(examination.answered)
    if repeats > REPEATS:
        notes.append(
            Finding(
                kind="cause",
                stage="text",
                name="answers that repeat themselves",
                cause=f"{100 * repeats:.0f} % of the answers' pieces occurred before in them: the target loops on "
                "these prompts, which any draft guesses, so their accept length says nothing of real use",
                remedy="measure with conversations, rendered by the chat template, as users send them",
            )
        )
    if score is None:
        return replace(examination, notes=tuple(notes))
    mended, depth = examination.diagnosis.subject or subject, depth_of(config, examination.family)
    given = [one for one in map(renderer.given, conversations) if one is not None]
    on_given = None
    if given and config.data:
        on_given = Replay(target, path, batches_of(usable(given), LONGEST), depth).score(mended)
        if on_given.accept_length > GIVEN_GAIN * score.accept_length:
            notes.append(_off_policy(on_given, score))
    variants = tuple(score_variants(examination, config, renderer, target, conversations, mended))
    best = max(variants, key=lambda one: one[1], default=None)
    if best is not None and best[1] > VARIANT_GAIN * score.accept_length:
        notes.append(_other_prompts(best, score))
    return replace(examination, notes=tuple(notes), given=on_given, variants=variants)


def disagreement(examination: Examination) -> list[Finding]:
    """Whether trainer and server here, or the endpoint, accept otherwise."""
    as_read = examination.diagnosis.as_read
    found: list[Finding] = []
    if as_read is None:
        return found
    simulated, endpoint = as_read.accept_length, examination.endpoint
    if examination.served is not None and abs(examination.served / simulated - 1) > PARITY:
        found.append(
            Finding(
                kind="note",
                stage="files",
                name="trainer and server here differ",
                cause=f"replayed the draft accepts {simulated:.2f}, served by the engine here {examination.served:.2f}",
                remedy="please report this with the draft's config.json: both run one network",
            )
        )
    told = None if endpoint is None else endpoint.accept_length
    if endpoint is not None and told is not None and told < (1 - 5 * PARITY) * simulated:
        found.append(
            Finding(
                kind="note",
                stage="text",
                name=f"{endpoint.server} accepts less",
                cause=f"{endpoint.url} reports an accept length of {told:.2f}, and here it is {simulated:.2f}: the gap "
                "is in its texts (give them by --data), or in how that server reads the files (the risks above)",
                remedy="replay what it is asked; mend what the risks name; serve the draft here to compare",
            )
        )
    return found


def depth_of(config: DoctorConfig, family: str) -> int:
    """Most tokens of a round; a block draft's are those of its block."""
    return 63 if family == "dflash" else config.depth


def score_variants(
    examination: Examination,
    config: DoctorConfig,
    renderer: Renderer,
    target: Target,
    conversations: Sequence[Conversation],
    subject: Subject,
) -> list[tuple[str, float]]:
    few, scores, path = list(conversations[:VARIANT_QUESTIONS]), [], resolve(config.draft)
    for variant in renderer.variants(few[0]):
        texts = [renderer.prompt(one, variant) for one in few]
        answered, _ = answer(config, "none", texts, few)
        replay = Replay(target, path, batches_of(answered, LONGEST), depth_of(config, examination.family))
        scores.append((variant.name, replay.score(subject).accept_length))
    return scores


def _off_policy(given: Score, own: Score) -> Finding:
    return Finding(
        kind="cause",
        stage="text",
        name="answers of somebody else",
        cause=f"the draft guesses the conversations' answers (accept length {given.accept_length:.2f}) better than the "
        f"target's own ({own.accept_length:.2f}): it was trained on answers that the target did not write",
        remedy="write the training data's answers anew with `slipstream regenerate`, and train on them",
        before=own.accept_length,
        after=given.accept_length,
    )


def _other_prompts(best: tuple[str, float], own: Score) -> Finding:
    name, length = best
    return Finding(
        kind="cause",
        stage="prompt text",
        name=f"prompts rendered otherwise: {name}",
        cause=f"with {name} the draft is accepted {length:.2f} instead of {own.accept_length:.2f}: it was trained on "
        "conversations that were rendered so",
        remedy=f"render prompts so ({name}), or train the draft on both kinds",
        before=own.accept_length,
        after=length,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
