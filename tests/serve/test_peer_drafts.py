"""Drafts as other trainers save them, through the engine: every proposal is what the network computes from nothing, and
answers are the target's own. Their files: tests/peer_drafts.py, and the package speculators itself where installed."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from slipstream.models.targets.families import OutputGate
from slipstream.serve.cli import read_config
from slipstream.serve.drafters.options import TreeOptions
from slipstream.serve.engine import build
from slipstream.serve.engine.engine import Engine
from slipstream.serve.options import EngineConfig
from slipstream.tests.naive_maker_drafts import LagunaDraft, MuseGlimmerDraft
from slipstream.tests.pairwise import gate_of, some_of
from slipstream.tests.peer_drafts import (
    save_as_laguna,
    save_as_muse_glimmer,
    save_as_specforge,
    save_as_speculators_dflash,
    save_as_speculators_eagle3,
    save_as_zlab,
)
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft
from slipstream.tests.random_targets import RELATIVES, SHAPE, save_random_target, shared_weights
from slipstream.tests.serve import test_dflash, test_eagle
from slipstream.tests.serve.engine_runs import (
    Oracle,
    build_engine,
    check_proposals,
    sized_requests,
    texts_of,
)

LAYERS = (0, 2, 3)
NON_CAUSAL = {"sliding_window": 6, "windowed_layers": (0, 1), "sliding_window_non_causal": True}
DEFAULTS = ("norm_before_residual", "norm_before_fc", "norm_output")  # flags of the recipe of speculators
requests_of = partial(sized_requests, temperature=0.7)
CONFIG: dict[str, Any] = {"max_running": 8, "kv_cache_tokens": 2048, "grammar_drafts": False}


def save_eagle3(target: Path, folder: Path, layers: tuple[int, ...] = LAYERS, *flags: str) -> test_eagle.Oracle:
    """Saves a draft in our layout and returns what it should propose."""
    save_random_draft(target, folder, 100, aux_layers=layers, **dict.fromkeys(flags, True))
    oracle = test_eagle.Oracle(target, folder, TreeOptions())
    oracle.layers = list(layers)
    return oracle


def save_dflash(target: Path, folder: Path, **fields: Any) -> test_dflash.Oracle:
    save_random_dflash(target, folder, texts_of(target, requests_of()[:2]), aux_layers=LAYERS, **fields)
    return test_dflash.Oracle(target, folder, 4)


def check(engine: Engine, oracle: Oracle, target: Path):
    check_proposals(engine, oracle, target, requests_of())


def test_specforge_eagle3(target, tmp_path):
    oracle = save_eagle3(target, tmp_path / "ours")
    save_as_specforge(tmp_path / "ours", tmp_path / "theirs", LAYERS)
    check(build_engine(target, tmp_path / "theirs"), oracle, target)


def test_specforge_eagle3_that_names_no_layers(target, tmp_path):
    """The user has to, on the command line as in Python."""
    oracle = save_eagle3(target, tmp_path / "ours")
    save_as_specforge(tmp_path / "ours", tmp_path / "theirs", None)
    with pytest.raises(ValueError, match="which 3 states of the target's 4 layers fc reads; .* --drafter.aux-layers"):
        build_engine(target, tmp_path / "theirs")
    words = ["--draft", str(tmp_path / "theirs"), "--target", str(target), "--drafter.aux-layers", "[0, 2, 3]"]
    options = read_config(words).drafter
    assert tuple(options["aux_layers"]) == LAYERS
    check(build_engine(target, tmp_path / "theirs", drafter={"aux_layers": [0, 2, 3]}), oracle, target)


def test_specforge_eagle3_of_a_deep_target_follows_the_published_rule(tmp_path):
    target = tmp_path / "target"
    save_random_target(LlamaConfig(**SHAPE | {"num_hidden_layers": 12}), target)
    save_random_draft(target, tmp_path / "ours", 100, aux_layers=(1, 5, 8))
    save_as_specforge(tmp_path / "ours", tmp_path / "theirs", None)
    assert build_engine(target, tmp_path / "theirs").runner.drafter.aux_layers == (1, 5, 8)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"sliding_window": 6, "windowed_layers": (0, 1)}, marks=pytest.mark.slow),
        {"sliding_window": 8, "windowed_layers": (1,)},
        {"sliding_window": 6, "windowed_layers": (0, 1), "sliding_window_non_causal": True},
    ],
)
def test_zlab_dflash(fields, target, tmp_path):
    oracle = save_dflash(target, tmp_path / "ours", **fields)
    save_as_zlab(tmp_path / "ours", tmp_path / "theirs")
    check(build_engine(target, tmp_path / "theirs"), oracle, target)


@pytest.mark.skipif("qwen3-5" not in RELATIVES, reason="this transformers does not know it")
@pytest.mark.parametrize("kind", some_of(["eagle3", "dflash"], ["dflash"]))
def test_drafts_of_others_for_hybrids(kind, make_target, tmp_path):
    """They read outputs of delta nets and of attention."""
    target = make_target("qwen3-5")
    oracle: test_eagle.Oracle | test_dflash.Oracle
    if kind == "eagle3":
        oracle = save_eagle3(target, tmp_path / "ours", (0, 1, 3))
        save_as_specforge(tmp_path / "ours", tmp_path / "theirs", (0, 1, 3))
    else:
        oracle = save_dflash(target, tmp_path / "ours", **NON_CAUSAL)
        save_as_zlab(tmp_path / "ours", tmp_path / "theirs")
    check(build_engine(target, tmp_path / "theirs"), oracle, target)


def test_muse_glimmers_own_draft(make_target, tmp_path):
    """By transformers' network, the target's table without its norm, and what the target makes of logits."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "MuseGlimmerAssistantModel"):
        pytest.skip("this transformers lacks the model")
    target = make_target("muse-glimmer")
    logits = {"output_multiplier": 0.4, "final_logit_softcapping": 3.0}
    oracle = save_dflash(target, tmp_path / "ours", **NON_CAUSAL, **logits)
    save_as_muse_glimmer(tmp_path / "ours", tmp_path / "theirs")
    oracle.naive = MuseGlimmerDraft(tmp_path / "theirs", target, *shared_weights(oracle.states.model))
    check(build_engine(target, tmp_path / "theirs"), oracle, target)


