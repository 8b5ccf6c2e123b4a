"""Checkpoint folders: where names lead, fused keys, fingerprints of weights and tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from slipstream.models import checkpoint
from slipstream.models.checkpoint import (
    fuse,
    is_checkpoint,
    load_strict,
    read_json,
    read_tensors,
    tokenizer_hash,
    unfuse,
    weights_fingerprint,
)


def test_a_name_with_a_slash_or_a_folder_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert [is_checkpoint(name) for name in ("runs", "owner/model", "./missing", "none")] == [True, True, True, False]


def test_json_faults_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing; is .* a complete checkpoint"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"hidden_size": 3')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_json(tmp_path / "config.json")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors file; convert"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 30, 0.5, -1])
def test_damaged_files_are_named(keep: float, tmp_path: Path) -> None:
    save_file({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: int(keep * len(data)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short .*fetch or train it again"):
        read_tensors(tmp_path)


def test_fuse_joins_rows_and_unfuse_parts_them_again() -> None:
    rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "gate_proj": 6, "up_proj": 6, "o_proj": 3, "down_proj": 5}
    tensors = {f"layers.1.x.{name}.weight": torch.randn(count, 7) for name, count in rows.items()}
    tensors |= {f"layers.1.x.{name}.bias": torch.randn(rows[name]) for name in ("q_proj", "k_proj", "v_proj")}
    fused = fuse(tensors)
    assert sorted(key.removeprefix("layers.1.x.") for key in fused) == sorted(
        ["qkv_proj.weight", "qkv_proj.bias", "gate_up_proj.weight", "o_proj.weight", "down_proj.weight"]
    )
    parts = [tensors[f"layers.1.x.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(fused["layers.1.x.qkv_proj.weight"], torch.cat(parts))
    again = unfuse(fused, {"qkv_proj": [8, 4, 4], "gate_up_proj": [6, 6]})
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)


def test_an_incomplete_group_is_left_for_the_strict_load_to_name() -> None:
    tensors = {"a.q_proj.weight": torch.ones(2, 2), "a.k_proj.weight": torch.ones(2, 2)}
    assert fuse(tensors).keys() == tensors.keys()


def test_strict_loading_names_every_fault() -> None:
    tensors = {"weight": torch.ones(3, 3), "surprise": torch.ones(1)}
    with pytest.raises(ValueError, match="here does not fit its config") as caught:
        load_strict(nn.Linear(4, 3), tensors, "here")
    for fault in ("missing bias", "unexpected surprise", r"weight is [3, 3], the config says [3, 4]"):
        assert fault in str(caught.value)


def test_the_fingerprint_notices_one_changed_tensor(make_target: Callable[[str], Path], tmp_path: Path) -> None:
    original = make_target("llama")
    tensors = read_tensors(original)
    save_file(tensors, tmp_path / "model.safetensors")
    fingerprint = weights_fingerprint(original)
    assert weights_fingerprint(tmp_path) == fingerprint, "metadata and order do not count"
    for name in tensors:
        changed = tensors[name] * 1.001
        save_file({**tensors, name: changed}, tmp_path / "model.safetensors")
        assert weights_fingerprint(tmp_path) != fingerprint, name


@pytest.mark.parametrize("index", [0, 50_000, -1])
def test_the_fingerprint_samples_large_tensors(index: int, tmp_path: Path) -> None:
    tensor = torch.zeros(100_000)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    before = weights_fingerprint(tmp_path)
    tensor[index] = 1
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    assert weights_fingerprint(tmp_path) != before


@pytest.mark.parametrize(
    "other", [{"b": torch.zeros(4, 3)}, {"a": torch.zeros(3, 4)}, {"a": torch.zeros(4, 3, dtype=torch.int32)}]
)
def test_the_fingerprint_covers_names_shapes_and_types(other: dict[str, Tensor], tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, 3)}, tmp_path / "model.safetensors")
    before = weights_fingerprint(tmp_path)
    save_file(other, tmp_path / "model.safetensors")
    assert weights_fingerprint(tmp_path) != before


def word_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0], pad_token=words[0])


def test_the_tokenizer_hash_is_of_the_mapping_alone(tmp_path: Path) -> None:
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


def test_slow_tokenizers_are_hashed_by_their_vocabulary() -> None:
    def slow(vocab: dict[str, int]) -> str:
        return tokenizer_hash(SimpleNamespace(is_fast=False, get_vocab=lambda: vocab))

    assert slow({"a": 0, "b": 1}) == slow({"b": 1, "a": 0})
    assert slow({"a": 0, "b": 1}) != slow({"a": 1, "b": 0})


def test_a_written_checkpoint_can_be_read(tmp_path: Path) -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    checkpoint.write_checkpoint(tmp_path, {"x": 1}, {"a": transposed}, {"argv": ["train"]})
    assert read_json(tmp_path / "config.json") == {"x": 1}
    assert json.loads((tmp_path / "run.json").read_text()) == {"argv": ["train"]}
    assert torch.equal(read_tensors(tmp_path)["a"], transposed)
