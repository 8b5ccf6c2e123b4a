"""Tiny random models of each family, which the tests compare with transformers."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import Target, load_target
from slipstream.models.targets.packed_attention import PackedAttention
from slipstream.tests.tables import table_of

MakeTarget = Callable[[str], Path]  # family -> folder of a random checkpoint
FIELDS: dict[str, dict[str, Any]] = table_of(__file__, "fields")
SHAPE = FIELDS["shape"]


def configs_of(module: str, name: str, shape: dict[str, Any] = SHAPE) -> dict[str, PretrainedConfig]:
    """A table's configs by name: transformers' class, and the fields beside `shape`. Those of classes that this release
    lacks are left out."""
    table = table_of(module, name)
    return {key: _config(kind, shape | fields) for key, (kind, fields) in table.items() if hasattr(transformers, kind)}


def new_config(family: str, **changes: Any) -> PretrainedConfig:
    """family: one of RELATIVES."""
    kind, fields = table_of(__file__, "relatives")[family]
    return _config(kind, SHAPE | fields | changes)


def _config(kind: str, fields: dict[str, Any]) -> PretrainedConfig:
    make = muse_glimmer if kind == "MuseGlimmerConfig" else getattr(transformers, kind)
    return make(**copy.deepcopy(fields))


def muse_glimmer(tied: bool = False, **fields: Any) -> PretrainedConfig:
    """The top level says nothing of the head where it is not tied, as in published files."""
    text = transformers.MuseGlimmerTextConfig(**SHAPE | copy.deepcopy(FIELDS["muse"]) | fields)
    tower = {"vision_config": dict(FIELDS["muse_vision"]), "out_hidden_size": 32, "projector_hidden_size": 8}
    return transformers.MuseGlimmerConfig(text_config=text, **tower, **{"tie_word_embeddings": True} if tied else {})


FAMILIES = configs_of(__file__, "families")
RELATIVES = configs_of(__file__, "relatives")
CAPPED = configs_of(__file__, "capped")
WIDE = configs_of(__file__, "wide")


def save_random_target(config: PretrainedConfig, folder: Path, seed: int = 0):
    """Weights five times the usual spread, so that no two logits of a random model are close."""
    torch.manual_seed(seed)
    config.get_text_config().initializer_range = 0.1
    model = auto_class(config).from_config(config).float()
    roughen(model)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    model.save_pretrained(folder)


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Returns transformers' class that builds the model: some multimodal ones are no causal LMs to it."""
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def load_model(path: Path, **options: Any) -> PreTrainedModel:
    """Returns transformers' model of a folder, text part and head."""
    return auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, **options)


def roughen(module: nn.Module):
    """Norms and biases start as constants, and sinks small: makes them count."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.data += (1.0 if name.endswith("sinks") else 0.2) * torch.randn_like(parameter)
        if name.endswith("q_norm.weight") and parameter.numel() >= 256:
            parameter.data *= 0.1  # else each row of wide heads, whose scores Gemma 4 does not scale, sees one token
    for name, tensor in (*module.named_buffers(), *module.named_parameters()):
        if name.endswith(("layer_scalar", "e_score_correction_bias")):  # of Gemma 4, of routers
            tensor.data += 0.2 * torch.randn_like(tensor)


def shared_weights(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Embedding and head (V, H), the weights of the target that drafts use."""
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


@torch.no_grad()
def logits(target: Target, tokens: Tensor) -> Tensor:
    """(S, V), as our modules compute them."""
    attention = PackedAttention()
    attention.plan(torch.arange(len(tokens))[None])
    return target.logits(target(tokens, attention)[0])


def assert_same_logits(path: Path, config: TargetSpec, model: PreTrainedModel):
    target = load_target(path, config, torch.float32, torch.device("cpu"))
    tokens = torch.arange(3, 40)
    with torch.no_grad():
        expected = model(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(logits(target, tokens), expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def target_states(model: PreTrainedModel, tokens: Sequence[int] | Tensor) -> list[Tensor]:
    """States by id: every layer's output (S, H), the last one's before the final norm, and the state after it."""
    decoder = model.get_decoder()
    outputs = []
    hook = decoder.layers[-1].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    states = model(torch.as_tensor(tokens)[None], output_hidden_states=True).hidden_states
    hook.remove()
    last = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return [state[0] for state in states[1:-1]] + [last[0], states[-1][0]]


def target_aux_states(model: PreTrainedModel, tokens: Sequence[int] | Tensor, layers: Sequence[int]) -> Tensor:
    """(S, K * H): the states that a draft reads."""
    states = target_states(model, tokens)
    return torch.cat([states[layer] for layer in layers], dim=-1)


class KnownStates:
    """`target_states` of a model whose weights stay: computed once for a text and those that begin it, if these are
    asked for next."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.text: list[int] = []

    def __call__(self, tokens: list[int]) -> list[Tensor]:
        if not tokens or self.text[: len(tokens)] != tokens:
            self.states = target_states(self.model, tokens)
            self.text = tokens
        return [state[: len(tokens)] for state in self.states]

    def joined(self, tokens: list[int], layers: Sequence[int]) -> Tensor:
        """(S, K * H): the states that a draft reads."""
        states = self(tokens)
        return torch.cat([states[layer] for layer in layers], dim=-1)


def change_json(path: Path, **values: Any):
    """Replaces fields of the object in a file; None deletes."""
    changed = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
