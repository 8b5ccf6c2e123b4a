"""Targets whose layers are not a draft's, through the real programs."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.serve.llm import LLM
from slipstream.serve.request import SamplingParams
from slipstream.tests.pairwise import grouped, rotating, some_of
from slipstream.tests.random_targets import CAPPED, FAMILIES, RELATIVES, save_random_target
from slipstream.tests.train.runs import Arguments
from slipstream.train import dflash, eagle, eagle3
from slipstream.train.trackers import read_metrics

# Later than the oldest transformers that we allow:
LATER_FAMILIES = ("gemma4-experts", "gemma4-shared", "laguna", "ministral3", "muse-glimmer", "qwen3-5")
LATER = [name for name in LATER_FAMILIES if name in RELATIVES]


BLOCK = ["--draft.block_size=4", "--draft.num_layers=2", "--draft.mask_token_id=7"]
SCORER = {"hidden_size": 32, "num_heads": 2, "factor_dim": 16, "candidate_topk": 4}
PROGRAMS: dict[str, tuple[Callable[[list[str]], None], list[str]]] = {  # and their options
    "eagle": (eagle.main, []),
    "dflash2": (dflash.main, [*BLOCK, "--draft.conv=true", "--draft.selector_rank=6"]),
    "dspark": (dflash.main, [*BLOCK, "--draft.markov_rank=6", "--draft.sample_from_anchor=true"]),
    "lilicorr": (dflash.main, [*BLOCK, *(f"--draft.lilicorr.{name}={value}" for name, value in SCORER.items())]),
}


def make_target(family: str, tokenizer_of: Path, folder: Path) -> Path:
    save_random_target((FAMILIES | CAPPED | RELATIVES)[family], folder)
    for file in tokenizer_of.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize(
    "family",
    some_of(["gemma2", "gemma3", "phi4-longrope", "granite", *LATER], ["gemma2", "granite", *LATER[::2]]),
)
def test_eagle3_trains(tmp_path: Path, arguments: Arguments, target_path: Path, family: str) -> None:
    target = make_target(family, target_path, tmp_path / "target")
    run = tmp_path / "run"
    changes = {"target": target, "draft__vocabulary": "null", "optim__lr": 1e-3}
    eagle3.main(arguments(run, optim__steps=3, checkpoint__every=3, **changes))
    lines = read_metrics(run / "metrics.jsonl")
    assert lines[-1]["eval_accept_length"] >= 1
    assert all(line["loss"] > 0 for line in lines)
    if family not in CAPPED:
        check_answers(target, run / "step-3")


def check_answers(target: Path, draft: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    drafts = "none", str(draft)
    alone, drafted = (LLM(str(target), name).generate([[5, 9, 33]], params)[0].tokens for name in drafts)
    assert alone == drafted


@grouped("family")
@pytest.mark.parametrize(("family", "program"), rotating(LATER, PROGRAMS))
def test_every_draft_trains_and_changes_no_answer(
    tmp_path: Path, arguments: Arguments, target_path: Path, family: str, program: str
) -> None:
    target = make_target(family, target_path, tmp_path / "target")
    main, options = PROGRAMS[program]
    run = tmp_path / "run"
    flags = arguments(run, target=target, optim__steps=2, checkpoint__every=2)
    lacking = ("aux_layers", "ttt") if program == "eagle" else ("ttt",)
    main([flag for flag in flags if not any(name in flag for name in lacking)] + options)
    check_answers(target, run / "step-2")


@pytest.mark.parametrize("family", ["gemma3", *[name for name in LATER if name != "ministral3"]])
def test_a_block_draft_takes_no_layers_of_other_kinds(
    tmp_path: Path, arguments: Arguments, target_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(family, target_path, tmp_path / "target")
    flags = arguments(tmp_path / "run", target=target, optim__steps=2)
    flags = [flag for flag in flags if "ttt" not in flag]
    dflash.main([*flags, *BLOCK])
    printed = capsys.readouterr().out
    assert re.search("the layers start at random: the target's last 2, of [46], are not of the draft's", printed)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["eval_accept_length"] >= 1
