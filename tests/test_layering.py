"""Imports between packages, read from the sources, and the length of functions."""

import ast
import graphlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from slipstream.tests.sources import ROOT, nodes_of, python_files, trees

FILES = python_files()
MODULES = {".".join(file.with_suffix("").parts): file for file in FILES}
# Folder -> what of this package it may import.
ALLOWED = {
    "kernels": ("kernels",),
    "models": ("kernels", "models"),
    "train": ("config", "runtime", "kernels", "models", "train"),
    "serve": ("config", "runtime", "kernels", "models", "serve"),
    "doctor": (
        *("config", "runtime", "models", "train", "data_tools", "doctor"),
        *("serve.llm", "serve.options", "serve.request", "serve.load", "serve.contexts"),
        "serve.measure.server_counts",
    ),
    "data_tools": (
        *("config", "runtime", "models", "data_tools"),
        *("serve.chat", "serve.llm", "serve.options", "serve.request"),
        *("train.batches", "train.checkpoints", "train.continuation", "train.mixture", "train.options"),  # adapt
    ),
}
# Room of serve/ -> what of the other rooms it may import.
ROOMS = {
    "http": ("engine.counts", "engine.process"),
    "engine": ("runner", "attention", "drafters.registry", "drafters.base"),
    "runner": ("engine.plan", "engine.graph_keys", "drafters.base", "attention"),
    "drafters": ("engine.plan", "engine.host_stages", "runner.batch", "runner.kv", "runner.request_state", "attention"),
    "attention": ("runner.batch", "runner.kv", "runner.request_state"),
}
# Rooms of serve/ that nothing else of the package imports, but for programs that name them (cli.py).
APART = ("serve.fleet",)
TRACKERS = ("wandb", "tensorboard")
POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # of threads that wait
HTTP = ("starlette", "uvicorn", "httpx")
# Modules of the engine that plan without torch.
HOST_SIDE = (
    "acceptance",
    "acceptance_alarm",
    "acceptance_files",
    "budget",
    "control_charts",
    "cost_files",
    "counts",
    "graph_keys",
    "host_stages",
    "host_wait",
    "host_work",
    "idle",
    "kv_cache",
    "kv_windows",
    "plan",
    "planner",
    "probing",
    "scheduler",
    "step_costs",
    "traces",
    "yields",
)
# Modules (in one process) -> packages that none of them may load, not even through another module.
HEAVY = ("torch", "transformers", *HTTP)
NOT_LOADED = {
    (*(f"serve.engine.{module}" for module in HOST_SIDE), "serve.request", "serve.detokenize"): HEAVY,
    ("serve.fleet.options", "serve.fleet.routing", "serve.fleet.scaling"): ("ray", *HEAVY),
    ("serve.load", "serve.measure.accept", "serve.measure.compare", "doctor.cli"): ("matplotlib", *HEAVY),
}

# Who reads the weights of a module. Everyone else asks the module, which knows how it stores them.
OWNERS = {
    "models/drafts/heads/confidence.py",
    "models/drafts/heads/markov.py",
    "models/layers/delta_net.py",
    "models/layers/attention.py",
    "models/layers/linear.py",
    "models/layers/moe.py",
    "models/layers/norm.py",
    "models/targets/frozen.py",  # the modules are transformers' own
    "kernels/gemm/gathered_head.py",  # a DraftHead holds tensors, and a module makes it
}


@cache
def imports_of(file: Path) -> set[str]:
    """Every imported name, wherever it stands: "a.b" for `import a.b`; "a.b" and "a.b.c" for `from a.b import c`."""
    names = set()
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def own_imports(file: Path) -> set[str]:
    """Modules of this package that `file` imports, named from the root."""
    names = {name.removeprefix("slipstream.") for name in imports_of(file) if name.startswith("slipstream.")}
    return names & MODULES.keys()


def is_within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_downwards(folder):
    files = [file for file in FILES if file.parts[0] == folder]
    assert files
    wrong = {
        f"{file} imports {module}"
        for file in files
        for module in own_imports(file)
        if not is_within(module, ALLOWED[folder])
    }
    assert not wrong


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_serve_share_plain_data_alone(room):
    files = [file for file in FILES if file.parts[:2] == ("serve", room)]
    assert files
    rooms = tuple(f"serve.{name}" for name in ("http", "engine", "runner", "drafters", "attention"))
    allowed = (f"serve.{room}", *(f"serve.{name}" for name in ROOMS[room]))
    wrong = {
        f"{file} imports {module}"
        for file in files
        for module in own_imports(file)
        if is_within(module, rooms) and not is_within(module, allowed)
    }
    assert not wrong


