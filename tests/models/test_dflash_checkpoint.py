"""DFLASH checkpoints: the public file exactly, other trainers' layouts, and what is refused with which words."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.models.config import RopeConfig
from slipstream.models.dflash import (
    UNSUPPORTED,
    DFlash,
    DFlashConfig,
    config_from_json,
    config_to_json,
    load_dflash,
    save_dflash,
)
from slipstream.models.draft import OWN_FIELDS
from slipstream.models.speculators_layout import to_speculators
from slipstream.models.target import load_config

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]
Values = dict[str, Any]
# What the trainers write besides the network's shape. DeepSpec's fields stand at the top and name no drafter.
ZLAB = {"drafter": None, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "dtype": "bfloat16", "bos_token_id": 1}
DEEPSPEC = {
    **dict.fromkeys(("drafter", "dflash_config"), None),
    **{"architectures": ["Qwen3DSparkModel"], "mask_token_id": 7, "target_layer_ids": [0, 2], "num_anchors": 512},
    **{"markov_rank": 0, "enable_confidence_head": False},
}
INNER = {"mask_token_id": 7, "target_layer_ids": [0, 2]}


class Draft:
    """A saved draft of the tiny Qwen3 (V 120, H 32, 4 heads, 2 KV heads of 16, I 48), to be changed and loaded."""

    def __init__(self, target: Path, folder: Path, **fields: Any) -> None:
        self.target, self.folder = load_config(target), folder
        torch.manual_seed(4)
        own = {"target": "owner/model", "target_revision": "main", "target_fingerprint": "f00", "tokenizer_hash": "ba5"}
        defaults = {"num_layers": 2, "mask_token_id": 7, "block_size": 8, "feature_layers": (0, 2)}
        self.module = DFlash(DFlashConfig.from_target(self.target, **defaults | own | fields)).bfloat16()
        for parameter in self.module.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        if self.module.config.draft_vocab_size is not None:
            self.module.set_vocabulary(torch.arange(self.module.config.draft_vocab_size) * 2)
        save_dflash(self.module, self.module.state_dict(), folder, {"argv": ["train"]})

    def change(self, tensors: Callable[[Tensors], Tensors] | None = None, values: Values | None = None) -> None:
        """`tensors` maps the file's; `values` replace those of config.json, and None deletes."""
        file, config = self.folder / "model.safetensors", self.folder / "config.json"
        if tensors:
            save_file(tensors(load_file(file)), file)
        changed = json.loads(config.read_text()) | (values or {})
        config.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))

    def load(self, dtype: torch.dtype | None = torch.bfloat16) -> DFlash:
        return load_dflash(self.folder, self.target, dtype, CPU)

    def assert_loads_equal(self) -> None:
        loaded, original = self.load().state_dict(), self.module.state_dict()
        assert loaded.keys() == original.keys()
        for key in original:
            assert torch.equal(loaded[key], original[key]), key


@pytest.fixture
def draft(make_target: Callable[[str], Path], tmp_path: Path) -> Draft:
    return Draft(make_target("qwen3"), tmp_path)


@pytest.fixture
def reduced(make_target: Callable[[str], Path], tmp_path: Path) -> Draft:
    windows = {"sliding_window": 6, "windowed_layers": (1,)}
    return Draft(make_target("qwen3"), tmp_path, draft_vocab_size=50, attention_bias=True, **windows)


@pytest.mark.parametrize("name", ["draft", "reduced"])
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_a_round_trip_is_exact(name: str, dtype: torch.dtype | None, request: pytest.FixtureRequest) -> None:
    draft: Draft = request.getfixturevalue(name)
    draft.assert_loads_equal()
    loaded = draft.load(dtype)
    assert loaded.config == draft.module.config
    assert json.loads((draft.folder / "run.json").read_text()) == {"argv": ["train"]}
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for key, tensor in draft.module.state_dict().items():
        wide = tensor.float() if tensor.is_floating_point() and dtype else tensor
        assert torch.equal(loaded.state_dict()[key], wide), key


