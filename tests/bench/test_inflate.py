"""The inflated pair against the small one: states, logits, tokens and accept counts, here and in transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from slipstream.bench.inflate import InflateConfig, inflate
from slipstream.bench.inflate_weights import CONSTANT, LIFT, QUIET, SHAPES, SPREAD, Inflation
from slipstream.models.checkpoint import read_json, read_tensors
from slipstream.models.frozen_target import load_frozen_target
from slipstream.tests.bench.inflated import (
    CPU,
    SMALL_VOCAB,
    TINY,
    answers,
    check_same_but_for_ties,
    read_questions,
    transformer,
)
from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.random_drafts import save_random_draft

DRAFT_VOCAB = 1500


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "draft"
    save_random_draft(TINY, folder, DRAFT_VOCAB)
    return folder


@pytest.fixture(scope="module")
def pair(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("big") / "pair"
    inflate(InflateConfig(draft=str(draft), shape="mid", output=str(output)))
    return output


@pytest.fixture(scope="module")
def questions() -> list[str]:
    return read_questions()


@pytest.fixture(scope="module")
def tokens(questions: list[str]) -> Tensor:
    return torch.tensor([AutoTokenizer.from_pretrained(TINY)("".join(questions))["input_ids"]])


@torch.no_grad()
def test_real_logits_are_the_small_models_and_the_others_far_below(pair: Path, tokens: Tensor) -> None:
    small, big = (transformer(path, torch.float32)(tokens).logits for path in (TINY, pair / "target"))
    assert big.shape[-1] == SHAPES["mid"].vocab_size
    torch.testing.assert_close(big[..., :SMALL_VOCAB], small, rtol=0, atol=1e-4)
    assert big[..., SMALL_VOCAB:].max() < small.min() - 1000


@torch.no_grad()
def test_in_bf16_tokens_differ_at_ties_only(pair: Path, tokens: Tensor) -> None:
    small, big = (transformer(path, torch.bfloat16)(tokens).logits.float() for path in (TINY, pair / "target"))
    assert (big[..., SMALL_VOCAB:].amax(-1) < big[..., :SMALL_VOCAB].amin(-1) - 1000).all()
    best = small.topk(2).values
    differs = big.argmax(-1) != small.argmax(-1)
    assert differs.float().mean() < 0.05
    assert bool(((best[..., 0] - best[..., 1])[differs] <= 0.25).all())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quiet_weights_change_no_bit(pair: Path, tokens: Tensor, dtype: torch.dtype) -> None:
    """Neither in the residual stream nor in a norm: as if they were zero."""
    model = transformer(pair / "target", dtype)
    before = model(tokens).logits[..., :SMALL_VOCAB]
    num_quiet = 0
    for weight in model.parameters():
        quiet = weight.abs() < 2.0**-40
        num_quiet += int((quiet & (weight != 0)).sum())
        weight[quiet] = 0.0
    assert num_quiet > 0.15 * model.num_parameters()
    torch.testing.assert_close(model(tokens).logits[..., :SMALL_VOCAB], before, rtol=0, atol=0)


def test_features_are_the_small_targets(pair: Path, draft: Path, tokens: Tensor) -> None:
    layers = {TINY: feature_ids(draft), pair / "target": feature_ids(pair / "draft")}
    assert layers == {TINY: (1, 2, 6), pair / "target": (1, 2, 8)}
    positions = torch.arange(tokens.shape[1])[None]
    states = {path: load_frozen_target(path, ids, CPU).features(tokens, positions)[0] for path, ids in layers.items()}
    small, big = (states[path].unflatten(-1, (3, -1)) for path in layers)
    torch.testing.assert_close(big[..., :256], small, rtol=1e-5, atol=2e-5)
    assert big[..., 256:-1].abs().max() < 2.0**-40
    assert (big[..., :2, -1] == CONSTANT).all()


def feature_ids(folder: Path) -> tuple[int, ...]:
    return tuple(read_json(folder / "config.json")["eagle_config"]["eagle_aux_hidden_state_layer_ids"])


def test_draft_logits_are_the_small_drafts_and_the_others_far_below(pair: Path, draft: Path) -> None:
    """In fp64: the enlargement itself is exact. Features as the big target gives them, one behind its final norm."""
    tables = [read_tensors(path)["model.embed_tokens.weight"] for path in (TINY, pair / "target")]
    small, big = (NaiveEagle3(path, table) for path, table in zip((draft, pair / "draft"), tables, strict=True))
    features = 3.0 * torch.randn(40, 3, 256, generator=torch.Generator().manual_seed(0))
    padded = torch.randn(40, 3, 1024, generator=torch.Generator().manual_seed(1)) * SPREAD * QUIET
    padded[..., :256] = features
    padded[..., -1] = torch.tensor([CONSTANT, CONSTANT, 0.5])
    ids = torch.arange(1000, 1040)
    states = [
        network.states(network.embeddings[ids], network.fuse(rows.flatten(1)))
        for network, rows in ((small, features), (big, padded))
    ]
    torch.testing.assert_close(states[1][:, :256], states[0], rtol=1e-9, atol=1e-9)
    expected, logits = small.logits(states[0]), big.logits(states[1])
    torch.testing.assert_close(logits[:, :DRAFT_VOCAB], expected, rtol=1e-9, atol=1e-9)
    assert (logits[:, DRAFT_VOCAB:].amax(-1) < expected.amin(-1) - 100).all()
    assert big.target_ids[:DRAFT_VOCAB].equal(small.target_ids)
    assert big.target_ids[DRAFT_VOCAB:].equal(SMALL_VOCAB + torch.arange(2048 - DRAFT_VOCAB))


@pytest.mark.parametrize("is_normed", [[True], [True, False], [False, False, True]])
def test_the_constant_reaches_the_draft_from_any_feature(is_normed: list[bool]) -> None:
    """Behind the final norm it is CONSTANT * LIFT * sqrt(H / h) / rms, before it CONSTANT."""
    rms, inflation = 2.0, Inflation(4, 16, CPU, 0)
    fc = inflation.fusion(torch.randn(4, 4 * len(is_normed)), range(len(is_normed)))
    assert not fc.unflatten(1, (-1, 16))[:, :, -1].any()
    assert not fc[-1].any()
    fc = inflation.pass_constant(fc, is_normed).float()
    features = torch.randn(len(is_normed), 16) * 2.0**-60
    features[:, :4] = torch.randn(len(is_normed), 4)
    features[:, -1] = torch.tensor([CONSTANT * LIFT * 2 / rms if normed else CONSTANT for normed in is_normed])
    assert fc.shape == (16, 16 * len(is_normed))
    assert (fc @ features.flatten())[-1] == (CONSTANT if False in is_normed else CONSTANT / rms)


def test_the_pair_emits_the_small_pairs_tokens_and_accepts_as_many(
    pair: Path, draft: Path, questions: list[str]
) -> None:
    small = answers(TINY, draft, questions * 2)
    big = answers(pair / "target", pair / "draft", questions * 2)
    assert [answer.tokens for answer in big] == [answer.tokens for answer in small]
    assert [answer.stats for answer in big] == [answer.stats for answer in small]
    for half in (small[:4], small[4:]):  # the drafts are right now and then, greedy or not
        assert sum(answer.stats.accepted_tokens for answer in half) > 2


def test_greedy_tokens_in_bf16(pair: Path, draft: Path, questions: list[str]) -> None:
    """Equal but for ties, which sums in another order break otherwise."""
    small = answers(TINY, draft, questions, "bfloat16")[:2]
    big = answers(pair / "target", pair / "draft", questions, "bfloat16")[:2]
    check_same_but_for_ties(questions[:2], small, big)