def test_a_single_server_imports_nothing_of_deployments():
    wrong = {
        f"{file} imports {module}"
        for file in FILES
        if file.parts[0] != "tests" and not is_within(".".join(file.with_suffix("").parts), APART)
        for module in own_imports(file)
        if is_within(module, APART)
    }
    assert not wrong


def test_ray_is_imported_by_two_modules_alone():
    users = {str(file) for file in FILES for name in imports_of(file) if is_within(name, ("ray",))}
    assert {user for user in users if not user.startswith("tests/")} == {
        "serve/fleet/application.py",
        "serve/fleet/deploy.py",
    }


def test_no_modules_import_one_another_in_a_circle():
    graph = {name: own_imports(file) - {name} for name, file in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_everything_is_imported_by_its_full_name():
    """`import models.target` would work from the root and nowhere else, and load a second copy."""
    folders = tuple(ALLOWED)
    assert not [f"{file}: {name}" for file in FILES for name in imports_of(file) if is_within(name, folders)]


def test_only_the_drafters_folder_names_a_drafter():
    drafters = {name for name in MODULES if is_within(name, ("serve.drafters",))} - {
        "serve.drafters.base",
        "serve.drafters.options",
        "serve.drafters.registry",
    }
    assert {"serve.drafters.none", "serve.drafters.eagle3"} <= drafters
    wrong = {
        f"{file} imports {module}"
        for file in FILES
        if file.parts[0] != "tests" and file.parts[:2] != ("serve", "drafters")
        for module in own_imports(file) & drafters
    }
    assert not wrong


def test_weights_are_the_business_of_their_module():
    users = set()
    for file in FILES:
        called = {id(node.func) for node in nodes_of(file) if isinstance(node, ast.Call)}
        reads = [node for node in nodes_of(file) if isinstance(node, ast.Attribute) and node.attr == "weight"]
        if file.parts[0] in ALLOWED and any(id(node) not in called for node in reads):
            users.add(str(file))
    assert users == OWNERS


@pytest.mark.parametrize("modules", NOT_LOADED)
def test_light_modules_stay_light(modules):
    lines = [f"import slipstream.{module}" for module in modules]
    lines += ["import sys", f"loaded = [name for name in {NOT_LOADED[modules]} if name in sys.modules]"]
    lines += ["assert not loaded, loaded"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, cwd="/")


def test_an_engine_starts_without_transformers_and_torchs_compiler():
    """Each takes seconds to import. The bundled target's files say all that an engine needs of it. Not even `LLM`
    needs HTTP or trackers. OpenMP itself shows the settings that it read when torch was loaded (runtime.py)."""
    lines = ["import slipstream.runtime, sys", "from slipstream.serve.engine.build import build_engine"]
    lines += ["from slipstream.serve.options import EngineConfig"]
    lines += [f"build_engine(EngineConfig(target={str(ROOT / 'assets' / 'tiny-target')!r}))"]
    lines += ["loaded = sys.modules.keys() & {'transformers', 'torch._dynamo', 'sympy'}", "assert not loaded, loaded"]
    lines += ["import slipstream.serve.llm", f"loaded = sys.modules.keys() & {set(HTTP + TRACKERS)}"]
    lines += ["assert not loaded, loaded"]
    environment = {name: value for name, value in os.environ.items() if name not in POLICIES}
    environment["OMP_DISPLAY_ENV"] = "VERBOSE"
    command = [sys.executable, "-c", "\n".join(lines)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "GOMP_SPINCOUNT = '1000'" in ended.stderr


def test_trackers_are_imported_where_they_are_used():
    """Not at the top of any module, so that nothing needs them installed."""
    wrong = {
        f"{file} imports {name}"
        for file in FILES
        if file.parts[0] != "tests"
        for node in trees()[file].body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        if is_within(name, (*TRACKERS, "torch.utils.tensorboard"))
    }
    assert not wrong


def test_functions_are_short():
    long = []
    for file in FILES:
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                long += [f"{file}: {node.name} has {num_lines} lines"] if num_lines > 80 else []
    assert not long
