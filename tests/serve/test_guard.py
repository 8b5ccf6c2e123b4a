"""API keys, origins of browsers, and what else a server in front of users needs."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import openai
import pytest

from slipstream.serve.http.guard import Guard, digest, warning
from slipstream.serve.http.launch import Server
from slipstream.serve.keys import VARIABLE, is_loopback, read_keys
from slipstream.serve.options import ServeConfig
from slipstream.tests.pairwise import grouped
from slipstream.tests.serve.fake_server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    RESPONSES,
    client_of,
    gauge,
    serving,
    wait_until,
)
from slipstream.tests.user_errors import user_error

KEYS = ["sk-first", "sk-second"]


@pytest.fixture(scope="module")
def guarded(byte_target, tmp_path_factory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# for tests\n{KEYS[0]}\n\n {KEYS[1]} \n")
    options = {"api_key_file": str(file), "cors_origins": ["https://pages.example"]}
    with serving(ServeConfig(target=byte_target, port=0, max_body_mb=0.001, **options)) as server:
        yield server


@pytest.fixture
def client(guarded) -> Iterator[httpx.Client]:
    with client_of(guarded) as client:
        yield client


# Of strangers.
HEADERS = [None, "Bearer", "Bearer sk-first!", "Basic sk-first", "sk-first", "Bearer sk-first sk-second"]


@grouped()
@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/metrics", "/v1/models", "/v1/nothing", "/playground"]
)
@pytest.mark.parametrize("header", HEADERS)
def test_without_a_key_nothing_is_told(client, path, header):
    headers = {} if header is None else {"Authorization": header}
    for response in (client.get(path, headers=headers), client.post(path, headers=headers, json={"prompt": 1})):
        assert response.status_code in (401, 405), "405: the method is wrong for everyone"
        assert response.status_code == 401 or path not in response.text or response.request.method in response.text
    response = client.post(CHAT, headers=headers, json={})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert all(key not in response.text for key in KEYS)
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_of_the_file_opens(client, key):
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {key}"}
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 2}, headers=headers).status_code == 200
    assert client.get("/metrics", headers=headers).status_code == 200
    assert client.get("/v1/nothing", headers=headers).status_code == 404


def test_health_needs_no_key(client):
    assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_openai_clients_see_an_authentication_error(guarded):
    ask = {"model": guarded.api.frontend.model_name, "messages": HELLO, "max_tokens": 3}
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError, match="not one of this server's"),
    ):
        stranger.chat.completions.create(**ask)
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEYS[1]) as authorised:
        assert authorised.chat.completions.create(**ask).choices[0].finish_reason == "length"


def test_browsers_of_other_origins_get_no_permission(client):
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = client.options(CHAT, headers={"Origin": "https://pages.example", **preflight})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://pages.example"
    other = client.options(CHAT, headers={"Origin": "https://else.example", **preflight})
    assert "access-control-allow-origin" not in other.headers


def test_the_longest_body_can_be_set(client):
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    response = client.post(COMPLETIONS, json={"prompt": "x" * 1100}, headers=headers)
    assert response.status_code == 413
    assert "1048 bytes" in response.text


def test_where_keys_come_from(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "from-environment")
    assert read_keys(ServeConfig(target="t")) == ["from-environment"]
    assert read_keys(ServeConfig(target="t", api_key="k")) == ["k"]
    file = tmp_path / "keys"
    for text, message in (
        ("\n# none\n", "holds no key"),
        ("a\tb", "printable ASCII"),
        ("schlüssel", "printable ASCII"),
    ):
        file.write_text(text)
        with user_error(message):
            read_keys(ServeConfig(target="t", api_key_file=str(file)))
    with user_error(r"missing cannot be read"):
        read_keys(ServeConfig(target="t", api_key_file=str(tmp_path / "missing")))
    assert "secret" not in repr(ServeConfig(target="t", api_key="secret"))


def test_each_key_is_a_client_of_its_own(client):
    """The engine is told, whatever is asked, and learns no key."""
    bodies = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}}
    for path, body in bodies.items():
        for key in KEYS:
            assert client.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    client.headers["Authorization"] = f"Bearer {KEYS[0]}"
    wait_until(lambda: gauge(client, "engine_clients") == len(KEYS), "the engine tells of both")
    assert gauge(client, "engine_tenants") == len(KEYS)


def test_an_address_stands_for_a_client_without_a_key(server):
    """A client can choose salts, so they must not earn it more turns."""
    with client_of(server) as client:
        for salt in ("", "a", "b", "a", ""):
            body = {"prompt": "a", "cache_salt": salt}
            assert client.post(COMPLETIONS, json=body).status_code == 200
        assert gauge(client, "engine_tenants") == gauge(client, "engine_clients") == 1


def test_no_key_takes_all_places(byte_target, tmp_path):
    """Three of four at most, and as many again once its requests have ended or were left."""
    file = tmp_path / "keys"
    file.write_text("\n".join(KEYS))
    options = {"max_running": 4, "max_waiting": 4, "api_key_file": str(file), "max_model_len": 20_000}
    config = ServeConfig(target=byte_target, port=0, **options)
    body = {"prompt": "a", "max_tokens": 15_000, "ignore_eos": True, "cache_salt": "slow", "n": 3, "stream": True}
    headers = [{"Authorization": f"Bearer {key}"} for key in KEYS]
    with serving(config) as server, client_of(server) as client:
        for _ in range(2):
            lines = []
            with ExitStack() as stack:
                for _ in range(2):
                    stream = stack.enter_context(client.stream("POST", COMPLETIONS, json=body, headers=headers[0]))
                    lines.append(stream.iter_lines())  # whose end would close the stream
                    next(lines[-1])
                refused = client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers[0])
                assert refused.status_code == 429
                assert "6 of at most 6 requests of your key are open" in refused.text
                assert client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers[1]).status_code == 200
            client.headers.update(headers[0])
            wait_until(lambda: gauge(client, "open_requests") == 0, "they are left")


def test_clients_without_two_keys_are_one():
    names = {Guard(KEYS).check(CHAT, f"Bearer {key}") for key in KEYS}
    assert len(names) == 2
    assert "" not in names
    assert not names & {digest(key).hex()[:32] for key in KEYS}
    assert Guard([KEYS[0]] * 2).check(CHAT, f"Bearer {KEYS[0]}") == ""
    assert Guard([]).check(CHAT, "Bearer any") == ""
    assert Guard([]).is_open


@pytest.mark.parametrize(
    ("host", "key", "warns"),
    [("127.0.0.1", None, False), ("::1", None, False), ("localhost", None, False), ("0.0.0.0", None, True)]
    + [("192.168.1.5", None, True), ("my-machine", None, True), ("0.0.0.0", "k", False)],
)
def test_an_open_door_is_reported(host, key, warns):
    config = ServeConfig(target="t", host=host, api_key=key)
    assert is_loopback(host) == (host in ("127.0.0.1", "::1", "localhost"))
    assert bool(warning(config, Guard.of(config))) == warns


def test_the_server_says_so(byte_target, caplog, capsys):
    with caplog.at_level(logging.WARNING), serving(ServeConfig(target=byte_target, port=0, host="0.0.0.0")):
        pass
    assert "asks for no API key" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.DEBUG), serving(ServeConfig(target=byte_target, port=0, api_key="sk-secret")):
        pass
    printed = capsys.readouterr()
    assert "Authorization: Bearer KEY" in printed.out
    assert "sk-secret" not in printed.out + printed.err + caplog.text


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_the_size_of_bodies_is_checked(value):
    with user_error("max_body_mb is .*; it must be a number above 0"):
        ServeConfig(target="t", max_body_mb=value)
