"""Joins the slots of a block when it is served: scores of each slot's candidates after those of the slot before.

Candidates are found and scored with the request's noise as in models/drafts/lattice.py, so a head that adds nothing
changes no draft, whatever the temperature.
Letters: B requests, K slots that draft, k candidates of a slot, H hidden size, R request slots.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.sampling.sample import Sampling
from slipstream.kernels.speculation.lattice import add_noise, transition_scores
from slipstream.models.drafts.block_heads import CandidateSelector, LiLiCorr, MarkovHead
from slipstream.models.layers.linear import Embedding
from slipstream.serve.runner.batch import PassRows


class Block(NamedTuple):
    """The slots that draft."""

    requests: Tensor  # (B,) int64 request slots
    roots: Tensor  # (B,) int64
    hidden: Tensor  # (B, K, H) final states
    positions: Tensor  # (B * K,) int64 of the tokens that they draft
    sampling: Sampling  # with a row for each slot


class Candidates(NamedTuple):
    values: Tensor  # (B, K, k) fp32 log-probabilities among all tokens, best first
    columns: Tensor  # (B, K, k) int64 of the draft's logits
    tokens: Tensor  # (B, K, k) int64 target ids


class Join(ABC):
    is_noisy = True  # whether candidates are found with the request's noise

    @abstractmethod
    def scores(self, block: Block, candidates: Candidates) -> Tensor:
        """(B, K, k, k) of candidate j of a slot after candidate i of the slot before, or after the root."""

    def sampling(self, sampling: Sampling) -> Sampling:
        """Returns the sampling by which candidates are found."""
        return sampling if self.is_noisy else replace(sampling, temperature=None, filters=None)

    def extend(self, rows: PassRows, context: Tensor) -> None:
        """context (C, H): what `fuse` makes of the rows of a target pass."""


class Independent(Join):
    """No head: what a slot says does not depend on the token before it."""

    def scores(self, block: Block, candidates: Candidates) -> Tensor:
        return candidates.values[:, :, None].expand(-1, -1, candidates.values.shape[2], -1)


class Factored(Join):
    """A selector or a Markov head: a product of two low-rank factors."""

    def __init__(self, head: CandidateSelector | MarkovHead) -> None:
        self.head = head
        self.factors = head.factors()

    def scores(self, block: Block, candidates: Candidates) -> Tensor:
        return transition_scores(*candidates, block.roots, self.factors, self.head.slots(block.hidden))


class Correlated(Join):
    """LiLiCorr. Its state: what the draft makes of the target's states at each request's last committed token."""

    is_noisy = False

    def __init__(self, scorer: LiLiCorr, embed: Embedding, contexts: Tensor) -> None:
        """contexts (R, H): its state."""
        self.scorer = scorer
        self.embed = embed
        self.contexts = contexts

    def extend(self, rows: PassRows, context: Tensor) -> None:
        self.contexts[rows.requests] = context[rows.last]

    def scores(self, block: Block, candidates: Candidates) -> Tensor:
        k = candidates.tokens.shape[2]
        tokens = candidates.tokens
        start, edges = self.scorer(self.embed(tokens), candidates.values, block.hidden, self.contexts[block.requests])
        scores = torch.cat((start[:, None, None].expand(-1, -1, k, -1), edges), dim=1)
        if block.sampling.temperature is None:
            return scores
        noise = torch.zeros_like(candidates.values).flatten(0, 1)
        noise = add_noise(noise, tokens.flatten(0, 1), block.positions, block.sampling)
        return scores + noise.view_as(candidates.values)[:, :, None]
