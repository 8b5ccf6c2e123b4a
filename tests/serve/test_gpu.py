"""The engine on a GPU gives the tokens that it gives on the CPU, with and without a draft."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.engine_runs import build_engine, make_request, random_prompt, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def target(make_target: Callable[[str], Path]) -> Path:
    return make_target("qwen3")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "draft"
    save_random_draft(target, folder, draft_vocab_size=80)
    return folder


def answers(target: Path, draft: Path | str, device: str, temperature: float, dtype: str) -> dict[str, list[int]]:
    engine = build_engine(target, draft, device=device, dtype=dtype)
    requests = [
        make_request(str(index), random_prompt(5 + 7 * index, index), temperature=temperature, seed=index)
        for index in range(8)
    ]
    return {name: answer.tokens for name, answer in run(engine, requests).items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_gpu_equals_cpu_in_fp32(target: Path, draft: Path, temperature: float) -> None:
    expected = answers(target, "none", "cpu", temperature, "float32")
    assert answers(target, "none", "cuda", temperature, "float32") == expected
    assert answers(target, draft, "cuda", temperature, "float32") == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_to_the_end(target: Path, draft: Path, dtype: str) -> None:
    for tokens in answers(target, draft, "cuda", 1.0, dtype).values():
        assert 1 <= len(tokens) <= 24
