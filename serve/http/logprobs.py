"""Log-probabilities in the forms of OpenAI and vLLM."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from slipstream.serve.detokenize import TokenTexts
from slipstream.serve.request import Logprobs

LEAST = -9999.0  # OpenAI's number for next to impossible tokens; JSON has no infinity


class Scored(NamedTuple):
    """A token with its log-probability, and the likeliest tokens at its place."""

    token: int
    start: int  # characters of the text before it
    logprob: float | None  # None: of the first token of a prompt
    rank: int
    top: Sequence[float]
    top_ids: Sequence[int]


class Echo(NamedTuple):
    """A prompt that is repeated before its answer."""

    text: str
    tokens: Sequence[int]
    starts: Sequence[int]


def scored_tokens(tokens: Sequence[int], starts: Sequence[int], logprobs: Logprobs) -> list[Scored]:
    rows = zip(tokens, starts, logprobs.tokens, logprobs.ranks, logprobs.top, logprobs.top_ids, strict=True)
    return [Scored(*row) for row in rows]


def scored_prompt(tokens: Sequence[int], starts: Sequence[int], logprobs: Logprobs) -> list[Scored]:
    return [Scored(tokens[0], starts[0], None, 0, (), ()), *scored_tokens(tokens[1:], starts[1:], logprobs)]


def chat_logprobs(entries: Iterable[Scored], k: int, texts: TokenTexts) -> dict[str, Any]:
    """Returns OpenAI's log-probabilities of a chat answer. `k`: number of likeliest tokens."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts(token), "logprob": finite(logprob), "bytes": list(texts.bytes_of(token))}

    content = [
        {
            **described(entry.token, entry.logprob or 0.0),
            "top_logprobs": [described(*pair) for pair in zip(entry.top_ids[:k], entry.top[:k], strict=True)],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[Scored], k: int, texts: TokenTexts) -> dict[str, Any]:
    """Returns OpenAI's log-probabilities of a completion: the likeliest tokens by text, and the token itself."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        top: dict[str, float] = {}
        for token, logprob in with_own(entry, k):
            top.setdefault(texts(token), finite(logprob))
        tops.append(None if entry.logprob is None else top)
    return {
        "tokens": [texts(entry.token) for entry in entries],
        "token_logprobs": [None if entry.logprob is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": [entry.start for entry in entries],
    }


def prompt_logprobs(entries: Iterable[Scored], k: int, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """Returns vLLM's log-probabilities of a prompt, by token id."""

    def described(entry: Scored) -> dict[str, Any]:
        ranks = {token: rank for rank, token in enumerate(entry.top_ids[:k], 1)}
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": ranks.get(token, entry.rank),
                "decoded_token": texts(token),
            }
            for token, logprob in with_own(entry, k)
        }

    return [None if entry.logprob is None else described(entry) for entry in entries]


def with_own(entry: Scored, k: int) -> list[tuple[int, float]]:
    """Returns the k likeliest tokens at a token's place, and the token itself if it is not among them."""
    pairs = list(zip(entry.top_ids[:k], entry.top[:k], strict=True))
    if entry.logprob is not None and entry.token not in entry.top_ids[:k]:
        pairs.append((entry.token, entry.logprob))
    return pairs


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
