"""The heads that block drafts may have, in the order in which a draft holds them."""

from slipstream.models.drafts.heads.base import Head
from slipstream.models.drafts.heads.confidence import ConfidenceHead
from slipstream.models.drafts.heads.config import HeadConfig
from slipstream.models.drafts.heads.lilicorr import LiLiCorr
from slipstream.models.drafts.heads.markov import MarkovHead
from slipstream.models.drafts.heads.selector import CandidateSelector
from slipstream.models.files.checkpoint import Values

HEADS: tuple[type[Head], ...] = (CandidateSelector, MarkovHead, LiLiCorr, ConfidenceHead)
CONFIGS: tuple[type[HeadConfig], ...] = tuple(head.Config for head in HEADS)


def heads_of(options: Values) -> tuple[HeadConfig, ...]:
    """The heads that options of training ask for."""
    return tuple(config for kind in CONFIGS if (config := kind.from_options(options)) is not None)


def heads_from_json(values: Values) -> tuple[HeadConfig, ...]:
    """The heads of a draft, by its dflash_config."""
    return tuple(config for kind in CONFIGS if (config := kind.from_json(values)) is not None)


def head_of(config: HeadConfig) -> type[Head]:
    return next(head for head in HEADS if head.Config is type(config))
