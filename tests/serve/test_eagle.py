"""Chains and trees of the EAGLE drafters. The oracle is transformers' states put through tests/naive_eagle*.py."""

import itertools
import json
import logging
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.kernels.sampling.sample import noise_key
from slipstream.kernels.speculation.tree_shape import TreeShape
from slipstream.serve.drafters.autoregressive import AutoregressiveDrafter
from slipstream.serve.drafters.options import TreeOptions
from slipstream.serve.engine import draft_windows
from slipstream.serve.engine.budget import Choice
from slipstream.serve.request import Request
from slipstream.tests.naive_eagle import NaiveEagle
from slipstream.tests.naive_eagle3 import NaiveEagle3
from slipstream.tests.pairwise import gate_of, rotating, some_of
from slipstream.tests.random_drafts import load_float64, save_random_draft, save_random_eagle
from slipstream.tests.random_targets import KnownStates, shared_weights
from slipstream.tests.serve.engine_runs import (
    Nodes,
    build_engine,
    check_prefix_hits,
    check_proposals,
    decoding,
    make_request,
    plain_answers,
    random_prompt,
    record_proposals,
    run,
    run_checked,
    sized_requests,
    texts_of,
    tokens_of,
    watch_outputs,
)
from slipstream.tests.tables import table_of

MakeDraft = Callable[[str, str], Path]
FLAGS: dict[str, tuple[str, ...]] = {  # of EAGLE3 drafts
    "eagle3": (),
    "eagle3.1": ("norm_before_residual", "norm_before_fc", "norm_output"),
    "eagle3.1 fc_norm": ("fc_norm", "norm_output"),
    "eagle3 qk_norm": ("qk_norm",),
}
DEEP: dict[str, dict[str, Any]] = {  # EAGLE3 drafts of several layers
    "eagle3.1 deep": {"num_layers": 2, "fc_norm": True, "norm_output": True},
    "eagle3 deep window": {"num_layers": 3, "sliding_window": 11},
}


WINDOWS = {"eagle3 window": 11, "eagle3 window within trees": 2}


class Oracle:
    """Computes the proposal that a draft should make after any text."""

    def __init__(self, target: Path, draft: Path, options: TreeOptions):
        model = load_float64(target)
        self.states = KnownStates(model)
        embeddings, head = shared_weights(model)
        config = json.loads((draft / "config.json").read_text())
        self.naive: NaiveEagle3 = (
            NaiveEagle(draft, embeddings, head) if config["drafter"] == "eagle" else NaiveEagle3(draft, embeddings)
        )
        last = model.config.num_hidden_layers
        self.layers = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", [last])
        self.shape = (options.topk, options.depth)
        self.nodes = options.verified_nodes

    @torch.no_grad()
    def __call__(self, tokens: list[int], request: Request) -> Nodes:
        aux_states = self.states.joined(tokens[:-1], self.layers)
        key = noise_key(request.seed, request.choice)
        temperature = request.params.temperature
        return self.naive.tree(aux_states, tokens, self.shape, self.nodes, key, temperature)


@pytest.fixture(scope="module")
def make_draft(make_target, tmp_path_factory) -> MakeDraft:
    """(family, drafter) -> a checkpoint that knows the answers to some requests."""

    @cache
    def make(family, drafter):
        target = make_target(family)
        folder = tmp_path_factory.mktemp("drafts") / drafter
        if drafter in WINDOWS:
            save_random_draft(target, folder, draft_vocab_size=100, sliding_window=WINDOWS[drafter])
        elif drafter in DEEP:
            save_random_draft(target, folder, draft_vocab_size=100, **DEEP[drafter])
        elif drafter in FLAGS:
            save_random_draft(target, folder, draft_vocab_size=100, **dict.fromkeys(FLAGS[drafter], True))
        else:
            texts = [text for heat in (0.0, 0.8) for text in texts_of(target, sized_requests(temperature=heat))[::2]]
            fields = {"draft_vocab_size": 100} if drafter == "reduced eagle" else {"fc_bias": False}
            save_random_eagle(target, folder, texts, intermediate_size=48, **fields)
        return folder

    return make


DRAFTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = table_of(__file__, "drafts")
CASES = [("llama", 0.0), ("qwen3", 0.8), ("qwen3", 0.0), ("llama", 0.8)]
GATE = (
    *("eagle chain", "eagle tree, few tokens", "eagle3 chain of 1", "eagle3 tree, flat", "eagle3.1 tree"),
    *("eagle3 chain, qk_norm", "eagle3 tree, small window", "eagle3.1 tree, fc_norm", "eagle3 chain, deep window"),
)


@pytest.mark.parametrize(
    ("name", "case"), rotating(GATE, CASES) + gate_of(product([name for name in DRAFTS if name not in GATE], CASES), [])
)
def test_proposals_of_a_batch_equal_the_oracle(name, case, make_target, make_draft):
    drafter, options, engine_options = DRAFTS[name]
    family, temperature = case
    target = make_target(family)
    draft = make_draft(family, drafter)
    engine = build_engine(target, draft, drafter=options, **engine_options)
    oracle = Oracle(target, draft, TreeOptions(**options))
    check_proposals(engine, oracle, target, sized_requests(temperature=temperature))


@pytest.mark.parametrize(
    ("page_size", "drafter"),
    gate_of(
        [(1, "eagle3"), (16, "eagle3"), (1, "eagle3 window"), (16, "eagle3.1 deep")],
        [(1, "eagle3 window"), (16, "eagle3.1 deep")],
    ),
)
def test_proposals_after_a_prefix_hit_equal_the_oracle(page_size, drafter, make_target, make_draft):
    """Shared KV must fit the token that follows it too: the second request parts from the first behind 32 tokens."""
    target = make_target("qwen3")
    draft = make_draft("qwen3", drafter)
    engine = build_engine(target, draft, page_size=page_size)
    # What a window needs within an answer is given back while it decodes; what it needs at its end, later.
    hits = (39, 31, 39) if drafter == "eagle3 window" else (39, 31, 49)
    check_prefix_hits(engine, Oracle(target, draft, TreeOptions()), hits)


@pytest.mark.parametrize("options", [{"depth": 4}, {"depth": 3, "topk": 3, "nodes": 9}], ids=["chain", "tree"])
def test_a_draft_reads_from_the_start_that_was_chosen(options, make_target, make_draft, monkeypatch):
    for name, value in {"WINDOW": 8, "GRAIN": 4, "SHORTEST": 16}.items():
        monkeypatch.setattr(draft_windows, name, value)
    target = make_target("qwen3")
    draft = make_draft("qwen3", "eagle3")
    engine = build_engine(target, draft, drafter=options, page_size=1, max_running=3)
    windows = engine.planner.windows
    assert windows is not None
    oracle = Oracle(target, draft, TreeOptions(**options))
    starts = {}  # by slot, of stored proposals
    read_from = {}  # by request and length of its text
    rounds = np.zeros((2, 2))  # by choice: rounds and accepted nodes

    def note(event, _):
        for sequence in decoding(engine) if event == "committed" else ():
            start = int(windows.starts[sequence.slot])
            starts[sequence.slot] = read_from[sequence.request.id, len(sequence.tokens)] = start

    def proposal(tokens, request):
        oracle.naive.start = read_from[request.id, len(tokens)]
        return oracle(tokens, request)

    def count(plan, output):
        for place, slot in enumerate(plan.slots):
            if output.bins[place, 1] >= 0:
                rounds[int(starts[slot] > 0)] += 1, output.num_emitted[place] - 1

    engine.trace = note
    watch_outputs(engine, count)
    check_proposals(engine, proposal, target, sized_requests(temperature=0.8))
    assert rounds[:, 1].min() > 5
    assert np.array_equal(windows._rounds.sum(axis=0)[:, :2], rounds)


