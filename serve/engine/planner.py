"""Turns the scheduler's decisions into plans, and the outputs of passes into tokens for the scheduler.

A plan names slots; the planner remembers which sequences they were, since a slot may belong to another request by the
time that its output is read. Imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.host_stages import Emitted, Proposed
from slipstream.serve.engine.plan import Admission, Edits, PromptChunk, SamplingMode, StepOutput, StepPlan, slots_of
from slipstream.serve.engine.scheduler import Chunk, Scheduler, Sequence
from slipstream.serve.engine.widths import PATIENCE, WAIT_DECAY, Offer, WidthPolicy
from slipstream.serve.request import Output


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers of nodes that rounds may verify, and what a round may write."""

    offered: tuple[int, ...]  # by the drafter and the host stages
    of_network: int  # most nodes that the drafter proposes; more come from the host
    reserve: int  # KV tokens beyond the committed ones

    @property
    def most(self) -> int:
        return max(self.offered)


@dataclass(slots=True)
class Launched:
    """Whose a plan's outputs are."""

    sequences: list[Sequence]
    chunks: list[Chunk]  # of a plan for prompts
    offers: list[Offer]  # of a round: what it could verify


class Planner:
    """`policy` None: rounds verify all that is proposed. `observes`: measured rounds correct its times."""

    def __init__(
        self, scheduler: Scheduler, policy: WidthPolicy | None, widths: Widths, *, observes: bool = False
    ) -> None:
        self.scheduler, self.policy, self.widths, self.observes = scheduler, policy, widths, observes
        self._number = 0
        self._rounds_without_host = 0  # in a row
        self._launched: dict[int, Launched] = {}  # by number of the plan
        self._admissions: list[Admission] = []  # since the last plan
        self._num_sent: dict[int, list[int]] = {}  # by slot and group: pages of its table that plans have named
        self._offers: dict[int, Offer] = {}  # by slot: the proposal that the next round may verify

    def admitted(self, sequence: Sequence) -> None:
        """The scheduler gave it a slot."""
        self._admissions.append(Admission(sequence.slot, sequence.request, tuple(sequence.tokens)))
        self._num_sent[sequence.slot] = [0] * (1 + len(sequence.table.windows))

    def plan_prompts(self) -> StepPlan | None:
        """The next chunks of prompts, None if there are none."""
        chunks = self.scheduler.next_prefill()
        if not chunks:
            return None
        sequences = [chunk.sequence for chunk in chunks]
        plan = StepPlan(
            number=self._next(Launched(sequences, chunks, [])),
            admissions=tuple(self._admissions),
            pages=self._new_pages(sequences),
            chunks=tuple(map(prompt_chunk, chunks)),
            mode=sampling_mode(sequences),
            width=self.widths.most,
        )
        self._admissions.clear()
        return plan

    def plan_round(self) -> StepPlan | None:
        """The next round, None if no request decodes. `choose_width` completes it."""
        sequences = self.scheduler.next_round(self.widths.reserve)
        if not sequences:
            return None
        return StepPlan(
            number=self._next(Launched(sequences, [], [])),
            pages=self._new_pages(sequences),
            slots=tuple(sequence.slot for sequence in sequences),
            bounds=tuple(sequence.kv_bound - sequence.in_flight[-1] for sequence in sequences),
            mode=sampling_mode(sequences),
            width=self.widths.most,
        )

    def offer(self, edits: Edits) -> None:
        """The next plan brings these proposals."""
        for proposal in edits.proposals:
            each = zip(proposal.slots, proposal.counts, proposal.kinds, strict=True)
            self._offers.update((slot, (count, kind)) for slot, count, kind in each if count)

    def choose_width(self, plan: StepPlan) -> int:
        """How many nodes the round verifies."""
        offers = self._launched[plan.number].offers = [self._offers[slot] for slot in plan.slots]
        if self.policy is None:
            return self.widths.most
        width = self.policy.choose(offers, self.widths.of_network, filtered=plan.mode == "all")
        self._rounds_without_host = self._rounds_without_host + 1 if width <= self.widths.of_network else 0
        return width

    @property
    def waiting_pays(self) -> bool:
        """Whether rounds should wait for proposals of the host: not after PATIENCE rounds in a row that verified none,
        until `look_back` sees one that was worth it."""
        return self._rounds_without_host < PATIENCE

    def waited(self, ms: float) -> None:
        """The device waited so long for the host before a round."""
        if self.policy is not None:
            self.policy.wait_ms += (1 - WAIT_DECAY) * (ms - self.policy.wait_ms)

    def look_back(self, edits: Edits) -> None:
        """A round was launched without waiting for these proposals."""
        least = self.widths.of_network
        offers = [
            (count, kind) if count else (least, 0)
            for proposal in edits.proposals
            for count, kind in zip(proposal.counts, proposal.kinds, strict=True)
        ]
        if self.policy is not None and offers and self.policy.choose(offers, least) > least:
            self._rounds_without_host = 0

    def launched(self, plan: StepPlan) -> None:
        """Its pass is on its way, and will store proposals."""
        slots = plan.slots
        if plan.chunks:
            self.scheduler.launched(self._launched[plan.number].chunks)
            slots = tuple(chunk.slot for chunk in plan.chunks)
        self._offers.update(dict.fromkeys(slots, (min(plan.width, self.widths.of_network), 0)))

    def emitted(self, plan: StepPlan, output: StepOutput) -> Emitted:
        """The tokens of a pass, without those that nobody waits for."""
        places, slots = self._receivers(plan, output.errors)
        return Emitted(slots, results_of(output, places))

    def proposed(self, plan: StepPlan, output: StepOutput) -> Proposed:
        """What a pass has proposed for the next round."""
        assert output.proposed is not None
        places, slots = self._receivers(plan, output.errors)
        return Proposed(slots, output.proposed[:, places], results_of(output, places))

    def commit(self, plan: StepPlan, output: StepOutput, ms: float) -> list[Output]:
        """Hands the tokens to the scheduler, in the order of the plans. The pass took `ms`."""
        launched = self._launched.pop(plan.number)
        errors = {**plan.edits.errors, **output.errors}
        each = zip(launched.sequences, slots_of(plan), strict=True)
        failed = [self.scheduler.fail(sequence, errors[slot]) for sequence, slot in each if slot in errors]
        outputs = [one for one in failed if one is not None]
        if plan.chunks:
            return outputs + self._commit_prompts(launched, output)
        accepted = output.accepted_nodes()
        if self.policy is not None and plan.width > 1 and not errors:
            self.policy.record(launched.offers, plan.width, accepted)
        if self.policy is not None and self.observes and not errors:
            self.policy.observe(len(plan.slots), plan.width, ms, filtered=plan.mode == "all")
        drafted = [min(nodes, plan.width) - 1 for nodes, _ in launched.offers]
        tokens = [output.emitted(index) for index in range(len(launched.sequences))]
        return outputs + self.scheduler.commit_round(launched.sequences, tokens, drafted)

    def _commit_prompts(self, launched: Launched, output: StepOutput) -> list[Output]:
        chunks = launched.chunks
        firsts = [int(output.tokens[index, 0]) if chunk.is_last else None for index, chunk in enumerate(chunks)]
        return self.scheduler.commit_prefill(chunks, firsts)

    def _receivers(self, plan: StepPlan, errors: Iterable[int]) -> tuple[list[int], list[int]]:
        """Places in the pass, and slots, of the requests that gain tokens by it."""
        launched = self._launched[plan.number]
        ends = [chunk.is_last for chunk in launched.chunks] or [True] * len(launched.sequences)
        each = zip(launched.sequences, slots_of(plan), ends, strict=True)
        own = [
            (place, slot)
            for place, (sequence, slot, is_end) in enumerate(each)
            if is_end and sequence.slot == slot and slot not in errors
        ]
        return [place for place, _ in own], [slot for _, slot in own]

    def _next(self, launched: Launched) -> int:
        self._number += 1
        self._launched[self._number] = launched
        return self._number

    def _new_pages(self, sequences: list[Sequence]) -> tuple[tuple[int, int, int, int], ...]:
        """The pages that the sequences have gained."""
        changes: list[tuple[int, int, int, int]] = []
        for sequence in sequences:
            slot, table, sent = sequence.slot, sequence.table, self._num_sent[sequence.slot]
            if sent[0] != len(table.pages):
                changes += [(0, slot, index, table.pages[index]) for index in range(sent[0], len(table.pages))]
                sent[0] = len(table.pages)
            for group, own in enumerate(table.windows, 1):
                start, end = max(sent[group], own.first), own.first + len(own.pages)
                changes += [(group, slot, index, own.pages[index - own.first]) for index in range(start, end)]
                sent[group] = max(sent[group], end)
        return tuple(changes)


def results_of(output: StepOutput, places: list[int]) -> NDArray[np.int32]:
    """(B, 1 + N): the number of tokens and the tokens at those places of a pass."""
    results = np.concatenate((output.num_emitted[:, None], output.tokens), axis=1)
    return results if len(places) == len(results) else results[places]


def prompt_chunk(chunk: Chunk) -> PromptChunk:
    tokens, start, end = chunk.sequence.tokens, chunk.start, chunk.end
    following = tokens[end] if end < len(tokens) else None
    return PromptChunk(chunk.sequence.slot, start, tokens[start:end], following, chunk.is_last)


def sampling_mode(sequences: list[Sequence]) -> SamplingMode:
    params = [sequence.request.params for sequence in sequences]
    if any(p.has_penalties or p.logit_bias for p in params):
        return "all"
    if all(p.temperature == 0 for p in params):
        return "greedy"
    return "all" if any(p.has_filters for p in params) else "plain"
