"""An inflated DFLASH pair against the small one: states, logits, tokens and accept counts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from slipstream.bench.inflate import InflateConfig, inflate, load_draft
from slipstream.bench.inflate_weights import CONSTANT, QUIET, SHAPES, SPREAD, Inflation
from slipstream.kernels.norm import HeadNorms, norm_heads
from slipstream.models.checkpoint import read_json, read_tensors
from slipstream.models.dflash import load_dflash
from slipstream.models.target import load_config
from slipstream.tests.bench.inflated import CPU, SMALL_VOCAB, TINY, answers, check_same_but_for_ties, read_questions
from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.random_drafts import save_random_dflash
from slipstream.tests.train.naive_block import OneBlock

BLOCK = 6
VARIANTS = {
    "windows": {"sliding_window": 10, "windowed_layers": (1,), "feature_layers": (6, 1, 3)},
    "few tokens, one feature": {"draft_vocab_size": 1500, "feature_layers": (2,), "num_layers": 3},
    "five of all": {"num_layers": 5, "feature_layers": (0, 1, 3, 4, 6), "sample_from_anchor": True},
}


@pytest.fixture(scope="module")
def questions() -> list[str]:
    return read_questions()


@pytest.fixture(scope="module")
def draft(questions: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows what the target answers, so that part of what it drafts is right."""
    folder, tokenizer = tmp_path_factory.mktemp("small") / "draft", AutoTokenizer.from_pretrained(TINY)
    prompts = [tokenizer(question)["input_ids"] for question in questions]
    said = answers(TINY, "none", questions)
    texts = [(len(prompt), prompt + one.tokens) for prompt, one in zip(prompts, said, strict=True)]
    save_random_dflash(TINY, folder, texts, block_size=BLOCK, **VARIANTS["windows"] | {"sliding_window": 40})
    return folder


