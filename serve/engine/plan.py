"""Data between the engine's host side and its runner: a StepPlan in, a StepOutput back.

Both are plain data: ints, tuples, NumPy arrays. They can be pickled, logged, replayed in another runner or sent to
another process. Imports no torch.
Letters: B requests, N tree nodes per request (root included), W nodes that a request slot stores, S segments of a
pass: its decoding requests, then its chunks; M masks, C acceptance bins, V target vocabulary; K likeliest tokens of
which a pass gives the log-probabilities.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.request import Logprobs, Request

MAX_STEPS_IN_FLIGHT = 2  # with overlap: one runs, the next one is queued
FORCED = 15  # the kind of a HostProposal that a grammar leaves no choice about
SamplingMode = Literal["greedy", "plain", "all"]  # all requests greedy | temperature only | all features
PromptPhase = Literal["verify", "prefill"]  # whose attention backend computes prompts


class StepKey(NamedTuple):
    """A captured pass of the target."""

    rows: int
    heads: int  # rows with logits
    has_prompts: bool
    branches: bool  # its proposals may be trees
    mode: SamplingMode


class DraftKey(NamedTuple):
    """A captured pass of the draft."""

    requests: int
    width: int
    mode: SamplingMode


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets a slot. `tokens`: its prompt and, if it was preempted, its answer so far."""

    slot: int
    request: Request
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of a prompt to compute at positions start.."""

    slot: int
    start: int
    tokens: list[int]
    next_token: int | None  # the one after them; None where the chunk ends its prompt
    is_last: bool  # a token is sampled after it
    logprobs: int | None = None  # number of likeliest tokens to score beside each that follows one of `tokens`

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_scored(self) -> int:
        """Rows whose next token gets its log-probability: all that have one in the prompt."""
        return 0 if self.logprobs is None else len(self.tokens) - self.is_last


@dataclass(frozen=True, slots=True, eq=False)
class HostProposal:
    """Proposals drafted on the host, in the layout of Proposal (serve/runner/batch.py)."""

    slots: list[int]  # (B,) request slots
    # (4, B, N): tokens, unused ones -1; parents; and what the planner fills in, acceptance bins and the bits of the
    # fp32 probabilities that nodes are accepted.
    nodes: NDArray[np.int32]
    counts: list[int]  # nodes in use, root included; 0: the request keeps its stored proposal
    kinds: list[int]  # from 1 up, higher where surer, 0 of roots alone; acceptance is counted by kind
    source: str  # the stage's name
    foreign: NDArray[np.bool_] | None = None  # (B, N) nodes drawn from other requests' texts, which no trace shows


@dataclass(frozen=True, slots=True, eq=False)
class NodeMasks:
    """Tokens that a grammar allows after nodes of the proposal that a step verifies, or after a prompt (node 0)."""

    slot: int
    nodes: list[int]  # (M,); nodes that are not named may be followed by any token
    allowed: NDArray[np.uint32]  # (M, ceil(V / 32)): bit i of word w stands for token 32 * w + i


class Refusal(str):
    """The error of a request that is at fault itself."""

    __slots__ = ()


class Restart(str):
    """The reason why a step does not count for a request, which goes on as after a preemption."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """Changes of host stages to a step: proposals, stored before its pass, and masks for its sampling.

    `errors`, by slot: requests for which a stage failed, or that restart.
    """

    proposals: tuple[HostProposal, ...] = ()
    masks: tuple[NodeMasks, ...] = ()
    errors: dict[int, str] = field(default_factory=dict)

    def __add__(self, other: "Edits") -> "Edits":
        return Edits(self.proposals + other.proposals, self.masks + other.masks, self.errors | other.errors)

    def of(self, slots: Collection[int]) -> tuple["Edits", "Edits"]:
        """Splits the edits into those of a plan for `slots` and those for a later plan. Proposals always come with the
        next plan: the device keeps them, while masks hold for one pass."""
        if not self.masks and not self.errors:
            return self, NO_EDITS
        masks = self.masks
        errors = self.errors.items()
        now = Edits(
            self.proposals,
            tuple(mask for mask in masks if mask.slot in slots),
            {slot: error for slot, error in errors if slot in slots},
        )
        later = Edits(
            masks=tuple(mask for mask in masks if mask.slot not in slots),
            errors={slot: error for slot, error in errors if slot not in slots},
        )
        return now, later

    def without(self, slot: int) -> "Edits":
        """Returns the edits without those for `slot`, whose request has left."""
        if not self.masks and not self.errors:
            return self
        masks = tuple(mask for mask in self.masks if mask.slot != slot)
        return Edits(self.proposals, masks, {other: error for other, error in self.errors.items() if other != slot})


NO_EDITS = Edits()


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One target pass over the nodes of the requests in `slots` and over chunks of prompts, and one pass of the draft,
    which proposes what the next step verifies.

    A runner executes plans in the order of their numbers.
    """

    number: int
    admissions: tuple[Admission, ...] = ()
    pages: tuple[tuple[int, int, int, int], ...] = ()  # KV group, slot, index in its table, page
    read_starts: tuple[tuple[int, int], ...] = ()  # slot, and the first position of its text that the draft reads
    chunks: tuple[PromptChunk, ...] = ()
    slots: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()  # (S,) `slots`, then those of the chunks
    drafting: tuple[int, ...] = ()  # those of the requests that the draft then proposes for
    bounds: tuple[int, ...] = ()  # for each of `slots`: most tokens that it can have committed before the step
    mode: SamplingMode = "greedy"
    nodes: int = 0  # nodes that the pass verifies, roots included: the likeliest of all requests
    branches: bool = False  # their proposals may be trees
    width: int = 1  # nodes that the draft then proposes for each request, root included
    acceptance_table: NDArray[np.float32] | None = None  # (C,) by acceptance bin, where they have changed
    returns_proposals: bool = False  # a host stage or a traced request needs what the step proposes
    logprobs: int | None = None  # the most likeliest tokens that any request wants beside each of its own; None: nobody
    graph: StepKey | None = None  # the target's captured pass; None: it is launched kernel by kernel
    draft_graph: DraftKey | None = None  # likewise, the draft's
    prompts_by: PromptPhase = "prefill"  # in a pass that is not captured
    edits: Edits = NO_EDITS


