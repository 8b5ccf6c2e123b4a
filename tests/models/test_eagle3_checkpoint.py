"""EAGLE3 checkpoints: the public file exactly, other trainers' layouts, and what is refused with which words."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.models.checkpoint import fuse
from slipstream.models.config import RopeConfig, default_feature_layers
from slipstream.models.draft import OWN_FIELDS
from slipstream.models.eagle3 import (
    UNSUPPORTED_FLAGS,
    Eagle3,
    Eagle3Config,
    config_from_json,
    config_to_json,
    load_eagle3,
    save_eagle3,
)
from slipstream.models.speculators_layout import AUX_LAYERS
from slipstream.models.target import load_config

CPU = torch.device("cpu")
Tensors = dict[str, Tensor]
Values = dict[str, Any]


class Draft:
    """A saved draft of the tiny Llama (V 120, H 32, 4 heads, 2 KV heads of 8, I 48), to be changed and loaded."""

    def __init__(self, target: Path, folder: Path, draft_vocab_size: int = 50) -> None:
        self.target = load_config(target)
        self.folder = folder
        torch.manual_seed(4)
        self.module = Eagle3(
            Eagle3Config.from_target(
                self.target,
                draft_vocab_size=draft_vocab_size,
                feature_layers=(1, 2, 4),
                target="owner/model",
                target_revision="main",
                target_fingerprint="f00",
                tokenizer_hash="ba5",
            )
        ).bfloat16()
        self.module.set_vocabulary(torch.arange(draft_vocab_size) * (120 // draft_vocab_size))
        save_eagle3(self.module, self.module.state_dict(), folder, {"argv": ["train"]})

    def change(self, tensors: Callable[[Tensors], Tensors] | None = None, values: Values | None = None) -> None:
        """`tensors` maps the file's; `values` replace those of config.json, and None deletes."""
        file, config = self.folder / "model.safetensors", self.folder / "config.json"
        if tensors:
            save_file(tensors(load_file(file)), file)
        changed = json.loads(config.read_text()) | (values or {})
        config.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))

    def load(self, dtype: torch.dtype = torch.bfloat16) -> Eagle3:
        return load_eagle3(self.folder, self.target, dtype, CPU)

    def assert_loads_equal(self) -> None:
        loaded, original = self.load().state_dict(), self.module.state_dict()
        assert loaded.keys() == original.keys()
        for key in original:
            assert torch.equal(loaded[key], original[key]), key


@pytest.fixture
def draft(make_target: Callable[[str], Path], tmp_path: Path) -> Draft:
    return Draft(make_target("llama"), tmp_path)


@pytest.fixture
def full_draft(make_target: Callable[[str], Path], tmp_path: Path) -> Draft:
    """Its vocabulary is the target's."""
    return Draft(make_target("llama"), tmp_path, draft_vocab_size=120)


def test_a_round_trip_is_exact(draft: Draft) -> None:
    draft.assert_loads_equal()
    assert draft.load().config == draft.module.config
    assert json.loads((draft.folder / "run.json").read_text()) == {"argv": ["train"]}
    loaded = draft.load(torch.float32)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    for key, tensor in draft.module.state_dict().items():
        wide = tensor.float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[key], wide), key


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(5e5),
        RopeConfig(1e4, "linear", {"factor": 2.0}),
        RopeConfig(1e4, "yarn", {"factor": 4.0, "beta_fast": 30}),
    ]
    + [RopeConfig(1e4, "llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})],
)
def test_a_config_survives_json(rope: RopeConfig, draft: Draft) -> None:
    scaling = dict(rope.scaling)
    if rope.rope_type in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = 64
    config = replace(draft.module.config, rope=replace(rope, scaling=scaling), attention_bias=True)
    assert config_from_json(json.loads(json.dumps(config_to_json(config))), draft.target) == config


def test_the_file_holds_the_public_keys(draft: Draft) -> None:
    tensors = load_file(draft.folder / "model.safetensors")
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == {
        "d2t": (50,),
        "t2d": (120,),
        "fc.weight": (32, 96),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.self_attn.q_proj.weight": (32, 64),
        "midlayer.self_attn.k_proj.weight": (16, 64),
        "midlayer.self_attn.v_proj.weight": (16, 64),
        "midlayer.self_attn.o_proj.weight": (32, 32),
        "midlayer.post_attention_layernorm.weight": (32,),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "norm.weight": (32,),
        "lm_head.weight": (50, 32),
    }
    assert {key: tensor.dtype for key, tensor in tensors.items() if not tensor.is_floating_point()} == {
        "d2t": torch.int64,
        "t2d": torch.bool,
    }
    assert {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()} == {torch.bfloat16}
    assert (torch.arange(50) + tensors["d2t"]).tolist() == list(range(0, 100, 2)), "d2t are offsets"
    assert tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 100, 2))


