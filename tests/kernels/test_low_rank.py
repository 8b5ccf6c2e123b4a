"""Low-rank changes against a loop over rows."""

import pytest
import torch

from slipstream.kernels.gemm.low_rank import (
    LowRankChange,
    LowRankFactors,
    RowAdapters,
    add_low_rank,
    own_ranks,
    stack_changes,
)
from slipstream.tests.kernels.triton_runs import TOLERANCES, each_device, poisoned
from slipstream.tests.pairwise import grouped, rotating

REAL = [((64, 4096, 6144), 1), ((1024, 8192, 4096), 1), ((48, 4096, 4096), 6)]
SHAPES = [((5, 24, 40), 1), ((15, 600, 7), 3), *(pytest.param(real, marks=pytest.mark.gpu) for real in REAL)]


@grouped()
@each_device
@pytest.mark.parametrize("run", ["reference", "triton"])
@pytest.mark.parametrize(("sizes", "dtype"), rotating(SHAPES, TOLERANCES))
def test_each_row_takes_its_adapter(run, sizes, dtype, device, monkeypatch):
    """Ranks of 2 and 9; the inputs lie in wider rows."""
    (num_rows, size, outputs), repeat = sizes
    generator = torch.Generator().manual_seed(num_rows)
    a, b, x, out = (
        torch.randn(shape, generator=generator).to(device, dtype) / 8
        for shape in ((11, size), (outputs, 11), (num_rows, size + 16), (num_rows, outputs))
    )
    x = x[:, :size]
    owners = torch.tensor([1] * 2 + [2] * 9, device=device)
    adapters = torch.randint(3, (num_rows // repeat,), generator=generator).to(device)
    expected = out.double()
    for row, adapter in enumerate(adapters.repeat_interleave(repeat)):
        is_own = owners == adapter
        expected[row] += b[:, is_own].double() @ (a[is_own].double() @ x[row].double())
    monkeypatch.setattr("slipstream.kernels.gemm.low_rank.own_ranks", getattr(own_ranks, run))
    with poisoned():
        result = add_low_rank(out, x, LowRankFactors(a, b, owners), adapters)
    torch.testing.assert_close(result.double(), expected, atol=2 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])


def test_changes_of_layers_are_stacked():
    """The second of three layers has none."""
    rows = RowAdapters()
    rows.numbers = torch.tensor([2, 0, 1])
    first, last = (
        LowRankChange(LowRankFactors(torch.randn(3, 8), torch.randn(5, 3), torch.tensor(owners)), rows)
        for owners in ([1, 2, 2], [2, 1, 1])
    )
    x = torch.randn(6, 8)
    change = stack_changes([first, None, last], 5)
    expected = torch.cat([first(torch.zeros(6, 5), x), torch.zeros(6, 5), last(torch.zeros(6, 5), x)], dim=1)
    torch.testing.assert_close(change(torch.zeros(6, 15), x), expected)
    assert stack_changes([None, None], 5) is None
