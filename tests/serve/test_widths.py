"""The choice of the width: against the best fixed one on simulated rounds."""

import random
from collections import Counter

import pytest

from slipstream.serve.engine.widths import DECAY, PATIENCE, PRIOR, PROBE_ROUNDS, Acceptance, WidthPolicy
from slipstream.tests.pairwise import rotating

WIDTHS = (1, 2, 4, 8)
SIZES = (1, 8, 64, 256)
KINDS = ((1,) * 64, (4,) * 8, (1,) * 62 + (4,) * 2)  # of the requests of a batch


def round_ms(size: int, width: int) -> float:
    """A memory-bound pass that turns compute-bound beyond 128 rows, and a drafter."""
    return max(4.0, 4.0 * size * width / 128) + 0.2 * (width - 1)


def simulate(policy: WidthPolicy, batch: int, rate: float, num_rounds: int, seed: int = 0) -> tuple[float, list[int]]:
    """Tokens per millisecond and request over rounds in which every draft is accepted at `rate`; the widths taken."""
    rng, tokens, ms, proposed, taken = random.Random(seed), 0, 0.0, 1, []
    for _ in range(num_rounds):
        width = policy.choose([(WIDTHS[-1], 0)] * batch)
        drafted = min(proposed, width) - 1
        accepted = []
        for _ in range(batch):
            count = 0
            while count < drafted and rng.random() < rate:
                count += 1
            accepted.append(count)
        policy.record([(drafted + 1, 0)] * batch, drafted + 1, [range(1, count + 1) for count in accepted])
        tokens += sum(accepted) + batch
        ms += policy.ms[next(size for size in SIZES if size >= batch), width]
        proposed = width
        taken.append(width)
    return tokens / ms / batch, taken


def table() -> dict[tuple[int, int], float]:
    return {(size, width): round_ms(size, width) for size in SIZES for width in WIDTHS}


@pytest.mark.parametrize(("batch", "rate"), rotating([1, 5, 64, 200], [0.9, 0.0, 0.6, 0.3]))
def test_it_is_close_to_the_best_fixed_width(batch: int, rate: float) -> None:
    found, _ = simulate(WidthPolicy(WIDTHS, table()), batch, rate, 2000)
    fixed = []
    for width in WIDTHS:
        only = WidthPolicy((width,), {key: ms for key, ms in table().items() if key[1] == width})
        fixed.append(simulate(only, batch, rate, 2000)[0])
    assert found > 0.97 * max(fixed)
    assert found > 0.98 * fixed[0], "never slower than without drafts beyond 2 %"


def test_it_comes_back_when_drafts_are_accepted_again() -> None:
    policy = WidthPolicy(WIDTHS, table())
    _, bad = simulate(policy, 64, 0.0, 600)
    assert bad[-100:].count(1) > 70
    _, good = simulate(policy, 8, 0.9, 600)
    assert good[-10:].count(8) >= 7


def test_rounds_that_filter_have_times_of_their_own() -> None:
    """Every draft is accepted, but a filtered round of two nodes takes three times as long as one of one."""
    policy = WidthPolicy((1, 2), {(8, 1): 4.0, (8, 2): 4.0}, {(8, 1): 4.0, (8, 2): 12.0})
    policy.record([(2, 0)] * 8, 2, [[1]] * 8)
    assert [policy.choose([(2, 0)] * 8, filtered=filtered) for filtered in (True, False, True)] == [1, 2, 1]


def test_no_drafter_leaves_one_choice() -> None:
    policy = WidthPolicy((1,), {(4, 1): 3.0})
    policy.record([(1, 0)] * 2, 1, [[], []])
    assert policy.choose([(1, 0)] * 3) == 1
    assert policy.rates(Counter([(1, 0)] * 3), [1], 1) == {1: 1.0}


def test_each_kind_of_proposal_is_judged_by_itself() -> None:
    """Kind 1 is never accepted, kind 4 nearly always: rounds of a batch that hold one, the other, or both."""
    policy, rng = WidthPolicy(WIDTHS, table()), random.Random(3)
    taken: dict[tuple[int, ...], list[int]] = {}
    for _ in range(900):
        kinds = rng.choice(KINDS)
        offers = [(WIDTHS[-1], kind) for kind in kinds]
        width = policy.choose(offers)
        accepted = [range(1, width) if kind == 4 and rng.random() < 0.97 else [] for kind in kinds]
        policy.record(offers, width, accepted)
        taken.setdefault(kinds, []).append(width)
    useless, sure, few = (taken[kinds][100:] for kinds in KINDS)
    assert useless.count(1) > 0.7 * len(useless), "the others are probes of the next width, which cost little"
    assert sure.count(8) > 0.9 * len(sure)
    assert few.count(1) > 0.7 * len(few), "two of 64 do not pay for a round of 512 rows"