def test_the_config_holds_the_public_fields(draft: Draft) -> None:
    config = json.loads((draft.folder / "config.json").read_text())
    public = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    public |= {"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": 120}
    public |= {"num_attention_heads": 4, "num_key_value_heads": 2, "draft_vocab_size": 50, "rope_theta": 10000.0}
    public |= {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "drafter": "eagle3"}
    assert public.items() <= config.items()
    assert config["eagle_config"][AUX_LAYERS] == [1, 2, 4], "outputs of layers, which SGLang reads"
    assert config[AUX_LAYERS] == [2, 3, 5], "the layers that the states go into, which vLLM reads"


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "layers.0": lambda tensors: {key.replace("midlayer.", "layers.0."): tensors[key] for key in tensors},
    "model prefix": lambda tensors: {f"model.{key}" if "head" not in key else key: tensors[key] for key in tensors},
    "both": lambda tensors: {f"model.{key}".replace("midlayer.", "layers.0."): tensors[key] for key in tensors},
    "embedding": lambda tensors: tensors | {"embed_tokens.weight": torch.zeros(120, 32)},
    "prefixed embedding": lambda tensors: tensors | {"model.embed_tokens.weight": torch.zeros(120, 32)},
    "fused": lambda tensors: fuse(tensors),
    "fused, layers.0": lambda tensors: {key.replace("midlayer.", "layers.0."): x for key, x in fuse(tensors).items()},
    "no t2d": lambda tensors: {key: tensors[key] for key in tensors if key != "t2d"},
    "t2d of bytes": lambda tensors: tensors | {"t2d": tensors["t2d"].to(torch.uint8)},
    "fp32": lambda tensors: {key: x.float() if x.is_floating_point() else x for key, x in tensors.items()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_foreign_layouts_load(layout: str, draft: Draft) -> None:
    draft.change(LAYOUTS[layout])
    draft.assert_loads_equal()


def test_a_full_vocabulary_needs_no_map(full_draft: Draft) -> None:
    full_draft.change(lambda tensors: {key: tensors[key] for key in tensors if key not in ("d2t", "t2d")})
    full_draft.assert_loads_equal()
    full_draft.change(values={"draft_vocab_size": None})
    full_draft.assert_loads_equal()


def test_shards_load(draft: Draft) -> None:
    tensors = load_file(draft.folder / "model.safetensors")
    (draft.folder / "model.safetensors").unlink()
    for part in range(2):
        shard = {key: tensors[key] for key in sorted(tensors)[part::2]}
        save_file(shard, draft.folder / f"model-0000{part + 1}-of-00002.safetensors")
    draft.assert_loads_equal()


def test_a_foreign_config_loads(draft: Draft) -> None:
    """No target, no layer ids, no head_dim, rope as older trainers write it: rule and target fill the gaps."""
    absent = (
        *OWN_FIELDS,
        "target_num_layers",
        "drafter",
        "eagle_config",
        AUX_LAYERS,
        "head_dim",
        "target_hidden_size",
        "attention_bias",
    )
    draft.change(values=dict.fromkeys(absent))
    config = draft.load().config
    assert config.feature_layers == default_feature_layers(4)
    assert (config.target, config.target_num_layers, config.target_hidden_size, config.head_dim) == ("", 4, 32, 8)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope_theta": 77.0, "rope_scaling": None}, RopeConfig(77.0)),
        ({"rope_theta": None}, RopeConfig(10000.0)),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, RopeConfig(5.0)),
        ({"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": None}}, RopeConfig(5.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(10000.0, "linear", {"factor": 2.0})),
        ({"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, RopeConfig(10000.0, "linear", {"factor": 3.0})),
    ],
)
def test_rope_fields_old_and_new(values: Values, expected: RopeConfig, draft: Draft) -> None:
    draft.change(values=values)
    assert draft.load().config.rope == expected


