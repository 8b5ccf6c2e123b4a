"""The numbers of nodes that steps verify and draft: against the best fixed ones, in a simulated engine."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from slipstream.models.files.cost_tables import CostTables
from slipstream.serve.engine.acceptance import host_bins
from slipstream.serve.engine.budget import BudgetPolicy, Choice
from slipstream.serve.engine.step_costs import FittedCosts, StepCosts
from slipstream.tests.pairwise import gate_of, some_of

WIDTHS = (1, 2, 4, 8)
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)


def target_ms(rows: int) -> float:
    """A memory-bound pass that turns compute-bound beyond 128 rows."""
    return max(4.0, 4.0 * rows / 128) + 0.002 * rows


def draft_ms(requests: int, width: int) -> float:
    return 0.3 + (width - 1) * (0.25 + 0.002 * requests) if width > 1 else 0.1


TARGETS = {rows: target_ms(rows) for rows in SIZES}
DRAFTS = {(requests, width): draft_ms(requests, width) for requests in REQUESTS for width in WIDTHS}


def costs(filtered: float = 1.0) -> StepCosts:
    slow = {rows: filtered * ms for rows, ms in TARGETS.items()}
    return StepCosts(CostTables({"plain": TARGETS, "all": slow}, {"plain": DRAFTS, "all": DRAFTS}))


def cpu_ms(rows: int, requests: int, width: int) -> float:
    return 3 + 0.4 * rows + requests * (0.1 + 0.15 * (width - 1)) + 0.8 * (width > 1)


def gpu_ms(rows: int, requests: int, width: int) -> float:
    return target_ms(next(size for size in SIZES if size >= rows)) + draft_ms(requests, width)


class World:
    """Chains of drafts with probability q each by the draft, and q ** power by the target."""

    def __init__(self, power: float, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.power = power

    def propose(self, batch: int, width: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """(B, N) bins, and probabilities that nodes are accepted."""
        return self.nodes(self.rng.beta(3, 1, (batch, width - 1)))

    def nodes(self, drafted: NDArray[np.float64]) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The same of drafts (B, N - 1) that are accepted with these probabilities."""
        batch, count = drafted.shape
        paths = np.cumprod(drafted, axis=1)
        bins = np.full((batch, 1 + count), -1, np.int32)
        bins[:, 1:] = 16 * np.arange(count) + np.minimum((16 * paths).astype(int), 15)
        return bins, np.concatenate((np.ones((batch, 1)), paths**self.power), axis=1)


def admit(bins: NDArray[np.int32], table: NDArray[np.float32], budget: int) -> NDArray[np.int32]:
    """(B,) nodes of each request: the root, and the likeliest of all others."""
    probabilities = np.ones(bins.shape, np.float32)
    probabilities[:, 1:] = np.where(bins[:, 1:] < 0, 0, table[bins[:, 1:]])
    probabilities = np.minimum.accumulate(probabilities, axis=1)
    probabilities[:, 0] = 2
    mask = np.zeros(bins.size, bool)
    mask[np.argsort(-probabilities.ravel(), kind="stable")[: max(budget, len(bins))]] = True
    return np.minimum.accumulate(mask.reshape(bins.shape), axis=1).sum(axis=1).astype(np.int32)


