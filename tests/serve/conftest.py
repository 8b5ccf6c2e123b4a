"""One server over a fake engine process for every test that leaves it whole; rounds that cost nothing."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.serve.http.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.serve.runner import round_times
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.fake_server import MODEL, serving, write_target


@pytest.fixture(scope="session", autouse=True)
def free_widths() -> Iterator[None]:
    """No test depends on how fast this machine is: eager rounds of any width are said to take the same time."""

    def times(_: Any, max_batch: int, widths: Sequence[int], __: str) -> dict[tuple[int, int], float]:
        return {(max_batch, width): 1.0 for width in widths}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_times, "time_rounds", times)
        yield


@pytest.fixture(scope="session")
def target(make_target: Callable[[str], Path]) -> Path:
    return make_target("qwen3")


@pytest.fixture(scope="session")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE3 draft for `target`."""
    folder = tmp_path_factory.mktemp("drafts") / "draft"
    save_random_draft(target, folder, draft_vocab_size=80)
    return folder


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
