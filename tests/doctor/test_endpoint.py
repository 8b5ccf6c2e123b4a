"""Answers of a server, with known rounds, prompts and words, in each dialect that the doctor reads."""

import pytest

from slipstream.doctor.endpoint import ask_endpoint, check_endpoint
from slipstream.doctor.texts import Answered, Conversation
from slipstream.tests.serve.paced_server import PacedServer, length_of, paced, rounds_of

TEXTS = ["short", "a longer one", "a question that is longer than both", "four"]
LENGTHS = [5, 5, 7, 5]  # of the prompts, in tokens; 5 for the server
MOST = 16


def answered() -> list[Answered]:
    conversations = [Conversation(({"role": "user", "content": text},)) for text in TEXTS]
    return [
        Answered([0] * length, [1, 2], conversation)
        for length, conversation in zip(LENGTHS, conversations, strict=True)
    ]


@pytest.mark.parametrize("dialect", ["vllm", "vllm-detailed", "sglang", "plain"])
def test_a_server_is_asked(dialect):
    lengths = [min(MOST, length_of(text)) for text in TEXTS]
    emitted = [count for length in lengths for count in rounds_of(length)]
    answers = [PacedServer().words(text, 0, length) for text, length in zip(TEXTS, lengths, strict=True)]
    with paced(dialect) as server:
        ask_endpoint(server.url, answered()[:1], answers[:1], MOST)  # its counters do not begin at 0
        report = ask_endpoint(f"{server.url}/v1/", answered(), [*answers[:-1], "something else"], MOST)
    assert (report.url, report.server) == (server.url, "unknown" if dialect == "plain" else dialect.split("-")[0])
    assert (report.num_prompts, report.other_prompts, report.other_answers) == (4, 1, 1)
    if dialect == "plain":
        assert (report.accept_length, report.depth) == (None, None)
    else:
        assert report.accept_length == pytest.approx(sum(emitted) / len(emitted))
        assert report.depth == (2 if dialect != "sglang" else pytest.approx(2))
    assert not report.is_tested


def test_a_server_that_does_not_answer():
    with pytest.raises(ValueError, match="endpoint is http://127.0.0.1:9: .* is not an OpenAI-compatible server"):
        check_endpoint("http://127.0.0.1:9")
