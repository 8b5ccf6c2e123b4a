"""The n-gram drafter's core: compared with a plain model, and what it finds with brute force; its limits; its files."""

import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from slipstream.serve.drafters.ngram.ngram_core import NgramCore
from slipstream.tests.pairwise import grouped
from slipstream.tests.serve.ngram_fuzz import Fuzz, Tree, advance, arrays_for, random_texts
from slipstream.tests.serve.ngram_model import NgramModel
from slipstream.tests.tables import table_of
from slipstream.tests.user_errors import user_error

MAGIC = 0x31454952544D47  # of a saved trie


def paths(tree: Tree) -> list[list[int]]:
    """The tokens from below the root to each node."""
    tokens, parents, _ = tree
    prefixes = [[]]
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            prefixes.append([*prefixes[parents[node]], tokens[node]])
    return prefixes[1:]


@grouped()
@pytest.mark.parametrize("seed", range(60))
def test_core_agrees_with_the_model(seed, tmp_path):
    Fuzz(NgramCore, seed, tmp_path).run(60)


@pytest.mark.slow
def test_core_agrees_with_the_model_for_long(tmp_path):
    assert sum(Fuzz(NgramCore, seed, tmp_path).run(150) for seed in range(10_000, 16_000)) > 2_000_000


def contains(texts: list[list[int]], string: list[int]) -> bool:
    starts = [range(len(text) - len(string) + 1) for text in texts]
    return any(
        text[start : start + len(string)] == string for text, s in zip(texts, starts, strict=True) for start in s
    )


@pytest.mark.parametrize("seed", range(8))
def test_longest_match_and_what_follows_it_are_those_of_brute_force(seed):
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
        drafted = context[:-1]  # what its last token's match may reach
        lengths = [
            length
            for length in range(1, min(6, len(context)) + 1)
            if contains([drafted], context[-length:])
            or any(contains([text[:-1]], context[-length:]) for text in history)
        ]
        assert tree[2] == max(lengths, default=0)
        texts_so_far = [*history, *(context + context[start:] for start in range(len(context)))]  # it may repeat itself
        assert all(contains(texts_so_far, [context[-1], *path]) for path in paths(tree) if len(path) < 3)
        history.append(context[-12:])


def test_every_branch_is_found_and_counted_at_least_as_often_as_it_occurs():
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


def continuations(text: list[int], count: int) -> list[list[int]]:
    """Returns the continuations of the last token at its earlier places in the text, which is repeated from there where
    it ends."""
    starts = [index for index in range(1, len(text)) if text[index - 1] == text[-1]]
    return [list(itertools.islice(itertools.cycle(text[start:]), count)) for start in starts]


@grouped()
@pytest.mark.parametrize("seed", range(20))
def test_tokens_of_other_texts_are_foreign(seed):
    """A node counts as the request's own only where brute force finds its path in the request's text; with no other
    text in the trie, nearly every node does: all but those at places that the own text is not searched for."""
    rng = random.Random(seed)
    num_nodes = Counter()
    vocab = rng.choice((6, 30))
    text, *texts = random_texts(seed, 6, 60, 30)
    for inserted in (texts, []):
        core = NgramCore(breadth=8)
        for other in inserted:
            core.insert([token % vocab for token in other])
        tokens = [token % vocab for token in text]
        core.admit(0, tokens[:20])
        for end in range(20, 60):
            arrays = arrays_for(1, 32)
            core.advance([0], [[1, tokens[end]]], **arrays)
            drafted, parents, *_, foreign = (array[0].tolist() for array in arrays.values())
            assert not foreign[0]
            expected = continuations(tokens[: end + 1], 32)
            for path, is_foreign in zip(paths((drafted, parents, 0)), foreign[1:], strict=False):
                num_nodes[is_foreign] += 1
                assert is_foreign or path in [continuation[: len(path)] for continuation in expected]
        assert num_nodes[False] > 20
        assert (num_nodes[True] > num_nodes[False] / 10) == bool(inserted)
        num_nodes.clear()


