"""Token ids to text, piece by piece, with stop strings. Used by the server and by `LLM`; imports no torch.

Invariant: the pieces joined are the decoding of all tokens, cut at the stop string that ends first, however the tokens
were split over calls.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.serve.request import FinishReason, RequestStats

# Where transformers defines `decode` and what it calls, if a model's tokenizer has nothing of its own.
PLAIN_DECODE = ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]
INCOMPLETE = "\ufffd"  # what a decoder shows for the first bytes of a character whose last bytes are in later tokens


class Decoder:
    """Full decoding by one transformers tokenizer; special tokens leave no text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        own = [getattr(type(tokenizer), name, None) for name in ("decode", "_decode")]
        is_plain = [getattr(function, "__module__", None) for function in own] == PLAIN_DECODE
        self._backend = tokenizer.backend_tokenizer if is_plain else None  # what they call, in a quarter of the time
        self.silent_ids = frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)

    def __call__(self, tokens: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=True))
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """Takes the tokens of one request as they come and gives text as soon as it is certain: no half characters, nothing
    that may turn out to begin a stop string.

    A token's text can depend on the token before it (leading spaces, bytes of one character), so every token is decoded
    in a window that starts at the tokens of the piece before: the new text is what the window gained.
    """

    def __init__(self, decoder: Decoder, stop: Sequence[str] = (), *, watched: bool = True) -> None:
        """Not `watched`: nobody needs text before the end, and without stop strings it is decoded once."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._is_piecewise = watched or bool(stop)
        self._window: list[int] = []  # tokens of the last piece, then those whose text is incomplete
        self._num_shown = 0  # tokens of the window whose text has gone on to `_pending`
        self._shown = ""  # their text
        self._pending = ""  # decoded, held back because it may begin a stop string
        self._push_sizes: list[int] = []
        self.num_tokens = 0  # of the answer: none after the one that completes a stop string
        self.stopped = False  # a stop string was found; later tokens change nothing

    def push(self, tokens: list[int], finish_reason: FinishReason | None = None) -> str:
        """New text. With `finish_reason` nothing is held back; after "stop" the last token is a stop id, not text."""
        if tokens:  # an abort's last Output has none: no pass stands behind it
            self._push_sizes.append(len(tokens))
        if self.stopped:
            return ""
        shown = tokens[:-1] if finish_reason == "stop" else tokens
        pieces = []
        for token in shown:
            self.num_tokens += 1
            pieces.append(self._release(self._decode(token)))
            if self.stopped:
                return "".join(pieces)
        self.num_tokens += len(tokens) - len(shown)
        if finish_reason is not None:
            pieces.append(self._release(self._decoder(self._window)[len(self._shown) :], final=True))
        return "".join(pieces)

    def _decode(self, token: int) -> str:
        """Text that `token` completes."""
        if not self._is_piecewise:
            self._window.append(token)
            return ""
        if token in self._decoder.silent_ids:
            return ""
        self._window.append(token)
        text = self._decoder(self._window)
        if text.endswith(INCOMPLETE) or len(text) <= len(self._shown):
            return ""
        piece = text[len(self._shown) :]
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        self._shown = self._decoder(self._window)
        return piece

    def _release(self, piece: str, final: bool = False) -> str:
        """Adds `piece` to the pending text and takes from it what is certain."""
        if not self._stop or not (piece or final):
            return piece
        text = self._pending + piece
        found = find_stop(text, self._stop)
        if found is not None:
            self.stopped = True
            self._pending = ""
            return text[: found[0]]
        held = 0 if final else longest_beginning(text, self._stop)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]

    def cut(self, stats: RequestStats) -> RequestStats:
        """The engine's counts without what it generated after the stop string. Exact for accepted tokens and rounds;
        drafted tokens are taken in proportion to the rounds.

        Where rounds draft differently many, the share can miss what was accepted, which was drafted for certain.
        """
        if self.num_tokens == stats.completion_tokens:
            return stats
        accepted = [0] * len(stats.accepted_by_position)
        num_kept, num_late, start = 0, 0, 0
        for index, size in enumerate(self._push_sizes):
            num_kept += start < self.num_tokens
            num_late += start >= self.num_tokens
            # A round's last token is the target's own; the first push is the prompt pass, which has no draft.
            num_accepted = min(size - 1, self.num_tokens - start) if index else 0
            for position in range(max(num_accepted, 0)):
                accepted[position] += 1
            start += size
        rounds = max(min(stats.rounds - num_late, num_kept - 1), 0)  # of the last round no push may have come yet
        return replace(
            stats,
            completion_tokens=self.num_tokens,
            rounds=rounds,
            drafted_tokens=max(stats.drafted_tokens * rounds // max(stats.rounds, 1), sum(accepted)),
            accepted_by_position=accepted,
        )


def find_stop(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the stop string that ends first in `text`, the longest of those that end there."""
    found = [(text.find(string) + len(string), text.find(string)) for string in stop if string in text]
    if not found:
        return None
    end, start = min(found)
    return start, end


def longest_beginning(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    for length in range(min(max(map(len, stop)) - 1, len(text)), 0, -1):
        tail = text[-length:]
        if any(string.startswith(tail) for string in stop):
            return length
    return 0
