"""Whole runs of train/mtp.py: from a target's own head and from none, and a server that accepts what it proposes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams
from slipstream.tests.mtp_targets import save_mtp_target
from slipstream.tests.quantized_targets import LAYOUTS, save_quantized
from slipstream.tests.random_targets import change_json
from slipstream.tests.train.runs import (
    PROMPTS,
    assert_like_run,
    emitted_per_round,
    give_tokenizer,
    records,
    refusal,
    save_answers,
)
from slipstream.train.mtp import main

DEPTH = 3
PARAMS = SamplingParams(max_tokens=3 * (DEPTH + 1) + 1, temperature=0.0, ignore_eos=True)
Flags = Callable[..., list[str]]


@pytest.fixture(scope="module")
def mtp_path(target_path, tmp_path_factory) -> Path:
    """A target with a head whose layer has experts, and the tokenizer that the data was prepared with."""
    return give_tokenizer(target_path, save_mtp_target("glm4-moe", tmp_path_factory.mktemp("mtp") / "target").folder)


def accept_length(target: Path, draft: str) -> float:
    """How many tokens a round emits; the answers are those without a draft."""
    plain = LLM(str(target)).generate(PROMPTS, PARAMS)
    served = LLM(str(target), draft, drafter={"depth": DEPTH}, width=DEPTH + 1).generate(PROMPTS, PARAMS)
    assert [answer.tokens for answer in served] == [answer.tokens for answer in plain]
    return emitted_per_round(served)


def flags_of(run_flags: Flags, output: Path, target: Path, data: Path, **changes: object) -> list[str]:
    options = {"data__path": data, "data__max_length": 64, "data__batch_size": 1, "optim__name": "muon"}
    options |= {"evaluation__every": 1000, "checkpoint__every": 1000, "target": target}
    return [flag for flag in run_flags(output, **options | changes) if "vocabulary" not in flag]


@pytest.mark.slow
def test_the_targets_head_becomes_better(tmp_path, mtp_path, save_data, run_flags, capsys):
    """By texts that it learns by heart. Its router stays as it is."""
    data = save_answers(mtp_path, PARAMS, save_data)[1]
    main(flags_of(run_flags, tmp_path, mtp_path, data, optim__steps=60, draft__loss="forward_kl"))
    assert "starts at random" not in capsys.readouterr().out
    lines = records(tmp_path)
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert accept_length(mtp_path, str(tmp_path / "best")) > 1.5 * accept_length(mtp_path, "mtp")
    before, after = (load_file(folder / "model.safetensors") for folder in (mtp_path, tmp_path / "best"))
    changed = {name for name in after if not torch.equal(after[name], before[name].to(after[name].dtype))}
    still = after.keys() - changed
    assert still >= {f"model.layers.4.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")}
    assert all(".mlp.gate." in name or ".experts." in name for name in still), "experts that no token went to"


@pytest.mark.slow
def test_several_modules_become_better(tmp_path, target_path, save_data, run_flags):
    """Each of them."""
    target = give_tokenizer(target_path, save_mtp_target("glm4-moe", tmp_path / "target", count=2).folder)
    data = save_answers(target, PARAMS, save_data)[1]
    main(flags_of(run_flags, tmp_path / "run", target, data, optim__steps=60, draft__loss="forward_kl"))
    lines = records(tmp_path / "run")
    assert all(lines[-1][name] > lines[0][name] + 0.3 for name in (f"accept_rate_{step}" for step in range(3)))
    assert accept_length(target, str(tmp_path / "run" / "best")) > 1.5 * accept_length(target, "mtp")
    before, after = (load_file(folder / "model.safetensors") for folder in (target, tmp_path / "run" / "best"))
    changed = {name.split(".")[2] for name in after if not torch.equal(after[name], before[name].to(after[name].dtype))}
    assert changed == {"4", "5"}


def test_an_overfitted_new_head_is_accepted_whole(tmp_path, target_path, save_data, run_flags, capsys):
    data = save_answers(target_path, PARAMS, save_data)[1]
    main(flags_of(run_flags, tmp_path, target_path, data, optim__steps=80, draft__intermediate_size=256))
    assert "the MTP layer starts at random: the target has none" in capsys.readouterr().out
    assert {"state_loss_0", "accept_rate_2", "eval_accept_rate_2"} <= records(tmp_path)[-1].keys()
    assert accept_length(target_path, str(tmp_path / "best")) == DEPTH + 1


def test_a_run_with_states_from_disk_equals_one_that_computes_them(tmp_path, capture_to, run_flags):
    states = capture_to("--drafters", "mtp")
    for name, changes in (("online", {}), ("disk", {"data__aux_states": states})):
        main(run_flags(tmp_path / name, **changes))
    assert_like_run(tmp_path / "disk", tmp_path / "online")


def test_a_head_in_fp8_begins_with_its_values(tmp_path, target_path, save_data, run_flags):
    """Experts in FP8 are refused."""
    for kind in ("exaone-moe", "glm4-moe"):
        save_mtp_target(kind, tmp_path / kind)
        values = save_quantized(LAYOUTS["compressed-channel"], tmp_path / kind, tmp_path / f"{kind}-fp8")
        target = give_tokenizer(target_path, tmp_path / f"{kind}-fp8")
        data = save_answers(target, PARAMS, save_data)[1]
        flags = flags_of(run_flags, tmp_path / f"{kind}-run", target, data)
        flags += ["--optim.steps=1", "--optim.lr=1e-12"]
        if kind == "glm4-moe":
            assert "has quantised experts, which training cannot begin with; name the target in" in refusal(flags, main)
            continue
        main(flags)
        draft = load_file(tmp_path / f"{kind}-run" / "best" / "model.safetensors")
        expected = load_file(tmp_path / kind / "model.safetensors") | values
        for name, tensor in draft.items():
            torch.testing.assert_close(tensor.float(), expected[name].bfloat16().float(), rtol=1e-2, atol=1e-3)


def test_targets_that_cannot_be_trained_for_are_refused(tmp_path, mtp_path, data_path, run_flags):
    folder = shutil.copytree(mtp_path, tmp_path / "target")
    change_json(folder / "config.json", num_nextn_predict_layers=3)
    sentence = refusal(flags_of(run_flags, tmp_path / "run", folder, data_path), main)
    assert f"the files in {folder} have 1 of the 3 MTP modules that num_nextn_predict_layers of their" in sentence
    change_json(folder / "config.json", num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if "layers.4." not in name}
    save_file(rest, folder / "model.safetensors", {"format": "pt"})
    sentence = refusal(flags_of(run_flags, tmp_path / "run", folder, data_path), main)
    assert f"target {folder} has an MTP layer by its config.json, but not in its files; fetch" in sentence
    dry = [*flags_of(run_flags, tmp_path / "run", mtp_path, data_path), "--draft.init_from_target=false"]
    assert "draft.init_from_target is false, but the MTP layer of Glm4MoeForCausalLM has experts" in refusal(dry, main)
