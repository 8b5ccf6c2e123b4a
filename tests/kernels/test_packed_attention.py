"""Own keys joined to attention over others: outputs and gradients against one softmax over all keys, in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.packed import extend_attention, own_keys_gradients
from slipstream.tests.kernels.triton_runs import TOLERANCES, each_device, poisoned
from slipstream.tests.pairwise import grouped, rotating

NUM_OTHERS = 6
CASES = [  # N, S, Q, G, D
    (1, 1, 4, 4, 16),
    (3, 2, 4, 2, 64),
    (2, 6, 14, 2, 32),
    (3, 3, 5, 5, 96),
    (2, 1, 24, 3, 256),
    pytest.param((3000, 6, 32, 8, 128), marks=pytest.mark.gpu),
]
Extend = Callable[..., tuple[Tensor, Tensor]]
Gradients = Callable[..., tuple[Tensor, Tensor, Tensor]]
RUNS = [
    (extend_attention.reference, own_keys_gradients.reference),
    (extend_attention.triton, own_keys_gradients.triton),
]


class Scene:
    """A few other keys, the same for all rows; scores of them and of own ones lie `shift` apart."""

    def __init__(self, case: tuple[int, ...], dtype: torch.dtype, device: str, shift: float):
        N, S, Q, G, D = case
        generator = torch.Generator().manual_seed(sum(case))

        def random(*shape, scale=1.0):
            return (scale * torch.randn(shape, generator=generator)).to(device, dtype)

        self.q = random(N, Q, D, scale=2.0)
        self.others = random(NUM_OTHERS, G, D)
        self.other_values = random(NUM_OTHERS, G, D)
        self.keys = random(S, N, G, D)
        self.values = random(S, N, G, D)
        self.shift = shift
        self.upstream = random(N, Q, D)

    def by_head(self, x: Tensor) -> Tensor:
        """(..., G, D) -> (..., Q, D) in fp64."""
        return x.double().repeat_interleave(self.q.shape[1] // x.shape[-2], dim=-2)

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        """(N, Q) for each of keys (S, N or 1, G, D): (S, N, Q)."""
        return (q * self.by_head(keys)).sum(-1) * q.shape[-1] ** -0.5

    def before(self) -> tuple[Tensor, Tensor]:
        """Attends to the other keys alone: output (N, Q, D) and lse (N, Q), fp64."""
        scores = self.scores(self.q.double(), self.others.unsqueeze(1)) + self.shift
        values = self.by_head(self.other_values).unsqueeze(1)
        return (scores.softmax(0).unsqueeze(-1) * values).sum(0), scores.logsumexp(0)

    def expected(self) -> list[Tensor]:
        """Output, lse and the gradients of q, own keys and own values through one softmax over all keys. q's is that
        through the own keys: the others' keys do not move it here."""
        q, keys, values = (x.double().requires_grad_() for x in (self.q, self.keys, self.values))
        other_scores = self.scores(self.q.double(), self.others.unsqueeze(1)) + self.shift
        scores = torch.cat((other_scores, self.scores(q, keys)))
        everything = torch.cat((self.by_head(self.other_values).unsqueeze(1).expand(-1, len(q), -1, -1),
                                self.by_head(values)))  # fmt: skip
        output = (scores.softmax(0).unsqueeze(-1) * everything).sum(0)
        gradients = torch.autograd.grad(output, [q, keys, values], self.upstream.double())
        return [output, scores.logsumexp(0).t(), *gradients]

    def computed(self, extend: Extend, gradients: Gradients) -> list[Tensor]:
        output, lse = self.before()
        output = output.to(self.q.dtype)
        lse = lse.t().float().contiguous()
        extended, total = extend(self.q, output, lse, self.keys, self.values)
        assert (extended.dtype, total.dtype) == (self.q.dtype, torch.float32)
        leaf_gradients = gradients(self.upstream, self.q, extended, total, self.keys, self.values)
        assert {x.dtype for x in leaf_gradients} == {self.q.dtype}
        return [extended, total, *leaf_gradients]


@grouped("dtype")
@each_device
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("case", "dtype", "shift"), rotating(CASES, TOLERANCES, [0.0, -60.0, 60.0]))
def test_equals_one_softmax(run, case, dtype, shift, device):
    """Far apart, too, where one side has all the weight."""
    scene = Scene(case, dtype, device, shift)
    with poisoned():
        actual = scene.computed(*run)
    for value, exact in zip(actual, scene.expected(), strict=True):
        tolerance = 4 * TOLERANCES[dtype]
        torch.testing.assert_close(value.double(), exact, rtol=tolerance, atol=tolerance)
