"""The engine: what it loads and refuses, how it sizes memory, what it tells."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.bench.random_targets import CONFIGS, published_spec
from slipstream.models.drafts.source import source_of, warn_if_changed
from slipstream.models.files.checkpoint import weights_fingerprint
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.engine import memory
from slipstream.serve.engine.engine_plan import (
    EXPERT_TOKENS,
    MOST_PROMPT_TOKENS,
    enough_prompt_tokens,
    pick_prompt_tokens,
)
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Grammar
from slipstream.serve.runner.chunks import padding_prompts
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.random_targets import change_json
from slipstream.tests.serve.cache_invariants import check_scheduler
from slipstream.tests.serve.engine_runs import (
    VOCAB,
    build_engine,
    caches_of,
    generated,
    make_request,
    random_prompt,
    run,
    tokens_of,
)
from slipstream.tests.sources import TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

MakeTarget = Callable[[str], Path]


@pytest.fixture
def target(make_target) -> Path:
    return make_target("llama")


@pytest.fixture
def draft(target, tmp_path) -> Path:
    save_random_draft(target, tmp_path / "draft")
    return tmp_path / "draft"


def test_info_tells_what_front_ends_need(target, draft):
    info = build_engine(target, draft, drafter={"depth": 5}, max_model_len=100, kv_cache_tokens=500).info
    assert (info.max_model_len, info.vocab_size) == (100, 120)
    assert info.kv_cache_tokens == 512, "whole pages of 16"


@pytest.mark.parametrize("name", ["llama31-8b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b"])
def test_each_expert_gets_many_tokens_of_a_prompt(name):
    spec = published_spec(name)
    config = EngineConfig(target=name)
    values = CONFIGS[name]
    experts = values.get("num_experts", values.get("num_local_experts", 1))
    top_k = values.get("num_experts_per_tok", 1)
    num_tokens = pick_prompt_tokens(config, spec, "cuda")
    if experts == top_k:
        assert num_tokens == enough_prompt_tokens(config, num_tokens) == 1024
    else:
        assert 1024 <= num_tokens <= MOST_PROMPT_TOKENS
        assert num_tokens == MOST_PROMPT_TOKENS or num_tokens * top_k >= EXPERT_TOKENS * experts
        assert 1024 <= enough_prompt_tokens(config, num_tokens) == num_tokens // 2
    fast = replace(config, exact=False)
    assert pick_prompt_tokens(fast, spec, "cuda") == max(num_tokens, 2048)
    assert enough_prompt_tokens(fast, 2048) == 1024
    for some in (config, fast):
        assert pick_prompt_tokens(some, spec, "cpu") == enough_prompt_tokens(some, 1024) == 1024
        limited = replace(some, prefill_budget=300)
        assert pick_prompt_tokens(limited, spec, "cuda") == enough_prompt_tokens(limited, 300) == 300


def test_a_draft_for_other_weights_is_a_warning(draft, target, caplog):
    caplog.set_level(logging.WARNING)
    tokenizer = load_tokenizer(TINY)
    change_json(draft / "config.json", target_fingerprint=weights_fingerprint(target))
    warn_if_changed(source_of(str(draft)), target, tokenizer)
    assert not caplog.messages
    change_json(draft / "config.json", target_fingerprint="0" * 64)
    warn_if_changed(source_of(str(draft)), target, tokenizer)
    assert "was trained for other weights" in caplog.text


@each_case()
def test_wrong_options_are_refused(options, message, target, draft):
    with user_error(message):
        build_engine(**{"target": target, "draft": draft} | options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_a_missing_gpu_is_a_sentence(target):
    with user_error("device is 'cuda', but torch finds no GPU; choose cpu"):
        build_engine(target, device="cuda")


def test_a_draft_for_another_target_is_refused(target, draft):
    change_json(draft / "config.json", vocab_size=119, draft_vocab_size=119)
    with user_error("vocab_size is 119 in the draft and 120 in the target"):
        build_engine(target, draft)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([5] * 200, 57, "prompt has 200 tokens and max_tokens is 57, together 257: more than max_model_len 90"),
    ],
)
def test_requests_that_can_never_run_are_refused(prompt, max_tokens, message, target, draft):
    engine = build_engine(target, draft, kv_cache_tokens=96)
    with user_error(message):
        engine.add(make_request("0", prompt, max_tokens=max_tokens))
    assert not engine.has_work
    check_scheduler(engine.scheduler)


def test_yarn_extends_the_context(make_target, tmp_path):
    """Recipes add it to a config whose max_position_embeddings stay what they were; transformers limits nothing."""
    folder = tmp_path / "target"
    shutil.copytree(make_target("qwen2-yarn"), folder)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    change_json(folder / "config.json", max_position_embeddings=80, rope_parameters=None, rope_scaling=rope)
    engine = build_engine(folder)
    prompt = random_prompt(200, 1)
    assert engine.info.max_model_len == 256
    with user_error("lower it to 256, the most positions of this target, or extend it in its conf"):
        build_engine(folder, max_model_len=257)
    request = make_request("0", prompt, max_tokens=50, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert run(engine, [request])["0"].tokens == generated(model, request, min_new_tokens=50)


def test_an_id_is_taken_while_its_grammar_is_compiled():
    engine = build_engine(TINY)
    request = make_request("a", [5], grammar=Grammar("regex", "a+"))
    engine.add(request)
    with user_error("id 'a' belongs to a request that has not ended; give each request its own"):
        engine.add(request)
    assert engine.num_open == 1
    engine.abort("a")
    engine.close()


IDS: dict[str, Callable[[int], dict[str, Any]]] = {  # by field: a request that holds this token id
    "prompt": lambda token: {"prompt": [5, token]},
    "stop_token_ids": lambda token: {"stop_token_ids": (7, token)},
    "logit_bias": lambda token: {"logit_bias": {7: 1.0, token: 1.0}},
    "bad_words": lambda token: {"bad_words": ((7,), (5, token))},
}


@pytest.mark.parametrize("field", IDS)
def test_token_ids_are_those_of_the_vocabulary(field, target):
    engine = build_engine(target)
    fields = {"prompt": [5], "min_tokens": 2}
    for token in (0, VOCAB - 1):
        engine.check(make_request("0", **fields | IDS[field](token)))
    for token in (VOCAB, 2**32, 2**64):
        with user_error(f"{field} has the token id {token}; it must be between 0 and {VOCAB - 1}"):
            engine.add(make_request("0", **fields | IDS[field](token)))
    assert not engine.has_work


def test_the_cache_holds_what_memory_allows(target, monkeypatch):
    """A token of this target takes 2 x 4 layers x 2 heads x 8 x 4 bytes = 512 bytes."""
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 1000 * 512)
    assert build_engine(target, kv_cache_tokens=None).info.kv_cache_tokens == 1000 // 16 * 16
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 10**9)
    assert build_engine(target, kv_cache_tokens=None).info.kv_cache_tokens == 8 * 272, "all that 8 requests can use"


@pytest.mark.parametrize("options", [{"kv_cache_tokens": 192}, {"kv_cache_tokens": None}])
def test_a_small_cache_limits_the_context(options, target, draft, monkeypatch, caplog):
    """A request as long as the limit runs; a limit that was asked for is kept or refused."""
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 200 * 640)
    engine = build_engine(target, draft, **options)
    assert engine.info.max_model_len == 192 - 6
    assert "max_model_len is 186 instead of 256: the KV cache holds no more" in caplog.text
    run(engine, [make_request("0", random_prompt(150, 0), max_tokens=36, ignore_eos=True)])
    assert build_engine(target, draft, max_model_len=186, **options).info.max_model_len == 186
    with user_error("holds 186 tokens of one request and max_model_len is 187; lower max_model_len"):
        build_engine(target, draft, max_model_len=187, **options)
    with user_error("the KV cache holds 0 tokens of one request"):
        build_engine(target, draft, drafter={"depth": 60}, **options | {"kv_cache_tokens": 100})


def test_a_drafts_own_cache_counts(target, draft, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 1000 * 512)
    assert build_engine(target, draft, kv_cache_tokens=None).info.kv_cache_tokens == 1000 * 4 // 5 // 16 * 16


def test_layers_with_a_window_keep_the_window(make_target, monkeypatch, caplog):
    """Two layers of four see 9 tokens: a request needs a page of 16 for these, one to fill and one to draft in."""
    caplog.set_level(logging.INFO, "slipstream")
    monkeypatch.setattr(memory, "free_bytes", lambda *_: 10**9)
    engine = build_engine(make_target("qwen2-windows"), kv_cache_tokens=None, prefill_budget=64)
    assert engine.info.max_model_len == 256
    assert [len(cache[0, 0]) // 16 - 1 for cache in caches_of(engine)] == [8 * 17, 2 * 8 * 3 + 4 + 8]
    assert "KV cache of layers that see the last 9 tokens: 960 tokens" in caplog.text
    run(engine, [make_request(str(seed), random_prompt(200, seed), max_tokens=50) for seed in range(8)])


def test_a_drafts_window_binds_none_but_its_own_layer(target, draft):
    change_json(draft / "config.json", sliding_window=256, layer_types=["sliding_attention"])
    assert len(caches_of(build_engine(target, draft))) == 2
    change_json(draft / "config.json", sliding_window=32)
    engine = build_engine(target, draft, prefill_budget=64)
    assert engine.info.max_model_len == 256
    full, windowed = [len(cache[0, 0]) for cache in caches_of(engine)]
    assert windowed < full


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype, target, draft):
    """Rounding may pick other tokens than fp32, but without a draft and with it the counts are right."""
    requests = [make_request(str(seed), random_prompt(9, seed), temperature=1.0, seed=seed) for seed in range(3)]
    for name in ("none", draft):
        engine = build_engine(target, name, dtype=dtype)
        assert next(iter(engine.runner.target.parameters())).dtype == getattr(torch, dtype)
        answers = run(engine, requests)
        assert all(0 <= token < 120 for tokens in tokens_of(answers).values() for token in tokens)


def test_metrics_count_requests(target):
    engine = build_engine(target, max_running=2)

    def requests():
        return {
            name: value for name, value in engine.metrics().items() if name in ("running", "waiting", "preemptions")
        }

    assert not engine.has_work
    for index in range(5):
        engine.add(make_request(str(index), [5, 6], max_tokens=3, ignore_eos=True))
    assert requests() == {"running": 0, "waiting": 5, "preemptions": 0}
    engine.step()
    assert requests() == {"running": 2, "waiting": 3, "preemptions": 0}
    assert engine.num_open == 5
    while engine.has_work:
        engine.step()
    assert requests() == {"running": 0, "waiting": 0, "preemptions": 0}
    assert engine.step() == []


def test_prompts_are_computed_however_many_nodes_others_have(target, draft):
    """Also where these would fill the largest pass for as long as they decode."""
    engine = build_engine(target, draft)
    engine.planner.policy.costs.most_rows = 4 * engine.planner.limits.most_nodes
    for seed in range(4):
        engine.add(make_request(str(seed), random_prompt(9, seed), max_tokens=60, ignore_eos=True))
    engine.step()
    engine.add(make_request("late", random_prompt(9, 4), max_tokens=60, ignore_eos=True))
    assert any("late" in [output.request_id for output in engine.step()] for _ in range(10))
    assert engine.num_open == 5


@pytest.mark.parametrize("decoding", [False, True])
def test_a_step_computes_no_more_of_prompts_than_its_budget(decoding, target, draft):
    engine = build_engine(target, draft, prefill_budget=7)
    sizes = []
    requests = [make_request(str(seed), random_prompt(50, seed), max_tokens=40, ignore_eos=True) for seed in range(3)]

    def count(event, plan):
        if event == "launched" and bool(plan.slots) == decoding and plan.chunks:
            sizes.append(sum(len(chunk.tokens) for chunk in plan.chunks))

    engine.trace = count
    run(engine, requests)
    assert max(sizes) == 7


def test_every_token_is_counted(target, draft):
    """A step emits its accepted tokens and one of the target's own; the prompt's pass emits the first."""
    requests = [make_request(str(seed), random_prompt(9, seed), max_tokens=50, seed=seed) for seed in range(4)]
    for answer in run(build_engine(target, draft), requests).values():
        counts = answer.counts
        assert (counts.prompt_tokens, counts.prefills) == (9, 1)
        assert counts.drafted_tokens == 3 * counts.rounds
        full = counts.prefills + counts.rounds + counts.accepted_tokens
        assert full - 1 <= counts.completion_tokens <= full, "only the last step may be cut"
        assert len(answer.starts) == 1 + counts.rounds


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_context_shorter_than_a_proposal_is_measured_by_prompts_of_one_token(make_target, page_size, overlap):
    options = {"max_model_len": 2, "width": 16, "page_size": page_size, "overlap": overlap}
    runner = build_engine(make_target("qwen3"), "ngram", **options).runner.passes
    memory._prefill_padding(runner, 40, "prefill")
    chunks = padding_prompts(runner.state, [0] * 40)
    assert [len(chunk.tokens) for chunk in chunks] == [1] * 40
    assert not runner.state.lengths.any()
