"""Chooses how many nodes the target's pass of a step verifies, and how many the draft proposes for the next one.

A pass over few rows costs as much as reading the weights, so drafts are free; a pass over many costs by the row, and
refused drafts slow every request down. The policy takes the numbers with the most expected tokens per millisecond. It
decides for the batch, the device for the request: a kernel fills the pass with the likeliest nodes (`admit` in
kernels/speculation/ragged.py). It decides by measurements: how often nodes were accepted, by calibration cell, and how
long steps took (serve/engine/step_costs.py). Imports no torch.

A node's cell combines its place in the proposal with the probability that the draft gave it, or with the host's
confidence. Which nodes are verified depends on their cells alone, so the others do not bias the survivals.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.serve.engine.plan import FORCED
from slipstream.serve.engine.step_costs import Costs

PLACES = BUCKETS = KINDS = 16  # the last place, bucket of probabilities and kind stand for all above, too
NETWORK_CELLS = PLACES * BUCKETS
CELLS = NETWORK_CELLS + KINDS * PLACES
PRIOR = 4.0  # nodes per cell that the prior counts as
MOST_LIKELY = 0.98  # upper bound of a survival
MEMORY = 64.0  # verified nodes that a cell remembers, at least
DECAY = 0.98  # weight of nodes beyond that, after one more step
RECENT = 0.97  # weight of a step among the last ones, after one more
REVERT = 0.999  # per step: a cell that is never verified returns to its prior, and is tried again
MOVED = 0.02  # change of a survival after which the device needs the table again
REFRESH = 32  # steps between two refreshes; fewer at the beginning
SEEN = 100.0  # proposals that the shares of a place remember
RECOMPUTE = 8  # steps for which plans are used again
HYSTERESIS = 0.01  # another width proposes for the next step only: require at least 1 % gain
FREE = 1.02  # a pass that takes so much longer than one of the roots alone takes no longer
PROBE_SHARE = 0.005  # share of the time that goes to more nodes than pay, to notice changes
FITTED_PROBE_SHARE = 0.003  # likewise where times are fitted: a probe's time tells of other sizes, too
PROBE_STEPS = 3  # the first one only drafts; where times are fitted, the last one only verifies
PATIENCE = 2  # steps without a node of the host that paid, after which steps stop waiting for the host
AGAIN_DECAY = 0.9  # EMA decay of how often a step with prompts follows another
WAIT_DECAY = 0.95  # EMA decay of the time in which steps wait for the host
FORGET_WAIT = 0.995  # decay of that time, per step that does not wait
LIFT_DECAY = 0.98  # EMA decay of the gain from host proposals
LEAST_CHUNK = 64  # rows of prompts that a step takes, however slow that is
LEAST_CHUNK_MS = 30.0  # shorter steps need no limit

# A request's proposal: its nodes, root included, and its kind. 0: drafted by a network; others: see HostProposal.
Offer = tuple[int, int]


class Choice(NamedTuple):
    nodes: int  # nodes that the target's pass verifies, roots included
    width: int  # nodes, root included, that the draft pass then proposes for each request
    ms: float = 0.0  # expected time of the step
    tokens: float = 0.0  # expected tokens of the decoding requests


class Batch(NamedTuple):
    decoding: int  # requests
    drafted: int  # requests with drafts among them

    def nodes(self, width: int) -> int:
        """Returns the nodes of the batch if every drafted request has `width`."""
        return self.decoding + self.drafted * (width - 1)


class HostRow(NamedTuple):
    """Cells, -1 for the root, and the bits of fp32 survivals of a host proposal's nodes, (n,) both."""

    cells: NDArray[np.int32]
    survivals: NDArray[np.int32]


class Curve(NamedTuple):
    """Expected tokens by number of a request's likeliest nodes after the root: (n,) both, from 0, concave between."""

    nodes: NDArray[np.float64]
    tokens: NDArray[np.float64]


