"""Held-out answers with the parts that a draft had right, as records of metrics.jsonl.

    {"step": 400, "sample": {"prompt": "...", "answer": "...", "spans": [[0, 12], [15, 20]]}}

`spans` are ascending, disjoint ranges [start, end) of characters of `answer`: accepted draft tokens. The target
produced the rest. Readers of metrics skip records with `sample`; several may have the same step.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a report of a run imports no torch
    from slipstream.train.acceptance import Walk
    from slipstream.train.batches import Batch

PROMPT_TOKENS = 256  # before the answer
ANSWER_TOKENS = 384
NUM_SAMPLES = 4  # of an evaluation


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    answer: str
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Sample":
        """Raises ValueError for a malformed record."""
        try:
            values = record["sample"]
            spans = tuple((int(start), int(end)) for start, end in values["spans"])
            return cls(str(values["prompt"]), str(values["answer"]), spans)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"metrics.jsonl, step {record.get('step')}: no readable sample ({error})") from error

    def record(self, step: int) -> dict[str, Any]:
        return {"step": step, "sample": asdict(self)}

    def html(self) -> str:
        """The answer with what was drafted and accepted in <mark>."""
        pieces = []
        done = 0
        for start, end in self.spans:
            pieces.append(f"{escape(self.answer[done:start])}<mark>{escape(self.answer[start:end])}</mark>")
            done = end
        return "".join((*pieces, escape(self.answer[done:])))

    @property
    def accepted_share(self) -> float:
        """Share of the answer's characters that were drafted."""
        return sum(end - start for start, end in self.spans) / max(1, len(self.answer))


class SampleAnswers:
    """Keeps the first `limit` answers of an evaluation, one of each document."""

    def __init__(self, tokenizer: Any, limit: int = NUM_SAMPLES) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.kept: list[Sample] = []

    def add(self, batch: "Batch", walks: "Iterable[Walk]") -> None:
        """`walks` of the batch, which lies on the host."""
        tokens = batch.tokens.flatten().tolist()
        documents = batch.documents.flatten().tolist()
        document = -1
        for walk in walks:
            if len(self.kept) == self.limit:
                return
            if documents[walk.first] != document:
                document = documents[walk.first]
                self.kept.append(self.sample(tokens, documents.index(document), walk))

    def take(self) -> list[Sample]:
        """Returns the samples of the evaluation that has ended, and forgets them."""
        samples = self.kept
        self.kept = []
        return samples

    def sample(self, tokens: list[int], start: int, walk: "Walk") -> Sample:
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
        """Characters of `text`, the whole answer's, in its first `count` tokens; an incomplete one does not count."""
        return len(os.path.commonprefix([self.decode(answer[:count]), text]))

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
