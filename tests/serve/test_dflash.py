"""DFLASH in the engine: every proposal is what a draft computed from nothing would propose.

Wrong draft KV never shows in the output, only in fewer accepted tokens. So stored proposals are compared with
transformers' hidden states put through tests/naive_dflash.py. Lossless output is tests/serve/test_lossless.py's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.serve.batch import Batch, Proposal
from slipstream.serve.drafters.dflash import Drafter
from slipstream.serve.engine import Engine
from slipstream.serve.options import EngineConfig
from slipstream.tests.serve.dflash_drafts import VARIANTS, MakeDraft, Oracle, requests_of, variants_maker
from slipstream.tests.serve.engine_runs import (
    Answer,
    acceptance,
    build_engine,
    collect,
    make_request,
    random_prompt,
    run,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import PlayingEngine
from slipstream.tests.serve.test_drafters import partial_rounds, run_checked

OURS = "prefill=sdpa,verify=triton,draft=triton"  # on the CPU their kernels' references


@pytest.fixture(scope="module")
def make_draft(make_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> MakeDraft:
    return variants_maker(make_target, tmp_path_factory)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "options", [{"page_size": 16}, {"page_size": 1, "prefill_budget": 7}, {"page_size": 64, "attention": OURS}]
)
def test_proposals_of_a_batch_equal_the_oracle(
    variant: str, options: dict[str, Any], make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    engine = build_engine(make_target("qwen3"), make_draft("qwen3", variant), **options)
    oracle = Oracle(make_target("qwen3"), make_draft("qwen3", variant))
    answers = run_checked(engine, oracle, requests_of())
    assert tokens_of(answers) == tokens_of(run(build_engine(make_target("qwen3")), requests_of()))
    none, _, whole = partial_rounds(answers, depth=engine.width - 1)
    assert none > 0
    assert whole > 0, "some rounds accept, some do not"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_proposals_of_another_family_equal_the_oracle(
    temperature: float, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    engine = build_engine(make_target("llama"), make_draft("llama", "plain"))
    run_checked(engine, Oracle(make_target("llama"), make_draft("llama", "plain")), requests_of(temperature))


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
    assert engine.width == width
    assert engine.reserve == width + slots
    run_checked(engine, Oracle(target, draft, slots), requests_of())


@pytest.mark.parametrize("page_size", [1, 16])
def test_proposals_after_a_prefix_hit_equal_the_oracle(
    page_size: int, make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    """KV of a slot depends on nothing behind it, so a hit may end anywhere before the last token."""
    target, draft = make_target("qwen3"), make_draft("qwen3", "plain")
    engine, oracle = build_engine(target, draft, page_size=page_size), Oracle(target, draft)
    prompt = random_prompt(40, 1)
    first = run_checked(engine, oracle, [make_request("first", prompt)])
    longer = prompt + first["first"].tokens[:10]
    variants = ((prompt, 39), (prompt[:32] + random_prompt(9, 2), 32), (longer + random_prompt(3, 3), 50))
    for variant, num_shared in variants:
        answers = run_checked(engine, oracle, [make_request("next", variant)])
        assert answers["next"].counts.cached_tokens == num_shared // page_size * page_size


def test_proposals_after_preemption_equal_the_oracle(make_target: Callable[[str], Path], make_draft: MakeDraft) -> None:
    target, draft = make_target("llama"), make_draft("llama", "plain")
    engine = build_engine(target, draft, kv_cache_tokens=96)
    run_checked(engine, Oracle(target, draft), requests_of(lengths=(13, 14, 15), max_tokens=40, ignore_eos=True))
    assert engine.scheduler.num_preemptions > 0


def test_behind_trees_of_ngrams_the_network_proposes_the_same(
    make_target: Callable[[str], Path], make_draft: MakeDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = make_target("qwen3"), make_draft("qwen3", "windows")
    requests, oracle = requests_of(), Oracle(target, draft)
    expected = tokens_of(run(build_engine(target), requests))
    engine = build_engine(target, draft, drafter={"ngram_first": 2, "ngram_nodes": 7})
    proposed: dict[int, list[int]] = {}
    network: Drafter = engine.drafter.network  # type: ignore[attr-defined]
    propose = network.propose

    def recorded(batch: Batch, width: int) -> Proposal:
        proposal = propose(batch, width)
        proposed.update(zip(batch.rows.tolist(), proposal.tokens.tolist(), strict=True))
        return proposal

    monkeypatch.setattr(network, "propose", recorded)
    for _ in range(2):  # the second time, n-grams know the answers
        answers: dict[str, Answer] = {}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            collect(engine.step(), answers)
            for sequence in engine.scheduler._running:
                if sequence.decoding:
                    chain = oracle.propose(sequence.tokens, sequence.request, 3)
                    assert proposed[sequence.row] == [sequence.tokens[-1], *chain]
        assert tokens_of(answers) == expected
    assert max(len(answer.starts) for answer in answers.values()) < 8, "n-grams were accepted"


@pytest.mark.parametrize("draft_options", [{}, {"full_block": True}])
def test_widths_that_follow_the_load_change_no_token(
    draft_options: dict[str, Any], make_target: Callable[[str], Path], make_draft: MakeDraft
) -> None:
    """Rounds as they are captured: padded batches, widths 1, 2 and 4 by load, passes in flight."""
    target, draft = make_target("qwen3"), make_draft("qwen3", "windows")
    requests = requests_of(lengths=tuple(range(3, 21)), max_tokens=30, ignore_eos=True)
    expected = tokens_of(run(build_engine(target, kv_cache_tokens=4096), requests))
    options: dict[str, Any] = {"max_running": 16, "kv_cache_tokens": 700, "page_size": 1, "drafter": draft_options}
    engine = PlayingEngine(EngineConfig(target=str(target), draft=str(draft), **options))
    answers = run(engine, requests)
    assert tokens_of(answers) == expected
    assert acceptance(answers) > 0
    assert len({width for _, width, _ in engine.executor.graphs.num_rounds}) > 1  # type: ignore[union-attr]


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
    for found, right in zip(*(engine.executor.runner.caches for engine in engines), strict=True):
        assert torch.equal(found[:, :, 16:], right[:, :, 16:]), "the dump page may differ"
