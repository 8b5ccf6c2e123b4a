"""Log-probabilities in the forms of OpenAI and vLLM."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from slipstream.serve.detokenize import TokenTexts
from slipstream.serve.request import Logprobs

LEAST = -9999.0  # OpenAI's number for what is next to impossible; JSON has no infinity


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
    columns = tokens, starts, logprobs.tokens, logprobs.ranks, logprobs.top, logprobs.top_ids
    return [Scored(*column) for column in zip(*columns, strict=True)]


def scored_prompt(tokens: Sequence[int], starts: Sequence[int], logprobs: Logprobs) -> list[Scored]:
    return [Scored(tokens[0], starts[0], None, 0, (), ()), *scored_tokens(tokens[1:], starts[1:], logprobs)]


def chat_logprobs(entries: Iterable[Scored], k: int, texts: TokenTexts) -> dict[str, Any]:
    """OpenAI's, of a chat answer; `k`: how many of the likeliest tokens."""

    def described(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts(token), "logprob": finite(logprob), "bytes": list(texts.bytes_of(token))}

    content = [
        {
            **described(one.token, one.logprob or 0.0),
            "top_logprobs": [described(*pair) for pair in zip(one.top_ids[:k], one.top[:k], strict=True)],
        }
        for one in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[Scored], k: int, texts: TokenTexts) -> dict[str, Any]:
    """OpenAI's, of a completion. The likeliest tokens come by their text, and the token itself with them."""
    tops: list[dict[str, float] | None] = []
    for one in entries:
        top: dict[str, float] = {}
        for token, logprob in with_own(one, k):
            top.setdefault(texts(token), finite(logprob))
        tops.append(None if one.logprob is None else top)
    return {
        "tokens": [texts(one.token) for one in entries],
        "token_logprobs": [None if one.logprob is None else finite(one.logprob) for one in entries],
        "top_logprobs": tops,
        "text_offset": [one.start for one in entries],
    }


def prompt_logprobs(entries: Iterable[Scored], k: int, texts: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's: by token id."""

    def described(one: Scored) -> dict[str, Any]:
        ranks = {token: rank for rank, token in enumerate(one.top_ids[:k], 1)}
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": ranks.get(token, one.rank),
                "decoded_token": texts(token),
            }
            for token, logprob in with_own(one, k)
        }

    return [None if one.logprob is None else described(one) for one in entries]


def with_own(one: Scored, k: int) -> list[tuple[int, float]]:
    """The k likeliest tokens at a token's place, and the token itself if it is not among them."""
    pairs = list(zip(one.top_ids[:k], one.top[:k], strict=True))
    if one.logprob is not None and one.token not in one.top_ids[:k]:
        pairs.append((one.token, one.logprob))
    return pairs


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
