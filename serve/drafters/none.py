"""No speculation: every proposal is its root alone. The baseline, in the same engine."""

from typing import Any

from slipstream.models.drafts.source import DraftSource
from slipstream.models.targets.decoder import Target
from slipstream.serve.drafters import base


class Drafter(base.Drafter):
    @classmethod
    def load(cls, source: DraftSource, options: Any, target: Target) -> "Drafter":
        return cls()