class Calibration:
    """Tracks how often nodes were accepted lately, by cell.

    A cell with few verified nodes goes by its prior, times the ratio of accepted to expected nodes at its place and
    before: so we notice an overconfident draft before each of its cells has been tried, and places that are not
    verified at present follow those that are. If the last steps accepted more or fewer nodes at a place than its cells
    predicted, we expect that to go on until the cells have learnt it.
    """

    def __init__(self) -> None:
        # verified nodes, decayed
        self._tried = np.zeros(CELLS)
        self._accepted = np.zeros(CELLS)
        self._prior = np.concatenate((_network_prior(), _host_prior()))
        self._recent = np.zeros((2, PLACES + CELLS - NETWORK_CELLS))  # by place: accepted nodes, and expected ones
        self._learnt = self._prior.copy()  # by the counts alone
        self._survivals = self._prior.copy()
        self._is_new = True  # `_survivals` is up to date
        self.version = 0
        self.table = self._prior.astype(np.float32)  # (CELLS,) for the device
        self._steps = self._published = 0

    def record(self, cells: NDArray[np.int32], accepted: NDArray[np.bool_], steps: int = 1) -> None:
        """Counts the verified nodes of the last `steps` steps: (n,) cells, and whether each node was accepted."""
        tried = np.bincount(cells, minlength=CELLS)
        right = np.bincount(cells[accepted], minlength=CELLS)
        recent = _by_place(np.stack((right, tried * self._learnt)))
        self._recent *= np.where(recent[1] > 0, RECENT, REVERT) ** steps
        self._recent += recent
        total = REVERT**steps * self._tried + tried
        keep = np.clip(MEMORY / np.maximum(total, MEMORY), DECAY**steps, 1.0)
        self._tried = keep * total
        self._accepted = keep * (REVERT**steps * self._accepted + right)
        self._is_new = False
        self._steps += steps
        if self._steps >= min(2 * self._published, self._published + REFRESH):
            self._publish()

    @property
    def survivals(self) -> NDArray[np.float64]:
        """(CELLS,) probability that a node is accepted: the present ones, which the table follows with delay."""
        if not self._is_new:
            prior = np.minimum(self._prior * self._surer(), MOST_LIKELY)
            self._learnt = (self._accepted + PRIOR * prior) / (self._tried + PRIOR)
            accepted, expected = self._recent
            lately = (accepted + PRIOR) / (expected + PRIOR)
            lately = np.concatenate((np.repeat(lately[:PLACES], BUCKETS), lately[PLACES:]))
            self._survivals = np.minimum(self._learnt * lately, MOST_LIKELY)
            self._is_new = True
        return self._survivals

    def _surer(self) -> NDArray[np.float64]:
        """Returns (CELLS,) accepted nodes over those that the priors expected, at the same place of proposals of this
        kind."""
        counts = _by_place(np.stack((self._accepted, self._tried * self._prior)))
        host = counts[:, PLACES:].reshape(2, KINDS, PLACES).swapaxes(1, 2)
        accepted, expected = np.concatenate((counts[:, :PLACES, None], host), axis=2)  # (PLACES, 1 + KINDS)
        ratios = np.empty_like(accepted)
        before = np.ones(1 + KINDS)
        for place in range(PLACES):
            before = (accepted[place] + PRIOR * before) / (expected[place] + PRIOR)
            ratios[place] = before
        return np.concatenate((np.repeat(ratios[:, 0], BUCKETS), ratios[:, 1:].T.ravel()))

    def _publish(self) -> None:
        self._published = self._steps
        if np.abs(self.survivals - self.table).max() > MOVED:
            self.table = self.survivals.astype(np.float32)
            self.version += 1


