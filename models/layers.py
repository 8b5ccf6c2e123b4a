"""Building blocks of all networks. Attention is an argument, so training and serving share the code.

Letters: T packed tokens (any leading dims), H hidden, Q/G query and KV heads, D head dim, I intermediate.
"""

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from slipstream.kernels.activation import silu_mul
from slipstream.kernels.gathered_head import DraftHead
from slipstream.kernels.linear import gated_linear, linear
from slipstream.kernels.norm import HeadNorms, add_rms_norm, rms_norm, rms_norm_pair
from slipstream.models.config import ModelConfig, RopeConfig

Mask = Literal["causal", "tree", "block"]
CHUNK = 64 << 20  # bytes converted at once: the most that loading needs beside the weights


def copy_converted(place: Tensor, tensor: Tensor) -> None:
    """Copies `tensor`, which may be a view of a mapped file, to `place`; converts it on the device of `place`."""
    rows = max(1, CHUNK // max(1, tensor[:1].nbytes))
    for own, theirs in zip(place.split(rows), tensor.split(rows), strict=True):
        own.copy_(theirs if own.dtype == theirs.dtype else theirs.to(own.device))


def derive(owner: nn.Module, make: Callable[[], Tensor]) -> Tensor:
    """make(), a copy of weights of `owner`, which follows them when they are loaded again."""
    tensor = make()
    owner.__dict__.setdefault("derived", []).append((tensor, make))
    return tensor


def remake_derived(module: nn.Module) -> None:
    """Computes anew, in place, what modules within `module` have derived of their weights."""
    for owner in module.modules():
        for tensor, make in owner.__dict__.get("derived", []):
            tensor.copy_(make())


class Attention(Protocol):
    """Attention as a network calls it: owns rotary embedding, KV storage and the mask."""

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Rotates k (..., G, D) by the batch's positions and stores k and v; for rows without queries."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        mask: Mask,
        window: int | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Norms q and k if there are `norms`, writes k and v, rotates q (..., Q, D) and returns the attention output
        (..., Q, D).

        `window`: a query sees the last `window` positions only, its own included (with mask "causal").
        """
        ...


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Leaves the weights as they are: they are loaded. torch's way, on a meta device, imports its compiler."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in fp32 inside (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, residual: Tensor, delta: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(summed), summed) with summed = residual + delta (..., H), written to `out` if given."""
        return add_rms_norm(residual, delta, self.weight, self.eps, out)

    def pair(self, x: Tensor, other: "RMSNorm", y: Tensor) -> Tensor:
        """[self(x) ; other(y)] (..., 2 * H), in one kernel."""
        return rms_norm_pair(x, y, (self.weight, other.weight), self.eps)


class Linear(nn.Linear):
    """x (..., I) -> x @ weight.T + bias (..., O). Projections of one input may be fused: `out_features` then gives the
    output rows of each, by its name in files, such as q_proj.

    It alone knows how weights are stored. A quantised one overrides `load` and what multiplies; one that tensor
    parallelism splits would keep a slice of each part, or of the inputs, in `__init__` and `load`.
    """

    def __init__(self, in_features: int, out_features: int | Mapping[str, int], bias: bool = False) -> None:
        sizes = {} if isinstance(out_features, int) else out_features
        super().__init__(in_features, out_features if isinstance(out_features, int) else sum(sizes.values()), bias)
        ends = zip(sizes.items(), accumulate(sizes.values()), strict=True)
        self.parts: dict[str | None, slice] = {part: slice(end - size, end) for (part, size), end in ends}

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """silu(first half of the outputs) * second half: (..., I) -> (..., O / 2)."""
        return gated_linear(x, self.weight) if self.bias is None else silu_mul(self(x))

    def load(self, part: str | None, name: str, tensor: Tensor) -> None:
        """Stores a file's "weight" or "bias" of a part, or of all."""
        copy_converted(self.get_parameter(name)[self.parts.get(part, slice(None))], tensor)


class Head(Linear):
    """Logits (..., V) of hidden states (..., H); and, for drafters, of rows that they choose."""

    def tie(self, embedding: Embedding) -> None:
        self.weight = embedding.weight

    def whole(self, ids: Tensor | None = None) -> DraftHead:
        """All rows; `ids` (V,) are the target's ids of a draft's own head."""
        return DraftHead(self.weight, ids)

    def cut(self, ids: Tensor) -> DraftHead:
        """Copies of the rows `ids` (Vd,)."""
        return DraftHead(derive(self, lambda: self.weight[ids]), ids)

    def gathered(self, ids: Tensor) -> DraftHead:
        """The rows `ids` (Vd,) in their place; ids may change between rounds, -1 marks an unused one."""
        return DraftHead(self.weight, ids, gathered=True)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused in one projection."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(hidden_size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_up_proj.gated(x))


class SelfAttention(nn.Module):
    """Grouped-query attention with q, k and v fused in one projection; q/k norms where the architecture has them."""

    def __init__(
        self, config: ModelConfig, layer: int, input_size: int | None = None, window: int | None = None
    ) -> None:
        super().__init__()
        self.layer = layer
        self.window = window
        self.head_dim = config.head_dim
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        parts = {f"{name}_proj": size * config.head_dim for name, size in zip("qkv", self.sizes, strict=True)}
        self.qkv_proj = Linear(input_size or config.hidden_size, parts, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).split(self.sizes, dim=-2)  # (..., heads, D)
        return self.o_proj(attention.attend(q, k, v, self.layer, mask, self.window, self.norms).flatten(-2))

    @property
    def norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    @property
    def kv_projection(self) -> tuple[Tensor, Tensor | None]:
        """Views of the weight (2 * G * D, H) and bias of keys, then values."""
        start = self.sizes[0] * self.head_dim
        bias = self.qkv_proj.bias
        return self.qkv_proj.weight[start:], None if bias is None else bias[start:]

    def write(self, x: Tensor, attention: Attention) -> None:
        """Stores keys and values of rows without computing their attention."""
        kv = linear(x, *self.kv_projection)
        k, v = kv.unflatten(-1, (-1, self.head_dim)).chunk(2, dim=-2)  # (..., G, D) each
        attention.write(k if self.k_norm is None else self.k_norm(k), v, self.layer)


class DecoderLayer(nn.Module):
    """A pre-norm layer. `window`: see Attention."""

    def __init__(self, config: ModelConfig, layer: int, window: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer, window=window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(
        self, residual: Tensor, delta: Tensor | None, attention: Attention, mask: Mask, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer's input is residual + delta (..., H), written to `out` if given; so is its output.

        The next norm computes the sum, both in one kernel.
        """
        if delta is None:
            normed = self.input_layernorm(residual)
        else:
            normed, residual = self.input_layernorm.add(residual, delta, out)
        normed, residual = self.post_attention_layernorm.add(residual, self.self_attn(normed, attention, mask))
        return residual, self.mlp(normed)


class RotaryEmbedding:
    """Tables of cos and sin for every position (RoFormer; scaling types as transformers computes them)."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        inverse_frequencies, scale = _inverse_frequencies(rope, head_dim)
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies)  # (P, D / 2)
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = angles.cos() * scale  # (P, D) fp32
        self.sin = angles.sin() * scale

    def to(self, device: torch.device) -> "RotaryEmbedding":
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return self

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (..., 1, D) fp32 for integer positions (...), broadcastable over heads."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    if rope.rope_type == "default":
        return 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
    from transformers import PretrainedConfig  # here: the import takes a second
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # They take a model config: one with a single head has the fields that they read.
    parameters = {"rope_theta": rope.theta, "rope_type": rope.rope_type, **rope.scaling}
    length = int(rope.scaling.get("original_max_position_embeddings", 2048) * rope.scaling.get("factor", 1))
    config = PretrainedConfig.from_dict(
        {
            "hidden_size": head_dim,
            "num_attention_heads": 1,
            "max_position_embeddings": length,
            "rope_parameters": parameters,
        }
    )
    return ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"))
