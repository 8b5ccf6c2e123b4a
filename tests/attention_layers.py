"""Layers that ask for attention, without the rest of a network."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.kernels.norm import HeadNorms
from slipstream.models.layers.attention import AttentionLayer
from slipstream.models.targets.config import AttentionSpec, RopeConfig
from slipstream.serve.attention.base import Backend, KVFormat, choose_backends, load_backend


def find_backends(option: str, formats: Mapping[str, KVFormat] | None = None) -> dict[str, type[Backend]]:
    """The class of each phase's backend."""
    return {phase: load_backend(name) for phase, name in choose_backends(option, formats or {}).items()}


def asking_layer(
    heads: int = 1,
    kv_heads: int = 1,
    head_dim: int = 16,
    *,
    id: int = 0,
    window: int | None = None,
    norms: HeadNorms | None = None,
    sinks: Tensor | None = None,
    **fields: Any,
) -> AttentionLayer:
    """`fields` are further fields of its spec."""
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    fields |= {"window": window, "qk_norm": norms is not None, "sinks": sinks is not None}
    return AttentionLayer(id, AttentionSpec(**sizes, rope=RopeConfig(), **fields), norms, sinks)
