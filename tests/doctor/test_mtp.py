"""The doctor of MTP heads: in their target's files, as drafts, and with faults planted in the files."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.data_tools import convert
from slipstream.doctor.diagnosis import diagnose, first_cause
from slipstream.doctor.examination import Examination
from slipstream.doctor.examine import LONGEST, DoctorConfig, check_shared, examine, load
from slipstream.doctor.mtp import facts, head_readings, keep_first
from slipstream.doctor.readings import Case
from slipstream.doctor.replay import Replay, Subject
from slipstream.doctor.report import as_json, page
from slipstream.doctor.texts import batches_of
from slipstream.models.drafts.base import DraftFiles
from slipstream.models.drafts.mtp import MTP, load_mtp
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.models.targets.frozen import DecoderTarget
from slipstream.tests.mtp_targets import add_tensors, save_almost_copying
from slipstream.tests.quantized_targets import LAYOUTS, save_quantized
from slipstream.tests.random_targets import change_json
from slipstream.tests.sources import HYBRID, TINY
from slipstream.tests.user_errors import user_error
from slipstream.train.batches import collate

QUICK = {"limit": 2, "max_tokens": 24}
HEAD = Subject(family="mtp", files=DraftFiles({}, {}), in_target=True)
Tensors = dict[str, Tensor]


def check_healthy(report: Examination) -> dict[str, str]:
    """Returns the facts."""
    assert not report.findings
    assert report.served == pytest.approx(report.diagnosis.as_read.accept_length)
    assert report.served > 2
    return dict(report.facts)


@pytest.fixture(scope="module")
def bundled_config() -> DoctorConfig:
    return DoctorConfig(draft="mtp", target=str(HYBRID), **QUICK)


@pytest.fixture(scope="module")
def bundled(bundled_config) -> Examination:
    return examine(bundled_config)


def test_the_bundled_head_is_healthy(bundled):
    head_facts = check_healthy(bundled)
    assert head_facts["where"] == "the target's files"
    assert head_facts["form"] == "that of Qwen3_5ForCausalLM"
    assert head_facts["modules"] == "1, for all tokens"
    assert head_facts["reads"] == "the state after the final norm (a trial chose)"
    after, before = (int(part.split(" %")[0]) for part in head_facts["agrees with the target"].split(", "))
    assert after >= before > 40
    assert as_json(bundled)["facts"] == head_facts
    assert head_facts["reads"] in page(bundled)


@pytest.mark.slow
def test_a_head_as_a_draft_is_healthy(tmp_path):
    folder = tmp_path / "draft"
    convert.main([f"--input={HYBRID}", "--layout=slipstream", f"--output={folder}"])
    report = examine(DoctorConfig(draft=str(folder), target=str(HYBRID), **QUICK))
    assert check_healthy(report)["where"] == "a draft checkpoint"


def test_columns_in_the_other_order_are_named(bundled_config, bundled, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(HYBRID, folder)
    weight = load_file(folder / "model.safetensors")["mtp.fc.weight"]
    add_tensors(folder, {"mtp.fc.weight": weight.roll(weight.shape[1] // 2, 1)})
    replay = Replay(load(bundled_config, folder), folder, batches_of(bundled.answered, LONGEST), bundled_config.depth)
    diagnosis = diagnose(HEAD, replay, folder)
    cause = first_cause(diagnosis.findings)
    assert (cause.stage, cause.name) == ("fc and norms", "eh_proj of [state ; embedding]")
    assert cause.remedy == "swap the two halves of the columns of mtp.fc.weight"
    assert diagnosis.mended.accept_length > 2


def swapped_norms(tensors: Tensors) -> Tensors:
    names = [f"model.layers.4.{name}.weight" for name in ("enorm", "hnorm")]
    signs = torch.tensor([1.0, -1.0]).repeat(len(tensors[names[0]]) // 2)
    return {names[0]: signs, names[1]: torch.ones_like(signs)}


def norms_less_1(tensors: Tensors) -> Tensors:
    return {name: x - 1 for name, x in tensors.items() if name.startswith("model.layers.4.") and "norm" in name}


@pytest.mark.parametrize(
    ("change", "name", "remedy"),
    [
        (
            swapped_norms,
            "norms of embedding and state swapped",
            "swap model.layers.4.enorm.weight and model.layers.4.hnorm.weight",
        ),
        (norms_less_1, "norms less 1", "add 1 to the weights of the head's norms"),
    ],
)
def test_faults_of_norms_are_named(change, name, remedy, make_mtp, tmp_path):
    folder = tmp_path / "target"
    save_almost_copying(make_mtp("glm4-moe").folder, folder)
    add_tensors(folder, change(load_file(folder / "model.safetensors")))
    replay = replay_of(folder, answers=True)
    diagnosis = diagnose(HEAD, replay, folder)
    cause = first_cause(diagnosis.findings)
    assert (cause.stage, cause.name, cause.remedy) == ("fc and norms", name, remedy)
    assert diagnosis.mended.accept_length > 2 > 1.3 > diagnosis.as_read.accept_length


def test_a_target_without_a_head_is_refused():
    with user_error("no MTP head of Qwen3ForCausalLM, the architecture of"):
        examine(DoctorConfig(draft="mtp", target=str(TINY), **QUICK))
    with user_error("target is empty and draft 'mtp' is not a checkpoint that names one; add --t"):
        DoctorConfig(draft="mtp").check_inputs()


def replay_of(folder: Path, *, answers: bool = False) -> Replay:
    """Replays random texts, or the target's `answers` to them."""
    target = load_target(folder, load_config(folder), torch.float32, torch.device("cpu"))
    tokens = torch.randint(4, 100, (8, 8 if answers else 40), generator=torch.Generator().manual_seed(0))
    frozen = DecoderTarget(target, (0,))
    while tokens.shape[1] < 40:
        _, final = frozen.aux_states(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
        tokens = torch.cat((tokens, target.logits(final[:, -1]).argmax(-1, keepdim=True)), dim=1)
    mask = [index >= 8 for index in range(40)]
    return Replay(target, folder, [collate([[(text, mask) for text in tokens.tolist()]], 1 << 20)], 3)


def test_several_modules_are_told_and_the_first_is_tried_alone(make_mtp, tmp_path):
    folder = make_mtp("glm4-moe", 2).folder
    replay = replay_of(folder)
    case = Case(HEAD, replay.build(HEAD), replay.target.model)
    assert isinstance(case.network, MTP)
    assert dict(facts(case.network, case.target, in_target=True))["modules"] == "2, in turn"
    [alone] = [reading for reading in head_readings(case) if reading.name == "the first module for all tokens"]
    assert alone.subject.edits == (keep_first,)
    assert alone.remedy == "write 1 as num_nextn_predict_layers in config.json"
    shutil.copytree(folder, tmp_path / "target")
    change_json(tmp_path / "target" / "config.json", num_nextn_predict_layers=1)
    assert replay.score(alone.subject) == replay_of(tmp_path / "target").score(HEAD)


def test_the_other_state_is_tried_and_read(make_mtp):
    replay = replay_of(make_mtp("ernie").folder)
    case = Case(HEAD, replay.build(HEAD), replay.target.model)
    [other] = [reading for reading in head_readings(case) if reading.stage == "target's states"]
    assert other.remedy == "serve with --drafter.hidden before_norm"
    assert replay.build(other.subject).config.aux_layers == (3,)
    assert replay.score(other.subject).rounds


def test_a_quantised_head_is_told_and_replayed(make_mtp, tmp_path):
    save_quantized(LAYOUTS["compressed-channel"], make_mtp("glm4-moe").folder, tmp_path / "target")
    replay = replay_of(tmp_path / "target")
    case = Case(HEAD, replay.build(HEAD), replay.target.model)
    assert isinstance(case.network, MTP)
    assert dict(facts(case.network, case.target, in_target=True))["tensors"].endswith("layers quantised")
    assert not any(reading.name.startswith("eh_proj") for reading in head_readings(case))
    assert replay.score(HEAD).rounds


def test_a_head_with_an_output_head_of_its_own_is_refused(make_mtp, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(make_mtp("glm4-moe").folder, folder)
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    add_tensors(folder, {"model.layers.4.shared_head.head.weight": 2 * head})
    target = load_target(folder, load_config(folder), torch.float32, torch.device("cpu"))
    with user_error("this MTP head has an embedding or an output head of its own, which the doc"):
        check_shared(load_mtp(target))
