"""Causes of bad acceptance (each planted in the files of a draft that is right now and then) are found and named."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.data_tools.target_tokenizer import load_target_tokenizer
from slipstream.doctor.answers import open_engine
from slipstream.doctor.diagnosis import EARLY, Diagnosis, diagnose, first_cause
from slipstream.doctor.options import QUESTIONS, DoctorConfig
from slipstream.doctor.readings import with_layers, without_flag
from slipstream.doctor.replay import Replay, Round, Score, Subject
from slipstream.doctor.texts import Renderer, batches_of, read_conversations
from slipstream.models.drafts.base import HEAD, Choices, DraftFiles, write_draft
from slipstream.models.files.checkpoint import read_draft_tensors, read_json
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.models.targets.frozen import DecoderTarget
from slipstream.tests.pairwise import rotating, some_of
from slipstream.tests.random_drafts import random_draft, save_random_dflash
from slipstream.tests.sources import ROOT, TINY
from slipstream.train.batches import Batch, collate

CPU = torch.device("cpu")
ASSETS = ROOT / "tests" / "assets"
PROMPT = 8
ANSWER = 64
TEXTS = 24
DEPTH = 3
TRAINED_DEPTH = 8
Answers = tuple[Path, Target, list[Batch], list[list[int]]]


@pytest.fixture(scope="module")
def answers(make_target) -> Answers:
    """The target's greedy answers to random prompts."""
    folder = make_target("qwen3")
    target = load_target(folder, load_config(folder), torch.float32, CPU)
    frozen = DecoderTarget(target, (0,))
    tokens = torch.randint(4, 120, (TEXTS, PROMPT), generator=torch.Generator().manual_seed(0))
    for _ in range(ANSWER):
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        _, final = frozen.aux_states(tokens, positions)
        tokens = torch.cat((tokens, (final[:, -1] @ frozen.head.t()).argmax(-1, keepdim=True)), dim=1)
    texts = tokens.tolist()
    mask = [False] * PROMPT + [True] * ANSWER
    batches = [collate([[(text, mask) for text in texts[i : i + 12]]], 1 << 20) for i in range(0, TEXTS, 12)]
    return folder, target, batches, texts


@pytest.fixture(scope="module")
def healthy(answers, tmp_path_factory) -> Callable[..., Subject]:
    """A healthy draft of a family, with fields of its config."""

    @cache
    def make(family, **fields):
        folder = answers[0]
        path = tmp_path_factory.mktemp("draft") / "draft"
        if family == "eagle3":
            module = random_draft(folder, **{"draft_vocab_size": 100} | fields)
            path.mkdir()
            write_draft(module, module.state_dict(), path, {})
        else:
            save_random_dflash(folder, path, [(PROMPT, text) for text in answers[3]], **fields)
        files = DraftFiles(read_json(path / "config.json"), read_draft_tensors(path))
        return Subject(family=family, files=files)

    return make


def replay(answers: Answers, path: Path = Path("draft")) -> Replay:
    """Trained drafts are right often enough to draft more."""
    return Replay(answers[1], path, answers[2], TRAINED_DEPTH if answers[0] == TINY else DEPTH)


def accept_length(subject: Subject, answers: Answers) -> float:
    return replay(answers).score(subject).accept_length


def examine(subject: Subject, answers: Answers, path: Path = Path("draft")) -> Diagnosis:
    return diagnose(subject, replay(answers, path), path)


def check(subject: Subject, answers: Answers, stage: str, path: Path = Path("draft")) -> Diagnosis:
    """Asserts that the first cause is in this stage; returns the diagnosis."""
    diagnosis = examine(subject, answers, path)
    cause = first_cause(diagnosis.findings)
    assert cause.stage == stage
    return diagnosis


@pytest.mark.parametrize(("family", "fields"), [("eagle3", {"fc_norm": True}), ("dflash", {})])
def test_nothing_is_wrong_with_healthy_drafts(family, fields, healthy, answers):
    diagnosis = examine(healthy(family, **fields), answers)
    assert not diagnosis.findings
    assert diagnosis.as_read.accept_length > 1.1


@pytest.fixture(scope="module")
def bundled() -> Answers:
    """Answers of the bundled target."""
    draft = ASSETS / "eagle3-flags"
    data = {"data": (str(QUESTIONS),), "where": ("split=heldout",)}
    config = DoctorConfig(draft=str(draft), target=str(TINY), **data)
    conversations = read_conversations(config, TEXTS)
    renderer = Renderer(load_target_tokenizer(config), config.date, {})
    with open_engine(TINY, draft, "eagle3", Choices.of(config), DEPTH, ANSWER) as engine:
        texts, _ = engine.answer([renderer.prompt(conversation) for conversation in conversations], conversations)
    target = load_target(TINY, load_config(TINY), torch.float32, CPU)
    return TINY, target, batches_of(texts, 1 << 20), []


