"""EAGLE drafter (arXiv 2401.15077): one decoder layer predicts features; the target's head turns them into logits."""

from slipstream.models.drafts.eagle import Eagle
from slipstream.serve.drafters.autoregressive import AutoregressiveDrafter


class Drafter(AutoregressiveDrafter):
    Network = Eagle
