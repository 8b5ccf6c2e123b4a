"""Another process that has the plan of an engine and those of its steps gets the same bits."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from slipstream.serve.engine.build import build_engine
from slipstream.serve.engine.plan import StepPlan
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft
from slipstream.tests.serve.engine_runs import SAMPLINGS, make_request, random_prompt
from slipstream.tests.serve.played_graphs import build_played
from slipstream.tests.serve.replayed_steps import check_replayed, record_steps
from slipstream.tests.serve.test_overlap import build_overlapped

DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {  # draft, options
    "none": ("none", {}),
    "chain": ("eagle3", {"depth": 4}),
    "tree": ("eagle3", {"depth": 3, "topk": 3, "nodes": 8}),
    "block": ("dflash", {}),
    "ngram": ("ngram", {}),
    "ngram first": ("eagle3", {"depth": 4, "ngram_first": 2}),
}
BUILDS = {"engine": build_engine, "overlapped": build_overlapped, "captured": build_played}
# Four requests of these need more KV than there is; pages of one token let prompts share all that is equal.
SIZES: dict[str, Any] = {"max_running": 4, "prefill_budget": 16, "kv_cache_tokens": 112, "page_size": 1}


def requests_of_all_kinds() -> list[Request]:
    """Long prompts that begin alike; sampled in every way, two with log-probabilities each, two under masks."""
    shared = random_prompt(20, 99)
    masked = {"min_tokens": 9, "bad_words": ((5, 6),)}
    extra = [{}, {"logprobs": 2}, {"prompt_logprobs": 1}, masked]
    kinds = [*SAMPLINGS.values(), *reversed(SAMPLINGS.values())]
    return [
        make_request(
            str(seed), shared + random_prompt(3 + 5 * seed, seed), seed=seed, max_tokens=12, **kind | extra[seed % 4]
        )
        for seed, kind in enumerate(kinds)
    ]


def check_steps(plans: list[StepPlan], *, is_captured: bool, drafts: bool):
    """They do everything that a plan can say."""
    assert any(chunk.start and not chunk.is_last for plan in plans for chunk in plan.chunks), "a prompt in chunks"
    assert len([chunk for plan in plans for chunk in plan.chunks if chunk.start == 0]) < len(
        {admission.request.id for plan in plans for admission in plan.admissions}
    ), "prefix hits"
    assert any(plan.edits.masks for plan in plans)
    assert any(plan.graph is not None for plan in plans) == is_captured
    assert any(plan.nodes > len(plan.slots) for plan in plans) == drafts


def check_elsewhere(cases: Sequence[tuple[str, str]], options: dict[str, Any], folder: Path, patch: Any):
    """Records the engines, by drafter and kind of build, and lets one process replay them all."""
    target = options["target"]
    num_preemptions = 0
    save_random_draft(target, folder / "eagle3", draft_vocab_size=80)
    save_random_dflash(target, folder / "dflash")
    for drafter, build in cases:
        kind, drafter_options = DRAFTERS[drafter]
        draft = str(folder / kind) if (folder / kind).exists() else kind
        config = EngineConfig(
            **options | {"target": str(target)}, grammar_drafts=False, draft=draft, drafter=drafter_options, **SIZES
        )
        engine = BUILDS[build](config)
        plans = record_steps(engine, requests_of_all_kinds(), folder / f"{drafter} {build}.steps", patch)
        num_preemptions += engine.scheduler.num_preemptions
        check_steps(plans, is_captured=engine.engine_plan.captures, drafts=drafter != "none")
    assert num_preemptions >= len(cases) / 2
    words = [sys.executable, "-m", "slipstream.tests.serve.replayed_steps", str(folder)]
    subprocess.run(words, check=True, cwd="/")
    for drafter, build in cases:
        check_replayed(folder, f"{drafter} {build}")


@pytest.mark.slow  # ranks execute an engine's plans in tests/serve/test_tensor_parallel.py
def test_recorded_steps_give_the_same_bits_elsewhere(target, tmp_path, monkeypatch):
    check_elsewhere(list(product(DRAFTERS, BUILDS)), {"target": target, "device": "cpu"}, tmp_path, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_and_on_a_gpu(dtype, target, tmp_path, monkeypatch):
    attention = "prefill=sdpa,verify=triton,draft=triton"
    options = {"target": target, "device": "cuda", "dtype": dtype, "attention": attention}
    check_elsewhere(list(product(DRAFTERS, ["engine"])), options, tmp_path, monkeypatch)
