"""Fixtures that the tests share. Nothing here needs a network or an accelerator."""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when a kernel's module is imported

from slipstream.tests.random_targets import CAPPED, FAMILIES, save_random_target


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder of a random checkpoint of that family, made once per session."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp("targets") / family
        save_random_target((FAMILIES | CAPPED)[family], folder)
        return folder

    return make
