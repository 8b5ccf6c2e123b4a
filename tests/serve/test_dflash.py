"""DFLASH in the engine: every proposal is what a draft computed from nothing would propose; and the drafter by itself.

Wrong draft KV never shows in the output, only in fewer accepted tokens. So stored proposals are compared with
transformers' hidden states put through tests/naive_dflash.py. Lossless output is tests/serve/test_lossless.py's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.kernels.sampling.sample import noise_key
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.drafters.dflash import Drafter
from slipstream.serve.drafters.registry import build_options, find_drafter
from slipstream.serve.engine.engine import Engine
from slipstream.serve.request import Request
from slipstream.serve.runner.batch import AttentionMetadata, PassRows, VerifyResult
from slipstream.serve.runner.kv import NetworkKV
from slipstream.serve.runner.request_state import RequestState
from slipstream.serve.runner.round import accepted_rows
from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.pairwise import rotating
from slipstream.tests.random_drafts import save_random_dflash
from slipstream.tests.random_targets import shared_weights, target_aux_states
from slipstream.tests.serve.engine_runs import (
    Answer,
    Nodes,
    acceptance,
    build_engine,
    caches_of,
    check_prefix_hits,
    decoding,
    record_proposals,
    run,
    run_checked,
    sized_requests,
    texts_of,
    tokens_of,
)

requests_of = partial(sized_requests, temperature=0.7)
OURS = "prefill=sdpa,verify=triton,draft=triton"  # on the CPU their kernels' references
MakeDraft = Callable[[str, str], Path]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"sliding_window": 6, "windowed_layers": (0, 1)},
    "one window, few tokens, one aux hidden state": {
        "sliding_window": 20,
        "windowed_layers": (1,),
        "draft_vocab_size": 100,
        "aux_layers": (2,),
    },
    "from the anchor": {"sample_from_anchor": True},
    "bias, three layers": {"attention_bias": True, "num_layers": 3, "aux_layers": (0, 1, 2, 4)},
}


@pytest.fixture(scope="module")
def make_draft(make_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> MakeDraft:
    """(family, variant) -> folder of a draft that knows the first two answers to `requests_of`."""

    @cache
    def make(family: str, variant: str) -> Path:
        target, folder = make_target(family), tmp_path_factory.mktemp("drafts") / family
        save_random_dflash(target, folder, texts_of(target, requests_of()[:2]), **VARIANTS[variant])
        return folder

    return make


class Oracle:
    """`width` nodes that the draft should propose behind any text. `slots`: of its blocks; else as many as needed."""

    def __init__(self, target: Path, draft: Path, width: int, slots: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        self.naive = NaiveDFlash(draft, *shared_weights(self.model))
        self.layers = self.naive.config["dflash_config"]["target_layer_ids"]
        self.width = width
        self.slots = slots or (width - 1 if self.naive.config.get("sample_from_anchor") else width)

    @torch.no_grad()
    def __call__(self, tokens: list[int], request: Request) -> Nodes:
        aux_states = target_aux_states(self.model, tokens[:-1], self.layers)
        key = noise_key(request.seed, request.choice)
        chain, scores = self.naive.chain(aux_states, tokens, self.width, self.slots, key, request.params.temperature)
        return [tokens[-1], *chain], list(range(-1, self.width - 1)), [0.0, *scores]


def partial_rounds(answers: dict[str, Answer], depth: int) -> tuple[int, int, int]:
    """Rounds that accepted none, some and all of the `depth` drafted tokens."""
    counts = [answer.counts for answer in answers.values()]
    at_least = [sum(one.rounds for one in counts)]
    at_least += [sum((one.accepted_by_position + [0] * depth)[j] for one in counts) for j in range(depth)]
    return at_least[0] - at_least[1], at_least[1] - at_least[depth], at_least[depth]


@pytest.mark.parametrize(
    ("variant", "options", "family"),
    rotating(
        VARIANTS,
        [{"page_size": 16}, {"page_size": 1, "prefill_budget": 7}, {"page_size": 64, "attention": OURS}],
        ["qwen3", "llama"],
    ),
)
def test_proposals_of_a_batch_equal_the_oracle(
    variant: str, options: dict[str, Any], family: str, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    target, draft = make_target(family), make_draft(family, variant)
    engine = build_engine(target, draft, **options)
    answers = run_checked(engine, Oracle(target, draft, engine.planner.widths.most), requests_of())
    assert tokens_of(answers) == tokens_of(run(build_engine(target), requests_of()))
    none, _, whole = partial_rounds(answers, depth=engine.planner.widths.most - 1)
    assert none > 0
    assert whole > 0, "some rounds accept, some do not"


@pytest.mark.parametrize(
    ("options", "width", "slots"),
    [
        ({"drafter": {"block": 3}}, 3, 3),
        ({"drafter": {"block": 2}}, 2, 2),
        ({"width": 2}, 2, 2),
        ({"width": 2, "drafter": {"full_block": True}}, 2, 4),
        ({"width": 2, "drafter": {"full_block": True, "block": 3}}, 2, 3),
    ],
)
def test_blocks_are_as_long_as_asked(
    options: dict[str, Any], width: int, slots: int, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    target, draft = make_target("qwen3"), make_draft("qwen3", "windows")
    engine = build_engine(target, draft, **options)
    assert engine.planner.widths.most == width
    assert engine.planner.widths.reserve == width + slots
    run_checked(engine, Oracle(target, draft, width, slots), requests_of())


@pytest.mark.parametrize("page_size", [1, 16])
def test_proposals_after_a_prefix_hit_equal_the_oracle(
    page_size: int, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    """KV of a slot depends on nothing behind it, so a hit may end anywhere before the last token."""
    target, draft = make_target("qwen3"), make_draft("qwen3", "plain")
    check_prefix_hits(build_engine(target, draft, page_size=page_size), Oracle(target, draft, 4), (39, 32, 50))


def test_proposals_after_preemption_equal_the_oracle(make_target: Callable[[str], Path], make_draft: MakeDraft) -> None:
    target, draft = make_target("llama"), make_draft("llama", "plain")
    engine = build_engine(target, draft, kv_cache_tokens=96)
    run_checked(engine, Oracle(target, draft, 4), requests_of(lengths=(13, 14, 15), max_tokens=40, ignore_eos=True))
    assert engine.scheduler.num_preemptions > 0


def test_behind_trees_of_ngrams_the_network_proposes_the_same(
    make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    target, draft = make_target("qwen3"), make_draft("qwen3", "windows")
    requests, oracle = requests_of(), Oracle(target, draft, 4)
    expected = tokens_of(run(build_engine(target), requests))
    engine = build_engine(target, draft, drafter={"ngram_first": 2, "ngram_nodes": 7})
    proposed = record_proposals(engine.runner.drafter)

    def check(*_: object) -> None:
        for sequence in decoding(engine):
            assert proposed[sequence.slot][0] == oracle(sequence.tokens, sequence.request)[0]

    for _ in range(2):  # the second time, n-grams know the answers
        answers = run(engine, requests, check)
        assert tokens_of(answers) == expected
    assert max(len(answer.starts) for answer in answers.values()) < 8, "n-grams were accepted"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_captured_rounds_give_the_cpus_tokens(
    variant: str, page_size: int, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    target, draft = make_target("qwen3"), make_draft("qwen3", variant)
    expected = run(build_engine(target, draft, device="cpu"), requests_of())
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": "float32", "attention": OURS, "page_size": page_size}
    for options in ({}, {"overlap": False}, {"cuda_graph": False, "overlap": False}, {"drafter": {"full_block": True}}):
        answers = run(build_engine(target, draft, **on_gpu | options), requests_of())
        assert tokens_of(answers) == tokens_of(expected)
        assert acceptance(answers) > 0.3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_equals_eager_bit_for_bit(dtype: str, make_target: Callable[[str], Path], make_draft: MakeDraft) -> None:
    """Tokens, statistics and every number of the KV caches, written by rounds of one size behind the prompts."""
    engines: list[Engine] = []
    for graph in (True, False):
        options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "overlap": False, "width": 4}
        options |= {"attention": OURS, "cuda_graph": graph, "prefill_graph_tokens": 0}
        engines.append(build_engine(make_target("qwen3"), make_draft("qwen3", "windows"), **options))
    replayed, eager = (run(engine, requests_of(ignore_eos=True)) for engine in engines)
    assert replayed == eager
    for found, right in zip(*(caches_of(engine) for engine in engines), strict=True):
        assert torch.equal(found[:, :, 16:], right[:, :, 16:]), "the dump page may differ"


# By itself


@dataclass(frozen=True, slots=True)
class Stage:
    """A drafter by itself, with one request whose last 11 tokens have been computed."""

    drafter: Drafter
    target: Target
    metadata: AttentionMetadata
    aux_states: Tensor  # (11, K * H)

    def extended(self, rows: PassRows, aux_states: Tensor, result: VerifyResult | None) -> Tensor:
        """The drafter's KV afterwards."""
        self.drafter.extend(rows, aux_states, result)
        return self.drafter.attention.kv.flat(0)

    def attach(self) -> SDPABackend:
        """A new, empty cache."""
        layers = self.drafter.kv
        kv = NetworkKV.allocate(layers, (None,), [5], 16, torch.float32, torch.device("cpu"))
        attention = SDPABackend(kv, RotaryEmbedding(layers[0].rope, layers[0].head_dim, 64))
        self.drafter.attach(self.target, self.metadata.state, attention)
        attention.plan(self.metadata)
        return attention


