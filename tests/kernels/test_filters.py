"""The threshold kernels against the sort, done in fp64."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from slipstream.kernels.sampling.filters import Filters, filter_thresholds_reference, filter_thresholds_triton
from slipstream.tests.kernels.triton_runs import SLOW, each_device, poisoned, replayed
from slipstream.tests.pairwise import grouped

Shape = tuple[int, int]
Source = Callable[[Shape, torch.Generator], Tensor]


def normal(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 2


def peaked(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 8


def flat(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.01


def rounded(shape: Shape, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * 2).bfloat16()


def tied(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randint(3, shape, generator=generator).float()


def constant(shape: Shape, _: torch.Generator) -> Tensor:
    return torch.full(shape, -1.5)


def mostly_forbidden(shape: Shape, generator: torch.Generator) -> Tensor:
    allowed = torch.rand(shape, generator=generator) < 0.01
    allowed[:, 3] = True
    return torch.randn(shape, generator=generator).masked_fill(~allowed, -torch.inf)


def few_allowed(shape: Shape, generator: torch.Generator) -> Tensor:
    """Fewer than most top-k keep."""
    logits = torch.full(shape, -torch.inf)
    logits[:, ::13][:, :4] = torch.randn(shape[0], 4, generator=generator)
    return logits


def unused_ids(shape: Shape, generator: torch.Generator) -> Tensor:
    """Half of the vocabulary far below the rest."""
    logits = torch.randn(shape, generator=generator) * 3
    logits[:, shape[1] // 2 :] -= 1e4
    return logits


def long_tailed(shape: Shape, generator: torch.Generator) -> Tensor:
    """Probabilities that fall with their rank, as a language model's do."""
    ranks = torch.rand(shape, generator=generator).argsort(dim=1) + 1
    return -1.6 * ranks.float().log() + 20


SOURCES = [normal, peaked, flat, rounded, tied, constant, mostly_forbidden, few_allowed, unused_ids, long_tailed]
SETTINGS = [  # top_k, top_p, min_p, temperature
    (0, 1.0, 0.0, 1.0),
    (5, 1.0, 0.0, 0.8),
    (20, 0.8, 0.0, 0.6),
    (50, 0.95, 0.02, 1.3),
    (0, 0.9, 0.0, 0.7),
    (0, 0.3, 0.0, 1.0),
    (0, 0.999, 0.0, 1.5),
    (0, 1.0, 0.05, 1.0),
    (0, 0.95, 1.0, 1.0),
    (1, 0.5, 0.0, 1.0),
    (0, 0.0, 0.0, 1.0),
    (3, 0.5, 0.5, 0.0),
    (700, 1.0, 0.0, 1.0),
    (700, 0.9, 0.0, 1.0),
    (10_000_000, 0.9, 0.0, 1.0),
    (7, 0.6, 0.0, 1.0),
]


def parameters(settings: list[tuple[int, float, float, float]], device: str) -> tuple[Tensor, Filters]:
    top_k, top_p, min_p, temperature = (torch.tensor(column, device=device) for column in zip(*settings, strict=True))
    return temperature.float(), Filters(top_k, top_p.float(), min_p.float())


def check(logits: Tensor, temperature: Tensor, filters: Filters, thresholds: Tensor):
    """The kept sets are equal but for tokens before which the mass is top_p up to 1e-6."""
    scaled = logits.double() / temperature[:, None].double().clamp(min=1e-6)
    expected = filter_thresholds_reference(scaled, filters)
    for row in range(len(logits)):
        if temperature[row] == 0:
            assert thresholds[row] == -torch.inf, "greedy rows need none"
            continue
        actual = logits[row].float() >= thresholds[row]
        exact = scaled[row] >= expected[row]
        if torch.equal(actual, exact):
            continue
        ordered = scaled[row].sort(descending=True).values
        probs = ordered[: int(filters.top_k[row]) or None].softmax(dim=0)
        before = torch.cat((probs.new_zeros(1), probs.cumsum(0)[:-1]))
        differing = scaled[row][actual != exact]
        for value in (differing.min(), differing.max()):
            assert abs(before[(ordered > value).sum()] - filters.top_p[row]) < 1e-6, f"row {row}"


@grouped()
@each_device
@pytest.mark.parametrize(
    ("source", "vocab"),
    [(flat, 40), (constant, 40), (few_allowed, 40), (tied, 1), (tied, 5000), (long_tailed, 5000)]
    + [pytest.param(*case, marks=SLOW) for case in product((normal, peaked, mostly_forbidden, unused_ids), (40, 5000))]
    + [pytest.param(rounded, 8192, marks=SLOW)]
    + [pytest.param(*case, marks=pytest.mark.gpu) for case in product(SOURCES, (32_000, 128_256, 262_144))],
)
def test_thresholds_equal_the_sort(source, vocab, device):
    logits = source((len(SETTINGS), vocab), torch.Generator().manual_seed(vocab)).to(device)
    temperature, filters = parameters(SETTINGS, device)
    with poisoned():
        thresholds = filter_thresholds_triton(logits, temperature, filters, None, 1)
    check(logits, temperature, filters, thresholds)


@each_device
def test_rows_choose_parameters_and_do_not_depend_on_their_batch(device):
    logits = long_tailed((6, 4500), torch.Generator().manual_seed(0)).to(device)
    temperature, filters = parameters(SETTINGS, device)
    rows = torch.tensor([4, 2, 12], device=device)
    together = filter_thresholds_triton(logits, temperature, filters, rows, 2)
    entries = rows.repeat_interleave(2)
    check(logits, temperature[entries], filters.select(entries), together)
    for row in range(6):
        alone = filter_thresholds_triton(logits[row : row + 1], temperature, filters, entries[row : row + 1], 1)
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32_000, 128_256, 151_936])
def test_many_random_settings(vocab):
    generator = torch.Generator().manual_seed(vocab)
    for source in (normal, rounded, long_tailed, unused_ids):
        logits = source((128, vocab), generator).cuda()
        top_k = torch.randint(2000, (128,), generator=generator) // (torch.arange(128) % 7 * 9 + 1)
        top_p, min_p, temperature = torch.rand(3, 128, generator=generator).cuda()
        min_p[::2] = 0.0
        filters = Filters(top_k.cuda(), top_p**0.3, min_p * 0.2)
        temperature = 0.2 + 1.5 * temperature
        check(logits, temperature, filters, filter_thresholds_triton(logits, temperature, filters, None, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
def test_a_graph_replays_the_search(rows):
    logits = long_tailed((rows, 128_256), torch.Generator().manual_seed(1)).cuda()
    temperature, filters = parameters([SETTINGS[row % len(SETTINGS)] for row in range(rows)], "cuda")
    expected = filter_thresholds_triton(logits, temperature, filters, None, 1)
    assert torch.equal(replayed(lambda: filter_thresholds_triton(logits, temperature, filters, None, 1)), expected)
