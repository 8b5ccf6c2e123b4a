"""LoRA adapters of drafts, by request: no token changes, rows are drafted as by a draft with the adapter merged, and
shares of requests."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.models.drafts.adapters import read_adapter, write_adapter
from slipstream.models.drafts.base import load_draft
from slipstream.models.drafts.source import source_of
from slipstream.models.files.checkpoint import weights_fingerprint
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.families import OutputGate
from slipstream.serve.drafters.registry import find_drafter
from slipstream.serve.engine.build import build
from slipstream.serve.engine.draft_adapters import with_adapter
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.engine_plan import read_plan
from slipstream.serve.engine.learning import with_states
from slipstream.serve.engine.team import Team
from slipstream.serve.http.metrics import Metrics
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request, RequestStats
from slipstream.tests.pairwise import gate_of, grouped, some_of
from slipstream.tests.random_drafts import save_random_dflash
from slipstream.tests.serve.engine_runs import (
    SAMPLINGS,
    Answer,
    build_engine,
    make_request,
    plain_answers,
    random_prompt,
    run,
    tokens_of,
)
from slipstream.tests.serve.known_answers import uneven_requests
from slipstream.tests.serve.played_graphs import play
from slipstream.tests.serve.test_lossless import CHECKPOINTS, OPTIONS, Proposals, record
from slipstream.tests.user_errors import user_error
from slipstream.train.low_rank import adapt_layers, factors_of

LAGUNA = {"tap_norms": True, "context_norms": True, "gate": OutputGate(activation="softplus", by_head=True)}
DRAFTS = {**CHECKPOINTS, "laguna": partial(save_random_dflash, **LAGUNA)}
BLOCKS = ["dflash", "dflash2 tree", "dspark", "lilicorr", "laguna"]
DRAFTERS = ["eagle", "eagle tree", "eagle3", "eagle3 deep", "ngram first", *BLOCKS]
NAMES = ("none", "x", "y")
Drafts = Callable[[str], dict[str, Path]]


def save_adapter(target: Path, draft: Path, folder: Path, rank: int, seed: int) -> Path:
    """An adapter of random factors."""
    network = find_drafter(source_of(str(draft)))
    module = load_draft(network.Network, draft, load_config(target), torch.float32, torch.device("cpu"))
    adapt_layers(module, rank, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 12
    folder.mkdir()
    factors = factors_of(module, module.state_dict())
    write_adapter(folder, str(draft), factors, module.config.to_json(), {}, weights_fingerprint(draft))
    return folder


@pytest.fixture(scope="module")
def drafts(make_target, tmp_path_factory) -> Drafts:
    """Name in DRAFTS -> a draft, and two adapters of other ranks by name."""

    @cache
    def make(save):
        folder = tmp_path_factory.mktemp("drafts")
        target = make_target("qwen3")
        save(target, folder / "none")
        adapters = {
            key: save_adapter(target, folder / "none", folder / key, len(key) + i, i) for i, key in enumerate("xy", 2)
        }
        return {"none": folder / "none", **adapters}

    return lambda name: make(DRAFTS[name])


def options_of(drafter: str, folders: dict[str, Path], **options: Any) -> dict[str, Any]:
    adapters = {name: str(folders[name]) for name in "xy"}
    return {"drafter": {**OPTIONS.get(drafter, {}), "adapters": adapters, **options}}


def in_turn(requests: list[Request]) -> list[Request]:
    """Requests that take the adapters in turn."""
    return [
        replace(request, params=replace(request.params, draft_adapter=NAMES[index % 3]))
        for index, request in enumerate(requests)
    ]


def rounds_of(answer: Answer) -> tuple[int, int, list[int]]:
    counts = answer.counts
    return counts.rounds, counts.drafted_tokens, counts.accepted_by_position


def rounds_by_name(answers: dict[str, Answer]) -> dict[str, tuple[int, int, list[int]]]:
    return {name: rounds_of(answer) for name, answer in answers.items()}


def proposals_of(seed: int | None, proposals: Proposals) -> Proposals:
    """The proposals for the request with this seed."""
    return {text: nodes for text, nodes in proposals.items() if text[0] == seed}


@grouped("sampling")
@pytest.mark.parametrize(
    ("drafter", "sampling"),
    gate_of(
        [(drafter, sampling) for drafter in DRAFTERS for sampling in SAMPLINGS],
        [("eagle3", "greedy"), ("eagle tree", "processed"), ("ngram first", "full"), ("dflash", "plain")],
    ),
)
def test_rows_are_drafted_as_by_merged_drafts(drafter, sampling, make_target, drafts):
    """In one batch, with all of a proposal verified."""
    target = make_target("qwen3")
    folders = drafts(drafter)
    plain = uneven_requests(SAMPLINGS[sampling], 18)
    requests = in_turn(plain)
    shape = {"width": 4, "device": "cpu", "max_running": 8}
    engine = build_engine(target, folders["none"], **options_of(drafter, folders), **shape)
    proposals = Proposals()
    record(engine, proposals)
    answers = run(engine, requests)
    assert tokens_of(answers) == plain_answers(target, plain, device="cpu")
    if drafter == "ngram first":
        return  # n-grams are those of all texts
    kinds = set()
    for name in NAMES:
        merged = build_engine(target, folders[name], drafter=OPTIONS.get(drafter, {}), **shape)
        expected = Proposals()
        record(merged, expected)
        alone = run(merged, plain)
        for request in requests:
            if request.params.draft_adapter == name:
                assert rounds_of(answers[request.id]) == rounds_of(alone[request.id]), name
                assert answers[request.id].counts.draft_adapter == name
                seed = request.params.seed
                assert proposals_of(seed, proposals) == proposals_of(seed, expected), name
        kinds.add(str(rounds_by_name(alone)))
    assert len(kinds) == 3, "the adapters draft otherwise"


@pytest.mark.parametrize("drafter", some_of(["eagle3", "dflash"], ["dflash"]))
def test_captured_passes_take_each_rows_adapter(drafter, make_target, drafts):
    folders = drafts(drafter)
    requests = in_turn(uneven_requests(SAMPLINGS["plain"], 18))
    options = {**options_of(drafter, folders), "width": 4}
    config = EngineConfig(
        target=str(make_target("qwen3")),
        draft=str(folders["none"]),
        max_running=5,
        kv_cache_tokens=512,
        grammar_drafts=False,
        **options,
    )
    engine = play(config)
    eager = build_engine(make_target("qwen3"), folders["none"], device="cpu", max_running=5, **options)
    for answers in (run(engine, requests), run(engine, requests)):
        expected = run(eager, requests)
        assert rounds_by_name(answers) == rounds_by_name(expected)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "dflash"])
def test_ranks_take_the_same_adapters(drafter, make_target, drafts):
    folders = drafts(drafter)
    options = {"draft": str(folders["none"]), "device": "cpu", "width": 4, "kv_cache_tokens": 2048}
    options |= {"max_running": 8, "grammar_drafts": False, **options_of(drafter, folders)}
    requests = in_turn(uneven_requests(SAMPLINGS["plain"], 18))
    team = Team(2, torch.device("cpu"))
    config = EngineConfig(target=str(make_target("qwen3")), tp=2, **options)
    engine = build(read_plan(config), team=team)
    answers = run(engine, requests)
    engine.close()
    expected = run(build(read_plan(replace(config, tp=1))), requests)
    assert rounds_by_name(answers) == rounds_by_name(expected)


@pytest.mark.parametrize("drafter", some_of(["eagle3", "dflash"], ["eagle3"]))
def test_pages_of_another_adapter_are_not_read(drafter, make_target, drafts):
    folders = drafts(drafter)
    engine = build_engine(make_target("qwen3"), folders["none"], device="cpu", width=4, **options_of(drafter, folders))
    prompt = random_prompt(70, 70)
    cached = []
    figures = []
    for index, name in enumerate(("x", "y", "none", "x", "y")):
        answers = run(engine, [make_request(str(index), prompt, draft_adapter=name)])
        figures.append((name, rounds_of(answers[str(index)])))
        cached.append(answers[str(index)].counts.cached_tokens)
    assert cached == [0, 0, 0, 64, 64]
    assert figures[3:] == figures[:2]


def test_shares_are_those_of_requests_that_name_none(make_target, drafts):
    folders = drafts("eagle3")
    options = options_of("eagle3", folders, ab={"y": 0.25, "x": 0.5})
    engine = build_engine(make_target("qwen3"), folders["none"], device="cpu", **options)
    plan = engine.engine_plan.draft
    assert (plan.adapters, plan.shares) == (("x", "y"), (0.5, 0.25))
    requests = [make_request(str(index), [5, 9], max_tokens=3) for index in range(2000)]
    numbers = [with_adapter(request, plan.adapters, plan.shares).adapter for request in requests]
    assert numbers == [with_adapter(request, plan.adapters, plan.shares).adapter for request in requests]
    shares = [numbers.count(number) / len(numbers) for number in range(3)]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.04)
    metrics = Metrics()
    for answer in run(engine, requests[:12]).values():
        metrics.count_finished("stop", answer.counts, 1.0)
    for name, number in zip(NAMES, range(3), strict=True):
        rounds = metrics.registry.get_sample_value("slipstream_adapter_rounds_total", {"adapter": name})
        assert bool(rounds) == (number in numbers[:12])
    request = make_request("0", [5, 9], draft_adapter="none")
    assert with_adapter(request, plan.adapters, plan.shares).adapter == 0


def test_counts_of_several_choices_name_all_adapters():
    total = RequestStats()
    for name, expected in (("x", "x"), ("x", "x"), ("none", "none+x"), ("x", "none+x"), ("", "none+x")):
        total.add(RequestStats(draft_adapter=name))
        assert total.draft_adapter == expected
    total = RequestStats()
    total.add(RequestStats())
    assert total.draft_adapter == ""


@pytest.fixture
def engine(make_target, drafts) -> Engine:
    folders = drafts("eagle3")
    return build_engine(make_target("qwen3"), folders["none"], device="cpu", **options_of("eagle3", folders))


def test_unknown_names_and_other_weights_are_refused(engine, make_target, drafts):
    with user_error(re.escape("draft_adapter is 'z'; give x, y, none, or leave it out")):
        engine.add(make_request("a", [5, 9], draft_adapter="z"))
    with user_error(r"drafter\.adapters change the weights that serve"):
        engine.stage_draft(str(drafts("eagle3")["x"]))
    with user_error(r"a draft with drafter\.adapters takes no other weights"):
        with_states(engine.config)
    folders = drafts("eagle3")
    for options, message in (
        ({"adapters": {"none": str(folders["x"])}}, "drafter.adapters has the name 'none'"),
        ({"adapters": {"a b": str(folders["x"])}}, "drafter.adapters has the name 'a b'"),
        ({"adapters": {"x": "/gone"}}, "drafter.adapters.x /gone does not exist"),
        ({"adapters": {1: "/gone"}}, "drafter.adapters.1 /gone does not exist"),
        ({"ab": {"z": 0.5}}, "drafter.ab gives z the share 0.5"),
        ({"ab": {"x": 0.5, "y": 0.6}}, "more than 1 together"),
        ({"adapters": {"x": str(drafts("eagle")["x"])}}, "changes fc of shape [32, 64]; this draft's is [32, 96]"),
    ):
        with user_error(re.escape(message)):
            build_engine(
                make_target("qwen3"), folders["none"], device="cpu", **options_of("eagle3", folders, **options)
            )


def test_an_adapter_of_another_draft_is_served_with_a_warning(make_target, drafts, tmp_path, caplog):
    folders = drafts("eagle3")
    target = make_target("qwen3")
    draft = tmp_path / "draft"
    shutil.copytree(folders["none"], draft)
    tensors = load_file(draft / "model.safetensors")
    tensors["fc.weight"] *= 2
    options = options_of("eagle3", folders)
    build_engine(target, draft, device="cpu", **options)
    assert not caplog.records
    save_file(tensors, draft / "model.safetensors")
    build_engine(target, draft, device="cpu", **options)
    messages = [record.message for record in caplog.records]
    assert messages == [
        f"adapter {folders[name]} was trained on other weights than draft {draft} holds: expect fewer accepted tokens, "
        "or name the draft that it was trained on"
        for name in "xy"
    ]


def test_a_chain_of_adapters_is_merged_unless_it_has_no_end(make_target, drafts, tmp_path):
    folders = drafts("eagle3")
    target = make_target("qwen3")
    second = save_adapter(target, folders["x"], tmp_path / "second", 3, 5)
    network = find_drafter(source_of(str(second)))
    once, twice = (
        load_draft(network.Network, folder, load_config(target), torch.float32, torch.device("cpu"))
        for folder in (folders["x"], second)
    )
    factors = read_adapter(second).factors["fc"]
    assert torch.equal(twice.fc.weight, once.fc.weight + factors.b @ factors.a)
    config = json.loads((second / "adapter_config.json").read_text())
    (second / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(second)}))
    with user_error("base_model_name_or_path leads back to it; name its draft"):
        build_engine(target, second, device="cpu")


def test_a_swap_merges_an_adapter(make_target, drafts):
    folders = drafts("eagle3")
    engine = build_engine(make_target("qwen3"), folders["none"], device="cpu", width=4)
    requests = uneven_requests(SAMPLINGS["greedy"], 18)
    run(engine, requests)
    engine.swap_draft(engine.stage_draft(str(folders["x"])), trial_rounds=0)
    expected = run(build_engine(make_target("qwen3"), folders["x"], device="cpu", width=4), requests)
    answers = run(engine, requests)
    assert rounds_by_name(answers) == rounds_by_name(expected)
