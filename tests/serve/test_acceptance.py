"""How often nodes are accepted, and what proposals look like."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serve.engine.acceptance import (
    BINS,
    BUCKETS,
    NETWORK_BINS,
    PLACES,
    AcceptanceStats,
    RequestRatios,
    host_bins,
)
from slipstream.serve.engine.yields import ProposalStats


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), shares=st.lists(st.floats(0.1, 1.0), min_size=2, max_size=4))
def test_survivals_do_not_depend_on_what_was_admitted(seed, shares):
    """Budgets change, so that a node is verified or not by its bin: bins are judged by their own nodes."""
    rng = np.random.default_rng(seed)
    stats = AcceptanceStats()
    true = rng.uniform(0.1, 0.9, BINS)
    order = rng.random(BINS)
    bins = rng.choice(NETWORK_BINS, 12, replace=False)
    wrong = []
    for step in range(300):
        stored = rng.choice(bins, 120)
        verified = stored[np.argsort(order[stored])[: int(120 * shares[step % len(shares)])]]
        stats.record(verified.astype(np.int32), rng.random(len(verified)) < true[verified])
        if step > 100 and step % 8 == 0:
            wrong.append(stats.probabilities[bins] - true[bins])
    is_tried = stats.num_tried[bins] > 150  # others are near their prior
    assert is_tried.any()
    assert np.abs(np.mean(wrong, axis=0))[is_tried].max() < 0.1


def network_bin(place: int, probability: float) -> int:
    """The bin of a drafted node: its place in the proposal, from 1, and the draft's probability of its path."""
    return (min(place, PLACES) - 1) * BUCKETS + min(int(BUCKETS * probability), BUCKETS - 1)


def test_a_cell_without_nodes_follows_its_place_and_comes_back_to_its_prior():
    stats = AcceptanceStats()
    before = AcceptanceStats().probabilities
    acceptance_bin = network_bin(1, 0.9)
    other = network_bin(1, 0.5)
    later = network_bin(3, 0.5)
    for _ in range(20):
        stats.record(np.full(8, acceptance_bin, np.int32), np.zeros(8, bool))
    assert stats.probabilities[acceptance_bin] < 0.05
    assert stats.probabilities[other] < 0.1 * before[other]
    assert stats.probabilities[later] < 0.1 * before[later]
    assert stats.probabilities[NETWORK_BINS + 5] == before[NETWORK_BINS + 5], "the host's are others"
    for _ in range(10):
        stats.record(np.zeros(0, np.int32), np.zeros(0, bool), 1000)
    assert stats.probabilities == pytest.approx(before, abs=0.03)


def test_survivals_are_counts_with_a_prior():
    """By hand: 7 of 10 are right where the draft says 31 of 32. Four more count as right as often as its place, and the
    last steps count once more."""
    stats = AcceptanceStats()
    acceptance_bin = network_bin(1, 0.99)
    stats.record(np.full(10, acceptance_bin, np.int32), np.arange(10) < 7)
    prior = 15.5 / 16
    ratio = (7 + 4) / (10 * prior + 4)
    learnt = (7 + 4 * prior * ratio) / (10 + 4)
    assert stats.probabilities[acceptance_bin] == pytest.approx(learnt * ratio)


def test_refusals_at_one_place_tell_of_later_ones_at_once():
    """Nodes of place 3 are as often refused as those before them, whose bins have learnt otherwise."""
    stats = AcceptanceStats()
    bins = np.array([network_bin(1, 0.9), network_bin(2, 0.8)] * 8, np.int32)
    for _ in range(50):
        stats.record(bins, np.ones(len(bins), bool))
    later = network_bin(3, 0.7)
    before = stats.probabilities[later]
    for _ in range(30):
        stats.record(bins, np.zeros(len(bins), bool))
    assert stats.probabilities[later] < 0.5 * before


def test_ratios_of_requests():
    """By hand: 2 of 4 expected nodes are accepted, or 24 of 6; the third has none. Four nodes more count as expected.
    All decay by half a per cent a step, and of the expected ones 24 are remembered."""
    ratios = RequestRatios(4)
    assert ratios.mean((0, 1, 2)) == 1.0
    slots = np.array([0] * 5 + [1] * 24)
    accepted = np.array([True, True, False, False, False] + [True] * 24)
    ratios.record(slots, accepted, np.where(slots == 0, 0.8, 0.25))
    assert ratios.mean([0]) == pytest.approx((2 + 4) / (4 + 4))
    assert ratios.mean([0, 1, 2]) == pytest.approx((6 / 8 + 2 + 1) / 3)
    ratios.record(np.zeros(44, int), np.zeros(44, bool), np.ones(44))
    assert ratios.mean([0]) == pytest.approx((2 * 0.995 * 24 / (44 + 4 * 0.995) + 4) / (24 + 4))
    ratios.record(np.zeros(0, int), np.zeros(0, bool), np.zeros(0), 2000)
    assert ratios.mean([0]) == pytest.approx(1.0, abs=0.01)
    ratios.admit(0)
    assert ratios.mean([0]) == 1.0


def test_the_table_changes_seldom_and_follows():
    stats = AcceptanceStats()
    rng = np.random.default_rng(0)
    changes = []
    before = stats.table
    for step in range(400):
        version = stats.version
        stats.record(np.full(64, 40, np.int32), rng.random(64) < 0.3)
        if stats.version != version:
            changes.append(step)
            assert stats.table is not before, "its holder may still be reading it"
            before = stats.table
        else:
            assert stats.table is before
    assert changes[0] == 0
    assert len(changes) < 6 + 400 / 32
    assert all(later - earlier >= 32 for earlier, later in zip(changes, changes[1:], strict=False) if earlier > 64)
    assert abs(stats.table[40] - 0.3) < 0.1
    assert stats.table.shape == (BINS,)
    assert stats.table.dtype == np.float32
    assert ((stats.table > 0) & (stats.table < 1)).all(), "nothing is admitted whose probability is 0"


def test_bins():
    assert [network_bin(*key) for key in ((1, 0.0), (1, 1.0), (3, 0.5), (16, 0.2), (40, 0.2))] == [0, 15, 40, 243, 243]
    assert host_bins(4, 2).tolist() == [-1, 288, 289, 290]
    assert host_bins(20, 99).max() == BINS - 1
    surer = [AcceptanceStats().probabilities[host_bins(9, kind)[1:]].sum() for kind in (1, 2, 3, 4)]
    assert surer == sorted(surer)


def test_curves_are_the_mean_proposal_best_nodes_first():
    proposals = ProposalStats(4)
    probabilities = np.zeros(BINS)
    sure = network_bin(1, 0.9)
    unsure = network_bin(1, 0.1)
    next_ = network_bin(2, 0.8)
    probabilities[[sure, unsure, next_]] = 0.75, 0.25, 0.5
    bins = np.array([[-1, sure, next_, -1], [-1, unsure, next_, -1], [-1, NETWORK_BINS, -1, -1]], np.int32)
    for _ in range(2000):
        proposals.record(bins)
    narrow, wide = proposals.curves([2, 3], probabilities)
    assert wide.nodes[:4] == pytest.approx([0, 0.5, 1.5, 2], abs=1e-3)
    assert wide.tokens[:4] == pytest.approx([0, 0.375, 0.875, 1], abs=1e-3)
    assert np.interp([0.5, 1.0], *narrow) == pytest.approx([0.375, 0.5], abs=1e-3)
