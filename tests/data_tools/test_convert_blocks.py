"""Block drafts with heads in the layouts of other trainers (tests/peer_drafts.py writes these out): read as what they
are, written so that nothing but names and places differs, and back bit by bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.models.drafts.base import load_draft, write_draft
from slipstream.models.drafts.dflash import DFlash, DFlashConfig
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.models.targets.decoder import load_config
from slipstream.tests import peer_drafts
from slipstream.tests.data_tools.conversion import Runs, assert_equal_checkpoints
from slipstream.tests.random_targets import change_json
from slipstream.tests.tables import table_of

WINDOWED: dict[str, Any] = {"windowed_layers": (0, 1), "sliding_window": 6}
HEADS: dict[str, dict[str, Any]] = {
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4, **WINDOWED},
    "dspark": {"markov_rank": 8, "confidence_head": True, "sample_from_anchor": True},
    "bonus dspark": {"markov_rank": 8},
    "gated": {"markov_rank": 8, "markov_head_type": "gated", "sample_from_anchor": True},
    "deepspec dflash": {"sample_from_anchor": True},
    "lilicorr": {
        "lilicorr": LiLiCorrConfig(candidate_topk=4, hidden_size=16, num_layers=1, num_heads=2, factor_dim=12),
        "conv_kernel_size": 2,
    },
}
HEADS |= {"windows": WINDOWED, "a window": {**WINDOWED, "windowed_layers": (1,)}}
HEADS |= {"norms of states": {"tap_norms": True}, "norms of the context": {"context_norms": True}}
HEADS["dflash2, causal windows"] = HEADS["dflash2"]
HEADS["dflash2"] = {**HEADS["dflash2"], "sliding_window_non_causal": True}
Save = Callable[[Path, Path, Path], None]  # draft, target, folder
PEERS: dict[str, tuple[str, Save]] = {  # layout of another trainer: heads, and what writes it
    "z-lab DFlash 2": ("dflash2", lambda draft, _, folder: peer_drafts.save_as_zlab_dflash2(draft, folder)),
    "DeepSpec DSpark": ("dspark", peer_drafts.save_as_deepspec),
    "DeepSpec DSpark, gated": ("gated", peer_drafts.save_as_deepspec),
    "DeepSpec DFlash": ("deepspec dflash", peer_drafts.save_as_deepspec),
    "SpecForge DSpark": ("dspark", lambda draft, _, folder: peer_drafts.save_as_specforge_dspark(draft, folder)),
    "SpecForge DSpark, old": (
        "dspark",
        lambda draft, _, folder: peer_drafts.save_as_specforge_dspark(draft, folder, "logit_head"),
    ),
    "speculators DSpark": (
        "dspark",
        lambda draft, target, folder: peer_drafts.save_as_speculators_block(draft, target, folder, "dspark"),
    ),
    "speculators DFlash 2": (
        "dflash2",
        lambda draft, target, folder: peer_drafts.save_as_speculators_block(draft, target, folder, "dflash2"),
    ),
    "ModelOpt DSpark": ("dspark", lambda draft, _, folder: peer_drafts.save_as_modelopt_dspark(draft, folder)),
    "LiLiCorr": ("lilicorr", lambda draft, _, folder: peer_drafts.save_as_lilicorr(draft, folder)),
}
LAYOUTS, WRITTEN = (table_of(__file__, name) for name in ("layouts", "written"))


NOT_NEEDED = {  # fields of the peers' files that say nothing, or what is usual
    *("num_anchors", "attention_dropout", "initializer_range", "transformers_version", "use_cache", "dtype"),
    *("rope_parameters", "max_window_layers", "lilicorr_enabled", "projector_type", "causal", "use_swa"),
    "attention_sink_bias",
}


@pytest.fixture
def runs(make_target, tmp_path, capsys) -> Runs:
    return Runs(make_target("qwen3"), tmp_path, capsys)


def save(runs: Runs, heads: str, **fields: Any) -> Path:
    target = load_config(runs.target)
    torch.manual_seed(5)
    sizes = {"num_layers": 2, "block_size": 4, "mask_token_id": 7, "aux_layers": (0, 2)}
    module = DFlash(DFlashConfig.from_target(target, **sizes, **runs.target_fields() | HEADS[heads] | fields))
    for parameter in module.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    if module.config.draft_vocab_size is not None:
        module.set_vocabulary(torch.arange(module.config.draft_vocab_size) * 2)
    folder = runs.root / "draft"
    folder.mkdir()
    write_draft(module, module.state_dict(), folder, {})
    return folder


def load(runs: Runs, folder: Path) -> DFlash:
    return load_draft(DFlash, folder, load_config(runs.target), None, torch.device("cpu"))


@pytest.mark.parametrize("peer", PEERS)
def test_files_of_others_are_read_as_what_they_are(peer, runs):
    heads, write = PEERS[peer]
    draft = save(runs, heads)
    foreign = runs.root / "foreign"
    write(draft, runs.target, foreign)
    ours = load(runs, draft)
    read = load(runs, foreign)
    identity = {"target": ours.config.target, "target_fingerprint": "f00", "tokenizer_hash": "ba5"}
    fields = read.config.to_json() | identity
    assert fields == ours.config.to_json()
    state = ours.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in read.state_dict().items())
    folder, printed = runs.convert(foreign, "slipstream", "--target", str(runs.target))
    assert ("every slot predicts" in printed) == ours.config.sample_from_anchor
    before, after = (load_file(path / "model.safetensors") for path in (draft, folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(("heads", "layout"), [(heads, layout) for heads in LAYOUTS for layout in LAYOUTS[heads]])
def test_a_round_trip_is_bit_identical(heads, layout, runs):
    draft = save(runs, heads)
    exported, _ = runs.convert(draft, layout)
    back, _ = runs.convert(exported, "slipstream")
    assert_equal_checkpoints(draft, back)


@pytest.mark.parametrize(("layout", "peer"), [(layout, peer) for layout in WRITTEN for peer in WRITTEN[layout]])
def test_tensors_are_written_as_the_peers_own(layout, peer, runs):
    heads, write = PEERS[peer]
    draft = save(runs, heads)
    foreign = runs.root / "foreign"
    write(draft, runs.target, foreign)
    ours, _ = runs.convert(draft, layout)
    expected, tensors = (load_file(folder / "model.safetensors") for folder in (foreign, ours))
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    values, expected_values = (json.loads((folder / "config.json").read_text()) for folder in (ours, foreign))
    assert values["architectures"] == expected_values["architectures"]
    flat = values | (values.get("dflash_config") or {})
    foreign_alone = (expected_values.keys() | (expected_values.get("dflash_config") or {}).keys()) - flat.keys()
    assert foreign_alone <= NOT_NEEDED


@pytest.mark.parametrize("heads", LAYOUTS)
def test_layouts_that_cannot_hold_a_head_say_so(heads, runs):
    draft = save(runs, heads)
    for layout in {"sglang", "speculators", "deepspec", "modelopt"} - set(LAYOUTS[heads]):
        assert "error: " in runs.refused(draft, layout)


def test_a_reduced_vocabulary_keeps_its_head_in_speculators(runs):
    draft = save(runs, "dspark", draft_vocab_size=40)
    folder, _ = runs.convert(draft, "speculators")
    tensors = load_file(folder / "model.safetensors")
    assert tensors["markov_head.markov_w1.weight"].shape == (120, 8), "of the token before, any of the target's"
    assert tensors["markov_head.markov_w2.weight"].shape == (40, 8)
    back, _ = runs.convert(folder, "slipstream")
    assert_equal_checkpoints(draft, back)
    for layout in ("deepspec", "modelopt"):
        assert "has a vocabulary of its own (draft_vocab_size)" in runs.refused(draft, layout)


def test_what_is_missing_or_changed_is_named(runs):
    draft = save(runs, "dspark")
    foreign = runs.root / "foreign"
    peer_drafts.save_as_deepspec(draft, runs.target, foreign)
    file = foreign / "model.safetensors"
    tensors = load_file(file)
    flags = ["slipstream", "--target", str(runs.target)]
    save_file({key: x for key, x in tensors.items() if "confidence" not in key}, file)
    assert "missing confidence_head.proj.bias; missing confidence_head.proj.weight" in runs.refused(foreign, *flags)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, file)
    assert "lm_head.weight is not the target's" in runs.refused(foreign, *flags)
    save_file(tensors | {"markov_head.joint_proj.weight": torch.zeros(24, 80)}, file)
    assert "unexpected markov_head.joint_proj.weight" in runs.refused(foreign, *flags)
    change_json(foreign / "config.json", markov_head_type="rnn")
    assert "recurrent Markov head (markov_head_type 'rnn') is not supported" in runs.refused(foreign, *flags)


def test_the_convention_of_an_unclear_file_is_the_users_to_name(runs):
    draft = save(runs, "dspark")
    foreign = runs.root / "foreign"
    peer_drafts.save_as_deepspec(draft, runs.target, foreign)
    change_json(foreign / "config.json", architectures=["DFlashDraftModel"])
    flags = ["slipstream", "--target", str(runs.target)]
    assert "DFlashDraftModel with a Markov head are trained either way" in runs.refused(foreign, *flags)
    folder, printed = runs.convert(foreign, *flags, "--sample-from-anchor", "false")
    assert "slots 1, 2, ... predict their own token: as the option sample_from_anchor says" in printed
    assert json.loads((folder / "config.json").read_text())["sample_from_anchor"] is False
    assert "does not predict at the anchor" in runs.refused(folder, "deepspec")