@pytest.fixture(params=["plain", "bias, three layers"])
def stage(request: pytest.FixtureRequest, make_target: Callable[[str], Path], make_draft: MakeDraft) -> Stage:
    config = load_config(make_target("qwen3"))
    target = load_target(make_target("qwen3"), config, torch.float32, torch.device("cpu"))
    drafter = Drafter.load(str(make_draft("qwen3", request.param)), build_options(Drafter.Options, {}), target)
    state, row, lengths = RequestState(2, 4, 16, 4, torch.device("cpu")), torch.tensor([0]), torch.tensor([14])
    state.pages[0, 0] = torch.tensor([3, 1, 4, 2])
    metadata = AttentionMetadata.uniform("verify", state, row, lengths, 11, 25)
    return Stage(drafter, target, metadata, torch.randn(11, len(drafter.aux_layers) * config.hidden_size))


def test_fused_context_equals_the_modules(stage: Stage) -> None:
    """One product and one kernel for all layers store what the module stores layer by layer."""
    module, attention = stage.drafter.module, stage.attach()
    module.write_context(module.fuse(stage.aux_states), attention)
    stage.attach()
    rows = PassRows(stage.metadata, stage.metadata.slots.of(0), stage.metadata.requests, torch.tensor([10]))
    found = stage.extended(rows, stage.aux_states, None)
    torch.testing.assert_close(found, attention.kv.flat(0), atol=1e-5, rtol=1e-5)
    assert found[:, :, stage.metadata.slots.of(0)].count_nonzero() == found.count_nonzero() > 0


