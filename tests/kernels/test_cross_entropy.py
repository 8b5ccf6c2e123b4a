"""Losses: values against other forms of their formulas in fp64, gradients against autograd of those."""

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels import cross_entropy as module
from slipstream.kernels.cross_entropy import Kind, label_cross_entropy, soft_cross_entropy, taught_cross_entropy
from slipstream.tests.kernels.triton_runs import each_device, poisoned
from slipstream.tests.pairwise import grouped, rotating

KINDS = get_args(Kind)
RUNS = [soft_cross_entropy.reference, soft_cross_entropy.triton]
SHAPES = [(1, 1), (2, 128), (3, 300), pytest.param((4096, 32768), marks=pytest.mark.gpu)]
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
LABEL_RUNS = [label_cross_entropy.reference, label_cross_entropy.triton]
LABEL_SHAPES = [(1, 1), (3, 300), (2, 1025), pytest.param((4096, 151936), marks=pytest.mark.gpu)]
PRECISIONS = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # the interpreter cuts bf16 off
Run = Callable[..., tuple[Tensor, Tensor]]
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, in the interpreter
each_run = pytest.mark.parametrize("run", RUNS)
each_label_run = pytest.mark.parametrize("run", LABEL_RUNS)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch, request):
    """Short rows go through several tiles, too."""
    parameters = getattr(request.node, "callspec", None)
    if parameters is None or parameters.params.get("shape", (0,))[0] < 4096:
        monkeypatch.setattr(module, "TILE", 128)


def expected(student: Tensor, teacher: Tensor, weights: Tensor, kind: str) -> Tensor:
    log_q = student.double().log_softmax(-1)
    p = teacher.double().softmax(-1)
    if kind == "soft_ce":
        rows = F.cross_entropy(student.double(), p, reduction="none")
    elif kind == "forward_kl":
        rows = F.kl_div(log_q, p, reduction="none").sum(-1)
    elif kind == "reverse_kl":
        rows = F.kl_div(teacher.double().log_softmax(-1), log_q.exp(), reduction="none").sum(-1)
    else:
        distance = 0.5 * (p - log_q.exp()).abs().sum(-1)
        if kind == "lk_lambda":
            share = torch.exp(-3 * (1.0 - distance.detach()))
            rows = share * F.kl_div(log_q, p, reduction="none").sum(-1) + (1 - share) * distance
        else:
            rows = distance if kind == "tv" else -torch.log(1.0 - distance)
    return rows * weights.double()


