"""Tiny random targets with a module that predicts a token more (MTP), and transformers' module as the oracle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from slipstream.kernels.sampling.sample import noise_key
from slipstream.models.drafts.base import DraftNetwork
from slipstream.models.targets.families import Hidden
from slipstream.serve.drafters.options import TreeOptions
from slipstream.serve.request import Request
from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.random_drafts import load_float64
from slipstream.tests.random_targets import (
    BY_LAYER,
    DEEPSEEK_MOE,
    DELTA_NETS,
    EXPERTS,
    MROPE,
    PARTIAL_ROPE,
    SHAPE,
    SHARED,
    TWO_ROPES,
    change_json,
    roughen,
    save_random_target,
    shared_weights,
    target_states,
)
from slipstream.tests.serve.engine_runs import Nodes

LATER = {  # transformers' names -> files', {} is the number of layers
    "enorm.": "model.layers.{}.enorm.",
    "hnorm.": "model.layers.{}.hnorm.",
    "eh_proj.": "model.layers.{}.eh_proj.",
    "post_norm.": "model.layers.{}.shared_head.norm.",
    "mtp_block.": "model.layers.{}.",
}
BESIDE = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "post_norm.": "mtp.norm.",
    "mtp_block.": "mtp.layers.0.",
}
ERNIE = {  # without a norm of its own
    "enorm.": "model.mtp_emb_norm.0.",
    "hnorm.": "model.mtp_hidden_norm.0.",
    "eh_proj.": "model.mtp_linear_proj.0.",
    "mtp_block.": "model.mtp_block.0.",
}
MELLUM = {**BY_LAYER, **EXPERTS, "rope_parameters": TWO_ROPES, "head_dim": 16}
FULL = {"mtp_layer_types": ["full_attention"]}
SLIDING = {"mtp_layer_types": ["sliding_attention"]}
DENSE = {"mtp_mlp_layer_types": ["dense"]}
SPARSE = {"mtp_mlp_layer_types": ["sparse"]}


class Kind(NamedTuple):
    """A family: its config, names in its files, and what transformers must be told of the module."""

    config: str
    fields: dict[str, Any]
    names: dict[str, str]
    module: dict[str, Any] = {}
    zero_first: bool = False


KINDS = {
    "ernie": Kind(
        "Ernie4_5_MoeConfig",
        {"moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2},
        ERNIE,
        {"moe_layer_start_index": 1, "moe_layer_end_index": 1},  # an MLP
    ),
    "glm4-moe": Kind("Glm4MoeConfig", {**DEEPSEEK_MOE, "head_dim": 16, "use_qk_norm": True}, LATER),
    "glm4-moe-bias": Kind("Glm4MoeConfig", {**DEEPSEEK_MOE, "head_dim": 16, "attention_bias": True}, LATER),
    "glm4-moe-wide": Kind(  # for groups of 32 inputs
        "Glm4MoeConfig",
        {**DEEPSEEK_MOE, "head_dim": 16, "use_qk_norm": True, "intermediate_size": 64, "moe_intermediate_size": 32},
        LATER,
    ),
    "hy-v3": Kind(
        "HYV3Config",
        {**EXPERTS, "head_dim": 16},
        LATER | {"post_norm.": "model.layers.{}.final_layernorm."},
        SPARSE,
        zero_first=True,
    ),
    "mellum": Kind("MellumConfig", MELLUM, BESIDE, {**SLIDING, **SPARSE}),
    "qwen3-next": Kind("Qwen3NextConfig", {**DELTA_NETS, **SHARED, "rope_parameters": PARTIAL_ROPE}, BESIDE, FULL),
    "qwen3-5": Kind("Qwen3_5TextConfig", {**DELTA_NETS, "rope_parameters": {**MROPE, **PARTIAL_ROPE}}, BESIDE, FULL),
    "exaone-moe": Kind("ExaoneMoeConfig", {**EXPERTS, **BY_LAYER}, BESIDE, {**SLIDING, **DENSE}),
}


class MTPTarget(NamedTuple):
    folder: Path
    model: PreTrainedModel  # in fp64
    module: MtpModel  # in fp64
    zero_first: bool


MakeMTP = Callable[[str], MTPTarget]


def config_of(kind: Kind) -> PretrainedConfig:
    return getattr(transformers, kind.config)(**SHAPE | kind.fields, num_nextn_predict_layers=1)


def save_mtp_target(name: str, folder: Path, seed: int = 1) -> MTPTarget:
    """Saves a random target with its module."""
    kind = KINDS[name]
    save_random_target(config_of(kind), folder)
    change_json(folder / "config.json", num_nextn_predict_layers=1)
    model = load_float64(folder)
    for field, value in {"num_mtp_layers": 1, **kind.module}.items():
        setattr(model.config, field, value)
    torch.manual_seed(seed)
    module = MtpModel(model, 1).double()
    for parameter in module.layers.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    roughen(module.layers)
    if "post_norm." not in kind.names:
        layer: Any = module.layers[0]
        layer.post_norm = model.get_decoder().norm
    add_tensors(folder, module_tensors(name, module))
    return MTPTarget(folder, model, module, kind.zero_first)


def module_tensors(name: str, module: MtpModel) -> dict[str, Tensor]:
    """The tensors of a module as files of its family have them, experts apart."""
    names = {begin: path.format(SHAPE["num_hidden_layers"]) for begin, path in KINDS[name].names.items()}
    tensors = {}
    for key, tensor in module.layers[0].state_dict().items():
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


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Adds tensors to a checkpoint's files, or replaces them."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


class NaiveMTP(NaiveEagle3):
    """transformers' module over a whole text, with nothing kept between calls."""

    def __init__(self, target: MTPTarget, hidden: Hidden = "after_norm") -> None:
        self.hidden = hidden
        embeddings, head = (weight.double() for weight in shared_weights(target.model))
        self.embeddings = embeddings
        self.head = head
        self.target_ids = torch.arange(len(head))
        self.module = target.module
        self.zero_first = target.zero_first

    def fuse(self, aux_states: Tensor) -> Tensor:
        return aux_states.double()

    def states(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        if self.zero_first:
            embeds = torch.cat((torch.zeros_like(embeds[:1]), embeds[1:]))
        positions = torch.arange(len(embeds))[None]
        layer: Any = self.module.layers[0]
        layer.use_post_norm = self.hidden == "after_norm"
        states = self.module.forward_layer(0, hidden[None], positions, None, inputs_embeds=embeds[None])[0]
        layer.use_post_norm = True
        return states

    def logits(self, states: Tensor) -> Tensor:
        states = states.double()
        if self.hidden == "before_norm":
            layer: Any = self.module.layers[0]
            states = layer.post_norm(states)
        return states @ self.head.T


class PlainMTP(NaiveEagle3):
    """The module of a draft checkpoint for a target of a family without, written out from its public tensors, in fp64.
    `embeddings` and `head` (V, H) are the target's."""

    def __init__(self, draft: Path | DraftNetwork, embeddings: Tensor, head: Tensor) -> None:
        self.target_ids = torch.arange(len(head))
        super().__init__(draft, embeddings)
        self.layer = f"layers.{self.config['num_target_layers']}"
        self.head = head.double()[self.target_ids]

    def fuse(self, aux_states: Tensor) -> Tensor:
        return aux_states.double()

    def states(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        x = self._project(torch.cat((self._norm(embeds, "enorm"), self._norm(hidden, "hnorm")), dim=-1), "eh_proj")
        x = x + self._attention(self._norm(x, f"{self.layer}.input_layernorm"), f"{self.layer}.self_attn")
        x = x + self._project(self._gated(x, self.layer), f"{self.layer}.mlp.down_proj")
        return self._norm(x, "norm")

    def logits(self, states: Tensor) -> Tensor:
        return states.double() @ self.head.T


class Oracle:
    """Computes the proposal that the module should make after any text."""

    def __init__(self, target: MTPTarget, options: TreeOptions, hidden: Hidden = "after_norm") -> None:
        self.model = target.model
        self.naive = NaiveMTP(target, hidden)
        self.options = options
        self.state = -1 if hidden == "after_norm" else -2

    @torch.no_grad()
    def __call__(self, tokens: list[int], request: Request) -> Nodes:
        states = target_states(self.model, tokens[:-1])[self.state]
        shape = (self.options.topk, self.options.depth)
        key = noise_key(request.seed, request.choice)
        return self.naive.tree(states, tokens, shape, self.options.verified_nodes, key, request.params.temperature)
