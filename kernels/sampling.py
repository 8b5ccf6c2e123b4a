"""Sampling as a function of (key, position, distribution): argmax(mask(logits) + T * gumbel(key, position, id)).

The noise comes from a counter-based hash, one number per target token id, so target and drafter draw the same noise
without sharing any state (drafter-invariant coupling: Daliri, Musco, Suresh 2024). At T = 0 the formula is greedy.
Letters: R rows of logits, V their vocabulary.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of R rows. `temperature` None means every row is greedy; `filters` None that no row filters."""

    keys: Tensor  # (R,) int64 from noise_key
    temperature: Tensor | None  # (R,) fp32
    filters: "Filters | None"

    def repeat(self, times: int) -> "Sampling":
        """Each row `times` times in a row: the parameters of B requests for their B x N nodes."""
        if self.temperature is None:
            return self
        filters = self.filters and self.filters.repeat(times)
        return Sampling(self.keys.repeat_interleave(times), self.temperature.repeat_interleave(times), filters)


@dataclass(frozen=True, slots=True)
class Filters:
    top_k: Tensor  # (R,) int64, 0 = off
    top_p: Tensor  # (R,) fp32, 1 = off
    min_p: Tensor  # (R,) fp32, 0 = off

    def repeat(self, times: int) -> "Filters":
        return Filters(*(x.repeat_interleave(times) for x in (self.top_k, self.top_p, self.min_p)))


def noise_key(seed: int, choice: int) -> int:
    """The key of one choice of one request. Hashed, so that choice 1 of seed 0 is not choice 0 of seed 1."""
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # fits int64


def gumbel(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise (R, V) fp32 for keys (R,), positions (R,) of the sampled token, and target ids (V,)."""
    low, high = keys & MASK32, keys >> 32
    row = _mix(_mix(low ^ (positions.long() * 0x9E3779B1 & MASK32)) ^ high)  # (R,)
    bits = _mix(_mix(row[:, None] ^ (ids.long() * 0x85EBCA77 & MASK32)) + row[:, None])  # (R, V) in [0, 2^32)
    # 1 - u, not u: small values keep their relative precision in fp32, so the upper tail reaches ln(2^33) = 22.9.
    complement = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return complement.neg_().log1p_().neg_().log_().neg_()


def filter_logits(scaled: Tensor, filters: Filters) -> Tensor:
    """Sets to -inf what top-k, then top-p, then min-p cut from `scaled` (R, V) = logits / T; ties with the last kept
    token stay."""
    ordered = scaled.sort(dim=-1, descending=True).values
    ranks = torch.arange(scaled.shape[-1], device=scaled.device)
    keep = (filters.top_k[:, None] == 0) | (ranks < filters.top_k[:, None])
    probs = ordered.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # in fp32 it passes 1 ahead of the end
    keep &= (before < filters.top_p[:, None]) | (filters.top_p[:, None] == 1)  # the token that crosses top_p stays
    keep &= probs >= filters.min_p[:, None] * probs[:, :1]
    threshold = ordered.gather(1, keep.sum(dim=-1, keepdim=True).clamp_(min=1) - 1)
    return scaled.masked_fill(scaled < threshold, -torch.inf)


def sample(logits: Tensor, positions: Tensor, sampling: Sampling, ids: Tensor | None = None) -> Tensor:
    """logits (R, V), positions (R,) of the token to sample -> index (R,) int64 into V; ties go to the lowest index.

    `ids` (V,): the target id of each column, for a draft with a reduced vocabulary (default: the column itself).
    """
    if sampling.temperature is None:
        return logits.argmax(dim=-1)
    temperature = sampling.temperature[:, None]
    logits = logits.float()
    if sampling.filters is not None:
        scaled = filter_logits(logits / temperature.clamp(min=1e-6), sampling.filters)
        logits = logits.masked_fill(scaled == -torch.inf, -torch.inf)
    if ids is None:
        ids = torch.arange(logits.shape[-1], device=logits.device)
    return (logits + temperature * gumbel(sampling.keys, positions, ids)).argmax(dim=-1)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words with full avalanche (murmur3's finaliser), on int64 lanes."""
    x = x & MASK32
    x = (x ^ (x >> 16)) * 0x85EBCA6B & MASK32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & MASK32
    return x ^ (x >> 16)