def with_gradient(run: Callable[[Tensor], Tensor], student: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    leaf = student.detach().clone().requires_grad_()
    losses = run(leaf)
    losses.backward(upstream.to(losses.dtype))
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


def random(shape: tuple[int, int], dtype: torch.dtype, device: str, seed: int, scale: float = 3.0) -> Tensor:
    """Logits in strided rows."""
    wide = torch.randn((shape[0], shape[1] + 16), generator=torch.Generator().manual_seed(seed)) * scale
    return wide.to(device, dtype)[:, : shape[1]]


def check(run: Run, student: Tensor, teacher: Tensor, weights: Tensor, kind: str, atol: float = 2e-6):
    """Each row's loss within 1e-5 of itself, its gradient within the rounding of its type, as a vector and by entry."""
    upstream = torch.linspace(0.5, 1.5, len(student), device=student.device)
    losses, gradient = with_gradient(lambda x: expected(x, teacher, weights, kind), student.double(), upstream)
    with poisoned():
        computed, computed_gradient = with_gradient(lambda x: run(x, teacher, weights, kind)[0], student, upstream)
    assert (computed.dtype, computed_gradient.dtype) == (torch.float32, student.dtype)
    torch.testing.assert_close(computed.double(), losses, rtol=1e-5, atol=atol)
    compared = torch.ones_like(losses, dtype=torch.bool)
    if kind in ("tv", "lk", "lk_lambda"):  # their gradient jumps where p = q, which rounding moves
        distance = (student.double().log_softmax(-1) - teacher.double().log_softmax(-1)).abs()
        compared = ((distance > 2e-5) | (distance == 0)).all(-1)
        assert compared.double().mean() > 0.6
    computed_gradient = computed_gradient[compared].double()
    gradient = gradient[compared]
    precision = 1e-4 if student.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(computed_gradient, gradient, rtol=precision, atol=atol)
    assert ((computed_gradient - gradient).norm(dim=-1) <= precision * gradient.norm(dim=-1) + atol).all()


@grouped("shape")
@each_device
@pytest.mark.parametrize(("shape", "dtypes"), rotating(SHAPES, DTYPES))
@pytest.mark.parametrize("kind", KINDS)
@each_run
def test_values_and_gradients(run, kind, shape, dtypes, device):
    student = random(shape, dtypes[0], device, 0)
    teacher = random(shape, dtypes[1], device, 1)
    weights = torch.rand(shape[0], generator=torch.Generator().manual_seed(2)).to(device)
    check(run, student, teacher, weights, kind)


def far_logits() -> Tensor:
    """Far from 0, far apart, and with the peak in the first or the last tile: the running maxima must move."""
    far = torch.full((6, 300), -40.0)
    far[0, 299] = 60.0
    far[1, 0] = 60.0
    far[2, 150] = 60.0
    far[3] = torch.linspace(-50, 50, 300)
    far[4] = torch.linspace(50, -50, 300)
    far[5] = torch.randn(300, generator=torch.Generator().manual_seed(0)) + 3e4
    return far


@grouped()
@each_device
@pytest.mark.parametrize("kind", KINDS)
@each_run
def test_extreme_logits(run, kind, device):
    far = far_logits()
    near = far + torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    near[5] -= 2e4  # a constant changes nothing
    far[5] = far[5].round(decimals=2)
    near[5] = near[5].round(decimals=2)
    check(run, near.to(device), far.to(device), torch.ones(6, device=device), kind, atol=1e-5)


@grouped()
@each_device
@pytest.mark.parametrize("kind", ["soft_ce", "forward_kl", "tv", "lk"])
@each_run
def test_columns_that_the_teacher_rules_out(run, kind, device):
    """-inf is probability 0: the same as a teacher of a very low logit there; whole tiles, too."""
    student = random((4, 300), torch.float32, device, 0)
    teacher = random((4, 300), torch.float32, device, 1)
    teacher[0, :130], teacher[1, 200:], teacher[2, ::2], teacher[3, :299] = (-torch.inf,) * 4
    floor = teacher.clamp(min=-1e4)
    weights = torch.ones(4, device=device)
    upstream = torch.ones(4, device=device)
    for logits in (student, student.masked_fill(teacher == -torch.inf, -torch.inf)):  # the student does so as well
        low = logits.clamp(min=-1e4).double()
        losses, gradient = with_gradient(lambda x: expected(x, floor, weights, kind), low, upstream)
        computed, computed_gradient = with_gradient(lambda x: run(x, teacher, weights, kind)[0], logits, upstream)
        torch.testing.assert_close(computed.double(), losses, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(computed_gradient.double(), gradient, rtol=1e-4, atol=2e-6)


@each_device
@each_run
def test_limits_of_the_losses(run, device):
    student = random((3, 200), torch.float32, device, 0)
    weights = torch.ones(3, device=device)
    upstream = torch.ones(3, device=device)
    for kind in ("forward_kl", "reverse_kl", "tv", "lk"):  # a perfect draft: nothing lost, nothing to learn
        losses, gradient = with_gradient(lambda x, kind=kind: run(x, student, weights, kind)[0], student, upstream)
        torch.testing.assert_close(losses, torch.zeros_like(losses), atol=1e-6, rtol=0)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)
    teacher = student.clone()
    teacher[:, 0] = -torch.inf
    assert (run(student, teacher, weights, "reverse_kl")[0] == torch.inf).all()
    # nothing in common
    student[:, 100:] = -torch.inf
    teacher[:, :100] = -torch.inf
    teacher[:, 100:] = 1.0
    losses, gradient = with_gradient(lambda x: run(x, teacher, weights, "lk")[0], student, upstream)
    torch.testing.assert_close(losses, torch.full_like(losses, 69.0776), rtol=1e-4, atol=0)
    assert (gradient == 0).all()


@grouped()
@each_device
@pytest.mark.parametrize("kind", KINDS)
@each_run
def test_rows_without_weight_do_not_exist(run, kind, device):
    student = random((4, 200), torch.float32, device, 0)
    teacher = random((4, 200), torch.float32, device, 1)
    student[1] = torch.nan
    teacher[1] = torch.inf
    teacher[3] = -torch.inf
    weights = torch.tensor([1.0, 0.0, 2.0, 0.0], device=device)
    upstream = torch.ones(4, device=device)
    with poisoned():
        losses, gradient = with_gradient(lambda x: run(x, teacher, weights, kind)[0], student, upstream)
    assert (losses[[1, 3]] == 0).all()
    assert (gradient[[1, 3]] == 0).all()
    check(run, student[[0, 2]], teacher[[0, 2]], weights[[0, 2]], kind)


@each_device
@pytest.mark.parametrize("run", [*RUNS, *LABEL_RUNS])
def test_the_best_column_is_the_first_of_equals(run, device):
    student = random((6, 400), torch.bfloat16, device, 0)
    student[1, [30, 150, 390]] = 50.0
    student[2, [399, 200]] = 50.0
    student[3] = 0.0
    student[4] = -torch.inf
    student[4, 7] = -3e38
    student[5, 0] = 60.0
    expected = [max(range(400), key=lambda i: (student[0, i].item(), -i)), 30, 200, 0, 7, 0]
    if run in LABEL_RUNS:
        best = run(student, torch.zeros(6, dtype=torch.int64, device=device), with_gradient=True)[1]
    else:
        best = run(student, torch.zeros_like(student), torch.zeros(6, device=device))[1]
    assert best.dtype == torch.int64
    assert best.tolist() == expected


@each_device
def test_the_gradient_can_take_the_place_of_the_logits(device):
    leaf = random((3, 300), torch.bfloat16, device, 0)
    teacher = random((3, 300), torch.bfloat16, device, 1)
    weights = torch.tensor([1.0, 0.0, 0.5], device=device)
    scale = torch.tensor(2.0, device=device, requires_grad=True)

    def gradients(in_place):
        x = leaf.detach().clone().requires_grad_()
        logits = x + 0.0
        losses = soft_cross_entropy.triton(logits, teacher, weights, in_place=in_place)[0].sum()
        (losses * scale).backward(retain_graph=True)
        assert x.grad is not None
        return x.grad, logits.detach(), losses

    gradient, logits, _ = gradients(in_place=False)
    assert torch.equal(logits, leaf)
    in_place, overwritten, losses = gradients(in_place=True)
    assert torch.equal(in_place, gradient)
    assert torch.equal(overwritten, gradient)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward()
    with pytest.raises(AssertionError, match="would write over a parameter"):
        soft_cross_entropy.triton(leaf.requires_grad_(), teacher, weights, in_place=True)


@each_device
@each_run
def test_no_rows_and_no_gradient_for_the_teacher(run, device):
    student = torch.randn(4, 50, device=device)
    teacher = torch.randn(4, 50, device=device, requires_grad=True)
    losses, best = run(student[:0], teacher[:0], torch.ones(0, device=device))
    assert losses.shape == best.shape == (0,)
    losses, _ = run(student.requires_grad_(), teacher, torch.ones(4, device=device))
    losses.sum().backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_float64_stays_float64_on_the_cpu():
    """Gradients of tests that compare packed with unpacked rows; checked by finite differences."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(3, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    teacher = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    weights = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    for kind in set(KINDS) - {"lk_lambda"}:  # its share is not differentiated
        assert torch.autograd.gradcheck(lambda x, kind=kind: soft_cross_entropy(x, teacher, weights, kind)[0], student)


def labelled(shape: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits, and labels (N,)."""
    labels = torch.randint(shape[1], shape[:1], generator=torch.Generator().manual_seed(shape[1]))
    return random(shape, dtype, device, shape[1]), labels.to(device)


def label_expected(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient in fp64, a few rows at a time."""
    losses = []
    gradients = []
    for part, of_part in zip(logits.split(256), labels.split(256), strict=True):
        leaf = part.double().requires_grad_()
        losses.append(F.cross_entropy(leaf, of_part, reduction="none"))
        gradients.append(torch.autograd.grad(losses[-1].sum(), leaf)[0].float())
    return torch.cat(losses).detach(), torch.cat(gradients)


def check_labels(run: Run, logits: Tensor, labels: Tensor):
    """Each loss within 1e-5 of itself, the gradient within the rounding of its type, as a vector and by entry."""
    losses, gradient = label_expected(logits, labels)
    best = logits.float().argmax(dim=-1)
    before = logits.clone()
    with poisoned():
        computed, computed_best = run(logits, labels, with_gradient=False)
    assert (computed.dtype, computed_best.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(computed.double(), losses, rtol=1e-5, atol=2e-6)
    assert torch.equal(computed_best, best)
    assert torch.equal(logits, before)
    with poisoned():
        again, best_again = run(logits, labels, with_gradient=True)
    assert torch.equal(again, computed)
    assert torch.equal(best_again, best)
    precision = PRECISIONS[logits.dtype]
    torch.testing.assert_close(logits.float(), gradient, rtol=precision, atol=2e-7)
    assert ((logits.float() - gradient).norm(dim=-1) <= precision * gradient.norm(dim=-1) + 2e-7).all()


@grouped("shape")
@each_device
@pytest.mark.parametrize(("shape", "dtype"), rotating(LABEL_SHAPES, PRECISIONS))
@each_label_run
def test_losses_best_columns_and_gradients(run, shape, dtype, device):
    check_labels(run, *labelled(shape, dtype, device))


@each_device
@each_label_run
def test_nothing_is_written_between_the_rows(run, device):
    wide = torch.full((3, 400), torch.nan, device=device)
    wide[:, 50:350], labels = labelled((3, 300), torch.float32, device)
    run(wide[:, 50:350], labels, with_gradient=True)
    assert wide[:, :50].isnan().all()
    assert wide[:, 350:].isnan().all()
    assert not wide[:, 50:350].isnan().any()


@each_device
@each_label_run
def test_labels_extreme_logits(run, device):
    far = far_logits()
    logits = torch.cat((far, far[5:] - 6e4, torch.linspace(-1e20, 1e20, 300)[None]))
    check_labels(run, logits.to(device), torch.tensor([299, 5, 150, 299, 299, 7, 7, 298], device=device))


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@each_label_run
def test_labels_columns_that_are_ruled_out(run, dtype, device):
    """-inf is probability 0, whole tiles, too: it costs infinitely much as a label, and gets no gradient else."""
    logits, _ = labelled((3, 300), dtype, device)
    logits[0, :130], logits[1, 1:], logits[2, 250:] = (-torch.inf,) * 3
    labels = torch.tensor([299, 0, 250], device=device)
    check_labels(run, logits, labels)
    assert (logits[0, :130] == 0).all()
    assert (logits[1] == 0).all()
    assert logits[2, 250] == -1.0


@each_device
@each_label_run
def test_a_logit_that_is_no_number_makes_its_row_none(run, device):
    logits, labels = labelled((3, 300), torch.float32, device)
    logits[1, 200] = torch.nan
    losses, _ = run(logits, labels, with_gradient=True)
    assert losses.isnan().tolist() == [False, True, False]
    assert logits.isnan().all(dim=-1).tolist() == [False, True, False]


@each_device
@each_label_run
@pytest.mark.parametrize("with_gradient", [False, True])
def test_labels_no_rows(with_gradient, run, device):
    labels = torch.zeros(0, dtype=torch.int64, device=device)
    losses, best = run(torch.zeros(0, 50, device=device), labels, with_gradient=with_gradient)
    assert losses.shape == best.shape == (0,)


def test_labels_float64_is_computed_in_float64_on_the_cpu():
    logits = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([3, 0, 29, 5])
    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(leaf, labels, reduction="sum"), leaf)
    label_cross_entropy(logits, labels, with_gradient=True)
    torch.testing.assert_close(logits, gradient, rtol=1e-12, atol=1e-14)


@grouped()
@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [taught_cross_entropy.reference, taught_cross_entropy.triton])
def test_taught_losses_have_weights_and_overlaps(run, dtype, device):
    student = random((5, 300), dtype, device, 0, scale=1.5)
    teacher = random((5, 300), dtype, device, 1, scale=1.5)
    labels = torch.tensor([0, 299, 7, 130, 255], device=device)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.25], device=device)
    entropies, gradients = label_expected(student, labels)
    gradient = gradients * weights.unsqueeze(1)
    overlaps = torch.minimum(student.double().softmax(-1), teacher.double().softmax(-1)).sum(-1)
    logits = student.clone()
    with poisoned():
        computed, computed_entropies, computed_overlaps, best = run(
            logits, teacher, labels, weights, with_gradient=True
        )
    assert torch.equal(best, student.argmax(-1))
    columns = (computed, entropies * weights), (computed_entropies, entropies), (computed_overlaps, overlaps)
    for actual, exact in columns:
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=2e-6)
    precision = 1e-4 if dtype == torch.float32 else 2**-7
    assert ((logits.float() - gradient).norm(dim=-1) <= precision * gradient.norm(dim=-1) + 2e-6).all()
    assert not logits[2].any()
    untouched = student.clone()
    assert torch.equal(run(untouched, teacher, labels, weights, with_gradient=False)[0], computed)
    assert torch.equal(untouched, student)
