"""Tokens that tests/house.py counts, and subjects of commits that it takes."""

import pytest

from slipstream.tests.house import SUBJECT, num_tokens


def test_comments_docstrings_and_layout_cost_nothing():
    code = "x = 1\ndef f(a):\n    return a + x\n"
    documented = '"""Module."""\n\nx = 1  # one\n\n\ndef f(a):\n    """Function."""\n\n    return a + x\n'
    assert num_tokens(code) == 3 + 6 + 4
    assert num_tokens(documented) == num_tokens(code)
    assert num_tokens('x = "text"') == 3


@pytest.mark.parametrize(
    ("subject", "is_right"),
    [
        ("serve: refuse empty prompts", True),
        ("models/drafts, serve: read heads", True),
        ("Refuse empty prompts", False),
        ("serve: " + "x" * 66, False),
    ],
)
def test_subjects_have_an_area_and_are_short(subject, is_right):
    assert bool(SUBJECT.fullmatch(subject)) == is_right
