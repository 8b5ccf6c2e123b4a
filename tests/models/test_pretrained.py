"""Parts of a target beside its weights: code that is not trusted, tokenizers, end-of-text ids, context."""

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PretrainedConfig, Qwen2Config

from slipstream.data_tools.options import ConversationOptions
from slipstream.data_tools.target_tokenizer import context_of, load_target_tokenizer
from slipstream.models.drafts.token_map import TokenMap
from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.models.targets.config import most_positions
from slipstream.models.targets.pretrained import end_of_text_ids, load_tokenizer, read_config
from slipstream.serve.http.frontend import Frontend
from slipstream.serve.options import ServeConfig
from slipstream.tests.random_drafts import save_random_eagle
from slipstream.tests.serve.engine_runs import build_engine
from slipstream.tests.sources import TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

CODE = """
from transformers import PreTrainedTokenizerFast, Qwen3Config
class OddConfig(Qwen3Config):
    model_type = "odd"
class OddTokenizer(PreTrainedTokenizerFast):
    pass
"""


def change_json(file: Path, **values: Any):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def copy(tmp_path) -> Path:
    """The bundled target, as a folder to change."""
    shutil.copytree(TINY, tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def odd(copy, monkeypatch) -> Path:
    """A target whose config and tokenizer are classes of its own; a question on the terminal fails."""
    (copy / "odd.py").write_text(CODE)
    change_json(copy / "config.json", model_type="odd", auto_map={"AutoConfig": "odd.OddConfig"})
    auto_map = {"AutoTokenizer": [None, "odd.OddTokenizer"]}
    change_json(copy / "tokenizer_config.json", tokenizer_class="OddTokenizer", auto_map=auto_map)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked on the terminal"))
    return copy


READERS: dict[str, Callable[[Path, bool], object]] = {
    "config": read_config,
    "tokenizer": load_tokenizer,
    "engine": lambda path, trust: build_engine(path, trust_remote_code=trust).runner.target.end_ids,
    "server": lambda path, trust: Frontend(
        ServeConfig(target=str(path), trust_remote_code=trust), build_engine(TINY).info
    ),
    "data": lambda path, trust: (
        load_target_tokenizer(ConversationOptions(target=str(path), trust_remote_code=trust)).end_ids
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_code_runs_only_where_it_is_trusted(reader, odd):
    with user_error(r"target needs Python code of its own \(auto_map\); .* set trust_remote_code$"):
        READERS[reader](odd, False)
    result = READERS[reader](odd, True)
    if reader in ("engine", "data"):
        assert result == {0, 2}


def test_a_token_map_is_compared_with_trusted_code(odd, tmp_path):
    save_random_eagle(TINY, tmp_path / "draft", intermediate_size=16)
    digest = tokenizer_hash(load_tokenizer(odd, True))
    TokenMap.build(torch.ones(4096, dtype=torch.int64), 64, [0, 2], {"tokenizer_hash": digest}).write(
        tmp_path / "map.safetensors"
    )
    options = {"drafter": {"token_map": str(tmp_path / "map.safetensors")}, "trust_remote_code": True}
    build_engine(odd, tmp_path / "draft", **options)


@pytest.mark.parametrize("left", [[], ["tokenizer_config.json"]])
def test_a_missing_tokenizer_is_one_sentence(left, copy):
    """Transformers makes an empty tokenizer from a folder that has no file of one."""
    for file in copy.glob("tokenizer*"):
        if file.name not in left:
            file.unlink()
    with user_error(r"target has no tokenizer: tokenizer\.json is missing; copy") as caught:
        load_tokenizer(copy)
    assert "\n" not in str(caught.value)
    (copy / "tokenizer.json").write_text("{")
    with user_error(r"the tokenizer in .*target cannot be read \(.*\); download it again"):
        load_tokenizer(copy)
    with user_error("cannot be read"):
        end_of_text_ids(copy)


@each_case()
def test_end_of_text_ids_are_all_that_any_file_names(generation, config, has_tokenizer, expected, copy):
    (copy / "generation_config.json").unlink()
    if generation is not None:
        (copy / "generation_config.json").write_text(json.dumps(generation))
    change_json(copy / "config.json", **config)
    for file in () if has_tokenizer else copy.glob("tokenizer*"):
        file.unlink()
    assert sorted(end_of_text_ids(copy)) == expected


@pytest.mark.parametrize(
    "token", ["<|im_end|>", {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}, "<|new|>", None]
)
def test_the_tokenizers_end_is_what_transformers_takes(token, copy):
    (copy / "generation_config.json").unlink()
    change_json(copy / "config.json", eos_token_id=None)
    change_json(copy / "tokenizer_config.json", eos_token=token)
    expected = AutoTokenizer.from_pretrained(copy).eos_token_id
    assert end_of_text_ids(copy) == frozenset(() if expected is None else [expected])


def test_serving_and_data_end_at_the_same_ids(copy):
    """Although generation_config.json names none."""
    (copy / "generation_config.json").write_text("{}")
    change_json(copy / "config.json", eos_token_id=[3])
    assert (
        build_engine(copy).runner.target.end_ids == load_target_tokenizer(ConversationOptions(target=str(copy))).end_ids
    )
    assert build_engine(copy).runner.target.end_ids == {2, 3}


@each_case()
def test_the_most_positions_of_a_target(rope, longest):
    assert most_positions(100, rope) == longest
    config = Qwen2Config(max_position_embeddings=100, rope_parameters={"rope_theta": 1e4, **rope})
    assert context_of(config) == longest
    kinds = {"full_attention": {"rope_theta": 1e4, **rope}, "sliding_attention": {"rope_type": "default"}}
    assert context_of(PretrainedConfig(max_position_embeddings=100, rope_parameters=kinds)) == longest
