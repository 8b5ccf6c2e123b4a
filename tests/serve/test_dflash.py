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

from slipstream.kernels.gemm.low_rank import LowRankChange, LowRankFactors
from slipstream.kernels.sampling.sample import noise_key
from slipstream.models.drafts.base import load_draft, write_draft
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.drafts.heads.config import LiLiCorrConfig
from slipstream.models.drafts.heads.table import heads_of
from slipstream.models.drafts.source import source_of
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.decoder import Target, load_config, load_target
from slipstream.models.targets.families import OutputGate
from slipstream.serve.attention.sdpa import Backend as SDPABackend
from slipstream.serve.drafters.dflash import Drafter
from slipstream.serve.drafters.options import DFlashOptions
from slipstream.serve.drafters.registry import build_options, find_drafter
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request
from slipstream.serve.runner.batch import AttentionMetadata, PassRows
from slipstream.serve.runner.cuda_graphs import capture_all
from slipstream.serve.runner.kv import NetworkKV
from slipstream.serve.runner.request_state import RequestState
from slipstream.tests.naive_dflash import NaiveDFlash
from slipstream.tests.pairwise import rotating
from slipstream.tests.random_drafts import load_float64, save_random_dflash
from slipstream.tests.random_targets import RELATIVES, KnownStates, shared_weights
from slipstream.tests.serve.engine_runs import (
    Answer,
    Nodes,
    acceptance,
    build_engine,
    caches_of,
    check_prefix_hits,
    decoding,
    plain_answers,
    record_proposals,
    run,
    run_checked,
    sized_requests,
    texts_of,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import build_played
from slipstream.tests.serve.test_draft_vocabulary import save_map
from slipstream.tests.serve.test_step_graphs import check_replay, record
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

requests_of = partial(sized_requests, temperature=0.7, max_tokens=22)
OURS = "prefill=sdpa,verify=triton,draft=triton"  # on the CPU their kernels' references
MakeDraft = Callable[[str, str], Path]
needs_hybrid = pytest.mark.skipif("qwen3-5" not in RELATIVES, reason="this transformers does not know it")
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 8}
NON_CAUSAL = {"sliding_window": 12, "windowed_layers": (0, 1), "sliding_window_non_causal": True}
ANCHOR = {"sample_from_anchor": True}
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
    "dflash 2": {**CONVOLVED, "selector_rank": 12, "selector_top_k": 6, "output_multiplier": 0.5, **NON_CAUSAL},
    "selector, few tokens, capped": {"selector_rank": 8, "draft_vocab_size": 100, "final_logit_softcapping": 5.0},
    "dspark": {
        "markov_rank": 12,
        "confidence_head": True,
        "confidence_temperatures": (1.5, 0.7, 1.0, 2.0),
        "confidence_biases": (0.5, 0.0, -0.3, 0.1),
        **ANCHOR,
    },
    "gated": {"markov_rank": 12, "markov_head_type": "gated", "draft_vocab_size": 100},
    "lilicorr": {**CONVOLVED, "lilicorr": LiLiCorrConfig(candidate_topk=4, hidden_size=32, num_heads=2, factor_dim=24)},
    "confidence alone": {"confidence_head": True},
    "laguna": {
        **{"tap_norms": True, "context_norms": True, "gate": OutputGate(activation="softplus", by_head=True)},
        **{"sliding_window": 12, "windowed_layers": (0, 1)},
    },
    "gates by element, few tokens": {
        **{"gate": OutputGate(activation="sigmoid"), "tap_norms": True, "draft_vocab_size": 100},
    },
    "bias, three layers": {"attention_bias": True, "num_layers": 3, "aux_layers": (0, 1, 2, 4)},
}


@pytest.fixture(scope="module")
def make_draft(make_target, tmp_path_factory) -> MakeDraft:
    """(family, variant) -> folder of a draft that knows the first two answers to `requests_of`."""

    @cache
    def make(family, variant):
        target = make_target(family)
        folder = tmp_path_factory.mktemp("drafts") / family
        save_random_dflash(target, folder, texts_of(target, requests_of()[:2]), **VARIANTS[variant])
        return folder

    return make


