"""States kept beside KV are those of the target, whatever drafter, chunks, preemptions and prefix hits there were."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models.targets.frozen import FrozenTarget, load_frozen_target
from slipstream.serve.engine.scheduler import Sequence
from slipstream.serve.request import Request
from slipstream.tests.pairwise import gate_of
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import (
    build_engine,
    make_request,
    plain_answers,
    random_prompt,
    run,
    serve_traffic,
)
from slipstream.tests.serve.known_answers import save_dflash
from slipstream.tests.sources import ROOT

CPU = torch.device("cpu")
LAYERS = (3, 0, 4)  # the last: after the final norm
DRAFTS: dict[str, Callable[[Path, Path], Any] | None] = {
    "none": None,
    "ngram": None,
    "eagle3": lambda target, folder: save_random_draft(target, folder, draft_vocab_size=100),
    "dflash": save_dflash,
}


class Watch:
    """Compares what an engine gives with the target's states of the same text."""

    def __init__(self, target: Path):
        self.target: FrozenTarget = load_frozen_target(target, LAYERS, CPU)
        self.texts: list[list[int]] = []

    def __call__(self, sequence: Sequence, read: Callable[[int], Tensor]):
        tokens = sequence.tokens
        states = read(len(tokens))
        assert len(states) <= len(tokens) - 1
        if not len(states):
            return  # aborted before it began
        assert torch.equal(read(len(states) // 2), states[: len(states) // 2])
        self.texts.append(tokens)
        text = torch.tensor([tokens[: len(states)]])
        expected, _ = self.target.aux_states(text, torch.arange(len(states))[None])
        expected = expected[0].unflatten(1, (len(LAYERS), -1))
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def kinds() -> dict[str, Request]:
    shared = random_prompt(40, 1)
    prompts = {"short": random_prompt(3, 2), "long": random_prompt(70, 3), "a": [*shared, 5], "b": [*shared, 9, 11]}
    sampling = {"greedy": 0.0, "sampled": 1.0}
    return {
        f"{name} {how}": make_request(f"{name} {how}", prompt, temperature=temperature)
        for name, prompt in prompts.items()
        for how, temperature in sampling.items()
    }


@pytest.mark.parametrize(
    ("name", "family"),
    gate_of([*((name, "qwen3") for name in DRAFTS), ("ngram", "gemma3")], [("eagle3", "qwen3"), ("ngram", "gemma3")]),
)
def test_states_are_those_of_the_target(name, family, make_target, tmp_path):
    """In a cache that preempts, with chunks, shared prefixes and aborts; of a target with windows, too."""
    target = make_target(family)
    make = DRAFTS[name]
    draft = name
    if make is not None:
        draft = tmp_path / "draft"
        make(target, draft)
    options = {"max_running": 4, "kv_cache_tokens": 192, "prefill_budget": 32, "max_model_len": 128}
    engine = build_engine(target, draft, keep_states=LAYERS, **options)
    watch = engine.on_states = Watch(target)
    expected = plain_answers(target, list(kinds().values()))
    serve_traffic(engine, kinds(), expected, random.Random(4), lambda number: number < 40, most_open=6)
    assert len(watch.texts) > 30


def test_states_of_recurrent_layers():
    """Later turns find earlier ones in the prefix cache."""
    target = ROOT / "assets" / "tiny-hybrid-target"
    engine = build_engine(target, "ngram", keep_states=LAYERS, prefill_budget=64)
    watch = engine.on_states = Watch(target)
    text = random_prompt(150, 7)
    for turn in range(3):
        answer = run(engine, [make_request(str(turn), text)])[str(turn)]
        text = [*text, *answer.tokens, *random_prompt(5, turn)]
    assert len(watch.texts) == 3
