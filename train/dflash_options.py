"""Options of train/dflash.py. Imports nothing that takes long, so that wrong ones are refused at once."""

from dataclasses import dataclass, field
from typing import Literal

from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.train.draft_options import BaseDraftOptions, DraftRunOptions
from slipstream.train.options import EvaluationOptions


@dataclass(frozen=True, kw_only=True)
class DraftOptions(BaseDraftOptions):
    """Network and loss of the draft."""

    aux_layers: tuple[int, ...] | None = None
    """target states that the draft reads: 0..n-1 is a layer's output, n after the final norm; default: by depth"""
    num_layers: int = 5
    """layers of the draft"""
    block_size: int = 16
    """tokens of a block, the last emitted one included; it drafts one fewer, with sample_from_anchor as many"""
    sample_from_anchor: bool = False
    """a slot predicts the token after its place, the last emitted token's slot too, as in DSpark"""
    sliding_window: int | None = None
    """positions that the layers see, their own included, and all slots of the block, as in DFlash 2; default: all"""
    conv: bool = False
    """convolutions of two taps along the block, around attention and MLP of every layer, as in DFlash 2"""
    selector_rank: int = 0
    """rank of DFlash 2's selector among a slot's 16 candidates, such as 256; 0: none"""
    markov_rank: int = 0
    """rank of DSpark's Markov head, such as 256; 0: none"""
    lilicorr: LiLiCorrConfig | None = None
    """sizes of LiLiCorr's scorer of candidates, such as {candidate_topk: 8}; default: none"""
    confidence_head: bool = False
    """a head that says how likely each proposal is to be accepted; calibrated at every evaluation"""
    mask_token_id: int | None = None
    """token of the slots to fill; default: the tokenizer's mask token, an unused embedding, or pad, eos, unk"""
    anchors: int = 512
    """most blocks drawn from a packed row in a step"""
    loss: Literal["dpace", "decay"] = "dpace"
    """weight of a slot: by what it would add to the accept length (dpace), or by its place (decay)"""

    @property
    def reach(self) -> int:
        return self.block_size

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchors < 1 or self.num_layers < 1:
            raise ValueError(f"draft.anchors is {self.anchors} and draft.num_layers {self.num_layers}; give at least 1")


@dataclass(frozen=True, kw_only=True)
class BlockEvaluationOptions(EvaluationOptions):
    """Evaluation on held-out documents."""

    depth: int = 63


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(DraftRunOptions):
    """Trains a DFLASH block draft for a target."""

    DRAFTER = "dflash"

    draft: DraftOptions = field(default_factory=DraftOptions)
    evaluation: BlockEvaluationOptions = field(default_factory=BlockEvaluationOptions)