@pytest.fixture(scope="module")
def pair(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("big") / "pair"
    inflate(InflateConfig(draft=str(draft), target=str(TINY), shape="mid", output=str(output)))
    return output


def test_the_pair_emits_the_small_pairs_tokens_and_accepts_as_many(
    pair: Path, draft: Path, questions: list[str]
) -> None:
    small = answers(TINY, draft, questions)
    big = answers(pair / "target", pair / "draft", questions)
    assert [answer.tokens for answer in big] == [answer.tokens for answer in small]
    assert [answer.stats for answer in big] == [answer.stats for answer in small]
    for half in (small[:2], small[2:]):
        assert sum(answer.stats.accepted_tokens for answer in half) > 10


def test_greedy_tokens_in_bf16(pair: Path, draft: Path, questions: list[str]) -> None:
    small = answers(TINY, draft, questions, "bfloat16")[:2]
    big = answers(pair / "target", pair / "draft", questions, "bfloat16")[:2]
    check_same_but_for_ties(questions[:2], small, big)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_the_small_drafts_and_the_others_far_below(variant: str, pair: Path, tmp_path: Path) -> None:
    """In fp64: the enlargement itself is exact. Features as the big target gives them, added ones as large as any."""
    save_random_dflash(TINY, tmp_path / "small", block_size=BLOCK, **VARIANTS[variant])
    states = write_big_draft(tmp_path / "small", tmp_path / "big")
    small = NaiveDFlash(tmp_path / "small", *tables(TINY, "model.embed_tokens.weight"))
    big = NaiveDFlash(tmp_path / "big", *tables(pair / "target", "lm_head.weight"))
    generator = torch.Generator().manual_seed(0)
    features = 3.0 * torch.randn(30, sum(index is not None for index in states.values()), 256, generator=generator)
    padded = torch.randn(30, 5, 1024, generator=generator) * SPREAD * QUIET
    for place, (layer, index) in enumerate(states.items()):
        added = 3.0 * torch.randn(30, 256, generator=generator)
        padded[:, place, :256] = added if index is None else features[:, index]
        padded[:, place, -1] = 0.5 if layer == SHAPES["mid"].num_layers else CONSTANT
    expected, block = (
        network.block(rows.flatten(1), 1000, BLOCK).states for network, rows in ((small, features), (big, padded))
    )
    torch.testing.assert_close(block[:, :256], expected, rtol=1e-9, atol=1e-9)
    logits, wanted = block @ big.head[big.target_ids].T, expected @ small.head[small.target_ids].T
    num_real = len(small.target_ids)
    assert big.target_ids[:num_real].equal(small.target_ids)
    assert big.target_ids[num_real:].equal(SMALL_VOCAB + torch.arange(len(big.target_ids) - num_real))
    torch.testing.assert_close(logits[:, :num_real], wanted, rtol=1e-9, atol=1e-9)
    assert (logits[:, num_real:].amax(-1) < wanted.amin(-1) - 100).all()


def write_big_draft(small: Path, folder: Path) -> dict[int, int | None]:
    """Without a target. Returns the states that it reads -> those of the small draft."""
    draft, shape = load_draft(str(small), load_config(TINY)), SHAPES["mid"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(draft.big_json(shape)))
    save_file(dict(draft.tensors(Inflation(256, 1024, CPU, 0), shape)), folder / "model.safetensors")
    return draft.states(shape)


def tables(target: Path, head: str) -> tuple[Tensor, Tensor]:
    tensors = read_tensors(target)
    return tensors["model.embed_tokens.weight"], tensors[head]


class Widened(OneBlock):
    """In fp32, whatever the network computes in."""

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        super().write(k.float(), v.float(), layer)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        mask: str,
        window: int | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        q32, k32 = (x.float() for x in norm_heads(q, k, norms))
        return super().attend(q32, k32, v.float(), layer, mask, window).to(q.dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quiet_weights_change_no_bit(pair: Path, dtype: torch.dtype) -> None:
    """As if they were zero, in the states that the target's head reads."""
    module = load_dflash(pair / "draft", load_config(pair / "target"), dtype, CPU)
    embeddings, _ = tables(pair / "target", "lm_head.weight")
    features = 3.0 * torch.randn(8, 5, 1024, generator=torch.Generator().manual_seed(0), dtype=dtype)
    features[:, :, 256:] *= SPREAD * QUIET
    features[:, :, -1] = CONSTANT

    def states() -> Tensor:
        attention = Widened(module.config.rope.theta, len(features))
        module.write_context(module.fuse(features.flatten(1)), attention)
        block = module.block_tokens(torch.tensor(1000), BLOCK)
        return module(embeddings[block].to(dtype), attention)[:, [*range(256), -1]]

    before, num_quiet = states(), 0
    for weight in module.parameters():
        quiet = weight.abs() < 2.0**-40
        num_quiet += int((quiet & (weight != 0)).sum())
        weight[quiet] = 0.0
    assert num_quiet > 0.3 * sum(weight.numel() for weight in module.parameters())
    assert before[:, -1].abs().min() > 1e-3
    torch.testing.assert_close(states(), before, rtol=0, atol=0)


def test_states_and_layers_are_where_the_config_says(pair: Path, draft: Path) -> None:
    small, big = (read_json(folder / "config.json") for folder in (draft, pair / "draft"))
    assert small["dflash_config"]["target_layer_ids"] == [6, 1, 3]
    assert big["dflash_config"]["target_layer_ids"] == [0, 1, 4, 5, 8]  # 1, 4 and 8 are the small ones
    assert big["dflash_config"]["mask_token_id"] == small["dflash_config"]["mask_token_id"]
    assert (big["block_size"], big["num_hidden_layers"], big["target"]) == (BLOCK, 5, str(pair / "target"))
    old, new = read_tensors(draft), read_tensors(pair / "draft")
    for index, place in enumerate((0, 2)):
        name = "mlp.down_proj.weight"
        assert new[f"layers.{place}.{name}"][:256, :512].equal(old[f"layers.{index}.{name}"])
    assert all(new[f"layers.{place}.mlp.down_proj.weight"].abs().max() < 2.0**-40 for place in (1, 3, 4))
