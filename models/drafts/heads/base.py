"""A head of a block draft, as the network, training and serving see it.

A head is a file of this folder, with its config, scores and losses, and a line of table.py. Its module is called as in
public files, so that a state dict is the file. Heads that join the slots of a block score each slot's candidates after
those of the slot before; a chain is a walk over these scores, a tree grows by them.

At T > 0 scores contain the request's noise (kernels/sampling/sample.py): the best of score + T * gumbel is a sample
from softmax(score / T). Candidates are the best tokens of a slot *with* the noise, so the chain is what sampling from
the whole vocabulary gives, unless a head lifts a token that is no candidate. DFlash 2 samples among the best tokens
without noise; that leaves out what only the noise makes the best, which the target, with the same noise, may well have
sampled.

Letters: B blocks, K slots that draft, k candidates of a slot, H hidden, r rank, V target and Vd draft vocabulary; M
slots with a loss, N blocks of a batch; ...: any leading dims.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.kernels.speculation.lattice import Factors, transition_scores
from slipstream.models.drafts.heads.config import BlockSizes, HeadConfig


class Block(NamedTuple):
    """The slots that draft."""

    roots: Tensor  # (B,) int64 target ids, which the blocks begin with
    hidden: Tensor  # (B, K, H) final states
    context: Tensor | None = None  # (B, H) of the last row before each block, for heads with `reads_context`
    embed: Callable[[Tensor], Tensor] | None = None  # the target's embedding of ids (...) -> (..., H)
    noise: Callable[["Candidates"], Tensor] | None = None  # (B, K, k) fp32, for heads without `is_noisy`; None: T = 0


class Candidates(NamedTuple):
    values: Tensor  # (B, K, k) logits or log-probabilities of a slot alone, best first
    columns: Tensor  # (B, K, k) int64 of the draft's logits
    tokens: Tensor  # (B, K, k) int64 target ids


class TrainedSlots(Protocol):
    """The slots of a batch that have a loss (train/block_slots.py)."""

    states: Tensor  # (M, H) the draft's
    labels: Tensor  # (M,) rows of the head, 0 where the token is missing
    previous: Tensor  # (M,) target ids of the tokens before
    places: Tensor  # (M,) int64 among all N * K
    is_known: Tensor  # (N, K) bool: which have a token of the draft's vocabulary
    whole_blocks: Tensor  # (B,) blocks whose K tokens are all known
    hidden: Tensor  # (N, K, H) states of all slots that propose

    @property
    def weights_by_distance(self) -> Tensor:
        """(N, K) of all slots that count, whether their token is known or not."""

    def gather(self, values: Tensor) -> Tensor:
        """values (N, K) -> (M,)."""

    def context(self, blocks: Tensor) -> Tensor:
        """(B, H) of the last row before each of `blocks` (B,)."""

    def logits(self, rows: Tensor, slots: Tensor | None = None) -> Tensor:
        """The draft's own logits (M, k) of `rows` (M, k) of the head; of `slots` only, numbers among the M."""

    def teacher(self, rows: Tensor, slots: Tensor | None = None) -> Tensor:
        """The target's logits of these rows, as above."""

    def normalisers(self) -> Tensor:
        """(M,) fp32 log of the sum of exp of all of the target's logits."""

    def embed(self, rows: Tensor) -> Tensor:
        """The target's embedding of `rows` (...) of the head -> (..., H)."""


class TokenLosses(NamedTuple):
    """Losses of the M slots over the vocabulary."""

    total: Tensor  # weighted, summed
    entropies: Tensor  # (M,) with a gradient where there are `candidates`
    overlaps: Tensor | None  # (M,) sum min(p, q) by which the target accepts what the draft samples, if computed
    best: Tensor  # (M,) rows of the head
    candidates: Tensor | None  # (M, k) rows of the head, best first
    weights: Tensor  # (N, K)


class HeadLosses(NamedTuple):
    losses: dict[str, tuple[Tensor, Tensor]]  # by name: of slots, and the slots' weights
    overlaps: Tensor | None = None  # (M,) of what the head samples, in place of the vocabulary's


