"""The sampling kernel gives the reference's tokens."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.sampling.filters import Filters
from slipstream.kernels.sampling.sample import Sampling, bits_to_gumbel, gumbel, noise_bits, row_noise_bits, sample
from slipstream.tests.kernels.triton_runs import each_device, keys_of, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating


@triton.jit
def store_noise(keys_ptr, positions_ptr, ids_ptr, bits_ptr, noise_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    ids = tl.load(ids_ptr + columns, mask=mask, other=0)
    bits = row_noise_bits(tl.load(keys_ptr + row), tl.load(positions_ptr + row), ids)
    tl.store(bits_ptr + row * size + columns, bits.to(tl.int64), mask=mask)
    tl.store(noise_ptr + row * size + columns, bits_to_gumbel(bits), mask=mask)


@each_device
def test_the_kernels_noise_is_the_references(device):
    """The hash bit for bit, its logarithms up to rounding, in the tails, too."""
    keys = keys_of(range(20))
    ids = torch.randint(2**18, (1000,), generator=torch.Generator().manual_seed(0))
    positions = torch.randint(2**20, (20,), generator=torch.Generator().manual_seed(1))
    bits = torch.zeros(20, 1000, dtype=torch.int64, device=device)
    noise = torch.full((20, 1000), torch.nan, device=device)
    on_device = (x.to(device) for x in (keys, positions, ids))
    store_noise[(20,)](*on_device, bits, noise, 1000, BLOCK=1024)
    assert torch.equal(bits.cpu(), noise_bits(keys, positions, ids))
    assert int(bits.max()) > 2**31
    torch.testing.assert_close(noise.cpu(), gumbel(keys, positions, ids), atol=2e-6, rtol=2e-6)


@triton.jit
def store_gumbel(bits_ptr, noise_ptr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(noise_ptr + columns, bits_to_gumbel(tl.load(bits_ptr + columns).to(tl.uint32)))


@each_device
def test_the_kernels_logarithms_hold_in_the_tails(device):
    few = torch.arange(512)
    many = 2**32 - 1 - torch.arange(256)
    bits = torch.cat((few, many, 2 ** torch.arange(32).repeat(8)))
    noise = torch.full((1024,), torch.nan, device=device)
    store_gumbel[(1,)](bits.to(device), noise, BLOCK=1024)
    exact = -torch.log(-torch.log1p(-((bits.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)))
    torch.testing.assert_close(noise.double().cpu(), exact, atol=2e-6, rtol=2e-6)


def assert_same_tokens(logits: Tensor, positions: Tensor, sampling: Sampling, ids: Tensor | None = None):
    """Equal to the reference's, or as good by the reference's own scores up to the noise's rounding."""
    with poisoned():
        tokens = sample.triton(logits, positions, sampling, ids)
    expected = sample.reference(logits, positions, sampling, ids)
    assert tokens.dtype == torch.int64
    differ = (tokens != expected).nonzero().flatten()
    if not len(differ):
        return
    entries = sampling.by_row()
    actual = tokens[differ, None]
    exact = expected[differ, None]
    assert entries.temperature is not None, "greedy tokens are exact"
    columns = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    noise = gumbel(entries.keys[differ], positions[differ], columns)
    scores = logits[differ].float() + entries.temperature[differ, None] * noise
    assert (scores.gather(1, exact) - scores.gather(1, actual) < 2e-5).all()


BIG = [(1, 128_256), (4, 151_936), (128, 128_256), (33, 262_144), (4096, 32_000)]
SHAPES = [(1, 30), (3, 2048), (4, 5000), *(pytest.param(shape, marks=pytest.mark.gpu) for shape in BIG)]


