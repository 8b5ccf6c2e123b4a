"""What captured passes add to eager ones, without a GPU: static buffers, batches filled up with padding, widths that
change by load, passes in flight."""

import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.serve.engine.widths import WidthPolicy
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request
from slipstream.tests.random_drafts import save_random_dflash
from slipstream.tests.serve.engine_runs import (
    build_engine,
    kinds_of_requests,
    make_request,
    random_prompt,
    serve_traffic,
    tokens_of,
)
from slipstream.tests.serve.engine_runs import run as run_all
from slipstream.tests.serve.played_graphs import PlayedGraphs, PlayedPrompts, play


def test_a_round_with_one_filtered_request_is_chosen_by_filtered_times(target: Path, draft: Path) -> None:
    engine = play(EngineConfig(target=str(target), draft=str(draft), max_running=4, kv_cache_tokens=900))
    keys = [(size, width) for size in (1, 2, 4) for width in engine.planner.widths.offered]
    filtered = {(size, width): 100.0**width for size, width in keys}
    engine.planner.policy = WidthPolicy(engine.planner.widths.offered, dict.fromkeys(keys, 1.0), filtered)
    assert isinstance(engine.runner.graphs, PlayedGraphs)
    used = engine.runner.graphs.num_rounds
    run_all(engine, [make_request("0", random_prompt(9, 0), max_tokens=30, ignore_eos=True)])
    assert max(width for _, width, _ in used) == engine.planner.widths.most
    used.clear()
    both = {"max_tokens": 30, "ignore_eos": True, "temperature": 1.0}
    prompt = random_prompt(9, 1)
    run_all(engine, [make_request("a", prompt, **both), make_request("b", prompt, top_k=9, **both)])
    assert {width for _, width, mode in used if mode == "all"} == {1}


@pytest.fixture(scope="module")
def traffic(target: Path) -> tuple[dict[str, Request], dict[str, list[int]]]:
    """Requests of all kinds, and their answers without a draft."""
    kinds = kinds_of_requests(random.Random(1), count=24, longest=60)
    return kinds, tokens_of(run_all(build_engine(target, kv_cache_tokens=4096), list(kinds.values())))


@pytest.fixture(scope="module")
def drafts(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By drafter: what `--draft` is."""
    folder = tmp_path_factory.mktemp("drafts") / "dflash"
    save_random_dflash(target, folder, sliding_window=6, windowed_layers=(0, 1))
    return {"none": "none", "ngram": "ngram", "eagle3": str(draft), "dflash": str(folder)}


@pytest.mark.parametrize("num_requests", [64, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("none", {}),
        ("eagle3", {}),
        ("eagle3", {"depth": 4, "topk": 2, "nodes": 8}),
        ("eagle3", {"ngram_first": 2}),
        ("eagle3", {"ngram_first": 2, "topk": 2, "nodes": 6}),
        ("ngram", {"nodes": 9}),
        ("dflash", {}),
        ("dflash", {"full_block": True}),
    ],
    ids=["none", "eagle3", "eagle3 tree", "mixed", "mixed tree", "ngram", "dflash", "dflash, whole blocks"],
)
def test_mixed_traffic_with_aborts_and_preemption(
    drafter: str,
    options: dict[str, Any],
    num_requests: int,
    target: Path,
    drafts: dict[str, str],
    traffic: tuple[dict[str, Request], dict[str, list[int]]],
) -> None:
    rng, (kinds, expected) = random.Random(1), traffic
    config = {"draft": drafts[drafter], "drafter": options}
    engine = play(
        EngineConfig(target=str(target), max_running=24, kv_cache_tokens=900, page_size=1, **config)  # type: ignore[arg-type]
    )
    assert isinstance(engine.runner.graphs, PlayedGraphs)
    captured = engine.runner.graphs._graphs
    for key in [key for key in captured if key[0] == 24 or key[0] == 2 and key[2] == "all"]:
        del captured[key]  # as if memory had not held them
    kept = set(captured)
    serve_traffic(engine, kinds, expected, rng, lambda number: number < num_requests, 30, engine.scheduler.check)
    greedy = make_request("greedy", random_prompt(9, 0), ignore_eos=True)
    assert tokens_of(run_all(engine, [greedy])) == tokens_of(run_all(build_engine(target), [greedy]))
    used = engine.runner.graphs.num_rounds
    assert {mode for _, _, mode in used} == {"plain", "all"}
    assert set(used) < set(captured) == kept, "nothing is captured while serving"
    assert isinstance(engine.runner.prompts, PlayedPrompts)
    assert {1, 2} <= {num_chunks for _, num_chunks in engine.runner.prompts.passes}
    assert drafter == "none" or len({width for _, width, _ in used}) > 1