class Offers:
    """Counts how often each bucket of probabilities occurs at each place of the draft network's proposals.

    Nodes come best first, so a narrow proposal counts as the beginning of a wide one.
    """

    def __init__(self, most_nodes: int) -> None:
        places = np.arange(most_nodes - 1)
        self._cells = np.minimum(places, PLACES - 1)[:, None] * BUCKETS + np.arange(BUCKETS)
        self._seen = np.zeros((most_nodes - 1, BUCKETS))  # proposals, decayed
        buckets = (BUCKETS * 0.8 ** (places + 1)).astype(int)  # until some are seen
        self._seen[places, np.minimum(buckets, BUCKETS - 1)] = 1.0
        self._places = places

    def record(self, cells: NDArray[np.int32]) -> None:
        """Counts proposals: (B, N) cells of all nodes of each, verified or not; -1 roots and unused nodes. Proposals of
        the host do not count."""
        drafted = cells[:, 1 : len(self._seen) + 1]
        rows, columns = ((drafted >= 0) & (drafted < NETWORK_CELLS)).nonzero()
        index = columns * BUCKETS + drafted[rows, columns] % BUCKETS
        self._seen += np.bincount(index, minlength=self._seen.size).reshape(self._seen.shape)
        total = self._seen.sum(axis=1, keepdims=True)
        self._seen *= SEEN / np.maximum(total, SEEN)

    def curves(self, widths: Sequence[int], survivals: NDArray[np.float64]) -> list[Curve]:
        """Returns the curve of the mean proposal of each width."""
        shares = self._seen / self._seen.sum(axis=1, keepdims=True)
        places, buckets = (shares > 1e-4).nonzero()
        shares = shares[places, buckets]
        expected = survivals[self._cells[places, buckets]]
        order = np.argsort(-expected)
        shares = shares[order]
        expected = expected[order]
        places = places[order]
        curves = []
        for width in widths:
            width_shares = np.where(places < width - 1, shares, 0.0)
            curves.append(Curve(_sums(width_shares), _sums(width_shares * expected)))
        return curves


class _Plan(NamedTuple):
    """Costs and yields of passes over a batch, by `k`, the index of a possible pass, and by `j`, the index of a width,
    which the verified proposals have or the next ones get."""

    rows: list[int]  # [k] ascending
    target_ms: list[float]  # [k] time of the target's pass
    arrays: tuple[NDArray[np.int64], NDArray[np.float64]]  # `rows` and `target_ms`
    draft_ms: list[float]  # [j] time of the draft pass
    tokens: NDArray[np.float64]  # [j, k] expected
    best: list[int]  # [j] the best k
    values: list[float]  # [j] its tokens, less those that other steps would yield in the time
    rate: float  # tokens per ms of the best step without prompts

    def ms(self, k: int, j: int) -> float:
        return self.target_ms[k] + self.draft_ms[j]