@grouped("mode")
@each_device
@pytest.mark.parametrize(
    ("shape", "mode", "with_ids", "dtype"),
    rotating(SHAPES, ["greedy", "plain", "full"], [True, False], [torch.float32, torch.bfloat16]),
)
def test_the_kernel_equals_the_reference(shape, mode, with_ids, dtype, device):
    R, V = shape
    generator = torch.Generator().manual_seed(V)
    wide = (torch.randn(R, V + 8, generator=generator) * 3).to(device, dtype)
    temperature = torch.rand(R, generator=generator) * 2
    temperature[::3] = 0.0
    filters = Filters(
        torch.randint(1, 60, (R,), generator=generator) * torch.randint(2, (R,), generator=generator),
        torch.rand(R, generator=generator).clamp(min=0.05),
        torch.rand(R, generator=generator) * 0.2,
    )
    filters = Filters(*(x.to(device) for x in (filters.top_k, filters.top_p, filters.min_p)))
    sampling = Sampling(
        keys_of(range(R)).to(device),
        None if mode == "greedy" else temperature.to(device),
        filters if mode == "full" else None,
        rows=torch.randperm(R, generator=generator).to(device),
    )
    ids = torch.randint(300_000, (V,), generator=generator).sort().values.to(device) if with_ids else None
    positions = torch.randint(100_000, (R,), generator=generator).to(device)
    assert_same_tokens(wide[:, :V], positions, sampling, ids)


@each_device
def test_the_kernel_repeats_parameters_over_nodes(device):
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(5)).to(device)
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0], device=device)
    rows = torch.tensor([3, 0, 1], device=device)
    sampling = Sampling(keys_of(range(4)).to(device), temperature, None, rows).repeat(2)
    assert_same_tokens(logits, torch.arange(6, device=device), sampling)


@each_device
def test_the_kernels_ties_and_infinities(device):
    rows = [
        [0.0, 3.0, 1.0, 3.0, 3.0],
        [-0.0, 0.0, -1.0, 0.0, -2.0],
        [-torch.inf] * 5,
        [-5.0, -4.0, -torch.inf, -4.0, -9],
    ]
    logits = torch.tensor(rows, device=device)
    positions = torch.arange(4, device=device)
    for temperature in (None, torch.zeros(4, device=device)):
        sampling = Sampling(keys_of(range(4)).to(device), temperature, None)
        for dtype in (torch.float32, torch.bfloat16):
            assert sample.triton(logits.to(dtype), positions, sampling).tolist() == [1, 0, -1, 1]
    late = torch.zeros(1, 5000, device=device)
    late[0, [2047, 2048, 4999]] = 1.0  # ties across tiles
    assert sample.triton(late, positions[:1], sampling).tolist() == [2047]
    assert sample.triton(late[:0], positions[:0], sampling).shape == (0,)


@each_device
def test_the_kernels_rows_do_not_depend_on_their_batch(device):
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(4)).to(device)
    filters = Filters(torch.tensor([0, 5, 0, 3, 0]), torch.tensor([1, 1, 0.5, 0.5, 1]), torch.tensor([0, 0, 0, 0, 0.1]))
    filters = Filters(*(x.to(device) for x in (filters.top_k, filters.top_p, filters.min_p)))
    keys = keys_of(range(5)).to(device)
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0], device=device)
    positions = torch.arange(5, device=device) * 31
    together = sample.triton(logits, positions, Sampling(keys, temperature, filters))
    for row in range(5):
        index = torch.tensor([row], device=device)
        alone = sample.triton(logits[index], positions[index], Sampling(keys, temperature, filters, rows=index))
        assert alone == together[row]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 128])
@pytest.mark.parametrize("mode", ["greedy", "plain", "full"])
def test_a_graph_replays_the_sampler(rows, mode):
    logits = torch.randn(rows, 128_256, device="cuda", dtype=torch.bfloat16) * 3
    filters = Filters(*(torch.full((rows,), value, device="cuda") for value in (20, 0.8, 0.0)))
    temperature = None if mode == "greedy" else torch.ones(rows, device="cuda")
    sampling = Sampling(keys_of(range(rows)).cuda(), temperature, filters if mode == "full" else None)
    positions = torch.arange(rows, device="cuda")
    expected = sample.triton(logits, positions, sampling)
    assert torch.equal(replayed(lambda: sample.triton(logits, positions, sampling)), expected)
