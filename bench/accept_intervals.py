"""A confidence interval of one method's accept length over another's, from counts by seed and question.

Both methods answer the same questions with drafts of several seeds, and both were lucky or not in either. A bootstrap
draws seeds, of each method apart, then questions, the same for all drafts, since a question that is easy for one is
easy for others; each draw gives a ratio, and the middle 95 % of them are the interval (percentiles).

Of n seeds n - 1 are drawn, not n: the mean of n would vary by (n - 1) / n of what it should, a third too little for
three seeds (Rao and Wu 1988). The tails stay those of the seeds at hand: with two or three the interval is still a
little short. With one seed it tells of questions alone.

Letters: S seeds, Q questions, R draws.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one method: what its drafts did with each question."""

    tokens: NDArray[np.float64]  # (S, Q) emitted, but for those that prompts' passes gave
    rounds: NDArray[np.float64]  # (S, Q)

    @classmethod
    def of(cls, tokens: ArrayLike, rounds: ArrayLike) -> "Counts":
        """Raises ValueError unless both are (S, Q), with a round somewhere for every seed."""
        counts = cls(np.asarray(tokens, np.float64), np.asarray(rounds, np.float64))
        shapes = counts.tokens.shape, counts.rounds.shape
        if shapes[0] != shapes[1] or len(shapes[0]) != 2 or not counts.rounds.sum(axis=1).all():
            raise ValueError(
                f"tokens and rounds are {shapes}; give both as (seeds, questions), with rounds of each seed"
            )
        return counts

    @property
    def accept_length(self) -> float:
        """The mean over seeds."""
        return float((self.tokens.sum(axis=1) / self.rounds.sum(axis=1)).mean())

    def drawn(self, questions: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
        """Accept lengths (R,) of drawn seeds; questions (R, Q): how often each was drawn."""
        lengths = (questions @ self.tokens.T) / np.maximum(questions @ self.rounds.T, 1e-9)  # (R, S)
        return (weights(len(lengths), lengths.shape[1], max(1, lengths.shape[1] - 1), generator) * lengths).sum(axis=1)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two accept lengths, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}, {self.high:.3f})"


def weights(draws: int, size: int, number: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """(draws, size): the share of each among `number` drawn with replacement."""
    return generator.multinomial(number, np.full(size, 1 / size), draws) / number


def accept_ratio(method: Counts, baseline: Counts, draws: int = DRAWS, seed: int = 0) -> Ratio:
    """Of mean accept lengths, `method` over `baseline`. Raises ValueError unless both have the same questions."""
    count = baseline.tokens.shape[1]
    if method.tokens.shape[1] != count:
        raise ValueError(
            f"method has {method.tokens.shape[1]} questions and baseline {count}; measure both on the same"
        )
    generator = np.random.default_rng(seed)
    questions = weights(draws, count, count, generator)
    lengths = [one.drawn(questions, generator) for one in (method, baseline)]
    low, high = np.quantile(lengths[0] / lengths[1], (0.025, 0.975))
    return Ratio(method.accept_length / baseline.accept_length, float(low), float(high))
