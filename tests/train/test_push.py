"""`slipstream push`: which files go to the hub, and what they say. A recorder stands for the hub's client."""

import inspect
import json
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from safetensors.torch import load_file

from slipstream.cli import main as slipstream
from slipstream.data_tools.convert import convert
from slipstream.data_tools.verb_options import ConvertConfig
from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.eagle3 import Eagle3
from slipstream.models.targets.decoder import load_config
from slipstream.train import push

ANSWER = "the user's own words"
REQUEST = httpx.Request("GET", "https://hub")


@dataclass
class Hub:
    """Records the calls of the hub's client, whose signatures it has."""

    present: list[str] | None = None  # files of the repository; None: there is none
    error: Exception | None = None
    created: list[dict[str, Any]] = field(default_factory=list)
    commits: list[dict[str, bytes]] = field(default_factory=list)

    def list_repo_files(self, repo: str) -> list[str]:
        inspect.signature(HfApi.list_repo_files).bind(self, repo)
        if self.present is None:
            raise RepositoryNotFoundError("404", response=httpx.Response(404, request=REQUEST))
        return self.present

    def create_repo(self, repo: str, **options: Any):
        inspect.signature(HfApi.create_repo).bind(self, repo, **options)
        if self.error is not None:
            raise self.error
        self.created.append({"repo": repo, **options})

    def create_commit(self, repo: str, operations: list[Any], commit_message: str) -> SimpleNamespace:
        inspect.signature(HfApi.create_commit).bind(self, repo, operations, commit_message=commit_message)
        contents = {}
        for operation in operations:
            with operation.as_file() as file:
                contents[operation.path_in_repo] = file.read()
        self.commits.append(contents)
        return SimpleNamespace(commit_url="https://hub/commit")


