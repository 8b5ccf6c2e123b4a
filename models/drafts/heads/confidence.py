"""DSpark's confidence head: how probably a slot's token is accepted if those before it are (arXiv 2607.05147, section
3). A tree grows, and a step's nodes are chosen, by what it says.

Its loss `confidence` is the binary cross-entropy against the overlap sum min(p, q), by which the target accepts what
the draft samples, after the text's tokens. Evaluations calibrate it (train/calibration.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.speculation.lattice import Confidence
from slipstream.models.drafts.heads.base import Head, HeadLosses, TokenLosses, TrainedSlots
from slipstream.models.drafts.heads.config import BlockSizes, HeadConfig
from slipstream.models.drafts.heads.markov import MarkovHead
from slipstream.models.files.checkpoint import Values
from slipstream.models.layers.linear import Linear, derive


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceConfig(HeadConfig):
    """A slot's probability is sigmoid(logit / temperature + bias)."""

    option = "confidence_head"
    field = "enable_confidence_head"
    architecture = "DSparkDraftModel"
    projector = "dspark"
    aliases = {"use_confidence_head": "enable_confidence_head"}
    foreign = ("confidence_head_alpha",)

    confidence_temperatures: tuple[float, ...] = ()  # of each slot; none: 1
    confidence_biases: tuple[float, ...] = ()  # of each slot; none: 0

    @property
    def uncalibrated(self) -> Self:
        return replace(self, confidence_temperatures=(), confidence_biases=())

    def check(self, sizes: BlockSizes) -> None:
        count = sizes.num_proposals
        temperatures = self.confidence_temperatures
        biases = self.confidence_biases
        if temperatures and (len(temperatures) != count or min(temperatures) <= 0):
            raise ValueError(f"confidence_temperatures is {list(temperatures)}; give {count} positive numbers, or none")
        if biases and len(biases) != count:
            raise ValueError(f"confidence_biases is {list(biases)}; give {count} numbers, or none")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return cls.field, "confidence_head_with_markov", "confidence_temperatures", "confidence_biases"

    def to_options(self) -> dict[str, Any]:
        return {self.option: True}

    @classmethod
    def _read(cls, values: Values) -> Self:
        return cls(
            confidence_temperatures=tuple(values.get("confidence_temperatures") or ()),
            confidence_biases=tuple(values.get("confidence_biases") or ()),
        )

    def to_json(self, values: Values) -> dict[str, Any]:
        flags = {self.field: True, "confidence_head_with_markov": bool(values.get("markov_rank"))}
        return flags | {name: list(numbers) for name, numbers in self._write().items() if numbers}

    @classmethod
    def refuse(cls, values: Values) -> None:
        reads_markov = values.get("confidence_head_with_markov")
        if values.get(cls.field) and reads_markov is not None and bool(reads_markov) != bool(values.get("markov_rank")):
            raise ValueError(
                f"draft config: confidence_head_with_markov is {reads_markov} and markov_rank "
                f"{values.get('markov_rank', 0)}; a confidence head here reads the Markov embedding wherever there is "
                "one"
            )


class ConfidenceHead(Head):
    """The logit of the probability: w [h ; W1[x]] + b, with W1 of the Markov head and x the token before, or w h + b
    without one."""

    Config = ConfidenceConfig
    name = "confidence_head"
    modelopt_names = {"confidence_proj.": "confidence_head.proj."}
    is_taught = True
    loss_weights = {"confidence": 0.1}

    def __init__(self, config: ConfidenceConfig, sizes: BlockSizes, heads: Sequence[Head]) -> None:
        super().__init__(config, sizes, heads)
        markov = next((head for head in heads if isinstance(head, MarkovHead)), None)
        self.embed = None if markov is None else markov.embed
        self.rank = 0 if markov is None else markov.rank
        self.num_tokens = sizes.vocab_size
        self.num_slots = sizes.num_proposals
        self.config = config
        self.proj = Linear(sizes.hidden_size + self.rank, 1, bias=True)

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden (..., H), target ids (...) of the tokens before -> logits (...)."""
        x = hidden if self.embed is None else torch.cat((hidden, self.embed(previous).to(hidden.dtype)), dim=-1)
        return self.proj(x).squeeze(-1)

    @property
    def calibration(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Temperatures and biases of the slots."""
        config = self.config
        count = self.num_slots
        return config.confidence_temperatures or (1.0,) * count, config.confidence_biases or (0.0,) * count

    def adopt(self, config: ConfidenceConfig) -> None:
        self.config = config

    def prepare(self) -> None:
        """Computes the share of the token before for all tokens."""
        device = self.proj.weight.device
        self.temperatures = derive(self, lambda: torch.tensor(self.calibration[0], device=device))
        # of the logits before they are divided
        self.logit_biases = derive(self, lambda: torch.tensor(self.calibration[1], device=device) * self.temperatures)
        self.token_logits = None if self.embed is None else derive(self, self._token_logits)

    def _token_logits(self) -> Tensor:
        """(V,) fp32."""
        weight = self.proj.weight
        assert self.embed is not None
        rows = self.embed(torch.arange(self.num_tokens, device=weight.device))
        return linear(rows, weight[:, -self.rank :]).squeeze(-1).float()

    def confidence(self, hidden: Tensor) -> Confidence:
        """Gives kernels the probabilities of slots with states (B, K, H)."""
        logits = linear(hidden, self.proj.weight[:, : hidden.shape[-1]], self.proj.bias).squeeze(-1)
        return Confidence(logits.float() + self.logit_biases[: hidden.shape[1]], self.temperatures, self.token_logits)

    def loss(self, slots: TrainedSlots, tokens: TokenLosses, weights: Mapping[str, float]) -> HeadLosses:
        """A slot whose token the draft cannot propose fails."""
        assert tokens.overlaps is not None
        logits = self(slots.states, slots.previous).float()
        targets = torch.where(slots.gather(slots.is_known), tokens.overlaps.detach(), 0.0)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return HeadLosses({"confidence": (losses, slots.gather(slots.weights_by_distance))})