class Simulation:
    def __init__(self, policy: BudgetPolicy, world: World, batch: int, *, step_ms: Callable[..., float] = gpu_ms):
        self.policy = policy
        self.world = world
        self.batch = batch
        self.step_ms = step_ms
        self.bins, self.probabilities = world.propose(batch, WIDTHS[-1])
        self.nodes: list[int] = []
        self.widths: list[int] = []
        self.noise = 0.0

    def run(self, num_steps: int, choose: Callable[[], tuple[int, int]] | None = None) -> float:
        """Tokens per ms: expected ones, which vary less than those of a run. The policy learns from its choices."""
        tokens = ms = 0.0
        for _ in range(num_steps):
            choice = Choice(*choose()) if choose else self.policy.choose(self.batch)
            nodes, width = choice[:2]
            assert self.batch <= nodes <= self.bins.size
            admitted = admit(self.bins, self.policy.acceptance.table, nodes)
            verified = np.arange(self.bins.shape[1]) < admitted[:, None]
            accepted = verified & (self.world.rng.random((self.batch, 1)) < self.probabilities)
            tokens += self.probabilities[verified].sum()
            noise = self.noise * abs(self.world.rng.standard_normal())
            step = self.step_ms(nodes, self.batch, width) * (1 + noise)
            ms += step
            if choose is None:
                self.policy.record(range(self.batch), self.bins, admitted, accepted)
                self.policy.costs.observe(nodes, self.batch, width, step, filtered=False)
            self.bins, self.probabilities = self.world.propose(self.batch, width)
            self.nodes.append(nodes)
            self.widths.append(width)
        return tokens / ms

    def best(self, num_steps: int, numbers: Sequence[int] = SIZES) -> float:
        """The rate of the best fixed numbers of nodes, with what the policy has learnt."""
        rates = []
        for width in WIDTHS:
            limit = self.batch * width
            for nodes in sorted({min(size, limit) for size in numbers if size >= self.batch}):
                self.bins, self.probabilities = self.world.propose(self.batch, width)
                rates.append(self.run(num_steps, lambda nodes=nodes, width=width: (nodes, width)))
        return max(rates)


