"""What transformers reads of a target's folder beside the weights: config, tokenizer, end-of-text ids.

A checkpoint's own Python code runs only with `trust_remote_code`; without it, that is an error and never a question on
the terminal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from slipstream.models.checkpoint import read_json

VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json", "*.tiktoken")


def read_config(path: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Raises ValueError for a folder without config.json, and for code that is not trusted."""
    read_json(path / "config.json")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except ValueError as error:
        _refuse_code(path, error)
        raise


def find_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """As `load_tokenizer`; None for a folder without any file of one."""
    has_one = _has_vocabulary(path) or (path / "tokenizer_config.json").exists()
    return load_tokenizer(path, trust_remote_code) if has_one else None


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Raises ValueError for a folder without a readable tokenizer, and for code that is not trusted."""
    missing = f"{path} has no tokenizer: tokenizer.json is missing; copy the model's tokenizer files there"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises nothing more specific
        _refuse_code(path, error)
        if not _has_vocabulary(path):
            raise ValueError(missing) from error
        raise ValueError(f"the tokenizer in {path} cannot be read ({error}); download it again") from error
    if tokenizer.is_fast and not _has_vocabulary(path):  # transformers then makes an empty one
        raise ValueError(missing)
    return tokenizer


def end_of_text_ids(path: Path, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The ids that end an answer: all that generation_config.json, config.json and the tokenizer name."""
    ids = _listed(path / "generation_config.json") | _listed(path / "config.json")
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _listed(file: Path) -> set[int]:
    """The eos_token_id of a config, which may be a number or a list, and of the text_config inside."""
    values = read_json(file) if file.exists() else {}
    inside = values.get("text_config")
    found: list[Any] = []
    for part in (values, inside if isinstance(inside, Mapping) else {}):
        listed = part.get("eos_token_id")
        found += listed if isinstance(listed, list) else [listed]
    return {token for token in found if token is not None}


def _has_vocabulary(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in VOCABULARIES)


def _refuse_code(path: Path, error: Exception) -> None:
    """Raises ValueError in place of transformers' error about code that is not trusted."""
    if "trust_remote_code" in str(error):
        raise ValueError(
            f"{path} needs Python code of its own (auto_map); read that code and, if you trust it, set "
            "trust_remote_code"
        ) from error
