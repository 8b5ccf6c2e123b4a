"""What the data programs need of a target without its weights: tokenizer, vocabulary size, special tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from slipstream.data_tools.options import ConversationOptions
from slipstream.models.checkpoint import tokenizer_hash

TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTokenizer:
    tokenizer: PreTrainedTokenizerBase
    hash: str
    vocab_size: int  # V: the model's, which may exceed the tokenizer's; the tokenizer's where there is no model config
    end_ids: frozenset[int]  # end of text or turn, of the tokenizer and of the generation config
    kept_ids: tuple[int, ...]  # special, added and end tokens, ascending: every token map holds them
    context: int | None  # most tokens of a prompt and its answer; None where there is no model config


def load_target_tokenizer(options: ConversationOptions) -> TargetTokenizer:
    """Raises ValueError when the target cannot be found or its parts contradict each other."""
    if not options.target:
        raise ValueError("target is empty; name the model whose tokenizer is meant (a folder or a hub id)")
    folder = _folder(options)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"target {options.target} has no readable tokenizer: {error}") from error
    if options.chat_template is not None:
        tokenizer.chat_template = Path(options.chat_template).read_text(encoding="utf-8")
    end_ids = _end_ids(folder, tokenizer)
    kept = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *end_ids}
    text = _text_config(folder, options.trust_remote_code)
    vocab_size = len(tokenizer) if text is None else int(text.vocab_size)
    highest = max(len(tokenizer) - 1, *kept, 0)
    if highest >= vocab_size:
        raise ValueError(
            f"target {options.target}: its tokenizer has token id {highest}, its config.json a vocab_size of "
            f"{vocab_size}; the two do not belong together"
        )
    return TargetTokenizer(
        tokenizer=tokenizer,
        hash=tokenizer_hash(tokenizer),
        vocab_size=vocab_size,
        end_ids=end_ids,
        kept_ids=tuple(sorted(kept)),
        context=getattr(text, "max_position_embeddings", None),
    )


def _folder(options: ConversationOptions) -> Path:
    """The target's folder; of a hub repository only the small files are fetched."""
    path = Path(options.target)
    if path.is_dir():
        return path
    if options.target.count("/") != 1 or options.target.startswith((".", "/")):
        raise ValueError(f"target {options.target} does not exist; name a folder or a hub id such as owner/model")
    try:
        return Path(snapshot_download(options.target, revision=options.revision, allow_patterns=TOKENIZER_FILES))
    except OSError as error:
        raise ValueError(f"target {options.target} is neither a folder nor reachable on the hub: {error}") from error


def _text_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig | None:
    if not (folder / "config.json").exists():
        return None
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()


def _end_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    ids: set[Any] = {tokenizer.eos_token_id}
    if (folder / "generation_config.json").exists():
        listed = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(listed) if isinstance(listed, list) else {listed}
    return frozenset(ids - {None})
