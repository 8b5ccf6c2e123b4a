"""Random weights of a published shape serve, with a random draft, without being on the disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.bench import random_targets
from slipstream.bench.random_targets import CONFIGS, Pair, published_spec, random_pair
from slipstream.bench.round import (
    RoundConfig,
    bytes_read,
    count_experts,
    first_token_ms,
    propose_independent_tokens,
    routers_of,
    start_requests,
    weight_bytes,
)
from slipstream.models.targets.config import MoESpec
from slipstream.models.targets.decoder import Target
from slipstream.serve.engine.engine import Engine
from slipstream.serve.request import Output, RequestStats
from slipstream.tests.serve.engine_runs import build_engine, make_request, random_prompt, run
from slipstream.tests.user_errors import user_error

SMALL = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 200, "head_dim": 16}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "moe_intermediate_size": 16}


def serving(pair: Pair, **options: Any) -> Engine:
    """An engine that has answered a request."""
    engine = build_engine(pair.target, pair.draft, **options)
    answers = run(engine, [make_request("1", [5, 6, 7], max_tokens=9, ignore_eos=True)])
    assert len(answers["1"].tokens) == 9
    return engine


def test_a_random_pair_serves(monkeypatch):
    monkeypatch.setitem(CONFIGS, "small", CONFIGS["qwen3-30b-a3b"] | SMALL | {"num_experts_per_tok": 2})
    monkeypatch.setattr(random_targets, "DRAFT_VOCABULARY", 50)
    with random_pair("small") as pair:
        assert sorted(file.name for file in Path(pair.target).iterdir()) == ["config.json"]
        engine = serving(pair, simulate_accept_length=2.0)
        assert first_token_ms(engine, 30) > 0
    layers = engine.runner.target.layers
    total, experts = (sum(x.nbytes for x in part.parameters()) for part in (layers, layers[0].mlp.experts))
    assert weight_bytes(layers, 2) == total - 4 * 0.75 * experts
    assert weight_bytes(layers, 8) == total


def test_a_request_that_fails_is_named_with_its_error():
    failed = Output(request_id="2", tokens=[], finish_reason="error", stats=RequestStats(), error="no memory")
    engine = SimpleNamespace(info=SimpleNamespace(vocab_size=50), add=lambda _: None, step=lambda: [failed])
    with user_error("request 2 of 3 failed: no memory"):
        start_requests(engine, RoundConfig(shape="qwen3-30b-a3b"), 3)


def test_experts_of_rounds_are_counted(monkeypatch):
    monkeypatch.setitem(CONFIGS, "small", CONFIGS["qwen3-30b-a3b"] | SMALL | {"num_experts_per_tok": 2})
    monkeypatch.setattr(random_targets, "DRAFT_VOCABULARY", 50)
    with random_pair("small") as pair:
        engine = build_engine(pair.target, "none")
        drafted = build_engine(pair.target, pair.draft, width=4, simulate_accept_length=2.0)
    config = RoundConfig(target=pair.target, prompt_len=20, new_tokens=40)
    assert count_experts(engine, config, 1) == 2, "a token's"
    assert 2 < count_experts(engine, config, 3) <= 6
    assert 2 < count_experts(drafted, config, 1) <= 8
    for router in (layer.mlp.gate for layer in engine.runner.target.layers):
        router.weight.data.zero_()  # all tokens take the same experts
    assert count_experts(engine, config, 3) == 2
    assert not engine.has_work
    assert not any(module._forward_hooks for module in engine.runner.target.modules())


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_rounds_hit_the_experts_of_independent_tokens(shape, monkeypatch):
    experts = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2, "intermediate_size": 32}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "quantization_config": None}
    monkeypatch.setitem(CONFIGS, "small", CONFIGS[shape] | SMALL | {"hidden_size": 256} | layers | experts)
    monkeypatch.setattr(random_targets, "DRAFT_VOCABULARY", 50)
    with random_pair("small") as pair:
        plain = build_engine(pair.target, "none")
        drafted = build_engine(pair.target, pair.draft, width=4, simulate_accept_length=3.0)
    propose_independent_tokens(drafted)
    config = RoundConfig(target=pair.target, prompt_len=50, new_tokens=90)
    for engine, batch, rows in ((plain, 4, 4), (plain, 8, 8), (drafted, 1, 4), (drafted, 2, 8)):
        independent = 16 * (1 - (1 - 2 / 16) ** rows)
        assert count_experts(engine, config, batch) == pytest.approx(independent, rel=0.2)


def test_tokens_of_a_prompt_choose_apart_in_deep_layers(monkeypatch):
    deep = SMALL | {"hidden_size": 256, "num_hidden_layers": 32, "num_experts": 16, "num_experts_per_tok": 2}
    monkeypatch.setitem(CONFIGS, "small", CONFIGS["qwen3-30b-a3b"] | deep)
    with random_pair("small") as pair:
        engine = build_engine(pair.target)
    shares = []

    def share(*called):
        experts = called[-1].experts
        shares.append(experts.flatten().bincount().max().item() / len(experts))

    for router in routers_of(engine):
        router.register_forward_hook(share)
    run(engine, [make_request("1", random_prompt(128, 0), max_tokens=1)])
    assert len(shares) == 32, "a pass"
    assert max(shares) < 0.35, "of tokens that take the same expert; independent ones 2 of 16 on average"


@pytest.mark.parametrize(
    ("draft", "options"),
    [("dflash2", {"topk": 4, "nodes": 12}), ("dspark-map", {}), ("lilicorr", {})],
)
def test_random_block_drafts_serve(draft, options, monkeypatch):
    monkeypatch.setitem(CONFIGS, "small", CONFIGS["llama31-8b"] | SMALL)
    with random_pair("small", draft) as pair:
        engine = serving(pair, drafter=options, simulate_accept_length=2.0)
    assert engine.planner.limits.most_nodes == options.get("nodes", 8)


@pytest.mark.parametrize(("draft", "num_tokens"), [("mtp", 200), ("mtp-map", 60)])
def test_random_mtp_heads_serve_and_their_bytes_are_counted(draft, num_tokens, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 200, "head_dim": 32}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": CONFIGS["qwen35-4b"]["layer_types"][:4],
    }
    monkeypatch.setitem(CONFIGS, "small", CONFIGS["qwen35-4b"] | sizes)
    monkeypatch.setitem(random_targets.MTP_HEADS, "mtp-map", 60)
    with random_pair("small", draft) as pair:
        engine = serving(pair, width=4, simulate_accept_length=2.0, prefill_budget=64)
    projections = 2 * 64 * 64 + 64 * 32 * (4 + 4 + 2 + 2 + 4)  # eh_proj; queries, their gate, keys, values, output
    norms = 5 * 64 + 2 * 32
    weights = projections + norms + 3 * 64 * 96 + 64 * num_tokens
    kv = 2 * 2 * 32 * (10 + 20 / 2)
    config = RoundConfig(target=pair.target, prompt_len=10, new_tokens=20)
    assert bytes_read(engine, config, batch=5, nodes=4, hit=None)["draft"] == 3 * 4 * (weights + 5 * kv)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-30b-a3b-fp8"])
def test_quantised_random_weights_serve(name, monkeypatch):
    sizes = SMALL | {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
    sizes |= {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
    monkeypatch.setitem(CONFIGS, "small", CONFIGS[name] | sizes)
    with random_pair("small") as pair:
        engine = serving(pair._replace(draft="none"))
    target = engine.runner.target
    bits = 8 * weight_bytes(target.layers, 8) / sum(x.numel() for x in Target(target.config).layers.parameters())
    assert bits < (14 if name == "gpt-oss-20b" else 9), "of a weight, scales and biases included"


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_of_what_their_names_say(name):
    layers = published_spec(name).layers
    mixture = name.endswith(("a3b", "a3b-fp8", "a4b", "8x7b", "20b", "half"))
    assert {isinstance(layer.mlp, MoESpec) or layer.experts is not None for layer in layers[1:]} == {mixture}


def test_either_a_target_or_a_shape():
    for values in ({}, {"target": "a", "shape": "qwen3-30b-a3b"}):
        with user_error("give one of the two"):
            RoundConfig(**values)
    with user_error("shape is 'a'; choose of llama31-8b"), random_pair("a"):
        pass


@pytest.mark.parametrize("name", ["qwen35-4b", "qwen36-35b-a3b", "gemma4-26b-a4b", "muse-30b", "glm45-air-half"])
def test_random_weights_of_every_kind_of_layer_serve(name, monkeypatch):
    fields = SMALL | {"num_hidden_layers": 8, "num_experts_per_tok": 2, "head_dim": 32}
    fields |= {key: value[:8] for key, value in CONFIGS[name].items() if key in ("layer_types", "layer_rope_theta")}
    fields |= {key: 32 for key in CONFIGS[name] if key in ("global_head_dim", "linear_key_head_dim")}
    fields |= {"linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    fields |= {"num_global_key_value_heads": 1, "n_routed_experts": 8, "top_k_experts": 2}
    fields |= {"shared_expert_intermediate_size": 16}
    monkeypatch.setitem(CONFIGS, "small", CONFIGS[name] | {k: v for k, v in fields.items() if k in CONFIGS[name]})
    monkeypatch.setattr(random_targets, "DRAFT_VOCABULARY", 50)
    with random_pair("small") as pair:
        engine = serving(pair, simulate_accept_length=2.0)
    assert all(x.isfinite().all() for x in engine.runner.target.state_dict().values() if x.is_floating_point())
