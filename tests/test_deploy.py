"""The systemd unit and the image of deploy/ start the server with options that it has."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from slipstream.serve.cli import read_config
from slipstream.tests.sources import ROOT
from slipstream.tests.test_packaging import PROJECT

UNIT = (ROOT / "deploy" / "slipstream.service").read_text()
IMAGE = (ROOT / "deploy" / "Dockerfile").read_text()


def unit_command() -> list[str]:
    """The command that systemd executes."""
    return shlex.split(next(line for line in UNIT.splitlines() if line.startswith("ExecStart="))[len("ExecStart=") :])


def image_command() -> list[str]:
    """The container's entry point."""
    line = next(line for line in IMAGE.splitlines() if line.startswith("ENTRYPOINT"))
    command: list[str] = json.loads(line.removeprefix("ENTRYPOINT"))
    return command


@pytest.mark.parametrize("command", [unit_command(), image_command()], ids=["unit", "image"])
def test_commands_have_options_that_exist(command: list[str], tmp_path: Path) -> None:
    assert Path(command[0]).name in PROJECT["project"]["scripts"]
    (tmp_path / "serve.yaml").write_text("target: x\n")
    options = [word.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)) for word in command[1:]]
    assert read_config(options).log_format == "json"


def test_the_unit_hands_over_every_file_that_it_names() -> None:
    """The server's user cannot read /etc/slipstream, which is root's alone."""
    names = {word.removeprefix("${CREDENTIALS_DIRECTORY}/") for word in unit_command() if "/" in word} - {
        unit_command()[0]
    }
    handed = dict(re.findall(r"^LoadCredential=([^:]+):/etc/slipstream/(.+)$", UNIT, re.MULTILINE))
    assert names == {*handed}
    assert all(name == file for name, file in handed.items())


def test_the_unit_waits_longer_than_the_server_drains() -> None:
    wait = re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert wait is not None
    assert int(wait[1]) >= read_config([]).drain_timeout + 15


def test_the_image_installs_the_same_torch_as_the_package() -> None:
    [torch] = [requirement for requirement in PROJECT["project"]["dependencies"] if requirement.startswith("torch>")]
    assert f'"{torch}"' in IMAGE


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    (tmp_path / "slipstream.service").write_text(UNIT.replace(unit_command()[0], shutil.which("true") or ""))
    command = ["systemd-analyze", "verify", tmp_path / "slipstream.service"]
    verified = subprocess.run(command, capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
