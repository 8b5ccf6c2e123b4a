"""Tiny random targets with a module that predicts a token more (MTP), and transformers' module as the oracle."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from slipstream.kernels.sampling.sample import noise_key
from slipstream.models.drafts.base import DraftNetwork
from slipstream.models.targets.families import Hidden
from slipstream.serve.drafters.options import TreeOptions
from slipstream.serve.request import Request
from slipstream.tests.naive_eagle import NaiveEagle
from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.random_drafts import load_float64
from slipstream.tests.random_targets import (
    SHAPE,
    KnownStates,
    change_json,
    new_config,
    roughen,
    save_random_target,
    shared_weights,
)
from slipstream.tests.serve.engine_runs import Nodes
from slipstream.tests.tables import table_of


class Kind(NamedTuple):
    """A family: its config, names in its files, and what transformers must be told of the module."""

    family: str
    names: dict[str, str]
    changes: dict[str, Any] = {}  # of the config
    module: dict[str, Any] = {}
    zero_first: bool = False


KINDS = {name: Kind(**fields) for name, fields in table_of(__file__, "kinds").items()}


class MTPTarget(NamedTuple):
    folder: Path
    model: PreTrainedModel  # in fp64
    module: MtpModel  # in fp64
    zero_first: bool


class MakeMTP(Protocol):
    def __call__(self, kind: str, count: int = 1, /) -> MTPTarget: ...


def config_of(kind: Kind, count: int = 1) -> PretrainedConfig:
    return new_config(kind.family, **kind.changes, num_nextn_predict_layers=count)


def save_mtp_target(name: str, folder: Path, seed: int = 1, count: int = 1) -> MTPTarget:
    """Saves a random target with its modules."""
    kind = KINDS[name]
    save_random_target(config_of(kind, count), folder)
    change_json(folder / "config.json", num_nextn_predict_layers=count)
    model = load_float64(folder)
    for field, value in {"num_mtp_layers": count, **kind.module}.items():
        setattr(model.config, field, value * count if isinstance(value, list) else value)
    torch.manual_seed(seed)
    module = MtpModel(model, count).double()
    for parameter in module.layers.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    roughen(module.layers)
    if "post_norm." not in kind.names:
        for layer in module.layers:
            layer.post_norm = model.get_decoder().norm
    for index in range(count):
        add_tensors(folder, module_tensors(name, module, index))
    return MTPTarget(folder, model, module, kind.zero_first)


def module_tensors(name: str, module: MtpModel, index: int = 0) -> dict[str, Tensor]:
    """The tensors of module `index` as files of its family have them, experts apart."""
    last = SHAPE["num_hidden_layers"] + index
    names = {begin: path.format(last, index) for begin, path in KINDS[name].names.items()}
    tensors = {}
    for key, tensor in module.layers[index].state_dict().items():
        begin = next((begin for begin in names if key.startswith(begin)), None)
        if begin is None:  # the target's
            continue
        path = names[begin] + key.removeprefix(begin)
        if not path.endswith((".gate_up_proj", ".experts.down_proj")):
            tensors[path] = tensor
            continue
        projections = ("gate_proj", "up_proj") if path.endswith("gate_up_proj") else ("down_proj",)
        for expert, matrices in enumerate(tensor):
            for projection, matrix in zip(projections, matrices.chunk(len(projections)), strict=True):
                tensors[f"{path.rpartition('.')[0]}.{expert}.{projection}.weight"] = matrix
    return {key: tensor.float().contiguous() for key, tensor in tensors.items()}


def add_tensors(folder: Path, tensors: dict[str, Tensor]):
    """Adds tensors to a checkpoint's files, or replaces them."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def save_almost_copying(source: Path, folder: Path, count: int = 1):
    """Saves a GLM-4.5 target that says of a text what its last token says, and `count` modules that mostly know it, but
    attend, too."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]:
        is_attention = name.endswith("o_proj.weight") and int(name.split(".")[2]) >= 4
        tensors[name] = tensors[name] * (0.5 if is_attention else 0.0)
    size = len(tensors["model.norm.weight"])
    for layer in (f"model.layers.{4 + index}" for index in range(count)):
        tensors[f"{layer}.enorm.weight"] = torch.ones(size)
        tensors[f"{layer}.eh_proj.weight"] = torch.cat((torch.eye(size), 0.05 * torch.eye(size)), dim=1)
        tensors[f"{layer}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_json(folder / "config.json", rms_norm_eps=1e-12)


class NaiveMTP(NaiveEagle3):
    """transformers' module over a whole text, with nothing kept between calls."""

    def __init__(self, target: MTPTarget, hidden: Hidden = "after_norm"):
        self.hidden = hidden
        embeddings, head = (weight.double() for weight in shared_weights(target.model))
        self.embeddings = embeddings
        self.head = head
        self.target_ids = torch.arange(len(head))
        self.module = target.module
        self.zero_first = target.zero_first

    def fuse(self, aux_states: Tensor) -> Tensor:
        return aux_states.double()

    def states(self, embeds: Tensor, hidden: Tensor, index: int = 0) -> Tensor:
        if self.zero_first:
            embeds = torch.cat((torch.zeros_like(embeds[:1]), embeds[1:]))
        positions = torch.arange(len(embeds))[None]
        layer = self.module.layers[index]
        layer.use_post_norm = self.hidden == "after_norm"
        states = self.module.forward_layer(index, hidden[None], positions, None, inputs_embeds=embeds[None])[0]
        layer.use_post_norm = True
        return states

    def head_input(self, states: Tensor) -> Tensor:
        return self.module.layers[0].post_norm(states.double()) if self.hidden == "before_norm" else states.double()

    def logits(self, states: Tensor) -> Tensor:
        return self.head_input(states) @ self.head.T


