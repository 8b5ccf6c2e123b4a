"""Every mix of attention backends serves the same prompts: fp32 gives sdpa's tokens, bf16 the best up to rounding."""

from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from slipstream.serve.attention.base import PHASES
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.request import Request
from slipstream.tests.pairwise import grouped
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.random_targets import SHAPE, save_random_target
from slipstream.tests.serve.attention_passes import PASSES, Scene
from slipstream.tests.serve.engine_runs import (
    Answer,
    acceptance,
    build_engine,
    make_request,
    random_prompt,
    run,
    tokens_of,
)

pytestmark = pytest.mark.gpu

# In bf16 a logit of this target is off by at most 0.047 (192 positions on the CPU, against the same weights in fp32),
# so two that are 0.1 apart keep their order. Two thirds of the positions have a wider gap between their best two.
LOGIT_BOUND = 0.1
HEAD_DIM = 64  # the smallest of FlashInfer's
SHAPE_64 = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8}

IN_FP32 = [dict(zip(PHASES, names, strict=True)) for names in product(["sdpa"], ["sdpa", "triton"], ["sdpa", "triton"])]
IN_BF16 = [
    dict(zip(PHASES, names, strict=True))
    for names in product(["sdpa", "flashinfer"], ["sdpa", "triton", "flashinfer"], ["sdpa", "triton", "flashinfer"])
]


def ids(mix: dict[str, str]) -> str:
    return "-".join(mix.values())


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "qwen3-64"
    save_random_target(Qwen3Config(**SHAPE_64, head_dim=HEAD_DIM), folder)
    return folder


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "draft"
    save_random_draft(target, folder)
    return folder


@pytest.fixture(scope="module")
def model(target) -> torch.nn.Module:
    """transformers' model with the engine's bf16 weights, computing in fp32."""
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).float().eval()


def requests() -> list[list[Request]]:
    """Two batches; prompts of the second begin with those of the first, so that it finds prefixes."""
    prompts = [random_prompt(5 + 19 * index, index) for index in range(6)]
    longer = [prompt + random_prompt(9, 100 + index) for index, prompt in enumerate(prompts)]
    return [
        [make_request(f"{name} {index}", prompt, ignore_eos=True) for index, prompt in enumerate(batch)]
        for name, batch in (("first", prompts), ("longer", longer))
    ]


def answers(target: Path, draft: Path | str, mix: dict[str, str], dtype: str, **options: int) -> dict[str, Answer]:
    option = ",".join(f"{phase}={name}" for phase, name in mix.items())
    engine = build_engine(
        target,
        draft,
        device="cuda",
        dtype=dtype,
        attention=option,
        prefill_graph_tokens=0,  # captured prompts take verify's backend
        width=None if draft == "none" else 4,
        **options,
    )
    answers_of_engine = {}
    for batch in requests():
        answers_of_engine |= run(engine, batch)
    assert sum(answer.counts.cached_tokens for answer in answers_of_engine.values()) > 100
    return answers_of_engine


def check(model: torch.nn.Module, answers: dict[str, Answer]):
    """No token is more than LOGIT_BOUND below the best after the tokens before it. So two answers first differ where
    the best two are at most that far apart."""
    for request in (request for batch in requests() for request in batch):
        tokens = answers[request.id].tokens
        assert len(tokens) == request.params.max_tokens
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt + tokens])).logits[0, len(request.prompt) - 1 : -1]
        regret = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert regret.max() <= LOGIT_BOUND, f"{request.id}: token {int(regret.argmax())} is {regret.max():.2f} below"


@grouped()
@pytest.mark.parametrize("name", PASSES)
@torch.inference_mode()
def test_sdpa_gives_on_the_gpu_what_it_gives_on_the_cpu(name):
    results = [Scene(PASSES[name], HEAD_DIM, torch.float32, device).attend(SDPABackend) for device in ("cpu", "cuda")]
    for expected, out in zip(*results, strict=True):
        torch.testing.assert_close(out.cpu(), expected, atol=2e-3, rtol=2e-3)


@pytest.fixture(scope="module")
def of_sdpa(target, draft) -> dict[str, dict[str, Answer]]:
    mix = dict.fromkeys(PHASES, "sdpa")
    return {dtype: answers(target, draft, mix, dtype) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("mix", IN_FP32, ids=ids)
def test_fp32_gives_sdpas_tokens(target, draft, of_sdpa, mix):
    expected = of_sdpa["float32"]
    assert tokens_of(answers(target, "none", mix, "float32")) == tokens_of(expected)
    answers_of_engine = answers(target, draft, mix, "float32")
    assert tokens_of(answers_of_engine) == tokens_of(expected)
    for name, answer in answers_of_engine.items():  # the draft, too, saw what it sees with sdpa
        assert answer.counts.accepted_by_position == expected[name].counts.accepted_by_position, name


@pytest.mark.parametrize("mix", IN_BF16, ids=ids)
def test_bf16_with_a_draft_gives_the_best_up_to_rounding(target, draft, model, of_sdpa, mix):
    answers_of_engine = answers(target, draft, mix, "bfloat16")
    check(model, answers_of_engine)
    assert acceptance(answers_of_engine) == pytest.approx(acceptance(of_sdpa["bfloat16"]), abs=0.02)


@pytest.mark.parametrize("mix", [mix for mix in IN_BF16 if mix["draft"] == "triton"], ids=ids)
def test_bf16_without_a_draft_gives_the_best_up_to_rounding(target, model, mix):
    check(model, answers(target, "none", mix, "bfloat16"))


@pytest.mark.parametrize("variant", ["fa2", "fa3"])
@pytest.mark.parametrize("page_size", [1, 64])
def test_variants_and_page_sizes(target, draft, model, variant, page_size):
    mix = dict.fromkeys(PHASES, f"flashinfer:{variant}")
    check(model, answers(target, draft, mix, "bfloat16", page_size=page_size))
