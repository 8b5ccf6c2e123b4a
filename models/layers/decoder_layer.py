from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.kernels.collectives.ranks import Ranks
from slipstream.kernels.norm import Increment
from slipstream.models.layers.attention import Attention, Mask, SelfAttention
from slipstream.models.layers.delta_net import DeltaNet
from slipstream.models.layers.linear import Embedding, Linear
from slipstream.models.layers.moe import Experts, MixtureOfExperts, ScaledRouter, feed_forward
from slipstream.models.layers.norm import Delta, RMSNorm, add_delta, add_for_all
from slipstream.models.targets.config import AttentionSpec, DeltaNetSpec, LayerSpec, MLPSpec, RecurrentSpec
from slipstream.models.targets.families import Norms, PerLayerSpec

# Modules that mix tokens, by the kind of spec: MODULE(spec, place among those of its kind, hidden size, eps).
MIXERS: dict[type[AttentionSpec | RecurrentSpec], Callable[..., Any]] = {
    AttentionSpec: SelfAttention,
    DeltaNetSpec: DeltaNet,
}


class MixingLayer(nn.Module):
    """A layer with a mixer, whose module has the name that files have for its kind."""

    mixer_name: str
    mlp: Any

    def add_mixer(self, spec: AttentionSpec | RecurrentSpec, index: int, hidden_size: int, eps: float) -> None:
        self.mixer_name = spec.module_name
        self.add_module(self.mixer_name, MIXERS[type(spec)](spec, index, hidden_size, eps))

    @property
    def mixer(self) -> Any:
        """The mixer."""
        return self._modules[self.mixer_name]

    def join(self, ranks: Ranks) -> None:
        """Shares heads and channels with other ranks."""
        self.mixer.join(ranks)
        self.mlp.join(ranks)


