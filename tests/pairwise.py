"""Products of options, of which the gate runs a few cases and the nightly run all."""

import functools
import inspect
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]
Test = Callable[..., None]


def pairwise(*factors: Collection[Any]) -> list[Any]:
    """For parametrize: the whole product. The gate keeps cases in which any two values of any two factors meet."""
    cases = list(product(*factors))
    missing = {pair for case in cases for pair in _pairs(case)}
    gate_cases = []
    while missing:
        gate_cases.append(max(cases, key=lambda case: len(_pairs(case) & missing)))
        missing -= _pairs(gate_cases[-1])
    return gate_of(cases, gate_cases)


def rotating(*factors: Iterable[Any]) -> list[Any]:
    """For parametrize: the whole product. The gate keeps as many cases as the longest factor has values, in which
    every value of every factor comes; no case of it has values with marks (`pytest.param`)."""
    values = [[_marked(value, 1) for value in factor] for factor in factors]
    unmarked = [[value for (value,), marks in factor if not marks] for factor in values]
    gate_cases = [tuple(factor[index % len(factor)] for factor in unmarked) for index in range(max(map(len, unmarked)))]
    cases = []
    for point in product(*values):
        case = tuple(value for (value,), _ in point)
        marks = [mark for _, marks_of_value in point for mark in marks_of_value]
        cases.append(pytest.param(*case, marks=marks if case in gate_cases else [*marks, pytest.mark.slow]))
    return cases


def gate_of(cases: Iterable[Case], gate_cases: Collection[Case]) -> list[Any]:
    """The cases; those that are not in `gate_cases` are slow."""
    return [pytest.param(*case, marks=() if case in gate_cases else pytest.mark.slow) for case in cases]


def some_of(values: Iterable[Any], gate_values: Collection[Any]) -> list[Any]:
    """All values of one factor; those that are not in `gate_values` are slow."""
    return gate_of([(value,) for value in values], [(value,) for value in gate_values])


def grouped(*keys: str) -> Callable[[Test], Test]:
    """Above parametrize: cases of equal marks, and of equal values of the parameters `keys`, are one test, which runs
    all of them and names those that fail. Each has a `tmp_path` and a `monkeypatch` of its own, and finds `capsys` and
    `caplog` empty; what else fixtures give is made once. A skipped case hides no other."""

    def decorate(test):
        marks = test.pytestmark
        products = [mark for mark in marks if mark.name == "parametrize"]
        names = [name for mark in products for name in _names(mark)]

        @functools.wraps(test)
        def run_all(*, cases, **fixtures):
            errors = []
            skips = []
            for index, case in enumerate(cases):
                values = dict(zip(names, case, strict=True))
                try:
                    with _fresh(fixtures, index) as fresh:
                        test(**fresh | values)
                except pytest.skip.Exception as skip:
                    skips.append(skip)
                except (Exception, pytest.fail.Exception) as error:  # the latter is no Exception
                    traceback.clear_frames(error.__traceback__)  # which hold tensors
                    error.add_note(f"case: {values}")
                    errors.append(error)
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(cases)} cases failed", errors)
            if len(skips) == len(cases):
                raise skips[0]

        signature = inspect.signature(test)
        parameters = [signature.parameters[name] for name in signature.parameters if name in keys or name not in names]
        cases = inspect.Parameter("cases", inspect.Parameter.KEYWORD_ONLY)
        run_all.__signature__ = signature.replace(parameters=[*parameters, cases])
        run_all.pytestmark = [mark for mark in marks if mark.name != "parametrize"]
        batches = _batches(products, [names.index(key) for key in keys])
        return pytest.mark.parametrize((*keys, "cases"), batches)(run_all)

    return decorate


def _names(mark: pytest.Mark) -> Sequence[str]:
    assert not mark.kwargs.keys() - {"ids"}, "cases that are grouped name no fixtures"
    names = mark.args[0]
    return [names] if isinstance(names, str) else names


def _batches(products: Sequence[pytest.Mark], keys: Sequence[int]) -> list[Any]:
    """The cases of the product, together where their values at `keys` and their marks are equal."""
    cases = {}
    marks = {}
    for point in product(*([_marked(value, len(_names(mark))) for value in mark.args[1]] for mark in products)):
        case = tuple(value for values, _ in point for value in values)
        by_text = {repr(mark): mark for _, marks_of_value in point for mark in marks_of_value}
        batch = (*(_text(case[key]) for key in keys), *sorted(by_text))
        cases.setdefault(batch, []).append(case)
        marks[batch] = list(by_text.values())
    return [
        pytest.param(
            *(cases[batch][0][key] for key in keys),
            cases[batch],
            marks=marks[batch],
            id=", ".join([*batch[: len(keys)], *sorted({mark.name for mark in marks[batch]} - {"skipif"})]) or "all",
        )
        for batch in cases
    ]


def _marked(value: Any, num_names: int) -> tuple[Case, Collection[pytest.Mark]]:
    """Values of a line of parametrize, and their marks."""
    if hasattr(value, "marks"):
        return value.values, value.marks
    return (value,) if num_names == 1 else tuple(value), ()


def _text(value: Any) -> str:
    """The same in each process that collects."""
    return getattr(value, "__name__", str(value))


@contextmanager
def _fresh(fixtures: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """The fixtures of another case."""
    changes = {}
    if "tmp_path" in fixtures:
        changes["tmp_path"] = fixtures["tmp_path"] / str(index)
        changes["tmp_path"].mkdir()
    if "capsys" in fixtures:
        fixtures["capsys"].readouterr()
    if "caplog" in fixtures:
        fixtures["caplog"].clear()
    with pytest.MonkeyPatch.context() as monkeypatch:  # what fixtures patched stays
        if "monkeypatch" in fixtures:
            changes["monkeypatch"] = monkeypatch
        yield fixtures | changes


def _pairs(case: Case) -> set[Any]:
    return set(combinations(((index, repr(value)) for index, value in enumerate(case)), 2))
