"""How a tokenizer spells text that a grammar forces: the tokens that a model trained on its tokenizer's output expects.

Text is bytes, since a token may hold a part of a character. Nothing here decides what is emitted: a wrong spelling is a
refused draft.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

MOST_KEPT = 4096  # spellings


class Spelling:
    """Of one vocabulary. `vocabulary`: the bytes of each token id; `added`: ids of tokens that stand apart from text,
    such as control tokens."""

    def __init__(self, tokenizer: Any, vocabulary: Sequence[bytes]) -> None:
        self.vocabulary = vocabulary
        self.added: frozenset[int] = frozenset(getattr(tokenizer, "added_tokens_decoder", ()))
        self._encode = tokenizer.backend_tokenizer.encode if getattr(tokenizer, "is_fast", False) else None
        self._known = lru_cache(MOST_KEPT)(self._find)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self.vocabulary[token] for token in tokens])

    def respell(self, last: int, tokens: Sequence[int]) -> list[int]:
        """The text of these tokens as the tokenizer writes it after the token `last`: what lies between added tokens is
        spelled anew, and kept where the tokenizer has no other spelling of it."""
        found = list[int]()
        text = list[int]()
        for token in (*tokens, None):
            if token is not None and token not in self.added:
                text.append(token)
                continue
            if text:
                found += self._known(last, tuple(text))
                text.clear()
            if token is not None:
                found.append(token)
                last = token
        return found

    def _find(self, last: int, tokens: tuple[int, ...]) -> Sequence[int]:
        wanted = self.bytes_of(tokens)
        try:
            text = wanted.decode()
        except UnicodeDecodeError as error:  # a character begins before this text, or ends after it
            text = wanted[: error.start].decode()
        before = self.vocabulary[last].decode(errors="ignore")
        for prefix in (before, ""):  # without it where the tokenizer joins the two
            if self._encode is None or not text:
                break
            encoded = self._encode(prefix + text, add_special_tokens=False)
            each = zip(encoded.ids, encoded.offsets, strict=True)
            found = [token for token, (start, _) in each if start >= len(prefix)]
            if self.bytes_of(found) == text.encode():
                return found
        return tokens
