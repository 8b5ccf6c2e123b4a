"""The EAGLE network against its fp64 oracle; its files, those of other trainers, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.kernels.norm import HeadNorms
from slipstream.kernels.rope import rotate_halves
from slipstream.models.eagle import Eagle, EagleConfig, config_from_json, config_to_json, load_eagle, save_eagle
from slipstream.models.layers import RotaryEmbedding
from slipstream.models.target import load_config
from slipstream.tests.naive_eagle import NaiveEagle

CPU = torch.device("cpu")


class CausalAttention:
    """Every row of one sequence sees the rows before it and itself."""

    def __init__(self, rope: RotaryEmbedding, count: int) -> None:
        self.cos, self.sin = rope.cos_sin(torch.arange(count))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        mask: str,
        window: int | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        assert (layer, mask, window, norms) == (0, "causal", None, None)
        q, k = rotate_halves(q, self.cos, self.sin), rotate_halves(k, self.cos, self.sin)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1)


class Draft:
    """A saved draft of a tiny target (V 120, H 32, 4 heads, 2 KV heads, I 48), to be changed and loaded."""

    def __init__(self, target: Path, folder: Path, **fields: Any) -> None:
        self.target = load_config(target)
        self.folder = folder
        torch.manual_seed(4)
        origin = {"target": "owner/model", "target_revision": "main", "target_fingerprint": "f00"}
        self.module = Eagle(EagleConfig.from_target(self.target, tokenizer_hash="ba5", **origin, **fields)).bfloat16()
        if self.module.config.draft_vocab_size is not None:
            self.module.set_vocabulary(torch.arange(self.module.config.draft_vocab_size) * 2)
        save_eagle(self.module, self.module.state_dict(), folder, {"argv": ["train"]})

    def change(
        self,
        tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        values: dict[str, Any] | None = None,
    ) -> None:
        """`tensors` maps the file's; `values` replace those of config.json, and None deletes."""
        file, config = self.folder / "model.safetensors", self.folder / "config.json"
        if tensors:
            save_file(tensors(load_file(file)), file)
        changed = json.loads(config.read_text()) | (values or {})
        config.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))

    def load(self) -> Eagle:
        return load_eagle(self.folder, self.target, torch.bfloat16, CPU)

    def assert_loads_equal(self) -> None:
        loaded, original = self.load().state_dict(), self.module.state_dict()
        assert loaded.keys() == original.keys()
        for key in original:
            assert torch.equal(loaded[key], original[key]), key


@pytest.fixture
def make_draft(make_target: Callable[[str], Path], tmp_path: Path) -> Callable[..., Draft]:
    return lambda **fields: Draft(make_target("llama"), tmp_path, **fields)


