"""Drafts for the tiny random targets that are right now and then: EAGLE3's start from the target's own weights, EAGLE's
and block drafts are fitted to some of its texts."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slipstream.models.drafts.base import DraftNetwork, write_draft
from slipstream.models.drafts.dflash import DFlash, DFlashConfig
from slipstream.models.drafts.eagle import Eagle, EagleConfig
from slipstream.models.drafts.eagle3 import Eagle3, Eagle3Config
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.naive_eagle import NaiveEagle
from slipstream.tests.random_targets import load_model, roughen, shared_weights, target_states

SEED = 4  # with it, 10 to 50 % of the drafted tokens are accepted, greedy or not


def choose_vocabulary(module: DraftNetwork):
    """A reduced one leaves out ids all over the range."""
    size = module.config.draft_vocab_size
    if size is not None:
        module.set_vocabulary(torch.randperm(module.config.vocab_size)[:size].sort().values)


def random_draft(target: Path, draft_vocab_size: int | None = None, seed: int = SEED, **fields: Any) -> Eagle3:
    """A draft as wide as the target in the folder `target`; a reduced vocabulary leaves out ids all over the range.
    `fields` of the config."""
    config = load_config(target)
    model = load_target(target, config, torch.float32, torch.device("cpu"))
    torch.manual_seed(seed)
    fields = {"aux_layers": (1, 2, config.num_layers), "target": str(target)} | fields
    module = Eagle3(Eagle3Config.from_target(config, draft_vocab_size=draft_vocab_size or config.vocab_size, **fields))
    choose_vocabulary(module)
    last = f"layers.{config.num_layers - 1}."
    weights = {name.replace(last, "layers.0."): tensor for name, tensor in public_tensors(model).items()}
    module.init_from_target(weights | model.shared)
    for name, tensor in public_tensors(module).items():  # the target's last MLP, so that it is right now and then
        same = weights.get(name.replace("midlayer.", "layers.0."))
        if "mlp." in name and same is not None and same.shape == tensor.shape:
            tensor.data.copy_(same)
    for part in (module.input_norm, module.fc_norm, module.layers):
        if part is not None:
            roughen(part)
    for parameter in module.layers.parameters():  # else upper layers pass states on
        if parameter.dim() == 2:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def save_random_draft(target: Path, folder: Path, draft_vocab_size: int | None = None, seed: int = SEED, **fields: Any):
    module = random_draft(target, draft_vocab_size, seed, **fields)
    folder.mkdir(parents=True)
    write_draft(module, module.state_dict(), folder, {})


def save_random_eagle(target: Path, folder: Path, /, texts: Sequence[tuple[int, list[int]]] = (), **fields: Any):
    """The draft knows `texts`, as (length of the prompt, all tokens); without them it is right by chance only.

    down_proj is fitted by least squares to the target's states of the texts. `fields` of the config; a reduced
    vocabulary leaves out ids all over the range.
    """
    config = load_config(target)
    torch.manual_seed(SEED)
    module = Eagle(EagleConfig.from_target(config, **{"intermediate_size": 256} | fields))
    roughen(module)
    choose_vocabulary(module)
    folder.mkdir(parents=True)
    write_draft(module, module.state_dict(), folder, {})
    if not texts:
        return
    model = load_float64(target)
    naive = NaiveEagle(folder, *shared_weights(model))
    inputs = []
    outputs = []
    for _, tokens in texts:
        aux_states = states_of(target, *tokens)[-1]
        residual, activations = naive.parts(naive.embeddings[tokens[1:]], aux_states[:-1])
        inputs.append(activations)
        outputs.append(aux_states[1:] - residual)
    fit(module.layer.mlp.down_proj, torch.cat(inputs), torch.cat(outputs))
    write_draft(module, module.state_dict(), folder, {})


@cache
def load_float64(target: Path) -> PreTrainedModel:
    """The grouped products of experts are for narrower numbers."""
    return load_model(target, dtype=torch.float64, experts_implementation="eager")


@cache
def states_of(target: Path, *tokens: int) -> list[Tensor]:
    """Several drafts of a target know the same texts."""
    return target_states(load_float64(target), tokens)


def fit(projection: nn.Linear, x: Tensor, y: Tensor):
    """Least squares: from then on it maps inputs x (n, I) to about y (n, H)."""
    ridge = 1e-3 * x.square().mean() * torch.eye(x.shape[1])
    projection.weight.data = torch.linalg.solve(x.T @ x + ridge, x.T @ y).T.float()


def random_dflash(target: Path, /, seed: int = SEED, **fields: Any) -> DFlash:
    """A block draft as wide as the target in the folder `target`; random but for the final norm, which is the target's.

    `fields` of the config; a reduced vocabulary leaves out ids all over the range.
    """
    config = load_config(target)
    model = load_target(target, config, torch.float32, torch.device("cpu"))
    torch.manual_seed(seed)
    defaults = {"num_layers": 2, "block_size": 4, "mask_token_id": 0, "aux_layers": (0, 1, 3)}
    module = DFlash(DFlashConfig.from_target(config, **defaults | {"intermediate_size": 512} | fields))
    roughen(module)
    roughen_heads(module)
    module.norm.load_state_dict(model.norm.state_dict())
    choose_vocabulary(module)
    return module


def roughen_heads(module: DFlash):
    """Adds noise to heads that start as the identity or at zero; a fitted draft is still right now and then."""
    for name, parameter in module.named_parameters():
        place = name.split(".")[0]
        if place in ("candidate_selector", "markov_head"):
            parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
        elif "_conv." in name or place in ("lilicorr", "confidence_head"):
            parameter.data += 0.05 * torch.randn_like(parameter)


def save_random_dflash(target: Path, folder: Path, /, texts: Sequence[tuple[int, list[int]]] = (), **fields: Any):
    """The draft knows `texts`, as (length of the prompt, all tokens); without them it is right by chance only.

    The last layer's down_proj is fitted by least squares: its output takes slots to the states from which the target
    said the texts' tokens. With some hundred of these, part of the drafted tokens is right.
    """
    module = random_dflash(target, **fields)
    folder.mkdir(parents=True)
    write_draft(module, module.state_dict(), folder, {})
    if not texts:
        return
    model = load_float64(target)
    naive = NaiveDFlash(folder, *shared_weights(model))
    config = module.config
    inputs = []
    outputs = []
    for start, tokens in texts:
        states = states_of(target, *tokens)
        aux_states = torch.cat([states[layer] for layer in config.aux_layers], dim=-1)
        for anchor in range(start, len(tokens) - 1):
            slots = min(config.block_size, len(tokens) - anchor)
            block = naive.block(aux_states[:anchor], tokens[anchor], slots)
            first = 0 if config.sample_from_anchor else 1
            teacher_states = states[config.target_num_layers - 1][anchor : anchor + slots - first]
            inputs.append(block.activations[first:])
            outputs.append(teacher_states - block.residual[first:])
    fit(module.layers[-1].mlp.down_proj, torch.cat(inputs), torch.cat(outputs))
    write_draft(module, module.state_dict(), folder, {})
