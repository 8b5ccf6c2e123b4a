"""Requests of the lossless tests, and drafts that know some of the answers."""

from pathlib import Path
from typing import Any

from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.serve.request import Request
from slipstream.tests.random_drafts import save_random_dflash, save_random_eagle
from slipstream.tests.serve.engine_runs import SAMPLINGS, make_request, random_prompt, texts_of


def uneven_requests(sampling: dict[str, Any], longest: int = 30) -> list[Request]:
    """Eight, of all lengths: shorter and longer than a page, ending at different times."""
    return [
        make_request(
            f"{length}+{answer}",
            random_prompt(length, length),
            max_tokens=min(answer, longest),
            seed=length,
            **sampling,
        )
        for length, answer in ((1, 30), (5, 3), (15, 24), (16, 1), (17, 17), (33, 12), (48, 30), (70, 8))
    ]


def ending_requests() -> list[Request]:
    return [make_request(str(seed), random_prompt(8, seed), temperature=1.0, seed=seed) for seed in range(8)]


def known_texts(target: Path) -> list[tuple[int, list[int]]]:
    """Some of the answers that these tests ask for."""
    mixes = [ending_requests(), *(uneven_requests(sampling) for sampling in SAMPLINGS.values())]
    return [text for requests in mixes for text in texts_of(target, requests, device="cpu")]


def save_dflash(target: Path, folder: Path):
    """Saves a draft with windows and a reduced vocabulary."""
    texts = known_texts(target)
    save_random_dflash(target, folder, texts, sliding_window=24, windowed_layers=(0,), draft_vocab_size=100)


def save_dflash2(target: Path, folder: Path):
    """Saves a draft with a window that slots of a block see through, and a reduced vocabulary."""
    window = {"sliding_window": 24, "windowed_layers": (0,), "sliding_window_non_causal": True}
    joined = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
    save_random_dflash(target, folder, known_texts(target), draft_vocab_size=100, **window, **joined)


def save_dspark(target: Path, folder: Path):
    heads = {"markov_rank": 8, "markov_head_type": "gated", "confidence_head": True, "sample_from_anchor": True}
    save_random_dflash(target, folder, known_texts(target), **heads)


def save_lilicorr(target: Path, folder: Path):
    """Few candidates, since a random scorer chooses at random; fewer would hold too few sampled tokens."""
    scorer = LiLiCorrConfig(candidate_topk=4, hidden_size=32, num_heads=2, factor_dim=16)
    save_random_dflash(target, folder, known_texts(target), lilicorr=scorer)


def save_eagle(target: Path, folder: Path):
    save_random_eagle(target, folder, known_texts(target), draft_vocab_size=100)
