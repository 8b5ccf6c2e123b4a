"""The slots of a batch's blocks that have a loss, as losses over the vocabulary and those of heads read them.

Letters: C rows of a batch, N blocks that propose K tokens, M slots with a loss, B blocks whose K tokens are all known,
k candidates of a slot, H hidden size of the draft, Ht of the target.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from slipstream.models.drafts.dflash import DFlash
from slipstream.models.targets.frozen import FrozenTarget
from slipstream.train.blocks import BlockAttention
from slipstream.train.losses import TargetHead, gathered_logits


class Networks(NamedTuple):
    """The networks that slots are read with."""

    draft: DFlash
    target: FrozenTarget
    head: TargetHead


class Read(NamedTuple):
    """Inputs of the blocks from a batch of C rows, on the device."""

    tokens: Tensor  # (C,)
    attention: BlockAttention  # holds the context of every row
    context: Tensor  # (C, H)
    final: Tensor  # (C, Ht) the target's states after its final norm


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a batch's blocks that propose a token, M of them with a loss: they count, and the draft's vocabulary
    has their token. A confidence head also learns from those whose token is missing: they are among the M, too."""

    states: Tensor  # (M, H) the draft's
    labels: Tensor  # (M,) rows of the head, 0 where the token is missing
    previous: Tensor  # (M,) target ids of the tokens before
    taught_by: Tensor  # (M,) rows of the batch whose final state says the target's distribution
    places: Tensor  # (M,) int64 among all N * K
    is_known: Tensor  # (N, K) bool: which have a token of the draft's vocabulary
    counts: Tensor  # (N, K) bool
    stands_for: Tensor  # (N, 1) fp32 how many possible anchors a block represents; (N, K) times its tokens' weights
    decay: Tensor  # (K,) fp32 weights that fall with the distance, together 1
    whole_blocks: Tensor  # (B,) blocks whose K tokens are all known
    hidden: Tensor  # (N, K, H) states of all slots that propose
    anchors: Tensor  # (N,) rows of the batch
    read: Read
    networks: Networks

    def spread(self, values: Tensor) -> Tensor:
        """values (M,) -> (N, K), 0 at all other slots."""
        return values.new_zeros(self.is_known.numel()).index_copy(0, self.places, values).view(self.is_known.shape)

    def gather(self, values: Tensor) -> Tensor:
        """values (N, K) -> (M,)."""
        return values.flatten()[self.places]

    @property
    def weights_by_distance(self) -> Tensor:
        """(N, K) of slots that count."""
        return self.decay * self.counts * self.stands_for

    def context(self, blocks: Tensor) -> Tensor:
        """(B, H) of the last row before each of `blocks` (B,). An anchor is never a document's first token."""
        return self.read.context[self.anchors[blocks] - 1]

    def logits(self, rows: Tensor, slots: Tensor | None = None) -> Tensor:
        """The draft's own logits (M, k) of `rows` (M, k) of the head; of `slots` only, numbers among the M."""
        states = self.states if slots is None else self.states[slots]
        return self.networks.draft.unary(gathered_logits(states, self.networks.head.rows, rows))

    def teacher(self, rows: Tensor, slots: Tensor | None = None) -> Tensor:
        """The target's logits of these rows, as above."""
        taught_by = self.taught_by if slots is None else self.taught_by[slots]
        return self.networks.head.teach_candidates(self.read.final[taught_by], rows)

    def normalisers(self) -> Tensor:
        """(M,) fp32 log of the sum of exp of all of the target's logits."""
        return self.networks.head.normalisers(self.read.final[self.taught_by])

    @property
    def scaled_states(self) -> Tensor:
        """(M, H) times the multiplier of the draft's logits."""
        factor = self.networks.draft.config.output_multiplier
        return self.states if factor == 1 else self.states * factor

    def embed(self, rows: Tensor) -> Tensor:
        """The target's embedding of `rows` (...) of the head -> (..., H)."""
        return self.networks.target.embed(self.networks.head.ids[rows])
