"""Turns the scheduler's decisions into plans, and the outputs of passes into tokens for the scheduler.

A plan names slots; the planner remembers which sequences they were, since a slot may belong to another request by the
time that its output is read. Imports no torch.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.acceptance import NETWORK_BINS, is_forced
from slipstream.serve.engine.acceptance_alarm import AcceptanceAlarm
from slipstream.serve.engine.budget import BudgetPolicy
from slipstream.serve.engine.counts import EngineCounts
from slipstream.serve.engine.draft_windows import DraftPass, DraftWindows
from slipstream.serve.engine.graph_keys import GraphTable, variant_of
from slipstream.serve.engine.host_stages import Emitted, Proposed
from slipstream.serve.engine.plan import (
    Admission,
    HostProposal,
    PromptChunk,
    PromptPhase,
    Restart,
    SamplingMode,
    StepOutput,
    StepPlan,
    read_logprobs,
)
from slipstream.serve.engine.scheduler import Chunk, Scheduler, Sequence
from slipstream.serve.engine.traces import Tracer
from slipstream.serve.engine.yields import Offer
from slipstream.serve.request import Logprobs, Output


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Sizes of the largest passes."""

    most_nodes: int  # nodes of one request, root included
    of_network: int  # most nodes that the drafter proposes; more come from the host
    reserve: int  # KV tokens that a step may write beyond the committed ones of a request
    prompt_rows: int  # prompt tokens of a step, at most
    enough_prompt_rows: int  # prompt tokens of a step from which on no other prompt follows
    prompts_by: PromptPhase  # see StepPlan
    grid: int = 1  # prompts are cut at multiples of so many tokens
    branches: bool = False  # some proposals are trees
    chain_nodes: int = 0  # nodes up to which those of the network are chains


@dataclass(frozen=True, slots=True)
class BatchTraits:
    """A step's requests: their slots, sampling mode, log-probabilities and drafting."""

    everyone: list[Sequence]  # those that decode, then those of chunks
    slots: tuple[int, ...]  # see StepPlan, as of the next four
    segments: tuple[int, ...]
    drafting: tuple[int, ...]
    mode: SamplingMode
    logprobs: int | None
    filtered: bool  # the step has the costs of passes of mode "all"
    traced: dict[str, int]  # places in the step of those that gain tokens and want a trace, by request id
    sizes: dict[str, int]  # for BudgetPolicy

    @classmethod
    def of(cls, sequences: list[Sequence], chunks: list[Chunk]) -> "BatchTraits":
        everyone = [*sequences, *[chunk.sequence for chunk in chunks]]
        emitting = [*sequences, *[chunk.sequence for chunk in chunks if chunk.is_last]]
        emits = [True] * len(sequences) + [chunk.is_last for chunk in chunks]
        mode = sampling_mode(everyone)
        logprobs = most_logprobs(emitting)
        return cls(
            everyone=everyone,
            slots=tuple([sequence.slot for sequence in sequences]),
            segments=tuple([sequence.slot for sequence in everyone]),
            drafting=tuple([sequence.slot for sequence in emitting if sequence.traits.wants_drafts]),
            mode=mode,
            logprobs=logprobs,
            filtered=variant_of(mode, logprobs) == "all",
            traced={
                sequence.request.id: place
                for place, sequence in enumerate(everyone)
                if emits[place] and sequence.traits.wants_trace
            },
            sizes={
                "num_decoding": len(sequences),
                "prompt_rows": sum([chunk.end - chunk.start for chunk in chunks]),
                "num_drafted": sum([sequence.traits.wants_drafts for sequence in sequences]),
            },
        )


@dataclass(slots=True)
class Launched:
    """Maps a plan's output rows back to sequences."""

    sequences: list[Sequence]  # the decoding ones
    chunks: list[Chunk]
    traits: BatchTraits
    filtered: bool  # see BatchTraits, with masks that come late
    expected_ms: float = 0.0  # the policy's prediction for the step
    # Whether a window drafted what each decoding sequence verifies; None: no text is long enough for one.
    are_windows: NDArray[np.bool_] | None = None
    num_read: int = 0  # committed tokens that the draft's pass reads


