"""Mixtures of experts as targets, through the real programs; and recipes for them and for Gemma, where no weights are
read."""

import shutil
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.models.files.checkpoint import read_json
from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams
from slipstream.tests.expert_targets import EXPERT_FAMILIES
from slipstream.tests.pairwise import some_of
from slipstream.tests.random_targets import FAMILIES, save_random_target
from slipstream.tests.sources import ROOT
from slipstream.tests.train.runs import Arguments
from slipstream.train import dflash, eagle, eagle3
from slipstream.train.trackers import read_metrics

PROGRAMS = {"eagle3": eagle3.main, "dflash": dflash.main}
FAMILY_OF = {
    **dict.fromkeys(("qwen3-30b-a3b", "qwen3-30b-a3b-fp8"), "qwen3-moe"),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "gpt-oss"),
    "gemma3-27b": "gemma3",
}
RECIPES = list(product(PROGRAMS, FAMILY_OF))
SHARDED = ("qwen3-30b-a3b", "gpt-oss-120b")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory, target_path: Path) -> dict[str, Path]:
    """By family, with the tokenizer that the data was prepared with."""
    root = tmp_path_factory.mktemp("experts")
    configs = EXPERT_FAMILIES | {"gemma3": FAMILIES["gemma3"]}
    for family, config in configs.items():
        save_random_target(config, root / family)
        for file in target_path.glob("tokenizer*"):
            shutil.copy(file, root / family)
    return {family: root / family for family in configs}


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_eagle3_trains(tmp_path: Path, arguments: Arguments, targets: dict[str, Path], family: str) -> None:
    """Over the whole vocabulary: the best tokens of so small a model are few, and may all be outside another."""
    changes = {"target": targets[family], "draft__vocabulary": "null", "optim__lr": 1e-3}
    eagle3.main(arguments(tmp_path, optim__steps=3, checkpoint__every=3, **changes))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["eval_accept_length"] >= 1
    assert all(line["loss"] > 0 for line in lines)
    draft, target = (load_file(folder / "model.safetensors") for folder in (tmp_path / "step-3", targets[family]))
    drift = draft["lm_head.weight"].float() - target["lm_head.weight"]
    assert drift.abs().max() < 0.01, "starts as the target's head; three steps at 1e-3 go no further"
    assert read_json(tmp_path / "step-3" / "config.json")["num_hidden_layers"] == 1
    check_served(targets[family], tmp_path / "step-3")


def check_served(target: Path, draft: Path) -> None:
    """The answers are the target's own."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    answers = [LLM(str(target), name).generate([[5, 9, 33]], params)[0] for name in ("none", str(draft))]
    assert answers[0].tokens == answers[1].tokens


@pytest.mark.parametrize("family", some_of(EXPERT_FAMILIES, ["gpt-oss"]))
def test_eagle_trains(tmp_path: Path, arguments: Arguments, targets: dict[str, Path], family: str) -> None:
    flags = arguments(tmp_path, target=targets[family], optim__steps=2)
    eagle.main([flag for flag in flags if "aux_layers" not in flag])
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["eval_accept_length"] >= 1


@pytest.mark.parametrize("family", some_of(EXPERT_FAMILIES, ["qwen3-moe"]))
def test_dflash_trains_from_random_weights(
    tmp_path: Path, arguments: Arguments, targets: dict[str, Path], family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = {"num_layers": 2, "block_size": 5, "mask_token_id": 7, "anchors": 6}
    changes = {f"draft__{name}": value for name, value in blocks.items()}
    flags = arguments(tmp_path, target=targets[family], optim__steps=3, checkpoint__every=3, **changes)
    flags = [flag for flag in flags if "ttt_steps" not in flag]
    dflash.main(flags)
    assert "the layers start at random: the target's last 2, of " in capsys.readouterr().out
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 3
    check_served(targets[family], tmp_path / "step-3")


@pytest.mark.parametrize(("program", "recipe"), RECIPES)
def test_dry_runs_of_the_recipes(
    tmp_path: Path,
    targets: dict[str, Path],
    data_path: Path,
    capsys: pytest.CaptureFixture[str],
    program: str,
    recipe: str,
) -> None:
    """With the tiny target of the family in place of the real one, as one process: a plan needs no other."""
    flags = [f"--config={ROOT / 'configs' / program / recipe}.yaml", f"--target={targets[FAMILY_OF[recipe]]}"]
    flags += [f"--data.path={data_path}", f"--output={tmp_path}", "--draft.vocabulary=null", "--dry-run"]
    flags += ["--draft.mask_token_id=7"] if program == "dflash" else []
    PROGRAMS[program]([*flags, "--data.max_length=40", "--data.batch_size=1"])
    printed = capsys.readouterr().out
    weights = load_file(targets[FAMILY_OF[recipe]] / "model.safetensors")
    assert f"target    {sum(x.numel() for x in weights.values()) / 1e6:.1f}M parameters in float32, frozen" in printed
    assert ("sharded" in printed) == (recipe in SHARDED)
    assert "steps " in printed
