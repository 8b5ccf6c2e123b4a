"""Fixtures of the data tools: folders that hold a small tokenizer, and where asked a model config."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.tests.data_tools.chats import CHATML_TAGGED, build_tokenizer


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """template, vocab_size -> a folder with a tokenizer and, for a vocab_size, a model config."""

    def make(template: str | None = CHATML_TAGGED, vocab_size: int | None = None, end: str = "<|im_end|>") -> Path:
        folder = tmp_path_factory.mktemp("target")
        build_tokenizer(template, end).save_pretrained(folder)
        if vocab_size is not None:
            config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": vocab_size}
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="session")
def target(make_folder: Callable[..., Path]) -> Path:
    return make_folder(CHATML_TAGGED, 512)