class NaiveModules(NaiveMTP):
    """Several of transformers' modules in turn over a whole text: token i of a path by module i, then by the last. A
    node goes on from what its parent has read and given."""

    def tree(
        self, aux_states: Tensor, tokens: list[int], *arguments: Any, **options: Any
    ) -> tuple[list[int], list[int], list[float]]:
        self.read: dict[tuple[int, ...], Tensor] = {(): self.fuse(aux_states)}  # by path
        return super().tree(aux_states, tokens, *arguments, **options)

    def _states_at(
        self, path: list[int], aux_states: Tensor, tokens: list[int], states_of: dict[tuple[int, ...], Tensor]
    ) -> Tensor:
        last = len(self.module.layers) - 1
        if path:
            states = states_of[tuple(path[:-1])]
            is_next = len(path) <= last  # another module reads all that the one before gives; else one row more
            self.read[tuple(path)] = states if is_next else torch.cat((self.read[tuple(path[:-1])], states[-1:]))
        read = self.read[tuple(path)]
        index = min(len(path), last)
        return self.states(self.embeddings[[*tokens, *path][1 + index :][: len(read)]], read, index)

    def chains(self, aux_states: Tensor, tokens: Tensor, num_steps: int) -> dict[tuple[int, int], Tensor]:
        text = tokens.tolist()
        states = {}
        for row in range(len(text) - 1):
            self.read = {(): self.fuse(aux_states[: row + 1])}
            states_of = {}
            for step in range(min(num_steps, len(text) - 1 - row)):
                path = text[row + 2 : row + 2 + step]
                states_of[tuple(path)] = self._states_at(path, aux_states, text[: row + 2], states_of)
                states[row, step] = states_of[tuple(path)][-1].float()
        return states


class PlainMTP(NaiveEagle):
    """The module of a draft checkpoint for a target of a family without, written out from its public tensors, in fp64.
    `embeddings` and `head` (V, H) are the target's."""

    def __init__(self, draft: Path | DraftNetwork, embeddings: Tensor, head: Tensor):
        super().__init__(draft, embeddings, head)
        self.layer = f"layers.{self.config['num_target_layers']}"

    def states(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        x = self._project(torch.cat((self._norm(embeds, "enorm"), self._norm(hidden, "hnorm")), dim=-1), "eh_proj")
        x = x + self._attention(self._norm(x, f"{self.layer}.input_layernorm"), f"{self.layer}.self_attn")
        x = x + self._project(self._gated(x, self.layer), f"{self.layer}.mlp.down_proj")
        return self._norm(x, "norm")


class Oracle:
    """Computes the proposal that the module should make after any text."""

    def __init__(self, target: MTPTarget, options: TreeOptions, hidden: Hidden = "after_norm"):
        self.states = KnownStates(target.model)
        self.naive = (NaiveMTP if len(target.module.layers) == 1 else NaiveModules)(target, hidden)
        self.options = options
        self.state = -1 if hidden == "after_norm" else -2

    @torch.no_grad()
    def __call__(self, tokens: list[int], request: Request) -> Nodes:
        states = self.states(tokens[:-1])[self.state]
        shape = (self.options.topk, self.options.depth)
        key = noise_key(request.seed, request.choice)
        return self.naive.tree(states, tokens, shape, self.options.verified_nodes, key, request.params.temperature)