def test_namespaces_keep_texts_apart():
    core = NgramCore(rows=3)
    core.insert([1, 2, 3, 4], "a" * 1000)
    core.admit(0, [1, 2])
    core.admit(1, [1, 2], "b")
    core.admit(2, [1, 2], "a" * 1000)
    assert [advance(core, row, 3)[0] for row in range(3)] == [[2, -1, -1], [2, -1, -1], [2, 3, 4]]
    assert all(len(name) <= 64 for name, _, _ in core.branches())


def test_unused_namespaces_are_forgotten():
    core = NgramCore(capacity=1000)
    core.insert(list(range(10)), "0")
    before = core.stats()["bytes"]
    for number in range(20_000):
        core.insert([number % 7, number % 5], f"user {number}")
    assert core.stats()["bytes"] < before + 1000 * 200
    core.check()


def test_dropped_tokens_are_counted_and_the_next_ones_are_a_new_text():
    options = {"capacity": 500, "branch_length": 4, "min_match": 1, "max_match": 3, "breadth": 4}
    core = NgramCore(queue_tokens=8, **options)
    model = NgramModel(**options)
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


def test_statistics():
    core = NgramCore(rows=2, max_match=3)
    core.admit(0, [1, 2, 1])
    core.admit(1, [5, 6, 7])
    arrays = arrays_for(2, 4)
    core.advance([0, 1], [[0], [0]], **arrays)
    core.flush()
    stats = core.stats()
    assert arrays["matches"].tolist() == [1, 0]
    assert stats["match_lengths"] == [1, 1, 0, 0]
    assert (stats["drafted_tokens"], stats["inserted_tokens"], stats["waiting_tokens"]) == (3, 6, 0)
    assert stats["nodes"] == 5


# Limits: memory, threads, bad options and arguments


@pytest.mark.parametrize("capacity", [1_000_000, 1 << 20, (1 << 20) + 1, 6 * (1 << 18) - 1, 12 * (1 << 17)])
def test_a_node_takes_at_most_64_bytes(capacity):
    assert NgramCore(capacity=capacity).stats()["bytes"] <= 64 * capacity


def test_memory_is_constant():
    core = NgramCore(capacity=2000)
    rng = np.random.default_rng(0)
    core.insert(rng.integers(0, 1000, 5000))
    before = core.stats()
    for _ in range(60):
        core.insert(rng.integers(0, 1000, 5000))
    after = core.stats()
    core.check()
    assert (before["nodes"], after["nodes"]) == (2000, 2000)
    assert before["bytes"] == after["bytes"]
    assert after["evicted_nodes"] > 300_000


@pytest.mark.slow
def test_resident_memory_is_constant_over_ten_million_tokens():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    core = NgramCore(capacity=1_000_000)
    rng = np.random.default_rng(0)
    sizes = []
    for step in range(100):
        core.insert(rng.integers(0, 32_000, 120_000))
        if step >= 15:  # full by then
            sizes.append(resident())
    assert core.stats()["inserted_tokens"] == 12_000_000
    assert core.stats()["nodes"] == 1_000_000
    assert max(sizes) - sizes[0] < 4 << 20
    core.check()


def test_a_forked_process_ends_without_the_thread():
    """It has the core, which its collector of garbage may free."""
    program = """
import os, signal
from slipstream.serve.drafters.ngram.ngram_core import NgramCore

core = NgramCore(rows=1, capacity=100)
core.insert([1, 2, 3])
child = os.fork()
if not child:
    signal.alarm(20)
    del core
    os._exit(0)
_, status = os.waitpid(child, 0)
core.insert([4, 5, 6])
core.flush()
assert (status, core.stats()["inserted_tokens"]) == (0, 6), status
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_threads_may_do_everything_at_once(tmp_path):
    core = NgramCore(rows=4, capacity=500)
    faults = []
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 30, (50, 200)).astype(np.int32)

    def serve(rows):
        arrays = arrays_for(2, 8)
        for text in texts:
            for row in rows:
                core.admit(row, text[:20], str(row % 2))
            for end in range(20, 200, 6):
                core.advance(rows, [[6, *text[end : end + 6]]] * 2, **arrays)
            for row in rows:
                core.release(row)

    def guarded(work, *arguments):
        try:
            work(*arguments)
        except BaseException as error:
            faults.append(error)
            raise

    def feed():
        for text in texts:
            core.insert(text)
            core.stats()

    def watch():
        for _ in range(10):
            core.save(tmp_path / "trie")
            core.branches()
            core.check()

    jobs = [(serve, [0, 1]), (serve, [2, 3]), (feed,), (feed,), (watch,)]
    threads = [threading.Thread(target=guarded, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    core.check()
    assert core.stats()["inserted_tokens"] + core.stats()["dropped_tokens"] == 2 * 50 * 200 + 4 * 50 * (18 + 180)


WITHOUT_MEMORY = """
import ctypes, sys
from slipstream.tests.serve.ngram_fuzz import advance, load_core