class BudgetPolicy:
    """Chooses the numbers of nodes of steps.

    `widths`: numbers of nodes that the draft network may propose, with the root, 1 included. `most_nodes`: limit for a
    request, if the host proposes more; `node_rows`: limit for all requests, if that is less than the rows of the
    largest pass. `fixed`: every request gets that many nodes instead. `itl_ms`: allows only steps that will most likely
    (95 %) take no longer, if there are any. `max_chunk_ms`: limit for steps with prompts in which requests decode.

    The caller calls `choose` once for each step, in their order, and later `record` and `observe` with the results.
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
        max_chunk_ms: float | None = None,
    ) -> None:
        self.costs = costs
        self.widths = sorted(widths)
        self.fixed = fixed
        self.most_nodes = max(most_nodes, self.widths[-1])
        self.node_rows = costs.most_rows if node_rows is None else node_rows
        self.itl_ms = itl_ms
        self.max_chunk_ms = max_chunk_ms
        self.calibration = Calibration()
        self.offers = Offers(max(2, self.widths[-1]))
        self.wait_ms = 0.0  # mean time in which the device waits for the host's proposals
        self._width = self._stored = len(self.widths) - 1  # indices: the best width; that of the stored proposals
        self._records: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]] = []  # not counted yet
        self._curves: list[Curve] = []  # by width
        self._drafted: dict[Offer, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}  # see `_nodes_of`
        self._joined: dict[tuple[Offer, ...], Curve] = {}  # see `_curve`
        self._host_rows: dict[Offer, HostRow] = {}  # see `host_row`
        self._rows_version = -1
        self._plans: dict[tuple[Batch, int, bool], _Plan] = {}
        self._chunks: dict[tuple[int, bool], int] = {}
        self._age = self._num_chosen = 0
        self._is_prepared = False  # the next step was counted
        self._probe_ms = 0.0  # time that probes may take
        self._probe = (0, 0)  # steps left, width's index
        self._probe_narrow = False  # the next one
        # Fitted costs know nothing of other widths yet.
        self._tour = [j for j in range(len(self.widths)) for _ in range(2)] if costs.is_fitted else []
        # share of steps with prompts that another one follows, lately
        self._had_prompts = False
        self._again = 0.5
        self._steps_without_host = 0  # in a row
        self._lift = np.ones(2)  # mean tokens of a step, and those that it would have to yield
        self._chosen = np.zeros(2)  # nodes and steps, decayed: for metrics

    @property
    def table(self) -> NDArray[np.float32]:
        """(CELLS,) survivals for the device; it needs them again when `version` has changed."""
        return self.calibration.table

    @property
    def version(self) -> int:
        return self.calibration.version

    def host_row(self, offer: Offer) -> HostRow:
        """Returns the cells and, by `table`, the survivals of such a host proposal. No node is likelier than those
        before it."""
        if self._rows_version != self.version:
            self._host_rows.clear()
            self._rows_version = self.version
        if offer not in self._host_rows:
            cells = host_cells(*offer)
            survivals = np.ones(len(cells), np.float32)
            survivals[1:] = np.minimum.accumulate(self.table[cells[1:]])
            self._host_rows[offer] = HostRow(cells, survivals.view(np.int32))
        return self._host_rows[offer]

    @property
    def width(self) -> int:
        """The best width lately."""
        return self.widths[self._width] if self.fixed is None else min(self.fixed, self.widths[-1])

    @property
    def waiting_pays(self) -> bool:
        """Whether steps should wait for proposals of the host: not after PATIENCE steps in a row where none paid,
        until `look_back` sees one that would have."""
        return self._steps_without_host < PATIENCE

    def prepare(
        self, num_decoding: int, prompt_rows: int = 0, *, num_drafted: int | None = None, filtered: bool = False
    ) -> None:
        """Computes a plan for the next `choose` ahead, while the device is busy."""
        batch = Batch(num_decoding, num_decoding if num_drafted is None else num_drafted)
        if self.fixed is None and batch.drafted and not self._is_prepared:
            self._count_step()
            self._is_prepared = True
            self._plan(batch, prompt_rows, filtered)

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
        if self.fixed is not None:
            return self._choose_fixed(self.fixed, batch, prompt_rows, filtered, offers)
        if self._had_prompts:
            self._again += (1 - AGAIN_DECAY) * ((prompt_rows > 0) - self._again)
        self._had_prompts = prompt_rows > 0
        if batch.drafted == 0:
            ms = self.costs.time(num_decoding + prompt_rows, 0, self.width, filtered=filtered)
            self._stored = self._width
            return Choice(num_decoding, self.width, ms, float(num_decoding))
        self._count_step()
        plan = self._plan(batch, prompt_rows, filtered)
        self._follow(plan, self._plan(batch, 0, filtered))
        if offers is not None and any(kind for _, kind in offers):
            max_nodes = sum(count for count, _ in offers)
            k, tokens = self._weigh_host(plan, offers, prompt_rows)
        else:
            max_nodes = batch.nodes(self.widths[self._stored])
            k = plan.best[self._stored]
            tokens = plan.tokens[self._stored]
            self._steps_without_host += offers is not None
        k, j = self._explore(plan, k, max_nodes, batch, prompt_rows)
        self._stored = j
        nodes = max(min(plan.rows[k] - prompt_rows, max_nodes), num_decoding)
        self._chosen = LIFT_DECAY * self._chosen + (nodes, 1.0)
        return Choice(nodes, self.widths[j], plan.ms(k, j), float(tokens[k]))

    def record(self, cells: NDArray[np.int32], admitted: NDArray[np.int32], accepted: NDArray[np.bool_]) -> None:
        """Counts the nodes that a step verified for B requests. (B, N) cells of all stored nodes, verified or not, -1
        for roots and unused ones; (B,) numbers of verified nodes, which come first, roots included; (B, N) whether a
        node was accepted."""
        if self._records and self._records[0][0].shape[1] != cells.shape[1]:
            self._count_records()
        self._records.append((cells.copy(), admitted.copy(), accepted.copy()))
        if len(self._records) >= self._patience():
            self._count_records()

    def observe(self, *, rows: int, requests: int, width: int, ms: float, filtered: bool = False) -> None:
        """Learns that a step took `ms`: a pass over `rows` (nodes and prompts), and a draft pass for `requests`."""
        self.costs.observe(rows, requests, width, ms, filtered=filtered)

    def chunk_rows(self, num_decoding: int, *, filtered: bool = False) -> int:
        """Returns the most rows of prompts that the next step should take; it verifies as many nodes as without
        prompts."""
        key = (num_decoding, filtered)
        if key not in self._chunks:
            self._chunks[key] = self._chunk_rows(num_decoding, filtered)
        return self._chunks[key]

    def waited(self, ms: float) -> None:
        """Learns how long the device waited for the host before a step."""
        self.wait_ms += (1 - WAIT_DECAY) * (ms - self.wait_ms)

    def look_back(self, offers: Sequence[Offer], *, filtered: bool = False) -> None:
        """Learns that a step was launched without waiting for these proposals. Forgets the time of waits slowly, since
        it changes with the load and is measured only where steps wait."""
        self.wait_ms *= FORGET_WAIT
        if offers and any(kind for _, kind in offers):
            plan = self._plan(Batch(len(offers), len(offers)), 0, filtered)
            _, tokens = self._expect(plan, offers, 0)
            if self._pays(plan, tokens):
                self._steps_without_host = 0

    def metrics(self) -> dict[str, float]:
        nodes, steps = self._chosen
        return {
            "step_time_error": self.costs.error(),
            "step_time_p95_ratio": self.costs.p95(),
            "draft_width": float(self.width),
            "nodes_per_step": float(nodes / steps) if steps else 0.0,
        }

    def _choose_fixed(
        self, fixed: int, batch: Batch, prompt_rows: int, filtered: bool, offers: Sequence[Offer] | None
    ) -> Choice:
        width = min(fixed, self.widths[-1])  # more come from the host
        nodes = batch.nodes(width) if offers is None else sum(min(count, fixed) for count, _ in offers)
        nodes = min(nodes, max(min(self.costs.most_rows - prompt_rows, self.node_rows), batch.decoding))
        if offers is not None and batch.drafted:
            self._count_step()
            if any(kind for _, kind in offers):
                self._weigh_host(self._plan(batch, prompt_rows, filtered), offers, prompt_rows)
            else:
                self._steps_without_host += 1
        if batch.decoding:
            self._chosen = LIFT_DECAY * self._chosen + (nodes, 1.0)
        return Choice(nodes, width, self.costs.time(nodes + prompt_rows, batch.drafted, width, filtered=filtered))

    def _patience(self) -> int:
        """Returns the number of steps for which plans are reused and records wait; few at the beginning."""
        return min(RECOMPUTE, 1 + self._num_chosen // RECOMPUTE)

    def _count_step(self) -> None:
        """Counts the step, unless `prepare` has done so; drops old plans."""
        if self._is_prepared:
            self._is_prepared = False
            return
        self._age += 1
        self._num_chosen += 1
        if self._age >= self._patience():
            self._age = 0
            for computed in (self._plans, self._chunks, self._curves, self._drafted, self._joined):
                computed.clear()

    def _count_records(self) -> None:
        """Counts several steps at once, since that takes little longer than one."""
        if not self._records:
            return
        cells, admitted, accepted = (np.concatenate(parts) for parts in zip(*self._records, strict=True))
        tried = (np.arange(cells.shape[1]) < admitted[:, None]) & (cells >= 0)
        self.calibration.record(cells[tried], accepted[tried], len(self._records))
        self.offers.record(cells)
        self._records.clear()

    def _plan(self, batch: Batch, prompt_rows: int, filtered: bool) -> _Plan:
        key = (batch, prompt_rows, filtered)
        if key not in self._plans:
            rate = self._plan(batch, 0, filtered).rate if prompt_rows else None
            self._plans[key] = self._solve(batch, prompt_rows, filtered, rate)
        return self._plans[key]

    def _solve(self, batch: Batch, prompt_rows: int, filtered: bool, rate: float | None) -> _Plan:
        if not self._curves:
            self._curves = self.offers.curves(self.widths, self.calibration.survivals)
        max_nodes = max(min(batch.nodes(self.most_nodes), self.node_rows), batch.decoding)
        rows = self._passes(batch.decoding + prompt_rows, max_nodes + prompt_rows)
        target = self.costs.targets(rows, filtered=filtered)
        draft = [self.costs.draft(batch.drafted, width, filtered=filtered) for width in self.widths]
        drafted = np.maximum(rows - prompt_rows - batch.decoding, 0) / batch.drafted
        tokens = batch.decoding + batch.drafted * np.array([np.interp(drafted, *curve) for curve in self._curves])
        ms = target + np.array(draft)[:, None]
        allowed = self._allowed(ms)
        if rate is None:
            rate = float(np.where(allowed, tokens / ms, 0.0).max())
        values = np.where(allowed, tokens - rate * ms, -np.inf)
        best = values.argmax(axis=1)
        # A width without an allowed step still needs a number of nodes, as long as its proposals are stored.
        best = np.where(allowed.any(axis=1), best, ms.argmin(axis=1))
        highest = np.take_along_axis(values, best[:, None], axis=1)[:, 0]
        return _Plan(
            rows=rows.tolist(),
            target_ms=target.tolist(),
            arrays=(rows, target),
            draft_ms=draft,
            tokens=tokens,
            best=best.tolist(),
            values=highest.tolist(),
            rate=rate,
        )

    def _passes(self, min_rows: int, max_rows: int) -> NDArray[np.int64]:
        """Returns the rows of the passes that take at least `min_rows` rows, up to the first that takes `max_rows`."""
        sizes = self.costs.sizes
        if sizes is None:
            return np.arange(min_rows, max(min(max_rows, self.costs.most_rows), min_rows) + 1)
        passes = sizes[bisect_left(sizes, min_rows) : bisect_left(sizes, max_rows) + 1]
        return np.array(passes or (min_rows,))

    def _allowed(self, ms: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Returns which steps the objective allows; if none, the fastest."""
        if self.itl_ms is None:
            return np.ones(ms.shape, bool)
        allowed = ms * self.costs.p95() <= self.itl_ms
        return allowed if allowed.any() else ms == ms.min()

    def _follow(self, plan: _Plan, alone: _Plan) -> None:
        """Moves to the best width for the next step if it is better enough than the present one. That step has prompts
        like this one, or none (`alone`)."""
        values = plan.values
        if plan is not alone:
            pairs = zip(plan.values, alone.values, strict=True)
            values = [self._again * value + (1 - self._again) * other for value, other in pairs]
        j = max(range(len(values)), key=values.__getitem__)
        now = self._width
        if values[j] - values[now] > HYSTERESIS * plan.rate * alone.ms(alone.best[now], now):
            self._width = j

    def _explore(self, plan: _Plan, k: int, max_nodes: int, batch: Batch, prompt_rows: int) -> tuple[int, int]:
        """Returns the indices of the pass and of the width to draft: `k` and the best width, or now and then others.
        `max_nodes`: stored nodes."""
        last = min(bisect_left(plan.rows, max_nodes + prompt_rows), len(plan.rows) - 1)
        if self._tour and not prompt_rows:
            return last, self._tour.pop()
        k = min(k, last)
        steps, j = self._probe
        if steps == 0:
            self._start_probe(plan, k, batch)
            return k, self._width
        self._probe = (steps - 1, j)
        if j < self._width:
            return k, j
        drafts_on = steps > 1 or not self.costs.is_fitted
        return min(_one_more(plan.rows, k, batch.drafted), last), j if drafts_on else self._width

    def _start_probe(self, plan: _Plan, k: int, batch: Batch) -> None:
        """Makes the next steps a probe if their time may be spent: the next wider proposals, and one more node per
        request. Where costs are fitted, every other probe is narrower, since the times of such steps may be wrong."""
        now = self._width
        base = plan.ms(k, now)
        is_fitted = self.costs.is_fitted
        share = FITTED_PROBE_SHARE if is_fitted else PROBE_SHARE
        self._probe_ms += share * base
        narrow = self._probe_narrow and now > 0
        if narrow:
            j = now - 1
            extra = (plan.values[now] - plan.values[now - 1]) / plan.rate
        else:
            j = min(now + 1, len(self.widths) - 1)
            more = _one_more(plan.rows, k, batch.drafted)
            if (more, j) == (k, now):  # there is nothing more
                self._probe_narrow = is_fitted
                return
            ms = plan.ms(more, j)
            extra = ms - base
            if self.itl_ms is not None and ms * self.costs.p95() > self.itl_ms:
                return
        if self._probe_ms >= (PROBE_STEPS - is_fitted) * max(extra, share * base):
            self._probe = (PROBE_STEPS, j)
            self._probe_ms = 0.0
            self._probe_narrow = is_fitted and not narrow

    def _weigh_host(self, plan: _Plan, offers: Sequence[Offer], prompt_rows: int) -> tuple[int, NDArray[np.float64]]:
        """Returns the best pass for these offers, and the tokens by pass; notes whether waiting for the host paid."""
        k, tokens = self._expect(plan, offers, prompt_rows)
        self._steps_without_host = 0 if self._pays(plan, tokens) else self._steps_without_host + 1
        if not prompt_rows:
            ms = plan.ms(k, self._width) + self.wait_ms
            self._lift = LIFT_DECAY * self._lift + (1 - LIFT_DECAY) * np.array((tokens[k], plan.rate * ms))
        return k, tokens

    def _expect(self, plan: _Plan, offers: Sequence[Offer], prompt_rows: int) -> tuple[int, NDArray[np.float64]]:
        """Returns the best pass for these offers, and the tokens that they yield, by pass."""
        rows, target = plan.arrays
        tokens = len(offers) + np.interp(rows - (prompt_rows + len(offers)), *self._curve(offers))
        total = sum(count for count, _ in offers)
        if total + prompt_rows <= self._free_rows(plan):
            return min(bisect_left(plan.rows, total + prompt_rows), len(plan.rows) - 1), tokens
        values = tokens - self._host_rate(plan) * target
        if self.itl_ms is not None:
            values[~self._allowed(target + plan.draft_ms[self._width])] = -np.inf
        return int(values.argmax()), tokens

    def _curve(self, offers: Sequence[Offer]) -> Curve:
        """Returns the curve of the likeliest nodes of all these offers together."""
        key = tuple(sorted(offers))
        if key not in self._joined:
            numbers = Counter(key)
            parts = [self._nodes_of(offer) for offer in numbers]
            shares = np.concatenate(
                [number * counts for number, (counts, _) in zip(numbers.values(), parts, strict=True)]
            )
            survivals = np.concatenate([part for _, part in parts])
            order = np.argsort(-survivals)
            self._joined[key] = Curve(_sums(shares[order]), _sums((shares * survivals)[order]))
        return self._joined[key]

    def _nodes_of(self, offer: Offer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns (n,) numbers of nodes in such a proposal, and (n,) their survivals."""
        if offer not in self._drafted:
            count, kind = offer
            survivals = self.calibration.survivals
            if kind == 0:
                curve = self.offers.curves([count], survivals)[0]
                shares = np.diff(curve.nodes)
                self._drafted[offer] = shares, np.diff(curve.tokens) / np.maximum(shares, 1e-9)
            else:
                survivals = np.minimum.accumulate(survivals[host_cells(count, kind)[1:]])
                self._drafted[offer] = np.ones(count - 1), survivals
        return self._drafted[offer]

    def _pays(self, plan: _Plan, tokens: NDArray[np.float64]) -> bool:
        """Whether passes that yield `tokens`, by index, are worth a wait for the host."""
        rate = self._host_rate(plan)
        target = plan.arrays[1]
        gained = (tokens - rate * target).max() - (plan.tokens[self._stored] - rate * target).max()
        return bool(gained > rate * self.wait_ms)

    def _host_rate(self, plan: _Plan) -> float:
        """Returns tokens per ms without prompts, with the average gain from the host's proposals."""
        tokens, expected = self._lift
        return plan.rate * max(tokens / expected, 1.0)

    def _free_rows(self, plan: _Plan) -> int:
        """Returns the rows up to which a pass takes no longer than over the roots alone."""
        k = bisect_left(plan.target_ms, FREE * plan.target_ms[0])
        return plan.rows[max(k - 1, 0)]

    def _chunk_rows(self, num_decoding: int, filtered: bool) -> int:
        most_rows = self.costs.most_rows
        if num_decoding == 0:
            return most_rows
        most_nodes = max(most_rows - LEAST_CHUNK, num_decoding)  # prompts do not wait for others to end
        if self.fixed is not None:
            nodes = min(num_decoding * self.fixed, most_nodes)
            ms = self.costs.time(nodes, num_decoding, self.fixed, filtered=filtered)
            draft = self.costs.draft(num_decoding, self.fixed, filtered=filtered)
        else:
            plan = self._plan(Batch(num_decoding, num_decoding), 0, filtered)
            k = plan.best[self._width]
            nodes = min(plan.rows[k], num_decoding * self.width, most_nodes)
            ms = plan.ms(k, self._width)
            draft = plan.draft_ms[self._width]
        limit = max(2 * ms, LEAST_CHUNK_MS) if self.max_chunk_ms is None else self.max_chunk_ms
        if self.itl_ms is not None:
            limit = min(limit, self.itl_ms / self.costs.p95())
        rows = self._passes(nodes, most_rows) if self.costs.sizes else np.arange(nodes, most_rows + 1, 16)
        fits = rows[self.costs.targets(rows, filtered=filtered) + draft <= limit]
        min_rows = self.costs.round_up(nodes + LEAST_CHUNK)
        return max(min(max(int(fits.max(initial=0)), min_rows), most_rows) - nodes, 0)


def host_cells(count: int, kind: int) -> NDArray[np.int32]:
    """Returns (count,) cells of the nodes of a host proposal of a kind >= 1; -1 for its root."""
    cells = NETWORK_CELLS + min(kind, KINDS - 1) * PLACES + np.minimum(np.arange(count), PLACES) - 1
    cells[0] = -1
    return cells.astype(np.int32)


def is_forced(cells: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether nodes of these cells are tokens that a grammar forced."""
    return cells >= NETWORK_CELLS + FORCED * PLACES


def _by_place(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turns sums by cell, (n, CELLS), into sums by place, (n, PLACES + KINDS * PLACES)."""
    network = values[:, :NETWORK_CELLS].reshape(len(values), PLACES, BUCKETS).sum(axis=2)
    return np.concatenate((network, values[:, NETWORK_CELLS:]), axis=1)


def _network_prior() -> NDArray[np.float64]:
    """Returns (NETWORK_CELLS,) the draft's probability, in the middle of each bucket."""
    return np.tile((np.arange(BUCKETS) + 0.5) / BUCKETS, PLACES)


def _host_prior() -> NDArray[np.float64]:
    """Returns (KINDS * PLACES,): each node follows the one before with one probability, higher for surer kinds."""
    places = np.arange(1, PLACES + 1)
    kinds = np.arange(KINDS)
    return ((1 - 0.5 ** np.maximum(kinds, 1))[:, None] ** places).ravel()


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns (n + 1,) sums of the first 0, 1, ... n values."""
    return np.concatenate(((0.0,), np.cumsum(values)))


def _one_more(rows: Sequence[int], k: int, num_drafted: int) -> int:
    """Returns the index of the pass with one more node per request than pass `k`."""
    return min(bisect_left(rows, rows[k] + num_drafted), len(rows) - 1)
