"""One server over a fake engine process for every test that leaves it whole; steps that all take as long."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from slipstream.serve.engine import build
from slipstream.serve.engine.step_costs import FittedCosts
from slipstream.serve.http.launch import Server
from slipstream.serve.options import ServeConfig
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.fake_server import MODEL, serving, write_target


@pytest.fixture(scope="session", autouse=True)
def equal_steps() -> Iterator[None]:
    """No test depends on how fast this machine is: steps that are not captured are said to take a millisecond each."""

    class EqualCosts(FittedCosts):
        is_fitted = False

        def targets(self, rows: Any, *, filtered: bool) -> Any:
            return np.ones(len(rows))

        def draft(self, requests: int, width: int, *, filtered: bool) -> float:
            return 0.0

        def time(self, rows: int, requests: int, width: int, *, filtered: bool) -> float:
            return 1.0

        def observe(self, *_: Any, **__: Any) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FittedCosts", EqualCosts)
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
