"""Figures of streams: which outputs and gaps fall into a time, and the mean of their rounds."""

from slipstream.bench.streams import Arrival, Stream, accept_length, gaps_ended, gaps_touching, num_tokens
from slipstream.serve.request import RequestStats


def test_a_gap_ends_in_one_time_and_touches_two():
    stream = Stream(0.0, arrivals=[Arrival(1.0, 1), Arrival(2.0, 3), Arrival(5.0, 2)])
    assert [gaps_ended([stream], *times) for times in ((0.0, 3.0), (3.0, 6.0))] == [[1.0], [3.0]]
    assert gaps_touching([stream], 2.0, 3.0) == [3.0]
    assert gaps_touching([stream], 1.5, 3.0) == [1.0, 3.0]
    assert num_tokens([stream], 1.0, 5.0) == 5
    assert stream.first_token_s == 1.0
    assert accept_length([stream]) is None
    stream.stats = RequestStats(completion_tokens=6, prefills=1, rounds=2)
    assert accept_length([stream]) == 2.5
