"""Checkpoints: resolved names, files fetched from the hub, files that hold the weights, and damaged files."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.models.drafts.source import drafter_of, source_of
from slipstream.models.files import checkpoint
from slipstream.models.files.checkpoint import (
    read_json,
    read_tensors,
    resolve,
    tensor_names,
    tokenizer_hash,
    weights_fingerprint,
)
from slipstream.tests.pairwise import grouped
from slipstream.tests.user_errors import user_error


def test_a_name_with_a_slash_or_a_folder_is_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = ("runs", "owner/model", "./missing", "none")
    assert [source_of(name).has_network for name in names] == [True, True, True, False]


def test_json_faults_name_the_file(tmp_path):
    with user_error(r"config\.json is missing; is .* a complete checkpoint"):
        read_json(tmp_path / "config.json")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").write_text("{}")
    with user_error(rf"config\.json is missing; name {tmp_path}/best$"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"hidden_size": 3')
    with user_error(r"config\.json is not valid JSON"):
        read_json(tmp_path / "config.json")


def test_a_drafts_config_with_fields_of_other_types_is_refused():
    with user_error(r"draft d: dflash_config in config\.json is a number, not an object"):
        drafter_of({"drafter": "dflash", "dflash_config": 5}, "d")
    with user_error(r"config\.json: architectures is 'Llama'; it must be a list"):
        drafter_of({"architectures": "Llama"}, "d")


def test_a_folder_without_weights_is_refused(tmp_path):
    with user_error(r"holds no \*\.safetensors file; convert"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 30, 0.5, -1])
def test_damaged_files_are_named(keep, tmp_path):
    save_file({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    for read in (read_tensors, weights_fingerprint, tensor_names):
        with user_error(r"model\.safetensors is damaged or cut short .*fetch or train it again"):
            read(tmp_path)


ZEROS = torch.zeros(100_000)


@pytest.mark.parametrize(
    "other",
    [
        {"b": ZEROS},
        {"a": ZEROS.view(2, -1)},
        {"a": ZEROS.int()},
        {"a": ZEROS, "z": torch.ones(1) * 1.001},
        *({"a": ZEROS.index_fill(0, torch.tensor(place), 1)} for place in (0, 50_000, 99_999)),
    ],
)
def test_the_fingerprint_covers_names_shapes_types_and_samples(other, tmp_path):
    """But neither metadata nor the order in files."""
    file = tmp_path / "model.safetensors"
    first = {"z": torch.ones(1)}
    save_file(first | {"a": ZEROS}, file)
    before = weights_fingerprint(tmp_path)
    save_file({"a": ZEROS} | first, file, {"format": "pt"})
    assert weights_fingerprint(tmp_path) == before
    save_file(first | other, file)
    assert weights_fingerprint(tmp_path) != before


def word_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0], pad_token=words[0])


def test_the_tokenizer_hash_is_of_the_mapping_alone(tmp_path):
    tokenizer = word_tokenizer("?", "a", "b")
    before = tokenizer_hash(tokenizer)
    assert tokenizer_hash(word_tokenizer("?", "b", "a")) != before
    tokenizer("a b a b", truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before, "a call with truncation changes no mapping"
    tokenizer(["a b", "a"], padding=True)
    assert tokenizer_hash(tokenizer) == before, "a call with padding changes no mapping"
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == before
    tokenizer.add_tokens(["c"])
    assert tokenizer_hash(tokenizer) != before


def test_slow_tokenizers_are_hashed_by_their_vocabulary():
    def slow(vocab):
        return tokenizer_hash(SimpleNamespace(is_fast=False, get_vocab=lambda: vocab))

    assert slow({"a": 0, "b": 1}) == slow({"b": 1, "a": 0})
    assert slow({"a": 0, "b": 1}) != slow({"a": 1, "b": 0})


def test_a_written_checkpoint_can_be_read(tmp_path):
    transposed = torch.arange(6.0).view(2, 3).t()
    checkpoint.write_checkpoint(tmp_path, {"x": 1}, {"a": transposed}, {"argv": ["train"]})
    assert read_json(tmp_path / "config.json") == {"x": 1}
    assert json.loads((tmp_path / "run.json").read_text()) == {"argv": ["train"]}
    assert torch.equal(read_tensors(tmp_path)["a"], transposed)


@pytest.mark.parametrize("name", ["/no/such/folder", "./draft", "bare", "too/many/parts", "folder/config.json"])
def test_missing_folders_are_not_sought_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, ["folder/config.json"])
    fault = "is a file" if name.endswith(".json") else "does not exist"
    with user_error(f"checkpoint {name} {fault}; name a folder or a hub id"):
        resolve(name)


SMALL = {"config.json", "tokenizer.model", "chat_template.jinja"}
CLUTTER = {"consolidated.safetensors", "pytorch_model.bin", "modeling.py", "original/model.safetensors"}
SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
INDEX = "model.safetensors.index.json"
# Files of a repository beside SMALL and CLUTTER -> the weights that are read.
REPOSITORIES: dict[str, tuple[set[str], set[str]]] = {
    "index": ({INDEX, *SHARDS, "model-old.safetensors"}, SHARDS),
    "one file": ({"model.safetensors", "model.fp16.safetensors"}, {"model.safetensors"}),
    "shards without an index": (SHARDS, SHARDS),
    "another name": (set(), {"consolidated.safetensors"}),
}


def fill(folder: Path, files: Iterable[str]):
    """Each safetensors file holds one tensor, named after it."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name == INDEX:
            (folder / name).write_text(json.dumps({"weight_map": {name: name for name in sorted(SHARDS)}}))
        elif name.endswith(".safetensors"):
            save_file({name: torch.ones(1)}, folder / name)
        else:
            (folder / name).write_text("")


