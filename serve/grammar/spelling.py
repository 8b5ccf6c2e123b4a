"""Spells text that a grammar forces as the tokenizer does, since a model expects the tokens of its tokenizer.

Text is bytes, since a token may hold a part of a character. A wrong spelling changes no answer: it is a draft that the
target refuses.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

MOST_KEPT = 4096  # spellings in the cache


class Spelling:
    """Spells text in one vocabulary. `vocabulary`: the bytes of each token id; `added`: ids of tokens that are not part
    of text, such as control tokens."""

    def __init__(self, tokenizer: Any, vocabulary: Sequence[bytes]) -> None:
        self.vocabulary = vocabulary
        self.added: frozenset[int] = frozenset(getattr(tokenizer, "added_tokens_decoder", ()))
        self._encode = tokenizer.backend_tokenizer.encode if getattr(tokenizer, "is_fast", False) else None
        self._spell = lru_cache(MOST_KEPT)(self._find)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self.vocabulary[token] for token in tokens])

    def respell(self, last: int, tokens: Sequence[int]) -> list[int]:
        """Returns tokens with the same text, as the tokenizer writes it after the token `last`. Spells each run between
        added tokens anew and keeps it if the tokenizer has no other spelling."""
        ids = list[int]()
        text = list[int]()
        for token in (*tokens, None):
            if token is not None and token not in self.added:
                text.append(token)
                continue
            if text:
                ids += self._spell(last, tuple(text))
                text.clear()
            if token is not None:
                ids.append(token)
                last = token
        return ids

    def _find(self, last: int, tokens: tuple[int, ...]) -> Sequence[int]:
        data = self.bytes_of(tokens)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:  # a character begins before this text, or ends after it
            text = data[: error.start].decode()
        before = self.vocabulary[last].decode(errors="ignore")
        for prefix in (before, ""):  # without the token before if the tokenizer joins it with the text
            if self._encode is None or not text:
                break
            encoded = self._encode(prefix + text, add_special_tokens=False)
            pairs = zip(encoded.ids, encoded.offsets, strict=True)
            ids = [token for token, (start, _) in pairs if start >= len(prefix)]
            if self.bytes_of(ids) == text.encode():
                return ids
        return tokens
