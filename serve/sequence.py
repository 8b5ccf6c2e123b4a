"""A request while the scheduler has it, and a piece of its prompt to compute. Imports no torch."""

from collections import deque
from dataclasses import dataclass, field, replace

from slipstream.serve.cache import PageTable
from slipstream.serve.request import FinishReason, Request, RequestStats


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request's state. While it decodes, tokens[num_computed:] is the next round's root, or empty until the token
    sampled behind the prompt arrives. A preempted sequence goes on as a new object."""

    request: Request
    tokens: list[int]  # prompt + emitted
    stop_ids: frozenset[int]
    table: PageTable
    stats: RequestStats
    row: int = -1  # -1: not running
    num_computed: int = 0  # tokens whose KV is committed
    decoding: bool = False  # its prefill is done, or on its way
    in_flight: deque[int] = field(default_factory=deque)  # KV rows that each launched pass may commit, tokens unread
    num_preemptions: int = 0

    @classmethod
    def of(cls, request: Request, stop_ids: frozenset[int], lookahead: int) -> "Sequence":
        params = request.params
        own = stop_ids if not params.ignore_eos else frozenset()
        return cls(
            request=request,
            tokens=list(request.prompt),
            stop_ids=own.union(params.stop_token_ids),
            table=PageTable(request.namespace, lookahead),
            stats=RequestStats(prompt_tokens=len(request.prompt)),
        )

    @property
    def pages(self) -> list[int]:
        return self.table.pages

    @property
    def kv_bound(self) -> int:
        """Most tokens whose KV is committed once every launched pass is done."""
        return self.num_computed + sum(self.in_flight)

    @property
    def is_ending(self) -> bool:
        """Launched passes emit at least one token each: are they the last ones that max_tokens allows?"""
        return self.stats.completion_tokens + len(self.in_flight) >= self.request.params.max_tokens

    def resumed(self) -> "Sequence":
        """The sequence as it waits after a preemption; passes in flight for the old object are lost on it."""
        table = PageTable(self.table.namespace, self.table.lookahead)
        return replace(
            self,
            table=table,
            row=-1,
            num_computed=0,
            decoding=False,
            in_flight=deque(),
            num_preemptions=self.num_preemptions + 1,
        )

    def cut(self, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to the first stop id (which stays) and max_tokens, and why the sequence ends, if it does."""
        assert emitted, "every round and every prefill emits at least one token"
        num_left = self.request.params.max_tokens - self.stats.completion_tokens
        for index, token in enumerate(emitted[:num_left]):
            if token in self.stop_ids:
                return emitted[: index + 1], "stop"
        return emitted[:num_left], "length" if len(emitted) >= num_left else None

    def count_round(self, drafted: int, num_accepted: int) -> None:
        """Statistics of one round that proposed `drafted` tokens, `num_accepted` of which are part of the answer."""
        self.stats.rounds += 1
        self.stats.drafted_tokens += drafted
        accepted = self.stats.accepted_by_position
        accepted += [0] * (num_accepted - len(accepted))
        for position in range(num_accepted):
            accepted[position] += 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a sequence, to be computed in one prefill step."""

    sequence: Sequence
    start: int
    end: int
    is_last: bool  # end was len(sequence.tokens) when the chunk was made: a token is to be sampled behind it
