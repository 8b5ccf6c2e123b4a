"""The engine on a GPU: captured steps equal eager ones and the CPU's, through preemption, prefix hits and aborts."""

import copy
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from slipstream.serve.engine.engine import Engine
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request
from slipstream.serve.runner.cuda_graphs import DraftGraphs, StepGraphs, capture_all
from slipstream.tests.models.test_quantization import ADAPTED
from slipstream.tests.quantized_targets import LAYOUTS, MOE_CONFIG, save_gpt_oss, save_quantized
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.random_targets import SHAPE, save_random_target
from slipstream.tests.serve.cache_invariants import check_scheduler
from slipstream.tests.serve.engine_runs import (
    SAMPLINGS,
    Tokens,
    build_engine,
    caches_of,
    kinds_of_requests,
    make_request,
    random_prompt,
    run,
    serve_traffic,
    sized_requests,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import build_played
from slipstream.tests.serve.test_lossless import AnyPolicy
from slipstream.tests.serve.test_step_graphs import check_replay, record

pytestmark = pytest.mark.gpu

EVEN = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 1024}  # as exact products need
OURS = "prefill=sdpa,verify=triton,draft=triton"


def on_gpu(target: Path, draft: Path | str = "none", **options: Any) -> Engine:
    defaults = {"device": "cuda", "dtype": "float32", "attention": OURS, "prefill_graph_tokens": 128}
    return build_engine(target, draft, **defaults | options)


def on_cpu(target: Path, requests: list[Request]) -> Tokens:
    return tokens_of(run(build_engine(target, device="cpu", kv_cache_tokens=8192), requests))


def requests_of(sampling: dict[str, Any], count: int = 8, **params: Any) -> list[Request]:
    return [
        make_request(str(index), random_prompt(5 + 7 * index, index), seed=index, **sampling, **params)
        for index in range(count)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["none", "draft", "deep draft"])
def test_replay_equals_eager_bit_for_bit(dtype, name, target, draft, tmp_path):
    """The results of every step, the state of all slots and every number of the KV cache, whatever a step computes."""
    drafts = {"none": "none", "draft": str(draft), "deep draft": str(tmp_path / "deep")}
    if name == "deep draft":  # whose upper layers attend while it is extended
        save_random_draft(target, tmp_path / "deep", draft_vocab_size=80, num_layers=2, norm_output=True)
    values = {"draft": drafts[name], "max_running": 5, "dtype": dtype}
    values |= {"kv_cache_tokens": 2048, "prefill_budget": 40, "device": "cuda", "attention": OURS}
    config = EngineConfig(target=str(target), **values)
    engine = build_played(config, capture_all)
    eager = build_played(config)
    engine.planner.policy = AnyPolicy(engine.planner, random.Random(0))
    recorded = record(engine)
    run(engine, requests_of({"temperature": 1.0}, max_tokens=20, ignore_eos=True))
    assert any(plan.slots and plan.chunks for plan, _ in recorded)
    check_replay(recorded, engine, eager)
    for cache, expected in zip(caches_of(engine), caches_of(eager), strict=True):
        assert torch.equal(cache[:, :, 16:], expected[:, :, 16:]), "the dump page may differ"


def test_any_numbers_of_nodes_beside_any_prompts(target, draft):
    rng = random.Random(2)
    kinds = {
        name: request for name, request in kinds_of_requests(rng, 24, longest=60).items() if len(request.prompt) < 50
    }
    expected = on_cpu(target, list(kinds.values()))
    engine = on_gpu(target, draft, max_running=5, kv_cache_tokens=176, page_size=1, prefill_budget=40)
    engine.planner.policy = AnyPolicy(engine.planner, rng)
    serve_traffic(
        engine, kinds, expected, rng, lambda number: number < 60, 8, lambda: check_scheduler(engine.scheduler)
    )


