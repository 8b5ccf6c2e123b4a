"""Sums over ranks, on every rank with the same bits: partial sums, added in fp32 along a balanced tree in the order of
the ranks (tree.py) and rounded once, as a product on one GPU rounds its own sums. Partial sums of 16 bits travel as
such.

Few rows take one kernel, a program for each: it sends its row to all ranks (peers.py), waits for theirs and adds;
behind it the residual is added and normed, as by kernels/norm.py. With more rows the program sends its row to one rank,
the row's owner, whose program adds, rounds and sends the sum to all: of four ranks each sends 4.5 bytes for a number of
fp32, not 12, but sums come a second way. Many rows take two kernels: each rank reads its share of all ranks' rows,
adds, rounds, and stores the sums in all ranks' memory; then all wait until all have.

One kernel ends however few of its programs run at once. They start in the order of their rows and send before they
wait, so all ranks have sent the first row that any rank has not ended, and it ends. No cell is written before what was
in it is read and the cell emptied: a rank that ends a call for a row has heard from all, some through the owner, that
their kernel before this one has ended. So rows to be added have two slots in turn. Sums need one: the owner sends them
after it has heard this from their receivers.
Letters: T rows, H hidden, N ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.collectives.peers import Peers, receive, send, send_flag, start_of, wait_flag
from slipstream.kernels.collectives.ranks import Norm
from slipstream.kernels.collectives.tree import add_along_tree
from slipstream.kernels.grid_sync import done_counters, is_last_done
from slipstream.kernels.launch import pdl_options, wait_for_inputs
from slipstream.kernels.norm import LANE_ELEMENTS, add_rms_norm, as_rows, load_optional
from slipstream.kernels.tiles import load_fp32

FEW_ROWS = 64  # of fp32 that all send to all, twice as many of 16 bits
SHARED_ROWS = 256  # likewise, that one kernel adds
LANES = tl.constexpr(128)  # of a program that waits for flags: its threads


def add_ranks(partials: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """partials (N, T, H) of all ranks -> their sum, and then the bias (H,): (T, H) in `dtype`. The reference of what
    follows."""
    total = add_along_tree(partials.float().unbind())
    return (total if bias is None else total + bias.float()).to(dtype)


class AllReduce:
    """Adds up the partial sums of all ranks, of one dtype. All ranks call the same methods with the same shapes in the
    same order."""

    def __init__(self, peers: Peers, size: int, max_rows: int, dtype: torch.dtype = torch.float32) -> None:
        """size: numbers of a row, H; max_rows: most rows of a call; `dtype` of partial sums."""
        self.peers = peers
        self.size = size
        self.dtype = dtype
        self.few_rows = FEW_ROWS * 4 // dtype.itemsize
        self.shared_rows = SHARED_ROWS * 4 // dtype.itemsize
        self.cells = peers.take(2 * peers.world * FEW_ROWS * size * 4)
        self.shared_cells = peers.take(2 * peers.world * triton.cdiv(SHARED_ROWS, peers.world) * size * 4)
        self.shared_sums = peers.take(self.shared_rows * size * 4)
        self.counts = peers.counters(max(self.few_rows, self.shared_rows))
        self.flags = peers.take(2 * peers.world * 4)
        self.flag_tags = peers.counters(2)
        self.max_rows = max_rows if max_rows > self.shared_rows else 0
        self.partials = peers.take(self.max_rows * size * dtype.itemsize)
        self.sums = peers.take(self.max_rows * size * 4)

    @staticmethod
    def num_bytes(world: int, size: int, max_rows: int) -> int:
        """Returns what an object takes of its peers' memory, at most."""
        rows = 2 * world * (FEW_ROWS + triton.cdiv(SHARED_ROWS, world)) + 2 * SHARED_ROWS + 2 * max_rows
        return rows * size * 4 + 8 * world + 2048

    def partial_rows(self, num_rows: int) -> Tensor | None:
        """Where a product of many rows (T, H) best stores its partial sums: other ranks read them there. None: they are
        sent, and may lie anywhere."""
        if num_rows <= self.shared_rows:
            return None
        return self.peers.local(self.partials, (num_rows, self.size), self.dtype)

    def add(self, partial: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """partial (T, H), this rank's -> the sum of all ranks', and then the bias (H,), which all have: (T, H) in
        `dtype`."""
        if len(partial) > self.shared_rows:
            return self._add_many(partial, dtype, bias).clone()  # the next call's go to the same place
        out = torch.empty(partial.shape, dtype=dtype, device=partial.device)
        if len(partial):
            self._launch(partial, bias, None, out, out)
        return out

    def add_and_norm(self, partial: Tensor, norm: Norm, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(rms_norm(summed), summed) with summed = residual + add(partial), in one kernel but for many rows."""
        dtype = norm.residual.dtype
        if len(partial) > self.shared_rows:
            delta = self._add_many(partial, dtype, bias)
            return add_rms_norm.triton(norm.residual, delta, norm.gain, norm.eps, norm.out)
        normed = torch.empty(partial.shape, dtype=dtype, device=partial.device)
        summed = torch.empty_like(normed) if norm.out is None else norm.out
        if len(partial):
            self._launch(partial, bias, norm, normed, summed)
        return normed, summed

    def _launch(self, partial: Tensor, bias: Tensor | None, norm: Norm | None, out: Tensor, summed: Tensor) -> None:
        peers = self.peers
        residual = None if norm is None else as_rows(norm.residual)
        assert partial.dtype == self.dtype
        assert partial.stride(1) == summed.stride(1) == 1
        block = triton.next_power_of_2(self.size)
        is_shared = len(partial) > self.few_rows
        rows = triton.cdiv(self.shared_rows, peers.world) if is_shared else self.few_rows
        all_reduce_kernel[(len(partial),)](
            partial, bias, residual, None if norm is None else norm.gain, out, summed, peers.addresses,
            self.shared_cells if is_shared else self.cells, self.shared_sums, self.counts, peers.watch.words,
            partial.stride(0), 0 if residual is None else residual.stride(0), summed.stride(0),
            0.0 if norm is None else norm.eps,
            SIZE=self.size, BLOCK=block, ROWS=rows, SHARED=is_shared, RANK=peers.rank, WORLD=peers.world,
            num_warps=min(max(block // (32 * LANE_ELEMENTS), 1), 16), **pdl_options(partial.device),
        )  # fmt: skip

    def _add_many(self, partial: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """Returns the sums where peers have stored them, until the next call."""
        peers = self.peers
        num_rows = len(partial)
        if num_rows > self.max_rows:
            raise ValueError(f"{num_rows} rows are to be added, but ranks share memory for {self.max_rows}")
        shared = self.partial_rows(num_rows)
        assert shared is not None
        if partial.data_ptr() != shared.data_ptr():
            shared.copy_(partial)
        sums = peers.local(self.sums, (num_rows, self.size), dtype)
        programs = max(1, triton.cdiv(num_rows - peers.rank, peers.world))
        block = triton.next_power_of_2(self.size)
        add_share_kernel[(programs,)](
            shared, sums, bias, peers.addresses, self.partials, self.sums, self.flags, self.flag_tags,
            done_counters(partial.device), peers.watch.words, num_rows,
            SIZE=self.size, BLOCK=block, RANK=peers.rank, WORLD=peers.world,
            num_warps=min(max(block // (32 * LANE_ELEMENTS), 4), 16), **pdl_options(partial.device),
        )  # fmt: skip
        await_shares_kernel[(1,)](
            peers.addresses, self.flags, self.flag_tags, peers.watch.words,
            RANK=peers.rank, WORLD=peers.world, num_warps=4, **pdl_options(partial.device),
        )  # fmt: skip
        return sums


@triton.jit
def _add_branch(
    numbers, cells, inside, watch_ptr, stride, FIRST: tl.constexpr, COUNT: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """Adds the rows of COUNT ranks from FIRST on, as `add_along_tree`: this rank's `numbers`, and what arrives in
    `cells` and, for the next ranks, `stride` further on."""
    if COUNT == 1:
        if FIRST != RANK:
            numbers = receive(cells + FIRST * stride, inside, watch_ptr, FIRST)
        total = numbers.to(tl.float32)
    else:
        HALF: tl.constexpr = 1 if COUNT == 2 else (2 if COUNT <= 4 else 4)
        left = _add_branch(numbers, cells, inside, watch_ptr, stride, FIRST, HALF, RANK)
        total = left + _add_branch(numbers, cells, inside, watch_ptr, stride, FIRST + HALF, COUNT - HALF, RANK)
    return total


@triton.jit
def _add_sent(
    numbers, cells, bias, inside, watch_ptr, stride, dtype: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr
):  # fmt: skip
    """All ranks' rows, added, with a bias, if any, and rounded once."""
    total = _add_branch(numbers, cells, inside, watch_ptr, stride, 0, WORLD, RANK)
    if bias is not None:
        total += bias
    return total.to(dtype)


@triton.jit
def _starts(addresses_ptr, start, dtype: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """`start_of` in the memories of the other ranks, from the next one on."""
    pointers = ()
    for offset in tl.static_range(1, WORLD):
        pointers = pointers + (start_of(addresses_ptr, (RANK + offset) % WORLD, start, dtype),)  # type: ignore[assignment]
    return pointers


@triton.jit
def all_reduce_kernel(
    partial_ptr, bias_ptr, residual_ptr, weight_ptr, out_ptr, summed_ptr, addresses_ptr, start, sums_start, counts_ptr,
    watch_ptr, partial_stride, residual_stride, summed_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: sent to all ranks or, where rows are SHARED, to its owner and by it; added up and, where there is a
    weight, normed as by `_add_rms_norm`. ROWS: that a rank has room for from each."""
    row = tl.program_id(0).to(tl.int64)
    owner = row % WORLD
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    term: tl.constexpr = partial_ptr.dtype.element_ty
    dtype: tl.constexpr = summed_ptr.dtype.element_ty
    received = start_of(addresses_ptr, RANK, start, term)
    if SHARED:
        place = row // WORLD * SIZE + columns
        owner_cells = start_of(addresses_ptr, owner, start, term)
        sums = start_of(addresses_ptr, RANK, sums_start, dtype)
        memories = _starts(addresses_ptr, sums_start, dtype, RANK, WORLD)
    else:
        place = row * SIZE + columns
        memories = _starts(addresses_ptr, start, term, RANK, WORLD)
    bias = load_optional(bias_ptr, columns, inside)
    weight = load_optional(weight_ptr, columns, inside)
    wait_for_inputs(PDL)
    count = tl.load(counts_ptr + row) + 1
    numbers = tl.load(partial_ptr + row * partial_stride + columns, mask=inside, other=0.0)
    place += (count & 1).to(tl.int64) * (WORLD * ROWS * SIZE)
    if SHARED:
        if owner != RANK:
            send(owner_cells + RANK * ROWS * SIZE + place, numbers, inside)
    else:
        for index in tl.static_range(WORLD - 1):
            send(memories[index] + RANK * ROWS * SIZE + place, numbers, inside)
    if weight_ptr is not None:
        residual = load_fp32(residual_ptr + row * residual_stride + columns, inside)
    if SHARED:
        if owner == RANK:
            delta = _add_sent(numbers, received + place, bias, inside, watch_ptr, ROWS * SIZE, dtype, RANK, WORLD)
            for index in tl.static_range(WORLD - 1):
                send(memories[index] + row * SIZE + columns, delta, inside)
        else:
            delta = receive(sums + row * SIZE + columns, inside, watch_ptr, owner)
    else:
        delta = _add_sent(numbers, received + place, bias, inside, watch_ptr, ROWS * SIZE, dtype, RANK, WORLD)
    tl.store(counts_ptr + row, count)
    if weight_ptr is None:
        tl.store(out_ptr + row * summed_stride + columns, delta, mask=inside)
    else:
        summed = (residual + delta.to(tl.float32)).to(dtype)
        tl.store(summed_ptr + row * summed_stride + columns, summed, mask=inside)
        x = summed.to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
        tl.store(out_ptr + row * SIZE + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rows(cells, start, addresses_ptr, inside, dtype: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Adds the rows at `cells`, places in each rank's partial sums, of COUNT ranks from FIRST on."""
    if COUNT == 1:
        partials = start_of(addresses_ptr, FIRST, start, dtype)
        total = tl.load(partials + cells, mask=inside, other=0.0, volatile=True).to(tl.float32)
    else:
        HALF: tl.constexpr = 1 if COUNT == 2 else (2 if COUNT <= 4 else 4)
        left = _add_rows(cells, start, addresses_ptr, inside, dtype, FIRST, HALF)
        total = left + _add_rows(cells, start, addresses_ptr, inside, dtype, FIRST + HALF, COUNT - HALF)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def add_share_kernel(
    partials_ptr, sums_ptr, bias_ptr, addresses_ptr, partials_start, sums_start, flags_start, tags_ptr, counters_ptr,
    watch_ptr, num_rows,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One of this rank's rows, every WORLD-th from RANK on. First the ranks tell each other that their partial sums are
    there, and last that they have stored the sums of their rows everywhere."""
    program = tl.program_id(0)
    row = program.to(tl.int64) * WORLD + RANK
    columns = tl.arange(0, BLOCK)
    inside = columns < tl.where(row < num_rows, SIZE, 0)
    wait_for_inputs(PDL)
    tag = tl.load(tags_ptr) + 1
    if program == 0:
        tl.store(tags_ptr + 1, tag)
        for offset in tl.static_range(1, WORLD):
            flags = start_of(addresses_ptr, (RANK + offset) % WORLD, flags_start, tl.int32)
            send_flag(flags + RANK, tag)
    flags = start_of(addresses_ptr, RANK, flags_start, tl.int32)
    for offset in tl.static_range(1, WORLD):
        wait_flag(flags + (RANK + offset) % WORLD, tag, columns, watch_ptr, (RANK + offset) % WORLD)
    cells = row * SIZE + columns
    total = _add_rows(cells, partials_start, addresses_ptr, inside, partials_ptr.dtype.element_ty, 0, WORLD)
    if bias_ptr is not None:
        total += load_fp32(bias_ptr + columns, columns < SIZE)
    total = total.to(sums_ptr.dtype.element_ty)
    for offset in tl.static_range(0, WORLD):
        sums = start_of(addresses_ptr, (RANK + offset) % WORLD, sums_start, sums_ptr.dtype.element_ty)
        tl.store(sums + cells, total, mask=inside)
    if is_last_done(counters_ptr, tl.num_programs(0)):
        for offset in tl.static_range(1, WORLD):
            flags = start_of(addresses_ptr, (RANK + offset) % WORLD, flags_start, tl.int32)
            send_flag(flags + WORLD + RANK, tag)


@triton.jit
def await_shares_kernel(
    addresses_ptr, flags_start, tags_ptr, watch_ptr, RANK: tl.constexpr, WORLD: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Ends when all ranks have stored their sums. The kernel before read the first tag, and this one reads the second:
    each counts for the other, so that no program reads what another one changes."""
    wait_for_inputs(PDL)
    tag = tl.load(tags_ptr + 1)
    lanes = tl.arange(0, LANES)
    flags = start_of(addresses_ptr, RANK, flags_start, tl.int32)
    for offset in tl.static_range(1, WORLD):
        wait_flag(
            flags + WORLD + (RANK + offset) % WORLD, tag, lanes, watch_ptr, (RANK + offset) % WORLD
        )  # fmt: skip
    tl.store(tags_ptr, tag)
