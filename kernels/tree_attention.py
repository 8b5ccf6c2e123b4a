"""Attention of a proposal's nodes over a paged KV cache: flash-decoding for grouped queries, one launch a layer.

A request's N nodes times the query heads of one KV head are the rows of a tile. Long contexts are split over programs;
the programs that share a tile wait for each other and merge a part of its rows each, in an order that does not depend
on who comes first. Lengths and page tables are read on the device and the grid depends on shapes only: nothing
is planned on the host.

Letters: B requests, N nodes per request (root included), Q/G query and KV heads, D head dim, R rows and P pages of the
page table.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.grid_sync import MAX_ROWS, all_resident, barriers, done_counters
from slipstream.kernels.launch import pdl_options, shared_memory, use_triton
from slipstream.kernels.tree_attention_kernel import attend_kernel
from slipstream.kernels.tree_attention_reference import Mask, tree_attention_reference

MAX_NODES = 64  # bits of an ancestor mask
MAX_HEAD_DIM = 256  # wider tiles do not fit in registers and shared memory
PROGRAMS = 264  # two at a time on each of the 132 multiprocessors of an H100 or H200
SMALL_PROGRAMS = 396  # of 16 rows and heads of up to 128, three; programs beyond these wait in a queue
FEW_REQUESTS = 4  # below a full device, longer tiles have fewer latencies in a row
MIN_PART_TOKENS = 64  # below it, starting a part outweighs reading it,
MIN_EVEN_PART_TOKENS = 2048  # and below this, merging parts outweighs a last wave that leaves the device half empty
MAX_SPLITS = 32  # parts of a context, and
MAX_MERGED_ROWS = 1024  # rows of its partial results, beyond which storing and merging them outweighs reading less


class Blocks(NamedTuple):
    """A tile of the work."""

    rows: int  # query rows
    tokens: int  # KV tokens
    warps: int
    stages: int  # of the load pipeline


class Parts(NamedTuple):
    """How contexts are split over programs."""

    most: int
    tokens: int = MIN_PART_TOKENS  # of a part, at least


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    rows: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    mask: Mask,
    scale: float,
    *,
    first_node: int = 0,
    window: int | None = None,
    prefix: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """N <= 64 new nodes per request attend to the committed tokens and to each other.

    q (B, N, Q, D) rotated, contiguous; keys, values (num_pages, page_size, G, D) one layer of the cache, in which the
    nodes' KV lies already, at the slots of positions lengths + 0..N-1; pages (R, P) int64 page table; rows (B,) int64
    the requests' rows of it; lengths (B,) int64 committed tokens.
    mask: "causal" node i sees nodes 0..i; "tree" those of its bits in ancestors (B, N) int64 (bit i must be set in
    node i's mask); "block" all N. window, only with "causal": node i, at position lengths + i, sees so many positions,
    its own the last of them. prefix=False leaves the committed tokens out.
    first_node: only the last N of first_node + N <= 64 nodes ask; row i of q and of ancestors is node first_node + i,
    and the KV of the nodes before lies at positions lengths + 0..first_node-1.
    Returns (B, N, Q, D) in q's dtype and, with return_lse, the log-sum-exp (B, N, Q) fp32 of the scaled scores, natural
    logarithm: exp(lse) is what two results over disjoint keys are weighted by.
    """
    run = tree_attention_triton if use_triton(q) else tree_attention_reference
    where = pages, rows, lengths, ancestors
    return run(
        q, keys, values, *where, mask, scale, first_node=first_node, window=window, prefix=prefix, return_lse=return_lse
    )


def tree_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    rows: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    mask: Mask,
    scale: float,
    *,
    first_node: int = 0,
    window: int | None = None,
    prefix: bool = True,
    return_lse: bool = False,
    blocks: Blocks | None = None,
    parts: Parts | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tree_attention` by the kernel; `blocks` and `parts` replace the choice made here (benchmarks, tests)."""
    B, N, Q, D = q.shape
    (page_size, G), group = keys.shape[1:3], Q // keys.shape[2]
    end = first_node + N  # nodes
    assert end <= MAX_NODES
    assert group * G == Q
    assert q.dtype == keys.dtype == values.dtype
    assert all(x.is_contiguous() for x in (q, keys, values, pages, rows, lengths))
    assert mask != "tree" or (ancestors is not None and ancestors.is_contiguous())
    assert window is None or (mask == "causal" and window > 0)
    block_dim = max(16, triton.next_power_of_2(D))
    if blocks is None:
        blocks = choose_blocks(B, N * group, D, q.element_size())
        blocks = fit_blocks(blocks, block_dim, q.element_size(), shared_memory(q.device))
    tiles = G * triton.cdiv(N * group, blocks.rows)  # of one request
    capacity = pages.shape[1] * page_size if prefix else end
    if window is not None:
        capacity = min(capacity, window + N + blocks.tokens)
    parts = parts or choose_parts(B, tiles, blocks.rows, capacity, D)
    out = torch.empty_like(q)
    lse = torch.empty(B, N, Q, dtype=torch.float32, device=q.device) if return_lse else None
    wait = all_resident(q.device, parts.most)
    attend_kernel[(parts.most, tiles, B)](
        q, keys, values, pages, rows, lengths, ancestors if mask == "tree" else None, out, lse,
        *_scratch(q.device, B * tiles, parts.most, blocks.rows, block_dim, wait), scale / math.log(2), N, first_node,
        pages.shape[1], parts.tokens,
        G=G, D=D, BLOCK_D=block_dim, GROUP=group, PAGE=page_size, ROWS=blocks.rows, TOKENS=blocks.tokens,
        **choose_shares(blocks, parts, block_dim), WAIT=wait, MASK=mask, WINDOW=window, PREFIX=prefix,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # 16-bit operands do not ask
        WORD=tl.int32 if end <= 32 else tl.int64, OFFSET=tl.int32 if keys.numel() < 2**31 else tl.int64,
        num_warps=blocks.warps, num_stages=blocks.stages, **pdl_options(q.device),
    )  # fmt: skip
    return out if lse is None else (out, lse)


def choose_blocks(B: int, num_rows: int, D: int, element_size: int) -> Blocks:
    """`num_rows`: N * Q / G query rows per KV head; rows beyond a tile's read the KV once more.

    A stage of 64 tokens is 32 KB of K and V at D = 128. Two of them on their way in each of two or three programs per
    multiprocessor are several times what the memory's latency asks for. Wider heads get fewer tokens, and larger
    accumulators more warps, to stay within registers and shared memory.
    """
    rows = min(max(16, triton.next_power_of_2(num_rows)), 128)
    if element_size == 4:  # exact products take no tensor cores: for tests and small models
        return Blocks(min(rows, 16), 16, 4, 2)
    if D > 128:
        rows = min(rows, 64)
        return Blocks(rows, 32, 8 if rows * D > 64 * 128 else 4, 3)
    if rows == 16 and B <= FEW_REQUESTS:
        return Blocks(rows, 128, 4, 2)
    return Blocks(rows, 64, 8 if rows == 128 else 4, 3)


def fit_blocks(blocks: Blocks, block_dim: int, element_size: int, memory: int) -> Blocks:
    """With a shorter pipeline where the tiles are more than `memory`, the shared bytes that a program may have.

    That is 99 KB on sm_86, 89 and 120. There a pipeline of n stages holds n - 1 tiles of K and V.
    """
    loaded = blocks.rows + 2 * blocks.tokens * (blocks.stages - 1)  # rows of q, k and v
    needed = (loaded * block_dim + blocks.rows * blocks.tokens) * element_size + 4 * blocks.rows
    return blocks if needed <= memory else blocks._replace(stages=2)


def choose_parts(B: int, tiles: int, rows: int, capacity: int, D: int) -> Parts:
    """How contexts of up to `capacity` tokens are split, where a request has `tiles` of `rows` rows.

    As many parts as run at once; where even whole contexts are more, as many as leave least of a last wave empty. The
    kernel takes fewer parts of short contexts. The choice, and with it the rounding of a result, depends on shapes
    only; of the batch size on the next power of two, so that rows which pad a batch change nothing.
    """
    programs = triton.next_power_of_2(B) * tiles
    small = rows == 16 and D <= 128
    if programs > PROGRAMS and small:
        numbers = range(1, min(3, triton.cdiv(capacity, MIN_EVEN_PART_TOKENS)) + 1)
        return Parts(max(numbers, key=lambda number: _fullness(programs * number)), MIN_EVEN_PART_TOKENS)
    most = (SMALL_PROGRAMS if small else PROGRAMS) // programs
    return Parts(max(1, min(most, MAX_SPLITS, MAX_MERGED_ROWS // rows, triton.cdiv(capacity, MIN_PART_TOKENS))))


def _fullness(programs: int) -> float:
    """Of the waves in which programs of 16 rows run."""
    waves = programs / SMALL_PROGRAMS
    return waves / math.ceil(waves)


def choose_shares(blocks: Blocks, parts: Parts, block_dim: int) -> dict[str, int]:
    """Rows that a program merges, and of how many parts it loads them at once: into 64 registers of every thread."""
    share = max(1, blocks.rows >> (parts.most.bit_length() - 1))
    fitting = 64 * 32 * blocks.warps // (share * block_dim)
    return {"SHARE": share, "AT_ONCE": max(1, min(fitting, parts.most, 16))}


def _scratch(
    device: torch.device, tiles: int, splits: int, rows: int, block_dim: int, wait: bool
) -> tuple[Tensor | None, ...]:
    """Partial results (tiles, splits, rows, D) fp32, their log2-sum-exp2 (tiles, splits, rows), and who has come."""
    if splits == 1:
        return None, None, None
    assert tiles <= MAX_ROWS
    partial = torch.empty(tiles, splits, rows, block_dim, dtype=torch.float32, device=device)
    return partial, partial.new_empty(tiles, splits, rows), (barriers if wait else done_counters)(device)
