"""The n-gram drafter's core: compared with a plain model, and what it finds with brute force."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.serve.drafters.ngram_core import NgramCore
from slipstream.tests.serve.ngram_fuzz import Fuzz, Tree, advance, random_texts
from slipstream.tests.serve.ngram_model import NgramModel


def paths(tree: Tree) -> list[list[int]]:
    """The tokens from below the root to each node."""
    tokens, parents, _ = tree
    found: list[list[int]] = [[]]
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            found.append([*found[parents[node]], tokens[node]])
    return found[1:]


@pytest.mark.parametrize("seed", range(60))
def test_core_agrees_with_the_model(seed: int, tmp_path: Path) -> None:
    Fuzz(NgramCore, seed, tmp_path).run(60)


@pytest.mark.slow
def test_core_agrees_with_the_model_for_long(tmp_path: Path) -> None:
    assert sum(Fuzz(NgramCore, seed, tmp_path).run(150) for seed in range(10_000, 16_000)) > 2_000_000


def contains(texts: list[list[int]], string: list[int]) -> bool:
    starts = [range(len(text) - len(string) + 1) for text in texts]
    return any(
        text[start : start + len(string)] == string for text, s in zip(texts, starts, strict=True) for start in s
    )


@pytest.mark.parametrize("seed", range(8))
def test_longest_match_and_what_follows_it_are_those_of_brute_force(seed: int) -> None:
    """While the trie has room and no gram is frequent, nothing is missed."""
    rng = random.Random(seed)
    history = random_texts(seed, 20, 60, vocab=12)
    core = NgramCore(capacity=100_000, branch_length=12, max_match=6, breadth=64)
    for text in history:
        core.insert(text)
    for _ in range(30):
        part = rng.choice(history)[rng.randrange(40) :][: rng.randint(1, 8)]
        context = [rng.randrange(12) for _ in range(rng.randint(1, 30))] + part
        core.admit(0, context)
        tree = advance(core, 0, 32)
        core.release(0)
        core.flush()
        own = context[:-1]  # what its last token's match may reach
        found = [
            length
            for length in range(1, min(6, len(context)) + 1)
            if contains([own], context[-length:]) or any(contains([text[:-1]], context[-length:]) for text in history)
        ]
        assert tree[2] == max(found, default=0)
        seen = [*history, *(context + context[start:] for start in range(len(context)))]  # it may repeat itself
        assert all(contains(seen, [context[-1], *path]) for path in paths(tree) if len(path) < 3)
        history.append(context[-12:])


def test_every_branch_is_found_and_counted_at_least_as_often_as_it_occurs() -> None:
    texts = random_texts(0, 20, 40, vocab=4)
    core = NgramCore(capacity=100_000, branch_length=7, max_match=6)
    for text in texts:
        core.insert(text)
    core.check()
    branches = core.branches()
    windows = {tuple(text[start : start + 7]) for text in texts for start in range(len(text) - 6)}
    assert {tuple(tokens) for _, tokens, _ in branches if len(tokens) == 7} == windows
    for _, tokens, frequencies in branches:
        for depth, frequency in enumerate(frequencies, 1):
            string = tokens[:depth]
            occurrences = sum(text[i : i + depth] == string for text in texts for i in range(len(text)))
            assert frequency >= occurrences
            assert depth == 1 or frequency <= frequencies[depth - 2]


def test_own_text_is_seen_at_once_and_other_texts_when_inserted() -> None:
    core = NgramCore(rows=2)
    core.admit(0, [1, 2, 3, 4, 9, 1, 2])
    assert advance(core, 0, 4) == ([2, 3, 4, 9], [-1, 0, 1, 2], 2)
    advance(core, 0, 1, 3, 4, 5, 6)
    advance(core, 0, 1, 7)
    advance(core, 0, 1)
    core.flush()
    core.admit(1, [8, 4, 5])
    assert advance(core, 1, 4) == ([5, 6, 7, -1], [-1, 0, 1, -1], 2)
    advance(core, 0, 1, 8)
    advance(core, 0, 1)
    core.flush()
    assert advance(core, 1, 4) == ([5, 6, 7, 8], [-1, 0, 1, 2], 2)


def test_others_see_what_a_round_emitted_once_the_request_goes_on_or_ends() -> None:
    core = NgramCore(rows=2)

    def round_of_first(*emitted: int) -> list[int]:
        tokens, _, _ = advance(core, 0, 4, *emitted)
        core.flush()
        return tokens

    core.admit(0, [1, 2, 3, 7, 1])
    core.admit(1, [8, 3])
    core.flush()
    assert round_of_first(2, 3) == [3, 7, 1, 2], "the request itself sees them at once"
    assert advance(core, 1, 4)[0] == [3, 7, 1, -1]
    assert round_of_first(4) == [4, -1, -1, -1]
    assert advance(core, 1, 4)[0][:2] == [3, 7]
    assert advance(core, 1, 3, 2) == ([2, 3, 7], [-1, 0, 1], 1)
    round_of_first(5, 6, 0)
    core.release(0, 10)
    core.flush()
    assert core.stats()["inserted_tokens"] == 10 + 2
    assert advance(core, 1, 4, 4) == ([4, 5, 6, -1], [-1, 0, 1, -1], 1), "it ended before the 0"


def test_repeating_text_is_drafted_beyond_its_end() -> None:
    core = NgramCore()
    core.admit(0, [5, 1, 2, 1, 2])
    assert advance(core, 0, 8)[0] == [2, 1, 2, 1, 2, 1, 2, 1]


def test_drafts_are_longer_than_a_branch() -> None:
    text = list(range(100, 200))
    core = NgramCore(branch_length=4, max_match=3)
    core.insert(text)
    core.admit(0, text[:2])
    assert advance(core, 0, 64)[0] == text[1:65]


def test_namespaces_keep_texts_apart() -> None:
    core = NgramCore(rows=3)
    core.insert([1, 2, 3, 4], "a" * 1000)
    core.admit(0, [1, 2])
    core.admit(1, [1, 2], "b")
    core.admit(2, [1, 2], "a" * 1000)
    assert [advance(core, row, 3)[0] for row in range(3)] == [[2, -1, -1], [2, -1, -1], [2, 3, 4]]
    assert all(len(name) <= 64 for name, _, _ in core.branches())


def test_unused_namespaces_are_forgotten() -> None:
    core = NgramCore(capacity=1000)
    core.insert(list(range(10)), "0")
    before = core.stats()["bytes"]
    for number in range(20_000):
        core.insert([number % 7, number % 5], f"user {number}")
    assert core.stats()["bytes"] < before + 1000 * 200
    core.check()


@pytest.mark.parametrize("order", ["probability", "breadth"])
def test_breadth_1_drafts_chains(order: str) -> None:
    core = NgramCore(order=order, breadth=1)
    for text in random_texts(1, 20, 50, vocab=5):
        core.insert(text)
    core.admit(0, [1, 2, 3, 1, 2])
    tokens, parents, _ = advance(core, 0, 16)
    assert parents == list(range(-1, 15))
    assert min(tokens) >= 0


def test_likeliest_first_and_last_used_first() -> None:
    texts = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5]]
    trees = {}
    for order in ("probability", "breadth"):
        core = NgramCore(order=order, breadth=2)
        for text in texts:
            core.insert(text)
        core.admit(0, [9, 1])
        trees[order] = advance(core, 0, 8)
    # 2: 4 / (5 + 2), 3: 2's times 3 / (4 + 2 / 2), 5: 1 / 7, 4: 2's times 1 / 5
    assert trees["probability"] == ([1, 2, 3, 5, 4, -1, -1, -1], [-1, 0, 1, 0, 1, -1, -1, -1], 1)
    assert trees["breadth"] == ([1, 5, 2, 4, -1, -1, -1, -1], [-1, 0, 0, 2, -1, -1, -1, -1], 1)


@pytest.mark.parametrize("width", [1, 2, 16, 64])
def test_trees_are_well_formed(width: int) -> None:
    rows = list(range(20))
    core = NgramCore(rows=20)
    texts = random_texts(2, 20, 300, vocab=6)
    for row in rows:
        core.admit(row, texts[row])
    tokens, parents = np.full((2, 20, width), -7, np.int32)
    core.advance(rows, [[0]] * 20, tokens, parents, np.zeros(20, np.int32))
    for row in rows:
        used = int((tokens[row] >= 0).sum())
        assert used == width  # six tokens repeat all the time
        assert tokens[row, 0] == texts[row][-1]
        assert parents[row, 0] == -1
        assert all(0 <= parents[row, node] < node for node in range(1, used))
        children = list(zip(parents[row].tolist(), tokens[row].tolist(), strict=True))
        assert len(set(children)) == used


def test_dropped_tokens_are_counted_and_the_next_ones_are_a_new_text() -> None:
    options: dict[str, Any] = {"capacity": 500, "branch_length": 4, "min_match": 1, "max_match": 3, "breadth": 4}
    core, model = NgramCore(queue_tokens=8, **options), NgramModel(order="probability", **options)
    core.admit(0, [1, 2, 3])
    core.flush()
    model.admit(0, [1, 2, 3], "")
    rounds = [([4, 5], False), (list(range(10, 19)), False), ([4, 5, 6], True), ([7], False), ([8], False)]
    for text, dropped in rounds:  # what was gained the round before
        tree = advance(core, 0, 8, *text)
        core.flush()
        assert [tree] == model.advance({0: text}, 8, dropped)
    assert core.stats()["dropped_tokens"] == 9
    assert core.branches() == model.trie.branches()


def test_statistics() -> None:
    core = NgramCore(rows=2, max_match=3)
    core.admit(0, [1, 2, 1])
    core.admit(1, [5, 6, 7])
    tokens, parents = np.zeros((2, 2, 4), np.int32)
    matches = np.zeros(2, np.int32)
    core.advance([0, 1], [[0], [0]], tokens, parents, matches)
    core.flush()
    stats = core.stats()
    assert matches.tolist() == [1, 0]
    assert stats["match_lengths"] == [1, 1, 0, 0]
    assert (stats["drafted_tokens"], stats["inserted_tokens"], stats["waiting_tokens"]) == (3, 6, 0)
    assert stats["nodes"] == 5