@pytest.fixture
def hub(monkeypatch) -> Hub:
    recorder = Hub()
    monkeypatch.setattr(push, "HfApi", lambda **_: recorder)
    monkeypatch.setattr(push, "get_token", lambda: "hf_secret")
    return recorder


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    """A run of train/eagle3.py with a sample answer and accept lengths by category and depth."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "sample": {"prompt": "p", "answer": ANSWER, "spans": []}}) + "\n")
    path = folder / "best" / "run.json"
    run = json.loads(path.read_text())
    run["metrics"] = {
        "accept_length": 2.5,
        "accept_length_at_depth_1": 1.75,
        "accept_length_at_depth_2": 2.125,
        "accept_length_by_category/math": 3.25,
        "accept_rate_0": 0.75,
        "accept_rate_1": 0.375,
    }
    path.write_text(json.dumps(run))
    return folder


def pushed(*words: object):
    slipstream(["push", *map(str, words)])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit):
        pushed(*words)
    return capsys.readouterr().err


@pytest.mark.parametrize("part", ["", "best"])
def test_a_dry_run_writes_what_would_be_uploaded(part, run_folder, tmp_path, hub, target_path):
    folder = tmp_path / "public"
    pushed(run_folder / part, "owner/name", "--dry-run", folder, "--license", "mit", "--target", "owner/target")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["README.md", "config.json", "metrics.jsonl", "model.safetensors", "run.json"]
    assert not hub.commits
    pushed(run_folder / part, "owner/name", "--license", "mit", "--target", "owner/target")
    assert hub.commits == [{name: (folder / name).read_bytes() for name in names}]
    assert hub.created == [{"repo": "owner/name", "private": None, "exist_ok": True}]
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == load_file(run_folder / "best" / "model.safetensors").keys()
    load_draft(Eagle3, folder, load_config(target_path), None, tensors["fc.weight"].device)


def test_nothing_local_is_published(run_folder, tmp_path, target_path):
    folder = tmp_path / "public"
    pushed(run_folder, "owner/name", "--dry-run", folder, "--license=mit")
    for name in ("README.md", "config.json", "metrics.jsonl", "run.json"):
        text = (folder / name).read_text()
        assert ANSWER not in text
        assert str(target_path) not in text
        assert str(tmp_path) not in text
        assert str(tmp_path.parent) not in text
    run = json.loads((folder / "run.json").read_text())
    before = json.loads((run_folder / "best" / "run.json").read_text())
    assert run["data_hash"] == before["data_hash"]
    assert run["argv"] == [Path(word).name if "/" in word else word for word in before["argv"]]
    assert "target_path" in before
    assert "target_path" not in run
    assert json.loads((folder / "config.json").read_text())["target"] == ""
    pushed(run_folder, "owner/name", "--dry-run", folder, "--license=mit", "--samples", "--overwrite")
    assert ANSWER in (folder / "metrics.jsonl").read_text()


def test_paths_are_shortened_and_names_of_the_hub_are_not(tmp_path):
    values = {
        "argv": ["/home/me/x.py", "--data.path={/a/b: 1, /c/d e: 2}", "--target=owner/model", "https://hub/x/y"],
        "with spaces": ["--data.path=~/my data/x", "--data.path={/a b/c d: 1, ../e f/g: 2}", "--run=[/a b, ./c d/e]"],
        "run": {"target_path": "/home/me/t", "converted": f"{tmp_path}/My Draft", "folders": {"~/data/x": 0.5}},
        "target": "assets/tiny",
        "steps": [1, None, 2.5],
    }
    assert push.without_paths(values, frozenset({"assets/tiny"})) == {
        "argv": ["x.py", "--data.path={b: 1, d e: 2}", "--target=owner/model", "https://hub/x/y"],
        "with spaces": ["--data.path=x", "--data.path={c d: 1, g: 2}", "--run=[a b, e]"],
        "run": {"converted": "My Draft", "folders": {"x": 0.5}},
        "target": "tiny",
        "steps": [1, None, 2.5],
    }


def test_the_card_says_what_the_draft_is(run_folder, tmp_path):
    folder = tmp_path / "public"
    pushed(run_folder, "owner/name", "--dry-run", folder, "--license", "mit", "--target", "owner/target")
    text = (folder / "README.md").read_text()
    _, header, body = text.split("---\n", 2)
    tags = ["speculative-decoding", "eagle3", "slipstream"]
    assert yaml.safe_load(header) == {"license": "mit", "base_model": "owner/target", "tags": tags}
    config = json.loads((run_folder / "best" / "config.json").read_text())
    run = json.loads((run_folder / "best" / "run.json").read_text())
    for line in (
        "    serve --draft owner/name",
        f"| target's fingerprint | `{config['target_fingerprint']}` |",
        f"| hash of the data | `{run['data_hash']}` |",
        f"| supervised tokens | {run['tokens']:,} |",
        "| 1 | 1.75 |",
        "| 2 | 2.12 |",
        "| 1 | 75.0% |",
        "| 2 | 37.5% |",
        "| math | 3.25 |",
        "    draft.ttt_steps: 3",
        "    optim.lr: 0.01",
    ):
        assert line in body.splitlines()
    assert "at temperature 0: a pass of the target yields **2.50** tokens" in body
    assert (
        "SGLang 0.5.23 does not load it: it adds to the hidden state before its norm, whatever the file says; " in body
    )
    assert "vLLM 0.33 does not load it: it hands states over in the order of the layers; has no state after the" in body


@pytest.mark.parametrize(
    ("layout", "lines"),
    [
        (
            "slipstream",
            [
                "    python -m sglang.launch_server --model-path owner/target --speculative-algorithm EAGLE3 "
                "--speculative-draft-model-path owner/name --speculative-num-steps 3 --speculative-eagle-topk 1 "
                "--speculative-num-draft-tokens 4",
                '    vllm serve owner/target --speculative-config \'{"method": "eagle3", "model": "owner/name", '
                '"num_speculative_tokens": 3}\'',
            ],
        ),
        (
            "speculators",
            ["SGLang 0.5.23 loads it after `slipstream convert --layout sglang`.", "With vLLM 0.33 (by its sources"],
        ),
    ],
)
def test_the_card_names_the_servers_that_load_the_draft(layout, lines, arguments, tmp_path):
    changes = {"draft__aux_layers": "[0, 2]", "draft__interchange": "sglang", "optim__steps": 1}
    slipstream(["train", "eagle3", *arguments(tmp_path / "run", **changes)])
    draft = tmp_path / "converted"
    convert(ConvertConfig(input=str(tmp_path / "run" / "best"), output=str(draft), layout=layout))
    folder = tmp_path / "public"
    pushed(draft, "owner/name", "--dry-run", folder, "--license=mit", "--target=owner/target")
    text = (folder / "README.md").read_text()
    for line in lines:
        assert line in text
    values = json.loads((folder / "config.json").read_text())
    assert values["target"] == "owner/target"
    if layout == "speculators":
        assert values["speculators_config"]["verifier"]["name_or_path"] == "owner/target"


def test_the_card_of_an_mtp_head_says_what_other_servers_need(run_flags, tmp_path):
    slipstream(["train", "mtp", *run_flags(tmp_path / "run", optim__steps=1)])
    folder = tmp_path / "public"
    pushed(tmp_path / "run", "owner/name", "--dry-run", folder, "--license=mit", "--target=owner/target")
    text = (folder / "README.md").read_text()
    for server in ("SGLang 0.5.23", "vLLM 0.33"):
        assert f"{server} does not load it: it reads MTP heads in the target's files alone, where" in text
    assert "A draft model (MTP) for speculative decoding" in text


def test_the_license_is_the_targets_if_its_files_say_so(run_folder, tmp_path, capsys):
    folder = tmp_path / "public"
    assert "license is empty, and the target's files do not say theirs; give one" in refused(
        capsys, run_folder, "owner/name", "--dry-run", folder
    )
    assert not folder.exists()
    path = run_folder / "best" / "run.json"
    target = tmp_path / "licensed"
    target.mkdir()
    (target / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_path": str(target)}))
    pushed(run_folder, "owner/name", "--dry-run", folder)
    assert "license: apache-2.0" in (folder / "README.md").read_text()


def test_faults_are_named(run_folder, tmp_path, hub, capsys, monkeypatch):
    def fault(*options):
        return refused(capsys, run_folder, "owner/name", "--license=mit", *options)

    hub.present = [".gitattributes", "README.md", "notes.txt"]
    message = "repo owner/name has files (README.md, notes.txt); name another, or add --overwrite"
    assert message in fault()
    assert not hub.commits
    pushed(run_folder, "owner/name", "--license=mit", "--overwrite", "--private")
    assert hub.created == [{"repo": "owner/name", "private": True, "exist_ok": True}]
    hub.present = None
    hub.error = HfHubHTTPError("403 Forbidden", response=httpx.Response(403, request=REQUEST))
    assert "the hub refuses repo owner/name (403 Forbidden); check the name, and that" in fault()
    hub.error = HTTPError("no route")
    assert "the hub cannot be reached (no route); check the network" in fault()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(push, "HfApi", partial(HfApi, endpoint="http://127.0.0.1:9"))
    assert "the hub cannot be reached (" in fault()
    monkeypatch.setattr(push, "get_token", lambda: None)
    assert "no token of the hub; log in with `hf auth login`, or set HF_TOKEN" in fault()
    assert "repo name is not a repository of the hub" in refused(capsys, run_folder, "name")
    assert "has neither best/ nor config.json" in refused(capsys, tmp_path, "owner/name")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes").touch()
    assert "foreign is not a draft for the hub" in fault("--dry-run", foreign)
    with (run_folder / "best" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert "model.safetensors is damaged or cut short" in fault("--dry-run", tmp_path / "new")
    assert len(hub.commits) == 1
