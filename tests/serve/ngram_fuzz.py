"""Random operations on the n-gram core and on its plain model, compared after each of them.

python tests/serve/ngram_fuzz.py --seconds 600 [--core FILE]    # FILE: a core built elsewhere
"""

import argparse
import importlib
import importlib.util
import random
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from slipstream.tests.serve.ngram_model import NgramModel

NAMES = ("", "a", "x" * 100)
Tree = tuple[list[int], list[int], int]  # tokens, parents, length of the match


def advance(core: Any, row: int, width: int, *gained: int) -> Tree:
    """The request's tree after it has gained these tokens."""
    arrays = arrays_for(1, width)
    core.advance([row], [[len(gained), *gained]], **arrays)
    return arrays["tokens"][0].tolist(), arrays["parents"][0].tolist(), int(arrays["matches"][0])


def arrays_for(batch: int, width: int) -> dict[str, Any]:
    """Returns the arrays that `advance` writes."""
    return {
        "tokens": np.full((batch, width), -7, np.int32),
        "parents": np.full((batch, width), -7, np.int32),
        "scores": np.zeros((batch, width), np.float32),
        "matches": np.full(batch, -7, np.int32),
        "foreign": np.zeros((batch, width), np.bool_),
    }


def random_texts(seed: int, count: int, length: int, vocab: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


class Fuzz:
    """One random configuration, small enough that nodes are given up and texts overwritten all the time."""

    def __init__(self, core_class: Any, seed: int, folder: Path):
        self.rng = rng = random.Random(seed)
        branch = rng.choice((2, 3, 5, 8, 18, 63))
        longest = rng.randint(1, branch - 1)
        self.options: dict[str, Any] = {
            "capacity": branch + rng.choice((1, 2, 3, 20, 100, 400, 3000)),
            "branch_length": branch,
            "min_match": rng.randint(1, longest),
            "max_match": longest,
            "breadth": rng.choice((1, 2, 4, 8, 64)),
        }
        self.num_rows = rng.choice((1, 2, 5))
        self.vocab = rng.choice((2, 3, 6, 20, 300))
        self.names = NAMES[: rng.choice((1, 3))]
        self.core_class = core_class
        self.folder = folder
        self.seed = seed
        self.core = self.make_core()
        self.model = NgramModel(**self.options)
        self.texts = [self.random_text(60) for _ in range(4)]
        self.drafts: dict[int, list[int]] = {}  # of the running rows: what was drafted last, without the root
        self.users: dict[int, tuple[str, ...]] = {}  # of the running rows: the namespaces that they see
        self.num_operations = 0

    def make_core(self) -> Any:
        return self.core_class(rows=self.num_rows, **self.options)

    def random_text(self, longest: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(self.rng.randint(1, longest))]

    def text(self, longest: int) -> list[int]:
        """At least one token; often a part of an earlier text, perhaps with a change."""
        if self.rng.random() < 0.5:
            return self.random_text(longest)
        text = self.rng.choice(self.texts)
        start = self.rng.randrange(len(text))
        part = text[start : start + longest]
        if self.rng.random() < 0.5:
            part[self.rng.randrange(len(part))] = self.rng.randrange(self.vocab)
        return part

    def run(self, num_steps: int) -> int:
        """Returns how many operations were compared; an operation is a request's or text's, not a batch's."""
        for _ in range(num_steps):
            choice = self.rng.random()
            if choice < 0.15 and len(self.drafts) < self.num_rows:
                self.admit()
            elif choice < 0.22 and self.drafts:
                self.release()
            elif choice < 0.3:
                self.insert()
            elif self.drafts:
                self.round()
            self.compare_counts()
            if self.rng.random() < 0.02:
                self.compare_tries()
        self.compare_tries()
        return self.num_operations

    def admit(self):
        row = self.rng.choice(sorted(set(range(self.num_rows)) - self.drafts.keys()))
        text = self.text(40)
        name = self.rng.choice(self.names)
        common = self.rng.choice((None, *self.names))
        self.core.admit(row, text, name, common)
        self.core.flush()
        names = {user for users in self.users.values() for user in users}  # a namespace without texts is forgotten
        names |= {branch[0] for branch in self.model.trie.branches()}
        self.users[row] = (name, common) if common in names else (name,)
        self.model.admit(row, text, *self.users[row])
        self.drafts[row] = []
        self.num_operations += 1

    def release(self):
        row = self.rng.choice(sorted(self.drafts))
        num_tokens = len(self.model.requests[row].tokens) - self.rng.choice((0, 0, 1, 3, 100))
        self.core.release(row, max(0, num_tokens))
        self.core.flush()
        self.model.release(row, num_tokens)
        del self.drafts[row], self.users[row]
        self.num_operations += 1

    def insert(self):
        text = self.text(50)
        name = self.rng.choice(self.names)
        self.core.insert(text, name)
        self.model.insert(text, name)
        self.texts[self.rng.randrange(len(self.texts))] = text
        self.num_operations += 1

    def round(self):
        """All running requests gain tokens, some of them drafted ones, and get a tree each."""
        rows = sorted(self.drafts)
        limit = self.rng.randint(1, 6)
        gained = {}
        for row in rows:
            text = self.drafts[row] if self.rng.random() < 0.4 else self.text(limit)
            gained[row] = text[: self.rng.randint(0, limit)]
        width = self.rng.choice((1, 2, 8, 16, 64))
        arrays = arrays_for(len(rows), width)
        tokens, parents, scores, matches, foreign = arrays.values()
        emitted = [[len(text), *text, *[9] * (limit - len(text))] for text in gained.values()]
        counts = self.core.advance(rows, emitted, **arrays)
        self.core.flush()
        assert counts == (tokens >= 0).sum(axis=1).tolist(), self.place()
        trees = list(zip(tokens.tolist(), parents.tolist(), matches.tolist(), strict=True))
        assert trees == self.model.advance(gained, width), self.place()
        assert foreign.tolist() == self.model.foreign, self.place()
        np.testing.assert_allclose(scores, self.model.scores, rtol=1e-5, atol=1e-6, err_msg=self.place())
        for (tokens_of_tree, above, _), count in zip(trees, counts, strict=True):
            assert all(0 <= above[node] < node for node in range(1, count)), self.place()
            children = Counter(above[1:count])
            assert len(set(zip(above[:count], tokens_of_tree, strict=False))) == count, "siblings are distinct"
            assert max(children.values(), default=0) <= self.options["breadth"], self.place()
        self.drafts = {row: drafted[1:count] for row, drafted, count in zip(rows, tokens.tolist(), counts, strict=True)}
        self.num_operations += 2 * len(rows)

    def compare_counts(self):
        stats = self.core.stats()
        counts = (stats["nodes"], stats["evicted_nodes"], stats["dropped_tokens"])
        assert counts == (self.model.trie.size, self.model.trie.num_evicted, 0), self.place()

    def compare_tries(self):
        self.core.check()
        names = {name: self.names[index] for index, name in enumerate(self.names)}
        branches = [(names.get(name, NAMES[2]), *rest) for name, *rest in self.core.branches()]
        assert branches == self.model.trie.branches(), self.place()
        if not self.drafts and self.rng.random() < 0.5:
            self.core.save(self.folder / "trie")
            self.core = self.make_core()
            self.core.load(self.folder / "trie")
            self.core.check()
            assert len(self.core.branches()) == len(branches), self.place()
            self.model.trie.num_evicted = 0
            self.num_operations += 2

    def place(self) -> str:
        return f"seed {self.seed} after {self.num_operations} operations, {self.options}"


def load_core(path: str | None) -> Any:
    if path is None:
        return importlib.import_module("slipstream.serve.drafters.ngram.ngram_core").NgramCore
    spec = importlib.util.spec_from_file_location("ngram_core", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NgramCore


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--core")
    options = parser.parse_args()
    core_class = load_core(options.core)
    num_operations = 0
    seed = options.seed
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        while time.monotonic() < start + options.seconds:
            num_operations += Fuzz(core_class, seed, Path(folder)).run(150)
            seed += 1
    print(f"{num_operations:,} operations with seeds {options.seed}..{seed - 1}: core and model agree")


if __name__ == "__main__":
    main()
