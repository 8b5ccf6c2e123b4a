"""The serving target equals transformers: logits and every aux hidden state, for each family and variant."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import NEEDED, TargetSpec, check_aux_layers, default_aux_layers
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.tests.models.saved_drafts import CPU, CausalAttention
from slipstream.tests.random_targets import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_equal_transformers(family: str, make_target: Callable[[str], Path]) -> None:
    path = make_target(family)
    config = load_config(path)
    target = load_target(path, config, torch.float32, CPU)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.randint(3, config.vocab_size, (90,), generator=torch.Generator().manual_seed(1))
    rope = RotaryEmbedding(config.rope, config.head_dim, 256)
    layers = (0, 2, config.num_layers)
    with torch.no_grad():
        hidden, aux_states = target(tokens, CausalAttention(rope, len(tokens)), layers)
        expected = reference(tokens[None], output_hidden_states=True)
    torch.testing.assert_close(target.logits(hidden), expected.logits[0], atol=2e-5, rtol=1e-4)
    states = [expected.hidden_states[layer + 1] for layer in layers[:-1]] + [expected.hidden_states[-1]]
    torch.testing.assert_close(aux_states, torch.cat(states, -1)[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("removed", [None, *sorted(NEEDED), "head_dim", "rope_parameters", "sliding_window"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_configs_are_read_as_transformers_reads_them(name: str, removed: str | None, tmp_path: Path) -> None:
    """From config.json alone where it says everything, else by transformers, which knows each family's defaults."""
    known = getattr(transformers, f"{name}Config")(architectures=[f"{name}ForCausalLM"], use_sliding_window=False)
    newer = json.loads(known.to_json_string(use_diff=False))
    older = {**newer, **newer["rope_parameters"], "rope_scaling": None}
    for key in ("rope_parameters", "rope_type", "layer_types"):
        older.pop(key, None)
    for values in (newer, older, {**newer, "use_sliding_window": True, "sliding_window": 64}):
        values = {key: value for key, value in values.items() if key != removed}
        (tmp_path / "config.json").write_text(json.dumps(values))
        expected = TargetSpec.from_json(AutoConfig.from_pretrained(tmp_path).to_dict())
        assert load_config(tmp_path) == expected


def test_foreign_architecture_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be served; supported: LlamaForCausalLM"):
        TargetSpec.from_json(GPT2Config(architectures=["GPT2LMHeadModel"]).to_dict())


def test_feature_layer_rule() -> None:
    assert default_aux_layers(32) == (1, 15, 28)  # EAGLE-3: inputs of layers 2, 16, 29
    for num_layers in range(3, 40):
        check_aux_layers(default_aux_layers(num_layers), num_layers)
    for wrong in ((1, 1, 2), (0, 7), ()):
        with pytest.raises(ValueError, match="aux_layers"):
            check_aux_layers(wrong, 6)
