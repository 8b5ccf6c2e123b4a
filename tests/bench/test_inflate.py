"""The inflated pair against the small one: states, logits, tokens and accept counts, here and in transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from slipstream.bench.inflate import InflateConfig, inflate, load_small_draft
from slipstream.bench.inflate_weights import CONSTANT, LIFT, QUIET, SHAPES, SPREAD, Inflation
from slipstream.bench.workload import read_questions
from slipstream.kernels.norm import norm_heads
from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.files.checkpoint import read_json, read_tensors
from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.frozen import load_frozen_target
from slipstream.serve.llm import LLM, Generation
from slipstream.serve.request import SamplingParams
from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.pairwise import some_of
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft
from slipstream.tests.sources import TINY
from slipstream.tests.tables import objects_of
from slipstream.train.blocks import Blocks, SDPABlockAttention

SMALL_VOCAB = 4096
CPU = torch.device("cpu")
DRAFT_VOCAB = 1500
BLOCK = 6
VARIANTS = objects_of(__file__, "variants", dict)
Pairs = dict[str, tuple[Path, Path]]  # drafter -> the small draft, the big pair


@pytest.fixture(scope="module")
def questions() -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    chats = [question.chat[:1] for question in read_questions()[:4]]
    return [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


@pytest.fixture(scope="module")
def tokens(questions) -> Tensor:
    return torch.tensor([AutoTokenizer.from_pretrained(TINY)("".join(questions))["input_ids"]])


@pytest.fixture(scope="module")
def pairs(questions, tmp_path_factory) -> Pairs:
    """The block draft knows what the target answers, so that part of what it drafts is right."""
    folder = tmp_path_factory.mktemp("pairs")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    prompts = [tokenizer(question)["input_ids"] for question in questions]
    generations = answers(TINY, "none", questions)
    texts = [(len(prompt), prompt + generation.tokens) for prompt, generation in zip(prompts, generations, strict=True)]
    save_random_draft(TINY, folder / "eagle3", DRAFT_VOCAB)
    options = VARIANTS["windows"] | {"sliding_window": 40}
    save_random_dflash(TINY, folder / "dflash", texts, block_size=BLOCK, **options)
    more = {"dflash": str(folder / "dflash")}
    big = folder / "big"
    inflate(InflateConfig(draft=str(folder / "eagle3"), more=more, target=str(TINY), shape="mid", output=str(big)))
    (folder / "big-dflash").mkdir()
    for name, path in (("target", big / "target"), ("draft", big / "draft-dflash")):
        (folder / "big-dflash" / name).symlink_to(path)
    return {"eagle3": (folder / "eagle3", big), "dflash": (folder / "dflash", folder / "big-dflash")}


@pytest.fixture(scope="module")
def draft(pairs) -> Path:
    return pairs["eagle3"][0]


@pytest.fixture(scope="module")
def pair(pairs) -> Path:
    return pairs["eagle3"][1]


def transformer(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def answers(target: Path, draft: Path | str, prompts: list[str], dtype: str = "float32") -> list[Generation]:
    """The first half of the prompts is answered greedily, the other one at temperature 1; as many nodes are verified as
    there are, however busy the machine."""
    width = None if draft == "none" else 4
    llm = LLM(str(target), str(draft), kv_cache_tokens=4096, max_model_len=512, dtype=dtype, width=width)
    half = len(prompts) // 2
    params = [SamplingParams(max_tokens=20, temperature=float(i >= half), seed=i) for i in range(len(prompts))]
    return llm.generate(prompts, params)


@pytest.mark.slow
@torch.no_grad()
def test_in_bf16_tokens_differ_at_ties_only(pair, tokens):
    small, big = (transformer(path, torch.bfloat16)(tokens).logits.float() for path in (TINY, pair / "target"))
    assert (big[..., SMALL_VOCAB:].amax(-1) < big[..., :SMALL_VOCAB].amin(-1) - 1000).all()
    best = small.topk(2).values
    differs = big.argmax(-1) != small.argmax(-1)
    assert differs.float().mean() < 0.05
    assert bool(((best[..., 0] - best[..., 1])[differs] <= 0.25).all())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_quiet_weights_change_no_bit(pair, tokens, dtype):
    """Neither in the residual stream nor in a norm: as if they were zero."""
    model = transformer(pair / "target", dtype)
    tokens = tokens[:, :64]
    before = model(tokens).logits[..., :SMALL_VOCAB]
    assert silenced(model) > 0.15
    torch.testing.assert_close(model(tokens).logits[..., :SMALL_VOCAB], before, rtol=0, atol=0)


def silenced(model: Module) -> float:
    """Makes quiet weights zero. Returns their share of all."""
    quiet = [weight.abs() < 2.0**-40 for weight in model.parameters()]
    share = sum(int((weight[small] != 0).sum()) for weight, small in zip(model.parameters(), quiet, strict=True))
    for weight, small in zip(model.parameters(), quiet, strict=True):
        weight[small] = 0.0
    return share / sum(weight.numel() for weight in model.parameters())


def test_features_are_the_small_targets(pair, draft, tokens):
    layers = {TINY: aux_ids(draft), pair / "target": aux_ids(pair / "draft")}
    assert layers == {TINY: (1, 2, 6), pair / "target": (1, 2, 8)}
    positions = torch.arange(tokens.shape[1])[None]
    states = {path: load_frozen_target(path, ids, CPU).aux_states(tokens, positions)[0] for path, ids in layers.items()}
    small, big = (states[path].unflatten(-1, (3, -1)) for path in layers)
    torch.testing.assert_close(big[..., :256], small, rtol=1e-5, atol=2e-5)
    assert big[..., 256:-1].abs().max() < 2.0**-40
    assert (big[..., :2, -1] == CONSTANT).all()


def aux_ids(folder: Path) -> tuple[int, ...]:
    return tuple(read_json(folder / "config.json")["eagle_config"]["eagle_aux_hidden_state_layer_ids"])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_draft_logits_are_the_small_drafts_and_the_others_far_below(pairs, tmp_path, qk_norm):
    """In fp64: the enlargement itself is exact. States as the big target gives them, one behind its final norm."""
    draft, pair = pairs["eagle3"]
    if qk_norm:
        draft = tmp_path / "draft"
        pair = tmp_path / "pair"
        save_random_draft(TINY, draft, DRAFT_VOCAB, qk_norm=True)
        inflate(InflateConfig(draft=str(draft), target=str(TINY), shape="mid", output=str(pair)))
    tables = [read_tensors(path)["model.embed_tokens.weight"] for path in (TINY, pair / "target")]
    small, big = (NaiveEagle3(path, table) for path, table in zip((draft, pair / "draft"), tables, strict=True))
    aux_states = 3.0 * torch.randn(40, 3, 256, generator=torch.Generator().manual_seed(0))
    padded = torch.randn(40, 3, 1024, generator=torch.Generator().manual_seed(1)) * SPREAD * QUIET
    padded[..., :256] = aux_states
    padded[..., -1] = torch.tensor([CONSTANT, CONSTANT, 0.5])
    ids = torch.arange(1000, 1040)
    states = [
        network.states(network.embeddings[ids], network.fuse(rows.flatten(1)))
        for network, rows in ((small, aux_states), (big, padded))
    ]
    torch.testing.assert_close(states[1][:, :256], states[0], rtol=1e-9, atol=1e-9)
    expected = small.logits(states[0])
    logits = big.logits(states[1])
    torch.testing.assert_close(logits[:, :DRAFT_VOCAB], expected, rtol=1e-9, atol=1e-9)
    assert (logits[:, DRAFT_VOCAB:].amax(-1) < expected.amin(-1) - 100).all()
    assert big.target_ids[:DRAFT_VOCAB].equal(small.target_ids)
    assert big.target_ids[DRAFT_VOCAB:].equal(SMALL_VOCAB + torch.arange(2048 - DRAFT_VOCAB))


@pytest.mark.parametrize("is_normed", [[True], [True, False], [False, False, True]])
def test_the_constant_reaches_the_draft_from_any_feature(is_normed):
    """Behind the final norm it is CONSTANT * LIFT * sqrt(H / h) / rms, before it CONSTANT."""
    rms = 2.0
    inflation = Inflation(4, 16, CPU, 0)
    fc = inflation.fusion(torch.randn(4, 4 * len(is_normed)), list(enumerate(is_normed))).float()
    assert not fc[:-1].unflatten(1, (-1, 16))[:, :, -1].any()
    assert fc[-1].count_nonzero() == 1
    aux_states = torch.randn(len(is_normed), 16) * 2.0**-60
    aux_states[:, :4] = torch.randn(len(is_normed), 4)
    aux_states[:, -1] = torch.tensor([CONSTANT * LIFT * 2 / rms if normed else CONSTANT for normed in is_normed])
    assert fc.shape == (16, 16 * len(is_normed))
    assert (fc @ aux_states.flatten())[-1] == (CONSTANT if False in is_normed else CONSTANT / rms)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "dflash"])
def test_the_pair_emits_the_small_pairs_tokens_and_accepts_as_many(drafter, pairs, questions):
    draft, pair = pairs[drafter]
    prompts, min_accepted = (questions * 2, 3) if drafter == "eagle3" else (questions, 11)
    small = answers(TINY, draft, prompts)
    big = answers(pair / "target", pair / "draft", prompts)
    assert [answer.tokens for answer in big] == [answer.tokens for answer in small]
    stats = [[replace(answer.stats, weight_version="") for answer in pair_answers] for pair_answers in (big, small)]
    assert stats[0] == stats[1]
    half = len(small) // 2
    for part in (small[:half], small[half:]):  # the drafts are right now and then, greedy or not
        assert sum(answer.stats.accepted_tokens for answer in part) >= min_accepted


@pytest.mark.parametrize("variant", some_of(VARIANTS, ["windows", "DFlash 2", "DSpark"]))
def test_block_logits_are_the_small_drafts_and_the_others_far_below(variant, pair, tmp_path):
    """In fp64: the enlargement itself is exact. States as the big target gives them, added ones as large as any."""
    save_random_dflash(TINY, tmp_path / "small", block_size=BLOCK, **VARIANTS[variant])
    states = write_big_draft(tmp_path / "small", tmp_path / "big")
    small = NaiveDFlash(tmp_path / "small", *tables(TINY, "model.embed_tokens.weight"))
    big = NaiveDFlash(tmp_path / "big", *tables(pair / "target", "lm_head.weight"))
    generator = torch.Generator().manual_seed(0)
    aux_states = 3.0 * torch.randn(30, sum(index is not None for index in states.values()), 256, generator=generator)
    padded = torch.randn(30, 5, 1024, generator=generator) * SPREAD * QUIET
    for place, (layer, index) in enumerate(states.items()):
        added = 3.0 * torch.randn(30, 256, generator=generator)
        padded[:, place, :256] = added if index is None else aux_states[:, index]
        padded[:, place, -1] = 0.5 if layer == SHAPES["mid"].num_layers else CONSTANT
    expected, block = (
        network.block(rows.flatten(1), 1000, BLOCK).states for network, rows in ((small, aux_states), (big, padded))
    )
    torch.testing.assert_close(block[:, :256], expected, rtol=1e-9, atol=1e-9)
    logits = big.logits(block)
    small_logits = small.logits(expected)
    num_real = len(small.target_ids)
    assert big.target_ids[:num_real].equal(small.target_ids)
    assert big.target_ids[num_real:].equal(SMALL_VOCAB + torch.arange(len(big.target_ids) - num_real))
    torch.testing.assert_close(logits[:, :num_real], small_logits, rtol=1e-9, atol=1e-9)
    assert (logits[:, num_real:].amax(-1) < small_logits.amin(-1) - 100).all()
    rows = (padded.flatten(1), aux_states.flatten(1))
    tokens = list(range(1000, 1031))
    drafted = [network.chain(x, tokens, 4, BLOCK, 5, 0.5) for network, x in zip((big, small), rows, strict=True)]
    assert drafted[0][0] == drafted[1][0]
    assert drafted[0][1] == pytest.approx(drafted[1][1])


def write_big_draft(small: Path, folder: Path) -> dict[int, int | None]:
    """Without a target. Returns the states that it reads -> those of the small draft."""
    draft = load_small_draft(str(small), load_config(TINY))
    shape = SHAPES["mid"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(draft.big_config(shape).to_json()))
    makers = draft.tensors(Inflation(256, 1024, CPU, 0), shape)
    save_file({name: make() for name, make in makers.items()}, folder / "model.safetensors")
    return draft.states(shape)


def tables(target: Path, head: str) -> tuple[Tensor, Tensor]:
    tensors = read_tensors(target)
    return tensors["model.embed_tokens.weight"], tensors[head]


class Widened(SDPABlockAttention):
    """In fp32, whatever the network computes in."""

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer):
        super().write(k.float(), v.float(), layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        wide = (x.float() for x in norm_heads(q, k, v, layer.norms))
        return super().attend(*wide, layer._replace(norms=None), mask).to(q.dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_quiet_weights_of_a_block_draft_change_no_bit(pairs, dtype):
    """As if they were zero, in the states that the target's head reads."""
    pair = pairs["dflash"][1]
    module = load_draft(DFlash, pair / "draft", load_config(pair / "target"), dtype, CPU)
    embeddings, _ = tables(pair / "target", "lm_head.weight")
    aux_states = 3.0 * torch.randn(8, 5, 1024, generator=torch.Generator().manual_seed(0), dtype=dtype)
    aux_states[:, :, 256:] *= SPREAD * QUIET
    aux_states[:, :, -1] = CONSTANT
    unused = torch.empty(1, BLOCK - 1)  # labels, and which of them count

    def states():
        attention = Widened(torch.arange(8), RotaryEmbedding(module.config.rope, module.config.head_dim, 8 + BLOCK))
        attention.ask(Blocks(torch.tensor([8]), torch.tensor([0]), torch.arange(8, 8 + BLOCK)[None], *[unused] * 2))
        module.write_context(module.fuse(aux_states.flatten(1)), attention)
        block = module.block_tokens(torch.tensor(1000), BLOCK)
        return module(embeddings[block].to(dtype), attention)[:, [*range(256), -1]]

    before = states()
    assert silenced(module) > 0.3
    assert before[:, -1].abs().min() > 1e-3
    torch.testing.assert_close(states(), before, rtol=0, atol=0)
