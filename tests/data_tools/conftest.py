"""Fixtures of the data tools: folders that hold a small tokenizer, and, for some tests, a model config."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from slipstream.data_tools.capture_states import main as capture
from slipstream.data_tools.dataset import Conversation, write_dataset
from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.tests.data_tools.chats import CHATML_TAGGED, build_tokenizer

MAX_LENGTH = 40  # of captures
Flags = Callable[..., list[str]]


def random_row(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Up to 60 tokens in turns; some rows supervise nothing."""
    length = int(generator.integers(1, 60))
    mask = np.repeat(generator.random(12) < 0.4, 5)[:length] & (generator.random() < 0.8)
    return generator.integers(0, 120, length, dtype=np.int32), mask


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory) -> Callable[..., Path]:
    """template, vocab_size -> a folder with a tokenizer and, for a vocab_size, a model config."""

    def make(template=CHATML_TAGGED, vocab_size=None, end="<|im_end|>"):
        folder = tmp_path_factory.mktemp("target")
        build_tokenizer(template, end).save_pretrained(folder)
        if vocab_size is not None:
            config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": vocab_size}
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="session")
def target(make_folder) -> Path:
    return make_folder(CHATML_TAGGED, 512)


@pytest.fixture(scope="session")
def capture_target(make_target, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("capture") / "target"
    shutil.copytree(make_target("qwen3"), path)
    words = {str(number): number for number in range(120)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0"))).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def capture_data(capture_target) -> Path:
    generator = np.random.default_rng(4)
    path = capture_target.with_name("data")
    described = {"tokenizer_hash": tokenizer_hash(AutoTokenizer.from_pretrained(capture_target))}
    rows = [random_row(generator) for _ in range(70)]
    write_dataset([Conversation([row], "qa") for row in rows], path, heldout=0.2, seed=0, describe=lambda: described)
    return path


@pytest.fixture(scope="session")
def flags(capture_target, capture_data) -> Flags:
    """Flags of a capture of some ten small shards; `changes` replace or add options."""
    standard = {"target": capture_target, "data": capture_data, "max-length": MAX_LENGTH, "batch-tokens": 64}

    def build(output, *words, **changes):
        options = {**standard, "shard-gb": 4e-5, "dtype": "fp32", "output": output} | changes
        return [f"--{name}={value}" for name, value in options.items()] + ["--yes", *words]

    return build


@pytest.fixture(scope="session")
def captured(flags, capture_target) -> Path:
    output = capture_target.with_name("captured")
    capture(flags(output))
    return output
