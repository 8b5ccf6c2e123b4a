"""Cases that run as one test: all of them run, each with fixtures of its own, and those that fail are named."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from slipstream.tests.pairwise import Test, gate_of, grouped, rotating
from slipstream.tests.user_errors import user_error

BATCHES = {
    "a": [("a", 0, 1), ("a", 0, 2)],
    "a, slow": [("a", 1, 1), ("a", 1, 2), ("a", 2, 1), ("a", 2, 2)],
    "b, slow": [("b", 3, 1), ("b", 3, 2)],
}


def batches_of(test: Test) -> dict[str, Sequence[Any]]:
    """The cases of each test that pytest collects."""
    return {param.id: param.values[-1] for param in test.pytestmark[-1].args[1]}


def test_cases_of_equal_marks_and_keys_are_one_test():
    @grouped("name")
    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("factor", [1, 2])
    @pytest.mark.parametrize(("name", "number"), gate_of([("a", 0), ("a", 1), ("a", 2), ("b", 3)], [("a", 0)]))
    def ignore(name, number, factor): ...

    assert batches_of(ignore) == BATCHES
    filter_mark, batches = ignore.pytestmark
    assert filter_mark.name == "filterwarnings"
    assert batches.args[0] == ("name", "cases")
    assert [param.values[0] for param in batches.args[1]] == ["a", "a", "b"]
    assert [[mark.name for mark in param.marks] for param in batches.args[1]] == [[], ["slow"], ["slow"]]


def test_all_cases_run_and_those_that_fail_are_named(tmp_path):
    runs = []

    @grouped()
    @pytest.mark.parametrize("number", range(5))
    def is_odd(number, tmp_path):
        runs.append((number, tmp_path))
        if number == 4:
            with user_error("never raised"):
                pass
        assert number % 2

    with pytest.raises(BaseExceptionGroup, match="3 of 5 cases failed") as raised:
        is_odd(cases=batches_of(is_odd)["all"], tmp_path=tmp_path)
    notes = [error.__notes__ for error in raised.value.exceptions]
    assert notes == [["case: {'number': 0}"], ["case: {'number': 2}"], ["case: {'number': 4}"]]
    assert [number for number, _ in runs] == [0, 1, 2, 3, 4]
    assert all(folder.is_dir() for _, folder in runs)
    assert len({folder for _, folder in runs}) == 5


def test_a_case_does_not_see_what_another_patched(monkeypatch):
    monkeypatch.setenv("FROM_A_FIXTURE", "1")

    @grouped()
    @pytest.mark.parametrize("number", [0, 1])
    def patch(number, monkeypatch):
        assert os.environ["FROM_A_FIXTURE"] == "1"
        assert "FROM_A_CASE" not in os.environ
        monkeypatch.setenv("FROM_A_CASE", str(number))

    patch(cases=batches_of(patch)["all"], monkeypatch=monkeypatch)
    assert "FROM_A_CASE" not in os.environ


def test_a_skipped_case_hides_no_other():
    @grouped()
    @pytest.mark.parametrize("number", [0, 1])
    def skip_zero(number):
        if not number:
            pytest.skip("zero")
        raise ValueError("one")

    with user_error("one"):
        skip_zero(cases=[(0,), (1,)])
    with pytest.raises(pytest.skip.Exception, match="zero"):
        skip_zero(cases=[(0,), (0,)])


def test_the_gate_has_no_case_of_a_marked_value():
    cases = rotating([1, 2, pytest.param(3, marks=pytest.mark.gpu)], ["a", "b"])
    marks = {case.values: [mark.name for mark in case.marks] for case in cases}
    assert marks == {
        (1, "a"): [],
        (1, "b"): ["slow"],
        (2, "a"): ["slow"],
        (2, "b"): [],
        (3, "a"): ["gpu", "slow"],
        (3, "b"): ["gpu", "slow"],
    }
