"""Where an answer ends, and how rounds are counted."""

from typing import Any

import pytest

from slipstream.serve.request import Request, SamplingParams
from slipstream.serve.sequence import Sequence

STOP_ID = 99


def make_sequence(**params: Any) -> Sequence:
    request = Request(id="a", prompt=[5], params=SamplingParams(**params))
    return Sequence.of(request, frozenset({STOP_ID}), lookahead=0)


@pytest.mark.parametrize(
    ("emitted", "kept", "reason"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [1, 2, 3], "length"),
        ([1, 2, 3, 4], [1, 2, 3], "length"),
        ([1, STOP_ID, 3, 4], [1, STOP_ID], "stop"),
        ([1, 2, STOP_ID], [1, 2, STOP_ID], "stop"),
        ([1, 2, 3, STOP_ID], [1, 2, 3], "length"),
        ([STOP_ID], [STOP_ID], "stop"),
    ],
)
def test_an_answer_ends_at_the_first_stop_id_or_max_tokens(
    emitted: list[int], kept: list[int], reason: str | None
) -> None:
    assert make_sequence(max_tokens=3).cut(emitted) == (kept, reason)


@pytest.mark.parametrize(
    ("params", "stop_ids"),
    [
        ({}, {STOP_ID}),
        ({"stop_token_ids": (7, 8)}, {STOP_ID, 7, 8}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, {7}),
    ],
)
def test_stop_ids_are_the_models_and_the_requests(params: dict[str, object], stop_ids: set[int]) -> None:
    assert make_sequence(max_tokens=3, **params).stop_ids == stop_ids


def test_rounds_are_counted_by_position() -> None:
    sequence = make_sequence(max_tokens=50)
    for num_accepted in (2, 0, 3, 1):
        sequence.count_round(4, num_accepted)
    assert sequence.stats.accepted_by_position == [3, 2, 1]
    assert (sequence.stats.rounds, sequence.stats.drafted_tokens, sequence.stats.accepted_tokens) == (4, 16, 6)
