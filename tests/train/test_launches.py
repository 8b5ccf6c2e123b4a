"""The shipped accelerate configurations on two GPUs: for every way to shard weights, the loss curve is DDP's."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.tests.sources import ROOT
from slipstream.train.trackers import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def launch(name: str, flags: list[str]):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = ["-m", "accelerate.commands.launch", f"--config_file={ROOT}/configs/accelerate/{name}.yaml"]
    command = [sys.executable, *launcher, "--num_processes=2", f"--main_process_port={port}", "train/eagle3.py", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr


def curve(folder: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in ("step", "loss", "grad_norm")} for line in read_metrics(folder)]


@pytest.fixture(scope="module")
def curves() -> dict[str, list[dict[str, Any]]]:
    """By configuration and precision, of launches that have been made."""
    return {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["zero2", "zero3", "fsdp"])
def test_losses_are_those_of_ddp(name, precision, curves, arguments, tmp_path):
    if name.startswith("zero") and not find_spec("deepspeed"):
        pytest.skip("needs deepspeed")
    for strategy in ("ddp", name):
        if f"{strategy} {precision}" not in curves:
            launch(strategy, arguments(tmp_path / strategy, optim__name="adamw", optim__lr=1e-3, precision=precision))
            curves[f"{strategy} {precision}"] = curve(tmp_path / strategy / "metrics.jsonl")
    losses = curves[f"{name} {precision}"]
    expected = curves[f"ddp {precision}"]
    assert len(expected) == 6
    tolerance = 1e-5 if precision == "fp32" else 1e-2  # bf16 weights' gradients are summed in another order
    assert losses == [pytest.approx(line, rel=tolerance) for line in expected]