def trained(name: str) -> Subject:
    """A draft that was trained for the bundled target."""
    folder = ASSETS / name
    files = DraftFiles(read_json(folder / "config.json"), read_draft_tensors(folder))
    return Subject(family=files.values["drafter"], files=files)


def denied(subject: Subject, flag: str) -> Subject:
    return without_flag(subject, flag).with_values(**{flag: False})


def interleaved(subject: Subject) -> Subject:
    size = subject.files.values["head_dim"]
    changed = {}
    order = torch.cat((torch.arange(0, size, 2), torch.arange(1, size, 2))).argsort()
    for name, tensor in subject.files.tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            changed[name] = tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            changed[name] = tensor[order]
    return subject.with_tensors(**changed)


def without_map(subject: Subject) -> Subject:
    return subject.with_tensors(d2t=torch.zeros_like(subject.files.tensors["d2t"]))


def with_mask(subject: Subject, token: int) -> Subject:
    return subject.with_values(dflash_config={**subject.files.values["dflash_config"], "mask_token_id": token})


def without_window(subject: Subject) -> Subject:
    """Off, though config.json has its size."""
    return subject.with_values(layer_types=["full_attention"], use_sliding_window=False)


TRAINED: dict[str, tuple[str, str, Callable[[Subject], Subject]]] = {  # of a draft: the stage, and what is planted
    "rotary embedding": ("eagle3-flags", "rotary embedding", lambda s: s.with_values(rope_theta=100.0)),
    "interleaved rotary embedding": ("eagle3-flags", "rotary embedding", interleaved),
    "another vocabulary": ("eagle3-flags", "draft vocabulary", without_map),
    "states in another order": ("eagle3-flags", "target's states", lambda s: with_layers(s, (5, 2))),
    "a residual stream without its norm": (
        "eagle3-flags",
        "fc and norms",
        lambda s: denied(s, "norm_before_residual"),
    ),
    "a state of an earlier layer in a block": ("dflash", "target's states", lambda s: with_layers(s, (4,))),
    "another mask token": ("dflash", "mask token", lambda s: with_mask(s, 77)),
    "an anchor that drafts": ("dflash", "block convention", lambda s: s.with_values(sample_from_anchor=True)),
    "an anchor that does not": ("dspark", "block convention", lambda s: s.with_values(sample_from_anchor=False)),
    "interleaved rotary embedding of a block": ("dspark-gated", "rotary embedding", interleaved),
    "another vocabulary of a block": ("dspark-fill-in", "draft vocabulary", without_map),
    "a window that is off": ("dflash-window", "windows", without_window),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_causes_in_a_trained_draft(name, bundled):
    draft, stage, plant = TRAINED[name]
    before = accept_length(trained(draft), bundled)
    diagnosis = check(plant(trained(draft)), bundled, stage)
    assert diagnosis.mended.accept_length == pytest.approx(before, rel=0.03)


@pytest.mark.slow
def test_risks_of_a_trained_draft(bundled):
    subject = trained("eagle3-flags")
    assert not examine(subject, bundled).findings
    diagnosis = examine(subject.with_values(max_position_embeddings=16), bundled)
    assert [(finding.kind, finding.stage) for finding in diagnosis.findings] == [("risk", "positions")]


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "flag"), [("eagle3-flags", "fc_norm"), ("eagle3-one-state", "norm_before_fc")])
@pytest.mark.parametrize("is_nested", [True, False])
def test_a_norm_that_servers_overlook(draft, flag, is_nested, bundled):
    """It is not said at the top level, where some look alone, or not at all."""
    subject = trained(draft)
    eagle = {**subject.files.values["eagle_config"], **({flag: True} if is_nested else {})}
    (risk,) = examine(subject.with_values(**{flag: None}, eagle_config=eagle), bundled).findings
    assert (risk.kind, risk.name) == ("risk", f"without {flag}")
    assert risk.after is not None
    assert risk.before is None or risk.before < 0.97 * risk.after


def turned(subject: Subject) -> Subject:
    """The same draft, whose final norm turns every other dim around, and whose next step, if it reads the state after
    that norm, turns it back: so it matters much which of both states is read."""
    values = subject.files.values
    tensors = subject.files.tensors
    signs = 1 - 2 * (torch.arange(values["hidden_size"]) % 2).to(tensors[HEAD].dtype)
    changed = {name: tensors[name] * signs for name in ("norm.weight", HEAD)}
    if values.get("norm_output"):
        assert values["norm_before_residual"], "else the state is read without a norm, too"
        hidden_norm = "midlayer.hidden_norm.weight"
        changed |= {"fc.weight": tensors["fc.weight"] * signs.unsqueeze(1), hidden_norm: tensors[hidden_norm] * signs}
    return subject.with_tensors(**changed)


