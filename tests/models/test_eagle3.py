"""The EAGLE3 network: its formula, its start from the target's weights, its vocabulary."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.norm import HeadNorms
from slipstream.kernels.rope import rotate_halves
from slipstream.models.eagle3 import Eagle3, Eagle3Config, save_eagle3
from slipstream.models.layers import RotaryEmbedding
from slipstream.models.target import load_config, load_target
from slipstream.tests.naive_eagle3 import NaiveEagle3

LENGTH = 23


class RecordingAttention:
    """Causal attention over one sequence that keeps what was written."""

    def __init__(self, config: Eagle3Config) -> None:
        self.cos, self.sin = RotaryEmbedding(config.rope, config.head_dim, LENGTH).cos_sin(torch.arange(LENGTH))

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        assert layer == 0
        self.k, self.v = rotate_halves(k, self.cos, self.sin), v

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
        assert (mask, norms) == ("causal", None)
        self.write(k, v, layer)
        q, k, v = (x.transpose(-2, -3) for x in (rotate_halves(q, self.cos, self.sin), self.k, self.v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(-2, -3)


def random_module(target: Path, **fields: Any) -> Eagle3:
    """Every weight random, norms included, and exact in bf16."""
    torch.manual_seed(5)
    config = load_config(target)
    module = Eagle3(Eagle3Config.from_target(config, draft_vocab_size=50, feature_layers=(0, 2, 4), **fields))
    for parameter in module.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    module.set_vocabulary(torch.arange(50) * 2 + 1)
    return module.requires_grad_(False)


@pytest.mark.parametrize("fields", [{}, {"attention_bias": True}, {"num_kv_heads": 1}, {"intermediate_size": 20}])
def test_the_module_equals_its_formula(
    fields: dict[str, Any], make_target: Callable[[str], Path], tmp_path: Path
) -> None:
    path = make_target("qwen3")
    module = random_module(path, **fields)
    save_eagle3(module, module.state_dict(), tmp_path, {})
    naive = NaiveEagle3(tmp_path, load_target(path, load_config(path), torch.float32, torch.device("cpu")).head)
    generator = torch.Generator().manual_seed(3)
    embeds, features = (torch.randn(LENGTH, size, generator=generator) for size in (32, 96))
    hidden = module.fuse(features)
    states = module(embeds, hidden, RecordingAttention(module.config))
    expected = naive.states(embeds.double(), naive.fuse(features))
    torch.testing.assert_close(states.double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(module.logits(states).double(), naive.logits(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_write_context_stores_what_the_forward_pass_stores(bias: bool, make_target: Callable[[str], Path]) -> None:
    module = random_module(make_target("llama"), attention_bias=bias)
    embeds, hidden = torch.randn(LENGTH, 32), torch.randn(LENGTH, 32)
    written, attended = RecordingAttention(module.config), RecordingAttention(module.config)
    module.write_context(embeds, hidden, written)
    module(embeds, hidden, attended)
    torch.testing.assert_close(written.k, attended.k)
    torch.testing.assert_close(written.v, attended.v)


def test_leading_dims_are_free(make_target: Callable[[str], Path]) -> None:
    module = random_module(make_target("llama"))
    embeds, features = torch.randn(2, LENGTH, 32), torch.randn(2, LENGTH, 96)
    attention = RecordingAttention(module.config)
    hidden = module.fuse(features)
    together = module.logits(module(embeds, hidden, attention))
    for row in range(2):
        alone = module.logits(module(embeds[row], hidden[row], attention))
        torch.testing.assert_close(together[row], alone)


@pytest.mark.parametrize("intermediate_size", [48, 80])
def test_it_starts_from_the_targets_weights(intermediate_size: int, make_target: Callable[[str], Path]) -> None:
    module = random_module(make_target("llama"), intermediate_size=intermediate_size)
    generator = torch.Generator().manual_seed(1)
    head, norm = torch.randn(120, 32, generator=generator), torch.randn(32, generator=generator)
    gate, up = (torch.randn(48, 32, generator=generator) for _ in range(2))
    down = torch.randn(32, 48, generator=generator)
    module.init_from_target(head, norm, {"gate_proj": gate, "up_proj": up, "down_proj": down})
    x = torch.randn(7, 32, generator=generator)
    torch.testing.assert_close(module.lm_head(x), x @ head[1:100:2].T)
    torch.testing.assert_close(module.norm.weight, norm)
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(module.midlayer.mlp(x), expected, atol=1e-4, rtol=1e-4)
    features = torch.randn(7, 96, generator=generator)
    torch.testing.assert_close(module.fuse(features), features[:, -32:])


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [({"intermediate_size": 40}, "intermediate_size 40 against 32 and 48"), ({"hidden_size": 16}, "hidden_size 16")],
)
def test_a_draft_of_other_size_cannot_start_from_the_target(
    fields: dict[str, Any], numbers: str, make_target: Callable[[str], Path]
) -> None:
    module = random_module(make_target("llama"), **fields)
    mlp = {"gate_proj": torch.ones(48, 32), "up_proj": torch.ones(48, 32), "down_proj": torch.ones(32, 48)}
    with pytest.raises(ValueError, match=numbers) as caught:
        module.init_from_target(torch.ones(120, 32), torch.ones(32), mlp)
    assert "switch init_from_target off" in str(caught.value)


def test_the_vocabulary_maps_draft_ids_to_target_ids(make_target: Callable[[str], Path]) -> None:
    module = random_module(make_target("llama"))
    for ids in (torch.arange(70, 120), torch.cat((torch.arange(49), torch.tensor([119])))):
        module.set_vocabulary(ids)
        assert torch.equal(module.target_ids, ids)
        assert torch.equal(module.d2t, ids - torch.arange(50))
        assert module.t2d.nonzero().flatten().tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.arange(49), "need 50 distinct ascending ids"),
        (torch.arange(50).view(5, 10), "need 50 distinct ascending ids"),
        (torch.arange(50).flip(0), "need 50 distinct ascending ids"),
        (torch.arange(50).clamp(min=1), "need 50 distinct ascending ids"),
        (torch.arange(50) - 1, "need 50 distinct ascending ids"),
        (torch.arange(50) + 71, "id 120 is outside the target's 120 tokens"),
    ],
)
def test_wrong_vocabularies_are_refused(ids: Tensor, message: str, make_target: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=message):
        random_module(make_target("llama")).set_vocabulary(ids)


def test_wrong_configs_are_refused(make_target: Callable[[str], Path]) -> None:
    config = load_config(make_target("llama"))
    with pytest.raises(ValueError, match="draft_vocab_size is 121; the target has 120 tokens"):
        Eagle3Config.from_target(config, draft_vocab_size=121, feature_layers=(0, 1, 2))
    with pytest.raises(ValueError, match=r"feature_layers is \[0, 5\]; name distinct states 0..3"):
        Eagle3Config.from_target(config, draft_vocab_size=50, feature_layers=(0, 5))
