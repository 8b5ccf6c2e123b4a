"""Chooses how many nodes the target's pass of a step verifies, and how many the draft proposes for the next one.

A pass over few rows costs as much as reading the weights, so drafts are free; a pass over many costs by the row, and
refused drafts slow every request down. The policy takes the numbers with the most expected tokens per millisecond. It
decides for the batch, the device for the request: a kernel fills the pass with the likeliest nodes (`admit` in
kernels/speculation/ragged.py). It decides by measurements: how often nodes were accepted (acceptance.py), what
proposals look like (yields.py), and how long steps took (step_costs.py). Imports no torch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.acceptance import NETWORK_BINS, AcceptanceStats, Floats, Ints, RequestRatios
from slipstream.serve.engine.host_wait import HostWait
from slipstream.serve.engine.probing import Prober
from slipstream.serve.engine.step_costs import Costs
from slipstream.serve.engine.yields import Batch, Offer, ProposalStats, StepValues, Yields, has_host_nodes, within

RECOMPUTE = 8  # steps for which values are used again
HYSTERESIS = 0.01  # another width proposes for the next step only: require at least 1 % gain
AGAIN_DECAY = 0.9  # EMA decay of how often a step with prompts follows another
NODES_DECAY = 0.98  # EMA decay of the nodes of a step
LEAST_CHUNK = 64  # rows of prompts that a step takes, however slow that is
LEAST_CHUNK_MS = 30.0  # shorter steps need no limit
STRIDE = 16  # between numbers of rows that are looked at, where a pass may have any


class Choice(NamedTuple):
    nodes: int  # nodes that the target's pass verifies, roots included
    width: int  # nodes, root included, that the draft pass then proposes for each request
    ms: float = 0.0  # expected time of the step
    tokens: float = 0.0  # expected tokens of the decoding requests


class BestWidth:
    """Follows the width whose best step gains most."""

    def __init__(self, num_widths: int) -> None:
        self.index = num_widths - 1
        # share of steps with prompts that another one follows, lately
        self._had_prompts = False
        self._again = 0.5

    def record(self, *, has_prompts: bool) -> None:
        """Learns whether the next step has prompts."""
        if self._had_prompts:
            self._again += (1 - AGAIN_DECAY) * (has_prompts - self._again)
        self._had_prompts = has_prompts

    def follow(self, steps: StepValues, alone: StepValues) -> None:
        """Moves to the best width for the step after `steps` if it is better enough than the present one. That step has
        prompts like this one, or none (`alone`)."""
        values = steps.values
        if steps is not alone:
            pairs = zip(steps.values, alone.values, strict=True)
            values = [self._again * value + (1 - self._again) * other for value, other in pairs]
        j = max(range(len(values)), key=values.__getitem__)
        if values[j] - values[self.index] > HYSTERESIS * steps.rate * alone.ms(alone.best[self.index], self.index):
            self.index = j


class BudgetPolicy:
    """Chooses the numbers of nodes of steps.

    `widths`: numbers of nodes that the draft network may propose, with the root, 1 included. `most_nodes`: limit for a
    request, if the host proposes more; `node_rows`: limit for all requests, if that is less than the rows of the
    largest pass. `fixed`: every request gets that many nodes instead. `itl_ms`: allows only steps that will most likely
    (95 %) take no longer, if there are any. `num_slots`: of requests. `chain_nodes`: see `ProposalStats`.

    The caller calls `choose` once for each step, in their order, and later, with the results, `record` and
    `costs.observe`.
    """

    def __init__(
        self,
        costs: Costs,
        widths: Sequence[int],
        *,
        most_nodes: int = 1,
        node_rows: int | None = None,
        fixed: int | None = None,
        itl_ms: float | None = None,
        num_slots: int = 256,
        chain_nodes: int = 0,
    ) -> None:
        self.costs = costs
        self.widths = sorted(widths)
        self.fixed = fixed
        self.most_nodes = max(most_nodes, self.widths[-1])
        self.node_rows = costs.most_rows if node_rows is None else node_rows
        self.itl_ms = itl_ms
        self.acceptance = AcceptanceStats()
        self.host_wait = HostWait()
        self.proposals = ProposalStats(max(2, self.widths[-1]), chain_nodes)
        widest_chain = max(bisect_right(self.widths, chain_nodes) - 1, 0)
        self._prober = Prober(len(self.widths), is_fitted=costs.is_fitted, widest_chain=widest_chain)
        self._best_width = BestWidth(len(self.widths))
        self._stored = self._best_width.index  # index of the stored proposals' width
        self._records: list[tuple[Sequence[int], Ints, Ints, NDArray[np.bool_]]] = []  # not counted yet
        self._ratios = RequestRatios(num_slots)
        self._slots: Sequence[int] = ()  # of the last step that was counted
        # computed for a few steps
        self._yields = Yields(self.acceptance, self.proposals, self.widths)
        self._step_values: dict[tuple[Batch, int, bool], StepValues] = {}
        self._plain_ms: dict[tuple[Batch, int, bool], float] = {}
        self._chunks: dict[tuple[int, bool], int] = {}
        self._age = 0  # steps of these
        self._num_steps = 0
        self._is_prepared = False  # the next step was counted
        self._has_choice = True  # the last step could verify or draft more nodes than roots
        self._mean_nodes = np.zeros(2)  # nodes and steps, decayed: for metrics

    @property
    def width(self) -> int:
        """The best width lately."""
        return self.widths[self._best_width.index] if self.fixed is None else min(self.fixed, self.widths[-1])

    @property
    def ratio(self) -> float:
        """Accepted nodes of the requests of now over those that the bins predict."""
        return self._ratios.mean(self._slots) if self._slots else 1.0

    def prepare(
        self, num_decoding: int, prompt_rows: int = 0, *, num_drafted: int | None = None, filtered: bool = False
    ) -> None:
        """Values steps for the next `choose` ahead, while the device is busy."""
        batch = Batch(num_decoding, num_decoding if num_drafted is None else num_drafted)
        if self._has_choice and self.fixed is None and batch.drafted and not self._is_prepared:
            self._count_step()
            self._is_prepared = True
            self._value_steps(batch, prompt_rows, filtered)

    def choose(
        self,
        num_decoding: int,
        prompt_rows: int = 0,
        *,
        num_drafted: int | None = None,
        filtered: bool = False,
        offers: Sequence[Offer] | None = None,
    ) -> Choice:
        """Chooses the numbers of nodes of the next step, whose pass has `prompt_rows` rows of prompts, too.
        `num_drafted`: requests with drafts; None: all. `offers`: the proposal of each decoding request, if the host
        proposed anything; without them, each has the proposal that the last step drafted."""
        batch = Batch(num_decoding, num_decoding if num_drafted is None else num_drafted)
        if batch.decoding:
            self._count_step()
        if self.fixed is not None:
            return self._choose_fixed(self.fixed, batch, prompt_rows, filtered, offers)
        self._has_choice = len(self.widths) > 1 or offers is not None
        if not self._has_choice:
            self._count_nodes(num_decoding)
            return self._choose_roots(batch, prompt_rows, filtered)
        self._best_width.record(has_prompts=prompt_rows > 0)
        if batch.drafted == 0:
            self._stored = self._best_width.index
            return self._choose_roots(batch, prompt_rows, filtered)
        steps = self._value_steps(batch, prompt_rows, filtered)
        self._best_width.follow(steps, self._value_steps(batch, 0, filtered))
        if offers is not None and has_host_nodes(offers):
            max_nodes = sum(count for count, _ in offers)
            k, tokens = self._weigh_host(steps, offers, prompt_rows)
        else:
            max_nodes = batch.nodes(self.widths[self._stored])
            k = steps.best[self._stored]
            tokens = steps.tokens[self._stored]
            if offers is not None:
                self.host_wait.record_step(pays=False)
        k, j = self._prober.next(
            steps,
            k,
            self._best_width.index,
            last=steps.find(max_nodes + prompt_rows),
            num_drafted=batch.drafted,
            has_prompts=prompt_rows > 0,
            max_ms=self._max_ms,
        )
        self._stored = j
        nodes = max(min(steps.rows[k] - prompt_rows, max_nodes), num_decoding)
        self._count_nodes(nodes)
        return Choice(nodes, self.widths[j], steps.ms(k, j), float(tokens[k]))

    def admit(self, slot: int) -> None:
        """Notes that another request has the slot. Of a step in flight, one round of the last one may count for it."""
        self._count_records()
        self._ratios.admit(slot)
        if slot in self._slots:
            self._age = RECOMPUTE
        else:
            self.acceptance.join(len(self._slots))

    def record(self, slots: Sequence[int], bins: Ints, admitted: Ints, accepted: NDArray[np.bool_]) -> None:
        """Counts the nodes that a step verified for B requests in `slots`. (B, N) bins of all stored nodes, verified or
        not, -1 for roots and unused ones; (B,) numbers of verified nodes, which come first, roots included; (B, N)
        whether a node was accepted."""
        if self._records and self._records[0][1].shape[1] != bins.shape[1]:
            self._count_records()
        self._records.append((slots, bins.copy(), admitted.copy(), accepted.copy()))
        if len(self._records) >= self._refresh_steps:
            self._count_records()

    def chunk_rows(self, num_decoding: int, *, filtered: bool = False) -> int:
        """Returns the most rows of prompts that the next step should take; it verifies as many nodes as without
        prompts."""
        if num_decoding == 0:
            return self.costs.most_rows
        key = (num_decoding, filtered)
        if key not in self._chunks:
            costs = self.costs
            nodes, step_ms, draft_ms = self._usual_step(num_decoding, filtered)
            # As many as a step twice as long may have as one without prompts; none takes more than `_max_ms`.
            limit_ms = min(max(2 * step_ms, LEAST_CHUNK_MS), self._max_ms)
            rows = costs.passes(nodes, costs.most_rows, stride=STRIDE)
            fitting = rows[costs.targets(rows, filtered=filtered) + draft_ms <= limit_ms]
            min_rows = costs.round_up(nodes + LEAST_CHUNK)
            self._chunks[key] = max(min(max(int(fitting.max(initial=0)), min_rows), costs.most_rows) - nodes, 0)
        return self._chunks[key]

    def look_back(self, offers: Sequence[Offer], *, filtered: bool = False) -> None:
        """Learns that a step was launched without waiting for these proposals."""
        self.host_wait.forget()
        if has_host_nodes(offers):
            steps = self._value_steps(Batch(len(offers), len(offers)), 0, filtered)
            _, tokens = self._expect(steps, offers, 0)
            if self.host_wait.is_worth(steps, tokens, self._stored):
                self.host_wait.record_step(pays=True)

    def metrics(self) -> dict[str, float]:
        nodes, steps = self._mean_nodes
        return {
            "step_time_error": self.costs.error(),
            "step_time_p95_ratio": self.costs.p95(),
            "draft_width": float(self.width),
            "nodes_per_step": float(nodes / steps) if steps else 0.0,
        }

    def _choose_roots(self, batch: Batch, prompt_rows: int, filtered: bool) -> Choice:
        """Returns the choice for a step that has nothing but roots to verify."""
        key = (batch, prompt_rows, filtered)
        ms = self._plain_ms.get(key)
        if ms is None:
            rows = batch.decoding + prompt_rows
            ms = self._plain_ms[key] = self.costs.time(rows, batch.drafted, self.width, filtered=filtered)
        return Choice(batch.decoding, self.width, ms, float(batch.decoding))

    def _choose_fixed(
        self, fixed: int, batch: Batch, prompt_rows: int, filtered: bool, offers: Sequence[Offer] | None
    ) -> Choice:
        width = min(fixed, self.widths[-1])  # more come from the host
        nodes = batch.nodes(width) if offers is None else sum(min(count, fixed) for count, _ in offers)
        nodes = min(nodes, max(min(self.costs.most_rows - prompt_rows, self.node_rows), batch.decoding))
        if offers is not None and batch.drafted:
            if has_host_nodes(offers):
                self._weigh_host(self._value_steps(batch, prompt_rows, filtered), offers, prompt_rows)
            else:
                self.host_wait.record_step(pays=False)
        if batch.decoding:
            self._count_nodes(nodes)
        return Choice(nodes, width, self.costs.time(nodes + prompt_rows, batch.drafted, width, filtered=filtered))

    @property
    def _max_ms(self) -> float:
        """Predicted time up to which a step most likely keeps within the objective."""
        return np.inf if self.itl_ms is None else self.itl_ms / self.costs.p95()

    @property
    def _refresh_steps(self) -> int:
        """Steps for which values are used again and records wait; few at the beginning."""
        return min(RECOMPUTE, 1 + self._num_steps // RECOMPUTE)

    def _count_step(self) -> None:
        """Counts the step, unless `prepare` has done so; drops old values."""
        if self._is_prepared:
            self._is_prepared = False
            return
        self._age += 1
        self._num_steps += 1
        if self._age >= self._refresh_steps:
            self._age = 0
            self._yields = Yields(self.acceptance, self.proposals, self.widths, self.ratio)
            self._step_values.clear()
            self._plain_ms.clear()
            self._chunks.clear()

    def _count_records(self) -> None:
        """Counts several steps at once, since that takes little longer than one."""
        if not self._records:
            return
        slots, bins, admitted, accepted = (np.concatenate(parts) for parts in zip(*self._records, strict=True))
        rows, columns = ((np.arange(bins.shape[1]) < admitted[:, None]) & (bins >= 0)).nonzero()
        tried = bins[rows, columns]
        hits = accepted[rows, columns]
        if self.fixed is None:
            is_drafted = tried < NETWORK_BINS
            expected = self.acceptance.probabilities[tried]
            self._ratios.record(slots[rows], hits & is_drafted, expected * is_drafted, len(self._records))
            self._slots = self._records[-1][0]
        self.acceptance.record(tried, hits, len(self._records))
        self.proposals.record(bins)
        self._records.clear()

    def _count_nodes(self, nodes: int) -> None:
        self._mean_nodes = NODES_DECAY * self._mean_nodes + (nodes, 1.0)

    def _value_steps(self, batch: Batch, prompt_rows: int, filtered: bool) -> StepValues:
        key = (batch, prompt_rows, filtered)
        if key in self._step_values:
            return self._step_values[key]
        max_nodes = max(min(batch.nodes(self.most_nodes), self.node_rows), batch.decoding)
        rows = self.costs.passes(batch.decoding + prompt_rows, max_nodes + prompt_rows)
        target = self.costs.targets(rows, filtered=filtered)
        draft = [self.costs.draft(batch.drafted, width, filtered=filtered) for width in self.widths]
        drafted = np.maximum(rows - prompt_rows - batch.decoding, 0) / batch.drafted
        curves = self._yields.curves
        tokens = batch.decoding + batch.drafted * np.array([np.interp(drafted, *curve) for curve in curves])
        ms = target + np.array(draft)[:, None]
        allowed = within(ms, self._max_ms)
        if prompt_rows:
            rate = self._value_steps(batch, 0, filtered).rate
        else:
            rate = float(np.where(allowed, tokens / ms, 0.0).max())
        values = np.where(allowed, tokens - rate * ms, -np.inf)
        best = values.argmax(axis=1)
        # A width without an allowed step still needs a number of nodes, as long as its proposals are stored.
        best = np.where(allowed.any(axis=1), best, ms.argmin(axis=1))
        highest = np.take_along_axis(values, best[:, None], axis=1)[:, 0]
        self._step_values[key] = StepValues(
            rows=rows.tolist(),
            target_ms=target.tolist(),
            arrays=(rows, target),
            draft_ms=draft,
            tokens=tokens,
            best=best.tolist(),
            values=highest.tolist(),
            rate=rate,
        )
        return self._step_values[key]

    def _usual_step(self, num_decoding: int, filtered: bool) -> tuple[int, float, float]:
        """Returns the nodes of a step without prompts, its time and that of its draft pass."""
        max_nodes = max(self.costs.most_rows - LEAST_CHUNK, num_decoding)  # prompts do not wait for others to end
        if self.fixed is not None:
            nodes = min(num_decoding * self.fixed, max_nodes)
            draft_ms = self.costs.draft(num_decoding, self.fixed, filtered=filtered)
            return nodes, self.costs.target(nodes, filtered=filtered) + draft_ms, draft_ms
        steps = self._value_steps(Batch(num_decoding, num_decoding), 0, filtered)
        j = self._best_width.index
        nodes = min(steps.rows[steps.best[j]], num_decoding * self.width, max_nodes)
        return nodes, steps.ms(steps.best[j], j), steps.draft_ms[j]

    def _weigh_host(self, steps: StepValues, offers: Sequence[Offer], prompt_rows: int) -> tuple[int, Floats]:
        """Returns the best pass for these offers, and the tokens by pass; notes whether waiting for the host paid."""
        k, tokens = self._expect(steps, offers, prompt_rows)
        self.host_wait.record_step(pays=self.host_wait.is_worth(steps, tokens, self._stored))
        if not prompt_rows:
            self.host_wait.record_tokens(float(tokens[k]), steps.rate, steps.ms(k, self._best_width.index))
        return k, tokens

    def _expect(self, steps: StepValues, offers: Sequence[Offer], prompt_rows: int) -> tuple[int, Floats]:
        """Returns the best pass for these offers, and the tokens that they yield, by pass."""
        rows, target = steps.arrays
        curve = self._yields.joint_curve(offers)
        tokens = len(offers) + np.interp(rows - (prompt_rows + len(offers)), *curve)
        total = sum(count for count, _ in offers)
        if total + prompt_rows <= steps.free_rows:
            return steps.find(total + prompt_rows), tokens
        values = tokens - self.host_wait.rate(steps) * target
        if self.itl_ms is not None:
            values[~within(target + steps.draft_ms[self._best_width.index], self._max_ms)] = -np.inf
        return int(values.argmax()), tokens
