"""The EAGLE network against its fp64 oracle; its files, those of other trainers, and refusals."""

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from slipstream.models.drafts.eagle import Eagle, EagleConfig
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.decoder import load_config
from slipstream.tests.models.saved_drafts import ORIGIN, CausalAttention, SavedDraft
from slipstream.tests.naive_eagle import NaiveEagle
from slipstream.tests.tables import each_case, table_of


@pytest.fixture
def make_draft(make_target, tmp_path) -> Callable[..., SavedDraft]:
    def make(**fields):
        target = load_config(make_target("llama"))
        torch.manual_seed(4)
        module = Eagle(EagleConfig.from_target(target, **ORIGIN, **fields))
        return SavedDraft(module, target, tmp_path)

    return make


@pytest.mark.parametrize("fields", [{}, {"fc_bias": False, "qkv_bias": True}, {"draft_vocab_size": 50}])
def test_the_network_equals_its_formulas(fields, make_draft):
    draft = make_draft(**fields)
    module = draft.load(torch.float32)
    embeddings, head = torch.randn(2, 120, 32)
    naive = NaiveEagle(draft.folder, embeddings, head)
    tokens = torch.randint(120, (11,))
    aux_states = torch.randn(11, 32)
    rope = RotaryEmbedding(module.config.rope, module.config.head_dim, 16)
    out = module(embeddings[tokens], module.fuse(aux_states), CausalAttention(rope, 11))
    expected = naive.states(naive.embeddings[tokens], aux_states.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    ids = torch.arange(120) if module.target_ids is None else module.target_ids
    assert torch.equal(ids, naive.target_ids)


@pytest.mark.parametrize("fields", [{}, {"fc_bias": False}, {"qkv_bias": True}, {"draft_vocab_size": 50}])
def test_a_round_trip_is_exact(fields, make_draft):
    make_draft(**fields).check_round_trip()


def test_the_files_have_the_public_form(make_draft):
    make_draft().check_public(**table_of(__file__, "public"))


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
@pytest.mark.parametrize("has_bias_field", [True, False])
def test_the_authors_files_load(bias, has_bias_field, make_draft):
    """A pickle with the target's embedding in it; the field `bias` may be missing."""
    draft = make_draft(fc_bias=bias)
    removed = dict.fromkeys((*OURS, "head_dim", "rope_scaling", *(() if has_bias_field else ("bias",))))
    draft.change(values=PUBLISHED | removed)
    tensors = load_file(draft.folder / "model.safetensors") | {"embed_tokens.weight": torch.zeros(120, 32)}
    (draft.folder / "model.safetensors").unlink()
    torch.save(tensors, draft.folder / "pytorch_model.bin")
    draft.assert_loads_equal()
    assert draft.load().config.aux_layers == (4,)


def test_biases_of_qwen_drafts_load(make_draft):
    draft = make_draft(qkv_bias=True)
    draft.change(values={"architectures": ["Qwen2ForCausalLMEagle"]} | dict.fromkeys(OURS))
    draft.assert_loads_equal()
    draft.change(values={"architectures": ["LlamaForCausalLM"], "attention_bias": True})
    draft.assert_loads_equal()


@each_case()
def test_what_does_not_fit_is_refused(values, message, make_draft):
    draft = make_draft()
    draft.change(values=values)
    with pytest.raises(ValueError, match=message):
        draft.load()
