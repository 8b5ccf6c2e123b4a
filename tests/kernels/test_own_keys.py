"""Own keys joined to attention over others: outputs and gradients against one softmax over all keys, in fp64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.kernels.own_keys import KeyValue, with_own_keys_reference, with_own_keys_triton
from slipstream.tests.kernels.triton_runs import DEVICES, TOLERANCES, poisoned

NUM_OTHERS = 6
CASES = [  # N, S, Q, G, D
    (1, 1, 4, 4, 16),
    (3, 2, 4, 2, 64),
    (2, 6, 14, 2, 32),
    (3, 3, 5, 5, 96),
    (2, 1, 24, 3, 256),
    pytest.param((3000, 6, 32, 8, 128), marks=pytest.mark.gpu),
]
Run = Callable[[Tensor, Tensor, Tensor, list[KeyValue]], Tensor]


class Scene:
    """A few other keys, the same for all rows; scores of them and of own ones lie `shift` apart."""

    def __init__(self, case: tuple[int, ...], dtype: torch.dtype, device: str, shift: float) -> None:
        (N, S, Q, G, D), generator = case, torch.Generator().manual_seed(sum(case))

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator)).to(device, dtype)

        self.q = random(N, Q, D, scale=2.0)
        self.keys, self.values = random(NUM_OTHERS, G, D), random(NUM_OTHERS, G, D)
        self.own = [(random(N, G, D), random(N, G, D)) for _ in range(S)]
        self.shift = shift
        self.upstream = random(N, Q, D)

    def expected(self) -> list[Tensor]:
        """Outputs and the gradients of q and of all own keys and values, through one softmax."""
        q, *own = self.leaves(torch.float64)
        heads = q.shape[1] // self.keys.shape[1]
        keys, values = (x.double().repeat_interleave(heads, dim=1).expand(len(q), -1, -1, -1).unbind(1)
                        for x in (self.keys, self.values))  # fmt: skip
        scores = [(q * k).sum(-1) * q.shape[-1] ** -0.5 + self.shift for k in keys]
        scores += [(q * k.repeat_interleave(heads, dim=1)).sum(-1) * q.shape[-1] ** -0.5 for k in own[::2]]
        weights = torch.stack(scores).softmax(dim=0).unsqueeze(-1)
        everything = torch.stack([*values, *(v.repeat_interleave(heads, dim=1) for v in own[1::2])])
        output = (weights * everything).sum(0)
        return [output, *torch.autograd.grad(output, [q, *own], self.upstream.double())]

    def found(self, run: Run, dtype: torch.dtype) -> list[Tensor]:
        q, *own = self.leaves(dtype)
        output, lse = self.others(q)
        whole = run(q, output, lse, list(zip(own[::2], own[1::2], strict=True)))
        assert whole.dtype == dtype
        return [whole, *torch.autograd.grad(whole, [q, *own], self.upstream.to(dtype))]

    def others(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """What attention over the other keys gives: (N, Q, D) in q's dtype and the log sums (N, Q)."""
        heads, dtype = q.shape[1] // self.keys.shape[1], torch.promote_types(q.dtype, torch.float32)
        keys, values = (x.to(dtype).repeat_interleave(heads, dim=1) for x in (self.keys, self.values))
        scores = torch.einsum("nqd,kqd->nqk", q.to(dtype), keys) * q.shape[-1] ** -0.5 + self.shift
        output = torch.einsum("nqk,kqd->nqd", scores.softmax(-1), values)
        return output.to(q.dtype), scores.logsumexp(-1)

    def leaves(self, dtype: torch.dtype) -> list[Tensor]:
        return [x.detach().to(dtype).requires_grad_() for x in (self.q, *(x for pair in self.own for x in pair))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [-60.0, 0.0, 60.0])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("run", [with_own_keys_reference, with_own_keys_triton])
def test_equals_one_softmax(run: Run, case: tuple[int, ...], dtype: torch.dtype, shift: float, device: str) -> None:
    """Far apart, too, where one side has all the weight."""
    scene = Scene(case, dtype, device, shift)
    with poisoned():
        found = scene.found(run, dtype)
    for one, other in zip(found, scene.expected(), strict=True):
        tolerance = 4 * TOLERANCES[dtype]
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
