"""Files that only the server's process reads: a fault in one ends it at once, however long the engine takes to load."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest

from slipstream.serve import cli
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.engine_plan import read_plan
from slipstream.serve.http.engine_client import EngineClient
from slipstream.serve.http.launch import check_files, prepare
from slipstream.serve.listener import bind
from slipstream.serve.options import EngineConfig, LearnOptions, ServeConfig
from slipstream.tests.random_targets import change_json
from slipstream.tests.serve.fake_server import serving
from slipstream.tests.sources import TINY
from slipstream.tests.user_errors import user_error

Spoil = Callable[[Path], dict[str, Any]]  # changes a target's folder; returns options


def endless(_: EngineConfig) -> Engine:
    """Stands for an engine whose weights are read for long."""
    while True:
        time.sleep(60)


def written(name: str, text: str, **options: str) -> Spoil:
    """`options`: the file, by the name of its option."""

    def spoil(folder):
        (folder / name).write_text(text)
        return {option: str(folder / file) for option, file in options.items()}

    return spoil


def without_tokenizer(folder: Path) -> dict[str, Any]:
    (folder / "tokenizer.json").unlink()
    return {}


def template_in_settings(folder: Path) -> dict[str, Any]:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change_json(folder / "tokenizer_config.json", chat_template="{{ messages")
    return {}


FAULTS: dict[str, tuple[Spoil, str]] = {
    "tokenizer": (without_tokenizer, r"has no tokenizer: tokenizer.json is missing; copy"),
    "broken tokenizer": (written("tokenizer.json", "{}"), r"the tokenizer in .* cannot be read .*; download it again"),
    "template": (
        written("chat_template.jinja", "{% for"),
        r"target has .*chat_template.jinja, which cannot be used: .* not valid Jinja: .*; mend it, or name",
    ),
    "template in settings": (template_in_settings, r"target has .*tokenizer_config.json, which cannot be used: "),
    "template with an error": (
        written("chat_template.jinja", "{{ messages[0].content + 1 }}"),
        r"target has .*chat_template.jinja, which cannot be used: .*; mend it, or name",
    ),
    "template of the options": (
        written("own", "{% for", chat_template="own"),
        r"chat_template is .*own', which cannot be used: .* not valid Jinja: .*; name a file",
    ),
    "defaults": (
        written("generation_config.json", json.dumps({"temperature": "hot"})),
        r"generation_config.json has defaults that no request may have: temperature is 'hot'.*; correct or remove",
    ),
    "defaults that are no JSON": (
        written("generation_config.json", "{"),
        r"generation_config.json is not valid JSON",
    ),
    "parser": (lambda _: {"tool_parser": "hermees"}, r"tool_parser is 'hermees'; .*hermes"),
    "keys": (written("keys", "\n", api_key_file="keys"), r"api_key_file .*keys holds no key; write one on each line"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_server_before_its_engine_is_ready(name, tmp_path, capsys):
    spoil, message = FAULTS[name]
    folder = tmp_path / "target"
    shutil.copytree(TINY, folder)
    options = {"target": str(folder), "port": 0, **spoil(folder)}

    async def start():
        config = ServeConfig(**options)
        async with asyncio.timeout(60), prepare(config, bind(config.host, config.port), EngineClient(endless)):
            pytest.fail("the engine is never ready")

    with user_error(message):
        asyncio.run(start())
    arguments = [f"--{key}={value}" for key, value in options.items()]
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--dry-run"])
    assert ended.value.code in (1, 2)
    assert " ".join(capsys.readouterr().err.split()).count("serve: error: ") == 1


def test_a_port_has_one_server_though_connections_of_the_last_linger(byte_target):
    with bind("127.0.0.1", 0) as listener, user_error(r"Address already in use.*another --port"):
        bind(*listener.getsockname())
    with serving(ServeConfig(target=byte_target, port=0)) as server:
        place = server.listener.getsockname()
        assert httpx.get(f"{server.url}/health", headers={"Connection": "close"}, timeout=120).status_code == 200
    with bind(*place), user_error(r"Address already in use.*another --port"):
        bind(*place)


def test_what_the_target_cannot_do_is_refused_before_its_weights_come(tmp_path, monkeypatch):
    downloads = []

    def fetch(*_, allow_patterns, **__):
        downloads.extend(allow_patterns)
        shutil.copytree(TINY, tmp_path / "c0ffee", dirs_exist_ok=True)
        return str(tmp_path / "c0ffee")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with user_error("^tp is 3, but config.json: num_attention_heads is 4, and 3 ranks do not divide it"):
        read_plan(EngineConfig(target="owner/model", device="cpu", tp=3))
    assert not [pattern for pattern in downloads if pattern.endswith(".safetensors")]
    assert read_plan(EngineConfig(target="owner/model", device="cpu")).path == tmp_path / "c0ffee"
    assert [pattern for pattern in downloads if pattern.endswith(".safetensors")]


def test_texts_of_another_tokenizer_are_not_learnt_from(tmp_path):
    for name in ("report.json", "dataset_dict.json"):
        (tmp_path / name).write_text('{"tokenizer_hash": "0"}')
    with user_error("^learn.data .* was prepared with another tokenizer"):
        check_files(ServeConfig(target=str(TINY), learn=LearnOptions(device="cpu", data=str(tmp_path))))


def test_the_bundled_targets_have_no_fault():
    for folder in sorted(TINY.parent.glob("tiny-*-target")) + [TINY]:
        check_files(ServeConfig(target=str(folder)))
