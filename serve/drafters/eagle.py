"""EAGLE drafter (arXiv 2401.15077): one decoder layer predicts features; the target's head turns them into logits."""

from dataclasses import dataclass

from slipstream.models.drafts.eagle import Eagle
from slipstream.serve.drafters.autoregressive import AutoregressiveDrafter, TreeOptions
from slipstream.serve.drafters.vocabulary import TokenMapOptions


@dataclass(frozen=True, slots=True)
class EagleOptions(TokenMapOptions, TreeOptions):
    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        TokenMapOptions.__post_init__(self)


class Drafter(AutoregressiveDrafter):
    Options = EagleOptions
    Network = Eagle