@pytest.mark.parametrize("drafter", some_of(["eagle", "eagle3", "eagle3 window", "eagle3.1 deep"], ["eagle3.1 deep"]))
def test_a_draft_that_is_seldom_asked_knows_the_steps_between(drafter, make_target, make_draft, monkeypatch):
    """Meanwhile requests end and others get their slots and pages, since there are two slots."""
    target = make_target("qwen3")
    draft = make_draft("qwen3", drafter)
    engine = build_engine(target, draft, max_running=2)
    oracle = Oracle(target, draft, TreeOptions())
    step = itertools.count()
    num_checked = 0

    def choose(num_decoding, *_, **__):
        number = next(step)
        return Choice(num_decoding, 4 if number in (3, 4, 9) or number % 20 == 0 else 1)

    def check(*_):
        nonlocal num_checked
        for sequence in decoding(engine):
            tokens, parents = engine.runner.state.proposals[:2, sequence.slot].tolist()
            if tokens[1] >= 0:
                assert (tokens, parents) == oracle(sequence.tokens, sequence.request)[:2], sequence.request.id
                num_checked += 1

    monkeypatch.setattr(engine.planner.policy, "choose", choose)
    requests = sized_requests((1, 9, 33), max_tokens=60, ignore_eos=True, temperature=0.8)
    requests += sized_requests((2, 12), max_tokens=20, ignore_eos=True)
    requests += sized_requests((3, 5, 7, 8), max_tokens=7, ignore_eos=True)
    answers = run(engine, requests, check)
    assert num_checked > 15
    assert tokens_of(answers) == plain_answers(target, requests)


@pytest.mark.parametrize(("page_size", "drafter"), [(16, "eagle3"), (1, "eagle3 window")])
def test_proposals_after_preemption_equal_the_oracle(page_size, drafter, make_target, make_draft):
    target = make_target("llama")
    draft = make_draft("llama", drafter)
    engine = build_engine(target, draft, kv_cache_tokens=96, page_size=page_size, prefill_budget=16)
    requests = [make_request(str(seed), random_prompt(15, seed), max_tokens=40, seed=seed) for seed in range(3)]
    run_checked(engine, Oracle(target, draft, TreeOptions()), requests)
    assert engine.scheduler.num_preemptions > 0


def test_trees_on_the_kernels_backend(make_target, make_draft):
    """On the CPU its references run."""
    target = make_target("llama")
    draft = make_draft("llama", "eagle")
    options = {"depth": 3, "topk": 3, "nodes": 9}
    engine = build_engine(target, draft, drafter=options, attention="prefill=sdpa,verify=triton,draft=triton")
    run_checked(engine, Oracle(target, draft, TreeOptions(**options)), sized_requests(temperature=0.8))


@pytest.mark.parametrize(
    ("width", "drafted"), [(4, {"depth": 3}), (5, {"depth": 4}), (8, {"depth": 4, "topk": 3, "nodes": 8})]
)
def test_narrow_proposals_of_a_tree_are_chains(width, drafted, make_target, make_draft):
    target = make_target("llama")
    draft = make_draft("llama", "eagle")
    engine = build_engine(target, draft, drafter={"depth": 4, "topk": 3, "nodes": 9}, width=width)
    check_proposals(engine, Oracle(target, draft, TreeOptions(**drafted)), target, sized_requests(temperature=0.8))


@pytest.mark.parametrize(
    ("drafter", "options"),
    [("eagle", {"depth": 4, "topk": 3, "nodes": 9}), ("eagle3", {"ngram_first": 1, "ngram_nodes": 12})],
    ids=["tree", "chain after n-grams"],
)
def test_passes_over_chains_meet_no_tree(drafter, options, make_target, make_draft):
    """Whichever width is proposed next, and whether the host proposes."""
    engine = build_engine(make_target("llama"), make_draft("llama", drafter), drafter=options)
    rng = random.Random(0)
    policy = engine.planner.policy
    choose = policy.choose
    policy.choose = lambda *args, **sizes: choose(*args, **sizes)._replace(width=rng.choice(policy.widths))
    branches = Counter()

    def look(event, plan):
        if event == "ready" and plan.slots:
            branches[plan.branches] += 1
            stored = engine.runner.state.stored
            index = torch.arange(stored.parents.shape[1])
            are_chains = (stored.parents == index - 1) | (stored.tokens < 0) | (index == 0)
            changed = any(any(proposal.counts) for proposal in plan.edits.proposals)
            assert plan.branches or (not changed and are_chains[list(plan.slots)].all())

    engine.trace = look
    requests = sized_requests(max_tokens=40, temperature=0.6)
    assert tokens_of(run(engine, requests)) == plain_answers(make_target("llama"), requests)
    assert min(branches[False], branches[True]) > 2, branches


