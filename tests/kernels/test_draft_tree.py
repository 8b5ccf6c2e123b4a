"""The tree builder against plain loops over dicts: every path's score, the best of each level, the best of all."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.kernels.speculation import draft_tree
from slipstream.kernels.speculation.draft_tree import Candidates, Frontier, Place
from slipstream.kernels.speculation.tree_shape import TreeShape
from slipstream.kernels.speculation.verify import unpack
from slipstream.tests.pairwise import grouped, rotating

VOCAB = 40
each_run = pytest.mark.parametrize("run", ["reference", "triton"])


class Node(NamedTuple):
    score: float
    path: tuple[int, ...]  # tokens below the root
    parent: int  # candidate, -1 for the root


def children_of(path: tuple[int, ...], request: int, k: int, kind: str) -> tuple[list[float], list[int]]:
    """The k best log-probabilities after a path and their columns: a draft made of a hash."""
    generator = torch.Generator().manual_seed(hash((request, path)) % 2**31)
    logits = torch.randn(VOCAB, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "certain":
        logits[:2] += 200.0  # two tokens share all of the probability, others have exp(-200)
    if kind == "filtered":
        logits[torch.randperm(VOCAB, generator=generator)[: VOCAB - 2]] = -torch.inf
    best = logits.log_softmax(0).sort(descending=True, stable=True)
    return best.values[:k].tolist(), best.indices[:k].tolist()


def loop_tree(request: int, shape: TreeShape, kind: str) -> tuple[list[Node], list[list[int]]]:
    """All candidates in order, and the candidates of each level's frontier."""
    nodes = []
    frontiers = []
    frontier = [-1]
    for _ in range(shape.depth):
        level = []
        for parent in frontier:
            path, score = ((), 0.0) if parent < 0 else (nodes[parent].path, nodes[parent].score)
            for value, token in zip(*children_of(path, request, shape.topk, kind), strict=True):
                level.append(len(nodes))
                total = (torch.tensor(score) + torch.tensor(min(value, 0.0))).item()  # fp32, as on the device
                nodes.append(Node(total, (*path, token), parent))
        frontier = sorted(level, key=lambda index: (-nodes[index].score, index))[: shape.topk]
        frontiers.append(frontier)
    return nodes, frontiers


def make_place(B: int, page_size: int) -> Place:
    pages = torch.randperm(8 * 32, generator=torch.Generator().manual_seed(1)).view(8, 32)
    return Place(pages, page_size, torch.tensor([5, 2, 7])[:B], torch.tensor([17, 0, 33])[:B])


def build(shape: TreeShape, B: int, kind: str, page_size: int, run: Any, ids: Tensor | None) -> Any:
    """Grows trees by `run` ("reference" or "triton"); returns candidates, frontiers and the hidden rows' paths."""
    place = make_place(B, page_size)
    candidates = Candidates.empty(B, shape, torch.device("cpu"))
    candidates.scores.fill_(torch.nan)
    frontier = None
    paths = [(b, ()) for b in range(B)]
    frontiers = []
    columns_of = {} if ids is None else {int(token): column for column, token in enumerate(ids)}
    for level in range(shape.depth):
        children = [children_of(path, b, shape.topk, kind) for b, path in paths]
        values = torch.tensor([values for values, _ in children])
        columns = torch.tensor([[columns_of.get(token, token) for token in tokens] for _, tokens in children])
        grow = getattr(draft_tree.grow, run)
        frontier = grow(candidates, frontier, values, columns, ids, place, level, level == shape.depth - 1)
        if frontier is not None:
            frontiers.append(frontier)
            tokens = frontier.tokens.tolist()
            sources = frontier.sources.tolist()
            paths = [(paths[s][0], (*paths[s][1], t)) for s, t in zip(sources, tokens, strict=True)]
    return place, candidates, frontiers


@grouped()
@each_run
@pytest.mark.parametrize(
    ("size", "kind"),
    rotating([(3, 4, 16), (2, 1, 3), (4, 5, 64), (4, 3, 16), (1, 3, 4)], ["plain", "ties", "certain", "filtered"]),
)
def test_trees_equal_the_loops(run, kind, size):
    """size: topk, depth and the number of nodes that are kept."""
    shape = TreeShape(*size[:2])
    B = 3
    count = size[2]
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2)) if kind == "plain" else None
    place, candidates, frontiers = build(shape, B, kind, 4, run, ids)
    roots = torch.tensor([7, 8, 9])
    tokens, parents, scores = getattr(draft_tree.choose, run)(candidates, roots, count)
    assert tokens.dtype == parents.dtype == torch.int32
    for b in range(B):
        nodes, expected = loop_tree(b, shape, kind)
        torch.testing.assert_close(candidates.scores[b], torch.tensor([node.score for node in nodes]), rtol=0, atol=0)
        assert candidates.parents[b].tolist() == [node.parent for node in nodes]
        assert candidates.tokens[b].tolist() == [node.path[-1] for node in nodes]
        check_frontiers(b, shape, nodes, expected, frontiers, place)
        best = sorted(range(len(nodes)), key=lambda index: (-nodes[index].score, index))[: count - 1]
        assert tokens[b].tolist() == [int(roots[b])] + [nodes[index].path[-1] for index in best]
        above = [0 if nodes[index].parent < 0 else 1 + best.index(nodes[index].parent) for index in best]
        assert parents[b].tolist() == [-1, *above]
        torch.testing.assert_close(scores[b], torch.tensor([0.0, *(nodes[index].score for index in best)]))
        check_tree(tokens[b], parents[b])


