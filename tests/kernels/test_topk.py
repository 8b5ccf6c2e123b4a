"""The k best of a row by perturbed score: formula in fp64, ties, filters."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.limits import MAX_K
from slipstream.kernels.sampling.filters import Filters
from slipstream.kernels.sampling.sample import TILE, Sampling, perturbed_topk, sample
from slipstream.tests.kernels.triton_runs import SLOW, each_device, exact_scores, keys_of, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating

RUNS = [perturbed_topk.reference, perturbed_topk.triton]


def sampling_of(rows: int, device: str, temperature: list[float] | None = None) -> Sampling:
    temperatures = [(0.0, 1.0, 0.6)[row % 3] for row in range(rows)] if temperature is None else temperature
    return Sampling(keys_of(range(rows), device), torch.tensor(temperatures, device=device), None)


def check(values: Tensor, columns: Tensor, scores: Tensor, k: int):
    """Values are the largest of log_softmax(scores), each at its column, up to the rounding of fp32."""
    R, V = scores.shape
    assert values.dtype == torch.float32
    assert columns.dtype == torch.int64
    assert values.shape == columns.shape == (R, k)
    assert all(len(set(row)) == k and min(row) >= 0 and max(row) < V for row in columns.tolist())
    expected = scores.log_softmax(dim=-1)
    tolerance = {"atol": 2e-5, "rtol": 1e-5}
    torch.testing.assert_close(values.double(), expected.sort(dim=-1, descending=True).values[:, :k], **tolerance)
    torch.testing.assert_close(values.double(), expected.gather(1, columns), **tolerance)


BIG = [
    (1, 128_256, 4),
    (7, 128_256, 64),
    (224, 32_768, 64),
    (8, 248_320, 64),
    (4, 32_768, 10),
    (64, 32_768, 4),
    (33, 151_936, 16),
    (512, 32_000, 8),
]
SHAPES = [
    (3, 30, 1),
    (1, 16, 16),
    (4, 2 * TILE + 7, 5),
    pytest.param((1, TILE + 70, 64), marks=SLOW),
    *(pytest.param(x, marks=pytest.mark.gpu) for x in BIG),
]
each_run = pytest.mark.parametrize("run", RUNS)


@grouped()
@each_device
@each_run
@pytest.mark.parametrize(("shape", "dtype"), rotating(SHAPES, [torch.float32, torch.bfloat16]))
def test_the_formula(shape, dtype, run, device):
    R, V, k = shape
    generator = torch.Generator().manual_seed(V + k)
    logits = (torch.randn(R, V + 8, generator=generator) * 3).to(device, dtype)[:, :V]
    ids = torch.randint(300_000, (V,), generator=generator).to(device)
    positions = torch.randint(100_000, (R,), generator=generator).to(device)
    greedy = Sampling(torch.zeros(R, dtype=torch.int64, device=device), None, None)
    for sampling in (sampling_of(R, device), greedy):
        for target_ids in (None, ids):
            with poisoned():
                values, columns = run(logits, k, positions, sampling, target_ids)
                tokens = run(logits, k, positions, sampling, target_ids, as_ids=True)[1]
            assert torch.equal(tokens, columns if target_ids is None else target_ids[columns])
            check(values, columns, exact_scores(logits, positions, sampling, target_ids), k)


@each_device
@each_run
def test_several_k(run, device):
    logits = torch.randn(2, 40, device=device)
    positions = torch.tensor([5, 9], device=device)
    sampling = sampling_of(2, device)
    scores = exact_scores(logits, positions, sampling)
    for k in range(1, MAX_K + 1, 5):
        with poisoned():
            values, columns = run(logits, k, positions, sampling)
        check(values, columns, scores, k)
    assert torch.equal(columns[:, 0], sample.reference(logits, positions, sampling))


@each_device
@each_run
def test_ties_and_infinities(run, device):
    """The lower column first, across tiles, too; columns of -inf come last, in order."""
    logits = torch.full((4, 2 * TILE + 3), -torch.inf, device=device)
    logits[0, [2 * TILE, TILE, TILE - 1, 7]] = 2.0
    logits[1] = torch.arange(2 * TILE + 3, device=device) % 2
    logits[2, [1, 3, TILE, 5]] = torch.tensor([0.0, -0.0, 0.0, -1.0], device=device)
    logits[3, 2 * TILE + 2] = -3.0
    expected = [[7, TILE - 1, TILE, 2 * TILE], [1, 3, 5, 7], [1, 3, TILE, 5], [2 * TILE + 2, 0, 1, 2]]
    for temperature in (None, torch.zeros(4, device=device)):
        sampling = Sampling(torch.zeros(4, dtype=torch.int64, device=device), temperature, None)
        with poisoned():
            values, columns = run(logits, 4, torch.arange(4, device=device), sampling)
        assert columns.tolist() == expected
        torch.testing.assert_close(values[0].exp(), torch.full((4,), 0.25, device=device))
        assert values[3].tolist() == [0.0] + [-torch.inf] * 3


@each_device
@each_run
def test_filters(run, device):
    """Cut columns have no probability; a greedy row has no filters."""
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).to(device) * 3
    positions = torch.tensor([3, 1, 4], device=device)
    temperature = [0.0, 1.0, 0.5]
    plain = sampling_of(3, device, temperature)
    filters = Filters(*(torch.full((3,), value, device=device) for value in (6, 1.0, 0.0)))
    with poisoned():
        values, columns = run(logits, 10, positions, Sampling(plain.keys, plain.temperature, filters))
    for row, num_left in enumerate((500, 6, 6)):
        cut = logits[row] < logits[row].sort(descending=True).values[num_left - 1]
        scores = exact_scores(logits, positions, plain)[row].masked_fill(cut, -torch.inf)
        count = min(num_left, 10)
        check(values[row : row + 1, :count], columns[row : row + 1, :count], scores[None], count)
        assert values[row, count:].eq(-torch.inf).all()
        assert columns[row, count:].tolist() == cut.nonzero().flatten()[: 10 - count].tolist()


@each_device
@each_run
def test_parameters_by_entry(run, device):
    logits = torch.randn(6, 300, device=device)
    positions = torch.arange(6, device=device)
    entries = sampling_of(4, device, [0.0, 1.0, 0.5, 2.0])
    rows = torch.tensor([3, 0, 1], device=device)
    sampling = Sampling(entries.keys, entries.temperature, None, rows).repeat(2)
    values, columns = run(logits, 4, positions, sampling)
    check(values, columns, exact_scores(logits, positions, sampling.by_row()), 4)


@each_device
def test_rows_do_not_depend_on_their_batch(device):
    logits = torch.randn(5, TILE + 50, generator=torch.Generator().manual_seed(4)).to(device)
    sampling = sampling_of(5, device)
    positions = torch.arange(5, device=device) * 31
    together = perturbed_topk.triton(logits, 6, positions, sampling)
    for row in range(5):
        index = torch.tensor([row], device=device)
        alone = Sampling(sampling.keys, sampling.temperature, None, rows=index)
        for actual, expected in zip(
            perturbed_topk.triton(logits[index], 6, positions[index], alone), together, strict=True
        ):
            assert torch.equal(actual[0], expected[row])


def test_no_rows_and_the_cpu():
    logits = torch.randn(3, 50)
    positions = torch.arange(3)
    sampling = sampling_of(3, "cpu")
    values, columns = perturbed_topk.triton(logits[:0], 4, positions[:0], sampling)
    assert values.shape == columns.shape == (0, 4)
    check(*perturbed_topk(logits, 4, positions, sampling), exact_scores(logits, positions, sampling), 4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
def test_a_graph_replays_it(rows):
    logits = torch.randn(rows, 32_768, device="cuda", dtype=torch.bfloat16) * 3
    sampling = sampling_of(rows, "cuda")
    positions = torch.arange(rows, device="cuda")
    expected = perturbed_topk.triton(logits, 8, positions, sampling)
    actual = replayed(lambda: perturbed_topk.triton(logits, 8, positions, sampling))
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
