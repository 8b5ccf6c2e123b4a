"""Shapes that a small pair can be inflated to (bench/inflate.py), and the weights: the small model's values and what
surrounds them.

State i of the small target is the output of the big layer that `places` gives it, and its state after the final norm is
the big one's. Letters: h and H are the small and the big hidden size. Residual channels of the big networks:

    0 .. h - 1     the small model's, with its values
    h .. H - 2     quiet: about 2**-56, which every sum with ordinary values absorbs in bf16 and in fp32
    H - 1          one constant, 2**-18 for every token: too small for any norm, zero after all of them but the last
                   (final norm of the target, norm of the draft), which lift it for the rows of unused tokens. It comes
                   from the target's embedding and stays in the residual stream; a draft's fc passes it on, since an
                   EAGLE3 draft's stream starts there

So a weight is of ordinary size wherever it is harmless: all of q, k, v, gate, up, embedding and head, where it is read
by no real channel or meets a quiet one. What writes into channels that must stay as they are (o_proj, down_proj and fc
outside the small block, whole layers that do nothing) is random, too, but quiet: the same bits to fetch and to multiply
as in any model. Exactly zero are only rows and columns of the constant channel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor

from slipstream.models.targets.config import DecoderShape, TargetSpec

SPREAD = 0.02  # standard deviation of ordinary weights
QUIET = 2.0**-50  # factor of quiet ones; their squares stay above fp32's subnormal numbers, which are slow on CPUs
# Unused tokens get the logit -UNUSED * LIFT * CONSTANT * sqrt(H / h) / rms of the last state: -16,384 / rms at H / h =
# 16. Each factor, and the lifted channel, fits fp16 as well.
CONSTANT = 2.0**-18
LIFT = 2.0**15
UNUSED = 2.0**15

RANK = 256  # of what joins a block draft's slots, as in published drafts

Make = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
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
    "llama31-8b": Shape(4096, 32, 32, 8, 14336, 128256, 32000, 131072),
    "qwen3-8b": Shape(4096, 36, 32, 8, 12288, 151936, 32000, 40960),
    "mid": Shape(1024, 8, 8, 2, 1536, 8192, 2048, 4096),
    "small": Shape(1024, 7, 8, 2, 800, 5120, 2048, 2048),  # little more than the bundled target: for quick trials
}


def check(model: TargetSpec, shape: Shape) -> None:
    """Raises ValueError naming what of a target does not fit."""
    attention = [layer.attention for layer in model.layers]
    if model.architecture != "Qwen3ForCausalLM" or any(spec.qkv_bias or spec.output_bias for spec in attention):
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


def check_layer(name: str, small: DecoderShape, shape: Shape) -> None:
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


class Inflation:
    """Makes big tensors out of small ones, or out of None, for added layers: then nothing is preserved there."""

    def __init__(self, h: int, H: int, device: torch.device, seed: int) -> None:
        self.h = h
        self.H = H
        self.device = device
        self.scale = sqrt(h / H)  # of norm weights: the mean square is taken over H channels
        self.generator = torch.Generator(device).manual_seed(seed)

    def fill(self, *shape: int, factor: float = 1.0) -> Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return values.normal_(0.0, SPREAD * factor, generator=self.generator)

    def norm(self, small: Tensor | None, constant: float = 0.0) -> Tensor:
        """Norm weights (h,) -> (H,); `constant` is the constant channel's."""
        weight = self.scale * (1.0 + self.fill(self.H))
        if small is not None:
            weight[: self.h] = small * self.scale
        weight[-1] = constant
        return weight

    def reads(self, small: Tensor | None, rows: int, num_inputs: int = 1, factor: float = 1.0) -> Tensor:
        """A matrix over normed states: (O, K * h) -> (rows, K * H), small values times `factor`."""
        weight = self.fill(rows, num_inputs * self.H)
        if small is not None:
            blocks = (small * factor).unflatten(1, (num_inputs, self.h))
            weight.unflatten(1, (num_inputs, self.H))[: len(small), :, : self.h] = blocks
        return weight

    def writes(self, small: Tensor | None, columns: int) -> Tensor:
        """A matrix whose product is added to the residual stream: (h, I) -> (H, columns). The constant stays."""
        weight = self.fill(self.H, columns, factor=QUIET)
        if small is not None:
            weight[: self.h, : small.shape[1]] = small
        weight[-1] = 0.0
        return weight

    def embedding(self, small: Tensor, rows: int) -> Tensor:
        """(V, h) -> (rows, H). Rows of unused tokens are never read."""
        weight = self.fill(rows, self.H)
        weight[: len(small)] *= QUIET
        weight[: len(small), : self.h] = small
        weight[:, -1] = CONSTANT
        return weight

    def head(self, small: Tensor, rows: int) -> Tensor:
        """(V, h) -> (rows, H); rows beyond V see the lifted constant and little else."""
        weight = self.fill(rows, self.H)
        weight[: len(small), : self.h] = small
        weight[: len(small), -1] = 0.0
        weight[len(small) :, -1] = -UNUSED
        return weight

    def fusion(self, small: Tensor, states: Sequence[tuple[int | None, bool]]) -> Tensor:
        """A draft's fc over K target states: (h, K' * h) -> (H, K * H), which passes the constant of one state on.

        `states`: of each big one, which of the K' small ones it is, or None if it is new, of which nothing is read; and
        whether it comes after the final norm, where the constant is lifted and varies with the norm.
        """
        K = len(states)
        h = self.h
        H = self.H
        weight = self.fill(H, K * H)
        blocks = weight.unflatten(1, (K, H))
        blocks[h:] *= QUIET
        columns = small.unflatten(1, (-1, h))
        for index, (source, _) in enumerate(states):
            blocks[:h, index, :h] = blocks[:h, index, :h] * QUIET if source is None else columns[:, source]
        blocks[:, :, -1] = 0.0
        blocks[-1] = 0.0
        passed = min(range(K), key=lambda index: states[index][1])
        blocks[-1, passed, -1] = 1.0 / (LIFT * sqrt(H / h)) if states[passed][1] else 1.0
        return weight

    def factors(self, small: Tensor, rows: int, *, is_quiet: bool) -> Tensor:
        """Factors of pairs of tokens (V, r) -> (rows, RANK). Added columns change no score, since the successors' are
        quiet."""
        weight = self.fill(rows, RANK)
        if is_quiet:
            weight[:, small.shape[1] :] *= QUIET
        weight[: len(small), : small.shape[1]] = small
        return weight

    def beside_head(self, small: Tensor, shape: Sequence[int]) -> Tensor:
        """A matrix that reads final states, as the head does, and maybe factors of the token before: (r, h + r) or
        (r, h) -> (RANK, H + RANK) or (RANK, H); one row stays one row."""
        weight = self.fill(*shape)
        rows = len(small)
        rank = small.shape[1] - self.h
        weight[:rows, self.H :] *= QUIET
        weight[:rows, : self.h] = small[:, : self.h]
        weight[:rows, self.H : self.H + rank] = small[:, self.h :]
        weight[:, self.H - 1] = 0.0  # the last norm lifts the constant
        return weight

    def convolution(self, small: Tensor | None, shape: Sequence[int]) -> Tensor:
        """Kernels (2, taps, h) -> (2, taps, H), whose first tap is near the identity."""
        weight = self.fill(*shape)
        weight[:, 0] += 1.0
        if small is not None:
            weight[..., : self.h] = small
        return weight

    def kernel_projection(self, small: Tensor | None, shape: Sequence[int]) -> Tensor:
        """The projection to the deltas of both convolutions' taps, by groups of channels: (4 g, h) -> (4 G, H)."""
        weight = self.fill(*shape)
        if small is not None:
            deltas = small.unflatten(0, (4, -1))
            weight.unflatten(0, (4, -1))[:, : deltas.shape[1], : self.h] = deltas
        return weight

    def block_head(self, name: str, shape: Sequence[int], small: Tensor | None) -> Tensor | None:
        """A tensor of what a block draft has besides its layers; None: it is none of these."""
        module, part, field = name.split(".")[-3:] if name.count(".") > 1 else ("", *name.split("."))
        if field == "base_kernel":
            return self.convolution(small, shape)
        if part == "kernel_projection":
            return self.kernel_projection(small, shape)
        if small is None:  # an added layer has nothing else of these
            return None
        if field.endswith("codebook") or part in ("markov_w1", "markov_w2"):
            return self.factors(small, shape[0], is_quiet=field.startswith("successor") or part == "markov_w2")
        if part == "hidden_projection" or module in ("markov_head", "confidence_head"):
            if field == "weight":
                return self.beside_head(small, shape)
            bias = self.fill(*shape)
            bias[: len(small)] = small
            return bias
        return None

    def tensor(self, name: str, shape: Sequence[int], small: Tensor | None, *, is_normed: bool = False) -> Tensor:
        """Any other tensor of a network, by its public name.

        rms_norm_eps falls with h / H, and q/k norms share it while their size stays: so q and k, if that `is_normed`,
        shrink by the same factor before those norms.
        """
        if (head := self.block_head(name, shape, small)) is not None:
            return head
        part = name.split(".")[-2]
        if small is not None and part in ("embed_tokens", "lm_head"):
            return (self.embedding if part == "embed_tokens" else self.head)(small, shape[0])
        if part in ("q_norm", "k_norm"):
            return small if small is not None else 1.0 + self.fill(*shape)
        if part.endswith("norm"):
            return self.norm(small, LIFT if part == "norm" else 0.0)
        if part in ("o_proj", "down_proj"):
            return self.writes(small, shape[1])
        return self.reads(small, shape[0], shape[1] // self.H, self.scale if is_normed else 1.0)

    def network(
        self, big: Mapping[str, Tensor], small: Mapping[str, Tensor], layer_at: Mapping[int, int]
    ) -> dict[str, Make]:
        """Makers of a network's tensors, by name, but of its fc and token map. `big`: the tensors by public name, of
        which the shapes count; `layer_at`: big layer -> the small layer that it is."""

        def make(name: str) -> Tensor:
            source = small_name(name, layer_at)
            tensor = None if source is None else small[source].to(self.device)
            is_normed = "_proj." in name and name.replace("_proj.", "_norm.") in big
            return self.tensor(name, big[name].shape, tensor, is_normed=is_normed)

        return {name: partial(make, name) for name in big}


def small_name(name: str, layer_at: Mapping[int, int]) -> str | None:
    """The small network's tensor that a big one holds; None: one of an added layer, which leaves the residual stream as
    it is."""
    if not name.startswith("layers."):
        return name
    _, index, rest = name.split(".", 2)
    return f"layers.{layer_at[int(index)]}.{rest}" if int(index) in layer_at else None


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
