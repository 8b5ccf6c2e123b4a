"""The options of training programs are frozen here, at most 44 of EAGLE3, 50 of DFLASH, 40 of EAGLE and of MTP heads:
adding one is an edit of this list, and is meant to hurt."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from slipstream.config import build_parser, option_names, parse
from slipstream.tests.sources import ROOT
from slipstream.train.dflash import DFlashOptions
from slipstream.train.eagle import EagleOptions
from slipstream.train.eagle3 import Eagle3Options
from slipstream.train.mtp import MTPOptions
from slipstream.train.options import RunOptions

SHARED_OPTIONS = """
    checkpoint.every checkpoint.keep data.aux_states data.aux_states_missing data.batch_size data.long_documents
    data.max_length data.path draft.interchange draft.intermediate_size draft.vocabulary dry_run evaluation.costs
    evaluation.depth evaluation.documents evaluation.every evaluation.patience evaluation.requests
    evaluation.temperature init_from optim.accumulation optim.epochs optim.lr optim.momentum optim.name optim.schedule
    optim.steps output precision revision seed target target_compile target_sharding tracker.tensorboard tracker.wandb
    trust_remote_code
"""
PROGRAMS: dict[str, tuple[type[RunOptions], str]] = {
    "eagle": (
        EagleOptions,
        "draft.bias draft.ttt_decay draft.ttt_steps",
    ),
    "eagle3": (
        Eagle3Options,
        "draft.aux_layers draft.head draft.loss draft.norms draft.num_layers draft.ttt_decay draft.ttt_steps",
    ),
    "mtp": (
        MTPOptions,
        "draft.init_from_target draft.loss draft.ttt_decay draft.ttt_steps",
    ),
    "dflash": (
        DFlashOptions,
        "draft.anchors draft.aux_layers draft.block_size draft.confidence_head draft.conv draft.lilicorr draft.loss "
        "draft.markov_rank draft.mask_token_id draft.num_layers draft.sample_from_anchor draft.selector_rank "
        "draft.sliding_window",
    ),
}
RECIPES = [
    pytest.param(name, path, id=f"{name}-{path.stem}")
    for name in PROGRAMS
    for path in sorted((ROOT / "configs" / name).glob("*.yaml"))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_options_are_these(program: str) -> None:
    groups = {"checkpoint", "data", "draft", "evaluation", "optim", "tracker"}
    options, program_options = PROGRAMS[program]
    names = set(option_names(build_parser(options, prog="", description=""))) - groups
    assert sorted(names) == sorted(SHARED_OPTIONS.split() + program_options.split())


@pytest.mark.parametrize("page", ["training", "eagle", "eagle3", "dflash", "mtp", "offline_states", "convert"])
def test_pages_name_options_that_exist(page: str) -> None:
    """In backticks, in whole: `draft.loss`, `--data.path FOLDER`."""
    names = {*SHARED_OPTIONS.split(), *" ".join(options for _, options in PROGRAMS.values()).split()}
    groups = "|".join(sorted({name.partition(".")[0] for name in names if "." in name}))
    text = (ROOT / "docs" / f"{page}.md").read_text()
    options = {name.rstrip(".") for name in re.findall(rf"`(?:--)?((?:{groups})\.[a-z_.0-9]+)", text)}
    assert options
    assert options <= names


@pytest.mark.parametrize(("program", "path"), RECIPES)
def test_recipes_parse_and_flags_win(program: str, path: Path) -> None:
    options = parse(PROGRAMS[program][0], [f"--config={path}", "--optim.lr=0.25"], prog="", description="")
    assert options.optim.lr == 0.25
    assert options.data.path == yaml.safe_load(path.read_text())["data"]["path"]


@pytest.mark.parametrize("name", ["cpu", "single", "ddp", "fsdp", "zero2", "zero3"])
def test_accelerate_reads_its_configs(name: str) -> None:
    config = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    assert config.num_machines == 1
    assert config.num_processes >= 1


BAD_VALUES = [  # program, flags, what the message names
    ("eagle3", ["--optim.lr=0"], "optim.lr is 0.0; give a positive number"),
    ("eagle3", ["--optim.accumulation=0"], "optim.accumulation is 0; give at least 1"),
    ("eagle3", ["--optim.betas=[0.9, 1.0]"], "optim.betas=[0.9, 1.0]; the options are --optim.accumulation, --optim"),
    (
        "eagle3",
        ["--data.long_documents=split", "--data.aux_states=f"],
        "data.long_documents is split, but data.aux_states f holds the states of each document's beginning alone",
    ),
    ("eagle3", ["--optim.momentum=1"], "optim.momentum is 1.0; give at least 0 and below 1"),
    ("eagle3", ["--optim.schedule=step"], "optim.schedule"),
    ("eagle3", ["--draft.norms=[fc_norm, layer_norm]"], "draft.norms"),
    ("eagle3", ["--draft.qk_norm=false"], "unrecognized arguments: --draft.qk_norm=false; did you mean --draft.norms?"),
    ("eagle3", ["--seed=-1"], "seed is -1; give 0 or more"),
    ("eagle3", ["--draft.ttt_steps=0"], "draft.ttt_steps is 0"),
    ("eagle3", ["--draft.aux_layers=[]"], "draft.aux_layers is []; name at least one state"),
    ("eagle3", ["--draft.intermediate_size=-5"], "draft.intermediate_size is -5; give at least 1"),
    ("eagle3", ["--evaluation.depth=0"], "evaluation.depth is 0; give at least 1"),
    ("eagle3", ["--evaluation.requests=8"], "evaluation.requests is 8, which needs evaluation.costs; name a file"),
    ("eagle3", ["--evaluation.patience=0"], "evaluation.patience is 0; give at least 1"),
    ("eagle3", ["--tracker.wandb=true"], "tracker.wandb is 'true'; give none or metrics or best or all"),
    ("eagle3", ["--draft.step=3"], "did you mean --draft.ttt-steps"),
    ("eagle3", ["--optim.larning_rate=3"], "the options are --optim.accumulation, --optim.epochs"),
    (
        "eagle3",
        ["--resume=never"],
        "unrecognized arguments: --resume=never; the options are --checkpoint, --checkpoint.every",
    ),
    (
        "eagle3",
        ["--data.path={a: 1, b: 0}"],
        "data.path gives b the weight 0.0; give a folder, or folders with weights",
    ),
    ("eagle3", ["--data.path={a: .inf}"], "data.path gives a the weight inf; give a folder, or"),
    ("eagle3", ["--data.path={a: x}"], "data.path is '{a: x}'; give a folder, or folders with weights above 0, such"),
    ("eagle3", ["--data.path=[a, b]"], "data.path is '[a, b]'; give a folder, or folders with weights above 0, such"),
    ("eagle3", ["--data.path={}"], "data.path is {}; give a folder"),
    ("eagle3", ["--data.path={a: 1, a/: 1}"], "data.path names a folder twice (a, a/); give it a larger weight"),
    ("eagle3", ["--data.aux_states=[]"], "data.aux_states is []; name a folder of captured states, or leave it out"),
    ("eagle3", ["--target_sharding=yes"], "target_sharding"),
    ("eagle3", ["--data.aux_states=f", "--target_sharding=machine"], "the target's layers are not run at all"),
    (
        "eagle3",
        ["--data.aux_states=f", "--data.aux_states_missing=online", "--target_sharding=machine"],
        "would run the target unequally often; set target_sharding to none, or leave data.aux_states out",
    ),
    ("eagle", ["--draft.noise=1"], "unrecognized arguments: --draft.noise=1; the options are --draft.bias, --draft."),
    (
        "mtp",
        ["--draft.interchange=vllm"],
        "draft.interchange is vllm: vLLM 0.33 reads MTP heads in the target's files alone, where `slipstream convert",
    ),
    ("dflash", ["--draft.anchors=0"], "draft.anchors is 0 and draft.num_layers 5; give at least 1"),
    ("dflash", ["--draft.gamma=7"], "unrecognized arguments: --draft.gamma=7; the options are --draft.anchors, --"),
    ("dflash", ["--draft.losses.ce=1"], "unrecognized arguments: --draft.losses.ce=1; did you mean --draft.loss?"),
    ("dflash", ["--draft.loss=other"], "draft.loss"),
    ("eagle3", ["--evaluation.temperature=-1"], "evaluation.temperature is -1.0; give 0 (greedy) or more"),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_bad_values_are_named(program: str, exits: Any) -> None:
    for name, flags, message in BAD_VALUES:
        if name != program:
            continue
        with exits(message, 2):
            parse(PROGRAMS[program][0], ["--target=t", "--output=o", "--data.path=d", *flags], prog="", description="")


def test_a_block_draft_is_evaluated_on_whole_blocks() -> None:
    words = ["--target=t", "--output=o", "--data.path=d", "--evaluation.every=7", "--draft.block_size=10"]
    options = parse(DFlashOptions, words, prog="", description="")
    assert options.evaluation.every == 7
    assert options.evaluation.depth >= options.draft.block_size - 1


def test_no_file_beside_a_program_hides_a_module() -> None:
    """`python train/eagle3.py` puts train/ first on the path."""
    assert not [path for path in (ROOT / "train").glob("*.py") if importlib.util.find_spec(path.stem)]
