"""Scales of an FP8 KV cache that checkpoints bring: a number is its e4m3 code times the scale.

compressed-tensors has `self_attn.k_scale` and `v_scale`, ModelOpt `k_proj.k_scale` and `v_proj.v_scale`, Quark
`k_proj.output_scale` and `v_proj.output_scale`, older files one `kv_scale` for both; each a number, or one for every KV
head.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.models.targets.config import AttentionSpec, LayerSpec

NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale"),
}
SHARED = ("kv_scale", "attn.kv_scale", "k_proj.kv_scale")  # of keys and values


def read_cache_scales(
    tensors: Mapping[str, Tensor], layers: Sequence[LayerSpec], path: Path
) -> tuple[Tensor | None, ...]:
    """Scales of each layer with attention (2, G) fp32, for keys and values, or of the layer whose it reads; None where
    the file lacks either.

    tensors: by names without "model.". Raises ValueError for scales that are not numbers above 0, one or one per head.
    """
    scales: list[Tensor | None] = []
    for index, layer in enumerate(layers):
        if not isinstance(layer.mixer, AttentionSpec):
            continue
        if layer.mixer.kv_source is not None:
            scales.append(scales[layer.mixer.kv_source])
            continue
        prefix = f"layers.{index}.self_attn."
        pair = []
        for names in NAMES.values():
            name = next((prefix + name for name in (*names, *SHARED) if prefix + name in tensors), None)
            pair.append(None if name is None else _read(tensors[name], layer.mixer.num_kv_heads, f"{path}: {name}"))
        k, v = pair
        scales.append(None if k is None or v is None else torch.stack((k, v)))
    return tuple(scales)


def _read(tensor: Tensor, num_heads: int, label: str) -> Tensor:
    scale = tensor.float().flatten()
    if len(scale) not in (1, num_heads):
        raise ValueError(
            f"{label} is {list(tensor.shape)}; an FP8 KV cache has one scale, or one for each of {num_heads} KV heads: "
            "leave kv_cache_dtype out, or remove the scales, so that they are calibrated"
        )
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(
            f"{label} is {scale.tolist()}; scales are above 0: leave kv_cache_dtype out, or remove the scales, so that "
            "they are calibrated"
        )
    return scale.expand(num_heads).clone()
