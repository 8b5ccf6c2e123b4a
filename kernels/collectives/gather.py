"""Brings the vocabulary parts of all ranks' logits together on every rank, in the order of the ranks.

Floats are only moved, 4 bytes at a time. Few of them are sent as few rows of a sum are (all_reduce.py), in two slots in
turn; more take several calls.
Letters: T rows, C columns of a rank, N ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from slipstream.kernels.collectives.peers import Peers, receive, send, start_of
from slipstream.kernels.launch import pdl_options, wait_for_inputs

TILE = 2048  # words that a program sends at once
PROGRAMS = 64  # at most: all must run, since they wait for others


def gather_columns(parts: Tensor) -> Tensor:
    """parts (N, T, C) of all ranks -> (T, N * C); the reference of `Gather`."""
    return parts.transpose(0, 1).flatten(1)


class Gather:
    """Gathers columns. All ranks call it with the same shapes in the same order."""

    def __init__(self, peers: Peers, max_words: int) -> None:
        """max_words: most words of 4 bytes that a rank sends at once."""
        self.peers = peers
        self.max_tiles = triton.cdiv(max_words, TILE)
        self.cells = peers.take(2 * peers.world * self.max_tiles * TILE * 4)
        self.counts = peers.counters(self.max_tiles)

    @staticmethod
    def num_bytes(world: int, max_words: int) -> int:
        """Returns what an object takes of its peers' memory, at most."""
        return 2 * world * triton.cdiv(max_words, TILE) * TILE * 4 + 256

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, C), this rank's columns -> (T, N * C). Raises ValueError for rows longer than the shared memory."""
        num_rows, num_columns = x.shape
        padding = -num_columns % (4 // x.element_size())
        words = (functional.pad(x, (0, padding)) if padding else x.contiguous()).view(torch.int32)
        most_rows = self.max_tiles // triton.cdiv(words.shape[1], TILE)
        if not most_rows:
            raise ValueError(
                f"ranks share memory for {self.max_tiles * TILE} words, fewer than {words.shape[1]} of a row"
            )
        parts = [self._gather(rows) for rows in words.split(most_rows)]
        out = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(x.dtype)
        if padding:
            out = out.view(num_rows, self.peers.world, -1)[..., :num_columns].flatten(1)
        return out

    def _gather(self, words: Tensor) -> Tensor:
        """words (T, C) int32 -> (T, N * C)."""
        peers = self.peers
        num_rows, num_words = words.shape
        tiles = num_rows * triton.cdiv(num_words, TILE)
        out = torch.empty(num_rows, peers.world * num_words, dtype=words.dtype, device=words.device)
        if tiles:
            gather_kernel[(min(tiles, PROGRAMS),)](
                words, out, peers.addresses, self.cells, self.counts, peers.watch.words, tiles, num_words,
                TILE=TILE, TILES=self.max_tiles, RANK=peers.rank, WORLD=peers.world, num_warps=8,
                **pdl_options(words.device),
            )  # fmt: skip
        return out


@triton.jit(do_not_specialize=["tiles"])
def gather_kernel(
    words_ptr, out_ptr, addresses_ptr, start, counts_ptr, watch_ptr, tiles, num_words,
    TILE: tl.constexpr, TILES: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every so many tiles, parts of a row: all are sent before the first is waited for."""
    wait_for_inputs(PDL)
    lanes = tl.arange(0, TILE)
    blocks = tl.cdiv(num_words, TILE)
    stride = TILES * TILE
    slot = WORLD * TILES * TILE
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        count = tl.load(counts_ptr + tile) + 1
        columns = tile % blocks * TILE + lanes
        inside = columns < num_words
        row = (tile // blocks).to(tl.int64)
        words = tl.load(words_ptr + row * num_words + columns, mask=inside, other=0)
        place = (count & 1).to(tl.int64) * slot + RANK * stride + tile * TILE + lanes
        for offset in tl.static_range(1, WORLD):
            cells = start_of(addresses_ptr, (RANK + offset) % WORLD, start, tl.int32)
            send(cells + place, words, inside)
        tl.store(out_ptr + row * WORLD * num_words + RANK * num_words + columns, words, mask=inside)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        count = tl.load(counts_ptr + tile) + 1
        columns = tile % blocks * TILE + lanes
        inside = columns < num_words
        row = (tile // blocks).to(tl.int64)
        place = (count & 1).to(tl.int64) * slot + tile * TILE + lanes
        for offset in tl.static_range(1, WORLD):
            peer = (RANK + offset) % WORLD
            cells = start_of(addresses_ptr, RANK, start, tl.int32) + place + peer * stride
            words = receive(cells, inside, watch_ptr, peer)
            tl.store(out_ptr + row * WORLD * num_words + peer * num_words + columns, words, mask=inside)
        tl.store(counts_ptr + tile, count)