@pytest.mark.parametrize("rope", [RopeConfig(5e5), RopeConfig(1e4, "yarn", {"factor": 4.0, "beta_fast": 30})])
def test_a_config_survives_json(rope: RopeConfig, draft: Draft) -> None:
    scaling = dict(rope.scaling) | ({"original_max_position_embeddings": 64} if rope.scaling else {})
    config = replace(draft.module.config, rope=replace(rope, scaling=scaling), sample_from_anchor=True)
    assert config_from_json(json.loads(json.dumps(config_to_json(config))), draft.target) == config


def test_the_file_holds_the_public_keys(draft: Draft) -> None:
    tensors = load_file(draft.folder / "model.safetensors")
    layer = {
        "input_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (64, 32),
        "self_attn.k_proj.weight": (32, 32),
        "self_attn.v_proj.weight": (32, 32),
        "self_attn.o_proj.weight": (32, 64),
        "self_attn.q_norm.weight": (16,),
        "self_attn.k_norm.weight": (16,),
        "post_attention_layernorm.weight": (32,),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    layers = {f"layers.{index}.{key}": shape for index in range(2) for key, shape in layer.items()}
    expected = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)} | layers
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_a_reduced_vocabulary_is_written_as_offsets(reduced: Draft) -> None:
    tensors = load_file(reduced.folder / "model.safetensors")
    assert (torch.arange(50) + tensors["d2t"]).tolist() == list(range(0, 100, 2))
    assert tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 100, 2))
    assert "layers.1.self_attn.o_proj.bias" in tensors
    reduced.change(tensors=lambda tensors: {key: tensor for key, tensor in tensors.items() if key != "t2d"})
    reduced.assert_loads_equal()
    reduced.change(tensors=lambda tensors: tensors | {"d2t": tensors["d2t"] + 30})
    with pytest.raises(ValueError, match="d2t maps outside the target's 120 tokens or twice to one"):
        reduced.load()


def test_the_config_holds_the_public_fields(draft: Draft) -> None:
    config = json.loads((draft.folder / "config.json").read_text())
    public = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "block_size": 8}
    public |= {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]}, "num_target_layers": 4}
    public |= {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}
    public |= {"hidden_size": 32, "head_dim": 16, "num_key_value_heads": 2, "vocab_size": 120, "rope_theta": 1e4}
    assert public.items() <= config.items()
    assert "draft_vocab_size" not in config
    own = {"target": "owner/model", "target_revision": "main", "target_fingerprint": "f00", "tokenizer_hash": "ba5"}
    assert {name: config[name] for name in OWN_FIELDS} == own
    assert config["drafter"] == "dflash"


@pytest.mark.parametrize(
    "values",
    [
        ZLAB,
        ZLAB | {"block_size": None, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2], "block_size": 8}},
        {
            "dflash_config": {
                "mask_token_id": 7,
                "target_layer_ids": [0, 2],
                "projector_type": "dflash",
                "causal": False,
            }
        },
        {"layer_types": None, "use_sliding_window": None, "num_target_layers": None, "head_dim": 16},
        {"max_window_layers": 2, "sliding_window": 4096, "layer_types": None, "use_sliding_window": True},
        {"draft_vocab_size": 120, "sliding_window": 9, "use_sliding_window": None, "rope_scaling": None},
    ],
)
def test_other_trainers_configs_load(values: Values, draft: Draft) -> None:
    draft.change(values=values)
    draft.assert_loads_equal()
    assert draft.load().config == draft.module.config


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_other_names_of_tensors_load(prefix: str, draft: Draft) -> None:
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    copies = {"embed_tokens.weight": torch.zeros(120, 32), "lm_head.weight": torch.zeros(120, 32)}
    draft.change(tensors=lambda old: {prefix + names.get(key, key): x for key, x in (old | copies).items()})
    draft.assert_loads_equal()


def test_deepspecs_drafts_predict_from_the_anchor(draft: Draft) -> None:
    draft.change(values=DEEPSPEC)
    draft.assert_loads_equal()
    assert draft.load().config.sample_from_anchor
    draft.change(values={"enable_confidence_head": True})
    with pytest.raises(ValueError, match="sets enable_confidence_head to True, which is not supported"):
        draft.load()


