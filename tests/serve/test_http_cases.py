"""The cases of http_cases/*.yaml against servers around a fake engine, which repeats its prompt."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from typing import Any

import httpx
import pytest

from slipstream.serve.http.frontend import Frontend
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Request
from slipstream.tests.serve.check_server import FOLDER, cases_of, differences, faults_of, main
from slipstream.tests.serve.fake_server import ECHO, MARKERS, MODEL, SHOWN, client_of, serving, write_target
from slipstream.tests.serve.joined_streams import CHAT, join, read_events
from slipstream.tests.tables import each_case

CASES = [case for file in sorted(FOLDER.glob("*.yaml")) for case in cases_of(file)]
GENERATION = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [0, 3]}
GENERATION |= {"repetition_penalty": 1.05}
# Of the target, and of the server.
SERVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bytes": ({}, {}),
    "lenient": ({}, {"ignore_unknown_fields": True, "max_body_mb": 0.01}),
    "echo": ({"template": ECHO, "markers": MARKERS, "generation": {"do_sample": False}}, {"max_model_len": 1024}),
    "shown": (
        {"template": SHOWN, "markers": MARKERS, "generation": GENERATION},
        {"max_model_len": 2048, "control_tokens_as_text": True},
    ),
}
Servers = Callable[[str], tuple[httpx.Client, list[Any]]]


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Servers]:
    """name -> a client of the server and the requests that it made of the last body; started at its first use."""
    with ExitStack() as stack:

        @cache
        def start(name):
            of_target, options = SERVERS[name]
            target = write_target(tmp_path_factory.mktemp(name) / "target", **of_target)
            config = ServeConfig(target=str(target), port=0, served_model_name=MODEL, **options)
            server = stack.enter_context(serving(config))
            client = stack.enter_context(client_of(server))
            return client, noted(server.api.frontend)

        yield start


def noted(frontend: Frontend) -> list[Any]:
    """A list that `frontend` fills with the requests of each body that it reads."""
    requests = []
    read = frontend.read

    def read_and_note(*arguments):
        result = read(*arguments)
        requests[:] = [described(request, frontend) for request in result[0]]
        return result

    frontend.read = read_and_note
    return requests


def described(request: Request, frontend: Frontend) -> dict[str, Any]:
    grammar = request.params.grammar
    params = {**asdict(request.params), "grammar": None if grammar is None else grammar._asdict()}
    words = [frontend.decoder(list(word)) for word in request.params.bad_words]
    prompt = {"prompt": frontend.tokenizer.decode(request.prompt), "tokens": request.prompt}
    names = {"choice": request.choice, "namespace": request.namespace, "bad_words": words}
    return json.loads(json.dumps({**params, **prompt, **names}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, servers):
    client, read = servers(case.server)
    assert faults_of(case, client, read=read) == []


def test_another_server_can_be_asked(servers, monkeypatch, capsys):
    url = str(servers("bytes")[0].base_url)
    files = [str(FOLDER / f"{name}.yaml") for name in ("tokens", "limits")]
    monkeypatch.setattr("sys.argv", ["check", "--url", url, "--extensions", *files])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "passed tokens: tokens of a text\n" in capsys.readouterr().out


@each_case()
def test_a_difference_is_found(expected, actual):
    assert len([*differences(expected, actual)]) == 1


def chunk(reason: str | None = None, name: str = "a", **delta: Any) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
    return f"data: {json.dumps({'id': name, 'choices': [choice]})}\n\n"


ROLE = chunk(role="assistant", content="")
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize(
    "text",
    [
        ROLE + chunk("stop"),
        ROLE + chunk(content="x") + DONE,
        ROLE + chunk("stop") + chunk("stop") + DONE,
        ROLE + chunk("stop", name="b") + DONE,
        chunk("stop", content="x") + DONE,
        ROLE + chunk(content="x").replace("data", "event") + chunk("stop") + DONE,
        ROLE + chunk(content="x").replace('"x"', '"\u2028"') + chunk("stop") + DONE,
        ROLE + chunk(content="").replace('"logprobs": null', '"logprobs": {"content": [1]}') + chunk("stop") + DONE,
    ],
)
def test_a_malformed_stream_is_found(text):
    assert join(CHAT, read_events(CHAT, ROLE + chunk("stop", content="x") + DONE))["choices"]
    with pytest.raises((AssertionError, ValueError)):
        join(CHAT, read_events(CHAT, text))
