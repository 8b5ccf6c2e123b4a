"""Chooses the replica that computes a request: the holder of the longest beginning of its prompt, unless others have
much less to do. Plain data: neither Ray nor HTTP.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

PAGE_TOKENS = 16  # of a key; the pages of the KV cache by default
MOST_KEYS = 2**18  # of the table, some 100 bytes each; they stand for four million tokens of prompts
MOST_NEWS = 2048  # prompts that one ingress tells the others of at once
LEAST_SHARE = 0.1  # of a prompt that a replica must hold to be preferred
SLACK = 4  # open requests that the preferred replica may have above twice those of the idlest


def page_keys(prompt: Sequence[int], namespace: str) -> list[int]:
    """Returns a key for each whole page of a prompt: a hash of all tokens up to its end and of `namespace`, the salt
    of a call, which keeps the caches of its clients apart."""
    key = xxh3_64_intdigest(namespace.encode())
    keys = []
    for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS):
        page = array("I", prompt[end - PAGE_TOKENS : end])
        key = xxh3_64_intdigest(page.tobytes(), seed=key)
        keys.append(key)
    return keys


class Placed(NamedTuple):
    """A prompt that was sent to a replica."""

    replica: str
    keys: list[int]


class PrefixTable:
    """The beginnings of prompts that replicas computed lately. It may be wrong: a replica may have given up pages.

    Each ingress has one, and tells the others what it added (`take_news`, `learn`), so that a conversation may come in
    anywhere.
    """

    def __init__(self, limit: int = MOST_KEYS) -> None:
        self._limit = limit
        self._news: deque[Placed] = deque(maxlen=MOST_NEWS)
        self._holders: dict[int, frozenset[str]] = {}  # by key, the least recently used first

    def add(self, keys: list[int], replica: str) -> None:
        """Notes that `replica` computes a prompt. Its last pages are forgotten before the pages that they follow."""
        self._news.append(Placed(replica, keys))
        self.learn([Placed(replica, keys)])

    def learn(self, news: Iterable[Placed]) -> None:
        """Takes what another ingress added."""
        for replica, keys in news:
            for key in reversed(keys[: self._limit]):
                self._holders[key] = self._holders.pop(key, frozenset()) | {replica}
            while len(self._holders) > self._limit:
                del self._holders[next(iter(self._holders))]

    def take_news(self) -> list[Placed]:
        """Returns what was added since the last call, or the last of it."""
        news = list(self._news)
        self._news.clear()
        return news

    def matches(self, keys: Sequence[int]) -> dict[str, int]:
        """Returns how many pages of a prompt, from its beginning, each replica holds that holds any."""
        depths: dict[str, int] = {}
        for depth, key in enumerate(keys):
            holders = [name for name in self._holders.get(key, ()) if depths.get(name, 0) == depth]
            if not holders:
                break
            depths.update(dict.fromkeys(holders, depth + 1))
        return depths

    def forget(self, replica: str) -> None:
        """Drops a replica that has ended."""
        for key, holders in list(self._holders.items()):
            if replica in holders:
                self._holders[key] = holders - {replica}
                if holders == {replica}:
                    del self._holders[key]

    def __len__(self) -> int:
        return len(self._holders)


def rank_replicas(matches: Mapping[str, int], num_pages: int, loads: Mapping[str, int], draw: Random) -> list[str]:
    """Returns the replicas in the order in which a request should be offered to them.

    `matches`: pages of the prompt by replica, of `num_pages`; `loads`: open requests by replica that takes requests.
    Without a holder that is worth its queue, the first is the less busy of two drawn ones ("power of two choices",
    Mitzenmacher 2001), since exact loads are late and the idlest of all would get everybody's next request.
    """
    names = sorted(loads)
    if len(names) < 2:
        return names
    longest = max((matches.get(name, 0) for name in names), default=0)
    pair = draw.sample(names, 2)
    first = min(pair, key=loads.__getitem__)
    if longest > 0 and longest >= LEAST_SHARE * num_pages:
        holders = [name for name in names if matches.get(name, 0) == longest]
        holder = min(draw.sample(holders, len(holders)), key=loads.__getitem__)
        if loads[holder] <= 2 * min(loads.values()) + SLACK:
            first = holder
    return [first, *sorted((name for name in names if name != first), key=loads.__getitem__)]
