"""The policy by which OpenMP's threads wait, set before the programs load torch."""

import ast
import logging
import os
import subprocess
import sys

import pytest

from slipstream import runtime
from slipstream.tests.sources import ROOT, python_files
from slipstream.tests.tables import each_case

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
OPENMP_USERS = ("torch", "accelerate", "transformers")  # importing one imports torch


@each_case()
def test_the_policy_is_set_unless_the_user_has_set_one(variables, torch_came_first, is_in_time, monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that the end of the test restores it
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if not torch_came_first:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert runtime.set_thread_policy() == is_in_time
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == (variables or {"GOMP_SPINCOUNT": "1000"})


def test_a_worker_ends_with_a_program_that_is_killed():
    program = """if __name__ == "__main__":
    import os, time
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context
    from slipstream.runtime import end_with_parent
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(60)"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout.readline()
    parent.kill()
    parent.communicate(timeout=60)  # all that write to its pipe have ended


@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_stage_is_named_before_it_ends(is_long, monkeypatch, caplog):
    class Timer:
        def __init__(self, seconds, function, args):
            self.ring = lambda: function(*args)
            self.is_over = False
            timers.append(self)

        def start(self):
            pass

        def cancel(self):
            self.is_over = True

    timers = []
    monkeypatch.setattr(runtime.threading, "Timer", Timer)
    caplog.set_level(logging.INFO)
    with runtime.stage("loading the weights"):
        [timer] = timers
        if is_long:
            timer.ring()
    assert timer.is_over
    announcements = ["loading the weights ..."] if is_long else []
    assert caplog.messages[:-1] == announcements
    assert caplog.messages[-1].startswith("loading the weights: 0.")


def test_every_program_sets_it_before_it_imports_torch():
    late = []
    for file in python_files():
        source = (ROOT / file).read_text()
        if file.parts[0] == "tests" or '__name__ == "__main__"' not in source:
            continue
        imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
        packages = [str(name).split(".")[0] for name in names]
        first = next((name for name in packages if name in ("slipstream", *OPENMP_USERS)), None)
        late += [str(file)] if first in OPENMP_USERS else []
    assert not late


@pytest.mark.parametrize(
    ("cores", "load", "free"), [(2, 0.1, 2), (2, 0.9, 1), (2, 2.0, 1), (8, 0.6, 7), (8, 7.9, 1), (1, 1.0, 1)]
)
def test_busy_cores_are_left_to_others_and_said(cores, load, free, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "usable_cores", lambda: cores)
    monkeypatch.setattr(runtime, "cores_in_use", lambda: load)
    assert runtime.free_cores() == free
    printed = capsys.readouterr().err
    assert printed.startswith(f"the machine is busy: other programs use {load} of {cores} cores") == (load >= 0.5)