class Planner:
    """Makes plans and commits their outputs. `drafter`: name of the drafter on the device; `host_drafts`: some
    proposals come from the host, which knows their sizes; `fixed_tokens`: see Drafter; `windows`: of the drafter."""

    def __init__(
        self,
        scheduler: Scheduler,
        policy: BudgetPolicy,
        limits: PassLimits,
        graphs: GraphTable | None,
        drafter: str,
        alarm: AcceptanceAlarm,
        *,
        host_drafts: bool = False,
        fixed_tokens: Collection[int] | None = None,
        windows: DraftWindows | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.policy = policy
        self.limits = limits
        self.graphs = graphs
        self.host_drafts = host_drafts
        self.counts = EngineCounts()
        self.alarm = alarm
        self.windows = windows
        self._tracer = Tracer(drafter, fixed_tokens)
        self._drafter = drafter
        self._number = 0
        self._sent_version = -1  # version of the acceptance table that the runner has
        self._launched: dict[int, Launched] = {}  # by number of the plan
        self._admissions: dict[int, Admission] = {}  # since the last plan, by slot
        self._offers: dict[int, Offer] = {}  # by slot: the proposal that the next step may verify
        self._offered = set[int]()  # slots whose proposal is the host's
        self._stored_nodes = 1  # nodes of the proposals that the network stored last
        self._decoding: list[Sequence] = []  # of the last step without prompts, which `_traits` are of
        self._traits = BatchTraits.of([], [])

    def admitted(self, sequence: Sequence) -> None:
        """Notes that the scheduler gave the sequence a slot."""
        self._admissions[sequence.slot] = admission_of(sequence)
        self.policy.admit(sequence.slot)
        self.alarm.admit(sequence)

    def plan(self) -> StepPlan | None:
        """Plans the next step; None if there is nothing to do. `choose` completes it."""
        sequences = self.scheduler.next_decodes(self.limits.reserve)
        chunks = self._next_chunks(sequences) if self.scheduler.has_prompts else []
        if not sequences and not chunks:
            return None
        traits = self._traits_of(sequences, chunks)
        launched = Launched(sequences, chunks, traits, traits.filtered)
        self._number += 1
        self._launched[self._number] = launched
        bounds = tuple([sequence.kv_bound - sequence.in_flight[-1] for sequence in sequences])
        plan = StepPlan(
            number=self._number,
            admissions=tuple(self._admissions.values()),
            pages=self._new_pages(traits.everyone),
            chunks=tuple(map(prompt_chunk, chunks)),
            slots=traits.slots,
            segments=traits.segments,
            drafting=traits.drafting,
            bounds=bounds,
            read_starts=() if self.windows is None else self._choose_windows(self.windows, launched, bounds),
            mode=traits.mode,
            returns_proposals=bool(traits.traced),
            logprobs=traits.logprobs,
            prompts_by=self.limits.prompts_by,
        )
        self._admissions.clear()
        self.policy.prepare(**traits.sizes, filtered=traits.filtered)
        return plan

    def plan_idle(self, chunk: Chunk) -> StepPlan:
        """Plans a step of a chunk that no request has (serve/engine/idle.py). It is complete, and has no `commit`."""
        sequence = chunk.sequence
        self._number += 1
        plan = StepPlan(
            number=self._number,
            admissions=(admission_of(sequence),),
            pages=self._new_pages([sequence]),
            chunks=(prompt_chunk(chunk),),
            segments=(sequence.slot,),
            prompts_by=self.limits.prompts_by,
        )
        return self._with_graphs(plan)

    def _choose_windows(
        self, windows: DraftWindows, launched: Launched, bounds: tuple[int, ...]
    ) -> tuple[tuple[int, int], ...]:
        """Returns `StepPlan.read_starts` of a step, whose decoding requests have at most `bounds` tokens."""
        traits = launched.traits
        if windows.has_long(bounds):
            launched.are_windows = windows.starts[list(traits.slots)] > 0
        tokens = dict(zip(traits.segments, (*bounds, *(chunk.end for chunk in launched.chunks)), strict=True))
        lengths = [tokens[slot] for slot in traits.drafting]
        starts = windows.choose(traits.drafting, lengths, self.policy.width)
        launched.num_read = sum(lengths) - int(windows.starts[list(traits.drafting)].sum())
        return starts

    def _next_chunks(self, sequences: list[Sequence]) -> list[Chunk]:
        """Returns the chunks of prompts beside `sequences`, which decode."""
        num_rows = self.limits.prompt_rows
        if sequences:
            filtered = variant_of(sampling_mode(self.scheduler.running), most_logprobs(sequences)) == "all"
            num_rows = min(num_rows, self.policy.chunk_rows(len(sequences), filtered=filtered))
            if num_rows:
                num_rows = max(num_rows, self.limits.grid)
        return self.scheduler.next_chunks(num_rows, self.limits.enough_prompt_rows)

    def _traits_of(self, sequences: list[Sequence], chunks: list[Chunk]) -> BatchTraits:
        """Returns the traits of a step, which stay the same as long as the same sequences decode."""
        if chunks:
            return BatchTraits.of(sequences, chunks)
        if sequences != self._decoding:
            self._decoding = sequences
            self._traits = BatchTraits.of(sequences, [])
        return self._traits

    def choose(self, plan: StepPlan, *, will_be_masked: bool = False, has_waited: bool = False) -> StepPlan:
        """Completes the plan, whose edits are there but perhaps for masks, with the numbers of nodes that it verifies
        and then proposes, and the captured passes. `has_waited`: for the host's proposals, which may be none."""
        for proposal in plan.edits.proposals:
            self._calibrate(proposal)
            offered = offers_of(proposal)
            self._offers.update(offered)
            self._offered.update(offered)
        mode = "all" if plan.edits.masks or will_be_masked else plan.mode
        launched = self._launched[plan.number]
        launched.filtered |= mode == "all"
        sizes = launched.traits.sizes
        num_drafted = sizes["num_drafted"]
        if len(plan.drafting) < len(launched.traits.drafting):
            num_drafted = len(frozenset(plan.drafting).intersection(plan.slots))
        offers = None
        if self.host_drafts and (has_waited or not self._offered.isdisjoint(plan.slots)):
            offers = [self._offers[slot] for slot in plan.slots]
            num_drafted = max(num_drafted, sum(count > 1 for count, _ in offers))  # forced text needs no drafts
        sizes = sizes | {"num_drafted": num_drafted}
        choice = self.policy.choose(**sizes, filtered=launched.filtered, offers=offers)
        launched.expected_ms = choice.ms
        acceptance_table = None
        acceptance = self.policy.acceptance
        if self._sent_version != acceptance.version:
            self._sent_version = acceptance.version
            acceptance_table = acceptance.table.copy()
        plan = replace(
            plan,
            mode=mode,
            nodes=choice.nodes,
            branches=self.limits.branches and (self._stored_nodes > self.limits.chain_nodes or bool(self._offered)),
            width=choice.width,
            acceptance_table=acceptance_table,
        )
        return self._with_graphs(plan)

    def _with_graphs(self, plan: StepPlan) -> StepPlan:
        """Completes the plan with its captured passes."""
        if self.graphs is None:
            return plan
        graph = self.graphs.step(plan)
        branches = plan.branches if graph is None else graph.branches
        return replace(plan, graph=graph, branches=branches, draft_graph=self.graphs.draft(plan))

    def launched(self, plan: StepPlan) -> None:
        """Notes that the passes of the plan are launched and will store proposals."""
        launched = self._launched[plan.number]
        self.scheduler.mark_launched(launched.chunks)
        self._stored_nodes = plan.width
        if launched.traits.traced:
            self._tracer.launched(plan, launched.traits.traced)
        if self.host_drafts:
            offer: Offer = min(plan.width, self.limits.of_network), 0
            self._offers.update(dict.fromkeys(plan.segments, (1, 0)) | dict.fromkeys(plan.drafting, offer))
            self._offered.difference_update(plan.segments)

    def emitted(self, plan: StepPlan, output: StepOutput) -> Emitted:
        """Returns the tokens of a step for the requests that still wait for them."""
        places, slots = self._receivers(plan, output.errors)
        return Emitted(slots, results_of(output, places))

    def proposed(self, plan: StepPlan, output: StepOutput) -> Proposed:
        """Returns the proposals of a step for the next one."""
        assert output.proposed is not None
        places, slots = self._receivers(plan, output.errors)
        return Proposed(slots, output.proposed[:, places], results_of(output, places))

    def commit(
        self,
        plan: StepPlan,
        output: StepOutput,
        ms: float,
        late: Collection[HostProposal] = (),
        waited_ms: float | None = None,
    ) -> list[Output]:
        """Hands the tokens to the scheduler, in the order of the plans. The step took `ms`.

        `late`: proposals of the host for the next step, which was launched without waiting for them. `waited_ms`: how
        long the device waited for the host before the next step, if it did.
        """
        launched = self._launched[plan.number]
        if waited_ms is not None:
            self.policy.host_wait.record_wait(waited_ms)
        if late:
            offers = dict[int, Offer].fromkeys(plan.drafting, (self.limits.of_network, 0))
            for proposal in late:
                offers.update(offers_of(proposal))
            self.policy.look_back(list(offers.values()), filtered=launched.filtered)
        count = len(plan.slots)
        errors = {**output.errors, **plan.edits.errors}  # the errors of stages say more
        outputs: list[Output] = []
        if errors:
            owners = zip(launched.traits.everyone, plan.segments, strict=True)
            failed = [self._end(sequence, errors[slot]) for sequence, slot in owners if slot in errors]
            outputs = [ending for ending in failed if ending is not None]
        else:
            self._learn(plan, output, ms)
            self._watch(plan, output)
        del self._launched[plan.number]
        drafted = (output.num_verified[:count] - 1).tolist()
        rows = zip(output.tokens[:count].tolist(), output.num_emitted[:count].tolist(), strict=True)
        tokens = [row[:number] for row, number in rows]
        emitted = self.scheduler.commit_decodes(launched.sequences, tokens, drafted)
        first_tokens = [
            int(output.tokens[index, 0]) if chunk.is_last else None
            for index, chunk in enumerate(launched.chunks, count)
        ]
        emitted += self.scheduler.commit_chunks(launched.chunks, first_tokens)
        self._count(plan, output, launched, emitted, drafted, ms)
        outputs += emitted
        outputs = add_logprobs(outputs, plan, output, launched)
        if traced := launched.traits.traced:
            rounds = {name: launched.traits.everyone[place].num_rounds for name, place in traced.items()}
            outputs = self._tracer.add_traces(outputs, plan, output, traced, rounds)
        return outputs

    def _end(self, sequence: Sequence, error: str) -> Output | None:
        if not isinstance(error, Restart):
            return self.scheduler.fail(sequence, error)
        self.scheduler.restart(sequence)
        return None

    def _count(
        self,
        plan: StepPlan,
        output: StepOutput,
        launched: Launched,
        emitted: list[Output],
        drafted: list[int],
        ms: float,
    ) -> None:
        """Counts the step for /metrics. `emitted`: new tokens; requests that had ended or were preempted have none.
        `drafted`: drafted tokens of each decoding request that were verified."""
        counts = self.counts
        lengths = {result.request_id: len(result.tokens) for result in emitted}
        counts.add_step(
            budget=plan.nodes if plan.slots else 0,
            node_rows=sum(drafted) + len(drafted),
            prompt_rows=sum(len(chunk.tokens) for chunk in plan.chunks),
            ms=ms,
            predicted_ms=launched.expected_ms,
        )
        counts.emitted_tokens += sum(lengths.values())
        if not any(drafted):
            return
        num_emitted = output.num_emitted.tolist()
        sources = {
            slot: proposal.source
            for proposal in plan.edits.proposals
            for slot, count in zip(proposal.slots, proposal.counts, strict=True)
            if count
        }
        for place, sequence in enumerate(launched.sequences):
            if (length := lengths.get(sequence.request.id)) is not None:
                counts.add_round(
                    sources.get(plan.slots[place], self._drafter),
                    num_drafted=drafted[place],
                    num_accepted=min(length, num_emitted[place] - 1),
                    is_tree=output.accepted is not None,
                )

    def _learn(self, plan: StepPlan, output: StepOutput, ms: float) -> None:
        """Counts accepted nodes and the step's time. Skips requests without drafts, and requests that change their
        logits if there are others, whose drafts may be accepted more often, except for tokens forced by grammars."""
        count = len(plan.slots)
        launched = self._launched[plan.number]
        sequences = launched.sequences
        drafted = [i for i, sequence in enumerate(sequences) if sequence.traits.wants_drafts]
        if drafted and self.limits.most_nodes > 1:
            free = {i for i in drafted if not sequences[i].traits.changes_logits}
            if free and len(free) < len(drafted):
                forced: NDArray[np.bool_] = np.any(is_forced(output.bins[:count]), axis=1)
                drafted = [i for i in drafted if i in free or forced[i]]
            counted = drafted if len(drafted) < count else slice(count)
            slots = plan.slots if len(drafted) == count else [plan.slots[i] for i in drafted]
            accepted = accepted_nodes(output, count)
            self.policy.record(slots, output.bins[counted], output.num_verified[counted], accepted[counted])
            if self.windows is not None and launched.are_windows is not None:
                is_drafted = (output.bins[counted] >= 0) & (output.bins[counted] < NETWORK_BINS)
                places = np.arange(count)[counted][is_drafted[:, 1]]
                num_accepted = (accepted[counted] & is_drafted)[is_drafted[:, 1]].sum(axis=1)
                self.windows.record(np.array(plan.bounds)[places], launched.are_windows[places], num_accepted)
        if output.prompt_logprobs is not None:  # they take extra time
            return
        rows = plan.nodes + sum(len(chunk.tokens) for chunk in plan.chunks)
        self.policy.costs.observe(rows, len(plan.drafting), plan.width, ms, filtered=launched.filtered)
        if self.windows is not None and plan.width > 1 and not plan.chunks:
            draft_pass = DraftPass(plan.drafting, plan.width, launched.num_read)
            self.windows.observe(draft_pass, int(output.num_emitted[:count].sum()), ms, launched.expected_ms)

    def _watch(self, plan: StepPlan, output: StepOutput) -> None:
        """Tells the alarm whether first drafted tokens were accepted, or how likely that was where none was verified.
        Forced tokens do not count: a grammar drafts them."""
        count = len(plan.slots)
        if output.bins.shape[1] < 2 or not count:
            return
        bins = output.bins[:count, 1]
        if not np.any(bins >= 0):
            return
        is_drafted = (bins >= 0) & ~is_forced(bins)
        sequences = self._launched[plan.number].sequences
        is_there = [sequence.slot == slot for sequence, slot in zip(sequences, plan.slots, strict=True)]
        places = np.flatnonzero(is_drafted & is_there)
        rates = np.where(
            output.num_verified[places] > 1,
            accepted_nodes(output, count)[places, 1],
            self.policy.acceptance.table[bins[places]],
        )
        self.alarm.record(np.array(plan.slots)[places], rates)

    def _calibrate(self, proposal: HostProposal) -> None:
        """Fills in the proposal's bins and their probabilities."""
        _, _, bins, probabilities = proposal.nodes
        bins[:] = -1
        probabilities[:] = 0
        for index, offer in enumerate(zip(proposal.counts, proposal.kinds, strict=True)):
            if count := offer[0]:
                row = self.policy.acceptance.host_row(*offer)
                bins[index, :count] = row.bins
                probabilities[index, :count] = row.probabilities

    def _receivers(self, plan: StepPlan, errors: Iterable[int]) -> tuple[list[int], list[int]]:
        """Returns the places in the pass, and the slots, of the requests that gain tokens by it."""
        launched = self._launched[plan.number]
        ends = [True] * len(launched.sequences) + [chunk.is_last for chunk in launched.chunks]
        rows = zip(launched.traits.everyone, plan.segments, ends, strict=True)
        receivers = [
            (place, slot)
            for place, (sequence, slot, is_end) in enumerate(rows)
            if is_end and sequence.slot == slot and slot not in errors
        ]
        return [place for place, _ in receivers], [slot for _, slot in receivers]

    def _new_pages(self, sequences: list[Sequence]) -> tuple[tuple[int, int, int, int], ...]:
        """Returns what has changed in the sequences' page tables."""
        changes: list[tuple[int, int, int, int]] = []
        for sequence in sequences:
            table = sequence.table
            if table.num_sent == len(table.pages) and not table.groups:
                continue
            for group, table in enumerate((sequence.table, *sequence.table.groups)):
                if added := table.changes():
                    changes += [(group, sequence.slot, index, page) for index, page in added]
        return tuple(changes)


def add_logprobs(outputs: list[Output], plan: StepPlan, output: StepOutput, launched: Launched) -> list[Output]:
    """Adds log-probabilities to the Outputs of a step. Those of prompts are kept until the last chunk."""
    prompts = dict[int, Logprobs]()
    start = 0
    for index, (chunk, planned) in enumerate(zip(launched.chunks, plan.chunks, strict=True), len(plan.slots)):
        if planned.num_scored and output.prompt_logprobs is not None:
            rows = output.prompt_logprobs[:, start : start + planned.num_scored]
            chunk.sequence.prompt_logprobs.append(read_logprobs(rows, planned.logprobs or 0))
            start += planned.num_scored
        if planned.logprobs is not None and chunk.is_last:
            prompts[index] = Logprobs.join(chunk.sequence.prompt_logprobs)
    if output.logprobs is None and not prompts:
        return outputs
    places = {sequence.request.id: index for index, sequence in enumerate(launched.traits.everyone)}
    results = []
    for result in outputs:
        index = places[result.request_id]
        logprobs = None
        k = launched.traits.everyone[index].request.params.logprobs
        if k is not None and output.logprobs is not None:
            logprobs = read_logprobs(output.logprobs[:, index, : len(result.tokens)], k)
        results.append(replace(result, logprobs=logprobs, prompt_logprobs=prompts.get(index)))
    return results


def offers_of(proposal: HostProposal) -> dict[int, Offer]:
    """Returns sizes and kinds by slot."""
    rows = zip(proposal.slots, proposal.counts, proposal.kinds, strict=True)
    return {slot: (count, kind) for slot, count, kind in rows if count}


def results_of(output: StepOutput, places: list[int]) -> NDArray[np.int32]:
    """Returns (B, 1 + N): the number of tokens and the tokens at those places of a pass."""
    results = np.concatenate((output.num_emitted[:, None], output.tokens), axis=1)
    return results if len(places) == len(results) else results[places]


def accepted_nodes(output: StepOutput, count: int) -> NDArray[np.bool_]:
    """Returns (count, W): whether each node of the first `count` segments was accepted."""
    if output.accepted is None:
        return np.arange(output.tokens.shape[1]) < output.num_emitted[:count, None]
    accepted = np.zeros((count, output.tokens.shape[1] + 1), dtype=bool)  # the last place takes the padding
    np.put_along_axis(accepted, output.accepted[:count].astype(np.int64), values=True, axis=1)
    return accepted[:, :-1]


def admission_of(sequence: Sequence) -> Admission:
    request = replace(sequence.request, compiled_grammar=None)  # which no other process can have
    return Admission(sequence.slot, request, tuple(sequence.tokens))


def prompt_chunk(chunk: Chunk) -> PromptChunk:
    tokens = chunk.sequence.tokens
    start = chunk.start
    end = chunk.end
    following = tokens[end] if end < len(tokens) else None
    logprobs = chunk.sequence.request.params.prompt_logprobs if chunk.sequence.scores_prompt else None
    return PromptChunk(chunk.sequence.slot, start, tokens[start:end], following, chunk.is_last, logprobs)


def most_logprobs(emitting: list[Sequence]) -> int | None:
    """Returns the most likeliest tokens that a request wants beside each token of the pass; None: no request does."""
    counts = [sequence.request.params.logprobs for sequence in emitting]
    return max((k for k in counts if k is not None), default=None)


def sampling_mode(sequences: Iterable[Sequence]) -> SamplingMode:
    traits = [sequence.traits for sequence in sequences]
    if any(x.has_processors for x in traits):
        return "all"
    if all(x.is_greedy for x in traits):
        return "greedy"
    return "all" if any(x.has_filters for x in traits) else "plain"
