"""Drafts of every variant that know some of the target's answers, and what they should propose: for tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.kernels.sampling import noise_key
from slipstream.serve.request import Request
from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.random_drafts import dflash_states, save_random_dflash
from slipstream.tests.serve.engine_runs import make_request, random_prompt, texts_of

MakeDraft = Callable[[str, str], Path]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"sliding_window": 6, "windowed_layers": (0, 1)},
    "one window, few tokens, one feature": {
        "sliding_window": 20,
        "windowed_layers": (1,),
        "draft_vocab_size": 100,
        "feature_layers": (2,),
    },
    "from the anchor": {"sample_from_anchor": True},
    "bias, three layers": {"attention_bias": True, "num_layers": 3, "feature_layers": (0, 1, 2, 4)},
}


def requests_of(temperature: float = 0.7, lengths: tuple[int, ...] = (1, 9, 33), **params: Any) -> list[Request]:
    return [
        make_request(str(length), random_prompt(length, length), temperature=temperature, seed=length, **params)
        for length in lengths
    ]


def variants_maker(make_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> MakeDraft:
    """(family, variant) -> folder of a draft that knows the first two answers to `requests_of`."""
    folders: dict[tuple[str, str], Path] = {}

    def make(family: str, variant: str) -> Path:
        if (family, variant) not in folders:
            target, folder = make_target(family), tmp_path_factory.mktemp("drafts") / family
            save_random_dflash(target, folder, texts_of(target, requests_of()[:2]), **VARIANTS[variant])
            folders[family, variant] = folder
        return folders[family, variant]

    return make


class Oracle:
    """What the draft should propose behind any text. `slots`: of its blocks; else as many as a round needs."""

    def __init__(self, target: Path, draft: Path, slots: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        weights = (layer.weight.detach() for layer in (self.model.get_input_embeddings(), self.model.lm_head))
        self.naive = NaiveDFlash(draft, *weights)
        self.layers = self.naive.config["dflash_config"]["target_layer_ids"]
        self.slots = slots

    @torch.no_grad()
    def propose(self, tokens: list[int], request: Request, depth: int) -> list[int]:
        states = dflash_states(self.model, tokens[:-1])
        features = torch.cat([states[layer] for layer in self.layers], dim=-1)
        slots = self.slots or (depth if self.naive.config.get("sample_from_anchor") else depth + 1)
        key = noise_key(request.seed, request.choice)
        return self.naive.chain(features, tokens, depth + 1, slots, key, request.params.temperature)
