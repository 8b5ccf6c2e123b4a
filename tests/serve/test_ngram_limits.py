"""Limits of the n-gram core: memory, threads, bad options and arguments."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.serve.drafters.ngram_core import NgramCore
from slipstream.tests.serve.ngram_fuzz import advance


@pytest.mark.parametrize("capacity", [1_000_000, 1 << 20, (1 << 20) + 1, 6 * (1 << 18) - 1, 12 * (1 << 17)])
def test_a_node_takes_at_most_64_bytes(capacity: int) -> None:
    assert NgramCore(capacity=capacity).stats()["bytes"] <= 64 * capacity


def test_memory_is_constant() -> None:
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
def test_resident_memory_is_constant_over_ten_million_tokens() -> None:
    def resident() -> int:
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


def test_threads_may_do_everything_at_once(tmp_path: Path) -> None:
    core = NgramCore(rows=4, capacity=500)
    faults: list[BaseException] = []
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 30, (50, 200)).astype(np.int32)

    def serve(rows: list[int]) -> None:
        tokens, parents = np.zeros((2, 2, 8), np.int32)
        matches = np.zeros(2, np.int32)
        for text in texts:
            for row in rows:
                core.admit(row, text[:20], str(row % 2))
            for end in range(20, 200, 6):
                core.advance(rows, [[6, *text[end : end + 6]]] * 2, tokens, parents, matches)
            for row in rows:
                core.release(row)

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            faults.append(error)
            raise

    def feed() -> None:
        for text in texts:
            core.insert(text)
            core.stats()

    def watch() -> None:
        for _ in range(10):
            core.save(tmp_path / "trie")
            core.branches()
            core.check()

    jobs: list[tuple[Any, ...]] = [(serve, [0, 1]), (serve, [2, 3]), (feed,), (feed,), (watch,)]
    threads = [threading.Thread(target=guarded, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    core.check()
    assert core.stats()["inserted_tokens"] + core.stats()["dropped_tokens"] == 2 * 50 * 200 + 4 * 50 * (18 + 180)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"capacity": 18}, "capacity is 18; it must be between 19 and"),
    ({"capacity": -1}, "capacity is -1; it must be between"),
    ({"capacity": 1 << 40}, "capacity is 1099511627776; it must be between"),
    ({"branch_length": 1}, "branch_length is 1; it must be between 2 and 63"),
    ({"branch_length": 64}, "branch_length is 64; it must be between 2 and 63"),
    ({"max_match": 18}, r"max_match is 18; it must be between 1 and 17 \(the most is branch_length - 1\)"),
    ({"max_match": 0}, "max_match is 0; it must be between 1 and"),
    ({"min_match": 13}, r"min_match is 13; it must be between 1 and 12 \(the most is max_match\)"),
    ({"min_match": 0}, "min_match is 0; it must be between 1 and"),
    ({"breadth": 0}, "breadth is 0; it must be between 1 and 64"),
    ({"breadth": 65}, "breadth is 65; it must be between 1 and 64"),
    ({"order": "depth"}, "order is 'depth'; choose one of probability, breadth"),
    ({"queue_tokens": 35}, r"queue_tokens is 35; .* \(the least is 2 \* branch_length\)"),
    ({"rows": 0}, "rows is 0; it must be between 1 and 65536"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_sentences(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        NgramCore(**options)


def test_bad_arguments_change_nothing() -> None:
    core = NgramCore(rows=2)
    core.admit(0, [1, 2, 1])
    arrays = [np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int32), np.zeros(1, np.int32)]
    calls: list[tuple[str, tuple[Any, ...], str]] = [
        ("admit", (2, [1]), "row is 2; it must be between 0 and 1"),
        ("admit", (-1, [1]), "row is -1"),
        ("admit", (0, [1]), "row 0 is in use; release it first"),
        ("admit", (1, []), "tokens are empty"),
        ("admit", (1, [3, -1]), "a token is -1; it must be between 0 and 2097151"),
        ("admit", (1, [[3, 1]]), r"tokens has shape \(1, 2\)"),
        ("insert", ([1 << 21],), "a token is 2097152"),
        ("release", (1,), "row 1 is not in use"),
        ("advance", ([1], [[1, 3]], *arrays), "row 1 is not in use; admit a request first"),
        ("advance", ([0], [[2, 3]], *arrays), "a number of tokens is 2; it must be between 0 and 1"),
        ("advance", ([0], [[-1, 3]], *arrays), "a number of tokens is -1"),
        ("advance", ([0], [[1, -1]], *arrays), "a token is -1"),
        ("advance", ([0], [[]], *arrays), r"emitted has shape \(1, 0\); it must be \(1, 1\)"),
        (
            "advance",
            ([0], [[1, 3]], np.zeros((1, 65), np.int32), np.zeros((1, 65), np.int32), arrays[2]),
            "width is 65; it must be between 1 and 64",
        ),
        ("advance", ([0], [[0]], np.zeros((1, 0), np.int32), np.zeros((1, 0), np.int32), arrays[2]), "width is 0"),
        ("advance", ([0], [[1, 3]], arrays[0], np.zeros((2, 4), np.int32), arrays[2]), "parents has shape"),
    ]
    for method, arguments, message in calls:
        with pytest.raises(ValueError, match=message):
            getattr(core, method)(*arguments)
    for copied in (arrays[0].astype(np.int64), np.zeros((1, 8), np.int32)[:, ::2]):
        with pytest.raises(TypeError):  # what is written into must be the caller's own
            core.advance([0], [[0]], copied, arrays[1], arrays[2])
    assert advance(core, 0, 4) == ([1, 2, 1, 2], [-1, 0, 1, 2], 1)
    core.flush()
    assert core.stats()["inserted_tokens"] == 3
