"""The interval of a ratio of accept lengths: against closed forms, and how often it holds what it should."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipstream.bench.accept_intervals import Counts, accept_ratio


def ones(seeds: int, questions: int) -> NDArray[np.float64]:
    return np.ones((seeds, questions))


def test_what_does_not_vary_has_an_interval_of_one_point() -> None:
    """Questions differ, but all alike for both methods."""
    generator = np.random.default_rng(0)
    rounds = generator.integers(5, 40, (1, 30)).repeat(3, axis=0)
    tokens = rounds * generator.uniform(1, 5, (1, 30))
    ratio = accept_ratio(Counts.of(1.2 * tokens, rounds), Counts.of(tokens, rounds))
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([1.2] * 3)
    assert str(ratio) == "1.200 (1.200, 1.200)"


def test_it_is_the_ratio_of_means_over_seeds() -> None:
    """Of accept lengths, which are tokens by rounds of all questions together: 3, 5 and 2."""
    method = Counts.of([[2.0, 4.0], [10.0, 10.0]], [[1.0, 1.0], [1.0, 3.0]])
    baseline = Counts.of([[2.0, 4.0]], [[1.0, 2.0]])
    assert accept_ratio(method, baseline).value == pytest.approx((3 + 5) / 2 / 2)


def test_questions_alone_give_the_standard_error_of_a_mean() -> None:
    tokens = np.random.default_rng(1).normal(3, 1, (1, 400))
    ratio = accept_ratio(Counts.of(tokens, ones(1, 400)), Counts.of(ones(1, 400), ones(1, 400)), draws=2000)
    error = 1.96 * tokens.std(ddof=1) / 20
    assert [ratio.low, ratio.high] == pytest.approx([ratio.value - error, ratio.value + error], abs=0.1 * error)


@pytest.mark.parametrize("seeds", [4, 40])
def test_seeds_alone_give_the_standard_error_of_a_mean(seeds: int) -> None:
    """Unbiased for few of them, too: the standard deviation of what is drawn is that of the mean."""
    lengths = np.random.default_rng(2).normal(3, 0.5, (seeds, 1))
    counts = Counts.of(lengths * ones(seeds, 50), ones(seeds, 50))
    drawn = counts.drawn(ones(20_000, 50) / 50, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.005)
    assert drawn.std() == pytest.approx(lengths.std(ddof=1) / np.sqrt(seeds), rel=0.03)


def test_it_holds_the_truth_in_95_of_100_experiments() -> None:
    """Easy and hard questions, lucky and unlucky seeds, chance: the methods' true ratio is 1.2."""
    generator, held = np.random.default_rng(3), 0
    for _ in range(200):
        ease = generator.normal(0, 0.3, 60)  # of questions, for both

        def counts(mean: float, ease: NDArray[np.float64] = ease) -> Counts:
            seeds, chance = generator.normal(0, 0.1, (8, 1)), generator.normal(0, 0.3, (8, 60))
            return Counts.of(20 * mean * (1 + ease + seeds + chance), 20 * ones(8, 60))

        ratio = accept_ratio(counts(3.6), counts(3.0), draws=500)
        held += ratio.low <= 1.2 <= ratio.high
    assert 180 <= held <= 199


def test_pairing_questions_narrows_it() -> None:
    generator = np.random.default_rng(4)
    rounds, tokens = ones(2, 100), generator.uniform(1, 5, (1, 100)).repeat(2, axis=0)
    method, shuffled = 1.1 * tokens + generator.normal(0, 0.1, (2, 100)), generator.permuted(tokens[:1])
    paired, apart = (accept_ratio(Counts.of(method, rounds), Counts.of(x, rounds[:1])) for x in (tokens[:1], shuffled))
    assert paired.value == pytest.approx(apart.value)
    assert paired.high - paired.low < 0.25 * (apart.high - apart.low)


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match="method has 3 questions and baseline 2; measure both on the same"):
        accept_ratio(Counts.of(ones(1, 3), ones(1, 3)), Counts.of(ones(1, 2), ones(1, 2)))
    for tokens, rounds in ((ones(2, 3), ones(1, 3)), (ones(1, 3)[0], ones(1, 3)[0]), (ones(2, 3), 0 * ones(2, 3))):
        with pytest.raises(ValueError, match=r"give both as \(seeds, questions\), with rounds of each seed"):
            Counts.of(tokens, rounds)
