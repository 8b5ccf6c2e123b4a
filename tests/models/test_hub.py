"""Where names of checkpoints lead, what is fetched of a hub id, and which files hold the weights."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from slipstream.models import checkpoint
from slipstream.models.checkpoint import read_tensors, resolve, weights_fingerprint


@pytest.mark.parametrize("name", ["/no/such/folder", "./draft", "bare", "too/many/parts"])
def test_missing_folders_are_not_sought_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=f"checkpoint {name} does not exist; name a folder or a hub id"):
        resolve(name)


SMALL = {"config.json", "tokenizer.model", "chat_template.jinja"}
CLUTTER = {"consolidated.safetensors", "pytorch_model.bin", "modeling.py", "original/model.safetensors"}
SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
INDEX = "model.safetensors.index.json"
# What a repository holds beside SMALL and CLUTTER -> the weights that are read.
REPOSITORIES: dict[str, tuple[set[str], set[str]]] = {
    "index": ({INDEX, *SHARDS, "model-old.safetensors"}, SHARDS),
    "one file": ({"model.safetensors", "model.fp16.safetensors"}, {"model.safetensors"}),
    "shards without an index": (SHARDS, SHARDS),
    "another name": (set(), {"consolidated.safetensors"}),
}


def fill(folder: Path, files: Iterable[str]) -> None:
    """Each safetensors file holds one tensor, named after it."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name == INDEX:
            (folder / name).write_text(json.dumps({"weight_map": {name: name for name in sorted(SHARDS)}}))
        elif name.endswith(".safetensors"):
            save_file({name: torch.ones(1)}, folder / name)
        else:
            (folder / name).write_text("")


@pytest.mark.parametrize("trust_remote_code", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", REPOSITORIES)
def test_the_hub_is_asked_for_what_is_read_and_no_more(
    kind: str, weights: bool, trust_remote_code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a hub that is a folder; the second step takes the commit that the first one found."""
    files, expected = REPOSITORIES[kind]
    files, commit, asked = SMALL | CLUTTER | files, tmp_path / "c0ffee", []
    fill(tmp_path / "hub", files)

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: Any = None) -> str:
        asked.append((name, revision))
        for file in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (commit / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "hub" / file, commit / file)
        return str(commit)

    monkeypatch.setattr(checkpoint, "snapshot_download", fetch)
    assert resolve("owner/model", "v1", weights=weights, trust_remote_code=trust_remote_code) == commit
    assert asked[0] == ("owner/model", "v1")
    assert set(asked[1:]) <= {("owner/model", "c0ffee")}
    found = {path.relative_to(commit).as_posix() for path in commit.rglob("*") if path.is_file()}
    python, small = {"modeling.py"} if trust_remote_code else set(), SMALL | (files & {INDEX})
    assert found == small | python | (expected if weights else set())
    if weights:
        assert read_tensors(commit).keys() == expected


@pytest.mark.parametrize("kind", list(REPOSITORIES)[:-1])
def test_other_files_beside_the_weights_are_not_read(kind: str, tmp_path: Path) -> None:
    files, expected = REPOSITORIES[kind]
    fill(tmp_path, files)
    fingerprint = weights_fingerprint(tmp_path)
    fill(tmp_path, CLUTTER)
    assert read_tensors(tmp_path).keys() == expected
    assert weights_fingerprint(tmp_path) == fingerprint


@pytest.mark.parametrize(
    ("files", "index", "message"),
    [
        ({INDEX, min(SHARDS)}, None, f"{max(SHARDS)} is missing, but {INDEX} names it; download"),
        ({min(SHARDS)}, None, "holds 1 of the 2 shards"),
        ({"a.safetensors", "b.safetensors"}, None, "holds a.safetensors, b.safetensors and no .*name the one"),
        (SHARDS, "{", "index.json is damaged"),
        (SHARDS, '{"weight_map": {}}', "weight_map must name files"),
        (SHARDS, '{"weight_map": {"a": "../secret"}}', "weight_map must name files in the same folder"),
    ],
)
def test_incomplete_and_ambiguous_weights_are_refused(
    files: set[str], index: str | None, message: str, tmp_path: Path
) -> None:
    fill(tmp_path, files)
    if index is not None:
        (tmp_path / INDEX).write_text(index)
    for read in (read_tensors, weights_fingerprint):
        with pytest.raises(ValueError, match=message):
            read(tmp_path)


OFFLINE = LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder ... set 'HF_HUB_OFFLINE=0'")
OFFLINE.__cause__ = OSError("[Errno -2] Name or service not known")
NOT_FOUND = RepositoryNotFoundError(
    "404 Client Error\nmore", response=httpx.Response(404, request=httpx.Request("GET", "x:"))
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OFFLINE, r"the hub could not be reached \(\[Errno -2\] Name .* known\); check .* path of a folder"),
        (ConnectionError("no route"), r"the hub could not be reached \(no route\)"),
        (NOT_FOUND, r"the hub does not give it out \(404 Client Error\); check the name and the revision"),
        (OSError("No space left"), r"could not be downloaded \(No space left\)$"),
    ],
)
def test_the_hubs_errors_are_sentences(error: OSError, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(checkpoint, "snapshot_download", fail)
    with pytest.raises(ValueError, match=message):
        resolve("owner/model")
