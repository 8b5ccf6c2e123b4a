"""EAGLE3 drafter (arXiv 2503.01840): one decoder layer or more over the target's aux hidden states, its own head."""

from dataclasses import dataclass

from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.serve.drafters.autoregressive import AutoregressiveDrafter, TreeOptions


@dataclass(frozen=True, slots=True)
class Eagle3Options(TreeOptions):
    token_map: str | None = None
    """Refused: EAGLE3 drafts have their own vocabulary and head."""
    aux_layers: tuple[int, ...] | None = None
    """Target states that the draft reads, as layer outputs, e.g. [1, 3, 5]; for files that do not name them."""
    norm_output: bool | None = None
    """Whether the draft's next step reads the state after the final norm; for files that may mean another thing."""

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        if self.token_map is not None:
            raise ValueError(
                f"drafter.token_map is {self.token_map}; an EAGLE3 draft has its own vocabulary (d2t) and head: "
                "train it with --draft.vocabulary instead"
            )


class Drafter(AutoregressiveDrafter):
    Options = Eagle3Options
    Network = Eagle3
