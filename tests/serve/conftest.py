"""One server over a fake engine process for every test that leaves it whole."""

from collections.abc import Iterator

import httpx
import pytest

from slipstream.serve.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_server import MODEL, serving, write_target


@pytest.fixture(scope="session")
def byte_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="session")
def server(byte_target: str) -> Iterator[Server]:
    with serving(ServeConfig(target=byte_target, port=0, served_model_name=MODEL)) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as connected:
        yield connected