@pytest.mark.parametrize("name", ["none", "draft", "ngram"])
def test_processors_and_constraints_under_graphs(name, target, draft):
    """Beside requests that have none."""
    variants = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3},
        {"logit_bias": {7: 5.0, 9: -100.0, 11: 4.0}},
        {"bad_words": ((7,), (9, 11), (12, 12, 5)), "min_tokens": 30, "logit_bias": {9: 6.0, 11: 6.0, 12: 6.0}},
        {},
    ]
    requests = [
        make_request(f"{index} at {t}", random_prompt(9 + 5 * index, index), max_tokens=50, temperature=t, **params)
        for index, params in enumerate(variants)
        for t in (0.0, 1.0)
    ]
    expected = on_cpu(target, requests)
    engine = on_gpu(target, {"draft": draft}.get(name, name), kv_cache_tokens=260, page_size=1)
    for _ in range(2):  # n-grams know what they have seen
        assert tokens_of(run(engine, requests)) == expected
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("options", [{}, {"cuda_graph": False}, {"prefill_graph_tokens": 0}], ids=str)
@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("draft", {}),
        ("draft", {"topk": 4, "depth": 5}),
        ("draft", {"topk": 4, "depth": 5, "ngram_first": 2}),
        ("ngram", {"breadth": 1}),
        ("ngram", {}),
    ],
    ids=["chain", "tree", "mixed", "n-grams", "trees of n-grams"],
)
def test_exact_answers_are_equal_in_bf16(name, drafter, options, tmp_path):
    """Without a draft and alone; and with one, among others, in chunks, preempted, from cached prefixes."""
    target = tmp_path / "target"
    draft = tmp_path / "draft"
    save_random_target(Qwen3Config(**SHAPE | EVEN, head_dim=64), target)
    save_random_draft(target, draft, draft_vocab_size=80)
    alike = {"device": "cuda", "dtype": "bfloat16", "attention": OURS, "exact": True}
    requests = [
        make_request(f"{index} at {t}", random_prompt(1 + 37 * index, index // 2), max_tokens=60, temperature=t)
        for index in range(9)
        for t in (0.0, 0.8)
    ]
    alone = build_engine(target, max_running=1, kv_cache_tokens=4096, **alike)
    expected = tokens_of(run(alone, requests))
    sizes = {"max_running": 7, "kv_cache_tokens": 600, "page_size": 1, "prefill_budget": 50}
    engine = build_engine(target, {"draft": draft}.get(name, name), **alike | {"drafter": drafter} | sizes | options)
    assert not engine.info.inexact
    for _ in range(2):
        assert tokens_of(run(engine, requests)) == expected
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("layout", ["fp8-blocks", "fp8-static", "compressed-channel", "packed", "on-the-fly"])
def test_exact_answers_of_quantised_experts_are_equal_in_bf16(layout, tmp_path):
    """As above, with a chain: in passes of few rows and of many, captured."""
    config = copy.deepcopy(MOE_CONFIG)
    config.max_position_embeddings = 1024
    config.num_hidden_layers = 4
    save_random_target(config, tmp_path / "plain")
    save_quantized(LAYOUTS[layout], tmp_path / "plain", tmp_path / "target")
    save_random_draft(tmp_path / "plain", tmp_path / "draft", draft_vocab_size=80)
    alike = {"device": "cuda", "dtype": "bfloat16", "attention": OURS, "exact": True, "kv_cache_tokens": 4096}
    alike |= {"quantization": "fp8"} if layout == "on-the-fly" else {}
    requests = [make_request(str(index), random_prompt(1 + 37 * index, index), max_tokens=60) for index in range(9)]
    expected = tokens_of(run(build_engine(tmp_path / "target", max_running=1, **alike), requests))
    engine = build_engine(tmp_path / "target", tmp_path / "draft", max_running=7, prefill_budget=150, **alike)
    assert not engine.info.inexact
    assert tokens_of(run(engine, requests)) == expected


@pytest.mark.parametrize("layout", ["", "fp8-blocks"])
@pytest.mark.parametrize("family", ["gemma4", "gemma4-experts", "muse-glimmer", "laguna", "hyperclovax"])
def test_answers_of_layers_with_more_norms_and_gates(family, layout, tmp_path):
    """In fp32 those of the CPU, where weights have 16 bits; in bf16 the same alone and among others with n-grams, in
    chunks."""
    if family not in ADAPTED:
        pytest.skip("this transformers does not know it")
    save_random_target(copy.deepcopy(ADAPTED[family]), tmp_path / "plain")
    requests = requests_of({"temperature": 0.0}, count=9, max_tokens=60)
    if layout:
        save_quantized(LAYOUTS[layout], tmp_path / "plain", tmp_path / "target")
    else:
        (tmp_path / "plain").rename(tmp_path / "target")
        engine = on_gpu(tmp_path / "target", kv_cache_tokens=4096)
        assert tokens_of(run(engine, requests)) == on_cpu(tmp_path / "target", requests)
    alike = {"device": "cuda", "dtype": "bfloat16", "attention": OURS, "exact": True, "kv_cache_tokens": 4096}
    expected = tokens_of(run(build_engine(tmp_path / "target", max_running=1, **alike), requests))
    engine = build_engine(tmp_path / "target", "ngram", max_running=7, prefill_budget=50, **alike)
    assert not engine.info.inexact
    assert tokens_of(run(engine, requests)) == expected


def test_gpt_oss_in_mxfp4_answers_as_on_the_cpu(tmp_path):
    save_gpt_oss(tmp_path)
    requests = requests_of({"temperature": 0.0}, max_tokens=20, ignore_eos=True)
    engine = build_engine(tmp_path, device="cuda", dtype="float32", kv_cache_tokens=8192)
    assert tokens_of(run(engine, requests)) == on_cpu(tmp_path, requests)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("name", ["none", "draft", "ngram"])
def test_logprobs_under_graphs(name, mode, target, draft):
    """For answers and prompts, beside requests without log-probabilities."""
    fields_of_requests = [{"logprobs": 5}, {"logprobs": 0, "prompt_logprobs": 20}, {}]
    requests = [
        make_request(f"{index} {kind}", random_prompt(9 + 5 * index, index), seed=index, **fields, **SAMPLINGS[kind])
        for index, fields in enumerate(fields_of_requests)
        for kind in SAMPLINGS
    ]
    expected = run(build_engine(target, device="cpu", kv_cache_tokens=8192, logprobs_mode=mode), requests)
    tokens = 160 if name == "none" else 260  # too few: requests are preempted
    engine = on_gpu(target, {"draft": draft}.get(name, name), kv_cache_tokens=tokens, page_size=1, logprobs_mode=mode)
    for _ in range(2):  # n-grams know what they have seen
        answers = run(engine, requests)
        assert tokens_of(answers) == tokens_of(expected)
        for request, answer in answers.items():
            for field in ("logprobs", "prompt_logprobs"):
                logprobs = getattr(answer, field)
                eager = getattr(expected[request], field)
                assert (logprobs is None) == (eager is None)
                if eager is not None:
                    assert logprobs.tokens == pytest.approx(eager.tokens, abs=1e-3)
                    assert sum(logprobs.top, []) == pytest.approx(sum(eager.top, []), abs=1e-3)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("captured", [0, 128])
@pytest.mark.parametrize("name", ["none", "draft"])
def test_prompts_of_every_length(name, captured, target, draft):
    """Also those whose last block of queries has one: 65, 129 (serve/attention/sdpa.py), and longer than a capture."""
    lengths = [*range(1, 20), 33, *range(63, 67), *range(95, 99), *range(127, 131)]
    requests = sized_requests(lengths, max_tokens=2)
    options = {"max_running": 1, "prefill_graph_tokens": captured}
    engine = on_gpu(target, draft if name == "draft" else name, **options)
    assert tokens_of(run(engine, requests)) == on_cpu(target, requests)


def test_a_backend_that_plans_on_the_host_runs_without_graphs(target):
    assert not on_gpu(target, attention="sdpa").engine_plan.captures


def test_memory_does_not_grow_over_2000_steps(target, draft):
    engine = on_gpu(target, draft, width=4, kv_cache_tokens=4096)
    allocated = []
    while len(allocated) < 2000:
        start = len(allocated)
        requests = [
            make_request(f"{start} {index}", random_prompt(9, index), max_tokens=200, ignore_eos=True)
            for index in range(8)
        ]
        num_steps = max(answer.counts.rounds for answer in run(engine, requests).values())
        allocated += [torch.cuda.memory_allocated()] * num_steps
    assert allocated[-1] == allocated[len(allocated) // 2]


@pytest.mark.parametrize(
    "starved", [{"prompts"}, {"prompts", "nodes", "drafts"}, {"all"}], ids=["prompts", "all", "filters"]
)
def test_passes_whose_graphs_do_not_fit_run_kernel_by_kernel(starved, target, draft, caplog, monkeypatch):
    """A capture that runs out of memory costs one warning, and no answer."""

    def starve(owner, kind_of):
        parts_of = owner.parts_of

        def starving(part, kinds, value):
            if torch.cuda.is_current_stream_capturing() and starved & kinds:
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            return part(value)

        def starving_parts(graphs, key):
            kinds = [{kind_of(*key)}, {kind_of(*key), key[-1]}]
            return [partial(starving, *pair) for pair in zip(parts_of(graphs, key), kinds, strict=False)]

        monkeypatch.setattr(owner, "parts_of", starving_parts)

    starve(StepGraphs, lambda _rows, _heads, has_prompts, *_: "prompts" if has_prompts else "nodes")
    starve(DraftGraphs, lambda *_: "drafts")
    requests = [
        make_request(f"{index} {kind}", random_prompt(9 + 7 * index, index), seed=index, **SAMPLINGS[kind])
        for index in range(4)
        for kind in SAMPLINGS
    ]
    engine = on_gpu(target, draft)
    assert [record.message[:39] for record in caplog.records if record.levelname == "WARNING"] == [
        "no memory is left for the CUDA graph of"
    ]
    assert tokens_of(run(engine, requests)) == on_cpu(target, requests)


def test_a_capture_that_lacks_memory_once_is_tried_again(target, draft, caplog, monkeypatch):
    """The allocator gives back what warm-ups held first."""
    end = torch.cuda.CUDAGraph.capture_end
    count = 0

    def end_without_memory(graph):
        nonlocal count
        end(graph)
        count += 1
        if count == 3:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end_without_memory)
    engine = on_gpu(target, draft)
    assert count > 3
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    requests = requests_of({}, count=4)
    assert tokens_of(run(engine, requests)) == on_cpu(target, requests)


def test_nothing_is_captured_while_serving(target, draft, monkeypatch):
    engine = on_gpu(target, draft)
    captures = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", captures.append)
    for sampling in SAMPLINGS.values():
        run(engine, requests_of(sampling, count=12))
    assert not captures


@pytest.mark.slow
def test_soak(tmp_path):
    """Five minutes at concurrency 64, prompts of 1 to 8,000 tokens, every kind of sampling, random aborts, too few
    pages; answers as on the CPU."""
    target = tmp_path / "target"
    draft = tmp_path / "draft"
    save_random_target(Qwen3Config(**SHAPE | {"max_position_embeddings": 8192}, head_dim=16), target)
    save_random_draft(target, draft, draft_vocab_size=80)
    rng = random.Random(0)
    kinds = kinds_of_requests(rng, count=120, longest=200, longest_prompt=8000)
    expected = tokens_of(run(build_engine(target, device="cpu", kv_cache_tokens=32768), list(kinds.values())))
    engine = on_gpu(target, draft, max_running=64, kv_cache_tokens=8400)
    end = time.monotonic() + 300
    assert serve_traffic(engine, kinds, expected, rng, lambda _: time.monotonic() < end, most_open=80) > 1000
    check_scheduler(engine.scheduler)