def check_frontiers(
    b: int, shape: TreeShape, nodes: list[Node], expected: list[list[int]], frontiers: list[Frontier], place: Place
):
    k = shape.topk
    length = int(place.lengths[b])
    numbers = {}  # path -> frontier node
    assert len(frontiers) == shape.depth - 1
    for level, frontier in enumerate(frontiers):
        columns = slice(b * k, (b + 1) * k)
        assert frontier.nodes[b].tolist() == expected[level]
        assert frontier.tokens[columns].tolist() == [nodes[index].path[-1] for index in expected[level]]
        assert frontier.scores[b].tolist() == [nodes[index].score for index in expected[level]]
        assert frontier.positions[columns].tolist() == [length + level] * k
        assert frontier.sampled_at[columns].tolist() == [length + level + 2] * k
        for rank, index in enumerate(expected[level]):
            path = nodes[index].path
            number = level * k + rank
            numbers[path] = number
            ancestors = {numbers[path[:end]] for end in range(1, len(path) + 1)}
            bits = unpack(frontier.ancestors[b], 64)[rank]
            assert set(bits.nonzero().flatten().tolist()) == ancestors
            page = int(place.pages[place.rows[b], (length + number) // place.page_size])
            assert int(frontier.slots[b * k + rank]) == page * place.page_size + (length + number) % place.page_size


def check_tree(tokens: Tensor, parents: Tensor):
    """Connected, parents first, siblings distinct."""
    for node in range(1, len(tokens)):
        assert 0 <= parents[node] < node
    pairs = list(zip(parents.tolist(), tokens.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


@each_run
def test_probabilities_above_one_do_not_tear_a_tree(run):
    """Rounding may leave a log-probability just above 0; a child must not overtake its parent."""
    shape = TreeShape(2, 3)
    B = 1
    place = make_place(B, 4)
    candidates = Candidates.empty(B, shape, torch.device("cpu"))
    grow = getattr(draft_tree.grow, run)
    frontier = None
    for level in range(3):
        n = 2 if level else 1
        values = torch.tensor([[1e-7, -30.0]] * n)
        columns = torch.tensor([[3, 4]] * n)
        frontier = grow(candidates, frontier, values, columns, None, place, level, level == 2)
    tokens, parents, scores = getattr(draft_tree.choose, run)(candidates, torch.tensor([1]), 4)
    assert tokens.tolist() == [[1, 3, 3, 3]]
    assert parents.tolist() == [[-1, 0, 1, 2]]
    assert scores.tolist() == [[0.0] * 4]


@each_run
def test_every_prefix_is_the_tree_of_that_width(run):
    place, candidates, _ = build(TreeShape(4, 4), 3, "plain", 16, run, None)
    del place
    roots = torch.tensor([7, 8, 9])
    choose = getattr(draft_tree.choose, run)
    tree = choose(candidates, roots, 40)
    for count in (2, 3, 9, 17):
        for cut, full in zip(choose(candidates, roots, count), tree, strict=True):
            assert torch.equal(cut, full[:, :count])


@pytest.mark.parametrize("width", [2, 3, 5, 9, 21])
def test_a_smaller_shape_finds_the_same_best_nodes(width):
    shape = TreeShape(4, 3)
    trees = []
    for drafted_shape in (shape, shape.within(width)):
        _, candidates, _ = build(drafted_shape, 3, "plain", 16, "reference", None)
        trees.append(draft_tree.choose.reference(candidates, torch.tensor([7, 8, 9]), width))
    for small, large in zip(trees[1], trees[0], strict=True):
        assert torch.equal(small, large)


@each_run
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_chain_adds_up_log_probabilities(run, count):
    """One more than `count` nodes; a token that filters cut ends the scores."""
    columns = torch.arange(3 * (count + 1)).view(count + 1, 3)
    log_probs = -columns[1:, :, None] / 8.0
    log_probs[-1:, 1] = -torch.inf
    tokens, scores = getattr(draft_tree.join_chain, run)(columns[0], tuple(columns[1:]), tuple(log_probs))
    assert torch.equal(tokens, columns.t())
    for request in range(3):
        sums = [sum(log_probs[:end, request, 0].tolist()) for end in range(count + 1)]
        assert scores[request].tolist() == sums
