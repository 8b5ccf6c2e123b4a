"""Heads over a set of ids: against the dense product in fp64, and exactly where all sums are exact."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gemm.gathered_head import (
    MOST_ROWS,
    DraftHead,
    choose_tiling,
    gathered_linear,
    head_logits,
    head_topk,
)
from slipstream.kernels.gemm.tiling import Tiling
from slipstream.kernels.sampling.filters import Filters
from slipstream.kernels.sampling.sample import Sampling
from slipstream.tests.kernels.triton_runs import TOLERANCES, each_device, exact_scores, keys_of, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating

# The interpreter has no product of bfloat16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
TILINGS = [Tiling(16, 16, 1), Tiling(32, 32, 1), None]
ROWS = [1, 17, 33, MOST_ROWS + 3]
# no multiple of a tile
V = 150
VD = 70
H = 40
REAL = (128_256, 32_768, 4096)


def random(
    rows: int, dtype: torch.dtype, device: str, shape: tuple[int, int, int] = (V, VD, H)
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (rows, H), strided, weight (V, H), scattered ids (Vd,), every seventh -1; logits about 1."""
    all_ids, num_ids, size = shape
    generator = torch.Generator(device).manual_seed(rows)
    hidden = torch.randn(rows, size + 16, generator=generator, device=device).to(dtype)[:, :size]
    weight = (torch.randn(all_ids, size, generator=generator, device=device) * size**-0.5).to(dtype)
    ids = torch.randperm(all_ids, generator=generator, device=device)[:num_ids].clone()
    ids[3::7] = -1
    return hidden, weight, ids


def whole(rows: int, device: str, shape: tuple[int, int, int] = (V, VD, H)) -> tuple[Tensor, Tensor, Tensor]:
    """The same of small whole numbers, whose products add up exactly in any order: many logits are equal."""
    hidden, weight, ids = random(rows, torch.float32, device, shape)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return hidden.sign().to(dtype), (weight * 2 * shape[2] ** 0.5).round().clamp(-1, 1).to(dtype), ids


def sampling_of(rows: int, device: str, greedy: bool = False) -> Sampling:
    temperature = torch.tensor([(1.0, 0.0, 0.6)[row % 3] for row in range(rows)], device=device)
    return Sampling(keys_of(range(rows), device), None if greedy else temperature, None)


def exact_logits(head: DraftHead, hidden: Tensor) -> Tensor:
    """(R, Vd) fp64."""
    logits = hidden.double() @ head.weight.double().t()
    if not head.gathered:
        return logits
    assert head.ids is not None
    return torch.where(head.ids < 0, -torch.inf, logits[:, head.ids])


def heads(weight: Tensor, ids: Tensor) -> list[DraftHead]:
    """Gathered, copied rows, and all of the vocabulary."""
    token_ids = ids[ids >= 0]
    return [DraftHead(weight, ids, gathered=True), DraftHead(weight[token_ids], token_ids), DraftHead(weight)]


