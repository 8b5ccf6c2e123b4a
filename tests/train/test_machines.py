"""Runs over two machines, which are network namespaces of this one: they share files, and have a link of 10.77.0.x.

Where namespaces cannot be made, both launchers meet on this machine's own address.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.tests.sources import ROOT
from slipstream.tests.train.runs import (
    assert_like_run,
    assert_same_run,
    end_program,
    records,
    start_program,
    weights,
)

pytestmark = pytest.mark.slow
PROGRAM = ROOT / "train" / "eagle3.py"
Machines = list[list[str]]  # what begins a command on each


def call(*words: str):
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    names = [f"slipstream-{os.getpid()}-{number}" for number in (1, 2)]
    links = [f"sl{os.getpid() % 10**6}n{number}" for number in (1, 2)]
    try:
        for name in names:
            call("ip", "netns", "add", name)
        call("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            call("ip", "link", "set", link, "netns", name)
            call("ip", "-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            call("ip", "-n", name, "link", "set", link, "up")
            call("ip", "-n", name, "link", "set", "lo", "up")
        variables = [["env", f"GLOO_SOCKET_IFNAME={link}", "HEAD=10.77.0.1"] for link in links]
        yield [["ip", "netns", "exec", name, *words] for name, words in zip(names, variables, strict=True)]
    except (subprocess.CalledProcessError, FileNotFoundError):
        yield [["env", "HEAD=127.0.0.1"]] * 2
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def launch(machines: Machines, port: int, flags: list[str], num_processes: int = 1) -> list[subprocess.Popen[str]]:
    """A launcher on each machine, with as many processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    programs = []
    for rank, prefix in enumerate(machines):
        head = prefix[-1].removeprefix("HEAD=")
        meeting = [f"--nnodes={len(machines)}", f"--node_rank={rank}", f"--master_addr={head}", f"--master_port={port}"]
        launcher = ["-m", "torch.distributed.run", *meeting, f"--nproc_per_node={num_processes}"]
        command = [*prefix, sys.executable, *launcher, str(PROGRAM), *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        programs.append(subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes))
    return programs


def wait_for(path: Path, programs: list[subprocess.Popen[str]]):
    while not path.exists():
        assert all(program.poll() is None for program in programs), [program.communicate()[0] for program in programs]
        time.sleep(0.02)


def test_a_run_over_two_machines_is_that_of_two_processes(machines, arguments, tmp_path):
    """An epoch of 31 rows, which do not divide."""
    epoch = {"optim__steps": "null", "optim__epochs": 1}
    for program in launch(machines, 29611, arguments(tmp_path / "machines", **epoch)):
        end_program(program)
    end_program(start_program(PROGRAM, *arguments(tmp_path / "processes", **epoch), num_processes=2))
    assert_same_run(tmp_path / "machines", tmp_path / "processes", last_step=8)


def test_a_machine_that_is_to_stop_ends_the_run_saved_and_one_process_goes_on(machines, arguments, tmp_path):
    flags = arguments(tmp_path / "run", optim__steps=30, data__batch_size=2, checkpoint__every=5)
    programs = launch(machines, 29612, flags)
    wait_for(tmp_path / "run" / "step-5", programs)
    os.killpg(programs[1].pid, signal.SIGTERM)
    printed = [program.communicate(timeout=120)[0] for program in programs]
    assert "is saved, the same command continues" in printed[0], printed[0]
    last = records(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / f"step-{last:.0f}").exists()
    flags = arguments(tmp_path / "run", optim__steps=30, data__batch_size=4, checkpoint__every=5)
    end_program(start_program(PROGRAM, *flags))
    end_program(start_program(PROGRAM, *arguments(tmp_path / "one", optim__steps=30, data__batch_size=4)))
    assert_like_run(tmp_path / "run", tmp_path / "one", last_step=30)


def test_a_machine_that_is_lost_costs_the_steps_since_the_last_checkpoint(machines, arguments, tmp_path):
    flags = arguments(tmp_path / "run", optim__steps=40, checkpoint__every=4)
    programs = launch(machines, 29613, flags)
    wait_for(tmp_path / "run" / "step-4", programs)
    os.killpg(programs[1].pid, signal.SIGKILL)
    for pid in subprocess.run(["pgrep", "-s", str(programs[1].pid)], capture_output=True, text=True).stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    programs[0].communicate(timeout=200)
    assert programs[0].returncode != 0
    for program in launch(machines, 29614, flags):
        end_program(program)
    end_program(start_program(PROGRAM, *arguments(tmp_path / "whole", optim__steps=40), num_processes=2))
    expected = weights(tmp_path / "whole", 40)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "run", 40).items())
