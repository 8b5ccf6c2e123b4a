"""Options of train/eagle.py. Imports nothing that takes long, so that wrong ones are refused at once."""

from dataclasses import dataclass, field

from slipstream.train.draft_options import ChainDraftOptions, DraftRunOptions


@dataclass(frozen=True, kw_only=True)
class DraftOptions(ChainDraftOptions):
    """Network and loss of the draft."""

    bias: bool = True
    """whether fc has a bias: EAGLE's drafts have one, except those for Llama 3"""
    ttt_steps: int = 1
    """steps of training-time test; 1 is EAGLE, more also teach the draft to read its own features"""


@dataclass(frozen=True, kw_only=True)
class EagleOptions(DraftRunOptions):
    """Trains an EAGLE draft for a target."""

    DRAFTER = "eagle"

    draft: DraftOptions = field(default_factory=DraftOptions)
