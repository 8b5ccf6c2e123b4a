"""Shapes that a small pair can be inflated to (bench/inflate.py), what fits into them, and the big target's config.

Invariant: state i of the small target is the output of the big layer `places(...)` gives it, and its state after the
final norm is the big one's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

from slipstream.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a big pair. The draft is as wide as its target, with the same heads and MLP, as published ones are.

    `draft_vocab_size` is that of a draft with a vocabulary of its own.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int


SHAPES = {
    "llama31-8b": Shape(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        draft_vocab_size=32000,
        max_position_embeddings=131072,
    ),
    "qwen3-8b": Shape(
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=12288,
        vocab_size=151936,
        draft_vocab_size=32000,
        max_position_embeddings=40960,
    ),
    "mid": Shape(
        hidden_size=1024,
        num_layers=8,
        num_heads=8,
        num_kv_heads=2,
        intermediate_size=1536,
        vocab_size=8192,
        draft_vocab_size=2048,
        max_position_embeddings=4096,
    ),
    "small": Shape(  # little more than the bundled target: for quick trials
        hidden_size=1024,
        num_layers=7,
        num_heads=8,
        num_kv_heads=2,
        intermediate_size=800,
        vocab_size=5120,
        draft_vocab_size=2048,
        max_position_embeddings=2048,
    ),
}


def check(model: ModelConfig, shape: Shape) -> None:
    """Raises ValueError naming what of a target does not fit."""
    if model.architecture != "Qwen3ForCausalLM" or model.qkv_bias or model.output_bias:
        raise ValueError(f"target is a {model.architecture}; only Qwen3ForCausalLM without biases can be inflated")
    growth = log(shape.hidden_size / model.hidden_size, 4)
    if growth < 1 or growth != round(growth):
        raise ValueError(
            f"hidden_size is {model.hidden_size} and would be {shape.hidden_size}; it can grow by 4, 16, 64 or more, "
            "since its square root scales the norm weights and must be a power of 2"
        )
    check_layer("target", model, shape)
    check_room("num_layers", model.num_layers, shape.num_layers)
    check_room("vocab_size", model.vocab_size, shape.vocab_size - 1)


def check_layer(name: str, small: ModelConfig, shape: Shape) -> None:
    """Raises ValueError for heads or neurons that do not fit. `name`: whose layers these are."""
    if small.num_heads * shape.num_kv_heads != shape.num_heads * small.num_kv_heads:
        raise ValueError(
            f"{name} has {small.num_heads} query and {small.num_kv_heads} KV heads, the shape {shape.num_heads} and "
            f"{shape.num_kv_heads}; the ratio must be the same, so that query heads keep their KV head"
        )
    for field in ("num_heads", "intermediate_size"):
        if getattr(small, field) > getattr(shape, field):
            raise ValueError(f"{name} has {field} {getattr(small, field)}, more than the shape's")


def check_room(field: str, needed: int, limit: int) -> None:
    if needed > limit:
        raise ValueError(f"{field}: {needed} do not fit into the shape, which has room for {limit}")


def places(num_small: int, num_big: int) -> dict[int, int]:
    """Big layer -> the small layer that it is, spread evenly from layer 0 on; the others do nothing."""
    return {index * num_big // num_small: index for index in range(num_small)}


def target_json(small: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """config.json of the big target, from the small one's."""
    sizes = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "layer_types": ["full_attention"] * shape.num_layers,
        "max_window_layers": shape.num_layers,
    }
    eps = small["rms_norm_eps"] * small["hidden_size"] / shape.hidden_size
    return {**small, **sizes, "rms_norm_eps": eps, "tie_word_embeddings": False, "dtype": "bfloat16"}
