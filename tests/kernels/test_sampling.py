"""Sampling: the noise is Gumbel and independent, `sample` follows softmax, and drafter and target share the
noise."""

import math

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from slipstream.kernels.sampling.filters import Filters, filter_logits
from slipstream.kernels.sampling.sample import Sampling, gumbel, noise_key, sample
from slipstream.tests.kernels.triton_runs import keys_of
from slipstream.tests.pairwise import grouped


def uniforms(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The noise through its own distribution function: uniform on (0, 1) if it is Gumbel."""
    return torch.exp(-torch.exp(-gumbel(keys, positions, ids).double()))


def assert_chi_square(counts: Tensor, expected: Tensor):
    """Five standard deviations above its mean, a chi-square of many degrees of freedom is no accident."""
    statistic = float(((counts.double() - expected) ** 2 / expected).sum())
    degrees = counts.numel() - 1
    assert statistic < degrees + 5 * math.sqrt(2 * degrees), f"chi-square {statistic:.1f} with {degrees} degrees"


def assert_independent(first: Tensor, second: Tensor, bins: int = 16):
    cells = (first * bins).long().clamp(max=bins - 1) * bins + (second * bins).long().clamp(max=bins - 1)
    counts = torch.bincount(cells.flatten(), minlength=bins * bins)
    assert_chi_square(counts, torch.full_like(counts, first.numel() / bins**2, dtype=torch.float64))


def off(num_rows: int) -> Filters:
    return Filters(torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows), torch.zeros(num_rows))


def sampling_of(num_rows: int, temperature: float, filters: Filters | None = None) -> Sampling:
    return Sampling(keys_of(range(num_rows)), torch.full((num_rows,), temperature), filters)


def test_noise_has_the_gumbel_distribution():
    keys = keys_of(range(40))
    positions = torch.arange(40)
    noise = gumbel(keys, positions, torch.arange(10_000)).double()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    counts = torch.histc(uniforms(keys, positions, torch.arange(10_000)), bins=200, min=0, max=1)
    assert_chi_square(counts, torch.full_like(counts, noise.numel() / 200, dtype=torch.float64))


def test_noise_reaches_far_into_its_upper_tail():
    """Unlikely tokens win by rare large noise: of 2^23 draws the largest is near ln(2^23) = 15.9."""
    noise = gumbel(keys_of(range(8)), torch.zeros(8), torch.arange(2**20))
    assert torch.isfinite(noise).all()
    for threshold in (8.0, 10.0, 12.0):
        expected = noise.numel() * -math.expm1(-math.exp(-threshold))
        assert abs(int((noise > threshold).sum()) - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("neighbours", ["seeds", "choices", "low bits", "high bits", "positions", "ids", "diagonal"])
def test_noise_of_neighbours_is_independent(neighbours):
    positions = torch.arange(200)
    ids = torch.arange(400)
    keys = torch.full((200,), noise_key(7, 0))
    variants = {
        "seeds": (torch.full_like(keys, noise_key(8, 0)), positions, ids),
        "choices": (torch.full_like(keys, noise_key(7, 1)), positions, ids),
        "low bits": (keys ^ 1, positions, ids),
        "high bits": (keys ^ (1 << 32), positions, ids),
        "positions": (keys, positions + 1, ids),
        "ids": (keys, positions, ids + 1),
        "diagonal": (keys, positions + 1, ids + 1),
    }
    assert_independent(uniforms(keys, positions, ids), uniforms(*variants[neighbours]))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("varied", ["position", "seed"])
def test_samples_follow_softmax(temperature, varied):
    num_rows = 20_000
    vocab = 12
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    keys = keys_of(range(num_rows)) if varied == "seed" else torch.full((num_rows,), noise_key(5, 2))
    positions = torch.arange(num_rows) if varied == "position" else torch.full((num_rows,), 17)
    tokens = sample(logits.expand(num_rows, -1), positions, Sampling(keys, torch.full((num_rows,), temperature), None))
    expected = (logits.double() / temperature).softmax(-1) * num_rows
    assert_chi_square(torch.bincount(tokens, minlength=vocab), expected)


def test_successive_samples_of_one_request_are_independent():
    num_rows = 20_000
    tokens = sample(
        torch.zeros(num_rows, 8), torch.arange(num_rows), Sampling(keys_of(range(1)), torch.ones(num_rows), None)
    )
    assert_independent(tokens[:-1] / 8, tokens[1:] / 8, bins=8)


def test_keys_tell_seeds_and_choices_apart():
    keys = {noise_key(seed, choice) for seed in (*range(-3, 40), 12_345, 2**63) for choice in range(30)}
    assert len(keys) == 45 * 30
    assert all(0 <= key < 2**63 for key in keys)


@grouped()
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (7, 1.0, 0.0), (500, 1.0, 0.0), (0, 0.3, 0.0), (0, 0.95, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.05)]
    + [(0, 1.0, 1.0), (40, 0.8, 0.0), (40, 0.9, 0.02), (0, 0.9, 0.3), (5, 0.99, 0.3)],
)
@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_filters_keep_what_transformers_keeps(top_k, top_p, min_p, temperature):
    logits = torch.randn(30, 200, generator=torch.Generator().manual_seed(11)) * 2
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected = logits
    for warper in warpers:
        expected = warper(None, expected)
    filters = Filters(torch.full((30,), top_k), torch.full((30,), top_p), torch.full((30,), min_p))
    torch.testing.assert_close(filter_logits(logits / temperature, filters), expected)


def test_filtered_samples_follow_the_renormalised_softmax():
    num_rows = 20_000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5])
    filters = Filters(torch.full((num_rows,), 4), torch.ones(num_rows), torch.zeros(num_rows))
    sampling = Sampling(torch.full((num_rows,), noise_key(1, 0)), torch.full((num_rows,), 0.8), filters)
    tokens = sample(logits.expand(num_rows, -1), torch.arange(num_rows), sampling)
    assert int(tokens.max()) == 3
    assert_chi_square(torch.bincount(tokens, minlength=4), (logits[:4].double() / 0.8).softmax(-1) * num_rows)


def test_filters_that_are_off_change_nothing_in_any_vocabulary():
    """One request's filters bring the filtered path to all rows of its batch: the others must not notice, although
    fp32 sums of 150,000 probabilities pass 1."""
    logits = torch.randn(12, 150_000, generator=torch.Generator().manual_seed(2))
    filters = Filters(off(12).top_k, torch.where(torch.arange(12) == 0, 0.5, 1.0), off(12).min_p)
    filtered_logits = filter_logits(logits, filters)
    assert torch.isinf(filtered_logits[0]).any()
    torch.testing.assert_close(filtered_logits[1:], logits[1:], rtol=0, atol=0)


@pytest.mark.parametrize("filtered", [False, True])
def test_rows_do_not_depend_on_their_batch(filtered):
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(4))
    temperature = torch.tensor([0.0, 0.5, 1.0, 0.0, 2.0, 1.0])
    keys = keys_of(range(6))
    positions = torch.arange(6) * 31
    filters = Filters(torch.tensor([0, 5, 0, 3, 0, 0]), torch.tensor([1, 1, 0.5, 0.5, 1, 1]), torch.zeros(6))
    together = sample(logits, positions, Sampling(keys, temperature, filters if filtered else None))
    for row in range(6):
        index = slice(row, row + 1)
        row_filters = Filters(filters.top_k[index], filters.top_p[index], filters.min_p[index])
        unfiltered = not filtered or (row_filters.top_k[0] == 0 and row_filters.top_p[0] == 1)
        alone = Sampling(keys[index], temperature[index], None if unfiltered else row_filters)
        assert sample(logits[index], positions[index], alone) == together[row]
    greedy = temperature == 0
    assert torch.equal(together[greedy], logits[greedy].argmax(-1))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(keys_of(range(1)), None, None), sampling_of(1, 0.0), sampling_of(1, 0.0, off(1))],
    ids=["greedy", "plain", "full"],
)
def test_greedy_ties_go_to_the_lowest_index(sampling):
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]])
    assert sample(logits, torch.tensor([9]), sampling).tolist() == [1]
    assert sample(logits.bfloat16(), torch.tensor([9]), sampling).tolist() == [1]


def test_a_reduced_vocabulary_draws_the_noise_of_its_target_ids():
    ids = torch.tensor([3, 4, 90, 1_000, 49_999])
    keys = keys_of(range(5))
    positions = torch.arange(5)
    full = gumbel(keys, positions, torch.arange(50_000))
    torch.testing.assert_close(gumbel(keys, positions, ids), full[:, ids], rtol=0, atol=0)
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(6))
    target_logits = torch.full((5, 50_000), -torch.inf).index_copy(1, ids, logits)
    for sampling in (sampling_of(5, 1.0), sampling_of(5, 0.0)):
        assert torch.equal(ids[sample(logits, positions, sampling, ids)], sample(target_logits, positions, sampling))


@pytest.mark.parametrize("error", [0.1, 0.5, 1.0, 2.0])
def test_shared_noise_accepts_at_least_what_the_theorem_says(error):
    generator = torch.Generator().manual_seed(8)
    num_rows = 8_000
    for pair in range(4):
        target = torch.randn(100, generator=generator) * 2
        draft = target + error * torch.randn(100, generator=generator)
        sampling = Sampling(torch.full((num_rows,), noise_key(pair, 0)), torch.ones(num_rows), None)
        positions = torch.arange(num_rows)
        samples = [sample(logits.expand(num_rows, -1), positions, sampling) for logits in (target, draft)]
        accepted = float((samples[0] == samples[1]).double().mean())
        distance = float((target.softmax(-1) - draft.softmax(-1)).abs().sum() / 2)
        bound = (1 - distance) / (1 + distance)
        assert accepted > bound - 4 * math.sqrt(bound * (1 - bound) / num_rows)
        assert accepted < 1 - distance + 4 / math.sqrt(num_rows), "no coupling accepts more than 1 - TV"


def test_rows_and_repeats_choose_the_parameters():
    """Row r takes entry rows[r // repeats]."""
    filters = Filters(torch.tensor([1, 2, 3]), torch.tensor([0.5, 1.0, 0.9]), torch.tensor([0.0, 0.1, 0.2]))
    keys = torch.tensor([10, 20, 30])
    temperature = torch.tensor([0.5, 1.5, 2.5])
    rows = Sampling(keys, temperature, filters, rows=torch.tensor([2, 0])).repeat(3).by_row()
    assert rows.keys.tolist() == [30, 30, 30, 10, 10, 10]
    assert rows.temperature.tolist() == [2.5] * 3 + [0.5] * 3
    assert rows.filters.top_k.tolist() == [3, 3, 3, 1, 1, 1]
    every = Sampling(keys, temperature, None).repeat(2).by_row()
    assert every.keys.tolist() == [10, 10, 20, 20, 30, 30]
    assert every.filters is None
