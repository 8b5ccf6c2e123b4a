"""Acceptance against a walk through each tree in plain Python."""

import random

import pytest
import torch

from slipstream.kernels.speculation.verify import ancestor_masks, unpack, verify
from slipstream.tests.pairwise import grouped

VOCAB = 4  # small, so that drafts are right now and then; the target may sample -1, too


def random_tree(rng: random.Random, width: int, chain: bool) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree whose siblings are distinct; some end in unused nodes, -1."""
    tokens = [rng.randrange(VOCAB)]
    parents = [-1]
    num_used = rng.randint(1, width)
    children = {}
    while len(tokens) < num_used:
        parent = len(tokens) - 1 if chain else rng.randrange(len(tokens))
        free = sorted(set(range(VOCAB)) - children.get(parent, set()))
        if not free:
            continue
        token = rng.choice(free)
        children.setdefault(parent, set()).add(token)
        tokens.append(token)
        parents.append(parent)
    padding = [-1] * (width - len(tokens))
    return tokens + padding, parents + padding


def walk(tokens: list[int], parents: list[int], sampled: list[int]) -> list[int]:
    path = [0]
    while True:
        child = [
            node for node in range(1, len(tokens)) if parents[node] == path[-1] and tokens[node] == sampled[path[-1]]
        ]
        if not child:
            return path
        path += child


def padded(values: list[int], width: int) -> list[int]:
    return values + [-1] * (width - len(values))


@grouped()
@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("width", [1, 2, 5, 17, 64])
def test_verify_equals_a_walk(chain, width):
    rng = random.Random(width)
    trees = [random_tree(rng, width, chain) for _ in range(200)]
    sampled = [[rng.randrange(-1, VOCAB) for _ in range(width)] for _ in trees]
    tokens = torch.tensor([tree[0] for tree in trees], dtype=torch.int32)
    parents = torch.tensor([tree[1] for tree in trees], dtype=torch.int32)
    paths = [walk(*tree, target) for tree, target in zip(trees, sampled, strict=True)]
    assert width == 1 or {1, 2} <= {len(path) for path in paths}, "some drafts accepted, some not"
    emitted = [[target[node] for node in path] for path, target in zip(paths, sampled, strict=True)]
    for ancestors in (None, ancestor_masks(parents)) if chain else (ancestor_masks(parents),):
        nodes, target_tokens, lengths = verify(tokens, parents, torch.tensor(sampled), ancestors)
        assert {nodes.dtype, target_tokens.dtype, lengths.dtype} == {torch.int32}
        assert lengths.tolist() == [len(path) for path in paths]
        assert nodes.tolist() == [padded(path, width) for path in paths]
        assert target_tokens.tolist() == [padded(tokens, width) for tokens in emitted]


def test_ancestors_equal_the_path_to_the_root():
    rng = random.Random(1)
    trees = [random_tree(rng, 12, chain=False) for _ in range(50)]
    masks = ancestor_masks(torch.tensor([parents for _, parents in trees], dtype=torch.int32))
    for (tokens, parents), above in zip(trees, unpack(masks), strict=True):
        for node in range(12):
            path = {node}
            up = node
            while tokens[node] >= 0 and parents[up] >= 0:
                up = parents[up]
                path.add(up)
            assert tokens[node] < 0 or set(above[node].nonzero().flatten().tolist()) == path
            assert bool(above[node, node]), "an unused node sees a key at least: softmax over none is NaN"
