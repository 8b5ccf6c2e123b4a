"""The playground's files, as a server gives them: to whom, with which headers, and that they need nothing else."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from slipstream.serve.http.launch import Server
from slipstream.serve.http.playground import FOLDER
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_server import CHAT, HELLO, MODEL, serving
from slipstream.tests.sources import ROOT

FILES = sorted(FOLDER.iterdir())


@pytest.fixture(scope="module")
def guarded(byte_target) -> Iterator[Server]:
    config = ServeConfig(target=byte_target, port=0, served_model_name=MODEL, api_key="sk-key")
    with serving(config) as running:
        yield running


@pytest.mark.parametrize("path", ["/", *(f"/playground/{file.name}" for file in FILES)])
def test_the_page_needs_no_key_and_runs_no_code_of_others(guarded, path):
    response = httpx.get(guarded.url + path, timeout=120)
    assert response.status_code == 200
    file = FOLDER / (Path(path).name or "index.html")
    assert response.content == file.read_bytes()
    kind = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}[file.suffix]
    assert response.headers["content-type"].split(";")[0] == kind
    policy = dict(part.split(maxsplit=1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[f"{name}-src"] for name in ("script", "style", "img", "connect")} == {"'self'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert httpx.head(guarded.url + path).status_code == 200


def test_the_api_behind_it_does(guarded):
    assert httpx.post(guarded.url + CHAT, json={"messages": HELLO}, timeout=120).status_code == 401
    assert httpx.get(f"{guarded.url}/v1/models", timeout=120).status_code == 401
    assert httpx.get(f"{guarded.url}/playground/other.js", timeout=120).status_code == 401
    assert httpx.post(f"{guarded.url}/", json={}, timeout=120).status_code == 401


def test_a_server_says_where_it_is(guarded):
    assert guarded.banner.splitlines()[-1] == f"playground: {guarded.url}/"


def test_nothing_comes_from_elsewhere():
    """Every file that a file names is there; no address of another host, no inline code, no markup from text."""
    names = {file.name for file in FILES}
    for file in FILES:
        text = file.read_text()
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)) <= {"http://www.w3.org/2000/svg"}, file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|localStorage", text), file
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", text), file
        linked = re.findall(r"(?:src|href)=\"([^\"#]+)", text) + re.findall(r"from \"([^\"]+)\"", text)
        assert {Path(name).name for name in linked if name != "../"} <= names, file


def test_every_file_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["slipstream.serve.http"]
    installed = {path.name for pattern in patterns for path in (ROOT / "serve" / "http").glob(pattern)}
    assert {file.name for file in FILES} <= installed
