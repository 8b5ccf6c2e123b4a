"""What the data programs need of a target without its weights: tokenizer, vocabulary size, special tokens."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from slipstream.data_tools.options import ConversationOptions
from slipstream.models.checkpoint import resolve, tokenizer_hash
from slipstream.models.pretrained import end_of_text_ids, load_tokenizer, read_config


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTokenizer:
    tokenizer: PreTrainedTokenizerBase
    hash: str
    vocab_size: int  # V: the model's, which may exceed the tokenizer's; the tokenizer's where there is no model config
    end_ids: frozenset[int]  # end of text or turn, as the server takes them (models/pretrained.py)
    kept_ids: tuple[int, ...]  # special, added and end tokens, ascending: every token map holds them
    context: int | None  # most tokens of a prompt and its answer; None where there is no model config


def load_target_tokenizer(options: ConversationOptions) -> TargetTokenizer:
    """Raises ValueError when the target cannot be found or its parts contradict each other."""
    if not options.target:
        raise ValueError("target is empty; name the model whose tokenizer is meant (a folder or a hub id)")
    trust = options.trust_remote_code
    folder = resolve(options.target, options.revision, trust_remote_code=trust, weights=False)
    tokenizer = load_tokenizer(folder, trust)
    if options.chat_template is not None:
        tokenizer.chat_template = Path(options.chat_template).read_text(encoding="utf-8")
    end_ids = end_of_text_ids(folder, trust)
    kept = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *end_ids}
    text = read_config(folder, trust).get_text_config() if (folder / "config.json").exists() else None
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
