"""The wheel in an environment of its own, outside the checkout: as `pip install slipstream-...whl` gives it to a user.

Slow: it installs torch and all else. SLIPSTREAM_WHEEL_TORCH names another release for it, as in ==2.14.*; the default
is that of constraints.txt.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.test_deploy import image_command, unit_command
from slipstream.tests.test_packaging import PROJECT

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
INSIDE = """
import importlib.metadata, json, pathlib, torch
import slipstream
from slipstream.serve.drafters.ngram import ngram_core
from slipstream.serve.engine.calibration import BUNDLED
print(json.dumps({
    "package": slipstream.__file__, "core": ngram_core.__file__, "calibration": BUNDLED.is_file(),
    "torch": torch.__version__, "extras": importlib.metadata.metadata("slipstream").get_all("Provides-Extra"),
}))
"""


class Environment:
    """A virtual environment and a working folder; without PYTHONPATH, the checkout is not in sight."""

    def __init__(self, folder: Path):
        self.bin = folder / "env" / "bin"
        self.work = folder / "elsewhere"
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(self, *argv: str | Path) -> str:
        command = [self.bin / str(argv[0]), *argv[1:]]
        done = subprocess.run(command, cwd=self.work, env=self.variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def start(self, *argv: str | Path) -> subprocess.Popen[str]:
        command = [self.bin / str(argv[0]), *argv[1:]]
        return subprocess.Popen(command, cwd=self.work, env=self.variables, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Environment:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True, cwd=folder)
    [wheel] = folder.glob("slipstream-*.whl")
    venv = Environment(folder)
    release = os.environ.get("SLIPSTREAM_WHEEL_TORCH")
    pins = [f"torch{release}"] if release else ["-c", str(ROOT / "constraints.txt")]
    venv.run("python", "-m", "pip", "install", "--quiet", wheel, *pins)
    return venv


@pytest.mark.slow
def test_what_is_installed(environment):
    report = json.loads(environment.run("python", "-c", INSIDE))
    for place in ("package", "core"):
        assert Path(report[place]).is_relative_to(environment.bin.parent), "not the checkout's"
    assert report["calibration"]
    assert {"cuda", "wandb"} <= set(report["extras"])
    environment.run("python", "-m", "pip", "check")
    for script in PROJECT["project"]["scripts"]:
        assert environment.run(script, "--help").startswith("usage:")


@pytest.mark.slow
@pytest.mark.parametrize("started_by", ["hand", "systemd", "container"])
def test_the_installed_server_answers_and_drains(environment, started_by):
    """Also as the unit and the image of deploy/ start it, with the same options, key and format of the log."""
    flags = ["--target", str(TINY), "--draft", "ngram", "--port", "0"]
    commands = {"hand": ["serve", "--log-format", "json"], "systemd": unit_command(), "container": image_command()}
    (environment.work / "serve.yaml").write_text("max_running: 4\n")
    (environment.work / "keys").write_text("secret\n")
    command = [word.replace("${CREDENTIALS_DIRECTORY}", str(environment.work)) for word in commands[started_by]]
    server = environment.start(Path(command[0]).name, *command[1:], *flags)
    assert server.stderr is not None
    try:
        lines = map(json.loads, server.stderr)
        url = next(line["url"] for line in lines if line["message"] == "serving").replace("0.0.0.0", "127.0.0.1")
        body = {"prompt": "Tom has 3 boxes.", "max_tokens": 8, "temperature": 0}
        first, again = (post(f"{url}/v1/completions", body) for _ in range(2))
        assert first["usage"]["completion_tokens"] > 0
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        record = next(line for line in lines if line["message"] == "request")
        assert (record["path"], record["status"], record["finish_reasons"]) == ("/v1/completions", 200, ["length"])
        assert record["completion_tokens"] == first["usage"]["completion_tokens"]
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
        assert server.returncode == -signal.SIGTERM
    finally:
        server.kill()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), HEADERS)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
