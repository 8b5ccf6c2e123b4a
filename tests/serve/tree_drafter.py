"""A drafter for tests that proposes random trees, part of them right because it has been told the answers."""

import random
from typing import Any

import torch
from torch import Tensor

from slipstream.models.config import RopeConfig
from slipstream.models.target import Target
from slipstream.serve.attention.base import Backend
from slipstream.serve.batch import Batch, KVSpec, Proposal, Rows, Verdict
from slipstream.serve.drafters import base
from slipstream.tests.serve.engine_runs import VOCAB

Tree = tuple[list[int], list[int]]


class TreeDrafter(base.Drafter):
    """`texts`: prompt + answer of every request. Its own KV holds, as a number, the token of each slot; so moved rows
    can be recognised. `features` (n, H) of `texts` are what its observed ones must be."""

    branches = True
    feature_layers = (1,)
    kv = KVSpec(1, 1, 2, RopeConfig())
    widths = (1, 8)

    def __init__(self, texts: list[list[int]], features: list[Tensor]) -> None:
        self.texts, self.features = texts, features
        self.rng = random.Random(0)
        self.known: dict[int, int] = {}  # row -> index of its text
        self.start: dict[int, int] = {}  # row -> where its KV numbers begin
        self.num_moved = 0

    @classmethod
    def load(cls, draft: str, options: Any, target: Target) -> "TreeDrafter":
        raise AssertionError("tests build it")

    def attach(self, target: Target, state: Rows, attention: Backend | None) -> None:
        assert attention is not None
        self.state, self.numbers = state, attention.cache.flatten(2, 3)[0, 0, :, 0, 0]

    def scratch(self, width: int) -> int:
        return width

    def admit(self, row: int, tokens: list[int], namespace: str) -> None:
        (self.known[row],) = (index for index, text in enumerate(self.texts) if text[: len(tokens)] == tokens)
        self.start[row] = len(tokens)

    def propose(self, batch: Batch, width: int) -> Proposal:
        assert batch.roots is not None
        trees = []
        for row, length, root in zip(batch.rows.tolist(), batch.lengths.tolist(), batch.roots.tolist(), strict=True):
            known = self.texts[self.known[row]] if row in self.known else []  # null: a prompt that goes on
            truth = known[length:] or [root]  # behind the end nothing is known
            assert truth[0] == root
            trees.append(self._grow(truth, width))
            slots = self.state.slots(torch.tensor(row), torch.arange(length, length + width))
            self.numbers[slots] = torch.tensor(trees[-1][0], dtype=self.numbers.dtype)
        tokens, parents = zip(*trees, strict=True)
        return Proposal(torch.tensor(tokens, dtype=torch.int32), torch.tensor(parents, dtype=torch.int32))

    def observe(self, batch: Batch, features: Tensor | None, verdict: Verdict | None) -> None:
        assert features is not None
        if verdict is None:
            return
        features = features.view(*verdict.nodes.shape, -1)
        for index, (row, length) in enumerate(zip(batch.rows.tolist(), batch.lengths.tolist(), strict=True)):
            start, text = self.start[row], self.texts[self.known[row]]
            end = min(length + int(verdict.lengths[index]), len(text))
            path = verdict.nodes[index, : end - length].long()
            expected = self.features[self.known[row]][length:end]
            torch.testing.assert_close(features[index, path], expected, atol=1e-4, rtol=1e-4)
            held = self.numbers[self.state.slots(torch.tensor(row), torch.arange(start, end))]
            assert held.long().tolist() == text[start:end], "KV rows were moved wrongly"
            self.num_moved += int((path != torch.arange(end - length)).sum())

    def _grow(self, truth: list[int], width: int) -> Tree:
        """A tree below truth[0]: most nodes below a right one are right; some last ones are unused."""
        tokens, parents, depths = [truth[0]], [-1], [0]
        right, children = {0}, {(0, truth[0])}
        for node in range(1, self.rng.randint(1, width)):
            parent = self.rng.choice([max(right), self.rng.randrange(node)])
            depth = depths[parent] + 1
            token = self.rng.randrange(VOCAB)
            if parent in right and depth < len(truth) and self.rng.random() < 0.7:
                token = truth[depth]
            while (parent, token) in children:
                token = self.rng.randrange(VOCAB)
            if parent in right and depth < len(truth) and token == truth[depth]:
                right.add(node)
            children.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        padding = [-1] * (width - len(tokens))
        return tokens + padding, parents + padding
