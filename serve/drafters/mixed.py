"""A draft network with n-gram lookahead before it: `--draft ckpt/ --drafter.ngram-first 5`.

In every round and for each request: where at least `ngram_first` last tokens have occurred before, the target verifies
what followed them; elsewhere it verifies the network's proposal, which is always made. Rounds wait for the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from slipstream.models.targets.decoder import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.drafters import base
from slipstream.serve.drafters.ngram import drafter as ngram
from slipstream.serve.engine.plan import HostProposal
from slipstream.serve.request import Request
from slipstream.serve.runner.batch import Batch, PassRows, Proposal, VerifyResult
from slipstream.serve.runner.request_state import RequestState


@dataclass(frozen=True)  # without slots: it is a second base of others
class MixedOptions:
    """Options that every draft network has besides its own."""

    ngram_first: int = 0
    """Verify n-gram lookahead where at least so many last tokens have occurred before; 0: never."""
    ngram_nodes: int = 16
    """Most nodes of an n-gram proposal, root included."""
    ngram_capacity: int = 1_000_000
    """Nodes kept of all texts."""

    def __post_init__(self) -> None:
        if not 0 <= self.ngram_first <= ngram.NgramOptions().max_match:
            raise ValueError(
                f"drafter.ngram_first is {self.ngram_first}; it must be between 0 (never) and "
                f"{ngram.NgramOptions().max_match}"
            )
        if self.ngram_first:
            self.ngram_options()

    def ngram_options(self) -> ngram.NgramOptions:
        """Raises ValueError for a value out of range, with the name that it has here."""
        try:
            return ngram.NgramOptions(nodes=self.ngram_nodes, capacity=self.ngram_capacity)
        except ValueError as error:
            raise ValueError(str(error).replace("drafter.", "drafter.ngram_", 1)) from error


def options_class(own: type) -> type:
    """The options of a network's drafter together with MixedOptions."""

    def check(self: Any) -> None:
        MixedOptions.__post_init__(self)
        if hasattr(own, "__post_init__"):
            own.__post_init__(self)

    return make_dataclass(own.__name__, [], bases=(MixedOptions, own), namespace={"__post_init__": check}, frozen=True)


class Drafter(base.Drafter):
    branches = True
    on_host = True

    def __init__(self, network: base.Drafter, options: MixedOptions, vocab_size: int) -> None:
        self.network, self.ngram = network, ngram.Drafter(options.ngram_options(), vocab_size)
        self.first = options.ngram_first
        self.aux_layers, self.kv, self.lookahead = network.aux_layers, network.kv, network.lookahead
        self.longest_context = network.longest_context
        self.widths = tuple(sorted({*network.widths, *self.ngram.widths}))

    @property
    def device_width(self) -> int:
        return self.network.device_width

    @classmethod
    def load(cls, draft: str, options: Any, target: Target) -> "Drafter":
        raise ValueError("draft is 'mixed'; name a draft checkpoint and add --drafter.ngram-first 5")

    def scratch(self, width: int) -> int:
        return self.network.scratch(min(width, self.device_width))

    def attach(self, target: Target, state: RequestState, attention: Backend | None) -> None:
        self.network.attach(target, state, attention)
        self.ngram.attach(target, state, None)

    def check(self, request: Request) -> None:
        self.network.check(request)

    def admit(self, slot: int, tokens: list[int], namespace: str) -> None:
        self.network.admit(slot, tokens, namespace)
        self.ngram.admit(slot, tokens, namespace)

    def propose(self, batch: Batch, width: int) -> Proposal:
        own = min(width, self.device_width)
        proposal = self.network.propose(batch, own)
        if own == width:
            return proposal
        unused = (0, width - own)
        tokens, parents = pad(proposal.tokens, unused, value=-1), pad(proposal.parents, unused, value=-1)
        return Proposal(tokens, parents, pad(proposal.scores, unused, value=-torch.inf))

    def extend(self, rows: PassRows, aux_states: Tensor, result: VerifyResult | None) -> None:
        self.network.extend(rows, aux_states, result)

    def draft(self, slots: Sequence[int], emitted: NDArray[np.int32], width: int) -> HostProposal:
        proposal, matches = self.ngram.match(slots, emitted, min(width, self.ngram.options.nodes))
        pairs = zip(proposal.counts, matches, strict=True)
        counts = [count if count > 1 and match >= self.first else 0 for count, match in pairs]
        return replace(proposal, counts=counts)

    def release(self, slot: int, tokens: list[int]) -> None:
        self.network.release(slot, tokens)
        self.ngram.release(slot, tokens)

    def metrics(self) -> dict[str, int]:
        return {**self.network.metrics(), **self.ngram.metrics()}

    def close(self) -> None:
        self.network.close()
        self.ngram.close()
