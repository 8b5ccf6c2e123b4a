"""`draft.interchange`: what a server loads is accepted and written so that it does, all else is refused by name. The
oracle is tests/server_loaders.py, which states the servers' rules again."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import Accelerator

from slipstream.config import parse
from slipstream.data_tools.convert import convert
from slipstream.data_tools.verb_options import ConvertConfig
from slipstream.models.drafts.dflash import DFlashConfig
from slipstream.models.drafts.interchange import (
    RULES,
    SERVERS,
    Rule,
    broken_rules,
    draft_values,
    layout_for,
    values_of_json,
)
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.families import OutputGate
from slipstream.tests import server_loaders
from slipstream.tests.tables import each_case, table_of
from slipstream.train.dflash import DFlashTraining
from slipstream.train.dflash_options import DFlashOptions
from slipstream.train.draft_setup import build
from slipstream.train.eagle import EagleTraining
from slipstream.train.eagle3 import Eagle3Training
from slipstream.train.eagle3_options import Eagle3Options
from slipstream.train.eagle_options import EagleOptions
from slipstream.train.mtp import MTPTraining
from slipstream.train.mtp_options import MTPOptions
from slipstream.train.target_files import TargetFiles

DEPTH = 4  # layers of the target
KINDS: dict[str, tuple[Any, Any]] = {
    "eagle3": (Eagle3Options, Eagle3Training),
    "eagle": (EagleOptions, EagleTraining),
    "mtp": (MTPOptions, MTPTraining),
    "dflash": (DFlashOptions, DFlashTraining),
}
SIZES = {"dflash": ["--draft.num_layers=2", "--draft.block_size=4", "--draft.mask_token_id=7"]}
PLAIN = ("--draft.norms=[]",)
CASES: dict[str, list[list[str]]] = table_of(__file__, "cases")  # MAP stands for a token map
UNREAD = (("vllm", "eagle"), ("sglang", "mtp"), ("vllm", "mtp"))  # checkpoints that a server does not load at all
PARAMETERS = [
    pytest.param(
        drafter,
        (*(PLAIN if drafter == "eagle3" else ()), *words),
        server,
        id=f"{drafter} {' '.join(words).replace('--draft.', '')} {server}",
        marks=() if number % 2 == place else pytest.mark.slow,  # the gate asks one server about each
    )
    for drafter in CASES
    for number, words in enumerate(CASES[drafter])
    for place, server in enumerate(("sglang", "vllm"))
]


@dataclass(frozen=True, slots=True)
class Draft:
    folder: Path
    values: dict[str, Any]  # options of `draft`


WriteDraft = Callable[..., Draft]


@pytest.fixture
def write(target_path, data_path, vocabulary_path, tmp_path) -> WriteDraft:
    """Writes an untrained draft as training does."""

    def run(drafter, *words):
        program, kind = KINDS[drafter]
        flags = [f"--target={target_path}", f"--data.path={data_path}", "--output=o", *SIZES.get(drafter, ())]
        flags += [word.replace("MAP", str(vocabulary_path)) for word in words]
        options = parse(program, flags, prog="train", description="")
        training = build(kind, TargetFiles.find(options, Accelerator(cpu=True), kind.Network))
        folder = tmp_path / "draft"
        folder.mkdir()
        training.write(training.state_dict(), folder, {})
        return Draft(folder, draft_values(training.draft.config))

    return run


def loads(server: str, folder: Path) -> bool:
    try:
        server_loaders.check(server, folder, DEPTH)
    except (AssertionError, KeyError):
        return False
    return True


@pytest.mark.parametrize(("drafter", "words", "server"), PARAMETERS)
def test_what_a_server_loads_is_accepted_and_the_rest_refused(drafter, words, server, write, tmp_path):
    draft = write(drafter, *words)
    rules = broken_rules(server, drafter, draft.values)
    config = json.loads((draft.folder / "config.json").read_text())
    assert broken_rules(server, drafter, values_of_json(config, drafter)) == rules
    flag = f"--draft.interchange={server}"
    folder = draft.folder
    layout = layout_for(server, drafter, draft.values)
    if not rules and layout != "slipstream":
        folder = tmp_path / "converted"
        convert(ConvertConfig(input=str(draft.folder), output=str(folder), layout=layout))
    assert loads(server, folder) == (not rules)
    if server == "sglang" and drafter != "mtp":
        assert_convert_agrees(drafter, draft, tmp_path / "sglang")
    draft.folder.rename(tmp_path / "draft-before")
    if rules:
        assert_refused(rules[0], flag, partial(write, drafter, *words))
    else:
        write(drafter, *words, flag)


def assert_refused(rule: Rule, flag: str, write: Callable[[str], Draft]):
    """By the message of the parser or, where the target's depth decides, of the program."""
    with pytest.raises((SystemExit, ValueError)) as stop:
        write(flag)
    error = stop.value.__context__ if isinstance(stop.value, SystemExit) else stop.value
    message = str(error)
    assert f"draft.{rule.option} is " in message
    assert rule.reason in message
    assert rule.remedy in message