@pytest.mark.parametrize("gating", some_of(["per-head", "per-element"], ["per-head"]))
def test_lagunas_own_draft(gating, make_target, tmp_path):
    target = make_target("laguna" if "laguna" in RELATIVES else "qwen3")  # later than the oldest transformers
    gate = OutputGate(activation="softplus", by_head=gating == "per-head")
    windows = {"sliding_window": 6, "windowed_layers": (0, 1)}
    oracle = save_dflash(target, tmp_path / "ours", gate=gate, tap_norms=True, context_norms=True, **windows)
    save_as_laguna(tmp_path / "ours", tmp_path / "theirs", gating, by_kind=gate.by_head)
    oracle.naive = LagunaDraft(tmp_path / "theirs", *shared_weights(oracle.states.model))
    check(build_engine(target, tmp_path / "theirs"), oracle, target)


@pytest.mark.parametrize(
    ("flags", "window"), gate_of([((), None), (DEFAULTS, 2048), (("fc_norm", "norm_output"), 256)], [(DEFAULTS, 2048)])
)
def test_speculators_eagle3(flags, window, target, tmp_path):
    """The file names its target."""
    oracle = save_eagle3(target, tmp_path / "ours", LAYERS, *flags)
    save_as_speculators_eagle3(tmp_path / "ours", target, tmp_path / "theirs", LAYERS, window)
    check_proposals(
        build.build_engine(EngineConfig(draft=str(tmp_path / "theirs"), **CONFIG)), oracle, target, requests_of()
    )


