"""Enlarges LiLiCorr's scorer of a block draft without changing its scores (bench/inflate.py).

It has a residual stream of its own, as wide as `lilicorr_hidden_size`: s channels become S, with the small ones first,
quiet ones behind them (bench/inflate_weights.py), and one constant. What adds to the stream writes quiet rows beyond
the small ones; what reads it may have ordinary weights there. Heads of attention and of factors keep their number and
get more dimensions, which are quiet on one side of each product. Norms take the mean square over S channels, so their
weights shrink by sqrt(s / S), and so should their eps, by s / S; but that is the draft's, which shrinks by h / H. The
constant channel, which nothing reads, adds the difference to the mean square.

Letters: h and H are the small and the big hidden size of the draft, s and S those of the scorer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log, sqrt

import torch
from torch import Tensor

from slipstream.bench.inflate_weights import Inflation, Make
from slipstream.models.drafts.block_heads import LiLiCorrConfig

WIDTH = 1024  # of published scorers, and of their factors

READS_DRAFT = ("token_proj", "pass_hidden_proj", "context_proj")
WRITES = ("feature_mlp.down_proj", "mlp.down_proj")  # to the stream, from ordinary neurons
FACTORS = ("out_head", "in_head", "anchor_out_head")  # of ordinary neurons, too
COPIED = ("feature_norm.weight", "feature_norm.bias", "relative_slot_bias", "same_slot_bias")


def big_scorer(small: LiLiCorrConfig, h: int, H: int) -> LiLiCorrConfig:
    """Sizes of the big scorer: the published ones, or what H allows. Raises ValueError for a width that cannot grow."""
    s = small.hidden_size or h
    S = max(s, min(WIDTH, s * (H // h)))
    growth = log(S / s, 4)
    if growth < 1 or growth != round(growth):
        raise ValueError(
            f"draft has lilicorr_hidden_size {s}, which would be {S}; it must grow by 4, 16 or more, since its "
            "square root scales the norm weights and must be a power of 2: give 256 or 64"
        )
    return replace(small, hidden_size=S, factor_dim=max(small.factor_dim, S))


class ScorerInflation:
    def __init__(self, inflation: Inflation, small: LiLiCorrConfig, eps: float) -> None:
        """`eps` of the small draft's norms."""
        self.inflation, self.num_heads = inflation, small.num_heads
        self.s, self.S = small.hidden_size or inflation.h, big_scorer(small, inflation.h, inflation.H).hidden_size
        self.constant = sqrt(max(0.0, eps * (self.s - self.S * inflation.h / inflation.H)))

    def tensors(self, big: Mapping[str, Tensor], small: Mapping[str, Tensor] | None) -> dict[str, Make]:
        """What makes each of `big`, the scorer's tensors by public name, of which the shapes count."""
        if small is not None and "lilicorr.token_proj.weight" not in small:  # as wide as the draft: it had none
            h = self.inflation.h
            small = {"lilicorr.token_proj.weight": torch.eye(h), "lilicorr.token_proj.bias": torch.zeros(h), **small}
        sources = dict.fromkeys(big) if small is None else {name: small[name] for name in big}
        return {name: partial(self.tensor, name, x.shape, sources[name]) for name, x in big.items()}

    def tensor(self, name: str, shape: Sequence[int], small: Tensor | None) -> Tensor:
        part = name.removeprefix("lilicorr.")
        part = part.split(".", 2)[2] if part.startswith("layers.") else part
        part, kind = part.removesuffix(".weight").removesuffix(".bias"), "bias" if part.endswith(".bias") else "weight"
        small = None if small is None else small.to(self.inflation.device)
        if small is None and self.inflation.random:
            return self.inflation.fill(*shape) + float(kind == "weight" and part.endswith("norm"))
        assert small is not None
        if name.removeprefix("lilicorr.") in COPIED:
            return small
        if part.endswith("norm"):
            return self.norm(small)
        if part.startswith("attn."):
            return self.attention(part, kind, small, shape)
        return self.bias(part, small, shape) if kind == "bias" else self.matrix(part, small, shape)

    def norm(self, small: Tensor) -> Tensor:
        weight = sqrt(self.s / self.S) * (1.0 + self.inflation.fill(self.S))
        weight[: self.s] = small * sqrt(self.s / self.S)
        weight[-1] = 0.0
        return weight

    def bias(self, part: str, small: Tensor, shape: Sequence[int]) -> Tensor:
        """Of what reads the stream, added neurons' are ordinary."""
        adds = (*READS_DRAFT, *WRITES, "attn.out_proj")
        bias = self.beside(small, shape, self.inflation.quiet if part in (*adds, *FACTORS) else 1.0)
        if part in adds:
            bias[-1] = self.constant if part in ("pass_hidden_proj", "context_proj") else 0.0
        return bias

    def matrix(self, part: str, small: Tensor, shape: Sequence[int]) -> Tensor:
        """Also the embeddings of slots and ranks, whose last dim is the stream."""
        quiet = self.inflation.quiet
        if part.endswith("_embedding"):
            weight = self.beside(small, shape, quiet)
            weight[..., -1] = 0.0
        elif part in READS_DRAFT:
            weight = self.inflation.fill(*shape)
            weight[self.s :] *= quiet
            weight[: self.s, : small.shape[1]] = small
            weight[:, -1] = 0.0  # the draft's own constant, which its last norm lifts
            weight[-1] = 0.0
        elif part == "factor_input_proj":
            weight = self.inflation.fill(*shape)
            weight.unflatten(1, (3, self.S))[: self.s, :, : self.s] = small.unflatten(1, (3, self.s))
        elif part in (*WRITES, *FACTORS):
            weight = self.beside(small, shape, quiet)
            if part in WRITES:
                weight[-1] = 0.0
        else:
            weight = self.beside(small, shape, 1.0)
        return weight

    def attention(self, part: str, kind: str, small: Tensor, shape: Sequence[int]) -> Tensor:
        """Heads get added dims behind their own ones: q and v ordinary there, k and what out_proj reads quiet. Scores
        are divided by the root of more dims, so q grows by as much."""
        heads, quiet, d = self.num_heads, self.inflation.quiet, self.s // self.num_heads
        weight = self.inflation.fill(*shape)
        if part == "attn.out_proj":
            if kind == "bias":
                return self.bias(part, small, shape)
            weight *= quiet
            weight.unflatten(1, (heads, -1))[: self.s, :, :d] = small.unflatten(1, (heads, d))
            weight[-1] = 0.0
            return weight
        parts, own = weight.unflatten(0, (3, heads, -1)), small.unflatten(0, (3, heads, d)).clone()
        own[0] *= sqrt(self.S / self.s)
        parts[1] *= quiet
        if small.ndim > 1:
            parts[:, :, :d, : self.s] = own
        else:
            parts[:, :, :d] = own
        return weight

    def beside(self, small: Tensor, shape: Sequence[int], factor: float) -> Tensor:
        """Small values first in all dims, beside random ones times `factor`."""
        weight = self.inflation.fill(*shape, factor=factor)
        weight[tuple(slice(size) for size in small.shape)] = small
        return weight
