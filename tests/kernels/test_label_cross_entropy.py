"""Cross-entropy against labels: losses and gradients against torch's own in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels import cross_entropy as module
from slipstream.kernels.cross_entropy import (
    label_cross_entropy,
    label_cross_entropy_reference,
    label_cross_entropy_triton,
)
from slipstream.tests.kernels.triton_runs import DEVICES, poisoned

RUNS = [label_cross_entropy_reference, label_cross_entropy_triton]
SHAPES = [(1, 1), (2, 128), (3, 300), (2, 1025), pytest.param((4096, 151936), marks=pytest.mark.gpu)]
PRECISIONS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # the interpreter cuts bf16 off
Run = Callable[..., tuple[Tensor, Tensor]]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, in the interpreter


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Short rows go through several tiles, too."""
    if "4096" not in request.node.name:
        monkeypatch.setattr(module, "TILE", 128)


def random(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits in rows that do not lie next to each other, and labels."""
    generator = torch.Generator().manual_seed(shape[1])
    wide = torch.randn((shape[0], shape[1] + 16), generator=generator) * 3
    labels = torch.randint(shape[1], shape[:1], generator=generator)
    return wide.to(device, dtype)[:, : shape[1]], labels.to(device)


def expected(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient in fp64, a few rows at a time."""
    losses, gradients = [], []
    for part, of_part in zip(logits.split(256), labels.split(256), strict=True):
        leaf = part.double().requires_grad_()
        losses.append(F.cross_entropy(leaf, of_part, reduction="none"))
        gradients.append(torch.autograd.grad(losses[-1].sum(), leaf)[0].float())
    return torch.cat(losses).detach(), torch.cat(gradients)


def check(run: Run, logits: Tensor, labels: Tensor) -> None:
    """Each loss within 1e-5 of itself, the gradient within the rounding of its type, as a vector and by entry."""
    losses, gradient = expected(logits, labels)
    best, before = logits.float().argmax(dim=-1), logits.clone()
    with poisoned():
        found, found_best = run(logits, labels, with_gradient=False)
    assert (found.dtype, found_best.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(found.double(), losses, rtol=1e-5, atol=2e-6)
    assert torch.equal(found_best, best)
    assert torch.equal(logits, before)
    with poisoned():
        again, best_again = run(logits, labels, with_gradient=True)
    assert torch.equal(again, found)
    assert torch.equal(best_again, best)
    precision = PRECISIONS[logits.dtype]
    torch.testing.assert_close(logits.float(), gradient, rtol=precision, atol=2e-7)
    assert ((logits.float() - gradient).norm(dim=-1) <= precision * gradient.norm(dim=-1) + 2e-7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("run", RUNS)
def test_losses_best_columns_and_gradients(run: Run, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    check(run, *random(shape, dtype, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", RUNS)
def test_nothing_is_written_between_the_rows(run: Run, device: str) -> None:
    wide = torch.full((3, 400), torch.nan, device=device)
    wide[:, 50:350], labels = random((3, 300), torch.float32, device)
    run(wide[:, 50:350], labels, with_gradient=True)
    assert wide[:, :50].isnan().all()
    assert wide[:, 350:].isnan().all()
    assert not wide[:, 50:350].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", RUNS)
def test_extreme_logits(run: Run, device: str) -> None:
    """Far from 0, far apart, and with the peak in the first or the last tile: the running maximum must move."""
    logits = torch.full((8, 300), -40.0)
    logits[0, 299], logits[1, 0], logits[2, 150] = 60.0, 60.0, 60.0
    logits[3] = torch.linspace(-50, 50, 300)
    logits[4] = torch.linspace(50, -50, 300)
    logits[5] = torch.randn(300, generator=torch.Generator().manual_seed(0)) + 3e4
    logits[6] = logits[5] - 6e4
    logits[7] = torch.linspace(-1e20, 1e20, 300)
    check(run, logits.to(device), torch.tensor([299, 5, 150, 299, 299, 7, 7, 298], device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("run", RUNS)
def test_columns_that_are_ruled_out(run: Run, dtype: torch.dtype, device: str) -> None:
    """-inf is probability 0, whole tiles, too: it costs infinitely much as a label, and gets no gradient else."""
    logits, _ = random((3, 300), dtype, device)
    logits[0, :130], logits[1, 1:], logits[2, 250:] = (-torch.inf,) * 3
    labels = torch.tensor([299, 0, 250], device=device)
    check(run, logits, labels)
    assert (logits[0, :130] == 0).all()
    assert (logits[1] == 0).all()
    assert logits[2, 250] == -1.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", RUNS)
def test_a_logit_that_is_no_number_makes_its_row_none(run: Run, device: str) -> None:
    logits, labels = random((3, 300), torch.float32, device)
    logits[1, 200] = torch.nan
    losses, _ = run(logits, labels, with_gradient=True)
    assert losses.isnan().tolist() == [False, True, False]
    assert logits.isnan().all(dim=-1).tolist() == [False, True, False]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", RUNS)
def test_the_best_column_is_the_first_of_equals(run: Run, device: str) -> None:
    logits, labels = random((6, 400), torch.bfloat16, device)
    logits[1, [30, 150, 390]] = 50.0
    logits[2, [399, 200]] = 50.0
    logits[3] = 0.0
    logits[4] = -torch.inf
    logits[4, 7] = -3.0
    logits[5, 0] = 60.0
    first = max(range(400), key=lambda i: (logits[0, i].item(), -i))
    assert run(logits, labels, with_gradient=True)[1].tolist() == [first, 30, 200, 0, 7, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_no_rows(with_gradient: bool, run: Run, device: str) -> None:
    labels = torch.zeros(0, dtype=torch.int64, device=device)
    losses, best = run(torch.zeros(0, 50, device=device), labels, with_gradient=with_gradient)
    assert losses.shape == best.shape == (0,)


def test_float64_is_computed_in_float64_on_the_cpu() -> None:
    logits = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels, leaf = torch.tensor([3, 0, 29, 5]), logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(leaf, labels, reduction="sum"), leaf)
    label_cross_entropy(logits, labels, with_gradient=True)
    torch.testing.assert_close(logits, gradient, rtol=1e-12, atol=1e-14)


def test_it_makes_no_graph() -> None:
    with pytest.raises(AssertionError):
        label_cross_entropy(torch.randn(2, 5, requires_grad=True), torch.tensor([0, 1]), with_gradient=False)