def test_surer_kinds_are_believed_more_before_any_was_seen() -> None:
    tokens = [Acceptance(16, kind).expected[-1] for kind in (1, 2, 3, 4, 0)]
    assert tokens == sorted(tokens)
    assert tokens[0] < 2
    assert tokens[-1] == 16


def test_acceptance_equals_a_count_node_by_node() -> None:
    rng, seen = random.Random(1), Acceptance(9, 2)
    tried, accepted = [PRIOR] * 9, [PRIOR * 0.75**node for node in range(9)]
    for _ in range(50):
        nodes = [rng.randint(2, 9) for _ in range(rng.randint(1, 5))]
        right = [[node for node in range(1, count) if rng.random() < 0.4] for count in nodes]
        seen.record(nodes, right)
        for node in range(1, max(nodes)):
            before = accepted[node] / tried[node]
            tried[node] = DECAY * tried[node] + sum(node < count for count in nodes)
            accepted[node] = DECAY * accepted[node] + sum(node in ids for ids in right)
        for node in range(max(nodes), 9):
            accepted[node] = min(
                accepted[node] * accepted[max(nodes) - 1] / tried[max(nodes) - 1] / before, tried[node]
            )
    expected = [1 + sum(accepted[node] / tried[node] for node in range(1, count)) for count in range(1, 10)]
    assert seen.expected == pytest.approx(expected)


@pytest.mark.parametrize(("wait_ms", "rate", "width"), [(0.0, 0.08, 2), (0.2, 0.08, 2), (0.4, 0.08, 1), (0.4, 0.5, 2)])
def test_drafts_that_are_waited_for_have_to_pay_for_that(wait_ms: float, rate: float, width: int) -> None:
    """Rounds of 4 ms of either width; a wait of 0.4 ms is worth a draft accepted at 0.1, one of 0.2 at 0.05."""
    policy = WidthPolicy((1, 2), {(1, 1): 4.0, (1, 2): 4.0})
    policy.wait_ms, rng = wait_ms, random.Random(0)
    for _ in range(2000):
        policy.record([(2, 1)], 2, [[1] if rng.random() < rate else []])
    assert [policy.choose([(2, 1)]) for _ in range(100)].count(width) > 80
    assert policy.choose([(2, 1)], least=2) == 2, "the device drafts them anyway"


def test_looking_whether_drafts_pay_again_costs_what_it_may() -> None:
    """Rounds that verify nothing wait for nobody: each look costs its own rounds' waits and PATIENCE more."""
    policy = WidthPolicy((1, 2), {(1, 1): 4.0, (1, 2): 4.0})
    policy.wait_ms = 0.2
    for _ in range(2000):
        policy.record([(2, 1)], 2, [[]])
    taken = [policy.choose([(2, 1)]) for _ in range(5000)]
    looks = taken.count(2) / PROBE_ROUNDS
    assert looks > 50
    assert looks * (PROBE_ROUNDS + PATIENCE) * policy.wait_ms < 0.011 * 5000 * 4.0


def test_measured_rounds_correct_the_tables() -> None:
    """At twice the time of all that was measured, wide rounds still pay; at ten times their own, they do not."""
    ms = {(4, 1): 1.0, (4, 4): 1.2, (4, 8): 1.3}
    offers = [(8, 0)] * 4
    policy = WidthPolicy([1, 4, 8], ms)
    assert policy.choose(offers, 8) == 8
    for _ in range(400):
        policy.observe(3, 8, 2.6)
        policy.observe(4, 4, 2.4)
    assert policy.choose(offers, 8) == 8
    assert policy._time(4, 1, 8) == pytest.approx(2.0, rel=0.05), "a width that was not measured is slower, too"
    for _ in range(400):
        policy.observe(4, 8, 13.0)
        policy.observe(4, 4, 2.4)
    assert policy.choose(offers, 8) == 4
    assert policy._time(4, 8, 8) > 3 * policy._time(4, 4, 8)
    policy.observe(4, 8, 1e9)
    assert policy._time(4, 8, 8) < 20, "one disturbed measurement changes little"
