"""Walks and trees over a lattice against loops over all paths; scores of transitions against one pair at a time."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from slipstream.kernels.sampling.sample import Sampling, gumbel
from slipstream.kernels.speculation.lattice import (
    Confidence,
    Factors,
    add_noise,
    grow_lattice,
    transition_scores,
    walk_lattice,
)
from slipstream.tests.kernels.triton_runs import TOLERANCES, each_device, keys_of, poisoned, replayed
from slipstream.tests.pairwise import grouped, rotating

RUNS = ["reference", "triton"]
# The interpreter has no product of bfloat16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
VOCAB = 97
each_run = pytest.mark.parametrize("run", RUNS)


def lattice_of(B: int, K: int, k: int, kind: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scores (B, K, k, k), tokens (B, K, k), roots (B,), values (B, K, k)."""
    generator = torch.Generator().manual_seed(B + K + k)
    scores = torch.randn(B, K, k, k, generator=generator) * 2
    if kind == "ties":
        scores = scores.round()
    if kind == "alike":  # no head joins slots
        scores = scores[:, :, :1].expand(-1, -1, k, -1)
    if kind == "filtered":
        scores = scores.masked_fill(torch.rand(B, K, k, k, generator=generator) < 0.6, -torch.inf)
        scores[..., 0] = 0.5
    tokens = torch.stack([torch.randperm(VOCAB, generator=generator)[:k] for _ in range(B * K)]).view(B, K, k)
    values = torch.randn(B, K, 40, generator=generator).log_softmax(-1).sort(descending=True).values[..., :k]
    return scores.to(device), tokens.to(device), torch.arange(5, 5 + B).to(device), values.contiguous().to(device)


@grouped()
@each_device
@each_run
@pytest.mark.parametrize(
    ("shape", "form", "dtype"),
    rotating([(2, 4, 5, 24), (1, 1, 16, 64), (3, 2, 33, 100)], ["plain", "product", "gated"], DTYPES),
)
def test_transitions(shape, form, dtype, run, device):
    B, K, k, rank = shape
    generator = torch.Generator().manual_seed(rank)
    predecessors, gates = (torch.randn(VOCAB, rank, generator=generator).to(dtype) for _ in range(2))
    successors = torch.randn(60, rank, generator=generator).to(dtype)
    slots = None if form == "plain" else torch.randn(B, K, rank, generator=generator).to(dtype)
    columns = torch.stack([torch.randperm(60, generator=generator)[:k] for _ in range(B * K)]).view(B, K, k)
    unary = torch.randn(B, K, k, generator=generator)
    tokens = columns + 30
    roots = torch.arange(B) + 3
    gates = gates if form == "gated" else None
    expected = torch.zeros(B, K, k, k, dtype=torch.float64)
    for b, s, i, j in product(*map(range, expected.shape)):
        before = int(roots[b]) if s == 0 else int(tokens[b, s - 1, i])
        factor = predecessors[before].double()
        if slots is not None:
            slot_factor = slots[b, s].double()
            factor = factor * (slot_factor if gates is None else torch.sigmoid(slot_factor + gates[before].double()))
        expected[b, s, i, j] = unary[b, s, j] + factor @ successors[columns[b, s, j]].double()
    inputs = [x if x is None else x.to(device) for x in (unary, columns, tokens, roots, slots)]
    factors = Factors(*(x if x is None else x.to(device) for x in (predecessors, successors, gates)))
    with poisoned():
        scores = getattr(transition_scores, run)(*inputs[:4], factors, inputs[4])
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(scores.double().cpu(), expected, atol=20 * tolerance, rtol=tolerance)


def confidence_of(kind: str, B: int, K: int, device: str) -> Confidence | None:
    """kind "none", "slots" or "tokens": what it depends on. Temperatures of a slot more than the block has."""
    generator = torch.Generator().manual_seed(1)
    if kind == "none":
        return None
    by_token = torch.randn(VOCAB, generator=generator).to(device) if kind == "tokens" else None
    slots = torch.randn(B, K, generator=generator)
    temperatures = torch.rand(K + 1, generator=generator) + 0.5
    return Confidence(slots.to(device), temperatures.to(device), by_token)


def log_sure(confidence: Confidence, request: int, slot: int, before: int) -> float:
    """By the formula, after the token `before`."""
    logit = 0.0 if confidence.by_token is None else float(confidence.by_token[before])
    return -math.log1p(
        math.exp(-(float(confidence.slots[request, slot]) + logit) / float(confidence.temperatures[slot]))
    )