hook, core_class = ctypes.CDLL(sys.argv[1]), load_core(None)
loaded = core_class(rows=3, capacity=300)
loaded.insert([1, 2, 3], "loaded")
loaded.save(sys.argv[2])
core = core_class(rows=3, capacity=300)
core.load(sys.argv[2])
hook.deny_threads()
for number in range(300):
    row, start = number % 3, number * 60
    core.admit(row, list(range(start, start + 20)), f"client {number}")
    for token in range(start + 20, start + 60):
        advance(core, row, 8, token)
    core.release(row)
core.flush()
core.check()
print(core.stats()["inserted_tokens"], hook.denied())
"""


@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs Linux and g++")
def test_the_inserting_thread_needs_no_memory(tmp_path):
    """Nobody could catch its std::bad_alloc, which would end the process. Names and nodes come and go meanwhile."""
    source = Path(__file__).with_name("no_memory.cpp")
    hook = tmp_path / "no_memory.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(hook), str(source)], check=True)
    script = [sys.executable, "-c", WITHOUT_MEMORY, str(hook), str(tmp_path / "trie")]
    ended = subprocess.run(script, env={**os.environ, "LD_PRELOAD": str(hook)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(300 * 58), "0"]


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = table_of(__file__, "bad_options")


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_sentences(options, message):
    with user_error(f"^{message}"):
        NgramCore(**options)


def test_bad_arguments_change_nothing():
    core = NgramCore(rows=2)
    core.admit(0, [1, 2, 1])
    tokens, *arrays = arrays_for(1, 4).values()
    calls = [
        ("admit", (2, [1]), "row is 2; it must be between 0 and 1"),
        ("admit", (-1, [1]), "row is -1"),
        ("admit", (0, [1]), "row 0 is in use; release it first"),
        ("admit", (1, []), "tokens are empty"),
        ("admit", (1, [3, -1]), "a token is -1; it must be between 0 and 2097151"),
        ("admit", (1, [[3, 1]]), r"tokens has shape \(1, 2\)"),
        ("insert", ([1 << 21],), "a token is 2097152"),
        ("release", (1,), "row 1 is not in use"),
        ("advance", ([1], [[1, 3]], tokens, *arrays), "row 1 is not in use; admit a request first"),
        ("advance", ([0], [[2, 3]], tokens, *arrays), "a number of tokens is 2; it must be between 0 and 1"),
        ("advance", ([0], [[-1, 3]], tokens, *arrays), "a number of tokens is -1"),
        ("advance", ([0], [[1, -1]], tokens, *arrays), "a token is -1"),
        ("advance", ([0], [[]], tokens, *arrays), r"emitted has shape \(1, 0\); it must be \(1, 1\)"),
        ("advance", ([0], [[1, 3]], *arrays_for(1, 65).values()), "width is 65; it must be between 1 and 64"),
        ("advance", ([0], [[0]], *arrays_for(1, 0).values()), "width is 0"),
        ("advance", ([0], [[1, 3]], tokens, np.zeros((2, 4), np.int32), *arrays[1:]), "parents has shape"),
        ("advance", ([0], [[1, 3]], tokens, arrays[0], np.zeros((1, 3), np.float32), *arrays[2:]), "scores has shape"),
        ("advance", ([0], [[1, 3]], tokens, *arrays[:-1], np.zeros((1, 3), np.bool_)), "foreign has shape"),
    ]
    for method, arguments, message in calls:
        with user_error(message):
            getattr(core, method)(*arguments)
    for copied in (tokens.astype(np.int64), np.zeros((1, 8), np.int32)[:, ::2]):
        with pytest.raises(TypeError):  # what is written into must be the caller's own
            core.advance([0], [[0]], copied, *arrays)
    assert advance(core, 0, 4) == ([1, 2, 1, 2], [-1, 0, 1, 2], 1)
    core.flush()
    assert core.stats()["inserted_tokens"] == 3


# Saved tries


def filled_core() -> NgramCore:
    core = NgramCore(capacity=300, branch_length=6, max_match=5)
    for number, text in enumerate(random_texts(5, 30, 40, vocab=9)):
        core.insert(text, ["", "a"][number % 2])
    return core


def test_a_loaded_trie_drafts_like_the_saved_one(tmp_path):
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


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "trie"
    core = filled_core()
    core.save(path)
    for capacity, branch_length, message in (
        (100, 6, "has 300 nodes; raise capacity"),
        (300, 5, "has branches of 6 tokens; raise branch_length"),
    ):
        with user_error(f"^n-gram file {path} {message}$"):
            NgramCore(capacity=capacity, branch_length=branch_length, max_match=4).load(path)
    core.admit(0, [1])
    with user_error("requests are running; load"):
        core.load(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        NgramCore().load(tmp_path / "nothing")
    with pytest.raises(OSError, match="Is a directory"):
        NgramCore().load(tmp_path)
    with pytest.raises(OSError, match="no folder"):
        core.save(tmp_path / "no folder" / "trie")


def test_an_empty_trie_is_a_small_file(tmp_path):
    """No text was written, so no chunk of the log is."""
    NgramCore().save(tmp_path / "trie")
    assert (tmp_path / "trie").stat().st_size < 100
    core = NgramCore()
    core.load(tmp_path / "trie")
    core.insert([1, 2, 3])
    core.check()
    assert core.branches() == [("", [token, *range(token + 1, 4)], [1]) for token in (1, 2, 3)]


@pytest.mark.skipif(sys.platform != "linux", reason="counts what is read as Linux tells it")
@pytest.mark.parametrize(
    "start",
    [b"", struct.pack("<Q", MAGIC), struct.pack("<Q6I", MAGIC, 1, 18, 1, 2, 2, 4)],
    ids=["no header", "another version", "a header"],
)
def test_a_foreign_file_is_not_read_whole(start, tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(start)
        file.truncate(1 << 26)
    before = psutil.Process().io_counters().read_chars
    with user_error(f"^n-gram file {path} "):
        NgramCore().load(path)
    assert psutil.Process().io_counters().read_chars - before < 1 << 20


def test_tokens_that_a_target_does_not_have_are_refused(tmp_path):
    core = NgramCore()
    core.insert([5, 6, 7, 300])
    core.save(tmp_path / "trie")
    NgramCore().load(tmp_path / "trie", 301)
    with user_error(r"trie has token 300, and the target's end at 299; name one"):
        NgramCore().load(tmp_path / "trie", 300)


def checksum(data: bytes) -> int:
    """The one of csrc/snapshot.cpp."""
    mask = (1 << 64) - 1
    total = len(data)
    num_aligned = len(data) // 8 * 8
    for (word,) in struct.iter_unpack("<Q", data[:num_aligned]):
        total = (total ^ word) * 0x9E3779B97F4A7C15 & mask
        total ^= total >> 29
    for byte in data[num_aligned:]:
        total = (total ^ byte) * 0x100000001B3 & mask
    return total


def test_damaged_files_are_refused_and_break_nothing(tmp_path):
    path = tmp_path / "trie"
    rng = random.Random(0)
    core = filled_core()
    core.save(path)
    data = path.read_bytes()
    branches = core.branches()
    assert struct.unpack("<Q", data[-8:]) == (checksum(data[:-8]),)
    pieces = [data[:size] for size in (0, 1, 39, 40, 47, 48, len(data) // 2, len(data) - 1)]
    for piece in [*pieces, data + b"\0", bytes(len(data))]:
        path.write_bytes(piece)
        with user_error(f"^n-gram file {path} "):
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