def check_norm_output(bad: Subject, good: Subject, answers: Answers) -> Diagnosis:
    """Asserts that the only cause is the state that `good` passes on, and that its remedy mends the draft."""
    diagnosis = examine(bad, answers)
    value = bool(good.files.values.get("norm_output"))
    (cause,) = diagnosis.findings
    assert (cause.kind, cause.stage, cause.name) == ("cause", "later steps", f"norm_output {str(value).lower()}")
    assert f"norm_output {str(value).lower()}" in cause.remedy
    assert cause.after == pytest.approx(accept_length(good, answers))
    return diagnosis


PASSED_ON = (True, False)  # whether the draft was trained to read the state after its final norm


@pytest.mark.parametrize(("is_normed", "is_specforge"), rotating(PASSED_ON, [False, True]))
def test_the_state_that_later_steps_read(is_normed, is_specforge, healthy, answers):
    """A draft that reads its state after the final norm is said to read the one before, or the other way round.
    SpecForge's files of summer 2026 have the field, with the meaning of servers or its own, by which steps read the
    state before the norm whatever it says. They are refused, and the meaning that is accepted better is named."""
    fields = {"norm_output": True, "norm_before_residual": True} if is_normed else {}
    good = turned(healthy("eagle3", aux_layers=(1, 2, 4), draft_vocab_size=None, **fields))
    changes = {"drafter": None, "norm_output": True} if is_specforge else {"norm_output": not is_normed}
    diagnosis = check_norm_output(good.with_values(**changes), good, answers)
    assert ("SpecForge" in diagnosis.refusal) == is_specforge
    if is_specforge:
        assert diagnosis.as_read is None
    else:
        assert diagnosis.as_read.accept_length < 0.95 * accept_length(good, answers)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["eagle3-flags", "eagle3"])
@pytest.mark.parametrize("is_refused", [True, False])
def test_the_state_that_later_steps_of_a_trained_draft_read(draft, is_refused, bundled):
    """eagle3-flags was trained to read the state after the norm, eagle3 the one before."""
    good = turned(trained(draft))
    assert accept_length(good, bundled) == pytest.approx(accept_length(trained(draft), bundled), rel=0.01)
    is_normed = bool(good.files.values.get("norm_output"))
    bad = good.with_values(norm_output=not is_normed)
    assert accept_length(bad, bundled) < 0.9 * accept_length(good, bundled)
    if is_refused:
        bad = good.with_values(drafter=None, norm_output=True)
    diagnosis = check_norm_output(bad, good, bundled)
    assert bool(diagnosis.refusal) == is_refused


class GrowingStates(Replay):
    """Later steps do better with norm_before_residual; the first two only `early`."""

    early = False

    def score(self, subject: Subject, num_batches: int | None = None, depth: int | None = None) -> Score:
        gains = subject.files.values.get("norm_before_residual") and (self.early or depth != EARLY)
        rounds = [Round(text, 10 * step, 1) for text in range(TEXTS) for step in range(10 if gains else 12)]
        return Score((24,) * TEXTS, tuple(rounds), depth or self.depth)


@pytest.mark.parametrize("early", [True, False])
def test_what_only_steps_beyond_the_training_gain_by_is_no_cause(early, healthy, answers):
    replay = GrowingStates(answers[1], Path("draft"), answers[2], DEPTH)
    replay.early = early
    diagnosis = diagnose(healthy("eagle3"), replay, Path("draft"))
    assert [finding.name for finding in diagnosis.findings] == (["norm_before_residual true"] if early else [])


