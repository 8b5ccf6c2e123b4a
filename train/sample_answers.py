"""Held-out answers as an evaluation walked them -> samples: text, and its spans that were drafted and accepted."""

import os
from collections.abc import Iterable
from typing import Any

from slipstream.train.acceptance import Walk
from slipstream.train.batches import Batch
from slipstream.train.samples import Sample

PROMPT_TOKENS = 256  # before the answer
ANSWER_TOKENS = 384


class SampleAnswers:
    """Keeps the first `limit` answers of an evaluation, one of each document."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.kept: list[Sample] = []

    def add(self, batch: Batch, walks: Iterable[Walk]) -> None:
        """`walks` of the batch, which lies on the host."""
        tokens, documents = batch.tokens.flatten().tolist(), batch.documents.flatten().tolist()
        shown = -1
        for walk in walks:
            if len(self.kept) == self.limit:
                return
            if documents[walk.first] != shown:
                shown = documents[walk.first]
                self.kept.append(self.sample(tokens, documents.index(shown), walk))

    def take(self) -> list[Sample]:
        """Those of the evaluation that has ended."""
        kept, self.kept = self.kept, []
        return kept

    def sample(self, tokens: list[int], start: int, walk: Walk) -> Sample:
        """`start`: the first token of the answer's document."""
        end = min(walk.last + 1, walk.first + ANSWER_TOKENS)
        answer = tokens[walk.first : end]
        text = self.decode(answer)
        spans: list[tuple[int, int]] = []
        for root, num_accepted in walk.rounds:
            first = root + 1 - walk.first
            span = self.offset(answer, first, text), self.offset(answer, first + num_accepted, text)
            if span[0] < span[1]:
                spans.append(span)
        prompt = self.decode(tokens[max(start, walk.first - PROMPT_TOKENS) : walk.first])
        return Sample(prompt, text, tuple(spans))

    def offset(self, answer: list[int], count: int, text: str) -> int:
        """Characters of `text`, the whole answer's, in its first `count` tokens; a part of one does not count."""
        return len(os.path.commonprefix([self.decode(answer[:count]), text]))

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