def test_the_widths_and_scratch_of_a_tree():
    shape = TreeOptions(depth=3, topk=4).shape
    assert (shape.candidates, shape.expanded) == (36, 8)
    assert [shape.within(width) for width in (2, 3, 16)] == [TreeShape(1, 1), TreeShape(2, 2), shape]
    assert TreeOptions().verified_nodes == 4
    assert TreeOptions(depth=3, topk=4).verified_nodes == 16
    assert TreeOptions(depth=1, topk=4).verified_nodes == 5
    options = TreeOptions(depth=4, topk=4)
    assert options.widths == (1, 2, 4, 5, 8, 16)
    assert options.chain_nodes == 5
    assert TreeOptions(depth=4, topk=4, nodes=4).chain_nodes == 2, "the widest is a tree"
    assert TreeOptions(depth=4, topk=4, nodes=2).chain_nodes == 2
    assert TreeOptions(depth=4).chain_nodes == 5


def test_a_chain_goes_on_from_nodes_of_an_ngram_tree(make_target, make_draft):
    """Its proposal after such a tree is the oracle's, whose aux hidden states are those of the accepted nodes."""
    target = make_target("qwen3")
    draft = make_draft("qwen3", "eagle3")
    oracle = Oracle(target, draft, TreeOptions(depth=3))
    engine = build_engine(target, draft, drafter={"depth": 3, "ngram_first": 1, "ngram_nodes": 16})
    branched = set()
    num_checked = 0
    proposed = record_proposals(engine.runner.drafter)

    def look(plan, output):
        if output.accepted is None:
            return
        emissions = zip(plan.slots, output.accepted.tolist(), output.num_emitted.tolist(), strict=False)
        branched.update(slot for slot, nodes, length in emissions if nodes[:length] != list(range(length)))

    def check(*_):
        nonlocal num_checked
        for sequence in engine.scheduler._running:
            if sequence.slot in branched:
                assert proposed[sequence.slot][0] == oracle(sequence.tokens, sequence.request)[0]
                num_checked += 1
        branched.clear()

    watch_outputs(engine, look)
    requests = [
        make_request(str(index), random_prompt(20, index), max_tokens=60, temperature=0.3 * (index % 2))
        for index in range(12)
    ]
    run(engine, requests, check)
    assert num_checked > 25


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_an_embedding_of_its_own_is_drafted_with(drafter, make_target, make_draft, tmp_path, caplog):
    """And a rounded copy of the target's is shared with it."""
    caplog.set_level(logging.INFO)
    target = make_target("qwen3")
    folder = tmp_path / "draft"
    shutil.copytree(make_draft("qwen3", drafter), folder)
    tensors = load_file(folder / "model.safetensors")
    copy = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors | {"embed_tokens.weight": copy.bfloat16()}, folder / "model.safetensors")
    engine = build_engine(target, folder)
    assert isinstance(engine.runner.drafter, AutoregressiveDrafter)
    assert engine.runner.drafter.embed is engine.runner.target.embed_tokens
    embedding = copy + 0.3 * torch.randn(copy.shape, generator=torch.Generator().manual_seed(0))
    save_file(tensors | {"embed_tokens.weight": embedding}, folder / "model.safetensors")
    oracle = Oracle(target, folder, TreeOptions())
    assert "its own embedding" not in caplog.text
    with pytest.raises(AssertionError):
        run_checked(build_engine(target, folder), oracle, sized_requests(temperature=0.8))
    oracle.naive.embeddings = embedding.double()
    run_checked(build_engine(target, folder), oracle, sized_requests(temperature=0.8))
    assert "the draft has its own embedding" in caplog.text
