"""Several MTP modules that draft in turn. The oracle is transformers' modules over whole texts."""

import logging
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_layers import MtpModel

from slipstream.kernels.sampling.sample import noise_key
from slipstream.kernels.speculation.draft_tree import Frontier
from slipstream.serve.drafters import autoregressive
from slipstream.serve.drafters.options import TreeOptions
from slipstream.serve.dry_run import DryRun, report
from slipstream.serve.engine import draft_windows
from slipstream.serve.kernels import report as kernels_report
from slipstream.serve.kernels_options import KernelsConfig
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.runner.batch import DraftBatch, Proposal
from slipstream.tests.mtp_targets import MTPTarget, Oracle, add_tensors, save_almost_copying
from slipstream.tests.pairwise import grouped, rotating, some_of
from slipstream.tests.random_drafts import load_float64
from slipstream.tests.random_targets import change_json
from slipstream.tests.serve.engine_runs import (
    build_engine,
    bytes_of,
    caches_of,
    check_prefix_hits,
    make_request,
    plain_answers,
    random_prompt,
    remembered,
    run,
    run_checked,
    sized_requests,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import build_played
from slipstream.tests.user_errors import user_error

DRAFTED: dict[str, dict[str, int]] = {
    "one": {"depth": 1},
    "chain": {"depth": 4},
    "tree": {"depth": 4, "topk": 3, "nodes": 12},
}
ENGINES: dict[str, dict[str, Any]] = {
    "pages": {"page_size": 16, "prefill_budget": 64},
    "chunks": {"page_size": 1, "prefill_budget": 7},
    "one-by-one": {"page_size": 1, "prefill_budget": 1},
}
chain_and_tree = pytest.mark.parametrize("drafted", ["chain", "tree"])


@grouped("kind", "count")
@pytest.mark.parametrize(
    ("kind", "count", "drafted", "temperature", "engine"),
    rotating(["ernie", "glm4-moe", "hy-v3"], [2, 3], DRAFTED, [0.0, 0.8], ENGINES),
)
def test_proposals_equal_those_of_transformers(kind, count, drafted, temperature, engine, make_mtp):
    """Also of texts that are shorter than the modules are many."""
    target = make_mtp(kind, count)
    options = TreeOptions(**DRAFTED[drafted])
    drafting = build_engine(
        target.folder, "mtp", drafter=DRAFTED[drafted], width=options.verified_nodes, **ENGINES[engine]
    )
    requests = sized_requests((1, 2, 3, 9, 33), temperature=temperature, max_tokens=7)
    answers = run_checked(drafting, Oracle(target, options), requests)
    assert tokens_of(answers) == plain_answers(target.folder, requests)
    assert sum(answer.counts.drafted_tokens for answer in answers.values()) > 0


@pytest.mark.parametrize(
    ("count", "usable"),
    [
        pytest.param(1, (39, 31, 49), marks=pytest.mark.slow),
        pytest.param(2, (38, 30, 48), marks=pytest.mark.slow),
        (3, (37, 29, 47)),
    ],
)
def test_proposals_after_a_prefix_hit_and_a_preemption_equal_those_of_transformers(count, usable, make_mtp):
    target = make_mtp("glm4-moe", count)
    oracle = remembered(Oracle(target, TreeOptions()))
    for options in ({"page_size": 16}, {"page_size": 1, "prefill_budget": 5}):
        check_prefix_hits(build_engine(target.folder, "mtp", width=4, **options), oracle, usable)
    engine = build_engine(target.folder, "mtp", width=4, page_size=16, prefill_budget=16)
    prompt = random_prompt(40, 1)
    engine.add(make_request("cut", prompt))
    engine.step()
    engine.abort("cut")
    answers = run_checked(engine, oracle, [make_request("next", prompt, max_tokens=4)])
    cached = 16 if count == 1 else 0  # later modules lack the end of the first page
    assert answers["next"].counts.cached_tokens == cached
    engine = build_engine(target.folder, "mtp", width=4, kv_cache_tokens=80, prefill_budget=16)
    requests = [make_request(str(seed), random_prompt(15, seed), seed=seed, max_tokens=16) for seed in range(3)]
    run_checked(engine, oracle, requests)
    assert engine.scheduler.num_preemptions > 0


@pytest.fixture
def copying(make_mtp, tmp_path, monkeypatch) -> Callable[[int], MTPTarget]:
    """count of modules -> a target that almost copies."""

    def make(count):
        origin = make_mtp("glm4-moe", count)
        monkeypatch.setattr(type(origin.model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[4-9]\..*"])
        folder = tmp_path / "target"
        save_almost_copying(origin.folder, folder, count)
        model = load_float64(folder)
        return MTPTarget(folder, model, MtpModel.from_pretrained(model).double(), zero_first=False)

    return make


@pytest.mark.parametrize(("count", "drafted"), rotating([2, 3], ["chain", "tree"]))
def test_modules_keep_up_when_several_tokens_are_accepted(count, drafted, copying):
    target = copying(count)
    options = TreeOptions(**DRAFTED[drafted])
    requests = sized_requests((1, 9, 50), max_tokens=21, ignore_eos=True, temperature=0.3)
    width = options.verified_nodes
    engine = build_engine(target.folder, "mtp", drafter=DRAFTED[drafted], width=width, prefill_budget=16)
    oracle = remembered(Oracle(target, options))
    for _ in range(2):
        answers = run_checked(engine, oracle, requests)
        assert tokens_of(answers) == plain_answers(target.folder, requests)
    lengths = [20 / answer.counts.rounds for answer in answers.values()]
    assert max(lengths) > 2
    assert min(lengths) < width
    assert answers["50"].counts.cached_tokens > 0


class Proposals:
    """Collects what a drafter proposes for requests with seeds of their own: key, committed tokens, nodes, parents."""

    def __init__(self, drafter: Any):
        self.rows: list[tuple[int, int, list[int], list[int]]] = []
        self.propose = drafter.propose
        drafter.propose = self

    def __call__(self, batch: DraftBatch, width: int) -> Proposal:
        proposal = self.propose(batch, width)
        columns = batch.state.keys[batch.requests], batch.lengths, proposal.tokens, proposal.parents
        self.rows += zip(*(column.tolist() for column in columns), strict=True)
        return proposal


@pytest.mark.parametrize("drafted", some_of(["chain", "tree"], ["tree"]))
def test_passes_as_a_gpu_has_them_propose_what_transformers_does(drafted, copying):
    """Ragged passes of fixed size, filled up with padding, which is written to the dump page only."""
    target = copying(3)
    options = TreeOptions(**DRAFTED[drafted])
    sizes = {"max_running": 3, "prefill_budget": 32, "prefill_graph_tokens": 32, "page_size": 1}
    sizes |= {"drafter": DRAFTED[drafted], "width": options.verified_nodes, "kv_cache_tokens": 512}
    engine = build_played(EngineConfig(target=str(target.folder), draft="mtp", grammar_drafts=False, **sizes))
    assert engine.runner.steps is not None
    assert engine.runner.drafts is not None
    for cache in caches_of(engine):
        cache.fill_(7)
    with torch.inference_mode():
        engine.runner.steps.run_all()
        engine.runner.drafts.run_all()
    assert all((cache[:, :, 1:] == 7).all() for cache in caches_of(engine))
    proposals = Proposals(engine.runner.drafter)
    requests = sized_requests((1, 9, 33, 50, 70), max_tokens=12, ignore_eos=True, temperature=0.3)
    run(engine, requests)
    answers = run(engine, requests)
    assert tokens_of(answers) == plain_answers(target.folder, requests)
    assert answers["70"].counts.cached_tokens > 0
    by_key = {noise_key(request.seed, request.choice): request for request in requests}
    oracle = remembered(Oracle(target, options))
    num_checked = 0
    for key, length, nodes, parents in proposals.rows:
        request = by_key.get(key)
        text = [] if request is None else [*request.prompt, *answers[request.id].tokens]
        if request is not None and length < len(text):  # not padding, nor after the end
            assert oracle(text[: length + 1], request)[:2] == (nodes, parents)
            num_checked += 1
    assert num_checked >= 2 * sum(answer.counts.rounds for answer in answers.values()) > 0


def test_a_dry_run_of_trees_reads_states_that_exist(make_mtp, monkeypatch):
    """Kernels that are not launched leave zeros, from which indices are made."""
    sizes = {"max_running": 3, "kv_cache_tokens": 512, "drafter": DRAFTED["tree"]}
    sizes["width"] = TreeOptions(**DRAFTED["tree"]).verified_nodes
    target = make_mtp("glm4-moe", 3).folder
    engine = build_played(EngineConfig(target=str(target), draft="mtp", grammar_drafts=False, **sizes))
    grow = autoregressive.grow

    def grow_without_kernel(*args):
        frontier = grow(*args)
        return None if frontier is None else Frontier(*(value * 0 for value in frontier))

    monkeypatch.setattr(autoregressive, "grow", grow_without_kernel)
    assert engine.runner.drafts is not None
    with torch.inference_mode():
        engine.runner.drafts.run_all()


CAPTURED: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "attention": "prefill=sdpa,verify=triton,draft=triton",
}


@pytest.mark.gpu
@chain_and_tree
@pytest.mark.parametrize("kind", ["ernie", "glm4-moe", "hy-v3"])
def test_captured_steps_change_no_token(kind, drafted, make_mtp):
    folder = make_mtp(kind, 3).folder
    width = TreeOptions(**DRAFTED[drafted]).verified_nodes
    engine = build_engine(folder, "mtp", drafter=DRAFTED[drafted], width=width, prefill_budget=16, **CAPTURED)
    requests = sized_requests((1, 9, 33), temperature=0.8)
    assert tokens_of(run(engine, requests)) == plain_answers(folder, requests)


@pytest.mark.gpu
@chain_and_tree
def test_captured_steps_accept_what_eager_ones_do(drafted, make_mtp, tmp_path):
    """The proposals of captured steps are seen in what is accepted alone."""
    save_almost_copying(make_mtp("glm4-moe", 3).folder, tmp_path / "target", 3)
    width = TreeOptions(**DRAFTED[drafted]).verified_nodes
    shape = {"drafter": DRAFTED[drafted], "width": width, "prefill_budget": 16}
    requests = sized_requests((1, 9, 50), max_tokens=21, ignore_eos=True, temperature=0.3)
    captured, eager = (
        run(build_engine(tmp_path / "target", "mtp", **shape, **options), requests) for options in (CAPTURED, {})
    )
    assert tokens_of(captured) == tokens_of(eager)
    assert [answer.counts.rounds for answer in captured.values()] == [answer.counts.rounds for answer in eager.values()]
    assert min(answer.counts.rounds for answer in eager.values()) < 10


def test_their_memory_is_counted(make_mtp):
    config = ServeConfig(target=str(make_mtp("hy-v3", 3).folder), draft="mtp", dtype="bfloat16", device="cpu")
    engine = build_engine(make_mtp("hy-v3", 3).folder, "mtp", dtype="bfloat16")
    dry = DryRun(config)
    assert dry.networks[1].size == bytes_of(engine.runner.drafter.module)
    assert dry.plan.draft.layers == engine.runner.drafter.module.attention_specs
    assert dry.plan.draft.lookahead == len(dry.plan.draft.layers) == 3
    assert "draft: mtp (mtp, 3 layers, bfloat16)" in report(config)


def test_copies_in_later_modules_are_dropped_and_others_refused(make_mtp, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(make_mtp("glm4-moe", 2).folder, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.5.shared_head.head.weight"
    add_tensors(folder, {name: tensors["lm_head.weight"].clone()})
    build_engine(folder, "mtp")
    add_tensors(folder, {name: 2 * tensors["lm_head.weight"]})
    with user_error(r"later.0.lm_head.weight is not that of the first MTP module; modules with one"):
        build_engine(folder, "mtp")


def test_files_and_config_may_count_modules_otherwise(make_mtp, tmp_path, caplog):
    target = make_mtp("glm4-moe", 2)
    folder = tmp_path / "target"
    shutil.copytree(target.folder, folder)
    caplog.set_level(logging.INFO)
    build_engine(folder, "mtp")
    assert "more MTP heads" not in caplog.text
    change_json(folder / "config.json", num_nextn_predict_layers=3)
    with user_error("have 2 of the 3 MTP modules that num_nextn_predict_layers of their config.json says; fetch a"):
        build_engine(folder, "mtp")
    change_json(folder / "config.json", num_nextn_predict_layers=1)
    engine = build_engine(folder, "mtp")
    assert len(engine.runner.drafter.in_turn) == 1
    assert f"{folder} have more MTP heads than draft: the last of 1 drafts all later tokens" in caplog.text


def test_windows_are_refused(make_mtp):
    with user_error("the draft has 2 MTP modules, which draft in turn, and a window, with which"):
        build_engine(make_mtp("glm4-moe", 2).folder, "mtp", drafter={"window": 64})


def test_modules_draft_from_starts_that_are_chosen(copying, monkeypatch):
    for name, value in {"WINDOW": 8, "GRAIN": 4, "SHORTEST": 16}.items():
        monkeypatch.setattr(draft_windows, name, value)
    folder = copying(3).folder
    engine = build_engine(folder, "mtp", drafter=DRAFTED["tree"], page_size=1)
    requests = sized_requests((9, 50, 70), max_tokens=21, ignore_eos=True, temperature=0.3)
    assert tokens_of(run(engine, requests)) == plain_answers(folder, requests)
    rounds, accepted, _ = engine.planner.windows._rounds[:, 1].sum(axis=0)  # with windows
    assert accepted > rounds > 5


def test_kernels_are_listed_for_each_module(make_mtp):
    table = kernels_report(KernelsConfig(target=str(make_mtp("hy-v3", 2).folder), draft="mtp", exact=False))
    names = {line.split()[0] for line in table.splitlines() if "qkv_proj" in line}
    assert names == {"self_attn.qkv_proj", "mtp.self_attn.qkv_proj", "mtp.later.0.self_attn.qkv_proj"}