class Oracle:
    """`width` nodes that the draft should propose behind any text. `slots`: of its blocks; else as many as needed.
    `topk`: children of a node of a tree; 1: a chain."""

    places_alone = False  # whether scores are those of nodes that are admitted by position

    def __init__(
        self, target: Path, draft: Path, width: int, slots: int = 0, topk: int = 1, candidates: int | None = None
    ):
        model = load_float64(target)
        self.states = KnownStates(model)
        self.naive = NaiveDFlash(draft, *shared_weights(model), candidates)
        self.layers = self.naive.config["dflash_config"]["target_layer_ids"]
        self.width = width
        self.topk = topk
        self.depth = min(width - 1, self.naive.config["block_size"] - self.naive.first)
        self.slots = slots or self.depth + self.naive.first

    @torch.no_grad()
    def __call__(self, tokens: list[int], request: Request) -> Nodes:
        aux_states = self.states.joined(tokens[:-1], self.layers)
        key = noise_key(request.seed, request.choice)
        if self.topk > 1:
            sizes = self.width, self.depth, self.slots, self.topk
            nodes, parents, scores = self.naive.tree(aux_states, tokens, sizes, key, request.params.temperature)
            return nodes, parents, [0.0] * len(scores) if self.places_alone else scores
        chain, scores = self.naive.chain(aux_states, tokens, self.width, self.slots, key, request.params.temperature)
        scores = [0.0] * len(scores) if self.places_alone else scores
        return [tokens[-1], *chain], list(range(-1, self.width - 1)), [0.0, *scores]


def partial_steps(answers: dict[str, Answer], depth: int) -> tuple[int, int, int]:
    """Counts the steps that accepted none, some and all of the `depth` drafted tokens of a request."""
    counts = [answer.counts for answer in answers.values()]
    at_least = [sum(count.rounds for count in counts)]
    at_least += [sum((count.accepted_by_position + [0] * depth)[j] for count in counts) for j in range(depth)]
    return at_least[0] - at_least[1], at_least[1] - at_least[depth], at_least[depth]


@pytest.mark.parametrize(
    ("variant", "options", "family"),
    rotating(
        VARIANTS,
        [{"page_size": 16}, {"page_size": 1, "prefill_budget": 7}, {"page_size": 64, "attention": OURS}],
        ["qwen3", "llama"],
    ),
)
def test_proposals_of_a_batch_equal_the_oracle(variant, options, family, make_target, make_draft):
    target = make_target(family)
    draft = make_draft(family, variant)
    engine = build_engine(target, draft, **options)
    answers = run_checked(engine, Oracle(target, draft, engine.planner.limits.most_nodes), requests_of())
    assert tokens_of(answers) == plain_answers(target, requests_of())
    none, _, num_full = partial_steps(answers, depth=engine.planner.limits.most_nodes - 1)
    assert none > 0
    assert num_full > 0 or variant == "lilicorr", "some steps accept, some do not; a random scorer chooses at random"


@pytest.mark.parametrize(
    ("family", "variant", "options", "candidates"),
    [
        ("qwen3", "plain", {"topk": 3, "nodes": 9}, 3),
        ("qwen3", "from the anchor", {"topk": 2, "nodes": 8}, 2),
        ("qwen3", "dflash 2", {"topk": 4, "nodes": 12}, None),
        ("qwen3", "dspark", {"topk": 3, "markov_candidates": 8}, 8),
        pytest.param("qwen3", "gated", {"topk": 4, "nodes": 9}, 64, marks=pytest.mark.slow),
        ("qwen3", "lilicorr", {"topk": 3, "nodes": 9, "block": 3}, None),
        pytest.param("qwen3", "lilicorr", {"topk": 3}, None, marks=pytest.mark.slow),
        pytest.param("qwen3-5", "dflash 2", {"topk": 2, "nodes": 9}, None, marks=needs_hybrid),
        pytest.param("qwen3-5", "dspark", {"topk": 2, "nodes": 9}, 64, marks=[needs_hybrid, pytest.mark.slow]),
    ],
)
def test_trees_equal_the_oracle(family, variant, options, candidates, make_target, make_draft):
    target = make_target(family)
    draft = make_draft(family, variant)
    attention = OURS if options["topk"] == 3 else "auto"
    engine = build_engine(target, draft, drafter=options, attention=attention)
    width = engine.planner.limits.most_nodes
    assert width == options.get("nodes", 32)
    oracle = Oracle(target, draft, width, topk=options["topk"], candidates=candidates)
    oracle.depth = min(oracle.depth, options.get("block", 99) - 1)
    oracle.slots = oracle.depth + oracle.naive.first
    answers = run_checked(engine, oracle, requests_of())
    assert tokens_of(answers) == plain_answers(target, requests_of())
    assert acceptance(answers) > 0.02 or variant == "lilicorr"


