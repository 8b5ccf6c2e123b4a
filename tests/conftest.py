"""Fixtures that the tests share. Nothing here needs a network or an accelerator."""

import slipstream.runtime  # before torch, for which it sets the thread policy

import atexit
import gc
import logging
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from docstring_parser.attrdoc import AttributeDocstrings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when a kernel's module is imported

from slipstream.tests import interpreter

if TYPE_CHECKING:
    from slipstream.tests.mtp_targets import MakeMTP
    from slipstream.tests.random_targets import MakeTarget

if not torch.cuda.is_available():
    interpreter.prepare()


atexit.register(gc.unfreeze)  # so that libraries' objects are let go; pytest searches ten times before


def pytest_collection():
    gc.freeze()
    gc.disable()


def pytest_collection_finish():
    """Freezes imports and collected tests: no search for garbage, half a second each, need look at them. Searches are
    rare, since what tests import is looked at each time."""
    gc.freeze()
    gc.set_threshold(50_000)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(scope="session")
def make_target(tmp_path_factory) -> "MakeTarget":
    """family -> folder of a random checkpoint of that family, made once per session."""
    from slipstream.tests.random_targets import CAPPED, FAMILIES, RELATIVES, WIDE, save_random_target  # takes seconds

    @cache
    def make(family):
        folder = tmp_path_factory.mktemp("targets") / family
        save_random_target((FAMILIES | CAPPED | RELATIVES | WIDE)[family], folder)
        return folder

    return make


@pytest.fixture(scope="session")
def make_mtp(tmp_path_factory) -> "MakeMTP":
    """kind of KINDS, number of modules -> a random target with MTP heads, made once per session."""
    from slipstream.tests.mtp_targets import MtpModel, save_mtp_target  # takes a second, and not all tests need it

    if not hasattr(MtpModel, "forward_layer"):
        pytest.skip("this transformers is too old to run a single layer of MTP heads")

    @cache
    def make(kind, count=1):
        return save_mtp_target(kind, tmp_path_factory.mktemp("mtp") / kind, count=count)

    return make


@pytest.fixture
def exits(capsys) -> Callable[..., AbstractContextManager[None]]:
    """words, status -> a context that a program ends, with these words in its error and this status, any but 0 if none
    is given."""

    @contextmanager
    def expect(words, code=None):
        with pytest.raises(SystemExit) as ended:
            yield
        assert ended.value.code == code if code else ended.value.code
        assert words in capsys.readouterr().err

    return expect


@pytest.fixture(autouse=True)
def every_message_counts():
    """Commands that an earlier test ran in this process set the level of the package's messages."""
    logging.getLogger("slipstream").setLevel(logging.NOTSET)


@pytest.fixture(scope="session", autouse=True)
def equal_machines() -> Iterator[None]:
    """No test depends on how fast or how busy this machine is: steps that are not captured are said to take a
    millisecond each, runs of training do not watch for a third of a second what other programs do, and nobody waits for
    the disk, since tests kill processes and never the machine."""
    from slipstream.serve.engine import build  # takes a second, and not all tests need it
    from slipstream.serve.engine.step_costs import FittedCosts

    class EqualCosts(FittedCosts):
        is_fitted = False

        def targets(self, rows, *, filtered):
            return np.ones(len(rows))

        def draft(self, requests, width, *, filtered):
            return 0.0

        def time(self, rows, requests, width, *, filtered):
            return 1.0

        def observe(self, *_, **__):
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FittedCosts", EqualCosts)
        patch.setattr(slipstream.runtime, "cores_in_use", lambda: 0.0)
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def slow_files_read_once() -> Iterator[None]:
    """Reading descriptions of options, which stand in the sources, takes half of the time to make a parser; reading
    certificates, of which no test needs any, most of the time to make an HTTP client."""
    read = AttributeDocstrings.get_attr_docs

    @cache
    def descriptions(component):
        return read(AttributeDocstrings(), component)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttributeDocstrings, "get_attr_docs", lambda _, component: descriptions(component))
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def libraries_loaded_once() -> Iterator[None]:
    """Servers' processes, which run engines and try grammars, are forked from one that has loaded the libraries for all
    of them. Not where there is a GPU: libraries begin to use it while they load, which no fork survives."""
    if torch.cuda.is_available():
        yield
        return
    from slipstream.serve.grammar import trial  # not all tests need these
    from slipstream.serve.http import engine_client
    from slipstream.tests.serve import forked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "subprocess", forked.ForkedTrials)
        patch.setattr(engine_client, "multiprocessing", forked)
        yield
