"""Measures the regret of greedy answers: how far their tokens' logits lie below the best, by transformers in fp32.

    python bench/serving.py --draft CKPT --prompts gsm8k --answers answers.jsonl     # offline: as token ids
    python bench/regret.py --answers answers.jsonl --target TARGET

Two correct answers to one prompt may differ: between two nearly equal tokens rounding in bf16 decides, which depends on
how many requests share a pass. A fault shows as tokens far from the best. For comparison the same is measured of
transformers' own choices in the target's dtype. Prints one JSON line per draft and concurrency.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from slipstream.bench.lines import Lines, origin
from slipstream.config import run
from slipstream.models.files.checkpoint import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretConfig:
    """How far answers lie below the best."""

    answers: str
    """File that bench/serving.py wrote with --answers."""
    target: str
    """Target checkpoint: that of the answers, or one that computes the same."""
    dtype: str = "auto"
    """Dtype in which transformers chooses tokens for comparison; auto: the checkpoint's."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where transformers runs."""
    output: str | None = None
    """File to append the JSON lines to."""


@dataclass(slots=True)
class Answer:
    """A prompt and its answer as token ids, and their regret."""

    draft: str
    concurrency: int
    prompt: list[int]
    tokens: list[int]
    regret: Tensor = field(default_factory=lambda: torch.empty(0))  # [tokens] of the answer's tokens
    reference_regret: Tensor = field(default_factory=lambda: torch.empty(0))  # [tokens] of transformers' own choices


def read_answers(path: str) -> list[Answer]:
    """Raises ValueError for answers that were sampled."""
    answers = []
    with open(path) as lines:
        for number, row in enumerate(map(json.loads, lines), 1):
            if row["temperature"] != 0:
                raise ValueError(
                    f"{path}:{number}: temperature is {row['temperature']}; only greedy answers can be measured"
                )
            answers.append(Answer(row["draft"], row["concurrency"], row["prompt"], row["answer"]))
    return answers


@torch.inference_mode()
def read_with(path: str, config: RegretConfig, dtype: str, texts: Sequence[list[Answer]]) -> Iterator[Tensor]:
    """For each of `texts`, equal answers to one prompt, the logits [tokens, vocabulary] in fp32 from which its tokens
    should have been taken."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(config.device).eval()
    for answer, *_ in tqdm(texts, desc=str(model.dtype).removeprefix("torch."), unit="answer"):
        ids = torch.tensor([answer.prompt + answer.tokens], device=config.device)
        yield model(ids, logits_to_keep=len(answer.tokens) + 1).logits[0, :-1].float()


def measure(answers: Sequence[Answer], config: RegretConfig) -> None:
    """Fills in the regret of each answer. Only one model is in memory at a time."""
    path, same = str(resolve(config.target)), defaultdict[tuple[tuple[int, ...], ...], list[Answer]](list)
    for answer in answers:
        same[tuple(answer.prompt), tuple(answer.tokens)].append(answer)
    texts = list(same.values())
    references = [logits.argmax(-1) for logits in read_with(path, config, config.dtype, texts)]
    exact = read_with(path, config, "float32", texts)
    for text, reference, logits in zip(texts, references, exact, strict=True):
        best = logits.amax(-1)
        regret = (best - taken(logits, torch.tensor(text[0].tokens, device=best.device))).cpu()
        reference_regret = (best - taken(logits, reference)).cpu()
        for answer in text:
            answer.regret, answer.reference_regret = regret, reference_regret


def taken(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens[:, None])[:, 0]


def figures(answers: Iterable[Answer]) -> Iterator[dict[str, Any]]:
    """One line per draft and concurrency, in the file's order."""
    for (draft, concurrency), group in groupby(answers, key=lambda answer: (answer.draft, answer.concurrency)):
        members = list(group)
        regret, reference = (torch.cat([getattr(one, n) for one in members]) for n in ("regret", "reference_regret"))
        yield {
            "draft": draft,
            "concurrency": concurrency,
            "answers": len(members),
            "tokens": len(regret),
            "not_best": int((regret > 0).sum()),
            "largest_regret": round(float(regret.max()), 4),
            "reference_not_best": int((reference > 0).sum()),
            "reference_largest_regret": round(float(reference.max()), 4),
        }


def regret(config: RegretConfig) -> None:
    answers = read_answers(config.answers)
    measure(answers, config)
    where = origin("regret", torch.device(config.device).type)
    lines = Lines(config.output, {**where, "target": config.target})
    for line in figures(answers):
        lines.add(line)
    lines.print()


def main(argv: Sequence[str] | None = None) -> None:
    run(regret, RegretConfig, argv, "bench/regret.py")


if __name__ == "__main__":
    main()
