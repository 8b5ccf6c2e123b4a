"""Chains and trees of the EAGLE drafters. The oracle is transformers' features put through tests/naive_eagle*.py."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.kernels.draft_tree import TreeShape
from slipstream.kernels.sampling import noise_key
from slipstream.serve.autoregressive import AutoregressiveDrafter, TreeOptions
from slipstream.serve.batch import Batch, Proposal, Verdict
from slipstream.serve.drafters.base import build_options, drafter_name, find_drafter
from slipstream.serve.drafters.eagle import Drafter
from slipstream.serve.engine import Engine
from slipstream.serve.request import Request
from slipstream.tests.naive_eagle import NaiveEagle
from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.random_drafts import save_random_draft, save_random_eagle
from slipstream.tests.serve.engine_runs import (
    Answer,
    build_engine,
    collect,
    make_request,
    random_prompt,
    run,
    texts_of,
    tokens_of,
)

MakeDraft = Callable[[str, str], Path]


class Oracle:
    """What a draft should propose behind any text, and what the target should say."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        embeddings, head = (x.weight.detach() for x in (self.model.get_input_embeddings(), self.model.lm_head))
        config = json.loads((draft / "config.json").read_text())
        self.naive: NaiveEagle3 = (
            NaiveEagle(draft, embeddings, head) if config["drafter"] == "eagle" else NaiveEagle3(draft, embeddings)
        )
        last = self.model.config.num_hidden_layers
        self.layers = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [last])

    @torch.no_grad()
    def propose(self, tokens: list[int], request: Request, options: TreeOptions) -> tuple[list[int], list[int]]:
        states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        last = self.model.config.num_hidden_layers
        features = torch.cat([states[-1 if layer == last else layer + 1][0] for layer in self.layers], dim=-1)
        key, temperature = noise_key(request.seed, request.choice), request.params.temperature
        shape = (options.topk, options.depth)
        return self.naive.tree(features, tokens, shape, options.verified_nodes, key, temperature)


def run_checked(engine: Engine, oracle: Oracle, requests: list[Request], options: TreeOptions) -> dict[str, Answer]:
    """Runs to the end; after every step each decoding request's stored proposal must be the oracle's."""
    answers: dict[str, Answer] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        collect(engine.step(), answers)
        for sequence in engine.scheduler._running:
            if sequence.decoding:
                tokens, parents = oracle.propose(sequence.tokens, sequence.request, options)
                assert engine.state.tokens[sequence.row].tolist() == tokens, sequence.request.id
                assert engine.state.parents[sequence.row].tolist() == parents, sequence.request.id
    engine.scheduler.check()
    return answers


