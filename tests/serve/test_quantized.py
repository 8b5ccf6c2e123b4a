"""Quantised targets, served: text with and without a draft, the option, and what a draft takes from them."""

from pathlib import Path

import pytest
import torch

from slipstream.models.files.checkpoint import read_tensors
from slipstream.models.layers.formats.fp8 import FP8Linear
from slipstream.serve.options import EngineConfig
from slipstream.tests.quantized_targets import CONFIG, LAYOUTS, save_quantized
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.random_targets import save_random_target
from slipstream.tests.serve.engine_runs import Answer, build_engine, run, sized_requests

TIE = 0.05  # between the log-probabilities of two tokens
"""On a CPU the last bit of a sum depends on the rows of a pass, and an input halfway between two codes becomes either
one; that changes logits as a rounding in FP8 does."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A target of 32-bit weights and a draft for it."""
    target, draft = (tmp_path_factory.mktemp("models") / name for name in ("target", "draft"))
    save_random_target(CONFIG, target)
    save_random_draft(target, draft)
    return target, draft


@pytest.mark.parametrize(
    "name",
    [*("fp8-blocks", "gptq-order", "on-the-fly"), *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS)],
)
def test_text_does_not_depend_on_the_draft(name, models, tmp_path):
    target, draft = models
    save_quantized(LAYOUTS[name], target, tmp_path / name)
    options = {"quantization": "fp8"} if name == "on-the-fly" else {}
    engine = build_engine(tmp_path / name, draft, **options)
    module = engine.runner.drafter.module
    assert not any(isinstance(layer, FP8Linear) for layer in module.modules()), "a draft has its own format"
    drafted = run(engine, sized_requests(max_tokens=9))
    plain = run(build_engine(tmp_path / name, **options), sized_requests(max_tokens=9, logprobs=2))
    codes_inputs = any(isinstance(layer, FP8Linear) for layer in engine.runner.target.modules())
    for key, answer in drafted.items():
        check_tokens(answer.tokens, plain[key], TIE if codes_inputs else 0.0)
    assert sum(answer.counts.drafted_tokens for answer in drafted.values()) > 0


def test_only_fast_lets_tensor_cores_add_up_alone(models):
    for exact in (None, False):
        engine = build_engine(models[0], quantization="fp8", exact=exact)
        layers = [layer for layer in engine.runner.target.modules() if isinstance(layer, FP8Linear)]
        assert {layer.sums_fast for layer in layers} == {exact is False}


def check_tokens(tokens: list[int], expected: Answer, tie: float):
    """Greedy answers are equal, or were until the two best tokens were as good, but for less than `tie`."""
    place = next((i for i, pair in enumerate(zip(tokens, expected.tokens, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        assert len(tokens) == len(expected.tokens)
        return
    best, second = expected.logprobs.top[place]
    assert best - second < tie, f"token {place}"
    assert tokens[place] == expected.logprobs.top_ids[place][1]


def test_the_option_quantises_all_but_head_and_embedding(models):
    target, _ = models
    plain = build_engine(target)
    fp8 = build_engine(target, quantization="fp8")
    tensors = read_tensors(target)
    assert torch.equal(fp8.runner.target.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(fp8.runner.target.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    weight = fp8.runner.target.layers[0].mlp.down_proj.dequantized()
    assert 0 < (weight - tensors["model.layers.0.mlp.down_proj.weight"]).abs().max() < 0.07 * weight.abs().max()
    assert plain.info.fingerprint != fp8.info.fingerprint
    for value in ("int3", "None"):
        with pytest.raises(ValueError, match=f"quantization is '{value}'; choose fp8, or leave it out$"):
            EngineConfig(quantization=value)
