"""Tests the choice of drafters by name or checkpoint, and the options that are refused."""

import json

from slipstream.models.drafts.source import source_of
from slipstream.serve.drafters.eagle import Drafter as EagleDrafter
from slipstream.serve.drafters.eagle3 import Drafter as Eagle3Drafter
from slipstream.serve.drafters.none import Drafter as NoneDrafter
from slipstream.serve.drafters.options import options_of
from slipstream.serve.drafters.registry import build_options, find_drafter
from slipstream.tests.random_drafts import save_random_draft, save_random_eagle
from slipstream.tests.serve.engine_runs import build_engine
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error


def test_drafters_are_found_by_name_and_by_checkpoint(make_target, tmp_path):
    assert find_drafter(source_of("none")) is NoneDrafter
    assert find_drafter(source_of("eagle3")) is Eagle3Drafter
    save_random_draft(make_target("llama"), tmp_path / "eagle3")
    save_random_eagle(make_target("llama"), tmp_path / "eagle")
    assert find_drafter(source_of(str(tmp_path / "eagle3"))) is Eagle3Drafter
    assert find_drafter(source_of(str(tmp_path / "eagle"))) is EagleDrafter


@each_case()
def test_published_drafts_are_told_apart(config, name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert source_of(str(tmp_path)).drafter == name


@each_case()
def test_unknown_checkpoints_are_refused_with_the_known_ones(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with user_error(message):
        find_drafter(source_of(str(tmp_path)))


def test_unknown_names_are_refused_with_the_known_ones(tmp_path):
    for name in ("medusa", "base", ""):
        with user_error(f"drafter '{name}' does not exist; name .* one of: .*eagle3, .*none"):
            find_drafter(source_of(name))
    with user_error("checkpoint ../medusa does not exist"):
        find_drafter(source_of("../medusa"))
    with user_error(r"config\.json is missing"):
        find_drafter(source_of(str(tmp_path)))


@each_case()
def test_options_are_checked(options, message):
    for drafter in ("eagle", "eagle3"):
        with user_error(message):
            build_options(options_of(drafter), options)


def test_options_of_other_drafters_are_refused():
    assert build_options(options_of("eagle3"), {"depth": 5}).depth == 5
    with user_error(r"drafter option 'depth' does not exist; valid: \(none\)"):
        build_options(options_of("none"), {"depth": 2})


def test_a_checkpoint_drafter_without_a_checkpoint_is_refused(make_target):
    with user_error("checkpoint eagle3 does not exist; name a folder or a hub id"):
        build_engine(make_target("llama"), "eagle3")