@each_case()
def test_candidates_may_be_few_or_of_a_token_map(variant, options, cut, tmp_path, make_target, make_draft):
    target = make_target("qwen3")
    draft = make_draft("qwen3", variant)
    options = options | ({"token_map": save_map(tmp_path)} if cut else {})
    engine = build_engine(target, draft, drafter=options)
    oracle = Oracle(target, draft, engine.planner.limits.most_nodes)
    naive = oracle.naive
    if cut:
        ids = engine.runner.drafter.vocabulary.target_ids(torch.arange(60))
        naive.head = naive.head[ids]
        naive.target_ids = ids
        for name in ("candidate_selector.successor_codebook", "markov_head.markov_w2.weight"):
            if name in naive.weights:
                naive.weights[name] = naive.weights[name][ids]
    if "markov_candidates" in options:
        naive.num_candidates = options["markov_candidates"]
    run_checked(engine, oracle, requests_of())


@each_case()
def test_nodes_may_be_admitted_by_candidates_or_position(options, topk, make_target, make_draft):
    """Whatever a confidence head says; and the nodes are the same. Nodes that are not used stay so."""
    target = make_target("qwen3")
    draft = make_draft("qwen3", "dspark")
    candidates = options.get("markov_candidates", 64)
    for admit_by in ("candidates", "position"):
        engine = build_engine(target, draft, drafter=options | {"admit_by": admit_by})
        oracle = Oracle(target, draft, engine.planner.limits.most_nodes, topk=topk, candidates=candidates)
        del oracle.naive.weights["confidence_head.proj.weight"]
        oracle.places_alone = admit_by == "position"
        answers = run_checked(engine, oracle, requests_of())
        assert tokens_of(answers) == plain_answers(target, requests_of())


def test_admission_by_a_confidence_that_is_not_there_is_refused(make_target, make_draft):
    with user_error("drafter.admit_by is confidence; this draft has no confidence head: leave it"):
        build_engine(make_target("qwen3"), make_draft("qwen3", "plain"), drafter={"admit_by": "confidence"})


@pytest.mark.parametrize("attention", ["auto", OURS])
def test_a_window_limits_the_context_and_not_the_block(attention, make_target, make_draft):
    target = make_target("qwen3")
    draft = make_draft("qwen3", "plain")
    engine = build_engine(target, draft, drafter={"window": 2}, attention=attention, page_size=1)
    oracle = Oracle(target, draft, 4)
    layers = ["sliding_attention"] * oracle.naive.config["num_hidden_layers"]
    oracle.naive.config |= {"layer_types": layers, "sliding_window": 2, "sliding_window_non_causal": True}
    run_checked(engine, oracle, requests_of())
    with user_error("window is 9; this draft was trained with one of 6"):
        build_engine(target, make_draft("qwen3", "windows"), drafter={"window": 9})


@pytest.mark.parametrize(
    ("draft", "options", "is_chosen"),
    [("plain", {}, True), ("plain", {"window": "all"}, False), ("windows", {}, False)],
)
def test_windows_are_chosen_for_drafts_that_would_read_all(draft, options, is_chosen, make_target, make_draft):
    engine = build_engine(make_target("qwen3"), make_draft("qwen3", draft), drafter=options)
    assert (engine.planner.windows is not None) == is_chosen
    assert (engine.runner.state.read_starts is not None) == is_chosen


@pytest.mark.parametrize(
    "heads", [{"selector_rank": 8, **CONVOLVED}, {"markov_rank": 8}, {"markov_rank": 8, "markov_head_type": "gated"}]
)
def test_heads_that_start_as_the_identity_change_no_proposal(heads, tmp_path, make_target, make_draft):
    target = make_target("qwen3")
    draft = make_draft("qwen3", "plain")
    config = load_config(target)
    plain = load_draft(DFlash, draft, config, None, torch.device("cpu"))
    fields = {name: heads[name] for name in CONVOLVED if name in heads}
    module = DFlash(replace(plain.config, heads=heads_of(heads), **fields))
    assert not module.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    (tmp_path / "draft").mkdir()
    write_draft(module, module.state_dict(), tmp_path / "draft", {})
    answers = run_checked(build_engine(target, tmp_path / "draft"), Oracle(target, draft, 4), requests_of())
    assert acceptance(answers) > 0.3


@pytest.mark.parametrize(
    ("options", "width", "slots"),
    [
        pytest.param({"drafter": {"block": 3}}, 3, 3, marks=pytest.mark.slow),
        ({"drafter": {"block": 2}}, 2, 2),
        ({"width": 2}, 2, 2),
        ({"width": 2, "drafter": {"full_block": True}}, 2, 4),
        ({"width": 2, "drafter": {"full_block": True, "block": 3}}, 2, 3),
    ],
)
def test_blocks_are_as_long_as_asked(options, width, slots, make_target, make_draft):
    target = make_target("qwen3")
    draft = make_draft("qwen3", "windows")
    engine = build_engine(target, draft, **options)
    assert engine.planner.limits.most_nodes == width
    assert engine.planner.limits.reserve == width + slots
    run_checked(engine, Oracle(target, draft, width, slots), requests_of())


