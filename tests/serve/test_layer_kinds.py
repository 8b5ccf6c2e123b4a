"""Targets whose layers keep unlike things of a text, rows of two shapes or states, served with every kind of draft. The
answers are those of a plain reference."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.models.targets.config import AttentionSpec, DeltaNetSpec, TargetSpec
from slipstream.models.targets.packed_attention import PackedAttention
from slipstream.serve.engine import engine_plan
from slipstream.serve.engine.build import build
from slipstream.serve.engine.engine import Engine
from slipstream.serve.request import Request
from slipstream.serve.runner import recurrence
from slipstream.tests import random_drafts
from slipstream.tests.pairwise import gate_of, some_of
from slipstream.tests.random_targets import RELATIVES
from slipstream.tests.recurrent_layers import AverageSpec
from slipstream.tests.serve import test_replay
from slipstream.tests.serve.engine_runs import (
    accepted,
    build_engine,
    caches_of,
    make_request,
    random_prompt,
    run,
    tokens_of,
)
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
AVERAGE = replace(NOMINAL.layer(), mixer=AverageSpec(size=24))
DELTA_NET = replace(
    NOMINAL.layer(), mixer=DeltaNetSpec(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=12, taps=4)
)
SPECS = {
    "two head sizes": spec_of([FULL, WINDOWED, FULL, WINDOWED]),
    "delta nets": spec_of([DELTA_NET, NOMINAL.layer(), DELTA_NET, NOMINAL.layer()]),
    "recurrent": spec_of([AVERAGE, NOMINAL.layer(), AVERAGE, WINDOWED]),
}
GRIDS = {name: max((layer.grid for layer in spec.recurrent), default=1) for name, spec in SPECS.items()}
SCALE = 0.03
DRAFTERS = {name: options for name, options in test_replay.DRAFTERS.items() if name != "ngram first"}
every_drafter = pytest.mark.parametrize(
    ("name", "drafter"),
    gate_of(
        product(SPECS, DRAFTERS),
        [
            *(("two head sizes", "block"), ("delta nets", "tree"), ("recurrent", "chain")),
        ],
    ),
)
Tokens = dict[float, dict[str, list[int]]]  # by temperature and request


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """By the name of a spec, the folder of a target and drafts for it."""
    folders = {}
    for name, spec in SPECS.items():
        folder = folders[name] = tmp_path_factory.mktemp("specs")
        layers = [index for index, layer in enumerate(spec.layers) if isinstance(layer.mixer, AttentionSpec)]
        scales = {f"layers.{i}.self_attn.{x}_scale": torch.tensor([SCALE]) for i in layers for x in "kv"}
        save_spec(spec, folder / "target", **scales)
        for kind in ("eagle3", "dflash"):
            save_spec_draft(kind, spec, folder / "target", folder / kind)
    return folders


@pytest.fixture(scope="module")
def expected(folders) -> dict[str, Tokens]:
    """By the name of a spec, the answers of the reference."""
    references = {name: Reference.load(spec, folders[name] / "target") for name, spec in SPECS.items()}
    return {
        name: {temperature: reference.answers(requests_of(name, temperature)) for temperature in (0.0, 1.0)}
        for name, reference in references.items()
    }


def build_drafted(spec: TargetSpec, folder: Path, drafter: str, *, captured: bool = False, **options: Any) -> Engine:
    kind, drafter_options = DRAFTERS[drafter]
    draft = str(folder / kind) if (folder / kind).exists() else kind
    plan = plan_spec(spec, folder / "target", draft, like_gpu=captured, drafter=drafter_options, **options)
    return build(plan, play_all, equal_costs) if captured else build(plan)


def requests_of(name: str, temperature: float, max_tokens: int = 20) -> list[Request]:
    """Prompts that begin alike, longer than the windows of a spec, and than its blocks of prompts."""
    shared = random_prompt(max(20, 2 + GRIDS[name]), 99)
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


def narrow(name: str) -> dict[str, Any]:
    """Options of an engine in which four requests need more KV than there is, and prompts more passes than one."""
    grid = GRIDS[name]
    return {"max_running": 4, "prefill_budget": max(16, grid), "kv_cache_tokens": 100 + grid, "page_size": 1}


@every_drafter
def test_chunks_preemption_and_hits_change_no_answer(name, drafter, folders, expected):
    """Four requests of these need more KV than there is."""
    engine = build_drafted(SPECS[name], folders[name], drafter, **narrow(name))
    for temperature, tokens in expected[name].items():
        answers = run(engine, requests_of(name, temperature))
        assert tokens_of(answers) == tokens
    assert engine.scheduler.num_preemptions > 0
    assert any(answer.counts.cached_tokens for answer in answers.values())
    assert (accepted(answers) > 0) == (drafter != "none")


@every_drafter
def test_passes_as_a_gpu_has_them_change_no_answer(name, drafter, folders, expected):
    """Ragged passes of fixed size, two steps in flight; the kernels are planned for each shape."""
    budget = max(32, GRIDS[name])
    sizes = {"max_running": 4, "prefill_budget": budget, "prefill_graph_tokens": budget, "page_size": 1}
    engine = build_drafted(SPECS[name], folders[name], drafter, captured=True, **sizes)
    for temperature, tokens in expected[name].items():
        assert tokens_of(run(engine, requests_of(name, temperature))) == tokens


@pytest.mark.slow  # tests/kernels/test_delta.py compares the kernels alone
@pytest.mark.parametrize("drafter", ["none", "chain", "tree"])
def test_kernels_of_delta_nets_change_no_answer(drafter, folders, expected, monkeypatch):
    """The kernels that a GPU runs, interpreted: chunks, preemption and hits."""
    monkeypatch.setattr(recurrence, "use_triton", lambda _: True)
    sizes = narrow("delta nets") | {"kv_cache_tokens": 104 if drafter == "chain" else 118}
    engine = build_drafted(SPECS["delta nets"], folders["delta nets"], drafter, **sizes)
    requests = requests_of("delta nets", 1.0, max_tokens=12)
    answers = tokens_of(run(engine, requests if drafter == "none" else requests[:3]))
    assert answers == {name: expected["delta nets"][1.0][name][: len(answers[name])] for name in answers}
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_delta_nets_on_a_gpu_answer_as_on_the_cpu(drafter, folders, expected):
    name = "delta nets"
    engine = build_drafted(SPECS[name], folders[name], drafter, **narrow(name) | {"device": "cuda"})
    for temperature, tokens in expected[name].items():
        assert tokens_of(run(engine, requests_of(name, temperature))) == tokens


@pytest.mark.slow
def test_recorded_steps_with_states_give_the_same_bits_elsewhere(folders, tmp_path, monkeypatch):
    spec = SPECS["recurrent"]
    monkeypatch.setattr(engine_plan, "load_config", lambda *_: spec)
    monkeypatch.setattr(random_drafts, "load_config", lambda *_: spec)
    cases = [("chain", "overlapped"), ("tree", "captured")]
    target = folders["recurrent"] / "target"
    test_replay.check_elsewhere(cases, {"target": target, "device": "cpu"}, tmp_path, monkeypatch)


def test_a_hit_is_as_deep_as_a_snapshot(folders):
    """Snapshots are taken at the end of a prompt, at ends of its chunks, and where a second text leaves it. Pages of 16
    tokens, so every 16."""
    engine = build_drafted(SPECS["recurrent"], folders["recurrent"], "none", page_size=16, prefill_budget=48)
    reference = Reference.load(SPECS["recurrent"], folders["recurrent"] / "target")
    prompt = random_prompt(120, 1)
    texts = {
        "first": prompt,
        "again": prompt,
        "branch": prompt[:80] + random_prompt(30, 2),  # the last snapshot before is that of the second chunk
        "next branch": prompt[:80] + random_prompt(30, 3),
    }
    hits = {
        "first": (0, None),
        "again": (112, None),
        "branch": (48, "no_snapshot"),
        "next branch": (80, None),
    }
    for name, text in texts.items():
        request = make_request(name, text, max_tokens=8, temperature=1.0)
        answers = run(engine, [request])
        assert answers[name].tokens == reference.answer(request)
        counts = answers[name].counts
        assert (counts.cached_tokens, counts.miss_reason) == hits[name]
        assert counts.missed_tokens == (80 - 48 if name == "branch" else 0)
    turn = make_request("turn", prompt + reference.answer(make_request("", prompt, max_tokens=8)), max_tokens=8)
    answers = run(engine, [turn])
    assert answers["turn"].tokens == reference.answer(turn)
    assert answers["turn"].counts.cached_tokens == 112, "answers have no snapshots"


def test_documents_are_computed_from_empty_states(folders):
    """In training."""
    reference = Reference.load(SPECS["recurrent"], folders["recurrent"] / "target")
    texts = [random_prompt(length, length) for length in (7, 1, 12)]
    attention = PackedAttention()
    attention.plan(torch.cat([torch.arange(len(text)) for text in texts])[None])
    with torch.inference_mode():
        packed, _ = reference.target(torch.tensor(sum(texts, [])), attention)
        alone = [reference.target(torch.tensor(text), NaiveAttention())[0] for text in texts]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_each_shape_has_a_cache_and_each_retention_a_pool(folders):
    name = "two head sizes"
    engine = build_drafted(SPECS[name], folders[name], "chain", kv_cache_tokens=512, page_size=16)
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


def test_states_are_counted_as_they_are_kept(folders):
    engine = build_drafted(SPECS["recurrent"], folders["recurrent"], "chain", kv_cache_tokens=512, max_running=4)
    plan = engine.engine_plan
    states = engine.runner.passes.states
    assert plan.groups == ("all", 9, "state")
    num_bytes = sum(part.nbytes for layer in states.layers for part in layer.values())
    assert num_bytes == plan.page_bytes[2] * plan.space.num_pages[2]
    assert plan.space.num_pages[2] == 1 + 2 * 4, "the dump entry, running requests, and as many snapshots"
    record_bytes = sum(part.nbytes for layer in states.records for part in layer.values()) + states.replays.nbytes
    assert record_bytes == plan.record_bytes


def test_two_shapes_with_one_retention_share_pages(tmp_path):
    spec = spec_of([FULL, NOMINAL.layer(), FULL, NOMINAL.layer()])
    save_spec(spec, tmp_path / "target")
    engine = build(plan_spec(spec, tmp_path / "target", max_running=4, prefill_budget=16, page_size=1))
    assert engine.engine_plan.groups == ("all",)
    assert [cache.shape[3:] for cache in caches_of(engine)] == [(1, 32), (2, 16)]
    requests = requests_of("two head sizes", 1.0)
    assert tokens_of(run(engine, requests)) == Reference.load(spec, tmp_path / "target").answers(requests)


@pytest.mark.skipif("gemma4-shared" not in RELATIVES, reason="this transformers does not know it")
def test_a_layer_that_reads_the_kv_of_another_has_no_rows(make_target):
    """The last three of six layers, windowed ones and full ones in turn, read what the third and the second keep."""
    engine = build_engine(make_target("gemma4-shared"))
    (kv,) = engine.runner.passes.kv
    assert sum(len(cache.pages) for cache in kv.caches) == 3
    assert kv.places[3:] == (kv.places[1], kv.places[2], kv.places[1])
    sizes = [2 * 2 * head_dim * 4 * engine.engine_plan.config.page_size for head_dim in (16, 8)]
    assert engine.engine_plan.page_bytes == [sizes[0], 2 * sizes[1]]


@pytest.mark.parametrize("drafter", some_of(["none", "tree"], ["tree"]))
@pytest.mark.parametrize("name", some_of(SPECS, ["two head sizes", "delta nets"]))
def test_fp8(name, drafter, folders):
    spec = SPECS[name]
    scales = [torch.full((2, layer.num_kv_heads), SCALE) for layer in spec.attention]
    requests = requests_of(name, 1.0, max_tokens=10)
    expected = Reference.load(spec, folders[name] / "target", partial(NaiveAttention, scales)).answers(requests)
    engine = build_drafted(
        spec, folders[name], drafter, kv_cache_dtype="fp8", prefill_budget=max(16, GRIDS[name]), page_size=1
    )
    for _ in range(2):  # the second time after cached prompts
        assert tokens_of(run(engine, requests)) == expected


def test_a_budget_below_the_grid_is_refused(folders):
    with pytest.raises(ValueError, match="prefill_budget is 3, and this target computes prompts by 4 tokens; raise it"):
        build_drafted(SPECS["recurrent"], folders["recurrent"], "none", prefill_budget=3, page_size=1)
