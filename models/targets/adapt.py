"""Files of some families -> tensors as our layers read them: what differs there in order, names and factors alone.

Letters: E experts, I their intermediate size, H hidden, D head dim, R rotated dims of a head.
"""

import torch
from torch import Tensor

from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.families import INTERLEAVED

NORM = "norm.weight"  # the final one
SCALES = ("weight_scale", "weight_scale_inv", "scales")  # of quantised weights, which they multiply
ACROSS_OUTPUTS = ("qweight", "qzeros", "scales", "g_idx")  # AWQ's and GPTQ's, whose first axis is that of the inputs
# Norms of a GLM-4 layer -> those of a Gemma layer, in the order of their use.
GLM4_NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
BLOCK = 128  # rows that share a scale of FP8 weights in blocks


def adapt_names(tensors: dict[str, Tensor], config: TargetSpec) -> dict[str, Tensor]:
    """Returns a target's tensors by their names in `Target`, with the axes in the order of its layers: views."""
    if config.architecture == "Qwen3MoeForCausalLM":
        tensors = {key: oriented(key, tensor, config.hidden_size) for key, tensor in tensors.items()}
    if config.architecture == "Glm4ForCausalLM":
        tensors = {glm4_name(key): tensor for key, tensor in tensors.items()}
    return tensors | ones_of(config)


def adapt_values(tensors: dict[str, Tensor], config: TargetSpec) -> dict[str, Tensor]:
    """Returns a target's tensors, or a rank's part of them, as its layers read them. Raises ValueError for a format of
    weights whose rows cannot be reordered."""
    if config.architecture in INTERLEAVED:
        tensors = {key: in_halves(key, tensor, config) for key, tensor in tensors.items()}
    if config.residual_scale != 1:
        tensors = {key: scaled(key, tensors, config.residual_scale) for key in tensors}
    if config.logit_divisor != 1 and NORM in tensors:
        tensors[NORM] = (tensors[NORM].float() / config.logit_divisor).to(tensors[NORM].dtype)
    return tensors


def ones_of(config: TargetSpec) -> dict[str, Tensor]:
    """Weights of norms that have none in files."""
    names = {"embedding_norm.weight": config.hidden_size} if config.embedding_norm else {}
    for index, layer in enumerate(config.layers):
        if not layer.mixer.norm_weights:
            names |= {f"layers.{index}.self_attn.{name}_norm.weight": layer.mixer.head_dim for name in "qk"}
    return {name: torch.ones(size) for name, size in names.items()}


def oriented(key: str, tensor: Tensor, hidden_size: int) -> Tensor:
    """Fused experts as (E, 2 I, H) and (E, H, I), which the files of Qwen3-VL-MoE have as (E, H, 2 I) and (E, I, H);
    told apart by their shapes, as in transformers."""
    axis = {"gate_up_proj": 2, "down_proj": 1}.get(key.rpartition(".")[2])
    is_turned = axis is not None and ".experts." in key and tensor.dim() == 3 and tensor.shape[axis] != hidden_size
    return tensor.transpose(1, 2) if is_turned else tensor


def glm4_name(key: str) -> str:
    path, _, name = key.rpartition(".")
    layer, _, norm = path.rpartition(".")
    return f"{layer}.{GLM4_NORMS[norm]}.{name}" if norm in GLM4_NORMS else key


def in_halves(key: str, tensor: Tensor, config: TargetSpec) -> Tensor:
    """A tensor of a projection to queries or keys, with the rows of each head in the order of a rotation that pairs
    dims i and i + R / 2; others as they are."""
    path, _, name = key.rpartition(".")
    if not path.endswith((".q_proj", ".k_proj")):
        return tensor
    layer = config.layers[0].mixer
    head_dim = layer.head_dim
    rotated = layer.rope.rotary_dim(head_dim)
    heads = layer.num_heads if path.endswith("q_proj") else layer.num_kv_heads
    rows = heads * head_dim
    is_across = name in ACROSS_OUTPUTS
    if not is_across and (tensor.numel() == 1 or name == "weight_shape"):
        return tensor
    if (
        not is_across and name in SCALES and BLOCK % head_dim == 0 and tensor.shape[0] == -(-rows // BLOCK)
    ):  # heads lie within blocks
        return tensor
    if is_across or tensor.shape[0] != rows:
        raise ValueError(
            f"{key} is {list(tensor.shape)}: rows of {config.architecture} are reordered when they are loaded, which "
            "this format of weights does not allow; use a checkpoint in 16 bits, FP8 or symmetric 4 bits of "
            "compressed-tensors"
        )
    dims = torch.arange(head_dim)
    order = torch.cat((dims[:rotated:2], dims[1:rotated:2], dims[rotated:]))
    return tensor.unflatten(0, (heads, head_dim))[:, order].flatten(0, 1)


def scaled(key: str, tensors: dict[str, Tensor], factor: float) -> Tensor:
    """A tensor of a projection whose outputs are added to the residual, times `factor`: its bias, and the scales of its
    weight, or the weight itself where it has none. Others as they are."""
    path, _, name = key.rpartition(".")
    tensor = tensors[key]
    if not path.endswith((".o_proj", ".down_proj")):
        return tensor
    has_scales = any(f"{path}.{scale}" in tensors for scale in SCALES)
    if name == "bias" or name in SCALES or (name == "weight" and not has_scales):
        return (tensor.float() * factor).to(tensor.dtype)
    return tensor
