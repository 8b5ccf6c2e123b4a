"""Which token stands for "not drafted yet" in a block, where nobody has said so."""

from transformers import PreTrainedTokenizerBase


def default_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[int, str]:
    """Token id and where it is from: the tokenizer's mask token, the first embedding that no token uses, or a token
    that answers hardly contain. `vocab_size` is the number of the target's embeddings.

    Raises ValueError if the tokenizer has nothing of the kind.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id, "the tokenizer's mask token"
    unused = max(tokenizer.get_vocab().values()) + 1
    if unused < vocab_size:
        return unused, "the first unused embedding"
    for name in ("pad", "eos", "unk"):
        token = getattr(tokenizer, f"{name}_token_id")
        if token is not None:
            return token, f"the tokenizer's {name} token"
    raise ValueError("the tokenizer has no mask, unused, pad, eos or unk token; name one by draft.mask_token_id")
