"""Sums over ranks: their formula, the same bits on every rank, and peers that do not answer."""

import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from slipstream.kernels.collectives import all_reduce, gather, peer_ranks
from slipstream.kernels.collectives.all_reduce import AllReduce, add_ranks
from slipstream.kernels.collectives.gather import Gather, gather_columns
from slipstream.kernels.collectives.peer_ranks import PeerRanks
from slipstream.kernels.collectives.peers import Peers
from slipstream.kernels.collectives.ranks import Norm
from slipstream.kernels.collectives.tree import add_along_tree
from slipstream.kernels.norm import add_rms_norm
from slipstream.tests.kernels.rank_processes import run_ranks
from slipstream.tests.kernels.triton_runs import NO_INTERPRETER
from slipstream.tests.pairwise import gate_of
from slipstream.tests.user_errors import user_error

SIZE = 48


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_terms_are_added_along_a_balanced_tree():
    a, b, c, d, e, f, g, h = random(8, 3, seed=0)
    assert torch.equal(add_along_tree([a, b, c, d]), (a + b) + (c + d))
    assert torch.equal(add_along_tree([a, b, c]), (a + b) + c)
    assert torch.equal(add_along_tree([a, b, c, d, e, f]), ((a + b) + (c + d)) + (e + f))
    halves = [add_along_tree([a, b, c, d]), add_along_tree([e, f, g, h])]
    assert torch.equal(add_along_tree([a, b, c, d, e, f, g, h]), add_along_tree(halves))


