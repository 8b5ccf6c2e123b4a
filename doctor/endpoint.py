"""Asks a running server the same conversations: how much of the draft it accepts, and whether it reads the same prompts
and gives the same answers. Ours tells its rounds in each answer; vLLM and SGLang, by what their documentation says, in
answers or by their counters."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.doctor.texts import Answered
from slipstream.serve.load import Client, LoadResult, send_all
from slipstream.serve.measure.server_counts import Kind, RoundCounts, kind_of, read_counts

AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server's answers to the conversations, `num_prompts` in number."""

    url: str
    server: Kind
    num_prompts: int
    accept_length: float | None  # None: it tells no rounds
    depth: float | None  # drafted tokens that a round verifies, mean or else most; None: it does not tell
    other_prompts: int  # prompts that have another number of tokens there
    other_answers: int  # answers whose text differs

    @property
    def is_tested(self) -> bool:
        """Whether the figures of its kind were compared with a real server."""
        return self.server == "slipstream"


def ask_endpoint(
    url: str, answered: Sequence[Answered], texts: Sequence[str], max_tokens: int, api_key: str | None = None
) -> Endpoint:
    """Asks the conversations of `answered` greedily. `texts`: the answers here.

    Raises ValueError if a request fails.
    """

    async def ask() -> tuple[LoadResult, str, str]:
        async with _client(url, api_key) as client:
            before = await client.read("/metrics") or ""
            fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
            if kind_of(before) == "sglang":
                fields["return_meta_info"] = True
            tasks = [(list(answer.conversation.messages), fields) for answer in answered]
            result = await send_all(client, tasks, AT_ONCE, progress="endpoint")
            return result, before, await client.read("/metrics") or ""

    result, before, after = asyncio.run(ask())
    if result.errors:
        raise ValueError(f"endpoint {url} failed {len(result.errors)} requests, the first with: {result.errors[0]}")
    counts = _counted(before, after)
    rounds = result.rounds or counts.rounds
    decoded = result.decoded_tokens if result.rounds else counts.decoded_tokens
    drafted = sum(answer.drafted_tokens for answer in result.answers)
    places = len(result.accept_rate_by_position) if result.rounds else len(counts.accepted_by_position)
    pairs = list(zip(answered, result.answers, texts, strict=True))
    return Endpoint(
        url=url.rstrip("/").removesuffix("/v1"),
        server=kind_of(before),
        num_prompts=len(pairs),
        accept_length=decoded / rounds if rounds else None,
        depth=drafted / rounds if drafted else places or None,
        other_prompts=sum(remote.prompt_tokens not in (0, len(local.prompt)) for local, remote, _ in pairs),
        other_answers=sum((remote.reasoning + remote.text).strip() != text.strip() for _, remote, text in pairs),
    )


def check_endpoint(url: str, api_key: str | None = None) -> None:
    """Raises ValueError unless a server answers."""

    async def enter() -> None:
        async with _client(url, api_key):
            pass

    try:
        asyncio.run(enter())
    except ValueError as error:
        raise ValueError(f"endpoint is {url}: {error}") from error


def _client(url: str, api_key: str | None) -> Client:
    return Client(url, connections=AT_ONCE, api_key=api_key)


def _counted(before: str, after: str) -> RoundCounts:
    """Returns a server's counts between two texts of its /metrics, other clients' requests of that time included."""
    then = read_counts(before) or RoundCounts()
    now = read_counts(after)
    return RoundCounts() if now is None else now.since(then)