def test_the_layout_of_speculators_loads(reduced: Draft) -> None:
    values = json.loads((reduced.folder / "config.json").read_text())
    changed = to_speculators(values, "owner/model", ["Qwen3ForCausalLM"])
    assert changed["aux_hidden_state_layer_ids"] == [1, 3], "counted by the layer that a state goes into"
    assert changed["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    (reduced.folder / "config.json").write_text(json.dumps(changed))
    reduced.assert_loads_equal()
    assert reduced.load().config == reduced.module.config
    for name, value in (("sliding_window_non_causal", True), ("projector_type", "domino"), ("markov_rank", 256)):
        (reduced.folder / "config.json").write_text(json.dumps(changed | {name: value}))
        with pytest.raises(ValueError, match=f"sets {name} to {value!r}, which is not supported"):
            reduced.load()


@pytest.mark.parametrize("place", ["top", "dflash_config"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_network_does_not_do_is_refused_by_name(name: str, place: str, draft: Draft) -> None:
    value = "domino" if name == "projector_type" else 2
    draft.change(values={name: value} if place == "top" else {"dflash_config": INNER | {name: value}})
    with pytest.raises(ValueError, match=f"draft config sets {name} to {value!r}, which is not supported"):
        draft.load()


LAYERS = "layer_types"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, r"lacks dflash_config.mask_token_id; .*<\|MASK\|>"),
        ({"dflash_config": {"mask_token": "<m>"}}, "lacks dflash_config.mask_token_id; enter the target's id of <m>"),
        ({"dflash_config": {"mask_token_id": 120}}, "mask_token_id is 120; the target has 120 tokens"),
        ({"dflash_config": {"mask_token_id": 7}}, "fc.weight has 64 columns, for 2 target states of 32, .* means 3"),
        (
            {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1]}},
            r"fc.weight has 64 columns, for 2 target states .* means 1, those of layers \[1\]; .* in target_layer_ids",
        ),
        (
            {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 5]}},
            r"feature_layers is \[1, 5\]; name distinct states 0..3 \(layer outputs\) or 4",
        ),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [2, 2]}}, "name distinct states"),
        ({"block_size": 1}, "block_size is 1; it must be between 2 and 64"),
        ({"block_size": None}, "lacks block_size, the tokens of the blocks that the draft was trained on"),
        ({"dflash_config": {"mask_token_id": 7, "block_size": 4}}, "block_size is 8 and, in dflash_config, 4"),
        ({"vocab_size": 130}, "vocab_size is 130 in the draft and 120 in the target; serve the target it was trained"),
        ({"num_target_layers": 36}, "num_target_layers is 36 in the draft and 4 in the target"),
        ({"hidden_size": 64}, "hidden_size is 64 in the draft and 32 in the target"),
        ({"hidden_size": None, "rms_norm_eps": None}, "draft config lacks hidden_size, rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ({"draft_vocab_size": 121}, "draft_vocab_size is 121; the target has 120 tokens"),
        ({LAYERS: ["full_attention"]}, r"layer_types is \['full_attention'\]; .* each of the 2 layers"),
        ({LAYERS: ["linear_attention"] * 2}, "it must be full_attention or sliding_attention"),
        ({LAYERS: ["sliding_attention"] * 2}, r"layers \[0, 1\] are sliding_attention; sliding_window must be set"),
        ({LAYERS: ["sliding_attention"] * 2, "sliding_window": 9}, "use_sliding_window not be false"),
        ({"num_hidden_layers": 3, LAYERS: None}, "missing layers.2.input_layernorm.weight"),
        ({"intermediate_size": 40}, r"mlp.down_proj.weight is \[32, 48\], the config says \[32, 40\]"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor other than 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1.0"),
    ],
)
def test_what_does_not_fit_is_refused_and_says_what_was_expected(values: Values, message: str, draft: Draft) -> None:
    draft.change(values=values)
    with pytest.raises(ValueError, match=message):
        draft.load()


def test_unknown_and_missing_tensors_are_named(draft: Draft) -> None:
    draft.change(tensors=lambda old: {"gru.w" if key == "norm.weight" else key: x for key, x in old.items()})
    with pytest.raises(ValueError, match="missing norm.weight; unexpected gru.w"):
        draft.load()
    (draft.folder / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match=r"has a mask embedding of its own \(mask_embedding.pt\)"):
        draft.load()
