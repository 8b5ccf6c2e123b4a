"""The C++ core of the n-gram drafter (csrc/): drafts trees of the tokens that followed a request's last tokens before,
in its own text and in a trie of other texts. Methods release the GIL and may be called from any thread.

B requests, K tokens gained, N nodes per request (root included). Token ids are 0..2^21 - 1.
"""

from os import PathLike
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

class Stats(TypedDict):
    nodes: int
    bytes: int  # of the trie: reserved in full, committed as it fills
    context_bytes: int  # of the running requests' own texts
    inserted_tokens: int
    dropped_tokens: int  # the queue was full
    waiting_tokens: int
    evicted_nodes: int
    drafted_tokens: int
    match_lengths: list[int]  # [length]: proposals by length of the longest match; [0]: without a match

class NgramCore:
    def __init__(
        self,
        *,
        rows: int = 64,
        capacity: int = 1_000_000,
        branch_length: int = 18,
        min_match: int = 1,
        max_match: int = 12,
        breadth: int = 4,
        queue_tokens: int = 65_536,
    ) -> None:
        """Raises ValueError with the option, its value and its range.

        rows: requests at the same time. capacity: nodes of the trie, 57 to 62 bytes each. branch_length: tokens that a
        branch may share. min_match, max_match: how many last tokens are looked up. breadth: most children of a drafted
        node; 1 drafts chains. queue_tokens: tokens that may wait for insertion.
        """

    def admit(self, row: int, tokens: ArrayLike, namespace: str = "", common: str | None = None) -> None:
        """A request starts in slot `row` with these tokens (S,). It sees and feeds the texts of its namespace; the last
        branch_length tokens of the prompt are inserted for others. It sees those of the namespace `common`, too, if
        that holds any, and does not feed it."""

    def advance(
        self,
        rows: ArrayLike,
        emitted: ArrayLike,
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32],
        scores: NDArray[np.float32],
        matches: NDArray[np.int32],
        foreign: NDArray[np.bool_],
    ) -> list[int]:
        """Requests `rows` (B,) have gained what a step has `emitted` (B, 1 + K), the number of tokens first, and get a
        tree each, written into the caller's arrays. Returns how many nodes each tree has.

        tokens, parents, scores (B, N) with N <= 64: as in serve/runner/batch.py's Proposal, the root being the
        request's last token. A score is the share that the counts of what followed earlier matches leave to the node's
        path.
        matches (B,): length of the longest match, 0 where nothing is drafted.
        foreign (B, N): whether a node is drawn from other requests' texts alone: what its path spells does not follow
        the last token anywhere in the request's text, as far as that was looked up. Nobody may show such a token.

        The request itself sees its tokens at once; others when it has gained more or has ended, since only then is it
        certain that it has not ended within them, and when the inserting thread has handled them, within a step or
        two; it sleeps at most 4 ms. Tokens that do not fit into the queue are dropped and counted.
        """

    def release(self, row: int, num_tokens: int | None = None) -> None:
        """The request in slot `row` ended with num_tokens tokens, prompt included; None: with all. The core forgets
        tokens beyond them."""

    def insert(self, tokens: ArrayLike, namespace: str = "") -> None:
        """Inserts a text (S,) and returns when it is visible."""

    def flush(self) -> None:
        """Waits until all queued tokens are inserted."""

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the trie into a file, which holds a part of it after a failure (models/files/atomic.py). Steps wait
        while the trie is copied. Raises OSError."""

    def load(self, path: str | PathLike[str], vocab_size: int = ...) -> None:
        """Replaces the trie; its capacity and branch_length must be large enough. No request may be running.

        Raises OSError, and ValueError naming the file if it is damaged, does not fit, has tokens that a target of
        vocab_size does not have (default: any), or is loaded while requests run.
        """

    def stats(self) -> Stats: ...
    def branches(self) -> list[tuple[str, list[int], list[int]]]:
        """(namespace, tokens, times used) of every branch, least recently used first.

        The last tokens, which only one text has, have no number.
        """

    def check(self) -> None:
        """Walks the whole trie; AssertionError where it is inconsistent."""
