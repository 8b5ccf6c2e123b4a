"""Options of `serve`, what it says when it can not start, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from slipstream.config import build_parser, option_names
from slipstream.serve.cli import options_class, read_config, run
from slipstream.serve.engine.process import run_engine
from slipstream.serve.http.engine_client import EngineClient
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.pipe import Pipe
from slipstream.tests.serve.fake_engine import FakeEngine, ForgetfulEngine, refuse_to_start
from slipstream.tests.serve.fake_server import read_banner, start, wait_until, write_target
from slipstream.tests.sources import ROOT
from slipstream.tests.tables import each_case

# Frozen: a new one is a decision.
OPTIONS = (
    "answer_log api_key_file attention chat_template control_tokens_as_text cors_origins date draft draft_folder "
    "drain_timeout dry_run dtype exact host ignore_unknown_fields kv_cache_dtype kv_cache_tokens learn learn.data "
    "learn.device learn.memory_gb learn.output learn.share log_format max_model_len max_running max_waiting "
    "mem_fraction objective port prefill_budget quantization reasoning_parser revision served_model_name states target "
    "tool_parser tp tp_exact trust_remote_code"
)
TREE = [
    "drafter",
    "drafter.ab",
    "drafter.adapters",
    "drafter.depth",
    "drafter.kv_cache_dtype",
    "drafter.nodes",
    "drafter.token_map",
    "drafter.topk",
]
TREE += ["drafter.window"]
NGRAM_FIRST = [f"drafter.ngram_{name}" for name in ("breadth", "capacity", "first", "nodes", "share_between_keys")]


def draft_folder(path: Path) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"drafter": "eagle3", "target": "someone/target"}))
    return str(path)


@pytest.mark.parametrize(
    ("draft", "extra"),
    [
        ("none", []),
        ("eagle3", ["drafter.aux_layers", "drafter.norm_output", *TREE]),
        ("eagle", [*TREE, "drafter.token_map_dynamic", "drafter.token_map_size"]),
        ("mtp", ["drafter.hidden", *TREE, *NGRAM_FIRST, "drafter.token_map_dynamic", "drafter.token_map_size"]),
    ],
)
def test_the_options_are_frozen(draft, extra):
    parser = build_parser(options_class(draft), prog="serve", description="")
    names = option_names(parser)
    assert " ".join(name for name in names if name not in extra) == OPTIONS
    assert set(extra) <= set(names)


@pytest.mark.parametrize("page", ["serving.md", "http_api.md"])
def test_pages_name_options_that_exist(page, tmp_path):
    names = {"config", "help", "fast"}
    for draft in ("ngram", draft_folder(tmp_path / "draft")):
        names |= set(option_names(build_parser(options_class(draft), prog="serve", description="")))
    elsewhere = r"\]\([^)]*\)|slipstream (kernels|exact-check) .*"  # links, options of other programs
    text = re.sub(elsewhere, "]", (ROOT / "docs" / page).read_text())
    options = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z._-]*[a-z])", text)}
    assert len(options) > 2
    assert {name.removeprefix("no_") for name in options} <= names


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the error for bad options."""
    with pytest.raises(SystemExit) as ended:
        read_config(argv)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("serve: error: ")
    assert "Traceback" not in error
    return error


def test_the_draft_decides_which_options_there_are(tmp_path):
    draft = draft_folder(tmp_path / "draft")
    config = read_config(["--draft", draft, "--drafter.depth", "5", "--max-model-len", "64", "--trust-remote-code"])
    assert (config.draft, config.drafter["depth"], config.target) == (draft, 5, "")
    assert (config.max_model_len, config.trust_remote_code) == (64, True)


def test_exact_and_fast(tmp_path):
    draft = draft_folder(tmp_path / "draft")
    for argv, exact in (([], None), (["--exact"], True), (["--fast"], False), (["--no-exact", "--port", "1"], False)):
        assert read_config(["--draft", draft, *argv]).exact is exact


