"""Prompts computed in blocks, as captured prefills hold them, against prompts packed one after the other."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.plan import PromptChunk, SamplingMode, StepPlan
from slipstream.serve.options import PREFILL_BLOCK, EngineConfig
from slipstream.serve.runner.prefill import PrefillShape
from slipstream.serve.runner.prompt_graphs import MOST_REQUESTS, sizes
from slipstream.tests.pairwise import rotating
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft
from slipstream.tests.serve.engine_runs import (
    SAMPLINGS,
    caches_of,
    cut_alike,
    make_request,
    random_prompt,
    run,
    sized_requests,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import PlayedPrompts, play

LENGTHS = (1, 5, 31, 32, 33, 64, 70, 95, 130)  # around whole blocks, and beyond the largest pass


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    save_random_draft(target, folder / "eagle3", draft_vocab_size=80)
    save_random_dflash(target, folder / "dflash")
    folders = {name: str(folder / name) for name in ("eagle3", "dflash")}
    return {"none": "none", "eagle3 tree": folders["eagle3"], **folders}


def playing(target: Path, draft: str, prefill_graph_tokens: int, **options: Any) -> Engine:
    values = {"max_running": 6, "kv_cache_tokens": 4096, "prefill_budget": 96} | options
    return play(EngineConfig(target=str(target), draft=draft, prefill_graph_tokens=prefill_graph_tokens, **values))


@pytest.mark.parametrize(
    ("drafter", "case"),
    rotating(["none", "eagle3", "eagle3 tree", "dflash"], list(product([16, 1], ["greedy", "full"]))),
)
def test_blocks_equal_packed_prompts(drafter: str, case: tuple[int, str], target: Path, drafts: dict[str, str]) -> None:
    """Answers, what of the drafts was accepted, and the KV of target and draft; again with a filled cache."""
    page_size, sampling = case
    options = {"depth": 3, "topk": 2, "nodes": 6} if drafter == "eagle3 tree" else {}
    requests, found = sized_requests(LENGTHS, max_tokens=12, **SAMPLINGS[sampling]), []
    engines = [playing(target, drafts[drafter], tokens, page_size=page_size, drafter=options) for tokens in (0, 96)]
    cut_alike(packed=engines[0], captured=engines[1])
    for engine in engines:
        found.append([run(engine, requests) for _ in range(2)])
    assert isinstance(engines[1].runner.prompts, PlayedPrompts)
    assert engines[1].runner.prompts.passes
    packed, blocks = found
    for one, other in zip(blocks, packed, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert {name: answer.stats for name, answer in one.items()} == {
            name: answer.stats for name, answer in other.items()
        }
    for one_cache, other_cache in zip(*(caches_of(engine) for engine in engines), strict=True):
        torch.testing.assert_close(one_cache[:, :, page_size:], other_cache[:, :, page_size:], rtol=1e-4, atol=1e-4)
    assert any(answer.counts.cached_tokens for answer in blocks[1].values())


@pytest.mark.parametrize("most", [32, 100, 1024, 4096])
def test_sizes_waste_little(most: int) -> None:
    found = sizes(most)
    assert found == sorted(set(found))
    assert found[-1] == most // PREFILL_BLOCK
    for smaller, larger in zip(found, found[1:], strict=False):
        assert larger - smaller == 1 or (larger - smaller - 1) / larger <= 0.2


def test_no_size_fits_into_less_than_a_block() -> None:
    assert sizes(31) == []


def chunk_of(start: int, end: int) -> PromptChunk:
    return PromptChunk(0, start, random_prompt(end, 0)[start:], None, is_last=True)


def num_blocks(*chunks: PromptChunk) -> int:
    return PrefillShape.of(chunks, PREFILL_BLOCK).num_blocks


@pytest.mark.parametrize("mode", ["greedy", "plain", "all"])
def test_which_captured_prefill_takes_what(mode: SamplingMode, target: Path) -> None:
    engine = playing(target, "none", 1024, prefill_budget=1024, max_running=MOST_REQUESTS + 4)
    prompts = engine.runner.prompts
    assert isinstance(prompts, PlayedPrompts)

    def taken(*chunks: PromptChunk) -> int:
        """Blocks of the captured pass, 0 where none takes the chunks."""
        return num_blocks(*chunks) if prompts.prefill(chunks, mode) is not None else 0

    for chunk in (chunk_of(0, 3), chunk_of(0, 33), chunk_of(100, 196)):
        assert taken(chunk) == num_blocks(chunk)
    assert taken(*[chunk_of(0, 3)] * MOST_REQUESTS) == MOST_REQUESTS
    assert not taken(*[chunk_of(0, 3)] * (MOST_REQUESTS + 1))
    assert not taken(chunk_of(30_000, 31_000)), "most of the work is attention"
    for key in [key for key in prompts._graphs if key[0] == 2]:
        del prompts._graphs[key]  # as if memory had not held it
    assert taken(chunk_of(0, 33)) == 2, "the next larger one takes it"
    prompts._graphs.clear()
    assert not taken(chunk_of(0, 33))


def test_long_prompts_are_captured_ones_until_their_kernels_are_compiled(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = playing(target, "none", 96).runner.prompts
    assert isinstance(prompts, PlayedPrompts)
    monkeypatch.setattr("slipstream.serve.runner.prompt_graphs.MOST_PAIRS", 0)
    chunk = chunk_of(0, 33)
    for is_ready in (False, True):
        monkeypatch.setattr(type(prompts.runner.attention["prefill"]), "is_ready", is_ready)
        assert (prompts.prefill([chunk], "greedy") is None) == is_ready


def test_every_prompt_pass_fits_a_captured_one(target: Path) -> None:
    """Many short prompts at once, long ones among them: chunks are cut so that no pass runs kernel by kernel."""
    engine = playing(target, "none", 96, max_running=2 * MOST_REQUESTS, kv_cache_tokens=8192, page_size=1)
    prompts = engine.runner.prompts
    assert isinstance(prompts, PlayedPrompts)
    lengths = [1, 2, 3, 33, 40, 1, 96, 97, 250, 64] * 4
    requests = [make_request(str(i), random_prompt(n, i), max_tokens=3) for i, n in enumerate(lengths)]
    launched: list[StepPlan] = []
    engine.trace = lambda event, plan: launched.append(plan) if event == "launched" and plan.chunks else None
    run(engine, requests)
    assert len(prompts.passes) == len(launched) > 0
    assert max(blocks for blocks, _ in prompts.passes) == 96 // PREFILL_BLOCK


def test_a_budget_below_a_block_captures_nothing(target: Path) -> None:
    engine = playing(target, "none", 1024, prefill_budget=PREFILL_BLOCK - 1)
    assert engine.runner.prompts is None
    assert run(engine, sized_requests(LENGTHS, max_tokens=12))


def test_too_small_a_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill_graph_tokens is 20; it must be at least 32, or 0"):
        EngineConfig(prefill_graph_tokens=20)


def test_padding_is_written_to_the_dump_page_only(target: Path) -> None:
    """Whatever of the cache has no owner stays as it was."""
    engine = playing(target, "none", 96, page_size=1)
    (cache,) = caches_of(engine)
    cache.fill_(7)
    request = make_request("0", random_prompt(33, 1), max_tokens=1)
    run(engine, [request])
    written = (cache != 7).flatten(3).any(-1).any(0).any(0)
    assert int(written[1:].sum()) == len(request.prompt)
    assert torch.isfinite(cache).all()