def test_accepted_nodes_of_a_tree_follow_the_committed_tokens(stage: Stage) -> None:
    path = torch.tensor([0, 3, 4, 9])
    aux_states = stage.aux_states.index_copy(0, torch.arange(4), stage.aux_states[path])
    stage.attach()
    verified = VerifyResult(torch.arange(11)[None], torch.arange(11)[None], torch.tensor([11]))
    rows = accepted_rows(stage.metadata, aux_states, verified)
    expected = stage.extended(*rows, verified)[:, :, stage.metadata.slots.of(0)[:4]]
    stage.attach()
    nodes = torch.nn.functional.pad(path, (0, 7), value=-1)[None].int()
    positions = stage.metadata.positions + 5
    tree = replace(stage.metadata, positions=positions, ancestors=torch.zeros(1, 11, dtype=torch.int64))
    result = VerifyResult(nodes, nodes, torch.tensor([4]))
    found = stage.extended(*accepted_rows(tree, stage.aux_states, result), result)
    torch.testing.assert_close(found[:, :, stage.metadata.slots.of(0)[:4]], expected, atol=1e-5, rtol=1e-5)


def test_options_are_checked(make_target: Callable[[str], Path], make_draft: MakeDraft) -> None:
    assert find_drafter(str(make_draft("qwen3", "plain"))) is Drafter
    assert build_engine(make_target("qwen3"), make_draft("qwen3", "plain")).planner.widths.offered == (1, 2, 4)
    assert build_engine(make_target("qwen3"), make_draft("qwen3", "from the anchor")).planner.widths.offered == (
        1,
        2,
        4,
        5,
    )
    for block in (0, 1, 65):
        with pytest.raises(ValueError, match=f"drafter.block is {block}; it must be between 2 and 64"):
            build_options(Drafter.Options, {"block": block})
    with pytest.raises(ValueError, match="drafter.block is 5; .* blocks of 4 and offers at most 4 nodes"):
        build_engine(make_target("qwen3"), make_draft("qwen3", "plain"), drafter={"block": 5})
    with pytest.raises(ValueError, match="width is 3; this drafter offers 1, 2, 4"):
        build_engine(make_target("qwen3"), make_draft("qwen3", "plain"), width=3)


@pytest.mark.parametrize("key", ["embed_tokens.weight", "lm_head.weight"])
def test_copies_of_the_targets_weights_must_be_equal(
    key: str, tmp_path: Path, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    """Other trainers write them along. One that was trained further would draft other tokens than its own."""
    variant = "one window, few tokens, one aux hidden state"
    draft, folder = make_draft("qwen3", variant), tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text((draft / "config.json").read_text())
    tensors = load_file(draft / "model.safetensors")
    copy = load_file(make_target("qwen3") / "model.safetensors")
    copy = copy["lm_head.weight" if key == "lm_head.weight" else "model.embed_tokens.weight"].bfloat16()
    copy = copy[tensors["t2d"]] if key == "lm_head.weight" else copy
    save_file(tensors | {key: copy}, folder / "model.safetensors")
    build_engine(make_target("qwen3"), folder)
    copy[3, 3] += 1
    save_file(tensors | {key: copy}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{key} is not the target's; a draft with one of its own is not supported"):
        build_engine(make_target("qwen3"), folder)
