"""What one request may ask of the HTTP process, every limit with its reason. Imports no HTTP package.

All streams share one process and one event loop: what a client sends must cost little memory, and nothing may hold the
loop, or the interpreter's lock, for more than some tens of milliseconds.
"""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from slipstream.serve.options import ServeConfig

# A body has room for a context of 256k tokens, or of max_model_len where that is more: 16 bytes per token (4 MiB), and
# a value per token for those who send token ids.
BODY_TOKENS = 2**18
BODY_BYTES_PER_TOKEN = 16
# Longer bodies count against MAX_BODIES_BYTES and are parsed by threads of their own: short ones never wait for them.
SHORT_BODY_BYTES = 64 * 2**10
# All bodies in memory, read and waiting: many clients that send long ones can not fill it.
MAX_BODIES_BYTES = 64 * 2**20
MAX_LONG_WAITING = 16  # long bodies that wait for a thread: tokenising one may take seconds

MAX_NESTING = 64  # levels of a body; deeper values overflow the stack of what walks them, templates among it
# Strings, lists and objects of a body: the parser holds the lock until the last of them is made, and of 3 bytes sent
# each makes 50 to 200.
MAX_NODES = 2**16
MAX_MESSAGES = 4096  # some 10 us each to check
MAX_PARTS = 4096  # of all messages of a call

MAX_CHOICES_PER_PROMPT = 128  # OpenAI's
# Every token of an answer is compared with every stop string, on the event loop: 16 cost some microseconds.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64

# Where transformers defines what encodes a text, if a model's tokenizer has nothing of its own.
PLAIN_ENCODE = ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]

RETRY_AFTER_S = 1  # what 429 and 503 tell clients: a place may be free after every round
MAX_ERROR_CHARS = 1000  # of an error's message, which may quote what the client sent


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that depend on the target and the server's options."""

    body_bytes: int
    values: int  # of a body: every number counts, so a context full of token ids must fit
    text_chars: int | None  # of one prompt, from `longest_text`
    choices: int  # of one call: half of the places, so that no single call can shut out everybody else

    @classmethod
    def of(cls, config: ServeConfig, max_model_len: int, tokenizer: Any) -> "Limits":
        tokens = max(max_model_len, BODY_TOKENS)
        return cls(
            body_bytes=tokens * BODY_BYTES_PER_TOKEN,
            values=tokens + MAX_NODES,
            text_chars=longest_text(tokenizer, max_model_len),
            choices=max((config.max_running + config.max_waiting) // 2, 1),
        )


def longest_text(tokenizer: Any, num_tokens: int) -> int | None:
    """Most characters that `num_tokens` tokens can stand for. None where the tokenizer may drop text or make one token
    of a word of any length, and where it is more than a `tokenizers.Tokenizer`."""
    own = [getattr(type(tokenizer), name, None) for name in ("__call__", "_encode_plus")]
    if [getattr(function, "__module__", None) for function in own] != PLAIN_ENCODE:
        return None
    backend = tokenizer.backend_tokenizer
    parts = json.loads(backend.to_str())
    vocabulary = backend.get_vocab(with_added_tokens=True)
    drops_spaces = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    splits = all(keeps_text(part) for part in components(parts["pre_tokenizer"], "pretokenizers"))
    if drops_spaces or not splits or not spells_everything(parts, vocabulary):
        return None
    shrinkage = 1
    for part in components(parts["normalizer"], "normalizers"):
        factor = normalizer_shrinkage(part)
        if factor is None:
            return None
        shrinkage *= factor
    # A character is at least one byte, so this holds for tokens that spell bytes, too.
    return num_tokens * max(map(len, vocabulary)) * shrinkage


def components(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences unfolded."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for one in part[inner] for step in components(one, inner)]


def spells_everything(parts: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Whether the model has a token for every byte: no character is dropped or joins others in an unknown token."""
    if parts["model"]["type"] != "BPE":
        return False
    if parts["model"]["byte_fallback"]:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    steps = [*components(parts["pre_tokenizer"], "pretokenizers"), *components(parts["normalizer"], "normalizers")]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    return is_byte_level and all(letter in vocabulary for letter in ByteLevel.alphabet())


def keeps_text(part: dict[str, Any]) -> bool:
    if part["type"] in ("Split", "Punctuation"):
        return part["behavior"] != "Removed"
    return part["type"] in ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")


def normalizer_shrinkage(part: dict[str, Any]) -> int | None:
    """At most so many characters become one; None: no bound."""
    kind = part["type"]
    if kind in ("NFC", "NFKC"):
        return 4  # the longest canonical decomposition (Unicode Standard Annex 15)
    if kind == "Replace":
        pattern, content = part["pattern"].get("String"), part["content"]
        return -(-len(pattern) // len(content)) if pattern and content else None
    return 1 if kind in ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel") else None
