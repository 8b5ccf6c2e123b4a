"""Names of the losses in cross_entropy.py. Imports no torch, so that options can have this type."""

from typing import Literal

Kind = Literal["soft_ce", "forward_kl", "reverse_kl", "tv", "lk", "lk_lambda"]
