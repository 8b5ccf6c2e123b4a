"""Brings the vocabulary parts of all ranks' logits together on every rank, in the order of the ranks.

Numbers are only moved, 4 bytes at a time, whatever they are. Few of them are sent with tags, as few rows of a sum are
(all_reduce.py); the library brings more.
Letters: T rows, C columns of a rank, N ranks.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.collectives.all_reduce import WORD
from slipstream.kernels.collectives.peers import Peers, receive_words, send_words, start_of
from slipstream.kernels.launch import pdl_options, wait_for_inputs

TILE = 2048  # words that a program sends at once
PROGRAMS = 64  # at most: all must run, since they wait for others


def gather_columns(parts: Tensor) -> Tensor:
    """parts (N, T, C) of all ranks -> (T, N * C); the reference of `Gather`."""
    return parts.transpose(0, 1).flatten(1)


class Gather:
    """Gathers columns. All ranks call it with the same shapes in the same order."""

    def __init__(self, peers: Peers, max_words: int, group: dist.ProcessGroup | None = None) -> None:
        """max_words: most words of 4 bytes that a rank sends in a call; `group` gathers more."""
        self.peers = peers
        self.group = group
        self.max_tiles = triton.cdiv(max_words, TILE)
        self.cells = peers.take(2 * peers.world * self.max_tiles * TILE * WORD)
        self.tags = peers.counters(self.max_tiles)

    @staticmethod
    def num_bytes(world: int, max_words: int) -> int:
        """Returns what an object takes of its peers' memory, at most."""
        return 2 * world * triton.cdiv(max_words, TILE) * TILE * WORD + 256

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, C), this rank's columns, of a multiple of 4 bytes -> (T, N * C)."""
        peers = self.peers
        num_rows, num_columns = x.shape
        if num_columns * x.element_size() % 4:
            raise ValueError(f"a rank's {num_columns} columns of {x.dtype} are no multiple of 4 bytes")
        words = x.contiguous().view(torch.int32)
        tiles = num_rows * triton.cdiv(words.shape[1], TILE)
        if tiles > self.max_tiles:
            return self._gather_many(x)
        out = torch.empty(num_rows, peers.world * num_columns, dtype=x.dtype, device=x.device)
        if tiles:
            gather_kernel[(min(tiles, PROGRAMS),)](
                words, out.view(torch.int32), peers.addresses, self.cells, self.tags, peers.watch.words, tiles,
                words.shape[1], TILE=TILE, TILES=self.max_tiles, RANK=peers.rank, WORLD=peers.world, num_warps=8,
                **pdl_options(x.device),
            )  # fmt: skip
        return out

    def _gather_many(self, x: Tensor) -> Tensor:
        if self.group is None:
            raise ValueError(f"ranks share memory for {self.max_tiles * TILE} words, fewer than {tuple(x.shape)} holds")
        rows = torch.empty(self.peers.world * len(x), x.shape[1], dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(rows, x.contiguous(), self.group)
        return gather_columns(rows.view(self.peers.world, *x.shape))


@triton.jit(do_not_specialize=["tiles"])
def gather_kernel(
    words_ptr, out_ptr, addresses_ptr, start, tags_ptr, watch_ptr, tiles, num_words,
    TILE: tl.constexpr, TILES: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every so many tiles, parts of a row: all are sent before the first is waited for."""
    wait_for_inputs(PDL)
    lanes = tl.arange(0, TILE)
    blocks = tl.cdiv(num_words, TILE)
    stride = TILES * TILE
    slot = WORLD * TILES * TILE
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tag = tl.load(tags_ptr + tile) + 1
        columns = tile % blocks * TILE + lanes
        inside = columns < num_words
        row = (tile // blocks).to(tl.int64)
        words = tl.load(words_ptr + row * num_words + columns, mask=inside, other=0)
        place = (tag & 1).to(tl.int64) * slot + RANK * stride + tile * TILE + lanes
        for offset in tl.static_range(1, WORLD):
            cells = start_of(addresses_ptr, (RANK + offset) % WORLD, start, tl.int64)
            send_words(cells + place, words, tag, inside)
        tl.store(out_ptr + row * WORLD * num_words + RANK * num_words + columns, words, mask=inside)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tag = tl.load(tags_ptr + tile) + 1
        columns = tile % blocks * TILE + lanes
        inside = columns < num_words
        row = (tile // blocks).to(tl.int64)
        place = (tag & 1).to(tl.int64) * slot + tile * TILE + lanes
        for offset in tl.static_range(1, WORLD):
            peer = (RANK + offset) % WORLD
            cells = start_of(addresses_ptr, RANK, start, tl.int64) + place + peer * stride
            words = receive_words(cells, tag, inside, watch_ptr, peer)
            tl.store(out_ptr + row * WORLD * num_words + peer * num_words + columns, words, mask=inside)
        tl.store(tags_ptr + tile, tag)
