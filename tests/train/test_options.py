"""The options of training programs are frozen here: adding one is an edit of this list, and is meant to hurt."""

import importlib.util
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from slipstream.config import build_parser, option_names, parse
from slipstream.train.dflash import DFlashOptions
from slipstream.train.eagle import EagleOptions
from slipstream.train.eagle3 import Eagle3Options
from slipstream.train.options import RunOptions

ROOT = Path(__file__).parents[2]
SHARED_OPTIONS = """
    checkpoint.every checkpoint.keep data.batch_size data.features data.features_missing data.max_length data.path
    draft.intermediate_size draft.vocabulary dry_run evaluation.depth evaluation.documents
    evaluation.every evaluation.samples optim.accumulation optim.betas optim.clip optim.epochs optim.lr optim.name
    optim.steps optim.warmup_ratio optim.weight_decay output precision resume revision seed target target_compile
    target_sharding tracker.artifacts tracker.entity tracker.name tracker.project tracker.tags tracker.tensorboard
    tracker.wandb trust_remote_code
"""
PROGRAMS: dict[str, tuple[type[RunOptions], str]] = {
    "eagle": (
        EagleOptions,
        "draft.bias draft.feature_weight draft.noise draft.token_weight draft.ttt_decay draft.ttt_steps",
    ),
    "eagle3": (
        Eagle3Options,
        "draft.feature_layers draft.init_from_target draft.loss draft.step_weights draft.ttt_decay draft.ttt_steps",
    ),
    "dflash": (
        DFlashOptions,
        "draft.anchors draft.block_size draft.feature_layers draft.gamma draft.loss draft.mask_token_id "
        "draft.init_from_target draft.num_layers draft.sliding_window draft.windowed_layers",
    ),
}
RECIPES = [
    pytest.param(name, path, id=f"{name}-{path.stem}")
    for name in PROGRAMS
    for path in sorted((ROOT / "configs" / name).glob("*.yaml"))
]


def parse_eagle3(*argv: str) -> Eagle3Options:
    return parse(Eagle3Options, argv, prog="train/eagle3.py", description="")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_options_are_these(program: str) -> None:
    groups = {"checkpoint", "data", "draft", "evaluation", "optim", "tracker"}
    options, own = PROGRAMS[program]
    names = set(option_names(build_parser(options, prog="", description=""))) - groups
    assert sorted(names) == sorted(SHARED_OPTIONS.split() + own.split())


@pytest.mark.parametrize(("program", "path"), RECIPES)
def test_recipes_parse_and_flags_win(program: str, path: Path) -> None:
    options = parse(PROGRAMS[program][0], [f"--config={path}", "--optim.lr=0.25"], prog="", description="")
    assert options.optim.lr == 0.25
    assert options.data.batch_size == yaml.safe_load(path.read_text())["data"]["batch_size"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configs(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.num_machines == 1
    assert config.num_processes >= 1


def test_there_is_an_accelerate_config_for_each_kind_of_run() -> None:
    names = {path.stem for path in (ROOT / "configs" / "accelerate").glob("*.yaml")}
    assert names == {"cpu", "single", "ddp", "fsdp", "zero2", "zero3"}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--optim.lr=0", "optim.lr is 0.0; give a positive number"),
        ("--optim.accumulation=0", "optim.accumulation is 0; give at least 1"),
        ("--optim.warmup_ratio=1.5", "optim.warmup_ratio is 1.5"),
        ("--optim.betas=[0.9, 1.0]", "optim.betas is [0.9, 1.0]"),
        ("--optim.weight_decay=-0.1", "optim.weight_decay -0.1"),
        ("--seed=-1", "seed is -1; give 0 or more"),
        ("--draft.ttt_steps=0", "draft.ttt_steps is 0"),
        ("--draft.feature_layers=[]", "draft.feature_layers is []; name at least one state"),
        ("--evaluation.depth=0", "evaluation.depth is 0; give at least 1"),
        ("--tracker.artifacts=best", "tracker.artifacts is best, but nothing goes to W&B; set tracker.wandb"),
        ("--draft.steps=3", "valid options"),
        ("--resume=yes", "resume"),
        ("--target_sharding=yes", "target_sharding"),
    ],
)
def test_bad_values_are_named(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_eagle3("--target=t", "--output=o", "--data.path=d", argument)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("error", "the target's layers are not run at all"), ("online", "would run the target unequally often")],
)
def test_captured_states_and_a_shared_target_exclude_each_other(
    missing: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.features=f", f"--data.features_missing={missing}", "--target_sharding=machine"]
    with pytest.raises(SystemExit) as stop:
        parse_eagle3("--target=t", "--output=o", "--data.path=d", *words)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert reason in message
    assert "set target_sharding to none, or leave data.features out" in message


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--draft.anchors=0", "draft.anchors is 0 and draft.num_layers 5; give at least 1"),
        ("--draft.gamma=0", "draft.gamma is 0.0; give a positive number"),
        ('--draft={"gamma": 7, "loss": "dpace"}', "draft.gamma is 7.0, which loss dpace does not use; leave it out"),
        ("--draft.loss=other", "draft.loss"),
        ("--draft.feature_layers=[]", "draft.feature_layers is []; name at least one state"),
    ],
)
def test_bad_values_of_dflash_are_named(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(DFlashOptions, ["--target=t", "--output=o", "--data.path=d", argument], prog="", description="")
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("width", [0, -5])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_draft_without_width_is_refused(program: str, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target=t", "--output=o", "--data.path=d", f"--draft.intermediate_size={width}"]
    with pytest.raises(SystemExit) as stop:
        parse(PROGRAMS[program][0], words, prog="", description="")
    assert stop.value.code == 2
    assert f"draft.intermediate_size is {width}; give at least 1" in capsys.readouterr().err


def test_a_block_draft_is_evaluated_on_whole_blocks() -> None:
    words = ["--target=t", "--output=o", "--data.path=d", "--evaluation.every=7", "--draft.block_size=10"]
    options = parse(DFlashOptions, words, prog="", description="")
    assert options.evaluation.every == 7
    assert options.evaluation.depth >= options.draft.block_size - 1


@pytest.mark.parametrize("path", sorted((ROOT / "train").glob("*.py")), ids=lambda path: path.stem)
def test_no_file_beside_a_program_hides_a_module(path: Path) -> None:
    """`python train/eagle3.py` puts train/ first on the path."""
    assert importlib.util.find_spec(path.stem) is None