@grouped("dtype")
@each_device
@pytest.mark.parametrize(("tiling", "rows", "dtype"), rotating(TILINGS, ROWS, DTYPES))
def test_gathered_linear(tiling, rows, dtype, device):
    hidden, weight, ids = random(rows, dtype, device)
    expected = exact_logits(DraftHead(weight, ids, gathered=True), hidden)
    with poisoned():
        out = gathered_linear.triton(hidden, weight, ids, tiling)
    for logits in (out, gathered_linear.reference(hidden, weight, ids)):
        assert logits.dtype == dtype
        torch.testing.assert_close(logits.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@each_device
@pytest.mark.parametrize(("tiling", "rows"), rotating([None, TILINGS[1]], [1, 33]))
def test_fused_equals_the_formula(tiling, rows, device):
    """In fp32, so that scores closer than the noise's rounding are rare."""
    hidden, weight, ids = random(rows, torch.float32, device)
    positions = torch.arange(rows, device=device) * 7
    sampling = sampling_of(rows, device)
    for head in heads(weight, ids):
        expected = exact_scores(exact_logits(head, hidden), positions, sampling, head.ids).log_softmax(dim=-1)
        best = expected.sort(dim=-1, descending=True).values
        with poisoned():
            results = [head_topk.triton(head, hidden, k, positions, sampling, tiling) for k in (1, 5)]
        close = {"atol": 2e-5, "rtol": 1e-5}
        for k, (values, columns) in zip((1, 5), results, strict=True):
            assert columns.dtype == torch.int64
            torch.testing.assert_close(values.double(), best[:, :k], **close)
            torch.testing.assert_close(values.double(), expected.gather(1, columns), **close)
            assert all(len(set(row)) == k for row in columns.tolist())


@grouped()
@each_device
@pytest.mark.parametrize(("tiling", "k"), rotating(TILINGS[::2], [16, 2, 1]))
def test_fused_ties_go_to_the_lowest_place(tiling, k, device):
    hidden, weight, ids = whole(4, device)
    positions = torch.arange(4, device=device)
    sampling = sampling_of(4, device, greedy=True)
    for head in heads(weight, ids):
        logits = exact_logits(head, hidden)
        expected = logits.sort(dim=-1, descending=True, stable=True)
        assert (expected.values[:, :16].diff() == 0).any()  # there are ties
        with poisoned():
            values, places = head_topk.triton(head, hidden, k, positions, sampling, tiling)
            tokens = head_topk.triton(head, hidden, k, positions, sampling, tiling, as_ids=True)[1]
        assert torch.equal(places, expected.indices[:, :k])
        assert torch.equal(tokens, places if head.ids is None else head.ids[places])
        torch.testing.assert_close(values.double(), logits.log_softmax(dim=-1).gather(1, places), atol=2e-5, rtol=1e-5)


@each_device
def test_unused_places_are_last(device):
    """Whole tiles of them, first and last; fewer used places in a tile than k."""
    hidden, weight, ids = random(3, torch.float32, device)
    ids[:] = -1
    used_rows = [40, 41, 63]
    ids[used_rows] = torch.tensor([5, 149, 0], device=device)
    head = DraftHead(weight, ids, gathered=True)
    positions = torch.arange(3, device=device)
    sampling = sampling_of(3, device)
    expected = exact_scores(exact_logits(head, hidden), positions, sampling, head.ids)
    with poisoned():
        places = head_topk.triton(head, hidden, 1, positions, sampling, TILINGS[0])[1]
        values, columns = head_topk.triton(head, hidden, 5, positions, sampling, TILINGS[0])
    assert torch.equal(places, expected.argmax(dim=-1, keepdim=True))
    assert torch.equal(columns, expected.sort(dim=-1, descending=True, stable=True).indices[:, :5])
    torch.testing.assert_close(values.exp().sum(dim=-1), torch.ones(3, device=device))
    assert values[:, 3:].eq(-torch.inf).all()


@each_device
def test_scores_below_zero_after_larger_ones(device):
    """Nothing of a launch is left for the next one."""
    _, weight, ids = random(3, torch.float32, device)
    head = DraftHead(weight.abs(), ids, gathered=True)
    positions = torch.arange(3, device=device)
    sampling = sampling_of(3, device, greedy=True)
    hidden = torch.ones(3, H, device=device)
    for sign in (1.0, -1.0, 1.0):
        expected = exact_logits(head, sign * hidden).argmax(dim=-1)
        for k in (1, 2):
            assert torch.equal(head_topk.triton(head, sign * hidden, k, positions, sampling)[1][:, 0], expected)


@each_device
def test_parameters_by_entry(device):
    hidden, weight, ids = random(6, torch.float32, device)
    head = DraftHead(weight, ids, gathered=True)
    positions = torch.arange(6, device=device)
    entries = sampling_of(4, device)
    rows = torch.tensor([3, 0, 1], device=device)
    sampling = Sampling(entries.keys, entries.temperature, None, rows).repeat(2)
    expected = exact_scores(exact_logits(head, hidden), positions, sampling.by_row(), head.ids)
    for k in (1, 4):
        values, places = head_topk.triton(head, hidden, k, positions, sampling)
        assert torch.equal(places, expected.sort(dim=-1, descending=True).indices[:, :k])


@each_device
def test_rows_do_not_depend_on_their_batch(device):
    rows = 16 if device == "cpu" else MOST_ROWS  # the interpreter's product of more rows adds in another order
    hidden, weight, ids = random(rows, torch.float16, device)
    head = DraftHead(weight, ids, gathered=True)
    positions = torch.arange(rows, device=device)
    sampling = sampling_of(rows, device)
    logits = gathered_linear.triton(hidden, weight, ids, TILINGS[0])
    values, places = head_topk.triton(head, hidden, 4, positions, sampling, TILINGS[0])
    for count in (1, 3, rows - 1):
        few = hidden[:count], positions[:count], sampling_of(count, device)
        assert torch.equal(gathered_linear.triton(few[0], weight, ids, TILINGS[0]), logits[:count])
        some_values, some_places = head_topk.triton(head, few[0], 4, *few[1:], TILINGS[0])
        assert torch.equal(some_places, places[:count])
        assert torch.equal(some_values, values[:count])


def test_no_rows_and_the_cpu():
    hidden, weight, ids = random(4, torch.float32, "cpu")
    positions = torch.arange(4)
    sampling = sampling_of(4, "cpu")
    assert gathered_linear.triton(hidden[:0], weight, ids).shape == (0, VD)
    filters = Filters(*(torch.full((4,), value) for value in (1, 1.0, 0.0)))
    for head in heads(weight, ids):
        assert head_topk.triton(head, hidden[:0], 3, positions[:0], sampling)[0].shape == (0, 3)
        logits = exact_logits(head, hidden)
        torch.testing.assert_close(head_logits(head, hidden).double(), logits, atol=1e-5, rtol=1e-5)
        expected = exact_scores(logits, positions, sampling, head.ids)
        for k in (1, 3):
            values, places = head_topk(head, hidden, k, positions, sampling)
            assert torch.equal(places, expected.sort(dim=-1, descending=True).indices[:, :k])
        greedy = Sampling(sampling.keys, sampling.temperature, filters)  # top-k 1
        assert torch.equal(head_topk(head, hidden, 1, positions, greedy)[1][:, 0], logits.argmax(dim=-1))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 32, MOST_ROWS, 200])
