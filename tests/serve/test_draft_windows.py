"""Which part of a text the draft reads: against the better of both choices, in a simulated engine."""

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from slipstream.serve.engine.draft_windows import GRAIN, SHORTEST, WINDOW, DraftPass, DraftWindows
from slipstream.tests.pairwise import some_of
from slipstream.tests.tables import each_case

DEPTH = 3
Chances = tuple[ArrayLike, ArrayLike]


class Simulation:
    """Requests with texts of these lengths. Drafted tokens are accepted by `chances`, of texts that are read whole and
    of windows. A step takes longer by 4 ns for each token that the draft reads, some 3 % by chance, and now and then
    twice as long."""

    def __init__(self, lengths: list[int], chances: Chances):
        self.rng = np.random.default_rng(0)
        self.lengths = np.array(lengths)
        self.chances = chances
        self.base_ms = 5.5 + 0.07 * len(lengths) + 30e-6 * self.lengths.sum()
        self.windows = DraftWindows(len(lengths))
        self.shares: list[float] = []  # of windows

    def rate(self, starts: NDArray[np.int64]) -> float:
        """Expected tokens per ms."""
        chances = np.where(starts > 0, self.chances[1], self.chances[0])
        tokens = sum(chances**place for place in range(DEPTH + 1)).sum()
        return float(tokens / (self.base_ms + 4e-6 * (self.lengths - starts).sum()))

    def best(self) -> float:
        """The rate of the better choice for all."""
        return max(self.rate(self.lengths - WINDOW), self.rate(0 * self.lengths))

    def run(self, num_steps: int) -> float:
        """Returns the mean rate."""
        windows = self.windows
        slots = tuple(range(len(self.lengths)))
        rates = []
        for _ in range(num_steps):
            are_windows = windows.starts > 0
            chances = np.where(are_windows, self.chances[1], self.chances[0])
            accepted = (self.rng.random((DEPTH, len(slots))) < chances).cumprod(axis=0).sum(axis=0)
            windows.record(self.lengths, are_windows, accepted)
            windows.choose(slots, self.lengths.tolist(), DEPTH + 1)
            num_read = int((self.lengths - windows.starts).sum())
            noise = 0.03 * abs(self.rng.standard_normal()) + (self.rng.random() < 0.005)
            ms = (self.base_ms + 4e-6 * num_read) * (1 + noise)
            windows.observe(DraftPass(slots, DEPTH + 1, num_read), int((accepted + 1).sum()), ms, self.base_ms)
            self.shares.append(float((windows.starts > 0).mean()))
            rates.append(self.rate(windows.starts))
        return float(np.mean(rates))


@each_case()
@pytest.mark.parametrize("batch", some_of([1, 8], [8]))
def test_it_comes_to_the_better_choice(batch, length, chances, share):
    simulation = Simulation([length] * batch, chances)
    assert simulation.run(1000) > 0.97 * simulation.best()
    assert simulation.run(2000) > 0.98 * simulation.best()
    assert batch == 1 or np.mean(simulation.shares[1000:]) == pytest.approx(share, abs=0.2)


@pytest.mark.parametrize("chances", [(0.7, 0.4), (0.4, 0.7)])
def test_it_follows_a_change(chances):
    simulation = Simulation([32_000] * 8, chances)
    simulation.run(1000)
    simulation.chances = chances[::-1]
    simulation.run(1500)
    assert simulation.run(500) > 0.98 * simulation.best()


def test_each_length_has_a_choice_of_its_own():
    good = np.array([0.7] * 4 + [0.4] * 4)
    simulation = Simulation([6_000] * 4 + [100_000] * 4, (good, good[::-1]))
    simulation.run(500)
    best = simulation.rate(np.where(good < 0.5, simulation.lengths - WINDOW, 0))
    assert best > 1.1 * simulation.best()
    assert simulation.run(1000) > 0.98 * best


def test_starts_leave_a_window_and_changes_are_named():
    windows = DraftWindows(4)
    starts = np.zeros(4, np.int64)
    lengths = np.array([10, SHORTEST - 1, SHORTEST, 50_000])
    slots = []
    for step in range(400):
        for slot, start in windows.choose((0, 1, 2, 3), lengths.tolist(), 4):
            assert start != starts[slot]
            starts[slot] = start
            slots.append(slot)
        assert np.array_equal(windows.starts, starts)
        assert np.all(starts % GRAIN == 0)
        read = (lengths - starts)[starts > 0]
        assert np.all((read >= WINDOW) & (read < WINDOW + GRAIN))
        lengths[2:] += step % 3
    assert set(slots) == {2, 3}, "short texts are read whole"