class Head(nn.Module, ABC):
    """A part of a block draft besides its layers; subclasses override what the base leaves neutral."""

    Config: ClassVar[type[HeadConfig]]
    name: ClassVar[str]
    """The name of its module in the network and in files."""
    modelopt_names: ClassVar[Mapping[str, str]] = {}
    """How its tensors begin in ModelOpt's files -> how they begin in ours."""
    by_token: ClassVar[tuple[str, ...]] = ()
    """Parameters with a row for each of the draft's tokens."""
    is_identity: ClassVar[bool] = True
    """Whether a draft that gets the head drafts what it did before."""
    is_taught: ClassVar[bool] = False
    """Whether its losses read the target's distribution."""
    loss_weights: ClassVar[Mapping[str, float]] = {}
    """Weights of all losses in drafts with the head (docs/dflash.md)."""

    def __init__(self, config: Any, sizes: BlockSizes, heads: Sequence["Head"]) -> None:
        """`heads`: those before it in the table, which it may read."""
        super().__init__()

    def keep(self, ids: Tensor) -> None:
        """Drops all tokens of the draft but ids (Vd,), in this order."""
        for name in self.by_token:
            module, _, parameter = name.rpartition(".")
            rows = self.get_parameter(name)[ids]
            setattr(self.get_submodule(module), parameter, nn.Parameter(rows, requires_grad=False))

    def prepare(self) -> None:
        """Derives what serving reads from the weights; once, after these are loaded and cut."""

    def adopt(self, config: Any) -> None:
        """Takes the config of weights that are loaded in place of its own; only its calibration may be another."""

    def loss(self, slots: TrainedSlots, tokens: TokenLosses, weights: Mapping[str, float]) -> HeadLosses:
        """Computes its losses; `weights` of all losses, by name."""
        return HeadLosses({})


class JoiningHead(Head):
    """A head that scores candidates by those of the slot before."""

    is_noisy: ClassVar[bool] = True
    """Whether candidates are found with the request's noise; else it adds the noise to their scores."""
    reads_context: ClassVar[bool] = False
    trains_candidates: ClassVar[bool] = False
    """Whether its losses score candidates; else it adds a bias to all logits."""
    overlaps: ClassVar[bool] = True
    """Whether it says by how much its choices overlap with the target's, which a confidence head learns."""

    def bias(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor] | None:
        """Factors of its bias on all logits, (..., r) and (Vd, r), after target ids (...) at states (..., H)."""
        return None

    @abstractmethod
    def scores(self, block: Block, candidates: Candidates) -> Tensor:
        """Scores (B, K, k, k), logits, of candidate j of a slot after candidate i of the slot before, or after the
        root; by kernels once it is prepared."""


def joined_scores(head: JoiningHead | None, block: Block, candidates: Candidates) -> Tensor:
    """Scores candidates (B, K, k, k) by the head that joins their slots; without one, each by its slot alone."""
    values = candidates.values
    return values[:, :, None].expand(-1, -1, values.shape[2], -1) if head is None else head.scores(block, candidates)


class FactoredHead(JoiningHead):
    """A head whose score of a pair of tokens is a product of low rank."""

    served_factors: Factors | None = None  # once it is prepared

    @abstractmethod
    def features(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Computes the factors (..., p, r) of target ids (..., p) at states (..., p, H) or (..., 1, H)."""

    @property
    def successors(self) -> Tensor:
        """(Vd, r) factors of the draft's tokens."""
        return self.get_parameter(self.by_token[0])

    @abstractmethod
    def factors(self) -> Factors:
        """Gives kernels what scores pairs of tokens, with `slots`."""

    @abstractmethod
    def slots(self, hidden: Tensor) -> Tensor | None:
        """hidden (..., H) -> the share of a slot's state in its factors (..., r)."""

    def prepare(self) -> None:
        self.served_factors = self.factors()

    def forward(self, hidden: Tensor, unary: Tensor, previous: Tensor, successors: Tensor) -> Tensor:
        """hidden (..., H), unary (..., k) logits of the successors (..., k), draft ids; previous (..., p) target ids ->
        scores (..., p, k)."""
        rows = F.embedding(successors, self.successors)  # (..., k, r)
        return unary.unsqueeze(-2) + self.features(hidden.unsqueeze(-2), previous).to(rows.dtype) @ rows.mT

    def scores(self, block: Block, candidates: Candidates) -> Tensor:
        if self.served_factors is not None:
            return transition_scores(*candidates, block.roots, self.served_factors, self.slots(block.hidden))
        roots = block.roots[:, None, None].expand_as(candidates.tokens[:, :1])
        previous = torch.cat((roots, candidates.tokens[:, :-1]), dim=1)
        return self(block.hidden, candidates.values, previous, candidates.columns)
