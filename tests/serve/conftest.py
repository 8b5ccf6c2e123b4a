"""One server over a fake engine process for every test that leaves it whole."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from slipstream.serve.http.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.chat_targets import write_shallow
from slipstream.tests.serve.fake_server import MODEL, client_of, serving, write_target


@pytest.fixture(scope="session")
def target(make_target) -> Path:
    return make_target("qwen3")


@pytest.fixture(scope="session")
def draft(target, tmp_path_factory) -> Path:
    """An EAGLE3 draft for `target`."""
    folder = tmp_path_factory.mktemp("drafts") / "draft"
    save_random_draft(target, folder, draft_vocab_size=80)
    return folder


@pytest.fixture(scope="session")
def shallow(tmp_path_factory) -> Path:
    return write_shallow(tmp_path_factory.mktemp("targets") / "shallow")


@pytest.fixture(scope="session")
def byte_target(tmp_path_factory) -> str:
    return str(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def server(byte_target) -> Iterator[Server]:
    with serving(ServeConfig(target=byte_target, port=0, served_model_name=MODEL)) as running:
        yield running


@pytest.fixture(scope="session")
def client(server) -> Iterator[httpx.Client]:
    with client_of(server) as connected:
        yield connected