@pytest.mark.parametrize(
    ("batch", "power"), gate_of(product([5, 64, 16, 128, 1], [1.0, 30.0, 3.0, 0.3]), [(64, 1.0), (16, 30.0), (1, 0.3)])
)
def test_it_is_close_to_the_best_fixed_numbers(batch, power):
    simulation = Simulation(BudgetPolicy(costs(), WIDTHS), World(power), batch)
    simulation.run(300)
    rate = simulation.run(500)
    assert rate > 0.98 * simulation.best(max(40, 1000 // batch))
    without = batch / gpu_ms(batch, batch, 1)
    assert rate > 0.98 * without


class Branching(World):
    """Proposals of 8 nodes are trees, whose best nodes are mostly surer than those of chains."""

    def __init__(self, power: float, *, chains: float = 1.0):
        super().__init__(power)
        self.chains = chains

    def propose(self, batch: int, width: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        return self.nodes(self.rng.beta(3, 1, (batch, width - 1)) ** (0.4 if width == 8 else self.chains))


def simulate_trees(world: World, batch: int, policy: BudgetPolicy | None = None) -> Simulation:
    """Proposals of 8 nodes take the draft twice as long."""
    draft = {(requests, width): draft_ms(requests, width) * (2 if width == 8 else 1) for requests, width in DRAFTS}
    tables = CostTables({"plain": TARGETS, "all": TARGETS}, {"plain": draft, "all": draft})

    def step_ms(rows: int, requests: int, width: int) -> float:
        return gpu_ms(rows, requests, 1) - draft[requests, 1] + draft[requests, width]

    policy = policy or BudgetPolicy(StepCosts(tables), WIDTHS, chain_nodes=4)
    return Simulation(policy, world, batch, step_ms=step_ms)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_trees_are_not_judged_by_chains(batch: int) -> None:
    """Trees pay here; a policy that counts chains as their beginnings yields .88 of them."""
    simulation = simulate_trees(Branching(1.6), batch)
    simulation.run(300)
    rate = simulation.run(500)
    assert rate > 0.98 * simulation.best(max(40, 1000 // batch))
    assert simulation.widths.count(8) > 400


@pytest.mark.parametrize("batch", [4, 16])
def test_chains_are_found_again_while_trees_are_drafted(batch: int) -> None:
    """Trees tell nothing of chains; a policy that tries only wider proposals yields .72 of chains that got better."""
    simulation = simulate_trees(Branching(1.6, chains=4.0), batch)
    simulation.run(300)
    assert simulation.widths.count(8) > 270
    simulation.world = Branching(1.6, chains=0.1)
    simulation.run(300)
    rate = simulation.run(300)
    assert simulation.widths[-300:].count(8) < 10
    assert rate > 0.98 * simulation.best(40)


@pytest.mark.parametrize(("batch", "power"), [(1, 30.0), (4, 100.0), (64, 30.0)])
def test_useless_drafts_cost_little_from_the_beginning(batch, power):
    rate = Simulation(BudgetPolicy(costs(), WIDTHS), World(power, seed=1), batch).run(1500)
    assert rate > 0.98 * batch / gpu_ms(batch, batch, 1)


@pytest.mark.parametrize("batch", [2, 16])
def test_it_comes_back_when_drafts_are_accepted_again(batch):
    simulation = Simulation(BudgetPolicy(costs(), WIDTHS), World(100.0), batch)
    simulation.run(600)
    assert simulation.widths[-100:].count(1) > 60
    simulation.world.power = 0.3
    simulation.run(300)
    assert simulation.widths[-50:].count(8) > 40
    simulation.world.power = 100.0
    simulation.run(400)
    assert simulation.widths[-100:].count(1) > 60


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_draft_that_turns_useless_soon_costs_nothing(batch):
    simulation = Simulation(BudgetPolicy(costs(), WIDTHS), World(0.5), batch)
    simulation.run(600)
    assert min(simulation.widths[-50:]) > 1
    simulation.world.power = np.inf
    plain = batch / gpu_ms(batch, batch, 1)
    assert 1.1 * simulation.run(200) > plain
    assert 1.03 * simulation.run(200) > plain


def test_another_request_gets_drafts_at_once():
    """One request at a time, its drafts good or useless: what is learnt of one does not hold for the next."""
    simulation = Simulation(BudgetPolicy(costs(), WIDTHS), World(0.3), 1)
    rates = []
    for turn in range(20):
        simulation.policy.admit(0)
        simulation.world.power = np.inf if turn % 2 else 0.3
        simulation.run(40)
        rates.append(simulation.run(60) * gpu_ms(1, 1, 1))
    assert np.mean(rates[10::2]) > 3.5, "tokens for the time of one without a draft"
    assert np.mean(rates[11::2]) > 0.9


def test_a_batch_is_not_judged_by_the_request_before():
    policy = BudgetPolicy(costs(), WIDTHS)
    policy.admit(0)
    Simulation(policy, World(30.0), 1).run(200)
    for slot in range(8):
        policy.admit(slot)
    simulation = Simulation(policy, World(0.3), 8)
    early = simulation.run(40)
    assert early > 0.85 * simulation.run(40)


def test_regret_to_the_best_fixed_width_of_each_request_in_hindsight():
    """One request at a time, whose drafts are accepted more or less often from the middle of its answer on."""
    simulation = Simulation(BudgetPolicy(costs(), WIDTHS), World(1.0), 1)
    world = simulation.world
    regrets = []
    for _ in range(40):
        simulation.policy.admit(0)
        tokens = np.zeros(len(WIDTHS) + 1)  # in 100 steps of each width, and those of the policy
        ms = 0.0
        for power in np.exp(world.rng.normal(0, 1.5, 2)):
            world.power = power
            rate = simulation.run(100)
            spent = sum(map(gpu_ms, simulation.nodes[-100:], [1] * 100, simulation.widths[-100:]))
            _, paths = world.propose(4000, WIDTHS[-1])
            means = paths.mean(axis=0).cumsum()
            tokens += (*(100 * means[width - 1] for width in WIDTHS), rate * spent)
            ms += spent
        best = max(count / (200 * gpu_ms(width, 1, width)) for count, width in zip(tokens, WIDTHS, strict=False))
        regrets.append(best / (tokens[-1] / ms) - 1)
    assert np.mean(regrets) < 0.03


def test_probes_cost_what_they_may():
    """Where no draft pays, probes take all time beyond that of the roots."""
    simulation = Simulation(BudgetPolicy(costs(), WIDTHS), World(1.0), 128)
    simulation.run(200)
    start = len(simulation.nodes)
    simulation.run(3000)
    base = gpu_ms(128, 128, 1)
    choices = zip(simulation.nodes[start:], simulation.widths[start:], strict=True)
    spent = [gpu_ms(nodes, 128, width) - base for nodes, width in choices]
    assert 0.3 * 0.005 < sum(spent) / (3000 * base) < 1.3 * 0.005, "half a per cent"


@pytest.mark.parametrize("batch", some_of([2, 16], [16]))
def test_a_draft_that_does_not_pay_costs_little_where_times_are_fitted(batch):
    """And it is taken up as soon as it pays."""
    simulation = Simulation(BudgetPolicy(FittedCosts(1024), WIDTHS), World(100.0), batch, step_ms=cpu_ms)
    rate = simulation.run(4000)
    assert rate > 0.985 * batch / cpu_ms(batch, batch, 1)
    simulation.world.power = 0.1
    simulation.run(1500)
    assert simulation.widths[-50:].count(1) < 10


@pytest.mark.parametrize(("batch", "power"), [(2, 1.0), (16, 3.0)])
def test_fitted_costs_lead_to_the_best_numbers_too(batch, power):
    simulation = Simulation(BudgetPolicy(FittedCosts(1024), WIDTHS), World(power), batch, step_ms=cpu_ms)
    simulation.noise = 0.1
    simulation.run(300)
    rate = simulation.run(400)
    assert set(simulation.widths[:8]) == set(WIDTHS), "at first it measures every width"
    numbers = [batch + batch * (width - 1) * quarter // 4 for width in WIDTHS for quarter in (0, 2, 4)]
    assert rate > 0.96 * simulation.best(max(60, 800 // batch), sorted(set(numbers)))


def experts_ms(rows: int, requests: int, width: int, *, overlap: float) -> float:
    """A step of Qwen3-30B-A3B by its bytes: 128 experts a layer, 8 a token. `overlap`: how much less than independent
    tokens the ones after the first hit new experts; text does so, the random tokens of start-up do not."""
    size = next(size for size in SIZES if size >= rows)
    hit = 1 - (1 - 8 / 128) ** (1 + (1 - overlap) * (size - 1))
    return 0.9 + 0.108 * 128 * hit + max(0.0, 0.01 * (size - 128)) + draft_ms(requests, width) / 2


def expert_costs(overlap: float, factor: float = 1.0) -> StepCosts:
    target = {rows: factor * (experts_ms(rows, 1, 1, overlap=overlap) - draft_ms(1, 1) / 2) for rows in SIZES}
    draft = {(requests, width): draft_ms(requests, width) / 2 for requests in REQUESTS for width in WIDTHS}
    return StepCosts(CostTables({"plain": target, "all": target}, {"plain": draft, "all": draft}))


@pytest.mark.parametrize(
    ("batch", "power", "measured"),
    gate_of(product([1, 4, 32], [1.0, 3.0, 0.5], [(0.0, 1.0), (0.4, 1.3)]), [(4, 0.5, (0.0, 1.0))]),
)
def test_times_of_random_tokens_lead_to_the_budgets_of_real_text(batch, power, measured):
    """A step of text reads fewer experts than start-up `measured`, or is faster by a factor: that is learnt from its
    times."""

    def step_ms(rows, requests, width):
        return experts_ms(rows, requests, width, overlap=0.4)

    rates = []
    nodes = []
    for costs in (expert_costs(*measured), expert_costs(0.4)):
        simulation = Simulation(BudgetPolicy(costs, WIDTHS), World(power), batch, step_ms=step_ms)
        simulation.run(2000)
        rates.append(simulation.run(1000))
        nodes.append(float(np.mean(simulation.nodes[2000:])) / batch)
    assert rates[0] > 0.98 * rates[1]
    assert abs(nodes[0] - nodes[1]) < 1


def learnt(power: float = 1.0, batch: int = 64, **options: float) -> BudgetPolicy:
    policy = BudgetPolicy(costs(), WIDTHS, **options)
    Simulation(policy, World(power), batch).run(200)
    return policy


def settled(policy: BudgetPolicy, batch: int, prompt_rows: int = 0) -> Choice:
    """The choice of most steps: the others are probes."""
    choices = [policy.choose(batch, prompt_rows) for _ in range(21)]
    return max(choices, key=lambda choice: [other[:2] for other in choices].count(choice[:2]))


def test_what_is_prepared_is_not_computed_again(monkeypatch):
    """Nor does it change a choice."""
    plain = learnt(batch=16)
    prepared = learnt(batch=16)
    targets = prepared.costs.targets
    for step in range(40):
        prompt_rows = 100 * (step % 3 == 0)
        filtered = step % 2 == 0
        options = {"prompt_rows": prompt_rows, "num_drafted": 9, "filtered": filtered}
        monkeypatch.setattr(prepared.costs, "targets", targets)
        prepared.prepare(16, **options)
        prepared.prepare(16, **options)  # a second time changes nothing
        monkeypatch.setattr(prepared.costs, "targets", None)
        offers = [(8, 4)] * 7 + [(1, 0)] * 9 if step % 5 == 0 else None
        assert prepared.choose(16, **options, offers=offers) == plain.choose(16, **options, offers=offers)


def test_nodes_fill_what_prompts_leave():
    """Rows that a pass has anyway are not left empty."""
    policy = learnt(power=0.3)
    assert settled(policy, 64, 30).nodes == 128 - 30
    assert settled(policy, 2, 3).nodes == 16, "free: all that two requests have"


def test_nothing_is_drafted_where_prompts_leave_no_room():
    """Unless the next step has none: a pass of 480 rows is bound by compute."""
    policy = learnt()
    for _ in range(20):
        policy.choose(64)
        assert policy.choose(64, 440).width > 1
    for _ in range(20):
        policy.choose(64, 440)
    assert settled(policy, 64, 440)[:2] == (64, 1)
    policy.choose(64)
    assert settled(policy, 64).nodes == 128, "it drafts again"


def mean_tokens(policy: BudgetPolicy, width: int, drafts: float) -> float:
    """Returns the expected tokens of a mean proposal whose likeliest `drafts` nodes are verified after its root."""
    probabilities = np.minimum(policy.ratio * policy.acceptance.probabilities, 0.98)
    (curve,) = policy.proposals.curves([width], probabilities)
    return 1 + float(np.interp(drafts, *curve))


def test_nodes_beside_prompts_pay_as_much_as_elsewhere():
    """By hand: no other number of nodes is worth more of the time, at the rate of steps without prompts."""
    policy = learnt()
    alone = settled(policy, 64)
    for prompt_rows in (0, 7, 100, 300):
        choice = settled(policy, 64, prompt_rows)

        def value(nodes, prompt_rows=prompt_rows, width=choice.width):
            tokens = 64 * mean_tokens(policy, width, nodes / 64 - 1)
            return tokens - alone.tokens / alone.ms * policy.costs.target(nodes + prompt_rows, filtered=False)

        best = max(value(nodes) for nodes in range(64, 64 * choice.width + 1))
        assert value(choice.nodes) == pytest.approx(best)


def test_requests_without_drafts_take_a_row_each_and_no_more():
    """By hand: a step has as many nodes as pay for those that draft; without any, one for each request."""
    policy = learnt()
    settled(policy, 64)  # by all that it has learnt
    for num_drafted in (1, 16, 64):
        stored = policy.choose(64, num_drafted=num_drafted).width
        for _ in range(40):
            choice = policy.choose(64, num_drafted=num_drafted)
            assert 64 <= choice.nodes <= 64 + num_drafted * (stored - 1)
            drafts = (choice.nodes - 64) / num_drafted
            assert choice.tokens == pytest.approx(64 + num_drafted * (mean_tokens(policy, stored, drafts) - 1))
            stored = choice.width
    assert policy.choose(64, num_drafted=0).nodes == 64
    assert policy.choose(64, 100, num_drafted=0).nodes == 64
    host = policy.choose(3, num_drafted=1, offers=[(1, 0), (16, 12), (1, 0)])
    assert 3 <= host.nodes <= 18


def test_filtered_steps_have_times_of_their_own():
    policy = BudgetPolicy(costs(filtered=3.0), WIDTHS)
    plain = policy.choose(8)
    filtered = policy.choose(8, filtered=True)
    assert filtered.ms > 2 * plain.ms


def test_a_wider_proposal_is_verified_one_step_later():
    policy = learnt(power=100.0, batch=16)
    assert policy.width == 1
    before = settled(policy, 16)
    assert before.nodes == 16
    simulation = Simulation(policy, World(0.3), 16)
    simulation.bins, simulation.probabilities = simulation.world.propose(16, policy.choose(16).width)
    simulation.run(300)  # checks that no step verifies more than is stored
    assert policy.width == 8


def test_fixed_widths():
    policy = BudgetPolicy(costs(), WIDTHS, fixed=4)
    assert policy.choose(10)[:2] == (40, 4)
    assert policy.choose(100, 700)[:2] == (324, 4), "the largest pass"
    assert policy.choose(10, num_drafted=3)[:2] == (19, 4)
    assert policy.choose(10, num_drafted=0).nodes == 10
    assert policy.choose(10, offers=[(16, 2)] * 5 + [(2, 0)] * 5)[:2] == (30, 4)
    host_only = BudgetPolicy(costs(), (1,), fixed=8)
    assert host_only.choose(2, offers=[(16, 3), (1, 0)])[:2] == (9, 1)


def test_no_drafter_leaves_one_choice():
    policy = BudgetPolicy(costs(), (1,))
    for _ in range(50):
        assert policy.choose(5)[:2] == (5, 1)
        policy.record(range(5), np.full((5, 1), -1, np.int32), np.ones(5, np.int32), np.ones((5, 1), bool))
    assert policy.choose(0, 100)[:2] == (0, 1)
    assert policy.choose(2000)[:2] == (2000, 1), "larger than any that was measured"


def test_a_latency_bounds_steps():
    policy = learnt(itl_ms=4.9)
    assert all(policy.choose(batch).ms <= 4.9 for batch in (1, 16, 64) for _ in range(20))
    assert settled(policy, 64, 32).ms <= 4.9
    assert settled(policy, 64, 200)[:2] == (64, 1), "none is fast enough: the fastest"
    assert learnt(itl_ms=1000.0).choose(64).nodes > 64


def test_a_latency_is_kept_by_nearly_all_steps():
    """Steps take up to a third longer than expected; one in ten."""
    steps = costs()
    policy = BudgetPolicy(costs(), WIDTHS, itl_ms=6.0)
    policy.costs = steps
    for step in range(300):
        policy.costs.observe(16, 4, 2, 4.68 * (1.33 if step % 10 == 0 else 1.0), filtered=False)
    assert all(1.2 * policy.choose(4).ms < 6.0 for _ in range(100))


def test_chunks_keep_streams_flowing():
    policy = learnt()
    steps = costs()
    nodes = settled(policy, 64).nodes
    rows = policy.chunk_rows(64)
    assert nodes + rows in SIZES
    assert steps.target(nodes + rows, filtered=False) <= 30.0
    assert policy.chunk_rows(0) == SIZES[-1]
    tight = BudgetPolicy(costs(filtered=1.4), WIDTHS, fixed=1, itl_ms=6.0)
    assert 64 <= tight.chunk_rows(32) <= 192 - 32
    assert tight.chunk_rows(32, filtered=True) < tight.chunk_rows(32)
    assert BudgetPolicy(costs(), WIDTHS, fixed=1, itl_ms=0.1).chunk_rows(32) == 96 - 32, "the least"
    fixed = BudgetPolicy(costs(), WIDTHS, fixed=8)
    assert 0 < fixed.chunk_rows(127) <= SIZES[-1] - 127 * 7
    fitted = BudgetPolicy(FittedCosts(512), WIDTHS, fixed=1)
    assert 64 <= fitted.chunk_rows(4) <= 508


@pytest.mark.parametrize(("fixed", "num_drafted"), [(None, 8), (None, 0), (4, 8), (4, 0)])
def test_chunks_follow_the_times_of_steps(fixed, num_drafted):
    policy = BudgetPolicy(costs(), WIDTHS, fixed=fixed, itl_ms=15.0)
    before = policy.chunk_rows(8)
    for _ in range(100):
        nodes, width = policy.choose(8, num_drafted=num_drafted)[:2]
        ms = 2 * gpu_ms(nodes, num_drafted, width)
        policy.costs.observe(nodes, num_drafted, width, ms, filtered=False)
    assert 0 < policy.chunk_rows(8) < 0.6 * before


def test_proposals_of_the_host_are_judged_one_by_one():
    """Kind 1 is never accepted, kind 4 always."""
    policy = BudgetPolicy(costs(), (1,), most_nodes=8)
    bins = np.stack([host_bins(8, 1)] * 8 + [host_bins(8, 4)] * 8)
    accepted = np.zeros((16, 8), bool)
    accepted[8:] = True
    for _ in range(30):
        policy.choose(16)
        policy.record(range(16), bins, np.full(16, 8, np.int32), accepted)
    offers = [(1, 0)] * 48
    assert policy.choose(64, offers=[*offers, *[(8, 4)] * 16]).nodes >= 160, "most of them"
    assert policy.choose(64, offers=[*offers, *[(8, 1)] * 16]).nodes <= 128, "what is free"
    assert 64 + 56 <= policy.choose(64, offers=[*offers, *[(8, 1)] * 8, *[(8, 4)] * 8]).nodes <= 128
    assert policy.choose(2, offers=[(8, 1), (8, 4)]).nodes == 16, "free"


@pytest.mark.parametrize("fixed", [None, 8])
def test_steps_wait_for_the_host_while_that_pays(fixed):
    policy = BudgetPolicy(costs(), (1,), most_nodes=8, fixed=fixed)
    bins = np.stack([host_bins(8, 1)] * 4)
    accepted = np.zeros((4, 8), bool)
    for _ in range(100):
        policy.host_wait.record_wait(0.5)
    assert policy.host_wait.ms == pytest.approx(0.5, abs=0.05)
    for _ in range(40):
        policy.choose(4, offers=[(8, 1)] * 4)
        policy.record(range(4), bins, np.full(4, 8, np.int32), accepted)
    assert not policy.host_wait.pays
    policy.look_back([(8, 1)] * 4)
    assert not policy.host_wait.pays
    policy.look_back([(8, 4)] * 4)
    assert policy.host_wait.pays
    for _ in range(2):
        assert policy.host_wait.pays
        policy.choose(4, offers=[(1, 0)] * 4)
    assert not policy.host_wait.pays


def test_results_may_be_overwritten_once_they_are_recorded():
    """Several steps are counted together."""
    policy = BudgetPolicy(costs(), WIDTHS)
    other = BudgetPolicy(costs(), WIDTHS)
    world = World(1.0)
    for _ in range(100):
        bins, probabilities = world.propose(4, 8)
        admitted = np.full(4, 6, np.int32)
        accepted = world.rng.random((4, 1)) < probabilities
        other.acceptance.record(bins[:, 1:6].ravel(), accepted[:, 1:6].ravel())
        policy.choose(4)
        policy.record(range(4), bins, admitted, accepted)
        bins[:] = 0
        admitted[:] = 0
        accepted[:] = False
    assert policy.acceptance.probabilities == pytest.approx(other.acceptance.probabilities, abs=0.02)


@pytest.mark.parametrize("make", [costs, lambda: FittedCosts(1024)])
def test_metrics(make):
    policy = BudgetPolicy(make(), WIDTHS)
    assert policy.metrics()["step_time_error"] == 0
    Simulation(policy, World(1.0), 8, step_ms=gpu_ms).run(50)
    metrics = policy.metrics()
    assert 0 <= metrics["step_time_error"] < 0.5
    assert 8 <= metrics["nodes_per_step"] <= 64
    assert metrics["draft_width"] in WIDTHS


def test_rows_that_are_free():
    """4.032 ms for 16 rows: 2 % more are not reached by 48 rows, but by 64, which useless nodes are not worth."""
    policy = BudgetPolicy(costs(), (1,), most_nodes=8)
    bins = np.stack([host_bins(8, 1)] * 16)
    for _ in range(30):
        policy.choose(16)
        policy.record(range(16), bins, np.full(16, 8, np.int32), np.zeros((16, 8), bool))
    assert policy.choose(16, offers=[(3, 1)] * 16).nodes == 48
    assert policy.choose(16, offers=[(4, 1)] * 16).nodes < 48
