"""Self-attention of all networks. Its backend is an argument, so training and serving share the code.

Letters: H hidden, Q/G query and KV heads, D head dim; ...: packed tokens, in any leading dims.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from slipstream.kernels.collectives.ranks import Ranks, RankSum
from slipstream.kernels.gemm.activation import sigmoid_mul
from slipstream.kernels.gemm.fp8 import InputScales, quantized_sigmoid_mul
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.gemm.low_rank import LowRankChange, LowRankFactors
from slipstream.kernels.kv.rope import Rotation
from slipstream.kernels.norm import HeadNorms
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.layers.recurrence import Record, RecurrentMixer
from slipstream.models.targets.config import AttentionSpec

Mask = Literal["causal", "tree", "block"]


class AttentionLayer(NamedTuple):
    """The layer that asks for attention."""

    id: int  # its place among the network's layers with attention
    spec: AttentionSpec
    norms: HeadNorms | None = None  # where the spec has q/k norms
    sinks: Tensor | None = None  # (Q,) where the spec has sinks


class Attention(Protocol):
    """Attention as a network calls it: owns rotary embedding, KV storage and the mask."""

    def rotation(self, layer: AttentionLayer) -> Rotation | None:
        """Returns the rotation and storage that `attend` begins with, for a projection that does them in its kernel;
        `attend_stored` follows. None where a projection cannot."""
        return None

    def recur(self, records: Record, layer: RecurrentMixer) -> Tensor:
        """Returns the outputs (..., *) of a layer with recurrent state for the records (..., *) of rows."""
        raise AssertionError("it keeps no recurrent state")

    def attend_stored(self, q: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        """`attend` for queries (..., Q, D) that are rotated, where all KV is stored."""
        raise AssertionError("it has no rotation")

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        """Rotates k (..., G, D), normed already, by the batch's positions and stores k and v; for rows without
        queries."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        """Norms q, k and v as the layer's norms say, writes k and v, rotates q (..., Q, D) and returns the attention
        output (..., Q, D). k and v (..., 0, D) of a layer with a `kv_source` are not written; its queries see those of
        that one.

        mask: "causal" a query sees the tokens up to its own; "tree" the committed tokens and its ancestors; "block" the
        committed tokens and its whole block. A windowed layer sees of these the positions above the query's minus the
        window; positions count depth in a tree.
        """
        ...


class SelfAttention(nn.Module):
    """Grouped-query attention with q, k and v fused in one projection; q/k norms, sinks and a gate of the output where
    the architecture has them. The gate has a projection of its own until `join_gate`.

    `quantize`: the scales of what reads gated outputs, where that is a layer in FP8."""

    quantize: Callable[[], InputScales] | None = None

    def __init__(
        self, spec: AttentionSpec, id: int, hidden_size: int, eps: float, input_size: int | None = None
    ) -> None:
        super().__init__()
        self.id = id
        self.spec = spec
        self.head_dim = spec.head_dim
        kv_parts = 0 if spec.kv_source is not None else 1 if spec.key_is_value else 2
        self.sizes = [spec.num_heads, *[spec.num_kv_heads] * kv_parts]
        parts = {f"{name}_proj": size * spec.head_dim for name, size in zip("qkv", self.sizes, strict=False)}
        self.qkv_proj = Linear(input_size or hidden_size, parts, bias=spec.qkv_bias)
        self.o_proj = Linear(spec.num_heads * spec.head_dim, hidden_size, bias=spec.output_bias)
        self.o_proj.shares_inputs = True
        has_norms = spec.qk_norm or spec.projection_norm
        normed_heads = self.sizes if spec.projection_norm else (1, 1)
        q_size, *k_size = (heads * spec.head_dim for heads in normed_heads[: min(kv_parts, 1) + 1])
        self.q_norm = RMSNorm(q_size, eps, spec.norm_offset) if has_norms else None
        self.k_norm = RMSNorm(k_size[0], eps, spec.norm_offset) if has_norms and k_size else None
        assert has_norms or not spec.value_norm
        self.v_norm = RMSNorm(spec.head_dim, eps) if spec.value_norm else None
        self.sinks = nn.Parameter(torch.zeros(spec.num_heads)) if spec.sinks else None
        self.gate_proj = None
        if spec.gate is not None:
            gates = spec.num_heads if spec.gate.by_head else spec.num_heads * spec.head_dim
            self.gate_proj = Linear(input_size or hidden_size, gates, bias=spec.gate.bias)

    def forward(self, x: Tensor, attention: Attention, mask: Mask = "causal") -> Tensor | RankSum:
        layer = self.layer
        rotation = attention.rotation(layer)
        if rotation is not None and (rotated := self.qkv_proj.rotated(x, rotation)) is not None:
            q = rotated.unflatten(-1, (-1, self.head_dim))
            return self._project(attention.attend_stored(q, layer, mask), x)
        q, k, v, factors = self._heads(x)
        if self.spec.projection_norm and self.q_norm is not None and self.k_norm is not None:
            q, k = (norm(x.flatten(-2)).view(x.shape) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return self._project(attention.attend(q, k, v, layer, mask), x, factors)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x (..., H) -> q (..., Q, D), k and v (..., G, D), without heads where the layer reads those of another; and
        what the gate's activation reads, where it is computed with them."""
        outputs = self.qkv_proj(x)
        size = sum(self.sizes) * self.head_dim
        factors = outputs[..., size:] if outputs.shape[-1] > size else None
        q, *kv = outputs[..., :size].unflatten(-1, (-1, self.head_dim)).split(self.sizes, dim=-2)
        if not kv:
            return q, q[..., :0, :], q[..., :0, :], factors
        return q, kv[0], kv[-1], factors

    def _project(self, attended: Tensor, x: Tensor, factors: Tensor | None = None) -> Tensor | RankSum:
        """attended (..., Q, D) -> (..., H), gated by the layer's input x (..., H) where it has a gate; `factors`: as
        `_heads` returns them."""
        gate = self.spec.gate
        if gate is None:
            return self.o_proj.added(attended.flatten(-2))
        if factors is None:
            assert self.gate_proj is not None
            factors = self.gate_proj(x)
        if gate.activation == "sigmoid" and not gate.by_head:
            return self.o_proj.added(self._gated(factors, attended.flatten(-2)))
        factors = factors.sigmoid() if gate.activation == "sigmoid" else softplus(factors.float()).to(attended.dtype)
        factors = factors.unflatten(-1, (-1, 1 if gate.by_head else self.head_dim))
        return self.o_proj.added((attended * factors).flatten(-2))

    def _gated(self, factors: Tensor, attended: Tensor) -> Tensor:
        """sigmoid(factors) * attended, both (..., Q * D); quantised where `o_proj` reads codes."""
        if self.quantize is not None and attended.dim() == 2:
            return cast(Tensor, quantized_sigmoid_mul(factors, attended, self.quantize()))
        return sigmoid_mul(factors, attended)

    def join(self, ranks: Ranks) -> None:
        """Shares the heads with other ranks."""
        self.o_proj.ranks = ranks

    @property
    def can_join_gate(self) -> bool:
        """Whether one product may compute the gate of all dims with q, k and v. Heads without norms are rotated by
        their product, which has no place for more."""
        gate = self.spec.gate
        if self.gate_proj is None or gate is None or gate.by_head or self.q_norm is None:
            return False
        return gate.bias == self.spec.qkv_bias

    def join_gate(self) -> None:
        """Makes the gate's projection a part of that of q, k and v, before there are weights."""
        assert self.gate_proj is not None
        parts = {str(part): rows.stop - rows.start for part, rows in self.qkv_proj.parts.items()}
        with torch.device(self.qkv_proj.weight.device):
            self.qkv_proj = Linear(
                self.qkv_proj.in_features,
                parts | {"gate_proj": self.gate_proj.out_features},
                bias=self.spec.qkv_bias,
            )
        self.gate_proj = None

    @property
    def reader(self) -> Linear | None:
        """The projection that alone reads the layer's input; None where a gate reads it, too."""
        return self.qkv_proj if self.gate_proj is None else None

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(self.id, self.spec, self.norms, self.sinks)

    @property
    def norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.spec.projection_norm:
            return None
        k_norm = self.k_norm or self.q_norm  # where there are no keys, it does not count
        v_weight = None if self.v_norm is None else self.v_norm.weight
        return HeadNorms(self.q_norm.weight, k_norm.weight, self.q_norm.eps, self.spec.norm_last, v_weight)

    @property
    def kv_rows(self) -> slice:
        """The outputs of `qkv_proj` that are keys, then values."""
        return slice(self.sizes[0] * self.head_dim, sum(self.sizes) * self.head_dim)

    @property
    def kv_projection(self) -> tuple[Tensor, Tensor | None]:
        """Views of the weight (2 * G * D, H) and bias of keys, then values."""
        bias = self.qkv_proj.bias
        return self.qkv_proj.weight[self.kv_rows], None if bias is None else bias[self.kv_rows]

    def kv_change(self, norm: RMSNorm | None) -> LowRankChange | None:
        """Returns a copy of what adapters change in keys and values; `norm`: of inputs that have not passed through
        its weight."""
        change = self.qkv_proj.change
        if change is None:
            return None
        a, b, owners = change.factors
        b = b[self.kv_rows]
        ranks = b.any(dim=0)  # sync
        a = a if norm is None else norm.scale_inputs(a)
        return change._replace(factors=LowRankFactors(a[ranks], b[:, ranks], owners[ranks]))

    def write(self, x: Tensor, attention: Attention) -> None:
        """Stores keys and values of rows without computing their attention."""
        assert not self.spec.projection_norm, "rows without queries are those of drafts, which have none"
        if self.qkv_proj.is_plain and self.qkv_proj.change is None:
            kv = linear(x, *self.kv_projection)
            k, v = kv.unflatten(-1, (-1, self.head_dim)).chunk(2, dim=-2)  # (..., G, D) each
        else:
            _, k, v, _ = self._heads(x)
        k, v = (x if norm is None else norm(x) for x, norm in ((k, self.k_norm), (v, self.v_norm)))
        attention.write(k, v, self.layer)
