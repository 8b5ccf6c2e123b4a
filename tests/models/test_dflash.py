"""DFLASH: default layers, configs; the public file exactly, other trainers' layouts, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models.drafts.block_layouts import UNSUPPORTED
from slipstream.models.drafts.dflash import DFlash, DFlashConfig, default_block_aux_layers
from slipstream.models.drafts.speculators_layout import to_speculators
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import load_config
from slipstream.tests.models.saved_drafts import ORIGIN, SavedDraft, Values
from slipstream.tests.tables import each_case, table_of
from slipstream.tests.user_errors import user_error


@each_case()
def test_default_layers_are_those_of_the_peers_on_deep_targets(num_layers, num_draft_layers, expected):
    assert default_block_aux_layers(num_layers, num_draft_layers) == tuple(expected)


def test_default_layers_are_distinct_outputs_for_every_depth():
    for num_layers in range(3, 100):
        for num_draft_layers in range(1, 9):
            layers = default_block_aux_layers(num_layers, num_draft_layers)
            assert len(set(layers)) == len(layers)
            assert 0 <= min(layers) <= max(layers) < num_layers
            assert max(layers) >= num_layers // 2


@pytest.fixture
def config(make_target) -> Callable[..., DFlashConfig]:
    target = load_config(make_target("qwen3"))
    defaults = {"num_layers": 2, "mask_token_id": 7, "aux_layers": (0, 2)}
    return lambda **fields: DFlashConfig.from_target(target, **defaults | fields)


@each_case()
def test_configs_are_checked(fields, message, config):
    with user_error(message):
        config(**fields)


def test_blocks_are_an_anchor_and_masks(config):
    blocks = DFlash(config()).block_tokens(torch.tensor([[3], [4]]), 3)
    assert blocks.tolist() == [[[3, 7, 7]], [[4, 7, 7]]]


def test_a_vocabulary_may_leave_out_tokens(config):
    assert DFlash(config()).target_ids is None
    assert not {"d2t", "t2d"} & DFlash(config()).state_dict().keys()
    module = DFlash(config(draft_vocab_size=3))
    module.set_vocabulary(torch.tensor([2, 5, 119]))
    assert module.target_ids.tolist() == module.t2d.nonzero().flatten().tolist() == [2, 5, 119]
    for ids in ([2, 5], [5, 2, 7], [2, 2, 7], [-1, 2, 7]):
        with user_error("draft vocabulary: need 3 distinct ascending ids"):
            module.set_vocabulary(torch.tensor(ids))
    with user_error("id 120 is outside the target's 120 tokens"):
        module.set_vocabulary(torch.tensor([2, 5, 120]))


# Fields that the trainers write besides the network's shape. DeepSpec's stand at the top and name no drafter.
DEEPSPEC = {
    **dict.fromkeys(("drafter", "dflash_config", "sample_from_anchor"), None),
    **{"architectures": ["Qwen3DSparkModel"], "mask_token_id": 7, "target_layer_ids": [0, 2], "num_anchors": 512},
    **{"markov_rank": 0, "enable_confidence_head": False},
}
INNER = {"mask_token_id": 7, "target_layer_ids": [0, 2]}


def save_draft(target: TargetSpec, folder: Path, **fields: Any) -> SavedDraft:
    torch.manual_seed(4)
    defaults = {"num_layers": 2, "mask_token_id": 7, "block_size": 8, "aux_layers": (0, 2)}
    module = DFlash(DFlashConfig.from_target(target, **defaults, **ORIGIN, **fields))
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return SavedDraft(module, target, folder)


@pytest.fixture
def draft(make_target, tmp_path) -> SavedDraft:
    return save_draft(load_config(make_target("qwen3")), tmp_path)


@pytest.fixture
def reduced(make_target, tmp_path) -> SavedDraft:
    fields = {"sliding_window": 6, "windowed_layers": (1,), "draft_vocab_size": 50, "attention_bias": True}
    return save_draft(load_config(make_target("qwen3")), tmp_path, **fields)


@pytest.mark.parametrize("name", ["draft", "reduced"])
def test_a_round_trip_is_exact(name, request):
    request.getfixturevalue(name).check_round_trip()


def test_the_files_have_the_public_form(draft):
    public = table_of(__file__, "public")
    layers = {f"layers.{index}.{key}": shape for index in range(2) for key, shape in public["layer"].items()}
    draft.check_public(public["others"] | layers, public["fields"] | ORIGIN)
    assert "draft_vocab_size" not in json.loads((draft.folder / "config.json").read_text())


@each_case()
def test_other_trainers_configs_load(values, draft):
    draft.change(values=values)
    draft.assert_loads_equal()
    assert draft.load().config == draft.module.config


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_other_names_of_tensors_load(prefix, draft):
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    copies = {"embed_tokens.weight": torch.zeros(120, 32), "lm_head.weight": torch.zeros(120, 32)}
    draft.change(tensors=lambda old: {prefix + names.get(key, key): x for key, x in (old | copies).items()})
    draft.assert_loads_equal()


def test_deepspecs_drafts_predict_from_the_anchor(draft):
    draft.change(values=DEEPSPEC)
    draft.assert_loads_equal()
    assert draft.load().config.sample_from_anchor
    draft.change(values={"enable_confidence_head": True})
    with user_error("missing confidence_head.proj.bias"):
        draft.load()


def test_the_layout_of_speculators_loads(reduced):
    values = json.loads((reduced.folder / "config.json").read_text())
    changed = to_speculators(values, "owner/model", ["Qwen3ForCausalLM"])
    assert changed["aux_hidden_state_layer_ids"] == [1, 3], "counted by the layer that a state goes into"
    assert changed["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    (reduced.folder / "config.json").write_text(json.dumps(changed))
    reduced.assert_loads_equal()
    assert reduced.load().config == reduced.module.config
    (reduced.folder / "config.json").write_text(json.dumps(changed | {"sliding_window_non_causal": True}))
    assert reduced.load().masks == ["block", "block"]


@pytest.mark.parametrize("place", ["top", "dflash_config"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_network_does_not_do_is_refused_by_name(name, place, draft):
    draft.change(values={name: 2} if place == "top" else {"dflash_config": INNER | {name: 2}})
    with user_error(f"draft config sets {name} to 2, which is not supported"):
        draft.load()


@each_case()
def test_what_others_files_mean_is_refused_by_name_or_certain(values, message, draft):
    draft.change(values={"sample_from_anchor": None} | values)
    with user_error(message):
        draft.load()


LAGUNA: Values = {"drafter": None, "architectures": ["DFlashLagunaForCausalLM"], "sample_from_anchor": None}


@each_case()
def test_what_lagunas_drafts_do_not_say_is_refused(values, message, draft):
    draft.change(values=LAGUNA | values)
    with user_error(message):
        draft.load()


@pytest.mark.parametrize("gate", ["sigmoid", {"activation": "tanh"}, {"by_head": True}])
def test_an_unknown_gate_is_refused(gate, draft):
    draft.change(values={"dflash_config": INNER | {"output_gate": gate}})
    with user_error("output_gate is .*; it must have activation, sigmoid or softplus"):
        draft.load()


def test_muse_glimmers_draft_has_windows_unless_its_file_says_otherwise(draft):
    """transformers' defaults: a window of 2,048 tokens on all layers."""
    muse = {
        **{"drafter": None, "architectures": ["MuseGlimmerAssistantModel"], "sample_from_anchor": None},
        **{"dflash_config": None, **INNER, "vocab_size": None, "layer_types": None, "sliding_window": None},
        "use_sliding_window": None,
    }
    draft.change(values=muse)
    loaded = draft.load()
    assert [layer.mixer.window for layer in loaded.config.layers] == [2048] * 2
    assert loaded.masks == ["block", "block"]
    assert (loaded.config.output_multiplier, loaded.config.final_logit_softcapping) == (1.0, None), "the target's"


