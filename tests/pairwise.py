"""Products of options, of which the gate runs a few cases and the nightly run all."""

from collections.abc import Collection, Iterable
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]


def pairwise(*factors: Collection[Any]) -> list[Any]:
    """For parametrize: the whole product. The gate keeps cases in which any two values of any two factors meet."""
    cases = list(product(*factors))
    missing = {pair for case in cases for pair in _pairs(case)}
    kept: list[Case] = []
    while missing:
        kept.append(max(cases, key=lambda case: len(_pairs(case) & missing)))
        missing -= _pairs(kept[-1])
    return gate_of(cases, kept)


def rotating(*factors: Collection[Any]) -> list[Any]:
    """For parametrize: the whole product. The gate keeps as many cases as the longest factor has values, in which
    every value of every factor comes."""
    kept = [tuple(list(values)[index % len(values)] for values in factors) for index in range(max(map(len, factors)))]
    return gate_of(product(*factors), kept)


def gate_of(cases: Iterable[Case], kept: Collection[Case]) -> list[Any]:
    """The cases, all but `kept` marked slow."""
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.slow) for case in cases]


def some_of(values: Iterable[str], kept: Collection[str]) -> list[Any]:
    """All values of one factor, all but `kept` marked slow."""
    return gate_of([(value,) for value in values], [(value,) for value in kept])


def _pairs(case: Case) -> set[Any]:
    return set(combinations(((index, repr(value)) for index, value in enumerate(case)), 2))
