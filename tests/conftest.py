"""Fixtures that the tests share. Nothing here needs a network or an accelerator."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.tests.random_targets import FAMILIES, save_random_target


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder of a random checkpoint of that family, made once per session."""
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("targets") / family
            save_random_target(FAMILIES[family], folders[family])
        return folders[family]

    return make
