"""Targets whose layers keep rows of different shapes, served in every way; answers are those of a plain reference."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.serve.engine.build import build
from slipstream.serve.engine.engine import Engine
from slipstream.serve.request import Request
from slipstream.tests.serve.engine_runs import Answer, caches_of, make_request, random_prompt, run, tokens_of
from slipstream.tests.serve.played_graphs import equal_costs, play_all
from slipstream.tests.spec_targets import (
    NOMINAL,
    NaiveAttention,
    Reference,
    plan_spec,
    save_spec,
    save_spec_draft,
    spec_of,
)

FULL = NOMINAL.layer(num_kv_heads=1, head_dim=32)
WINDOWED = NOMINAL.layer(window=9)
SPEC = spec_of([FULL, WINDOWED, FULL, WINDOWED])
SCALE = 0.03
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {  # draft, options
    "none": ("none", {}),
    "chain": ("eagle3", {"depth": 4}),
    "tree": ("eagle3", {"depth": 3, "topk": 3, "nodes": 8}),
    "block": ("dflash", {}),
    "ngram": ("ngram", {"nodes": 9}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and drafts for it."""
    folder = tmp_path_factory.mktemp("shapes")
    scales = {f"layers.{i}.self_attn.{x}_scale": torch.tensor([SCALE]) for i in range(len(SPEC.layers)) for x in "kv"}
    save_spec(SPEC, folder / "target", **scales)
    for kind in ("eagle3", "dflash"):
        save_spec_draft(kind, SPEC, folder / "target", folder / kind)
    return folder


def build_drafted(folder: Path, drafter: str, *, captured: bool = False, **options: Any) -> Engine:
    kind, drafter_options = DRAFTERS[drafter]
    draft = str(folder / kind) if (folder / kind).exists() else kind
    plan = plan_spec(SPEC, folder / "target", draft, like_gpu=captured, drafter=drafter_options, **options)
    return build(plan, play_all, equal_costs) if captured else build(plan)


def requests_of(temperature: float, max_tokens: int = 20) -> list[Request]:
    """Prompts that begin alike, longer than windows."""
    shared = random_prompt(20, 99)
    return [
        make_request(
            str(seed),
            shared + random_prompt(3 + 7 * seed, seed),
            seed=seed,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        for seed in range(5)
    ]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[float, dict[str, list[int]]]:
    reference = Reference.load(SPEC, folder / "target")
    return {temperature: reference.answers(requests_of(temperature)) for temperature in (0.0, 1.0)}


def accepted(answers: dict[str, Answer]) -> int:
    return sum(answer.counts.accepted_tokens for answer in answers.values())


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_head_sizes_in_chunks_under_preemption_and_after_hits(
    drafter: str, folder: Path, expected: dict[float, dict[str, list[int]]]
) -> None:
    """Four requests of these need more KV than there is."""
    sizes: dict[str, Any] = {"max_running": 4, "prefill_budget": 16, "kv_cache_tokens": 100, "page_size": 1}
    engine = build_drafted(folder, drafter, **sizes)
    for temperature, tokens in expected.items():
        answers = run(engine, requests_of(temperature))
        assert tokens_of(answers) == tokens
    assert engine.scheduler.num_preemptions > 0
    assert any(answer.counts.cached_tokens for answer in answers.values())
    if drafter != "none":
        assert accepted(answers) or drafter == "block"


@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_two_head_sizes_in_passes_as_a_gpu_has_them(
    drafter: str, folder: Path, expected: dict[float, dict[str, list[int]]]
) -> None:
    """Ragged passes of fixed size, two steps in flight; the kernels are planned for each shape."""
    engine = build_drafted(folder, drafter, captured=True, max_running=4, prefill_budget=32, page_size=1)
    for temperature, tokens in expected.items():
        answers = run(engine, requests_of(temperature))
        assert tokens_of(answers) == tokens
    assert accepted(answers)


def test_each_shape_has_a_cache_and_each_retention_a_pool(folder: Path) -> None:
    engine = build_drafted(folder, "chain", kv_cache_tokens=512, page_size=16)
    plan = engine.engine_plan
    target, draft = engine.runner.passes.kv
    assert plan.groups == ("all", 9)
    assert [(cache.group, *cache.pages.shape[4:], len(cache.pages)) for cache in target.caches] == [
        (0, 1, 32, 2),
        (1, 2, 16, 2),
    ]
    assert [(cache.group, *cache.pages.shape[4:]) for cache in draft.caches] == [(0, 2, 16)]
    rows = [2 * 2 * 32 + 2 * 2 * 16, 2 * 2 * 2 * 16]  # numbers of a token: two full layers and the draft's; windowed
    assert plan.page_bytes == [16 * 4 * row for row in rows]
    assert plan.space is not None
    sizes = [0, 0]
    for cache in (*target.caches, *draft.caches):
        sizes[cache.group] += cache.pages.nbytes
    assert sizes == [size * pages for size, pages in zip(plan.page_bytes, plan.space.num_pages, strict=True)]


def test_two_shapes_with_one_retention_share_pages(tmp_path: Path) -> None:
    spec = spec_of([FULL, NOMINAL.layer(), FULL, NOMINAL.layer()])
    save_spec(spec, tmp_path / "target")
    engine = build(plan_spec(spec, tmp_path / "target", max_running=4, prefill_budget=16, page_size=1))
    assert engine.engine_plan.groups == ("all",)
    assert [cache.shape[3:] for cache in caches_of(engine)] == [(1, 32), (2, 16)]
    requests = requests_of(1.0)
    assert tokens_of(run(engine, requests)) == Reference.load(spec, tmp_path / "target").answers(requests)


@pytest.mark.parametrize("drafter", ["none", "tree"])
def test_two_head_sizes_in_fp8(drafter: str, folder: Path) -> None:
    scales = [torch.full((2, layer.mixer.num_kv_heads), SCALE) for layer in SPEC.layers]
    reference = Reference.load(SPEC, folder / "target", partial(NaiveAttention, scales))
    requests = requests_of(1.0, max_tokens=10)
    engine = build_drafted(folder, drafter, kv_cache_dtype="fp8", prefill_budget=16, page_size=1)
    for _ in range(2):  # the second time after cached prompts
        assert tokens_of(run(engine, requests)) == reference.answers(requests)
