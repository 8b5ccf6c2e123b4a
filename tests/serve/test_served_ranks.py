"""A server over several ranks, asked through OpenAI's client, and what it says when a rank is lost."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest

from slipstream.serve.engine import members
from slipstream.serve.engine import team as teams
from slipstream.serve.engine.build import build_engine
from slipstream.serve.http.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve import correctness
from slipstream.tests.serve.fake_server import MODEL, serving, wait_until
from slipstream.tests.serve.test_tensor_parallel import GPU, TWO_GPUS
from slipstream.tests.sources import TINY


def ask(client: openai.OpenAI) -> list[Any]:
    """Answers of all kinds, and their log-probabilities."""
    messages = [{"role": "user", "content": "Tom has 3 boxes of 12 eggs. How many eggs does he have?"}]
    options = {"model": MODEL, "messages": messages, "seed": 1, "max_tokens": 24, "temperature": 0.8}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2).choices[0]
    assert answer.logprobs.content is not None
    stream = client.chat.completions.create(**options, stream=True, stop=["5"])
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": correctness.PERSON}}
    person = client.chat.completions.create(**options | {"max_tokens": 60}, response_format=schema)
    return [
        answer.message.content,
        [(entry.token, round(entry.logprob, 3)) for entry in answer.logprobs.content],
        "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
        person.choices[0].message.content,
    ]


@contextmanager
def served(tp: int, device: str = "cpu") -> Iterator[tuple[Server, openai.OpenAI]]:
    options = {"target": str(TINY), "draft": "ngram", "device": device, "kv_cache_tokens": 8192}
    config = ServeConfig(**options, tp=tp, port=0, served_model_name=MODEL)
    with serving(config, build_engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        yield server, client


@pytest.mark.slow
def test_a_server_of_two_ranks_answers_as_one_of_one():
    """And leaves no process."""
    answers = []
    for tp in (1, 2):
        with served(tp) as (server, client):
            answers.append(ask(client))
            metrics = httpx.get(f"{server.url}/metrics").text
            processes = processes_of(server)
        for name in ("memory_bytes", "sum_seconds"):
            assert metrics.count(f"slipstream_rank_{name}{{") == (tp if tp > 1 else 0)
        assert len(processes) >= tp
        wait_for_end(processes)
    assert answers[0] == answers[1]


def wait_for_end(processes: list[psutil.Process]):
    """Asks, and does not reap them, which would take their exit status from the server."""

    def has_ended(process):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    wait_until(lambda: all(map(has_ended, processes)), "the end of all processes")


def processes_of(server: Server) -> list[psutil.Process]:
    """The engine's process, which is rank 0, and those of the other ranks."""
    engine = psutil.Process(server.api.engine.pid)
    return [engine, *(process for process in engine.children() if members.MODULE in process.cmdline())]


@pytest.mark.parametrize(
    ("rank", "number", "sentence"),
    [
        (1, signal.SIGKILL, "rank 1 ({}) was killed by signal 9 (SIGKILL)"),
        (1, signal.SIGSTOP, "rank 1 ({}) has not answered for 4 s"),
        (0, signal.SIGKILL, "the engine's process was killed by signal 9 (SIGKILL)"),
    ],
)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[GPU, TWO_GPUS])]
)
def test_a_lost_rank_ends_the_server(device, rank, number, sentence):
    """The open request gets an error, /health is red, and no process is left."""
    assert teams.SILENCE_SECONDS + teams.BEAT_SECONDS < 5
    sentence = sentence.format("cpu" if device == "cpu" else "cuda:1")
    with served(2, device) as (server, client):
        processes = processes_of(server)
        options = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 1500, "temperature": 1.0}
        stream = client.completions.create(**options, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        processes[rank].send_signal(number)
        with pytest.raises(openai.APIError, match=re.escape(sentence)):
            list(stream)
        assert httpx.get(f"{server.url}/health").status_code == 503
        wait_for_end(processes)