class StepOutput(NamedTuple):
    """Results of a step for its S segments."""

    num_emitted: NDArray[np.int32]  # (S,) tokens; of a chunk that does not end its prompt, 0
    num_verified: NDArray[np.int32]  # (S,) nodes that the pass verified, root included; of chunks 0
    tokens: NDArray[np.int32]  # (S, W) emitted, -1 padded
    bins: NDArray[np.int32]  # (S, W) acceptance bins of the nodes that were stored, -1 of roots and unused ones
    # (S, W) accepted nodes, -1 padded; None: of a pass over chains, whose first nodes are
    accepted: NDArray[np.int32] | None
    proposed: NDArray[np.int32] | None  # (2, S, W) tokens and parents of the next step, where the plan wants them
    errors: dict[int, str]  # by slot: the request fails, the others go on
    logprobs: NDArray[np.int32] | None = None  # (2 + 2 * K, S, W) as in kernels/sampling/logprobs.py, where wanted
    prompt_logprobs: NDArray[np.int32] | None = None  # (2 + 2 * K, N) of the chunks' rows, likewise

    def emitted(self, index: int) -> list[int]:
        """Returns the tokens of segment `index`."""
        return self.tokens[index, : self.num_emitted[index]].tolist()


def read_logprobs(packed: NDArray[np.int32], k: int) -> Logprobs:
    """Reads Logprobs from packed (2 + 2 * K, N), K >= k: bits of log-probabilities, ranks, then bits and ids of the K
    likeliest."""
    values = packed.view(np.float32)
    ranks = packed[1]
    top = values[2 : 2 + 2 * k : 2]
    ids = packed[3 : 3 + 2 * k : 2]
    return Logprobs(values[0].tolist(), ranks.tolist(), top.T.tolist(), ids.T.tolist())
