"""What the lossless tests ask for, and drafts that know some of the answers."""

from pathlib import Path
from typing import Any

from slipstream.serve.request import Request
from slipstream.tests.random_drafts import save_random_dflash, save_random_eagle
from slipstream.tests.serve.engine_runs import SAMPLINGS, make_request, random_prompt, texts_of


def uneven_requests(sampling: dict[str, Any]) -> list[Request]:
    """Eight, of all lengths: shorter and longer than a page, ending at different times."""
    lengths = ((1, 30), (5, 3), (15, 24), (16, 1), (17, 17), (33, 12), (48, 30), (70, 8))
    return [
        make_request(f"{length}+{answer}", random_prompt(length, length), max_tokens=answer, seed=length, **sampling)
        for length, answer in lengths
    ]


def ending_requests() -> list[Request]:
    return [make_request(str(seed), random_prompt(8, seed), temperature=1.0, seed=seed) for seed in range(8)]


def known_texts(target: Path) -> list[tuple[int, list[int]]]:
    """Some of the answers that these tests ask for."""
    asked = [ending_requests(), *(uneven_requests(sampling) for sampling in SAMPLINGS.values())]
    return [text for requests in asked for text in texts_of(target, requests)]


def save_dflash(target: Path, folder: Path) -> None:
    """With windows and a reduced vocabulary."""
    texts = known_texts(target)
    save_random_dflash(target, folder, texts, sliding_window=24, windowed_layers=(0,), draft_vocab_size=100)


def save_eagle(target: Path, folder: Path) -> None:
    save_random_eagle(target, folder, known_texts(target), draft_vocab_size=100)
