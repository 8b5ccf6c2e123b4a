"""EAGLE3 drafter (arXiv 2503.01840): one decoder layer or more over the target's aux hidden states, its own head."""

from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.serve.drafters.autoregressive import AutoregressiveDrafter


class Drafter(AutoregressiveDrafter):
    Network = Eagle3