@pytest.mark.parametrize("fields", [{}, {"fc_bias": False, "qkv_bias": True}, {"draft_vocab_size": 50}])
def test_the_network_equals_its_formulas(fields: dict[str, Any], make_draft: Callable[..., Draft]) -> None:
    draft = make_draft(**fields)
    module = load_eagle(draft.folder, draft.target, torch.float32, CPU)
    embeddings, head = torch.randn(2, 120, 32)
    naive = NaiveEagle(draft.folder, embeddings, head)
    tokens, features = torch.randint(120, (11,)), torch.randn(11, 32)
    rope = RotaryEmbedding(module.config.rope, module.config.head_dim, 16)
    out = module(embeddings[tokens], module.fuse(features), CausalAttention(rope, 11))
    expected = naive.states(naive.embeddings[tokens], features.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    ids = torch.arange(120) if module.target_ids is None else module.target_ids
    assert torch.equal(ids, naive.target_ids)


@pytest.mark.parametrize("fields", [{}, {"fc_bias": False}, {"qkv_bias": True}, {"draft_vocab_size": 50}])
def test_a_round_trip_is_exact(fields: dict[str, Any], make_draft: Callable[..., Draft]) -> None:
    draft = make_draft(**fields)
    draft.assert_loads_equal()
    assert draft.load().config == draft.module.config
    assert (
        config_from_json(json.loads(json.dumps(config_to_json(draft.module.config))), draft.target)
        == draft.load().config
    )
    assert not any(parameter.requires_grad for parameter in draft.load().parameters())


def test_the_file_holds_the_public_keys(make_draft: Callable[..., Draft]) -> None:
    draft = make_draft()
    tensors = load_file(draft.folder / "model.safetensors")
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == {
        "fc.weight": (32, 64),
        "fc.bias": (32,),
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.post_attention_layernorm.weight": (32,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
    }
    assert json.loads((draft.folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle"]


PUBLISHED = {  # fields that EAGLE's authors' config.json files have, beside the shapes
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "pad_token_id": 0,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
}
OURS = ("drafter", "target", "target_revision", "target_fingerprint", "tokenizer_hash", "num_target_layers", "qkv_bias")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_the_authors_files_load(bias: bool, named: bool, make_draft: Callable[..., Draft]) -> None:
    """A pickle with the target's embedding in it; the field `bias` may be missing."""
    draft = make_draft(fc_bias=bias)
    own = dict.fromkeys((*OURS, "head_dim", "rope_scaling", *(() if named else ("bias",))))
    draft.change(values=PUBLISHED | own)
    tensors = load_file(draft.folder / "model.safetensors") | {"embed_tokens.weight": torch.zeros(120, 32)}
    (draft.folder / "model.safetensors").unlink()
    torch.save(tensors, draft.folder / "pytorch_model.bin")
    draft.assert_loads_equal()
    assert draft.load().config.feature_layers == (4,)


def test_converted_files_load(make_draft: Callable[..., Draft]) -> None:
    """Keys below `model.`, copies of the target's embedding and head."""
    draft = make_draft(fc_bias=False)
    copies = {"model.embed_tokens.weight": torch.zeros(120, 32), "lm_head.weight": torch.zeros(120, 32)}
    draft.change(
        lambda tensors: {f"model.{key}": tensor for key, tensor in tensors.items()} | copies,
        dict.fromkeys(OURS),
    )
    draft.assert_loads_equal()


def test_biases_of_qwen_drafts_load(make_draft: Callable[..., Draft]) -> None:
    draft = make_draft(qkv_bias=True)
    draft.change(values={"architectures": ["Qwen2ForCausalLMEagle"]} | dict.fromkeys(OURS))
    draft.assert_loads_equal()
    draft.change(values={"architectures": ["LlamaForCausalLM"], "attention_bias": True})
    draft.assert_loads_equal()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": None}, "draft config lacks hidden_size"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'silu'"),
        ({"sliding_window": 64}, "sets sliding_window 64"),
        ({"mlp_bias": True}, "sets mlp_bias"),
        ({"vocab_size": 100}, "vocab_size is 100 in the draft and 120 in the target"),
        ({"hidden_size": 64}, "hidden_size is 64 in the draft and 32 in the target"),
        ({"num_target_layers": 5}, "num_target_layers is 5 in the draft and 4 in the target"),
        ({"bias": False}, "unexpected fc.bias"),
        ({"qkv_bias": True}, "missing layers.0.self_attn.qkv_proj.bias"),
        ({"intermediate_size": 40}, r"down_proj.weight is \[32, 48\], the config says \[32, 40\]"),
        ({"draft_vocab_size": 60}, "missing d2t; missing t2d"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, Any], message: str, make_draft: Callable[..., Draft]) -> None:
    draft = make_draft()
    draft.change(values=values)
    with pytest.raises(ValueError, match=message):
        draft.load()


def test_missing_and_foreign_keys_are_named(make_draft: Callable[..., Draft]) -> None:
    draft = make_draft()
    draft.change(
        lambda tensors: {
            key.replace("post_attention_layernorm", "input_layernorm"): tensor for key, tensor in tensors.items()
        }
    )
    message = "missing layers.0.post_attention_layernorm.weight; unexpected layers.0.input_layernorm.weight"
    with pytest.raises(ValueError, match=message):
        draft.load()


def test_a_damaged_pickle_is_named(make_draft: Callable[..., Draft]) -> None:
    draft = make_draft()
    (draft.folder / "model.safetensors").unlink()
    (draft.folder / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match=r"pytorch_model.bin is damaged or holds more than tensors"):
        draft.load()
