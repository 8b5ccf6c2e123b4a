"""The options of training programs are frozen here, at most 53 of EAGLE3, 59 of DFLASH, 49 of EAGLE and of MTP heads:
adding one is an edit of this list, and is meant to hurt."""

import importlib.util
import re

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from slipstream.config import build_parser, option_names, parse
from slipstream.tests.pairwise import grouped
from slipstream.tests.sources import ROOT
from slipstream.tests.tables import each_case
from slipstream.train.dflash import DFlashOptions
from slipstream.train.eagle import EagleOptions
from slipstream.train.eagle3 import Eagle3Options
from slipstream.train.mtp import MTPOptions
from slipstream.train.options import RunOptions

SHARED_OPTIONS = """
    checkpoint.every checkpoint.keep data.aux_states data.aux_states_missing data.batch_size data.long_documents
    data.max_length data.path data.row_ranks draft.interchange draft.intermediate_size draft.lora_rank draft.vocabulary
    dry_run
    evaluation.costs evaluation.depth evaluation.documents evaluation.every evaluation.patience evaluation.requests
    evaluation.temperature init_from optim.accumulation optim.epochs optim.lr optim.momentum optim.name optim.schedule
    optim.steps output precision revision seed states.api_key_file states.devices states.dtype states.endpoint
    states.engine states.prefetch states.timeout target target_compile target_sharding tracker.tensorboard tracker.wandb
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
def test_the_options_are_these(program):
    groups = {"checkpoint", "data", "draft", "evaluation", "optim", "states", "tracker"}
    options, program_options = PROGRAMS[program]
    names = set(option_names(build_parser(options, prog="", description=""))) - groups
    assert sorted(names) == sorted(SHARED_OPTIONS.split() + program_options.split())


@pytest.mark.parametrize("page", ["training", "eagle", "eagle3", "dflash", "mtp", "offline_states", "convert"])
def test_pages_name_options_that_exist(page):
    """In backticks, in whole: `draft.loss`, `--data.path FOLDER`."""
    names = {*SHARED_OPTIONS.split(), *" ".join(options for _, options in PROGRAMS.values()).split()}
    groups = "|".join(sorted({name.partition(".")[0] for name in names if "." in name}))
    text = (ROOT / "docs" / f"{page}.md").read_text()
    options = {name.rstrip(".") for name in re.findall(rf"`(?:--)?((?:{groups})\.[a-z_.0-9]+)", text)}
    assert options
    assert options <= names


@pytest.mark.parametrize(("program", "path"), RECIPES)
def test_recipes_parse_and_flags_win(program, path):
    options = parse(PROGRAMS[program][0], [f"--config={path}", "--optim.lr=0.25"], prog="", description="")
    assert options.optim.lr == 0.25
    assert options.data.path == yaml.safe_load(path.read_text())["data"]["path"]


@pytest.mark.parametrize("name", ["cpu", "single", "ddp", "fsdp", "zero2", "zero3"])
def test_accelerate_reads_its_configs(name):
    config = load_config_from_file(str(ROOT / "configs" / "accelerate" / f"{name}.yaml"))
    assert config.num_machines == 1
    assert config.num_processes >= 1


@grouped("program")
@each_case()
def test_bad_values_are_named(program, flags, message, exits):
    with exits(message, 2):
        parse(PROGRAMS[program][0], ["--target=t", "--output=o", "--data.path=d", *flags], prog="", description="")


def test_a_block_draft_is_evaluated_on_whole_blocks():
    words = ["--target=t", "--output=o", "--data.path=d", "--evaluation.every=7", "--draft.block_size=10"]
    options = parse(DFlashOptions, words, prog="", description="")
    assert options.evaluation.every == 7
    assert options.evaluation.depth >= options.draft.block_size - 1


def test_no_file_beside_a_program_hides_a_module():
    """`python train/eagle3.py` puts train/ first on the path."""
    assert not [path for path in (ROOT / "train").glob("*.py") if importlib.util.find_spec(path.stem)]
