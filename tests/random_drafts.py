"""Drafts for the tiny random targets that are right now and then: EAGLE3's start from the target's own weights, EAGLE's
and block drafts are fitted to some of its texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.models.dflash import DFlash, DFlashConfig
from slipstream.models.draft import write_draft
from slipstream.models.eagle import Eagle, EagleConfig
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.target import load_config, load_target
from slipstream.models.weights import public_tensors
from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.naive_eagle import NaiveEagle

SEED = 4  # with it, 10 to 50 % of the drafted tokens are accepted, greedy or not


def random_draft(target: Path, draft_vocab_size: int | None = None, seed: int = SEED) -> Eagle3:
    """A draft as wide as the target in the folder `target`; a reduced vocabulary leaves out ids all over the range."""
    config = load_config(target)
    model = load_target(target, config, torch.float32, torch.device("cpu"))
    torch.manual_seed(seed)
    module = Eagle3(
        Eagle3Config.from_target(
            config,
            draft_vocab_size=draft_vocab_size or config.vocab_size,
            feature_layers=(1, 2, config.num_layers),
            target=str(target),
        )
    )
    module.set_vocabulary(torch.randperm(config.vocab_size)[: module.config.draft_vocab_size].sort().values)
    last = f"layers.{config.num_layers - 1}."
    weights = {name.replace(last, "layers.0."): tensor for name, tensor in public_tensors(model).items()}
    module.init_from_target(weights | model.shared)
    return module


def save_random_draft(target: Path, folder: Path, draft_vocab_size: int | None = None, seed: int = SEED) -> None:
    module = random_draft(target, draft_vocab_size, seed)
    folder.mkdir(parents=True)
    write_draft(module, module.state_dict(), folder, {})


def save_random_eagle(
    target: Path, folder: Path, /, texts: Sequence[tuple[int, list[int]]] = (), **fields: Any
) -> None:
    """`texts`: what the draft knows, as (length of the prompt, all tokens); without them it is right by chance only.

    down_proj is fitted by least squares to the features of the texts. `fields` of the config; a reduced vocabulary
    leaves out ids all over the range.
    """
    config = load_config(target)
    torch.manual_seed(SEED)
    module = Eagle(EagleConfig.from_target(config, **{"intermediate_size": 256} | fields))
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    if module.config.draft_vocab_size is not None:
        module.set_vocabulary(torch.randperm(config.vocab_size)[: module.config.draft_vocab_size].sort().values)
    folder.mkdir(parents=True)
    write_draft(module, module.state_dict(), folder, {})
    if not texts:
        return
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    naive = NaiveEagle(folder, *(layer.weight.detach() for layer in (model.get_input_embeddings(), model.lm_head)))
    inputs, outputs = [], []
    for _, tokens in texts:
        with torch.no_grad():
            features = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        residual, activations = naive.parts(naive.embeddings[tokens[1:]], features[:-1])
        inputs.append(activations)
        outputs.append(features[1:] - residual)
    x, y = torch.cat(inputs), torch.cat(outputs)
    ridge = 1e-3 * x.square().mean() * torch.eye(x.shape[1])
    module.layer.mlp.down_proj.weight.data = torch.linalg.solve(x.T @ x + ridge, x.T @ y).T.float()
    write_draft(module, module.state_dict(), folder, {})


def random_dflash(target: Path, /, seed: int = SEED, **fields: Any) -> DFlash:
    """A block draft as wide as the target in the folder `target`; random but for the final norm, which is the target's.

    `fields` of the config; a reduced vocabulary leaves out ids all over the range.
    """
    config = load_config(target)
    model = load_target(target, config, torch.float32, torch.device("cpu"))
    torch.manual_seed(seed)
    defaults = {"num_layers": 2, "block_size": 4, "mask_token_id": 0, "feature_layers": (0, 1, 3)}
    module = DFlash(DFlashConfig.from_target(config, **defaults | {"intermediate_size": 512} | fields))
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    module.norm.load_state_dict(model.norm.state_dict())
    if module.config.draft_vocab_size is not None:
        module.set_vocabulary(torch.randperm(config.vocab_size)[: module.config.draft_vocab_size].sort().values)
    return module


def save_random_dflash(
    target: Path, folder: Path, /, texts: Sequence[tuple[int, list[int]]] = (), **fields: Any
) -> None:
    """`texts`: what the draft knows, as (length of the prompt, all tokens); without them it is right by chance only.

    The last layer's down_proj is fitted by least squares: its output takes slots to the states from which the target
    said the texts' tokens. With some hundred of these, part of the drafted tokens is right.
    """
    module = random_dflash(target, **fields)
    folder.mkdir(parents=True)
    write_draft(module, module.state_dict(), folder, {})
    if not texts:
        return
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    embeddings, head = (layer.weight.detach() for layer in (model.get_input_embeddings(), model.lm_head))
    naive, config = NaiveDFlash(folder, embeddings, head), module.config
    inputs, outputs = [], []
    for start, tokens in texts:
        states = dflash_states(model, tokens)
        features = torch.cat([states[layer] for layer in config.feature_layers], dim=-1)
        for anchor in range(start, len(tokens) - 1):
            slots = min(config.block_size, len(tokens) - anchor)
            block = naive.block(features[:anchor], tokens[anchor], slots)
            first = 0 if config.sample_from_anchor else 1
            wanted = states[config.target_num_layers - 1][anchor : anchor + slots - first]
            inputs.append(block.activations[first:])
            outputs.append(wanted - block.residual[first:])
    x, y = torch.cat(inputs), torch.cat(outputs)
    ridge = 1e-3 * x.square().mean() * torch.eye(x.shape[1])
    solution = torch.linalg.solve(x.T @ x + ridge, x.T @ y)  # (I, H)
    module.layers[-1].mlp.down_proj.weight.data = solution.T.float()
    write_draft(module, module.state_dict(), folder, {})


@torch.no_grad()
def dflash_states(model: PreTrainedModel, tokens: list[int]) -> list[Tensor]:
    """By feature id: every layer's output (S, H), the last one's before the final norm, and the state after it."""
    decoder, outputs = model.get_decoder(), []
    hook = decoder.layers[-1].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    last = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return [state[0] for state in states[1:-1]] + [last[0], states[-1][0]]
