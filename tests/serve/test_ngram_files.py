"""Saved tries of the n-gram core: equal when loaded, refused when damaged."""

import itertools
import random
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.serve.drafters.ngram_core import NgramCore
from slipstream.tests.serve.ngram_fuzz import advance, random_texts


def filled_core() -> NgramCore:
    core = NgramCore(capacity=300, branch_length=6, max_match=5)
    for number, text in enumerate(random_texts(5, 30, 40, vocab=9)):
        core.insert(text, ["", "a"][number % 2])
    return core


def test_a_loaded_trie_drafts_like_the_saved_one(tmp_path: Path) -> None:
    saved = filled_core()
    saved.save(tmp_path / "trie")
    loaded = NgramCore(capacity=300, branch_length=6, max_match=5)
    loaded.load(tmp_path / "trie")
    assert loaded.branches() == saved.branches()
    larger = NgramCore(capacity=5000, branch_length=9, max_match=5)
    larger.load(tmp_path / "trie")
    larger.check()
    first_tokens = [(name, tokens[:6]) for name, tokens, _ in larger.branches()]
    assert first_tokens == [(name, tokens) for name, tokens, _ in saved.branches()]
    for prompt, name in itertools.product(random_texts(6, 20, 5, vocab=9), ("", "a", "b")):
        trees = []
        for core in (saved, loaded):
            core.admit(0, prompt, name)
            core.flush()
            trees.append(advance(core, 0, 16))
            core.release(0)
        assert trees[0] == trees[1]
    assert [path.name for path in tmp_path.iterdir()] == ["trie"]


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trie"
    core = filled_core()
    core.save(path)
    for capacity, branch_length, message in (
        (100, 6, "has 300 nodes; raise capacity"),
        (300, 5, "has branches of 6 tokens; raise branch_length"),
    ):
        with pytest.raises(ValueError, match=f"^n-gram file {path} {message}$"):
            NgramCore(capacity=capacity, branch_length=branch_length, max_match=4).load(path)
    core.admit(0, [1])
    with pytest.raises(ValueError, match="requests are running; load"):
        core.load(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        NgramCore().load(tmp_path / "nothing")
    with pytest.raises(OSError, match="no folder"):
        core.save(tmp_path / "no folder" / "trie")


def test_tokens_that_a_target_does_not_have_are_refused(tmp_path: Path) -> None:
    core = NgramCore()
    core.insert([5, 6, 7, 300])
    core.save(tmp_path / "trie")
    NgramCore().load(tmp_path / "trie", 301)
    with pytest.raises(ValueError, match=r"trie has token 300, and the target's end at 299; name one"):
        NgramCore().load(tmp_path / "trie", 300)


def checksum(data: bytes) -> int:
    """The one of csrc/snapshot.cpp."""
    mask, total = (1 << 64) - 1, len(data)
    whole = len(data) // 8 * 8
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        total = (total ^ word) * 0x9E3779B97F4A7C15 & mask
        total ^= total >> 29
    for byte in data[whole:]:
        total = (total ^ byte) * 0x100000001B3 & mask
    return total


def test_damaged_files_are_refused_and_break_nothing(tmp_path: Path) -> None:
    path, rng = tmp_path / "trie", random.Random(0)
    core = filled_core()
    core.save(path)
    data, branches = path.read_bytes(), core.branches()
    assert struct.unpack("<Q", data[-8:]) == (checksum(data[:-8]),)
    pieces = [data[:size] for size in (0, 1, 39, 40, 47, 48, len(data) // 2, len(data) - 1)]
    for piece in [*pieces, data + b"\0", bytes(len(data))]:
        path.write_bytes(piece)
        with pytest.raises(ValueError, match=f"^n-gram file {path} "):
            core.load(path)
    num_loaded = 0
    for _ in range(400):  # a checksum that fits, as nobody makes it by accident
        changed = bytearray(data[:-8])
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        path.write_bytes(bytes(changed) + struct.pack("<Q", checksum(bytes(changed))))
        other = NgramCore(capacity=300, branch_length=6, max_match=5)
        with suppress(ValueError):
            other.load(path)
            num_loaded += 1
        other.check()
        other.insert(rng.choices(range(9), k=500))
        other.check()
    assert 0 < num_loaded < 400
    assert core.branches() == branches