def assert_convert_agrees(drafter: str, draft: Draft, output: Path):
    """EAGLE drafts without a bias get one of zeros."""
    config = ConvertConfig(input=str(draft.folder), output=str(output), layout="sglang")
    rules = [rule for rule in broken_rules("sglang", drafter, draft.values) if rule.option != "bias"]
    if rules:
        with pytest.raises(ValueError, match=f"^{rules[0].option} is .*: use layout slipstream"):
            convert(config)
        return
    convert(config)
    assert loads("sglang", output)


@pytest.mark.parametrize(("server", "drafter"), [pair for pair in RULES if pair not in UNREAD])
def test_the_defaults_that_interchange_chooses_load_there(server, drafter, write):
    """The default of `aux_layers` does not in a target of four layers or fewer, whose last it names."""
    layers = () if drafter == "eagle" else ("--draft.aux_layers=[0, 2]",)
    assert loads(server, write(drafter, f"--draft.interchange={server}", *layers).folder)


def test_every_rule_is_tried():
    from_files = ("attention_bias", "qkv_bias", "markov_head_type", *LAGUNA_PARTS)  # no options of training
    pairs = [(server, drafter) for server, drafter in RULES]
    tried = {
        rule.reason
        for server, drafter in pairs
        for words in CASES[drafter]
        for rule in broken_rules(server, drafter, {**OFF, **options_of(words)})
    }
    rules = [rule for rules in RULES.values() for rule in rules if rule.option not in from_files]
    assert not {rule.reason for rule in rules} - tried


LAGUNA_PARTS: dict[str, Any] = {"tap_norms": True, "context_norms": True, "gate": OutputGate(activation="sigmoid")}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("part", LAGUNA_PARTS)
def test_parts_of_lagunas_drafts_load_in_its_makers_files_alone(part, server, make_target):
    target = load_config(make_target("qwen3"))
    fields = {"num_layers": 2, "mask_token_id": 7, "aux_layers": (0, 2), part: LAGUNA_PARTS[part]}
    config = DFlashConfig.from_target(target, **fields)
    for values in (draft_values(config), values_of_json(config.to_json(), "dflash")):
        assert [rule.option for rule in broken_rules(server, "dflash", values)] == [part]


ALL_NORMS = ("fc_norm", "norm_before_residual", "norm_output", "qk_norm")
OFF = {"target_num_layers": DEPTH, "markov_head_type": "vanilla"}


def options_of(words: tuple[str, ...]) -> dict[str, Any]:
    pairs = [word.removeprefix("--draft.").split("=", 1) for word in words]
    return {name: yaml.safe_load(value) for name, value in pairs}


@each_case()
def test_interchange_chooses_the_nearest_defaults(words, norms, tmp_path):
    """`norms` None: all."""
    (tmp_path / "file.yaml").write_text("draft:\n  interchange: sglang\n")
    options = [word.replace("FILE", str(tmp_path / "file.yaml")) for word in words]
    words = ["--target=t", "--output=o", "--data.path=d", *options]
    assert parse(Eagle3Options, words, prog="", description="").draft.norms == (
        ALL_NORMS if norms is None else (*norms,)
    )


def test_a_default_that_the_user_writes_down_is_refused(capsys):
    words = ["--target=t", "--output=o", "--data.path=d", "--draft.interchange=sglang", "--draft.norms=[qk_norm]"]
    with pytest.raises(SystemExit) as stop:
        parse(Eagle3Options, words, prog="", description="")
    assert stop.value.code == 2
    assert (
        "draft.norms is [qk_norm], but draft.interchange is sglang: SGLang 0.5.23 has no norms of queries and keys in "
        "an EAGLE3 layer; give [fc_norm, norm_output], or set draft.interchange to own"
    ) in capsys.readouterr().err
