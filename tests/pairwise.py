"""Products of options, of which the gate runs a few cases and the nightly run all."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]
Test = Callable[..., None]


def pairwise(*factors: Collection[Any]) -> list[Any]:
    """For parametrize: the whole product. The gate keeps cases in which any two values of any two factors meet."""
    cases = list(product(*factors))
    missing = {pair for case in cases for pair in _pairs(case)}
    gate_cases: list[Case] = []
    while missing:
        gate_cases.append(max(cases, key=lambda case: len(_pairs(case) & missing)))
        missing -= _pairs(gate_cases[-1])
    return gate_of(cases, gate_cases)


def rotating(*factors: Collection[Any]) -> list[Any]:
    """For parametrize: the whole product. The gate keeps as many cases as the longest factor has values, in which
    every value of every factor comes."""
    gate_cases = [
        tuple(list(values)[index % len(values)] for values in factors) for index in range(max(map(len, factors)))
    ]
    return gate_of(product(*factors), gate_cases)


def gate_of(cases: Iterable[Case], gate_cases: Collection[Case]) -> list[Any]:
    """The cases; those that are not in `gate_cases` are slow."""
    return [pytest.param(*case, marks=() if case in gate_cases else pytest.mark.slow) for case in cases]


def some_of(values: Iterable[str], gate_values: Collection[str]) -> list[Any]:
    """All values of one factor; those that are not in `gate_values` are slow."""
    return gate_of([(value,) for value in values], [(value,) for value in gate_values])


def grouped(names: Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As parametrize, but slow cases with equal first values are one test, which runs all of them and names those that
    fail. Each has a `tmp_path` and a `monkeypatch` of its own; one that is skipped hides no other."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run_all(*, batch: Sequence[Case], **fixtures: Any) -> None:
            errors: list[BaseException] = []
            skips: list[str] = []
            for index, case in enumerate(batch):
                with pytest.MonkeyPatch.context() as monkeypatch:
                    try:
                        test(**dict(zip(names, case, strict=True)), **_fresh(fixtures, index, monkeypatch))
                    except pytest.skip.Exception as skip:
                        skips.append(str(skip))
                    except (Exception, pytest.fail.Exception) as error:  # the latter is no Exception
                        error.add_note(f"case: {dict(zip(names, case, strict=True))}")
                        errors.append(error)
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(batch)} cases failed", errors)
            if len(skips) == len(batch):
                pytest.skip(skips[0])

        signature = inspect.signature(test)
        parameters = [parameter for name, parameter in signature.parameters.items() if name not in names]
        batch = inspect.Parameter("batch", inspect.Parameter.KEYWORD_ONLY)
        run_all.__signature__ = signature.replace(parameters=[*parameters, batch])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("batch", _batches(cases))(run_all)

    return decorate


def _batches(cases: Iterable[Any]) -> list[Any]:
    """Cases of the gate alone, slow ones together by their first value."""
    gate = []
    slow: dict[str, list[Case]] = {}
    for case in cases:
        if case.marks:
            slow.setdefault(str(case.values[0]), []).append(case.values)
        else:
            gate.append(pytest.param([case.values], id="-".join(map(str, case.values))))
    return gate + [pytest.param(batch, id=f"{name}, all", marks=pytest.mark.slow) for name, batch in slow.items()]


def _fresh(fixtures: dict[str, Any], index: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if "monkeypatch" in fixtures:
        fixtures = {**fixtures, "monkeypatch": monkeypatch}
    if "tmp_path" not in fixtures:
        return fixtures
    folder = fixtures["tmp_path"] / str(index)
    folder.mkdir()
    return fixtures | {"tmp_path": folder}


def _pairs(case: Case) -> set[Any]:
    return set(combinations(((index, repr(value)) for index, value in enumerate(case)), 2))
