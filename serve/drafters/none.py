"""No speculation: every proposal is its root alone. The honest baseline of the same engine."""

from typing import Any

from slipstream.models.target import Target
from slipstream.serve.batch import Batch, Proposal
from slipstream.serve.drafters import base


class Drafter(base.Drafter):
    @classmethod
    def load(cls, draft: str, options: Any, target: Target) -> "Drafter":
        return cls()

    def propose(self, batch: Batch, width: int) -> Proposal:
        assert batch.roots is not None
        return Proposal(batch.roots[:, None].int(), base.chain_parents(len(batch.roots), width, batch.roots.device))