@pytest.mark.parametrize("flag", UNSUPPORTED_FLAGS)
@pytest.mark.parametrize("nested", [False, True])
def test_flags_that_change_the_network_are_refused_by_name(flag: str, nested: bool, draft: Draft) -> None:
    draft.change(values={flag: False})
    draft.assert_loads_equal()
    draft.change(values={"eagle_config": {flag: True}} if nested else {flag: True})
    with pytest.raises(ValueError, match=f"draft config sets {flag}, which is not supported"):
        draft.load()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'silu'"),
        ({"sliding_window": 512}, "sliding_window 512, which is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'; supported"),
        ({"hidden_size": None, "rms_norm_eps": None}, "draft config lacks hidden_size, rms_norm_eps"),
        ({"draft_vocab_size": 121}, "draft_vocab_size is 121; the target has 120 tokens"),
        ({AUX_LAYERS: None, "eagle_config": {AUX_LAYERS: [2, 16, 29]}}, r"feature_layers is \[2, 16, 29\]"),
        ({AUX_LAYERS: [0, 2, 3], "eagle_config": None}, r"feature_layers is \[-1, 1, 2\]"),
        (
            {AUX_LAYERS: [1, 2, 4]},
            r"eagle_config.* is \[1, 2, 4\], outputs of .* is \[1, 2, 4\], the layers that .* go into",
        ),
        (
            {AUX_LAYERS: [2, 3, 4, 5], "eagle_config": None},
            "fc.weight has 96 columns, for 3 target states of 32, .* means 4",
        ),
        ({"vocab_size": 128}, "vocab_size is 128 in the draft and 120 in the target; serve the target"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64 in the draft and 32 in the target"),
        ({"target_num_layers": 8}, "target_num_layers is 8 in the draft and 4 in the target"),
        ({"draft_vocab_size": 40}, r"lm_head\.weight is \[50, 32\], the config says \[40, 32\]"),
        ({"intermediate_size": 40}, r"mlp\.down_proj\.weight is \[32, 48\], the config says \[32, 40\]"),
    ],
)
def test_misfits_name_field_and_values(values: Values, message: str, draft: Draft) -> None:
    draft.change(values=values)
    with pytest.raises(ValueError, match=message):
        draft.load()


def test_an_unused_sliding_window_is_accepted(draft: Draft) -> None:
    draft.change(values={"sliding_window": 4096, "use_sliding_window": False})
    draft.assert_loads_equal()


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: tensors[key] for key in tensors if key not in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("fc.weight", "norm.weight"), r"missing fc\.weight; missing norm\.weight"),
        (without("midlayer.self_attn.v_proj.weight"), r"missing midlayer\.self_attn\.qkv_proj\.weight"),
        (without("d2t"), "missing d2t"),
        (lambda tensors: tensors | {"fc_norm.0.weight": torch.ones(32)}, r"unexpected fc_norm\.0\.weight"),
        (lambda tensors: tensors | {"layers.1.norm.weight": torch.ones(32)}, r"unexpected layers\.1\.norm\.weight"),
        (lambda tensors: tensors | {"d2t": tensors["d2t"] + 90}, "d2t maps outside the target's 120 tokens or twice"),
        (lambda tensors: without("t2d")(tensors | {"d2t": tensors["d2t"] - 1}), "d2t maps outside"),
        (lambda tensors: tensors | {"d2t": -torch.arange(50)}, "d2t maps outside .* or twice to one"),
        (lambda tensors: tensors | {"d2t": tensors["d2t"][:40]}, r"d2t is \[40\], the config says \[50\]"),
    ],
)
def test_damaged_tensors_are_named(change: Callable[[Tensors], Tensors], message: str, draft: Draft) -> None:
    draft.change(change)
    with pytest.raises(ValueError, match=message):
        draft.load()


def test_a_truncated_file_is_named(draft: Draft) -> None:
    file = draft.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        draft.load()