@pytest.fixture(scope="module")
def make_draft(make_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> MakeDraft:
    """(family, drafter) -> a checkpoint that knows the answers to some requests."""
    folders: dict[tuple[str, str], Path] = {}

    def make(family: str, drafter: str) -> Path:
        if (family, drafter) not in folders:
            target, folder = make_target(family), tmp_path_factory.mktemp("drafts") / drafter
            folders[family, drafter] = folder
            if drafter == "eagle3":
                save_random_draft(target, folder, draft_vocab_size=100)
            else:
                texts = [text for heat in (0.0, 0.8) for text in texts_of(target, requests_at(heat))[::2]]
                fields = {"draft_vocab_size": 100} if drafter == "reduced eagle" else {"fc_bias": False}
                fields |= {"intermediate_size": 48}
                save_random_eagle(target, folder, texts, **fields)
        return folders[family, drafter]

    return make


def requests_at(temperature: float) -> list[Request]:
    return [
        make_request(f"{length} tokens", random_prompt(length, length), temperature=temperature, seed=length)
        for length in (1, 9, 33)
    ]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("drafter", "options", "engine_options"),
    [
        ("eagle", {}, {"page_size": 16}),
        ("eagle", {"depth": 5}, {"page_size": 1, "prefill_budget": 7}),
        ("reduced eagle", {"depth": 3, "topk": 3, "nodes": 9}, {"page_size": 16}),
        ("eagle", {"depth": 4, "topk": 2, "nodes": 9}, {"page_size": 1, "prefill_budget": 7}),
        ("eagle3", {"depth": 3, "topk": 4, "nodes": 16}, {"page_size": 32}),
        ("eagle3", {"depth": 2, "topk": 5, "nodes": 5}, {"page_size": 1}),
    ],
)
def test_proposals_of_a_batch_equal_the_oracle(
    family: str,
    temperature: float,
    drafter: str,
    options: dict[str, Any],
    engine_options: dict[str, Any],
    make_target: Callable[[str], Path],
    make_draft: MakeDraft,
) -> None:
    target, draft, chosen = make_target(family), make_draft(family, drafter), TreeOptions(**options)
    engine = build_engine(target, draft, drafter=options, **engine_options)
    answers = run_checked(engine, Oracle(target, draft), requests_at(temperature), chosen)
    counts = [answer.counts for answer in answers.values()]
    assert 0 < sum(one.accepted_tokens for one in counts) < sum(one.drafted_tokens for one in counts)
    assert tokens_of(answers) == tokens_of(run(build_engine(target), requests_at(temperature)))


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_a_tree_accepts_at_least_what_its_chain_does(
    drafter: str, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    """In rounds: the best chain of the same depth is in the tree here."""
    target, draft = make_target("qwen3"), make_draft("qwen3", drafter)
    rounds = []
    for options in ({"depth": 3}, {"depth": 3, "topk": 4, "nodes": 16}):
        answers = run(build_engine(target, draft, drafter=options), requests_at(0.0))
        rounds.append(sum(answer.counts.rounds for answer in answers.values()))
    assert rounds[1] < rounds[0]


@pytest.mark.parametrize("width", [1, 2, 4, 8, 9])
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_any_width_and_page_size_changes_no_token(
    width: int, page_size: int, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    target, draft = make_target("qwen3"), make_draft("qwen3", "eagle")
    requests = [
        make_request(str(seed), random_prompt(11 * seed, seed), temperature=0.7, seed=seed, top_k=30, top_p=0.95)
        for seed in range(1, 4)
    ]
    options = {"depth": 3, "topk": 3, "nodes": 9}
    engine = build_engine(target, draft, drafter=options, width=width, page_size=page_size)
    assert tokens_of(run(engine, requests)) == tokens_of(run(build_engine(target), requests))


def test_trees_on_the_kernels_backend(make_target: Callable[[str], Path], make_draft: MakeDraft) -> None:
    """On the CPU its references run."""
    target, draft, options = make_target("llama"), make_draft("llama", "eagle"), {"depth": 3, "topk": 3, "nodes": 9}
    engine = build_engine(target, draft, drafter=options, attention="prefill=sdpa,verify=triton,draft=triton")
    run_checked(engine, Oracle(target, draft), requests_at(0.8), TreeOptions(**options))


def test_the_widths_and_scratch_of_a_tree() -> None:
    shape = TreeOptions(depth=3, topk=4).shape
    assert (shape.candidates, shape.expanded) == (36, 8)
    assert [shape.within(width) for width in (2, 3, 16)] == [TreeShape(1, 1), TreeShape(2, 2), shape]
    assert TreeOptions().verified_nodes == 4
    assert TreeOptions(depth=3, topk=4).verified_nodes == 16
    assert TreeOptions(depth=1, topk=4).verified_nodes == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "drafter.depth is 0; it must be between 1 and 63"),
        ({"topk": 17}, "drafter.topk is 17; it must be between 1 and 16"),
        ({"topk": 10, "depth": 8}, r"70 tokens to continue, topk \* \(depth - 1\), and 64 at most can be"),
        ({"nodes": 5}, "drafter.nodes is 5; with topk 1 and depth 3 it must be between 2 and 4"),
        ({"nodes": 1}, "drafter.nodes is 1"),
        ({"topk": 2, "depth": 2, "nodes": 8}, "it must be between 2 and 7"),
        ({"topk": 4, "depth": 9, "nodes": 65}, "it must be between 2 and 64"),
        ({"width": 2}, "drafter option 'width' does not exist; valid: depth, topk, nodes"),
    ],
)
def test_options_are_checked(options: dict[str, int], message: str) -> None:
    for drafter in ("eagle", "eagle3"):
        with pytest.raises(ValueError, match=message):
            build_options(find_drafter(drafter), options)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["Qwen2ForCausalLMEagle"]}, "eagle"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, "eagle"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 32000}, "eagle3"),
    ],
)
def test_published_drafts_are_told_apart(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert drafter_name(str(tmp_path)) == name


def test_a_target_is_no_draft(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="architecture LlamaForCausalLM; known drafts"):
        drafter_name(str(tmp_path))


def test_checkpoints_name_their_drafter(make_draft: MakeDraft) -> None:
    assert find_drafter(str(make_draft("llama", "eagle"))) is Drafter


def test_a_chain_goes_on_from_nodes_of_an_ngram_tree(make_target: Callable[[str], Path], make_draft: MakeDraft) -> None:
    """What it proposes behind such a tree is the oracle's, whose features are those of the accepted nodes."""
    target, draft = make_target("qwen3"), make_draft("qwen3", "eagle3")
    oracle, options = Oracle(target, draft), TreeOptions(depth=3)
    engine = build_engine(target, draft, drafter={"depth": 3, "ngram_first": 1, "ngram_nodes": 16})
    network, branched, proposed = engine.drafter.network, set[int](), dict[int, list[int]]()
    observe, propose = network.observe, network.propose

    def recorded(batch: Batch, features: Tensor, verdict: Verdict | None) -> None:
        if verdict is not None:
            each = zip(batch.rows.tolist(), verdict.nodes.tolist(), verdict.lengths.tolist(), strict=True)
            branched.update(row for row, nodes, length in each if nodes[:length] != list(range(length)))
        observe(batch, features, verdict)

    def noted(batch: Batch, width: int) -> Proposal:
        proposal = propose(batch, width)
        proposed.update(zip(batch.rows.tolist(), proposal.tokens.tolist(), strict=True))
        return proposal

    network.observe, network.propose = recorded, noted
    for index in range(24):
        engine.add(make_request(str(index), random_prompt(20, index), max_tokens=60, temperature=0.3 * (index % 2)))
    num_checked = 0
    while engine.has_work:
        branched.clear()
        engine.step()
        for sequence in engine.scheduler._running:
            if sequence.row in branched:
                tokens, _ = oracle.propose(sequence.tokens, sequence.request, options)
                assert proposed[sequence.row] == tokens
                num_checked += 1
    assert num_checked > 50


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_an_embedding_of_its_own_is_drafted_with(
    drafter: str,
    make_target: Callable[[str], Path],
    make_draft: MakeDraft,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And a rounded copy of the target's is shared with it."""
    caplog.set_level(logging.INFO)
    target, folder = make_target("qwen3"), tmp_path / "draft"
    shutil.copytree(make_draft("qwen3", drafter), folder)
    tensors = load_file(folder / "model.safetensors")
    copy = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors | {"embed_tokens.weight": copy.bfloat16()}, folder / "model.safetensors")
    engine = build_engine(target, folder)
    assert isinstance(engine.drafter, AutoregressiveDrafter)
    assert engine.drafter.embed is engine.target.embed_tokens
    own = copy + 0.3 * torch.randn(copy.shape, generator=torch.Generator().manual_seed(0))
    save_file(tensors | {"embed_tokens.weight": own}, folder / "model.safetensors")
    oracle = Oracle(target, folder)
    assert "an embedding of its own" not in caplog.text
    with pytest.raises(AssertionError):
        run_checked(build_engine(target, folder), oracle, requests_at(0.8), TreeOptions())
    oracle.naive.embeddings = own.double()
    run_checked(build_engine(target, folder), oracle, requests_at(0.8), TreeOptions())
    assert "the draft has an embedding of its own" in caplog.text