@NO_INTERPRETER
@pytest.mark.parametrize(
    ("world", "dtype"),
    gate_of(
        [*((world, torch.float32) for world in (1, 2, 3, 4, 8)), (2, torch.bfloat16), (3, torch.float16)],
        [(1, torch.float32), (4, torch.float32), (3, torch.float16)],
    ),
)
def test_all_ranks_get_the_sum_in_tree_order(world, dtype, monkeypatch):
    """Two rows in one kernel that sends all to all, up to six by shares, and more in two kernels, of partial sums that
    lie in the ranks' memory or elsewhere; ranks lag in turn, and sums have 16 bits and 32 in the same cells."""
    monkeypatch.setattr(all_reduce, "FEW_ROWS", dtype.itemsize // 2)
    monkeypatch.setattr(all_reduce, "SHARED_ROWS", 6 * dtype.itemsize // 4)
    calls = [3, 6, 1, 4, 8, 2, 7, 8, 5]
    weight = random(SIZE, seed=1).half()

    def dtype_of(index):
        return torch.float32 if index % 3 else torch.float16

    def run(peers):
        reduce = AllReduce(peers, SIZE, 8, dtype)
        outputs = []
        for index, rows in enumerate(calls):
            if index % world == peers.rank:
                time.sleep(0.05)
            partial = random(world, rows, SIZE, seed=index)[peers.rank].to(dtype)
            residual = random(rows, SIZE, seed=100 + index).to(dtype_of(index))
            bias = weight if index % 2 else None
            place = reduce.partial_rows(rows)
            assert (place is None) == (rows <= 6)
            partial = partial if place is None or index % 3 else place.copy_(partial)
            outputs.append(reduce.add(partial, dtype_of(index), bias))
            out = None if place is None else torch.zeros(rows, SIZE + 8, dtype=residual.dtype)[:, :SIZE]
            outputs += reduce.add_and_norm(partial, Norm(residual, weight, 1e-5, out), bias)
            assert out is None or outputs[-1].data_ptr() == out.data_ptr()
        with user_error("9 rows are to be added, but ranks share memory for 8"):
            reduce.add(torch.zeros(9, SIZE, dtype=dtype), torch.float16)
        return outputs

    results = run_ranks(world, AllReduce.num_bytes(world, SIZE, 8), run)
    for index, rows in enumerate(calls):
        partials = random(world, rows, SIZE, seed=index).to(dtype)
        residual = random(rows, SIZE, seed=100 + index).to(dtype_of(index))
        expected = add_ranks(partials, dtype_of(index), weight if index % 2 else None)
        normed, summed = add_rms_norm(residual, expected, weight, 1e-5)
        for outputs in results:
            total, own_normed, own_summed = outputs[3 * index : 3 * index + 3]
            assert torch.equal(total, expected)
            assert torch.equal(own_summed, summed)
            torch.testing.assert_close(own_normed, normed.to(own_normed.dtype))
            assert torch.equal(own_normed, results[0][3 * index + 1])


@NO_INTERPRETER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_none_are_sent(dtype, monkeypatch):
    """Zeros of both signs, infinities, and NaN of all bits, which is an empty cell inverted."""
    monkeypatch.setattr(all_reduce, "FEW_ROWS", dtype.itemsize // 4)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    nan = torch.tensor([-1], dtype=integer).view(dtype)
    special = torch.cat([torch.tensor([0.0, -0.0, torch.inf, -torch.inf], dtype=dtype), nan]).repeat(3, 8)

    def run(peers):
        reduce = AllReduce(peers, 40, 8, dtype)
        return [reduce.add(special[:rows], dtype) for rows in (1, 3, 2, 1, 3)]

    for outputs in run_ranks(2, AllReduce.num_bytes(2, 40, 8), run):
        for rows, output in zip((1, 3, 2, 1, 3), outputs, strict=True):
            expected = add_ranks(torch.stack([special[:rows]] * 2), dtype)
            torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(output.signbit()[:, :4], expected.signbit()[:, :4])


@NO_INTERPRETER
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_peer_that_leaves_is_named(rows, monkeypatch):
    monkeypatch.setattr(all_reduce, "FEW_ROWS", 2)
    monkeypatch.setattr(all_reduce, "SHARED_ROWS", 4)

    def run(peers):
        reduce = AllReduce(peers, SIZE, 8)
        reduce.add(torch.ones(rows, SIZE), torch.float16)
        assert peers.lost == []
        peers.limit(0.02)
        for _ in range(3 if peers.rank == 0 else 0):
            reduce.add(torch.ones(rows, SIZE), torch.float16)  # only the first waits
        assert peers.lost == ([1] if peers.rank == 0 else [])
        return []

    run_ranks(2, AllReduce.num_bytes(2, SIZE, 8), run)


@NO_INTERPRETER
@pytest.mark.parametrize("world", [1, 2, 4])
def test_columns_are_gathered_in_the_order_of_ranks(world, monkeypatch):
    monkeypatch.setattr(gather, "TILE", 16)
    monkeypatch.setattr(gather, "PROGRAMS", 2)
    calls = [(1, 50), (3, 20), (2, 34), (1, 2), (9, 30), (2, 3), (15, 1)]

    def run(peers):
        together = Gather(peers, 100)
        outputs = [together(random(world, *call, seed=index)[peers.rank].half()) for index, call in enumerate(calls)]
        with user_error("share memory for 112 words, fewer than 200 of a row"):
            together(torch.zeros(2, 200))
        return outputs

    results = run_ranks(world, Gather.num_bytes(world, 100), run)
    for index, call in enumerate(calls):
        expected = gather_columns(random(world, *call, seed=index).half())
        assert all(torch.equal(outputs[index], expected) for outputs in results)


def test_memory_that_is_not_there_is_refused():
    peers = Peers(0, torch.zeros(1024, dtype=torch.uint8), [0], 1.0)
    assert peers.take(100) == 0
    assert peers.take(4) == 256
    with user_error("ranks share 1024 bytes, of which 512 are taken; 600 more do not fit"):
        peers.take(600)


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", ["sums", "replays", "products", "quantised", "tables", "lost"])
def test_ranks_on_gpus(scenario):
    """On one GPU, too, which they share."""
    program = Path(__file__).with_name("gpu_ranks.py")
    done = subprocess.run([sys.executable, program, scenario], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@NO_INTERPRETER
def test_ranks_of_one_machine_meet_when_they_first_add(monkeypatch):
    monkeypatch.setattr(peer_ranks, "MOST_ROWS", 4)
    monkeypatch.setattr(peer_ranks, "MOST_WORDS", 256)
    monkeypatch.setattr(gather, "TILE", 16)
    gain = random(SIZE, seed=1).half()
    shapes = [(2, 3, SIZE), (3, SIZE), (9, SIZE), (0, SIZE)]

    def run(peers):
        monkeypatch.setattr(PeerRanks, "_meet", lambda ranks, _: ranks._peers.append(peers) or peers)
        ranks = PeerRanks(Mock(), peers.rank, 2, torch.device("cpu"))
        outputs = [ranks.add(random(2, *shape, seed=0)[peers.rank], torch.float16) for shape in shapes]
        assert ranks.partial_rows(5, SIZE) is None
        for rows in (3, 9):
            residual = random(rows, SIZE, seed=2).half()
            outputs += ranks.add_and_norm(random(2, rows, SIZE, seed=0)[peers.rank], Norm(residual, gain, 1e-5))
        outputs.append(ranks.gather(random(2, 3, 5, 4, seed=0)[peers.rank].half()))
        assert not ranks.is_lost()
        ranks.abort()
        if peers.rank == 0:
            ranks.add(torch.ones(1, SIZE), torch.float16)
            assert ranks.is_lost()
        return outputs

    results = run_ranks(2, AllReduce.num_bytes(2, SIZE, 4) + Gather.num_bytes(2, 256) + 512, run)
    for outputs in results:
        for output, shape in zip(outputs, shapes, strict=False):
            assert torch.equal(output, add_ranks(random(2, *shape, seed=0), torch.float16))
        for index, rows in ((4, 3), (6, 9)):
            total = add_ranks(random(2, rows, SIZE, seed=0), torch.float16)
            normed, summed = add_rms_norm(random(rows, SIZE, seed=2).half(), total, gain, 1e-5)
            torch.testing.assert_close(outputs[index], normed)
            assert torch.equal(outputs[index + 1], summed)
        assert torch.equal(outputs[8], torch.cat([*random(2, 3, 5, 4, seed=0).half()], -1))
