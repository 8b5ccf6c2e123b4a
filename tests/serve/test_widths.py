"""The choice of the width: against the best fixed one on simulated rounds."""

import random

import pytest

from slipstream.serve.widths import WidthPolicy

WIDTHS = (1, 2, 4, 8)
SIZES = (1, 8, 64, 256)


def round_ms(size: int, width: int) -> float:
    """A memory-bound pass that turns compute-bound beyond 128 rows, and a drafter."""
    return max(4.0, 4.0 * size * width / 128) + 0.2 * (width - 1)


def simulate(policy: WidthPolicy, batch: int, rate: float, num_rounds: int, seed: int = 0) -> tuple[float, list[int]]:
    """Tokens per millisecond and request over rounds in which every draft is accepted at `rate`; the widths taken."""
    rng, tokens, ms, proposed, taken = random.Random(seed), 0, 0.0, 1, []
    for _ in range(num_rounds):
        width = policy.choose([WIDTHS[-1]] * batch)
        drafted = min(proposed, width) - 1
        accepted = []
        for _ in range(batch):
            count = 0
            while count < drafted and rng.random() < rate:
                count += 1
            accepted.append(count)
        policy.record([drafted] * batch, [range(1, count + 1) for count in accepted])
        tokens += sum(accepted) + batch
        ms += policy.ms[next(size for size in SIZES if size >= batch), width]
        proposed = width
        taken.append(width)
    return tokens / ms / batch, taken


def table() -> dict[tuple[int, int], float]:
    return {(size, width): round_ms(size, width) for size in SIZES for width in WIDTHS}


@pytest.mark.parametrize("batch", [1, 5, 64, 200])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
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


def test_no_drafter_leaves_one_choice() -> None:
    policy = WidthPolicy((1,), {(4, 1): 3.0})
    policy.record([0, 0], [[], []])
    assert policy.choose([1, 1, 1]) == 1
    assert policy.expected_tokens(1) == 1.0