def test_real_shapes(rows):
    hidden, weight, ids = random(rows, torch.bfloat16, "cuda", REAL)
    expected = hidden.float() @ weight.float().t()[:, ids.clamp(min=0)]
    expected = expected.masked_fill(ids < 0, -torch.inf)
    with poisoned():
        first = gathered_linear.triton(hidden, weight, ids)
    torch.testing.assert_close(first.float(), expected, atol=1.6e-2, rtol=1.6e-2)
    for _ in range(5):
        assert torch.equal(gathered_linear.triton(hidden, weight, ids), first)


@pytest.mark.gpu
@grouped()
@pytest.mark.parametrize("rows", [1, 4, 16, 32, MOST_ROWS])
@pytest.mark.parametrize("greedy", [False, True])
def test_real_shapes_fused(rows, greedy):
    """Whole numbers: logits are exact, fused or not; scores differ by the noise's rounding only."""
    hidden, weight, ids = whole(rows, "cuda", REAL)
    positions = torch.arange(rows, device="cuda")
    sampling = sampling_of(rows, "cuda", greedy)
    for head in heads(weight, ids):
        scores = exact_scores(exact_logits(head, hidden).to(hidden.dtype), positions, sampling, head.ids)
        best = scores.sort(dim=-1, descending=True, stable=True)
        for _ in range(3):
            with poisoned():
                places = head_topk.triton(head, hidden, 1, positions, sampling)[1]
                values, columns = head_topk.triton(head, hidden, 10, positions, sampling)
            assert (best.values[:, :1] - scores.gather(1, places) < 1e-4).all()
            expected = scores.log_softmax(dim=-1)
            torch.testing.assert_close(values.double(), expected.gather(1, columns), atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(scores.gather(1, columns), best.values[:, :10], atol=1e-4, rtol=1e-6)
            if greedy:
                assert torch.equal(places, best.indices[:, :1])
                assert torch.equal(columns, best.indices[:, :10])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
def test_a_graph_replays_them(rows):
    """One after another, each reading the output of the one before, also after the set of ids has changed."""
    hidden, weight, ids = random(rows, torch.bfloat16, "cuda", REAL)
    head = DraftHead(weight, ids.clone(), gathered=True)
    positions = torch.arange(rows, device="cuda")
    sampling = sampling_of(rows, "cuda")

    def run():
        head.ids.copy_(ids.flip(0))
        first = head_topk(head, hidden, 1, positions, sampling)[1][:, 0]
        values, places = head_topk(head, hidden * 0.5 + weight[head.ids[first].clamp(min=0)], 4, positions, sampling)
        return first, values, places

    with torch.inference_mode():
        expected = run()
        assert all(torch.equal(*pair) for pair in zip(replayed(run), expected, strict=True))


@pytest.mark.gpu
def test_the_dispatch():
    hidden, weight, ids = random(2, torch.bfloat16, "cuda", (1000, 300, 4096))
    head = DraftHead(weight, ids, gathered=True)
    positions = torch.arange(2, device="cuda")
    sampling = sampling_of(2, "cuda")
    with torch.inference_mode():
        assert torch.equal(head_logits(head, hidden), gathered_linear.triton(hidden, weight, ids))
        values, columns = head_topk.reference(head, hidden, 4, positions, sampling)
        assert torch.equal(head_topk(head, hidden, 4, positions, sampling)[1], columns)
        wide = DraftHead(weight.float(), ids, gathered=True)  # no kernel for 32-bit weights
        assert head_topk(wide, hidden.float(), 1, positions, sampling)[1].shape == (2, 1)


def test_tilings_give_wgmma_its_least_size():
    assert all(choose_tiling(rows).outputs % 64 == 0 for rows in (1, 16, 17, 32, 33, 64, 500))