@pytest.mark.parametrize("page_size", [1, 16])
def test_proposals_after_a_prefix_hit_equal_the_oracle(page_size, make_target, make_draft):
    """KV of a slot depends on nothing behind it, so a hit may end anywhere before the last token."""
    target = make_target("qwen3")
    draft = make_draft("qwen3", "plain")
    check_prefix_hits(build_engine(target, draft, page_size=page_size), Oracle(target, draft, 4), (39, 32, 50))


def test_proposals_after_preemption_equal_the_oracle(make_target, make_draft):
    target = make_target("llama")
    draft = make_draft("llama", "plain")
    engine = build_engine(target, draft, kv_cache_tokens=96)
    run_checked(engine, Oracle(target, draft, 4), requests_of(lengths=(13, 14, 15), max_tokens=40, ignore_eos=True))
    assert engine.scheduler.num_preemptions > 0


def test_behind_trees_of_ngrams_the_network_proposes_the_same(make_target, make_draft):
    target = make_target("qwen3")
    draft = make_draft("qwen3", "windows")
    requests = requests_of()
    oracle = Oracle(target, draft, 4)
    expected = plain_answers(target, requests)
    engine = build_engine(target, draft, drafter={"ngram_first": 2, "ngram_nodes": 7})
    proposed = record_proposals(engine.runner.drafter)

    def check(*_):
        for sequence in decoding(engine):
            assert proposed[sequence.slot][0] == oracle(sequence.tokens, sequence.request)[0]

    for _ in range(2):  # the second time, n-grams know the answers
        answers = run(engine, requests, check)
        assert tokens_of(answers) == expected
    assert max(len(answer.starts) for answer in answers.values()) < 8, "n-grams were accepted"


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_captured_steps_give_the_cpus_tokens(variant, page_size, make_target, make_draft):
    target = make_target("qwen3")
    draft = make_draft("qwen3", variant)
    expected = run(build_engine(target, draft, device="cpu"), requests_of())
    on_gpu = {"device": "cuda", "dtype": "float32", "attention": OURS, "page_size": page_size}
    for options in ({}, {"overlap": False}, {"cuda_graph": False, "overlap": False}, {"drafter": {"full_block": True}}):
        answers = run(build_engine(target, draft, **on_gpu | options), requests_of())
        assert tokens_of(answers) == tokens_of(expected)
        # Passes that cost more verify fewer nodes. One variant of random weights has a token accepted in 186.
        assert acceptance(answers) > 0.6 * acceptance(expected) - 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_equals_eager_bit_for_bit(dtype, make_target, make_draft):
    """The results of every step and every number of the KV caches."""
    values = {"device": "cuda", "dtype": dtype, "attention": OURS, "kv_cache_tokens": 2048}
    config = EngineConfig(target=str(make_target("qwen3")), draft=str(make_draft("qwen3", "windows")), **values)
    engine = build_played(config, capture_all)
    eager = build_played(config)
    recorded = record(engine)
    run(engine, requests_of(ignore_eos=True))
    check_replay(recorded, engine, eager)
    for replayed, right in zip(caches_of(engine), caches_of(eager), strict=True):
        assert torch.equal(replayed[:, :, 16:], right[:, :, 16:]), "the dump page may differ"


# By itself


@dataclass(frozen=True, slots=True)
class Stage:
    """A drafter by itself, with one request whose last 11 tokens have been computed."""

    drafter: Drafter
    target: Target
    metadata: AttentionMetadata
    aux_states: Tensor  # (11, K * H)

    def caches(self) -> tuple[Tensor, Tensor]:
        """The KV that the drafter writes, in one product for all layers, and that the module does, layer by layer."""
        module = self.drafter.module
        by_layer = self.attach()
        module.write_context(module.fuse(self.aux_states), by_layer)
        fused = self.attach()
        self.drafter.extend(rows_of(self.metadata), self.aux_states)
        return fused.kv.caches[0].flat, by_layer.kv.caches[0].flat

    def attach(self) -> SDPABackend:
        """A new, empty cache."""
        layers = self.drafter.module.attention_specs
        kv = NetworkKV.allocate(layers, ("all",), [5], 16, torch.float32, torch.device("cpu"))
        attention = SDPABackend(kv, [RotaryEmbedding(layers[0].rope, layers[0].head_dim, 64)] * len(layers))
        self.drafter.attach(self.target, self.metadata.state, attention)
        attention.plan(self.metadata)
        return attention


