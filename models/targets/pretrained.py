"""Reads a target's folder without its weights: config, tokenizer, end-of-text ids.

transformers is imported where it is used: it takes seconds, more where torchvision or scikit-learn are installed, which
it imports as well. An engine does without for most targets.

A checkpoint's own Python code runs only with `trust_remote_code`; without, it is an error and never a question on the
terminal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from slipstream.models.files.checkpoint import read_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json", "*.tiktoken")


def read_config(path: Path, trust_remote_code: bool = False) -> "PretrainedConfig":
    """Raises ValueError for a folder without config.json, for code that is not trusted, and for fields that
    transformers refuses."""
    from transformers import AutoConfig

    read_json(path / "config.json")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a KeyError, TypeError or one of a validator of its own, depending on the field
        _refuse_code(path, error)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path / 'config.json'} cannot be read by transformers ({reason})") from error


def find_tokenizer(path: Path, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase | None":
    """As `load_tokenizer`; None for a folder without any file of one."""
    has_one = _has_vocabulary(path) or (path / "tokenizer_config.json").exists()
    return load_tokenizer(path, trust_remote_code) if has_one else None


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """Raises ValueError for a folder without a readable tokenizer, and for code that is not trusted."""
    from transformers import AutoTokenizer

    missing = f"{path} has no tokenizer: tokenizer.json is missing; copy the model's tokenizer files there"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception
        _refuse_code(path, error)
        if (path / "config.json").exists():
            read_config(path, trust_remote_code)  # which transformers reads first: says so if that is at fault
        if not _has_vocabulary(path):
            raise ValueError(missing) from error
        raise ValueError(f"the tokenizer in {path} cannot be read ({error}); download it again") from error
    if tokenizer.is_fast and not _has_vocabulary(path):  # transformers then creates an empty one
        raise ValueError(missing)
    return tokenizer


def end_of_text_ids(path: Path, trust_remote_code: bool = False) -> frozenset[int]:
    """The ids that end an answer: all that generation_config.json, config.json and the tokenizer name."""
    ids = _listed(path / "generation_config.json") | _listed(path / "config.json")
    end_token = _end_token(path, trust_remote_code)
    return frozenset(ids if end_token is None else ids | {end_token})


def _end_token(path: Path, trust_remote_code: bool) -> int | None:
    """The tokenizer's end token, if there is one; read without transformers where its files name it."""
    file = path / "tokenizer.json"
    settings = path / "tokenizer_config.json"
    values = read_json(settings) if file.exists() and settings.exists() else {}
    token = values.get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    if isinstance(text, str) and "auto_map" not in values:
        try:
            token_id = Tokenizer.from_file(str(file)).token_to_id(text)
        except Exception:  # the tokenizers library raises bare Exception; find_tokenizer says what is wrong
            token_id = None
        if token_id is not None:
            return token_id
    tokenizer = find_tokenizer(path, trust_remote_code)
    return None if tokenizer is None else tokenizer.eos_token_id


def _listed(file: Path) -> set[int]:
    """The eos_token_id of a config and of its text_config, each a number or a list."""
    values = read_json(file) if file.exists() else {}
    inside = values.get("text_config")
    ids: list[Any] = []
    for part in (values, inside if isinstance(inside, Mapping) else {}):
        listed = part.get("eos_token_id")
        ids += listed if isinstance(listed, list) else [listed]
    return {token for token in ids if token is not None}


def _has_vocabulary(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in VOCABULARIES)


def _refuse_code(path: Path, error: Exception) -> None:
    """Replaces transformers' error about untrusted code by a ValueError."""
    if "trust_remote_code" in str(error):
        raise ValueError(
            f"{path} needs Python code of its own (auto_map); read that code and, if you trust it, set "
            "trust_remote_code"
        ) from error
