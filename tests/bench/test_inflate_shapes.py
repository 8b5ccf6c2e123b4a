"""Tests of which drafts fit into a shape, of the shapes' sizes, and of the checkpoints that are written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.bench.inflate import DFlashDraft, Eagle3Draft, InflateConfig, inflate, write_shards
from slipstream.bench.inflate_weights import SHAPES, places, target_json
from slipstream.models.drafts.dflash import DFlashConfig
from slipstream.models.drafts.eagle3 import Eagle3Config
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.models.files.checkpoint import read_json, read_tensors, weights_fingerprint
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import Target, load_config
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft
from slipstream.tests.sources import TINY
from slipstream.tests.tables import each_case


def small_eagle3(**fields: Any) -> Eagle3Draft:
    values = {"draft_vocab_size": 1024, "aux_layers": (1, 3, 5)} | fields
    return Eagle3Draft(Eagle3Config.from_target(load_config(TINY), **values), {})


def small_dflash(**fields: Any) -> DFlashDraft:
    values = {"num_layers": 3, "aux_layers": (1, 3, 5), "mask_token_id": 9, "block_size": 8} | fields
    return DFlashDraft(DFlashConfig.from_target(load_config(TINY), **values), {})


def big_config(shape: str, folder: Path) -> TargetSpec:
    (folder / "config.json").write_text(json.dumps(target_json(read_json(TINY / "config.json"), SHAPES[shape])))
    return load_config(folder)


@pytest.mark.parametrize(
    ("shape", "num_parameters"),
    # As published: Llama-3.1-8B, and 32 pairs of q/k norms that it has not; Qwen3-8B.
    [("llama31-8b", 8_030_261_248 + 32 * 2 * 128), ("qwen3-8b", 8_190_735_360)],
)
def test_the_big_targets_have_the_models_sizes(shape, num_parameters, tmp_path):
    with torch.device("meta"):
        target = Target(big_config(shape, tmp_path))
    assert sum(weight.numel() for weight in target.parameters()) == num_parameters
    for draft in (small_eagle3(), small_dflash()):
        draft.check(load_config(TINY), SHAPES[shape])


def test_features_move_with_their_layers():
    assert places(6, 32) == {0: 0, 5: 1, 10: 2, 16: 3, 21: 4, 26: 5}
    assert places(6, 6) == {layer: layer for layer in range(6)}
    draft = small_eagle3(aux_layers=(1, 5, 6))
    assert draft.big_config(SHAPES["llama31-8b"]).aux_layers == (5, 26, 32)
    assert draft.big_config(SHAPES["qwen3-8b"]).aux_layers == (6, 30, 36)


@each_case()
def test_a_block_draft_reads_five_states_of_which_some_are_its_own(small, big):
    draft = small_dflash(aux_layers=small)
    states = draft.states(SHAPES["llama31-8b"])
    assert draft.big_config(SHAPES["llama31-8b"]).aux_layers == tuple(states)
    assert list(states) == sorted(states)
    assert len(states) == 5
    assert {layer: index for layer, index in states.items() if index is not None} == big


def test_the_big_block_draft_has_five_layers_of_the_targets_sizes():
    draft = small_dflash(sliding_window=100, windowed_layers=(1,), block_size=16)
    config = draft.big_config(SHAPES["llama31-8b"], target="somewhere")
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (5, 4096, 14336)
    assert (config.num_heads, config.num_kv_heads) == (32, 8)
    assert (config.vocab_size, config.draft_vocab_size, config.target_num_layers) == (128256, None, 32)
    assert (config.block_size, config.mask_token_id, config.target) == (16, 9, "somewhere")
    assert places(3, 5) == {0: 0, 1: 1, 3: 2}
    assert config.windowed_layers == (1, 2)  # small layer 1, and the one added behind it
    assert small_dflash(draft_vocab_size=1024).big_config(SHAPES["llama31-8b"]).draft_vocab_size == 32000


def test_the_big_draft_is_an_eagle3_head_of_the_targets_sizes():
    config = small_eagle3().big_config(SHAPES["llama31-8b"], target="somewhere")
    assert (config.hidden_size, config.target_hidden_size, config.intermediate_size) == (4096, 4096, 14336)
    assert (config.num_heads, config.num_kv_heads, config.draft_vocab_size) == (32, 8, 32000)
    assert (config.rms_norm_eps, config.target, config.head_dim) == (1e-6 / 16, "somewhere", 128)
    assert config.rope == load_config(TINY).rope


@each_case(
    ({}, "dflash", {"aux_layers": tuple(range(6))}, {}, "draft aux_layers: 6 do not fit"),
    (
        {},
        "dflash",
        {"lilicorr": LiLiCorrConfig(hidden_size=512)},
        {},
        "draft has a LiLiCorr scorer; only block drafts without one",
    ),
)
def test_what_does_not_fit_is_named(model, drafter, draft, shape, message):
    config = replace(load_config(TINY), **model)
    sizes = replace(SHAPES["mid"], **shape)
    with pytest.raises(ValueError, match=message):
        (small_eagle3 if drafter == "eagle3" else small_dflash)(**draft).check(config, sizes)


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "draft"
    save_random_draft(TINY, folder, 1500)
    return folder


def test_the_pair_knows_where_it_lies_and_belongs_together(draft, tmp_path):
    output = tmp_path / "runs" / "pair"
    save_random_dflash(TINY, tmp_path / "block", target=str(TINY), draft_vocab_size=1500)
    config = InflateConfig(
        draft=str(draft), more={"dflash": str(tmp_path / "block")}, shape="small", output=str(output)
    )
    inflate(config)
    block = read_json(output / "draft-dflash" / "config.json")
    assert (block["architectures"], block["target"]) == (["DFlashDraftModel"], str(output / "target"))
    assert block["target_fingerprint"] == weights_fingerprint(output / "target")
    values = read_json(output / "draft" / "config.json")
    assert values["target"] == str(output / "target")
    assert values["target_fingerprint"] == weights_fingerprint(output / "target")
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (output / "target" / name).read_bytes() == (TINY / name).read_bytes()
    before = weights_fingerprint(output / "target")
    inflate(replace(config, more={}))  # replaced, and the same again
    assert not (output / "draft-dflash").exists()
    assert weights_fingerprint(output / "target") == before
    assert [path.name for path in output.parent.iterdir()] == ["pair"]


def test_a_target_in_several_files_is_read_back(tmp_path):
    tensors = {f"part.{index}": torch.randn(64, 1 + index) for index in range(20)}
    like = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_shards(tmp_path, like, {name: tensor.clone for name, tensor in tensors.items()}, size=10_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    read = read_tensors(tmp_path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.items())
