"""The bodies that bench/hostile_grammars.py sends."""

import json

import pytest

from slipstream.bench.hostile_grammars import CASES, MOST_CHARS


@pytest.mark.parametrize("name", CASES)
def test_bodies_are_short_and_no_two_are_the_same(name: str) -> None:
    bodies = {json.dumps(CASES[name](number)) for number in range(3)}
    assert len(bodies) == 3
    assert max(map(len, bodies)) < MOST_CHARS