def test_flags_win_over_files_and_later_files_over_earlier(tmp_path):
    draft = draft_folder(tmp_path / "draft")
    first = tmp_path / "a.yaml"
    second = tmp_path / "b.yaml"
    first.write_text(f"draft: {draft}\ndrafter:\n  depth: 7\nport: 1234\nmax_running: 3\n")
    second.write_text("port: 2\n")
    config = read_config(["--config", str(first), "--no-tp-exact", f"--config={second}"])
    assert (config.drafter["depth"], config.port, config.max_running, config.tp_exact) == (7, 2, 3, False)
    for argv in (["--port=4321", "--config", str(first)], [f"--config={first}", "--port", "4321"]):
        assert read_config(argv).port == 4321
    second.write_text("draft: none\nmax_running: 3\n")
    config = read_config(["--draft", draft, "--config", str(second)])
    assert (config.draft, config.max_running, config.drafter["depth"]) == (draft, 3, 3)


@each_case()
def test_bad_files_end_with_a_sentence(tmp_path, text, words, capsys):
    (tmp_path / "serve.yaml").write_text(text)
    error = refusal(["--config", str(tmp_path / "serve.yaml")], capsys)
    assert all(word in error for word in words), error


def test_help_and_wrong_options_of_drafts_load_no_torch(tmp_path):
    """Drafters without files, and a checkpoint. Options are spelled as the documentation does."""
    (tmp_path / "config.json").write_text('{"architectures": ["DFlash2DraftModel"]}')
    script = f"""
import sys
from slipstream.serve.cli import main, read_config
try:
    main(["--help"])
except SystemExit as ended:
    assert ended.code == 0
wrong = {{"ngram": "--drafter.nodes=x", "eagle3": "--drafter.depth=0", {str(tmp_path)!r}: "--drafter.block=1"}}
for draft, option in wrong.items():
    for word, status in (("--help", 0), (option, 2), ("--drafter.optoin=1", 2)):
        try:
            read_config(["--draft", draft, word])
        except SystemExit as ended:
            assert ended.code == status, (draft, word)
loaded = {{"torch", "transformers", "huggingface_hub", "fastapi", "uvicorn"}}.intersection(sys.modules)
assert not loaded, loaded
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for option in (
        *("-h, --help", "--max-model-len MAX_MODEL_LEN", "--tp-exact/--no-tp-exact", "/--no-exact/--fast"),
        *("{text,json}", "serve --draft DRAFT --help"),
        *("--drafter.capacity CAPACITY", "--drafter.depth DEPTH", "--drafter.block BLOCK"),
    ):
        assert option in ended.stdout
    assert not re.search(r"--\w*_", ended.stdout)
    assert ended.stdout.count("--drafter.ngram-first NGRAM_FIRST") == 1, "of a network alone"
    for words in ("drafter.nodes is 'x'; give a whole number", "drafter.depth is 0", "drafter.block is 1", "optoin"):
        assert words in ended.stderr


def test_print_config(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        read_config(["--draft", draft_folder(tmp_path / "draft"), "--print-config"])
    assert ended.value.code == 0
    assert "depth: 3" in capsys.readouterr().out


@each_case()
def test_bad_options_end_with_a_sentence(argv, words, capsys):
    error = refusal(argv, capsys)
    assert all(word in error for word in words), error


def test_what_a_failed_start_says(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for host, words, remedy in (
            ("127.0.0.1", f"port {port}", "--port"),
            ("8.8.8.8", "this machine has no such address", "--host"),
            ("no-such-host.invalid", "host 'no-such-host.invalid'", "--host"),
        ):
            assert run(ServeConfig(target="owner/x", host=host, port=port), EngineClient(FakeEngine)) == 1
            [line] = capsys.readouterr().err.splitlines()
            assert words in line
            assert line.endswith(f"choose another {remedy}")
    assert run(ServeConfig(draft="ngram", port=0), EngineClient(FakeEngine)) == 1
    assert capsys.readouterr().err.endswith("draft 'ngram' is not a checkpoint that names one; add --target\n")
    target = str(write_target(tmp_path))
    assert run(ServeConfig(target=target, port=0), EngineClient(refuse_to_start)) == 1
    assert capsys.readouterr().err == f"serve: error: checkpoint {target} is cut short; fetch it again\n"


def test_missing_inputs_and_bad_keys_are_named_before_the_target_is_read(tmp_path, capfd):
    target = str(write_target(tmp_path))
    empty = tmp_path / "keys"
    empty.touch()
    for name in ("chat_template", "api_key_file", "kv_cache_dtype", "target"):
        options = {"target": target, name: f"{'fp8:' * (name == 'kv_cache_dtype')}/no/{name}"}
        assert run(ServeConfig(**options), EngineClient(FakeEngine)) == 1
        assert capfd.readouterr().err.startswith(f"serve: error: {name} /no/{name} does not exist; name ")
    engine = EngineClient(FakeEngine)
    engine.spawn()  # as `serve` does before it reads its options
    assert run(ServeConfig(target=target, port=0, api_key_file=str(empty)), engine) == 1
    engine.kill()
    assert capfd.readouterr().err == f"serve: error: api_key_file {empty} holds no key; write one on each line\n"


@pytest.mark.slow  # the real engine's process
def test_a_target_that_does_not_exist(capfd):
    assert run(ServeConfig(target="/no/such/target", port=0), EngineClient()) == 1
    error = capfd.readouterr().err
    assert error.startswith("serve: error: ")
    assert "/no/such/target" in error
    assert len(error.splitlines()) == 1


def ended_by(server: subprocess.Popen[str], end: signal.Signals) -> str:
    """Both processes, by a signal to every process, as Ctrl-C and service managers send it. Returns what they said."""
    children = psutil.Process(server.pid).children()
    os.killpg(server.pid, end)
    _, error = server.communicate(timeout=120)
    assert server.returncode == (0 if end == signal.SIGINT else -end)
    assert "Traceback" not in error
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    return error


def test_a_signal_ends_both_processes(byte_target):
    with start(byte_target) as server, ThreadPoolExecutor() as pool:
        first, second, url = read_banner(server)
        assert Path(byte_target).name in first
        assert second.startswith(f"curl {url}/v1/chat/completions ")
        assert httpx.get(f"{url}/health", timeout=120).status_code == 200
        body = {"prompt": "x", "max_tokens": 250, "stream": True, "cache_salt": "slow"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            ending = pool.submit(ended_by, server, signal.SIGINT)
            rest = "".join(lines)
        assert "shutting down" in rest
        ending.result()


def test_what_cannot_be_saved_at_the_end_is_one_sentence(caplog):
    server, engine = socket.socketpair()
    for message in (EngineConfig(target="x"), [None]):
        Pipe(server).send(message)
    run_engine(ForgetfulEngine, engine)
    [line] = [record.getMessage() for record in caplog.records if "saved" in record.getMessage()]
    assert line.endswith("could not be saved: [Errno 28] No space left on device: 'learned.trie'")


@pytest.mark.slow  # tests/serve/test_process.py stops a loading engine within this process
def test_ctrl_c_while_the_engine_loads(byte_target):
    with start(byte_target, "never_start") as server:
        # Not just any child: multiprocessing's resource tracker starts before it.
        children = psutil.Process(server.pid).children
        wait_until(lambda: any("spawn_main" in " ".join(x.cmdline()) for x in children()), "the engine's process runs")
        time.sleep(0.5)
        ended_by(server, signal.SIGINT)


@pytest.mark.slow  # the real engine's process
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_first_process_of_a_container(end, byte_target):
    """While it reads its options and loads. The system drops signals for which such a process has no handler."""
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    try:
        subprocess.run([*container, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no namespace of processes can be made here")
    container += [sys.executable, "-m", "slipstream.serve.cli", "--target", byte_target, "--port", "0"]
    with subprocess.Popen(container, stderr=subprocess.PIPE, text=True) as outside:
        children = psutil.Process(outside.pid).children
        wait_until(lambda: any(child.children() for child in children()), "it has started the engine's process")
        [server] = children()
        server.send_signal(end)
        _, error = outside.communicate(timeout=120)
        assert (outside.returncode, error) == ({signal.SIGINT: 0, signal.SIGTERM: 128 + end}[end], "")