class DecoderLayer(MixingLayer):
    """A pre-norm layer: norms the inputs of mixer and MLP."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)
        self.add_mixer(spec.mixer, index, hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)
        self.mlp = feed_forward(hidden_size, spec.mlp)

    @property
    def norm_readers(self) -> list[tuple[RMSNorm, Linear | Experts]]:
        """Norms whose output a single projection reads, or experts and their router."""
        reader = self.mlp.experts if isinstance(self.mlp, MixtureOfExperts) else self.mlp.reader
        return [*self.input_readers, (self.mlp_norm, reader)]

    @property
    def mlp_norm(self) -> RMSNorm:
        """The norm of the MLP's input."""
        return self.post_attention_layernorm

    @property
    def input_readers(self) -> list[tuple[RMSNorm, Linear | Experts]]:
        """The first of `norm_readers`; none where several projections read the mixer's input."""
        reader = self.mixer.reader
        return [] if reader is None else [(self.input_layernorm, reader)]

    def forward(
        self,
        residual: Tensor,
        delta: Delta | None,
        attention: Attention,
        mask: Mask,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Delta]:
        """The layer's input is residual + delta (..., H), written to `out` if given; so is its output.

        The next norm computes the sum, both in one kernel.
        """
        normed, residual = self.norm_input(residual, delta, out)
        normed, residual = self.post_attention_layernorm.add(residual, self.mixer(normed, attention, mask))
        return residual, self.mlp(normed)

    def norm_input(self, residual: Tensor, delta: Delta | None, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """The layer's input, normed and as it is."""
        if delta is None:
            if out is not None:
                out.copy_(residual)
            return self.input_layernorm(residual), residual
        return self.input_layernorm.add(residual, delta, out)


class SandwichLayer(DecoderLayer):
    """Norms the inputs and the outputs of attention and MLP (Gemma 2, arXiv 2408.00118)."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float) -> None:
        super().__init__(spec, index, hidden_size, eps)
        post_eps = eps if spec.post_norm_eps is None else spec.post_norm_eps
        self.post_attention_layernorm.eps = post_eps
        self.pre_feedforward_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)
        self.post_feedforward_layernorm = RMSNorm(hidden_size, post_eps, spec.norm_offset)

    @property
    def mlp_norm(self) -> RMSNorm:
        return self.pre_feedforward_layernorm

    def forward(
        self,
        residual: Tensor,
        delta: Delta | None,
        attention: Attention,
        mask: Mask,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Increment]:
        normed, residual = self.norm_input(residual, delta, out)
        attended = self.post_attention_layernorm.branch(self.mixer(normed, attention, mask))
        return self._feed_forward(residual, Increment(attended))

    def _feed_forward(self, residual: Tensor, attended: Increment) -> tuple[Tensor, Increment]:
        normed, residual = self.pre_feedforward_layernorm.add(residual, attended)
        return residual, Increment(self.post_feedforward_layernorm.branch(self.mlp(normed)))


class ScaledLayer(SandwichLayer):
    """A sandwich whose output a learnt number multiplies; before that it may add a part of a second embedding of its
    token, gated by the output. It may have experts beside its MLP, each with norms of their outputs (Gemma 4)."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float) -> None:
        super().__init__(spec, index, hidden_size, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.is_silu = isinstance(spec.mlp, MLPSpec) and spec.mlp.activation == "silu"
        self.experts = None
        if spec.experts is not None:
            self.router = ScaledRouter(hidden_size, spec.experts, eps)
            self.mlp.gate_up_proj.reads_early = True
            self.experts = Experts(hidden_size, spec.experts)
            self.pre_feedforward_layernorm_2 = RMSNorm(hidden_size, eps)
            self.post_feedforward_layernorm_1 = RMSNorm(hidden_size, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(hidden_size, eps)
        self.per_layer_input_gate = None
        if spec.per_layer_size:
            self.per_layer_input_gate = Linear(hidden_size, spec.per_layer_size)
            self.per_layer_projection = Linear(spec.per_layer_size, hidden_size)
            self.post_per_layer_input_norm = RMSNorm(hidden_size, eps)

    def join(self, ranks: Ranks) -> None:
        super().join(ranks)
        if self.experts is not None:
            self.experts.join(ranks)

    @property
    def norm_readers(self) -> list[tuple[RMSNorm, Linear | Experts]]:
        return super().norm_readers if self.experts is None else self.input_readers

    def forward(
        self,
        residual: Tensor,
        delta: Delta | None,
        attention: Attention,
        mask: Mask,
        out: Tensor | None = None,
        per_layer: Tensor | None = None,
    ) -> tuple[Tensor, Increment]:
        """per_layer (..., P): the layer's part of the second embedding."""
        residual, increment = super().forward(residual, delta, attention, mask, out)
        if self.per_layer_input_gate is not None and per_layer is not None:
            residual = add_delta(residual, increment)
            gate = self.per_layer_input_gate(residual)
            gate = F.silu(gate) if self.is_silu else F.gelu(gate, approximate="tanh")
            increment = Increment(self.post_per_layer_input_norm.branch(self.per_layer_projection(gate * per_layer)))
        return residual, increment._replace(factor=self.layer_scalar)

    def _feed_forward(self, residual: Tensor, attended: Increment) -> tuple[Tensor, Increment]:
        if self.experts is None:
            return super()._feed_forward(residual, attended)
        norms = (self.pre_feedforward_layernorm, self.pre_feedforward_layernorm_2, self.router.norm)
        (normed, expert_inputs, router_inputs), residual = add_for_all(norms, residual, attended)
        routing = self.router(router_inputs, self.experts.least_rows(len(router_inputs)), self.experts.share)
        dense = self.mlp(normed)  # begins beside the router
        mixed = self.experts.added(expert_inputs, routing)
        return residual, Increment(
            self.post_feedforward_layernorm_1.branch(dense),
            self.post_feedforward_layernorm_2.branch(mixed),
            self.post_feedforward_layernorm.gain,
        )


class PerLayerInputs(nn.Module):
    """The second embedding of tokens: what a table has of them, and a projection of their first one."""

    def __init__(self, spec: PerLayerSpec, num_layers: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.size = spec.size
        self.embed_tokens = Embedding(spec.vocab_size, num_layers * spec.size)
        self.model_projection = Linear(hidden_size, num_layers * spec.size)
        self.projection_norm = RMSNorm(spec.size, eps)

    def forward(self, tokens: Tensor, embeds: Tensor) -> Tensor:
        """tokens (T,) and embeds (T, H) -> (T, L, P)."""
        table = self.embed_tokens(tokens)
        scale = torch.tensor(self.size**0.5, dtype=table.dtype, device="cpu").item()
        projected = self.model_projection(embeds) * embeds.shape[-1] ** -0.5
        projected, table = (x.unflatten(-1, (-1, self.size)) for x in (projected, table * scale))
        return (self.projection_norm(projected) + table) * 2.0**-0.5


class PostNormLayer(MixingLayer):
    """Norms the outputs of attention and MLP alone (OLMo 2, arXiv 2501.00656)."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.add_mixer(spec.mixer, index, hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)
        self.mlp = feed_forward(hidden_size, spec.mlp)
        self.post_feedforward_layernorm = RMSNorm(hidden_size, eps, spec.norm_offset)

    def forward(
        self,
        residual: Tensor,
        delta: Delta | None,
        attention: Attention,
        mask: Mask,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Increment]:
        if delta is not None:
            residual = add_delta(residual, delta, out)
        attended = self.post_attention_layernorm.branch(self.mixer(residual, attention, mask))
        residual = add_delta(residual, Increment(attended))
        return residual, Increment(self.post_feedforward_layernorm.branch(self.mlp(residual)))


LAYERS: dict[Norms, type[DecoderLayer | PostNormLayer]] = {
    "pre": DecoderLayer,
    "post": PostNormLayer,
    "sandwich": SandwichLayer,
}


def decoder_layer(spec: LayerSpec, index: int, hidden_size: int, eps: float) -> DecoderLayer | PostNormLayer:
    """Builds the layer of `spec`."""
    kind = ScaledLayer if spec.scaled else LAYERS[spec.norms]
    return kind(spec, index, hidden_size, eps)