WINDOWED: Values = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("values", "mask"),
    [
        (WINDOWED, "causal"),
        (WINDOWED | {"is_causal": False}, "block"),
        (WINDOWED | {"dflash_query_causal": True}, "causal"),
        (WINDOWED | {"architectures": ["DFlash2DraftModel"]}, "block"),
        ({"layer_types": None, "dflash_config": INNER | {"use_swa": True, "swa_window_size": 6}}, "causal"),
    ],
)
def test_whether_slots_see_later_ones_in_a_window(values, mask, draft):
    draft.change(values=values)
    loaded = draft.load()
    assert loaded.masks == [mask] * 2
    assert [layer.mixer.window for layer in loaded.config.layers] == [6, 6]
    assert DFlashConfig.from_json(loaded.config.to_json(), draft.target) == loaded.config


CONVENTIONS: list[tuple[Values, bool | None]] = table_of(__file__, "conventions")


@pytest.mark.parametrize(("values", "expected"), CONVENTIONS)
def test_whether_the_anchor_predicts(values, expected, draft):
    draft.change(values={"sample_from_anchor": None} | values)
    if expected is not None:
        assert draft.load().config.sample_from_anchor is expected
        return
    with user_error("LlamaDSpark are trained either way; .* --drafter.sample-from-anchor true.false"):
        draft.load()
    for choice in (True, False):
        assert draft.load(sample_from_anchor=choice).config.sample_from_anchor is choice


def test_a_choice_that_contradicts_the_file_is_refused(draft):
    with user_error("sample_from_anchor is true, but the draft's config.json has sample_from_anchor"):
        draft.load(sample_from_anchor=True)
    with user_error(r"aux_layers is \[0, 2\]; it is not for block drafts"):
        draft.load(aux_layers=[0, 2])


@each_case()
def test_what_does_not_fit_is_refused(values, message, draft):
    draft.change(values=values)
    with user_error(message):
        draft.load()


def test_a_mask_embedding_of_its_own_is_refused(draft):
    (draft.folder / "mask_embedding.pt").touch()
    with user_error(r"has a mask embedding of its own \(mask_embedding.pt\)"):
        draft.load()
