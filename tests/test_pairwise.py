"""Slow cases that run as one test: all of them run, and those that fail are named."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.tests.pairwise import gate_of, grouped

SEEN: list[tuple[str, int, Path]] = []


def test_all_cases_run_and_those_that_fail_are_named(tmp_path: Path) -> None:
    @grouped(("name", "number"), gate_of([("a", 0), ("a", 1), ("a", 2), ("b", 3), ("a", 4)], [("a", 0)]))
    def is_odd(name: str, number: int, tmp_path: Path) -> None:
        SEEN.append((name, number, tmp_path))
        assert number % 2

    batches: dict[Any, Any] = {case.id: case for case in is_odd.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    assert {name: bool(case.marks) for name, case in batches.items()} == {"a-0": False, "a, all": True, "b, all": True}
    with pytest.raises(ExceptionGroup) as raised:
        is_odd(batch=batches["a, all"].values[0], tmp_path=tmp_path)
    notes = [error.__notes__ for error in raised.value.exceptions]
    assert notes == [["case: {'name': 'a', 'number': 2}"], ["case: {'name': 'a', 'number': 4}"]]
    assert [number for _, number, _ in SEEN] == [1, 2, 4]
    assert len({folder for *_, folder in SEEN}) == 3
    is_odd(batch=batches["b, all"].values[0], tmp_path=tmp_path / "0")


def test_a_case_that_is_skipped_or_raises_nothing_hides_no_other() -> None:
    @grouped(("name", "number"), gate_of([("a", 0), ("a", 1), ("a", 2), ("b", 0)], []))
    def check(name: str, number: int) -> None:
        if number == 0:
            pytest.skip(f"{name} has zero")
        with pytest.raises(ValueError, match="invalid literal"):
            int("1") if number == 1 else int("x")

    batches: dict[Any, Any] = {case.id: case for case in check.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE") as raised:
        check(batch=batches["a, all"].values[0])
    assert raised.value.__notes__ == ["case: {'name': 'a', 'number': 1}"]
    with pytest.raises(pytest.skip.Exception, match="b has zero"):
        check(batch=batches["b, all"].values[0])
