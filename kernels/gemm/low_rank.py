"""Low-rank changes of a linear layer, each row's by its adapter.

The factors of all adapters lie beside one another: a row's product with the first factors is kept where these are its
own adapter's, and one product with all second factors adds the changes. Nothing waits for the host; adapter 0 is none.
Letters: T rows, I inputs, O outputs, S sum of the ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import Op, on_gpu
from slipstream.kernels.norm import as_rows
from slipstream.kernels.tiles import load_fp32

BLOCK = 512  # inputs that a program multiplies at once


class LowRankFactors(NamedTuple):
    a: Tensor  # (S, I)
    b: Tensor  # (O, S)
    owners: Tensor  # (S,) int64 adapter of each rank, from 1


class RowAdapters:
    """The adapters that a pass's rows take: `numbers` (n,) int64, each of as many rows, from 1; 0: none."""

    def __init__(self) -> None:
        self.numbers: Tensor | None = None


class LowRankChange(NamedTuple):
    factors: LowRankFactors
    rows: RowAdapters

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """Adds to outputs (T, O) of a layer what adapters make of its inputs (T, I)."""
        assert self.rows.numbers is not None, "a pass begins with its adapters"
        return add_low_rank(out, x, self.factors, self.rows.numbers)


def stack_changes(changes: Sequence[LowRankChange | None], num_outputs: int) -> LowRankChange | None:
    """Returns the change of the outputs of several layers of one input, `num_outputs` of each, one after another."""
    present = [change for change in changes if change is not None]
    if not present:
        return None
    a, b, owners = zip(*(change.factors for change in present), strict=True)
    none = b[0].new_zeros(num_outputs, 0)
    blocks = torch.block_diag(*(none if change is None else change.factors.b for change in changes))
    return LowRankChange(LowRankFactors(torch.cat(a), blocks, torch.cat(owners)), present[0].rows)


def add_low_rank(out: Tensor, x: Tensor, factors: LowRankFactors, adapters: Tensor) -> Tensor:
    """Adds B A x to `out` (T, O) in place, of the factors whose owner is the row's adapter. x (T, I); adapters (n,)
    int64: of T / n rows each, in their order."""
    return out.addmm_(own_ranks(x, factors.a, factors.owners, adapters), factors.b.T)


@Op
def own_ranks(x: Tensor, a: Tensor, owners: Tensor, adapters: Tensor) -> Tensor:
    """A x (T, S) where the owner of a rank is the row's adapter, else 0; see `add_low_rank`."""
    is_owner = owners == adapters[:, None]  # (n, S)
    hidden = (x @ a.T).unflatten(0, (len(adapters), -1))
    return torch.where(is_owner[:, None], hidden, 0).flatten(0, 1)


@own_ranks.kernel(when=on_gpu)
def own_ranks_triton(x: Tensor, a: Tensor, owners: Tensor, adapters: Tensor) -> Tensor:
    rows = as_rows(x)
    num_ranks, size = a.shape
    hidden = torch.empty(len(rows), num_ranks, dtype=x.dtype, device=x.device)
    repeat = len(rows) // max(1, len(adapters))
    if len(rows):
        _own_ranks[len(rows), triton.cdiv(num_ranks, 8)](
            rows, a, owners, adapters, hidden, rows.stride(0), size, num_ranks, repeat, RANKS=8, BLOCK=BLOCK
        )
    return hidden


@triton.jit
def _own_ranks(
    x_ptr, a_ptr, owners_ptr, adapters_ptr, hidden_ptr, stride, size, num_ranks, repeat,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some ranks of a row. Reads no factors of other adapters."""
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    exists = ranks < num_ranks
    adapter = tl.load(adapters_ptr + row // repeat)
    is_own = exists & (tl.load(owners_ptr + ranks, mask=exists, other=0) == adapter)
    total = tl.zeros((RANKS,), tl.float32)
    for start in range(0, size, BLOCK):
        inputs = start + tl.arange(0, BLOCK)
        is_input = inputs < size
        x = load_fp32(x_ptr + row * stride + inputs, is_input)
        a = load_fp32(a_ptr + ranks[:, None].to(tl.int64) * size + inputs[None, :], is_own[:, None] & is_input[None, :])
        total += tl.sum(a * x[None, :], axis=1)
    tl.store(hidden_ptr + row * num_ranks + ranks, total.to(hidden_ptr.dtype.element_ty), mask=exists)