def test_speculators_eagle3_with_a_window_that_binds(target, tmp_path):
    oracle = save_eagle3(target, tmp_path / "ours")
    oracle.naive.config["sliding_window"] = 9
    save_as_speculators_eagle3(tmp_path / "ours", target, tmp_path / "theirs", LAYERS, 9)
    check(build_engine(target, tmp_path / "theirs"), oracle, target)


@pytest.mark.parametrize(
    "fields", [{"draft_vocab_size": 100}, {"sliding_window": 6, "windowed_layers": (0, 1)}], ids=["reduced", "windows"]
)
def test_speculators_dflash(fields, target, tmp_path):
    oracle = save_dflash(target, tmp_path / "ours", **fields)
    save_as_speculators_dflash(tmp_path / "ours", target, tmp_path / "theirs")
    check_proposals(
        build.build_engine(EngineConfig(draft=str(tmp_path / "theirs"), **CONFIG)), oracle, target, requests_of()
    )


def save_with_package(kind: str, draft: Path, target: Path, folder: Path, layers: tuple[int, ...]):
    """Saves a draft as the package's trainer does: a model from its arguments, here with the weights of `draft`, in
    bf16."""
    speculators = pytest.importorskip("speculators", reason="the package speculators is not installed")
    from speculators.train.cli import create_transformer_layer_config

    tensors = load_file(draft / "model.safetensors")
    values = json.loads((draft / "config.json").read_text())
    shape = {"num_layers": values["num_hidden_layers"], "draft_arch": "llama" if kind == "eagle3" else "qwen3"}
    decoder = create_transformer_layer_config(
        str(target), hidden_act=None, sliding_window=2048, full_attention_indices=[], **shape
    )
    model = speculators.SpeculatorModel.registry[kind].from_training_args(
        decoder,
        t2d=tensors["t2d"],
        d2t=tensors["d2t"],
        verifier_name_or_path=str(target),
        draft_vocab_size=len(tensors["d2t"]),
        target_layer_ids=[layer + 1 for layer in layers],
        ttt_steps=3,
        block_size=values.get("block_size"),
        mask_token_id=values.get("dflash_config", {}).get("mask_token_id"),
        draft_attn_impl="eager",
        **dict.fromkeys(DEFAULTS, True),
    )
    renamed = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
    assert not model.load_state_dict(renamed, strict=False).unexpected_keys
    model.to(torch.bfloat16).save_pretrained(folder)


def assert_same_files(written_folder: Path, other: Path):
    """Asserts that both folders are equal but for the versions of libraries."""
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (written_folder, other))
    for values in (first, second):
        del values["transformers_version"], values["transformer_layer_config"]["initializer_range"]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            del values["transformer_layer_config"][name]
    assert first == second
    tensors, other_tensors = (load_file(folder / "model.safetensors") for folder in (written_folder, other))
    assert tensors.keys() == other_tensors.keys()
    for key, tensor in tensors.items():
        assert tensor.dtype == other_tensors[key].dtype
        assert torch.equal(tensor, other_tensors[key]), key


def test_eagle3_saved_by_the_package(target, tmp_path):
    ours = tmp_path / "ours"
    peer = tmp_path / "theirs"
    oracle = save_eagle3(target, ours, LAYERS, *DEFAULTS)
    save_with_package("eagle3", ours, target, peer, LAYERS)
    check(build.build_engine(EngineConfig(draft=str(peer), **CONFIG)), oracle, target)
    save_as_speculators_eagle3(ours, target, tmp_path / "written", LAYERS, 2048)
    assert_same_files(tmp_path / "written", peer)


def test_dflash_saved_by_the_package(target, tmp_path):
    ours = tmp_path / "ours"
    peer = tmp_path / "theirs"
    windows = {"sliding_window": 2048, "windowed_layers": (0, 1)}
    oracle = save_dflash(target, ours, draft_vocab_size=100, intermediate_size=48, **windows)
    save_with_package("dflash", ours, target, peer, LAYERS)
    check(build.build_engine(EngineConfig(draft=str(peer), **CONFIG)), oracle, target)
    save_as_speculators_dflash(ours, target, tmp_path / "written")
    assert_same_files(tmp_path / "written", peer)
