"""Held-out answers with the parts that a draft had right, as records of metrics.jsonl.

    {"step": 400, "sample": {"prompt": "...", "answer": "...", "spans": [[0, 12], [15, 20]]}}

`spans` are ranges of characters of `answer`, each from its first to behind its last, ascending and apart: text that was
drafted and accepted. The rest came from the target itself. Such a record holds no numbers, so whoever reads curves
skips those with `sample`; several may have the same step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    answer: str
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        end = 0
        for span in self.spans:
            if not end <= span[0] < span[1] <= len(self.answer):
                raise ValueError(
                    f"sample span {list(span)} does not follow {end} within an answer of {len(self.answer)} "
                    "characters; spans are ascending, apart and not empty"
                )
            end = span[1]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Sample":
        """Raises ValueError for a record of another shape."""
        try:
            values = record["sample"]
            spans = tuple((int(start), int(end)) for start, end in values["spans"])
            return cls(str(values["prompt"]), str(values["answer"]), spans)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"metrics.jsonl, step {record.get('step')}: no readable sample ({error})") from error

    def record(self, step: int) -> dict[str, Any]:
        return {"step": step, "sample": asdict(self)}

    def parts(self) -> Iterator[tuple[str, bool]]:
        """The answer in pieces, and whether each was drafted."""
        done = 0
        for start, end in self.spans:
            yield self.answer[done:start], False
            yield self.answer[start:end], True
            done = end
        yield self.answer[done:], False

    def html(self) -> str:
        """The answer with what was drafted and accepted in <mark>."""
        return "".join(f"<mark>{escape(text)}</mark>" if drafted else escape(text) for text, drafted in self.parts())

    @property
    def accepted_share(self) -> float:
        """Share of the answer's characters that were drafted."""
        return sum(end - start for start, end in self.spans) / max(1, len(self.answer))
