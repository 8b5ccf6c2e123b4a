"""Incremental detokenization with stop strings, for the server and `LLM`. Imports no torch.

Invariant: however tokens are split over calls, the pieces join to the decoding of all tokens, cut at the stop string
that ends first; and each token is decoded a bounded number of times.
"""

import json
import re
from bisect import bisect_left
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from slipstream.serve.request import FinishReason, RequestStats

TRANSFORMERS = ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]
# Bytes that byte-level tokenizers write as themselves; the others follow from 256 on (GPT-2's encoder.py).
PRINTABLE_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
INCOMPLETE = "\ufffd"  # decoded from a character whose last bytes are in later tokens; one, however many there are
MOST_BYTES = 4  # bytes of a character
PROMPT_TAIL = 8  # tokens of a prompt with which its continuation is decoded


class Decoder:
    """Decodes with a transformers tokenizer, skipping special tokens. `markers`: texts that stand for added tokens.

    Of bytes that are no characters it keeps all complete characters, as byte-level tokenizers do: the decoder of
    byte-fallback tokenizers would drop all characters of a row of byte tokens that ends within one.
    """

    def __init__(self, tokenizer: Any, markers: Mapping[int, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._markers = markers or {}
        is_plain = overrides_none(tokenizer, "decode", "_decode")
        self._backend = tokenizer.backend_tokenizer if is_plain else None  # transformers calls it; 4 times as fast
        self.silent_ids = frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.silent_ids -= self._markers.keys()
        self._byte_of = {} if self._backend is None else fallback_bytes(self._backend)
        spaces = [id for id, byte in self._byte_of.items() if byte == ord(" ")]
        self._drops_space = bool(spaces) and self._decode_all(spaces) == ""  # at the beginning of a text

    def __call__(self, tokens: list[int]) -> str:
        if self._markers.keys().isdisjoint(tokens):
            return self._decode(tokens)
        place = next(index for index, token in enumerate(tokens) if token in self._markers)
        pieces = [self._decode(tokens[:place])]
        marker = tokens[place]
        start = place + 1
        for place in range(start, len(tokens) + 1):
            if place == len(tokens) or tokens[place] in self._markers:
                pieces += [self._markers[marker], self._after(marker, tokens[start:place])]
                marker = tokens[place % len(tokens)]
                start = place + 1
        return "".join(pieces)

    def _after(self, last: int, tokens: list[int]) -> str:
        """Decodes tokens after the token `last`: some decoders drop a space at the beginning of a text."""
        visible = [token for token in tokens if token not in self.silent_ids]
        before = self._decode_all([last])
        text = self._decode_all([last, *visible])
        is_whole = text.startswith(before) and INCOMPLETE not in text[len(before) :]
        return text[len(before) :] if is_whole else self._decode(visible)

    def _decode_all(self, tokens: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=False))
        return self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _decode(self, tokens: list[int]) -> str:
        if self._backend is None:
            return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text = str(self._backend.decode(tokens, skip_special_tokens=True))
        return self._mended(tokens) if self._byte_of and INCOMPLETE in text else text

    def _mended(self, tokens: list[int]) -> str:
        """Decodes tokens of which some spell bytes that are no characters."""
        visible = [token for token in tokens if token not in self.silent_ids]
        pieces = list[str]()
        plain = list[int]()
        last = None

        def end_plain() -> None:
            if last is None:
                pieces.append(self._decode_all(plain))
            elif plain:
                text = self._decode_all([last, *plain])
                pieces.append(text[len(self._decode_all([last])) :])
            plain.clear()

        for spells_bytes, group in groupby(visible, self._byte_of.__contains__):
            row = list(group)
            text = bytes(self._byte_of[token] for token in row).decode(errors="replace") if spells_bytes else ""
            if INCOMPLETE not in text:
                plain += row
                continue
            if self._drops_space and last is None and not plain:
                text = text.removeprefix(" ")
            end_plain()
            pieces.append(text)
            last = row[-1]
        end_plain()
        return "".join(pieces)


def overrides_none(tokenizer: Any, public: str, private: str) -> bool:
    """Whether these methods are transformers' own, which hand over to the fast tokenizer behind them."""
    methods = [getattr(type(tokenizer), name, None) for name in (public, private)]
    return [getattr(function, "__module__", None) for function in methods] == TRANSFORMERS


def fallback_bytes(backend: Any) -> dict[int, int]:
    """Maps the tokens that spell a byte to it, for a fast tokenizer whose decoder joins such tokens."""
    if "ByteFallback" not in decoder_steps(backend):
        return {}
    ids = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {id: byte for byte, id in ids.items() if id is not None}


def spellings(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of each word at the beginning of a text, and after a space."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    return tuple(tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)


class TokenTexts:
    """Texts and bytes of single tokens, as OpenAI's API shows them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        self._special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        steps = decoder_steps(getattr(tokenizer, "backend_tokenizer", None))
        self._byte_of: dict[str, int] = {}
        if "ByteLevel" in steps:
            non_printable = [byte for byte in range(256) if byte not in PRINTABLE_BYTES]
            self._byte_of = {chr(byte): byte for byte in PRINTABLE_BYTES}
            self._byte_of |= {chr(256 + index): byte for index, byte in enumerate(non_printable)}
        self._falls_back = "ByteFallback" in steps
        self.bytes_of = lru_cache(maxsize=2**16)(self._bytes_of)

    def __call__(self, token: int) -> str:
        """Returns the token's text, also of a special token; "bytes:\\xe4\\xbd" for a part of a character; "" for an
        unused id."""
        spelling = self.bytes_of(token)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)

    def _bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._byte_of and all(letter in self._byte_of for letter in piece):
            return bytes(self._byte_of[letter] for letter in piece)
        if self._falls_back:
            match = BYTE_TOKEN.fullmatch(piece)
            return bytes.fromhex(match[1]) if match else piece.replace("\u2581", " ").encode()
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False).encode()

    def starts(self, tokens: Sequence[int], text: str) -> list[int]:
        """Returns how many characters of `text`, which the tokens encode, precede each token. The text may lack special
        tokens."""
        pieces = [self.bytes_of(token) for token in tokens]
        if b"".join(pieces) != text.encode():
            pieces = [b"" if token in self._special else piece for token, piece in zip(tokens, pieces, strict=True)]
        # Some tokenizers add a space at the beginning of a text.
        is_longer = b"".join(pieces).startswith(b" ") and b"".join(pieces) != text.encode()
        starts = list[int]()
        position = -int(is_longer)
        decoder = getincrementaldecoder("utf-8")("ignore")
        for piece in pieces:
            starts.append(min(max(position, 0), len(text)))
            position += len(decoder.decode(piece))
        return starts


def decoder_steps(backend: Any) -> set[str]:
    """Returns the kinds of steps of a fast tokenizer's decoder; none without either."""
    decoder = getattr(backend, "decoder", None)
    steps = [] if decoder is None else [json.loads(decoder.__getstate__())]
    for step in steps:  # grows while it is walked
        steps += step.get("decoders", [])
    return {step["type"] for step in steps}


class TextStream:
    """The text of one request. Holds back incomplete characters and text that may begin a stop string.

    A token's text can depend on the token before it (leading spaces, bytes of one character), so each token is decoded
    together with the tokens of the previous piece, whose text is then cut off. The first piece is decoded with the end
    of the prompt, if the text continues one.
    """

    def __init__(
        self,
        decoder: Decoder,
        stop: Sequence[str] = (),
        *,
        watched: bool = True,
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        """`watched=False`: text is needed at the end only; without stop strings it is then decoded once. The text of
        the first `min_tokens` tokens is not searched for stop strings. `prompt`: tokens that the text continues;
        without them, it begins as the decoder begins a text."""
        self._decoder = decoder
        self._min_tokens = min_tokens
        self._stop = tuple(stop)
        self._beginnings = beginnings_of(self._stop)
        self._is_piecewise = watched or bool(stop)
        # Tokens of the last piece, then those whose text is not yet complete.
        self._window = [token for token in prompt[-PROMPT_TAIL:] if token not in decoder.silent_ids]
        self._shown = decoder(self._window)  # the text of the former, which has moved on to `_pending`
        if self._shown.endswith(INCOMPLETE):  # the prompt ends within a character
            self._window = []
            self._shown = ""
        self._num_shown = len(self._window)  # tokens of the window whose text is complete
        self._pending = ""  # decoded, held back because it may begin a stop string
        self._push_sizes: list[int] = []
        self.num_tokens = 0  # tokens of the answer, up to the one that completes a stop string
        self.stopped = False  # found a stop string; later tokens are ignored
        self.starts: list[int] = []  # characters before each token but a last stop id; 0 without pieces
        self._num_decoded = self.num_returned = 0  # characters
        self._is_over = False

    def push(self, tokens: list[int], finish_reason: FinishReason | None = None) -> str:
        """Adds tokens and returns the new text; all of it with a `finish_reason`. With "stop" the last token is a stop
        id, which has no text."""
        if tokens:  # the Output of an abort has none, since no pass made it
            self._push_sizes.append(len(tokens))
        if self.stopped:
            return ""
        text = self._push(tokens, finish_reason)
        self.num_returned += len(text)
        self._is_over = finish_reason is not None
        return text

    @property
    def num_settled(self) -> int:
        """Tokens whose text has begun to be returned; all of them at the end, unless a stop string cut them off."""
        return len(self.starts) if self._is_over and not self.stopped else bisect_left(self.starts, self.num_returned)

    def _push(self, tokens: list[int], finish_reason: FinishReason | None) -> str:
        visible = tokens[:-1] if finish_reason == "stop" else tokens
        pieces = []
        for token in visible:
            self.num_tokens += 1
            self.starts.append(self._num_decoded)
            piece = self._decode(token)
            self._num_decoded += len(piece)
            pieces.append(self._release(piece))
            if self.stopped:
                return "".join(pieces)
        self.num_tokens += len(tokens) - len(visible)
        if finish_reason is not None:
            pieces.append(self._release(self._decoder(self._window)[len(self._shown) :], final=True))
        return "".join(pieces)

    def _decode(self, token: int) -> str:
        """Returns the text that `token` completes."""
        if not self._is_piecewise:
            self._window.append(token)
            return ""
        if token in self._decoder.silent_ids:
            return ""
        self._window.append(token)
        text = self._decoder(self._window)
        is_full = len(self._window) - self._num_shown >= MOST_BYTES  # an incomplete character began after `_num_shown`
        if text.endswith(INCOMPLETE):
            return self._complete_part(text) if is_full else ""
        if len(text) <= len(self._shown):
            if is_full:
                self._window.pop()  # a token without text
            return ""
        piece = text[len(self._shown) :]
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        self._shown = self._decoder(self._window)
        return piece

    def _complete_part(self, text: str) -> str:
        """Returns the new text but for its last character. As many tokens stay in the window as a character has bytes:
        within so many bytes a UTF-8 decoder that starts anywhere is in step again."""
        piece = text[len(self._shown) : -1]
        del self._window[:-MOST_BYTES]
        self._num_shown = 1
        self._shown = self._decoder(self._window)[:-1]
        return piece

    def _release(self, piece: str, final: bool = False) -> str:
        """Appends `piece` to the pending text and returns the part that cannot begin a stop string."""
        if not self._stop or not (piece or final) or self.num_tokens <= self._min_tokens:
            return piece
        text = self._pending + piece
        stop_start = find_stop(text, self._stop)
        if stop_start is not None:
            self.stopped = True
            self._pending = ""
            return text[:stop_start]
        num_held = 0 if final else longest_beginning(text, self._stop, self._beginnings)
        self._pending = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def cut(self, stats: RequestStats) -> RequestStats:
        """Returns the engine's counts without the tokens that it generated after the stop string.

        Accepted tokens and rounds are exact. Drafted tokens are scaled by the rounds, and at least as many as accepted,
        since rounds may draft different numbers of tokens.
        """
        if self.num_tokens == stats.completion_tokens:
            return stats
        accepted = [0] * len(stats.accepted_by_position)
        num_kept = 0
        num_late = 0
        start = 0
        for index, size in enumerate(self._push_sizes):
            num_kept += start < self.num_tokens
            num_late += start >= self.num_tokens
            # A round's last token is the target's own. The first push is the prefill, which has no draft.
            num_accepted = min(size - 1, self.num_tokens - start) if index else 0
            for position in range(max(num_accepted, 0)):
                accepted[position] += 1
            start += size
        rounds = min(stats.rounds - num_late, num_kept - 1)  # the last round may not have been pushed yet
        rounds = max(rounds, *accepted[:1], 0)
        return replace(
            stats,
            completion_tokens=self.num_tokens,
            rounds=rounds,
            drafted_tokens=max(stats.drafted_tokens * rounds // max(stats.rounds, 1), sum(accepted)),
            accepted_by_position=accepted,
        )


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Returns where the stop string that ends first in `text` begins; of several, the longest."""
    matches = [(text.find(string) + len(string), text.find(string)) for string in stop if string in text]
    return min(matches)[1] if matches else None


@lru_cache(maxsize=16)
def beginnings_of(stop: tuple[str, ...]) -> frozenset[int]:
    """Returns the hashes of all beginnings of stop strings; the texts would take four times the memory."""
    return frozenset(hash(string[:length]) for string in stop for length in range(1, len(string)))


def longest_beginning(text: str, stop: Sequence[str], beginnings: Set[int]) -> int:
    """Returns the length of the longest suffix of `text` that is a beginning of a stop string. Each suffix is looked
    up, since it could be compared with many strings, and a token may have a hundred characters."""
    for length in range(min(max(map(len, stop)) - 1, len(text)), 0, -1):
        tail = text[-length:]
        if hash(tail) in beginnings and any(string.startswith(tail) for string in stop):
            return length
    return 0