@pytest.fixture(params=["plain", "bias, three layers"])
def stage(request, make_target, make_draft) -> Stage:
    config = load_config(make_target("qwen3"))
    target = load_target(make_target("qwen3"), config, torch.float32, torch.device("cpu"))
    drafter = Drafter.load(source_of(str(make_draft("qwen3", request.param))), DFlashOptions(), target)
    state = RequestState(2, 4, 16, 11, torch.device("cpu"))
    row = torch.tensor([0])
    lengths = torch.tensor([14])
    state.pages[0, 0] = torch.tensor([3, 1, 4, 2])
    metadata = AttentionMetadata.uniform("verify", state, row, lengths, 11, 25)
    return Stage(drafter, target, metadata, torch.randn(11, len(drafter.aux_layers) * config.hidden_size))


def rows_of(metadata: AttentionMetadata) -> PassRows:
    """Eleven rows of one request."""
    return PassRows(
        positions=metadata.positions,
        slots=metadata.slots,
        next_tokens=torch.arange(11),
        requests=metadata.requests,
        last=torch.tensor([10]),
    )


def test_fused_context_equals_the_modules(stage):
    """One product and one kernel for all layers store what the module stores layer by layer."""
    cache, expected = stage.caches()
    torch.testing.assert_close(cache, expected, atol=1e-5, rtol=1e-5)
    assert cache[:, :, stage.metadata.slots.of(0)].count_nonzero() == cache.count_nonzero() > 0


@pytest.mark.parametrize("stage", ["bias, three layers", "laguna"], indirect=True)
def test_fused_context_has_the_adapters_of_the_modules(stage):
    """Adapters change all layers but the first."""
    for layer in stage.drafter.module.attentions[1:]:
        size = layer.qkv_proj.out_features
        factors = LowRankFactors(torch.randn(5, 32), torch.randn(size, 5), torch.tensor([1, 1, 2, 2, 2]))
        layer.qkv_proj.change = LowRankChange(factors, stage.drafter.adapters)
    stage.drafter.adapters.numbers = torch.arange(11) % 3
    torch.testing.assert_close(*stage.caches(), atol=1e-4, rtol=1e-4)


def test_options_are_checked(make_target, make_draft):
    assert find_drafter(source_of(str(make_draft("qwen3", "plain")))) is Drafter
    for variant, widths in (("plain", [1, 2, 4]), ("from the anchor", [1, 2, 4, 5])):
        assert build_engine(make_target("qwen3"), make_draft("qwen3", variant)).planner.policy.widths == widths
    for block in (0, 1, 65):
        with user_error(f"drafter.block is {block}; it must be between 2 and 64"):
            build_options(DFlashOptions, {"block": block})
    for options, words in {
        ("topk", 17): "drafter.topk is 17; it must be between 1 and 16",
        ("nodes", 5): "drafter.nodes is 5; a chain of this draft has between 2 and 4 nodes",
        ("markov_candidates", 65): "drafter.markov_candidates is 65; it must be between drafter.topk 1 and 64",
        ("window", 0): "drafter.window is 0; give 1 to",
        ("window", 1 << 31): "drafter.window is 2147483648; give 1 to 2147483647 tokens, auto or all",
    }.items():
        with user_error(words):
            build_engine(make_target("qwen3"), make_draft("qwen3", "plain"), drafter=dict([options]))
    nodes = {"topk": 2, "block": 3, "nodes": 9}
    with user_error("drafter.nodes is 9; with topk 2 and 2 slots it must be between 2 and 7"):
        build_engine(make_target("qwen3"), make_draft("qwen3", "plain"), drafter=nodes)
    with user_error("drafter.block is 5; .* blocks of 4 and offers at most 4 nodes"):
        build_engine(make_target("qwen3"), make_draft("qwen3", "plain"), drafter={"block": 5})
    with user_error("width is 3; this drafter offers 1, 2, 4"):
        build_engine(make_target("qwen3"), make_draft("qwen3", "plain"), width=3)


@pytest.mark.parametrize("key", ["embed_tokens.weight", "lm_head.weight"])
def test_copies_of_the_targets_weights_must_be_equal(key, tmp_path, make_target, make_draft):
    """Other trainers write them along. One that was trained further would draft other tokens than its own."""
    variant = "one window, few tokens, one aux hidden state"
    draft = make_draft("qwen3", variant)
    folder = tmp_path / "draft"
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
    with user_error(f"{key} is not the target's; a draft with one of its own is not supported"):
        build_engine(make_target("qwen3"), folder)
