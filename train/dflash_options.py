"""Options of train/dflash.py. Imports nothing that takes long, so that wrong ones are refused at once."""

from dataclasses import dataclass, field, fields
from typing import Literal

from slipstream.models.drafts.heads.config import LiLiCorrConfig, MarkovType
from slipstream.train.draft_options import BaseDraftOptions, DraftRunOptions
from slipstream.train.options import EvaluationOptions


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of a block draft's losses; none given: by its heads (docs/dflash.md). If one is given, others are 0."""

    ce: float | None = None
    """cross-entropy against the text"""
    kl: float | None = None
    """KL divergence from the target's distribution"""
    tv: float | None = None
    """total variation to the target's distribution, the share of samples that it rejects"""
    l1: float | None = None
    """L1 distance to the target's distribution, twice tv, as DSpark weighs it"""
    lk: float | None = None
    """minus the log of the share that the target accepts"""
    lk_lambda: float | None = None
    """kl while little is accepted, later tv (LK)"""
    selector_ce: float | None = None
    """cross-entropy of the selector over its candidates, against the text"""
    selector_tv: float | None = None
    """total variation of the selector to the target, both over the candidates"""
    confidence: float | None = None
    """binary cross-entropy of the confidence head"""
    scorer_ce: float | None = None
    """cross-entropy of LiLiCorr over its candidates, against the text"""
    scorer_hinge: float | None = None
    """how far the text's candidate is from beating the others by 2, in LiLiCorr's scores"""
    scorer_regret: float | None = None
    """expected loss of the target's logit by what LiLiCorr chooses"""

    def __post_init__(self) -> None:
        for weight in fields(self):
            value = getattr(self, weight.name)
            if value is not None and value < 0:
                raise ValueError(f"draft.losses.{weight.name} is {value}; give 0 or more")


@dataclass(frozen=True, kw_only=True)
class DraftOptions(BaseDraftOptions):
    aux_layers: tuple[int, ...] | None = None
    """target states that the draft reads: 0..n-1 is a layer's output, n after the final norm; default: by depth"""
    num_layers: int = 5
    """layers of the draft"""
    block_size: int = 16
    """tokens of a block, the last emitted one included: it drafts one fewer, or as many with sample_from_anchor"""
    sample_from_anchor: bool = False
    """a slot predicts the token after its place, the last emitted token's slot too, as in DSpark"""
    sliding_window: int | None = None
    """positions that the windowed layers see, their own included; default: all"""
    windowed_layers: tuple[int, ...] | None = None
    """layers that have the window; default: all if there is one"""
    sliding_window_non_causal: bool = False
    """slots see later ones of their block in these layers, too, as in DFlash 2"""
    conv: bool = False
    """convolutions of two taps along the block, around attention and MLP of every layer, as in DFlash 2"""
    selector_rank: int = 0
    """rank of DFlash 2's candidate selector, such as 256; 0: none"""
    selector_top_k: int = 16
    """candidates of a slot that it scores"""
    markov_rank: int = 0
    """rank of DSpark's Markov head, such as 256; 0: none"""
    markov_head_type: MarkovType = "vanilla"
    """vanilla: its bias depends on the token before; gated: on the slot's state, too"""
    lilicorr: LiLiCorrConfig | None = None
    """sizes of LiLiCorr's scorer of candidates, such as {candidate_topk: 8}; default: none"""
    confidence_head: bool = False
    """a head that says how likely each proposal is to be accepted; calibrated at every evaluation"""
    mask_token_id: int | None = None
    """token of the slots to fill; default: the tokenizer's mask token, an unused embedding, or pad, eos, unk"""
    init_from_target: bool = True
    """start with the target's last layers and final norm, and pass the last aux hidden state through"""
    anchors: int = 512
    """most blocks drawn from a packed row in a step"""
    loss: Literal["dpace", "decay"] = "dpace"
    """weight of a slot: by what it would add to the accepted length (dpace), or by its distance (decay)"""
    losses: LossWeights = field(default_factory=LossWeights)
    gamma: float | None = None
    """slots over which `decay` falls to 1/e; default by block size: 4, 5 and 7 for 8, 10 and 16"""

    @property
    def reach(self) -> int:
        return self.block_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchors < 1 or self.num_layers < 1:
            raise ValueError(f"draft.anchors is {self.anchors} and draft.num_layers {self.num_layers}; give at least 1")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"draft.gamma is {self.gamma}; give a positive number such as 7")
        if self.gamma is not None and self.loss != "decay" and not self.confidence_head:
            raise ValueError(f"draft.gamma is {self.gamma}, which loss {self.loss} does not use; leave it out")


@dataclass(frozen=True, kw_only=True)
class BlockEvaluationOptions(EvaluationOptions):
    depth: int = 63


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(DraftRunOptions):
    """Trains a DFLASH block draft for a target."""

    DRAFTER = "dflash"

    draft: DraftOptions = field(default_factory=DraftOptions)
    evaluation: BlockEvaluationOptions = field(default_factory=BlockEvaluationOptions)
