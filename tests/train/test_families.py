"""Targets whose layers are not a draft's, mixtures of experts among them, through the real programs; and recipes for
some of them, where no weights are read."""

import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.models.files.checkpoint import read_json
from slipstream.tests.expert_targets import EXPERT_FAMILIES
from slipstream.tests.pairwise import grouped, rotating, some_of
from slipstream.tests.random_targets import CAPPED, FAMILIES, RELATIVES, save_random_target
from slipstream.tests.sources import ROOT
from slipstream.tests.train.runs import assert_served, give_tokenizer, records
from slipstream.train import dflash, eagle, eagle3

# Later than the oldest transformers that we allow:
LATER_FAMILIES = ("gemma4-experts", "gemma4-shared", "laguna", "ministral3", "muse-glimmer", "qwen3-5")
LATER = [name for name in LATER_FAMILIES if name in RELATIVES]
MakeTarget = Callable[[str], Path]

BLOCK = ["--draft.block_size=4", "--draft.num_layers=2", "--draft.mask_token_id=7"]
SCORER = {"hidden_size": 32, "num_heads": 2, "factor_dim": 16, "candidate_topk": 4}
PROGRAMS: dict[str, tuple[Callable[[list[str]], None], list[str]]] = {  # and their options
    "eagle": (eagle.main, []),
    "dflash2": (dflash.main, [*BLOCK, "--draft.conv=true", "--draft.selector_rank=6"]),
    "dspark": (dflash.main, [*BLOCK, "--draft.markov_rank=6", "--draft.sample_from_anchor=true"]),
    "lilicorr": (dflash.main, [*BLOCK, *(f"--draft.lilicorr.{name}={value}" for name, value in SCORER.items())]),
}
FAMILY_OF = {
    **dict.fromkeys(("qwen3-30b-a3b", "qwen3-30b-a3b-fp8"), "qwen3-moe"),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "gpt-oss"),
    "gemma3-27b": "gemma3",
}
SHARDED = ("qwen3-30b-a3b", "gpt-oss-120b")


@pytest.fixture(scope="module")
def target_of(tmp_path_factory, target_path) -> MakeTarget:
    """family -> target, with the tokenizer that the data was prepared with."""

    @cache
    def make(family):
        folder = tmp_path_factory.mktemp("families") / family
        save_random_target((FAMILIES | CAPPED | RELATIVES | EXPERT_FAMILIES)[family], folder)
        return give_tokenizer(target_path, folder)

    return make


@pytest.mark.parametrize(
    "family",
    some_of(
        [*EXPERT_FAMILIES, "gemma2", "gemma3", "phi4-longrope", "granite", *LATER],
        ["gpt-oss", "qwen2-moe", "gemma2", "granite"],
    ),
)
def test_eagle3_trains(tmp_path, arguments, target_of, family):
    """Over the whole vocabulary: the best tokens of so small a model are few, and may all be outside another."""
    target = target_of(family)
    changes = {"target": target, "draft__vocabulary": "null", "optim__lr": 1e-3}
    eagle3.main(arguments(tmp_path, optim__steps=3, checkpoint__every=3, **changes))
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["eval_accept_length"] >= 1
    assert all(line["loss"] > 0 for line in lines)
    if family in EXPERT_FAMILIES:
        draft, weights = (load_file(folder / "model.safetensors") for folder in (tmp_path / "step-3", target))
        drift = draft["lm_head.weight"].float() - weights["lm_head.weight"]
        assert drift.abs().max() < 0.01, "starts as the target's head; three steps at 1e-3 go no further"
        assert read_json(tmp_path / "step-3" / "config.json")["num_hidden_layers"] == 1
    assert_served(target, tmp_path / "step-3")


@grouped("family")
@pytest.mark.parametrize(
    ("family", "program"), rotating(["gemma3", *LATER, "gpt-oss", "qwen3-moe", "mixtral"], PROGRAMS)
)
def test_every_draft_trains_and_changes_no_answer(tmp_path, arguments, target_of, family, program, capsys):
    """A block draft takes no layers of other kinds."""
    main, options = PROGRAMS[program]
    flags = arguments(tmp_path, target=target_of(family), optim__steps=2, checkpoint__every=2)
    lacking = ("aux_layers", "ttt") if program == "eagle" else ("ttt",)
    main([flag for flag in flags if not any(name in flag for name in lacking)] + options)
    sentence = "the layers start at random: the target's last 2, of [46], are not of the draft's"
    starts_at_random = program != "eagle" and family != "ministral3"
    assert bool(re.search(sentence, capsys.readouterr().out)) == starts_at_random
    assert records(tmp_path)[-1]["eval_accept_length"] >= 1
    assert_served(target_of(family), tmp_path / "step-2")


@pytest.mark.parametrize(("program", "recipe"), [*product(("eagle3", "dflash"), FAMILY_OF)])
def test_dry_runs_of_the_recipes(tmp_path, target_of, data_path, capsys, program, recipe):
    """With the tiny target of the family in place of the real one, as one process: a plan needs no other."""
    target = target_of(FAMILY_OF[recipe])
    flags = [f"--config={ROOT / 'configs' / program / recipe}.yaml", f"--target={target}", f"--output={tmp_path}"]
    flags += [f"--data.path={data_path}", "--draft.vocabulary=null", "--data.max_length=40", "--data.batch_size=1"]
    if program == "eagle3":
        eagle3.main([*flags, "--dry-run"])
    else:
        dflash.main([*flags, "--draft.mask_token_id=7", "--dry-run"])
    printed = capsys.readouterr().out
    size = sum(x.numel() for x in load_file(target / "model.safetensors").values())
    assert f"target    {size / 1e6:.1f}M parameters in float32, frozen" in printed
    assert ("sharded" in printed) == (recipe in SHARDED)
    assert "steps " in printed
