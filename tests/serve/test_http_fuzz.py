"""Random bodies: each is answered or refused with a sentence; none is a server error, none makes the server hang."""

import json
import random
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from slipstream.bench.fuzzed import body
from slipstream.serve.options import ServeConfig
from slipstream.tests.kernels.triton_runs import SLOW
from slipstream.tests.serve.fake_server import CHAT, COMPLETIONS, MODEL, RESPONSES, client_of, serving

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module", params=["auto", "hermes"])
def client(request, byte_target) -> Iterator[httpx.Client]:
    """A client of a server that cannot tell the form of calls, and of a server that is told."""
    parsers = {"tool_parser": request.param, "reasoning_parser": "auto"}
    with (
        serving(ServeConfig(target=byte_target, port=0, served_model_name=MODEL, **parsers)) as server,
        client_of(server) as connected,
    ):
        yield connected


@pytest.mark.parametrize("count", [120, pytest.param(20_000, marks=SLOW)])
def test_no_body_is_a_server_error(count, client):
    rng = random.Random(count)
    statuses = Counter()
    for number in range(count):
        path = rng.choice((CHAT, COMPLETIONS, RESPONSES))
        content = json.dumps(body(rng, path))
        answer = client.post(path, content=content, headers=JSON)
        assert answer.status_code in (200, 400, 404, 413), (number, path, content, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"], content
        statuses[answer.status_code] += 1
    assert min(statuses[200], statuses[400]) > count / 10, statuses
