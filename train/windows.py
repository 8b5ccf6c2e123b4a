"""The windows of documents longer than a row: what each holds, and which of its tokens it supervises.

A document of at most `max_length` tokens L is one window. A longer one is cut at L, or split: its first window is its
first L tokens; each later one holds the document's first token, then the last C tokens of the window before as context,
and then up to L - 1 - C new tokens. A window is a document by itself, at positions from 0: the target computes its
states from what it holds. It begins as the text does, since some targets compute nonsense without their first token.

A window supervises its new tokens and, where an answer goes on in it, the last token before them: a round starts there
that drafts the new ones, as it does at an answer's first token. So every supervised token that follows another is the
first drafted one of a round in exactly one window, as it is once in the whole document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from slipstream.models.files.loss_masks import Cut, LossMasks, scan

CONTEXT_SHARE = 4  # a quarter of a later window is context


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """Where the windows of a document lie."""

    max_length: int
    is_split: bool

    @property
    def context(self) -> int:
        """Tokens of a later window before its new ones, besides the document's first."""
        return max(1, self.max_length // CONTEXT_SHARE)

    @property
    def stride(self) -> int:
        """New tokens of a later window; 0: there are no later windows."""
        return max(0, self.max_length - 1 - self.context) if self.is_split else 0

    def count(self, lengths: np.ndarray) -> np.ndarray:
        """Windows of documents of these lengths."""
        beyond = np.maximum(lengths - self.max_length, 0)
        return 1 + (-(-beyond // self.stride) if self.stride else 0 * beyond)

    def number(self, positions: np.ndarray) -> np.ndarray:
        """The window, from 0, in which a document's token at this position is new; -1 if none holds it."""
        beyond = positions - self.max_length
        return np.where(beyond < 0, 0, 1 + beyond // self.stride if self.stride else -1)

    def start(self, numbers: np.ndarray) -> np.ndarray:
        """The position of a window's first new token."""
        return np.where(numbers > 0, self.max_length + (numbers - 1) * self.stride, 0)


@dataclass(frozen=True, slots=True)
class Windows:
    """W windows, those of one document after those of another."""

    layout: WindowLayout
    documents: np.ndarray  # (W,) int64
    starts: np.ndarray  # (W,) int64 position of the first new token: 0 in a document's first window
    lengths: np.ndarray  # (W,) int64 with the context
    num_supervised: np.ndarray  # (W,) int64; 0 if no two are adjacent, since that teaches nothing

    def values(self, window: int, column: Sequence[Any]) -> list[Any]:
        """A window's part of a column, which has a value for each token of its document."""
        start = int(self.starts[window])
        stop = start + int(self.lengths[window])
        if not start:
            return list(column[:stop])
        context = self.layout.context
        return [column[0], *column[start - context : stop - 1 - context]]

    def weights(self, window: int, column: Sequence[Any]) -> list[Any]:
        """A window's part of a loss mask, or of weights in the loss: 0 in the context, but for a root at its end."""
        values = self.values(window, column)
        if not self.starts[window]:
            return values
        context = self.layout.context
        goes_on = bool(values[context + 1])
        return [0] * context + [values[context] if goes_on else 0] + values[context + 1 :]


def measure(dataset: Dataset, layout: WindowLayout) -> tuple[Windows, Cut]:
    """The windows of a split, and what lies beyond the first of each document."""
    parts: list[Windows] = []
    beyond = []
    num_documents = 0
    for masks in scan(dataset):
        parts.append(find_windows(masks, layout, num_documents))
        beyond.append(masks.beyond(layout.max_length))
        num_documents += len(masks.lengths)
    names = ("documents", "starts", "lengths", "num_supervised")
    columns = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return Windows(layout, *columns), Cut.of(layout.max_length, beyond)


def find_windows(masks: LossMasks, layout: WindowLayout, first_document: int) -> Windows:
    """The windows of some documents, which are numbered from `first_document` on."""
    counts = layout.count(masks.lengths)
    documents = np.repeat(np.arange(len(counts)), counts)
    first_windows = np.cumsum(counts) - counts
    starts = layout.start(np.arange(len(documents)) - first_windows[documents])
    is_later = starts > 0
    stops = np.minimum(masks.lengths[documents], starts + np.where(is_later, layout.stride, layout.max_length))
    numbers = layout.number(masks.positions)
    windows = first_windows[masks.documents] + numbers
    supervised = masks.supervised & (masks.positions > 0) & (numbers >= 0)
    follows = supervised & np.append(False, supervised)[:-1]
    goes_on = follows & (numbers > 0) & (masks.positions == layout.start(numbers))
    count = np.bincount(windows[supervised], minlength=len(documents))
    count += np.bincount(windows[goes_on], minlength=len(documents))
    count[np.bincount(windows[follows], minlength=len(documents)) == 0] = 0
    return Windows(
        layout=layout,
        documents=first_document + documents,
        starts=starts,
        lengths=stops - starts + np.where(is_later, 1 + layout.context, 0),
        num_supervised=count,
    )