def in_8_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    changed = {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
        changed[name] = (tensors[name].float() / scale).round().to(torch.int8)
        changed[name.replace("weight", "weight_scale")] = scale
    return changed


EAGLE3: dict[str, tuple[str, Callable[[Subject], Subject]]] = {
    "states one layer later": ("target's states", lambda s: with_layers(s, (0, 1, 3))),
    "the last state before its norm": ("target's states", lambda s: with_layers(s, (1, 2, 3))),
    "ids for differences": (
        "draft vocabulary",
        lambda s: s.with_tensors(d2t=s.files.tensors["d2t"] + torch.arange(len(s.files.tensors["d2t"]))),
    ),
    "a head of its own": (
        "head and embedding",
        lambda s: s.with_tensors(**{HEAD: torch.randn_like(s.files.tensors[HEAD])}),
    ),
    "no map": ("draft vocabulary", lambda s: s.with_tensors(d2t=None, t2d=None)),
    "no head": ("head and embedding", lambda s: s.with_tensors(**{HEAD: None})),
    "a flag without its norm": ("fc and norms", lambda s: s.with_values(norm_before_fc=True)),
    "8 bits": ("files", lambda s: s.with_tensors(**in_8_bits(dict(s.files.tensors)))),
    "the target's quantisation": ("files", lambda s: s.with_values(quantization_config={"quant_method": "fp8"})),
}


EAGLE3_IN_GATE = (
    "states one layer later",
    "ids for differences",
    "a head of its own",
    "a flag without its norm",
    "8 bits",
)


@pytest.mark.parametrize("name", some_of(EAGLE3, EAGLE3_IN_GATE))
def test_causes_in_eagle3_drafts(name, healthy, answers):
    stage, plant = EAGLE3[name]
    good = healthy("eagle3", aux_layers=(1, 2, 4))
    before = accept_length(good, answers)
    diagnosis = check(plant(good), answers, stage)
    assert diagnosis.mended.accept_length == pytest.approx(before, rel=0.02)


def test_a_norm_that_the_config_denies(healthy, answers):
    bad = healthy("eagle3", norm_before_fc=True).with_values(norm_before_fc=False)
    diagnosis = check(bad, answers, "fc and norms")
    assert "input_norm.weight" in diagnosis.refusal


def test_another_trainers_file_without_ids_is_refused_and_they_are_found(healthy, answers):
    good = healthy("eagle3", aux_layers=(0, 2, 3))
    bad = good.with_values(eagle_config=None, eagle_aux_hidden_state_layer_ids=None, drafter=None)
    diagnosis = check(bad, answers, "target's states")
    assert "aux_layers" in diagnosis.refusal
    assert diagnosis.mended is not None


def test_the_kind_of_draft_is_that_of_its_tensors(healthy, answers):
    good = healthy("eagle3")
    bad = replace(good.with_values(drafter=None, architectures=["LlamaForCausalLMEagle"]), family="eagle")
    cause = first_cause(check(bad, answers, "files").findings)
    assert cause.name == "as EAGLE3"


@pytest.mark.slow
def test_block_drafts(healthy, answers):
    good = healthy("dflash")
    before = accept_length(good, answers)
    layers = good.files.values["num_hidden_layers"]
    windows = {"layer_types": ["sliding_attention"] * layers, "sliding_window": 2, "use_sliding_window": True}
    tensors = {HEAD: torch.randn_like(answers[1].shared[HEAD])}
    inner = good.files.values["dflash_config"]
    planted = {
        "block convention": good.with_values(sample_from_anchor=True),
        "windows": good.with_values(**windows),
        "target's states": with_layers(good, tuple(layer + 1 for layer in inner["target_layer_ids"])),
        "rotary embedding": good.with_values(rope_theta=100.0),
        "head and embedding": good.with_tensors(**tensors),
    }
    for stage, bad in planted.items():
        diagnosis = check(bad, answers, stage)
        assert diagnosis.mended.accept_length == pytest.approx(before, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("field", ["sample_from_anchor", "shift_label", "nested", "option"])
def test_an_anchor_that_is_said_to_draft(field, healthy, answers):
    """The doctor names the field that is wrong, for every field that may say so."""
    good = healthy("dflash").with_values(drafter=None, sample_from_anchor=None)
    inner = {**good.files.values["dflash_config"], "shift_label": True}
    bad = {
        "sample_from_anchor": good.with_values(sample_from_anchor=True),
        "shift_label": good.with_values(shift_label=True),
        "nested": good.with_values(dflash_config=inner),
        "option": good.with_values(architectures=["MyDraft"]).with_choices(sample_from_anchor=True),
    }[field]
    cause = first_cause(check(bad, answers, "block convention").findings)
    assert cause.name == "sample_from_anchor false"
    culprit = {"nested": "shift_label true", "option": "the option sample_from_anchor is true"}.get(
        field, f"{field} true"
    )
    assert culprit in cause.cause
    assert ("--drafter" in cause.remedy) == (field == "option")
    assert cause.after == pytest.approx(accept_length(good, answers))


@pytest.mark.slow
def test_a_confidence_head_of_another_number_of_slots(healthy, answers):
    """Its calibration has a number for every slot that drafts, so a file that contradicts it is refused."""
    inner = {"confidence_temperatures": [1.0] * 4}
    good = healthy("dflash", confidence_head=True, sample_from_anchor=True)
    good = good.with_values(dflash_config={**good.files.values["dflash_config"], **inner})
    diagnosis = check(good.with_values(sample_from_anchor=False), answers, "block convention")
    assert "confidence_temperatures" in diagnosis.refusal
    assert diagnosis.mended.accept_length == pytest.approx(accept_length(good, answers))


def test_a_mask_embedding_of_its_own(healthy, answers, tmp_path):
    good = healthy("dflash")
    vector = answers[1].shared["embed_tokens.weight"][0].clone()
    torch.save(vector, tmp_path / "mask_embedding.pt")
    inner = {**good.files.values["dflash_config"], "mask_token_id": 77}
    check(good.with_values(dflash_config=inner), answers, "mask token", tmp_path)
