"""DSpark's Markov head: a bias on a slot's logits by the token before it (arXiv 2607.05147, section 3).

It has no loss of its own: those over the vocabulary read the logits with the bias of the text's token before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.speculation.lattice import Factors
from slipstream.models.drafts.heads.base import FactoredHead, Head
from slipstream.models.drafts.heads.config import BlockSizes, HeadConfig, check_rank
from slipstream.models.layers.linear import Embedding, Linear, derive

MarkovType = Literal["vanilla", "gated"]
NUM_CANDIDATES = 64  # of a slot, where it is read through a lattice


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovConfig(HeadConfig):
    option = "markov_rank"
    field = "markov_rank"
    joins = True
    architecture = "DSparkDraftModel"
    projector = "dspark"
    aliases = {"dspark_markov_rank": "markov_rank"}
    top_fields = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")

    markov_rank: int
    markov_head_type: MarkovType = "vanilla"

    @property
    def num_candidates(self) -> int:
        return NUM_CANDIDATES

    def check(self, sizes: BlockSizes) -> None:
        check_rank("markov_rank", self.markov_rank)
        if self.markov_head_type not in get_args(MarkovType):
            raise ValueError(f"markov_head_type is {self.markov_head_type!r}; supported: vanilla and gated")

    @classmethod
    def refuse(cls, values: Mapping[str, Any]) -> None:
        if values.get("markov_rank") and str(values.get("markov_head_type")).lower() == "rnn":
            raise ValueError("draft config: DSpark's recurrent Markov head (markov_head_type 'rnn') is not supported")


class MarkovHead(FactoredHead):
    """Adds to a slot's logits, by the token x before it:

        vanilla  W2 W1[x]
        gated    W2 (sigmoid(G [h ; W1[x]] + g) * W1[x]),  h the slot's state

    x is a target id, since any token may be the anchor.
    """

    Config = MarkovConfig
    name = "markov_head"
    modelopt_names = {f"{name}.": f"markov_head.{name}." for name in ("markov_w1", "markov_w2", "gate_proj")}
    by_token = ("markov_w2.weight",)

    def __init__(self, config: MarkovConfig, sizes: BlockSizes, heads: Sequence[Head]) -> None:
        super().__init__(config, sizes, heads)
        self.rank = rank = config.markov_rank
        self.markov_w1 = Embedding(sizes.vocab_size, rank)
        self.markov_w2 = Linear(rank, sizes.num_tokens)
        is_gated = config.markov_head_type == "gated"
        self.gate_proj = Linear(sizes.hidden_size + rank, rank, bias=True) if is_gated else None
        nn.init.normal_(self.markov_w1.get_parameter("weight"))
        nn.init.zeros_(self.successors)

    def embed(self, previous: Tensor) -> Tensor:
        return self.markov_w1(previous)

    def features(self, hidden: Tensor, previous: Tensor) -> Tensor:
        embedded = self.embed(previous)
        if self.gate_proj is None:
            return embedded
        wide = hidden.expand(*previous.shape, -1).to(embedded.dtype)
        return torch.sigmoid(self.gate_proj(torch.cat((wide, embedded), dim=-1))) * embedded

    def bias(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        return self.features(hidden, previous), self.successors

    def factors(self) -> Factors:
        """A gate's share of the token before is computed for all tokens."""
        gates = None
        if (gate := self.gate_proj) is not None:
            gates = derive(self, lambda: linear(self.markov_w1.weight, gate.weight[:, -self.rank :]))
        return Factors(self.markov_w1.weight, self.markov_w2.weight, gates)

    def slots(self, hidden: Tensor) -> Tensor | None:
        if self.gate_proj is None:
            return None
        return linear(hidden, self.gate_proj.weight[:, : hidden.shape[-1]], self.gate_proj.bias)