def test_names_of_tensors_are_known_by_an_index_alone(tmp_path):
    fill(tmp_path, [INDEX])
    assert tensor_names(tmp_path) == SHARDS
    (tmp_path / INDEX).unlink()
    assert tensor_names(tmp_path) == set()
    fill(tmp_path, SHARDS)
    assert tensor_names(tmp_path) == SHARDS


@grouped()
@pytest.mark.parametrize("trust_remote_code", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", REPOSITORIES)
def test_the_hub_is_asked_for_what_is_read_and_no_more(kind, weights, trust_remote_code, tmp_path, monkeypatch):
    """Against a hub that is a folder; the second step takes the commit that the first one found."""
    files, expected = REPOSITORIES[kind]
    files = SMALL | CLUTTER | files
    commit = tmp_path / "c0ffee"
    downloads = []
    fill(tmp_path / "hub", files)

    def fetch(name, *, revision, allow_patterns, ignore_patterns=None):
        downloads.append((name, revision))
        for file in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (commit / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "hub" / file, commit / file)
        return str(commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("owner/model", "v1", weights=weights, trust_remote_code=trust_remote_code) == commit
    assert downloads[0] == ("owner/model", "v1")
    assert set(downloads[1:]) <= {("owner/model", "c0ffee")}
    fetched_files = {path.relative_to(commit).as_posix() for path in commit.rglob("*") if path.is_file()}
    python = {"modeling.py"} if trust_remote_code else set()
    small = SMALL | (files & {INDEX})
    assert fetched_files == small | python | (expected if weights else set())
    if weights:
        assert read_tensors(commit).keys() == expected


@pytest.mark.parametrize("kind", list(REPOSITORIES)[:-1])
def test_other_files_beside_the_weights_are_not_read(kind, tmp_path):
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
def test_incomplete_and_ambiguous_weights_are_refused(files, index, message, tmp_path):
    fill(tmp_path, files)
    if index is not None:
        (tmp_path / INDEX).write_text(index)
    for read in (read_tensors, weights_fingerprint):
        with user_error(message):
            read(tmp_path)


OFFLINE = LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder ... set 'HF_HUB_OFFLINE=0'")
OFFLINE.__cause__ = OSError("[Errno -2] Name or service not known")
NOT_FOUND = RepositoryNotFoundError(
    "404 Client Error\nmore", response=httpx.Response(404, request=httpx.Request("GET", "x:"))
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OFFLINE,
            r"is no folder in .+, and the hub could not be reached \(\[Errno .* known\); check .* path of a folder",
        ),
        (ConnectionError("no route"), r"the hub could not be reached \(no route\)"),
        (NOT_FOUND, r"the hub does not give it out \(404 Client Error\); check the name and the revision"),
        (OSError("No space left"), r"could not be downloaded \(No space left\)$"),
    ],
)
def test_the_hubs_errors_are_sentences(error, message, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with user_error(message):
        resolve("owner/model")