@grouped()
@each_device
@each_run
@pytest.mark.parametrize(
    ("shape", "kind"), rotating([(3, 5, 4), (1, 1, 1), (2, 7, 16)], ["plain", "ties", "alike", "filtered"])
)
@pytest.mark.parametrize("confidence", ["none", "slots", "tokens"])
def test_the_walk(shape, kind, confidence, run, device):
    scores, tokens, roots, values = lattice_of(*shape, kind, device)
    B, K, k = shape
    sure = confidence_of(confidence, B, K, device)
    with poisoned():
        chain, reached = getattr(walk_lattice, run)(scores, tokens, roots, values, sure)
    for b in range(B):
        token = int(roots[b])
        row = 0
        total = 0.0
        assert chain[b, 0] == token
        assert reached[b, 0] == 0
        for s in range(K):
            row_scores = scores[b, s, row].double().cpu()
            row = row_scores.tolist().index(max(row_scores.tolist()))
            step = row_scores.log_softmax(0)[row] + values[b, s].double().logsumexp(0).cpu()
            if sure is not None:
                step = log_sure(sure, b, s, token)
            token = int(tokens[b, s, row])
            total = total + float(step)
            assert chain[b, s + 1] == token
            assert float(reached[b, s + 1]) == pytest.approx(total, abs=1e-4)


@grouped("confidence")
@each_device
@each_run
@pytest.mark.parametrize(
    ("shape", "kind", "topk", "count"),
    rotating([(2, 3, 4), (1, 1, 3), (2, 4, 3)], ["plain", "ties", "alike", "filtered"], [2, 4], [9, 2, 24]),
)
@pytest.mark.parametrize("confidence", ["none", "slots", "tokens"])
def test_the_tree_is_the_best_of_all_paths(shape, kind, topk, count, confidence, run, device):
    scores, tokens, roots, values = lattice_of(*shape, kind, device)
    B, K, k = shape
    sure = confidence_of(confidence, B, K, device)
    with poisoned():
        tree, parents, reached = getattr(grow_lattice, run)(scores, tokens, roots, values, topk, count, sure)
    steps = scores.double().cpu().log_softmax(-1)
    mass = values.double().cpu().logsumexp(-1)
    for b in range(B):
        totals = {(): 0.0}  # path of candidates -> sum; a parent comes before its children
        for length in range(1, K + 1):
            for path in product(range(k), repeat=length):
                if path[:-1] in totals:
                    slot = length - 1
                    row_scores = steps[b, slot, path[-2] if slot else 0]
                    best = sorted(range(k), key=lambda column: (-float(row_scores[column]), column))[:topk]
                    if path[-1] in best and row_scores[path[-1]] > -torch.inf:
                        step = float(row_scores[path[-1]] + mass[b, slot])
                        if sure is not None and path[-1] == best[0]:
                            step = log_sure(sure, b, slot, int(tokens[b, slot - 1, path[-2]] if slot else roots[b]))
                        totals[path] = totals[path[:-1]] + step
        expected = sorted(totals.values(), reverse=True)[:count]
        nodes = [node for node in range(count) if reached[b, node] > -torch.inf]
        assert nodes == list(range(len(expected)))
        torch.testing.assert_close(reached[b, nodes].double().cpu(), torch.tensor(expected).double(), atol=1e-4, rtol=0)
        paths = [()]
        assert (int(tree[b, 0]), int(parents[b, 0])) == (int(roots[b]), -1)
        for node in range(1, count):
            parent = int(parents[b, node])
            assert 0 <= parent < node
            if node not in nodes:
                assert (int(tree[b, node]), parent) == (-1, 0)
                continue
            slot = len(paths[parent])
            paths.append((*paths[parent], tokens[b, slot].tolist().index(int(tree[b, node]))))
            assert totals[paths[-1]] == pytest.approx(float(reached[b, node]), abs=1e-4)
        assert len(set(paths)) == len(paths), "nodes are distinct"


def test_kernel_and_reference_agree_on_ties():
    scores, tokens, roots, values = lattice_of(3, 4, 6, "ties", "cpu")
    for actual, expected in zip(
        grow_lattice.triton(scores, tokens, roots, values, 3, 20),
        grow_lattice(scores, tokens, roots, values, 3, 20),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected)


@each_device
@each_run
def test_noise_is_that_of_the_sample(run, device):
    scores = torch.randn(4, 5, device=device)
    tokens = torch.randint(300_000, (4, 5), device=device)
    positions = torch.arange(4, device=device) * 7
    temperature = torch.tensor([0.0, 0.7], device=device)
    keys = keys_of(range(2), device)
    noisy = getattr(add_noise, run)(scores, tokens, positions, Sampling(keys, temperature, None).repeat(2))
    for row in range(4):
        noise = gumbel(keys[row // 2 : row // 2 + 1], positions[row : row + 1], tokens[row])[0]
        torch.testing.assert_close(noisy[row], scores[row] + temperature[row // 2] * noise, atol=1e-5, rtol=1e-5)
    greedy = Sampling(keys, None, None).repeat(2)
    assert torch.equal(getattr(add_noise, run)(scores, tokens, positions, greedy), scores)


@pytest.mark.gpu
def test_replays_equal_the_references():
    scores, tokens, roots, values = lattice_of(32, 7, 16, "plain", "cuda")
    sure = confidence_of("tokens", 32, 7, "cuda")
    for op, rest in ((walk_lattice, (sure,)), (grow_lattice, (4, 32)), (grow_lattice, (4, 32, sure))):
        results = replayed(lambda op=op, rest=rest: op.triton(scores, tokens, roots, values, *rest))
        for actual, right in zip(results, op.reference(scores, tokens, roots, values, *rest), strict=True):
            torch.testing.assert_close(actual, right, atol=1e-4, rtol=1e-4)
