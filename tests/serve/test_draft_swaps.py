"""Other weights for the draft while an engine serves: no token changes, acceptance is that of an engine that was built
with them, wrong files change nothing, and worse weights are taken back."""

import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.models.files.checkpoint import checkpoint_fingerprint
from slipstream.models.files.weights import tensors_of
from slipstream.models.layers.linear import remake_derived
from slipstream.serve.drafters import base
from slipstream.serve.engine.acceptance_alarm import AcceptanceAlarm
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.process import build_engine as build_engine_of_process
from slipstream.serve.http.guard import Guard
from slipstream.serve.http.launch import Server
from slipstream.serve.llm import LLM
from slipstream.serve.options import EngineConfig, ServeConfig
from slipstream.serve.request import Request, SamplingParams
from slipstream.tests.pairwise import gate_of, grouped, some_of
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.serve.acceptance_traffic import MIXED, Traffic
from slipstream.tests.serve.engine_runs import (
    SAMPLINGS,
    Answer,
    build_engine,
    make_request,
    plain_answers,
    run,
    tokens_of,
)
from slipstream.tests.serve.fake_server import client_of, serving
from slipstream.tests.serve.known_answers import uneven_requests
from slipstream.tests.serve.played_graphs import play
from slipstream.tests.serve.test_draft_vocabulary import save_map
from slipstream.tests.serve.test_lossless import CHECKPOINTS, OPTIONS, AnyPolicy
from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

TRAINED = ROOT / "tests" / "assets"
NETWORKS = [name for name, save in CHECKPOINTS.items() if save is not None]
Drafts = Callable[[str], tuple[Path, Path]]


def save_changed(folder: Path, changed: Path, scale: float) -> Path:
    """Copies a checkpoint with noise on all weights, `scale` times as large as these; a map of tokens stays whole."""
    generator = torch.Generator().manual_seed(len(changed.name))
    shutil.copytree(folder, changed)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std(correction=0)
            tensors[name] = (tensor + scale * noise).to(tensor.dtype)
    save_file(tensors, changed / "model.safetensors")
    return changed


@pytest.fixture(scope="module")
def drafts(make_target, tmp_path_factory) -> Drafts:
    """Name in CHECKPOINTS -> two drafts of one network."""

    @cache
    def make(save):
        folder = tmp_path_factory.mktemp("drafts")
        save(make_target("qwen3"), folder / "first")
        return folder / "first", save_changed(folder / "first", folder / "second", 0.1)

    return lambda name: make(CHECKPOINTS[name])


def swap_at_random(engine: Engine, drafts: tuple[Path, Path], seed: int) -> Callable[..., None]:
    """For `run`: swaps the draft after about every third step."""
    generator = random.Random(seed)

    def after_step(*_):
        if generator.random() < 0.3:
            engine.swap_draft(engine.stage_draft(str(generator.choice(drafts))), trial_rounds=0)

    return after_step


@grouped("sampling")
@pytest.mark.parametrize(
    ("drafter", "sampling", "page_size"),
    gate_of(
        product(NETWORKS, ["greedy", "plain", "processed"], [16, 1]),
        [
            ("eagle tree", "processed", 1),
            ("dspark tree", "plain", 16),
        ],
    ),
)
def test_swaps_at_random_steps_change_no_token(drafter, sampling, page_size, make_target, drafts):
    """Twice the same requests, so that prompts hit pages of several versions; two at once, so that some wait."""
    target = make_target("qwen3")
    requests = uneven_requests(SAMPLINGS[sampling], 24)
    engine = build_engine(
        target, drafts(drafter)[0], drafter=OPTIONS.get(drafter, {}), page_size=page_size, max_running=3, device="cpu"
    )
    engine.planner.policy = AnyPolicy(engine.planner, random.Random(0))
    expected = plain_answers(target, requests, device="cpu")
    num_accepted = 0
    for seed in (0, 1):
        answers = run(engine, requests, swap_at_random(engine, drafts(drafter), seed))
        assert tokens_of(answers) == expected
        num_accepted += sum(answer.counts.accepted_tokens for answer in answers.values())
    assert engine.counts().draft.num_swaps > 3
    assert num_accepted > 0


def counts_of(answers: dict[str, Answer]) -> dict[str, tuple[int, list[int], str]]:
    """Rounds, accepted tokens by position and the draft's version, by request."""
    counts = {name: answer.counts for name, answer in answers.items()}
    return {name: (x.rounds, x.accepted_by_position, x.weight_version) for name, x in counts.items()}


@grouped()
@pytest.mark.parametrize(
    "drafter",
    some_of([name for name in NETWORKS if name != "ngram first"], ["eagle3 deep", "dspark"]),
)
def test_a_swapped_draft_is_accepted_as_in_an_engine_built_with_it(drafter, make_target, drafts):
    """All that was derived of the weights before is theirs, and no prompt finds KV of the others: its pages are there
    for requests of both."""
    first, second = drafts(drafter)
    options = {"drafter": OPTIONS.get(drafter, {}), "width": 4, "device": "cpu"}
    requests = uneven_requests(SAMPLINGS["plain"], 18)
    alone = counts_of(run(build_engine(make_target("qwen3"), second, **options), requests))
    engine = build_engine(make_target("qwen3"), first, **options)
    before = counts_of(run(engine, requests))
    version = engine.swap_draft(engine.stage_draft(str(second))).version
    assert counts_of(run(engine, requests)) == alone
    assert {weights for _, _, weights in alone.values()} == {version}
    engine.swap_draft(engine.stage_draft(str(first)), trial_rounds=0)
    answers = run(engine, requests)
    assert counts_of(answers) == before
    assert answers["70+8"].counts.cached_tokens >= 64, "its pages are found again"
    assert {weights for _, _, weights in before.values()} == {engine.draft.version} != {version}


def test_rows_of_a_token_map_follow(make_target, drafts, tmp_path):
    """The head of a block draft keeps the rows of its tokens alone."""
    target = make_target("qwen3")
    first, second = drafts("dspark")
    options = {"token_map": save_map(tmp_path), "markov_candidates": 8}
    requests = uneven_requests(SAMPLINGS["greedy"], 18)
    alone = run(build_engine(target, second, drafter=options, width=4, device="cpu"), requests)
    engine = build_engine(target, first, drafter=options, width=4, device="cpu")
    engine.swap_draft(engine.stage_draft(str(second)))
    assert counts_of(run(engine, requests)) == counts_of(alone)


def test_a_vocabulary_and_calibration_follow(make_target, drafts, tmp_path):
    """The ids of a reduced vocabulary, the target's rows that they name, and numbers that read a head's outputs."""
    target = make_target("qwen3")
    requests = uneven_requests(SAMPLINGS["greedy"], 18)
    for drafter in ("eagle", "eagle3", "dspark"):
        first, second = drafts(drafter)
        other = save_changed(second, tmp_path / drafter, 0.0)
        tensors = load_file(other / "model.safetensors")
        values = json.loads((other / "config.json").read_text())
        if drafter == "dspark":
            count = values["block_size"]
            values["dflash_config"] |= {"confidence_temperatures": [2.0] * count, "confidence_biases": [-0.5] * count}
        else:
            shifted = torch.arange(100) + 20  # ids 20..119
            tensors["d2t"] = shifted - torch.arange(100)
            tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill_(0, shifted, True)
        (other / "config.json").write_text(json.dumps(values))
        save_file(tensors, other / "model.safetensors")
        options = {"drafter": OPTIONS.get(drafter, {}), "width": 4, "device": "cpu"}
        alone = counts_of(run(build_engine(target, other, **options), requests))
        engine = build_engine(target, first, **options)
        engine.swap_draft(engine.stage_draft(str(other)))
        assert counts_of(run(engine, requests)) == alone, drafter


@grouped()
@pytest.mark.parametrize("drafter", some_of(["eagle3", "dflash tree", "dspark"], ["eagle3", "dspark"]))
def test_captured_passes_read_the_new_weights(drafter, make_target, drafts):
    """Their buffers and weights stay where they are."""
    first, second = drafts(drafter)
    requests = uneven_requests(SAMPLINGS["plain"], 18)
    config = EngineConfig(
        target=str(make_target("qwen3")),
        draft=str(first),
        drafter=OPTIONS.get(drafter, {}),
        max_running=5,
        kv_cache_tokens=512,
        grammar_drafts=False,
        width=4,
    )
    alone = counts_of(run(play(replace(config, draft=str(second))), requests))
    engine = play(config)
    places = [tensor.data_ptr() for tensor in tensors_of(engine.runner.drafter.module).values()]
    run(engine, requests)
    engine.swap_draft(engine.stage_draft(str(second)))
    assert counts_of(run(engine, requests)) == alone
    assert [tensor.data_ptr() for tensor in tensors_of(engine.runner.drafter.module).values()] == places


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors_of(engine.runner.drafter.module).items()}


def test_a_draft_that_does_not_fit_is_refused_by_name(make_target, drafts, tmp_path):
    """Before anything changes."""
    first, _ = drafts("eagle3")
    engine = build_engine(make_target("qwen3"), first, device="cpu")
    before = weights_of(engine)
    save_random_draft(make_target("qwen3"), tmp_path / "deep", draft_vocab_size=100, num_layers=2)
    save_random_draft(make_target("qwen3"), tmp_path / "more", draft_vocab_size=90)
    cut = save_changed(first, tmp_path / "cut", 0.0)
    tensors = load_file(cut / "model.safetensors")
    tensors.pop("midlayer.mlp.up_proj.weight")
    save_file(tensors, cut / "model.safetensors")
    broken = save_changed(first, tmp_path / "broken", 0.0)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-100])
    infinite = save_changed(first, tmp_path / "infinite", math.inf)
    for name, words in (
        (tmp_path / "deep", "num_layers is 2 in it and 1 here"),
        (tmp_path / "more", "draft_vocab_size is 90 in it and 100 here"),
        (drafts("dflash")[0], "is of drafter dflash, and eagle3 drafts here"),
        (cut, "missing midlayer.mlp.up_proj.weight"),
        (broken, str(broken)),
        (infinite, "NaN or infinite"),
        (tmp_path / "none", "does not exist"),
        ("ngram", "name the checkpoint of a draft"),
    ):
        with user_error(re.escape(words)):
            engine.stage_draft(str(name))
    after = weights_of(engine)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with user_error("no network drafts here|is of drafter"):
        build_engine(make_target("qwen3"), "ngram", device="cpu").stage_draft(str(first))


def test_an_interrupted_swap_changes_nothing(make_target, drafts, monkeypatch):
    first, second = drafts("eagle3")
    engine = build_engine(make_target("qwen3"), first, width=4, device="cpu")
    requests = uneven_requests(SAMPLINGS["greedy"], 18)
    before = counts_of(run(engine, requests))
    staged = engine.stage_draft(str(second))
    with monkeypatch.context() as patch:
        calls = []

        def interrupted(module):
            calls.append(module)
            if len(calls) == 1:
                raise KeyboardInterrupt
            remake_derived(module)

        patch.setattr(base, "remake_derived", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.swap_draft(staged)
    assert counts_of(run(engine, requests)) == before
    assert engine.counts().draft.num_swaps == 0


def questions(start: int, count: int) -> list[Request]:
    prompts = [[1, 300 + seed % 50, 400 + seed % 90, 17, 25, 90 + seed % 31] for seed in range(start, start + count)]
    return [make_request(f"{start}+{index}", prompt, max_tokens=40) for index, prompt in enumerate(prompts)]


def test_noise_is_taken_back(tmp_path, monkeypatch):
    """Weights as good pass. Those that served are copied to the host once, before the first swap."""
    monkeypatch.setattr(base, "PIECE", 1000)
    draft = TRAINED / "eagle3"
    engine = build_engine(TINY, draft, device="cpu", width=4)
    drafter = engine.runner.drafter
    saved = []
    save = drafter.save_weights
    monkeypatch.setattr(drafter, "save_weights", lambda fingerprint: saved.append(fingerprint) or save(fingerprint))
    first = engine.draft.fingerprint
    run(engine, questions(0, 10))
    good = save_changed(draft, tmp_path / "good", 0.001)
    noise = save_changed(draft, tmp_path / "noise", 3.0)
    version = engine.swap_draft(engine.stage_draft(str(good)), trial_rounds=100).version
    with user_error("on trial themselves"):
        engine.swap_draft(engine.stage_draft(str(noise)))
    run(engine, questions(100, 10))
    assert engine.counts().draft.trial == "passed"
    assert engine.counts().acceptance.facts["trained_target"] == "same"
    expected = weights_of(engine)
    engine.swap_draft(engine.stage_draft(str(noise)))
    for request in questions(200, 64):
        engine.add(request)
    while engine.has_work and engine.counts().draft.num_returns == 0:
        engine.step()
    state = engine.counts().draft
    assert (state.version, state.trial, state.num_swaps, state.num_returns) == (version, "worse", 2, 1)
    after = weights_of(engine)
    assert all(torch.equal(tensor, after[name]) for name, tensor in expected.items())
    assert saved == [first]


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 100), marks=pytest.mark.slow)])
def test_a_trial_knows_noise_from_weights_as_good(seeds):
    """Mixed traffic in simulated time: noise is taken back in each try, weights as good in none. The drafts of requests
    that run when noise is taken back read its KV; no alarm is raised for that."""
    for seed in seeds:
        for quality, verdict in ((1.0, "passed"), (0.05, "worse")):
            traffic = Traffic(MIXED, seed)
            alarm = AcceptanceAlarm(traffic.num_slots, None, lambda traffic=traffic: traffic.now)
            traffic.run(alarm, 120)
            alarm.change_draft(None, {}, 2000)
            traffic.quality = quality
            traffic.run(alarm, 600, lambda trial=alarm.trial: trial.verdict != "open")
            assert alarm.trial.verdict == verdict, seed
        alarm.return_draft()
        traffic.quality = 1.0
        for running in filter(None, traffic.running):
            running.rate *= 0.2
        traffic.run(alarm, 60)
        assert not traffic.raised, seed


@pytest.mark.parametrize(("drafted", "seconds"), [(1.0, 60), (0.3, 90), (0.01, 240), (0.0, 240)])
def test_a_trial_ends_though_drafts_seldom_pay(drafted, seconds):
    """Else its caller would wait for ever. 16 requests, 10 rounds a second each."""
    traffic = Traffic(MIXED, 1)
    alarm = AcceptanceAlarm(traffic.num_slots, None, lambda: traffic.now)
    traffic.run(alarm, 120)
    alarm.change_draft(None, {}, 2000)
    assert (trial := alarm.trial) is not None
    traffic.drafted = drafted
    assert traffic.run(alarm, seconds, lambda: trial.verdict == "passed")


def test_llm_swaps_and_says_the_version():
    with LLM(str(TINY), str(TRAINED / "eagle3"), device="cpu", kv_cache_tokens=512) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0)
        [answer] = llm.generate(["Tom has"], params)
        first = answer.metrics["speculative_decoding"]["weight_version"]
        assert first == checkpoint_fingerprint(TRAINED / "eagle3")[:12]
        assert llm.swap_draft(str(TRAINED / "eagle3")) == first
        with user_error("trial_rounds is -1"):
            llm.swap_draft(str(TRAINED / "eagle3"), trial_rounds=-1)
        with user_error("in it and"):
            llm.swap_draft(str(TRAINED / "eagle3-flags"))


@pytest.fixture(scope="module")
def server(byte_target, tmp_path_factory) -> Iterator[tuple[Server, httpx.Client]]:
    """Around the fake engine, which takes a draft called other."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "drafts" / "other").mkdir(parents=True)
    (folder / "drafts" / "wide").mkdir()
    (folder / "secret").mkdir()
    config = ServeConfig(target=byte_target, port=0, draft_folder=str(folder / "drafts"), api_key="key")
    with serving(config) as server, client_of(server) as client:
        client.headers["Authorization"] = "Bearer key"
        yield server, client


def test_a_draft_is_changed_over_http(server):
    client = server[1]
    answer = client.post("/v1/drafts", json={"draft": "other"})
    version = answer.json()["weight_version"]
    assert answer.json() == {"object": "draft", "draft": "other", "weight_version": version, "trial": "open"}
    assert client.post("/v1/drafts", json={"draft": "other", "trial_rounds": 0}).json()["trial"] is None


@each_case(({"draft": "x" * 5000}, "draft names no folder"), ({"draft": "a\0"}, "draft names no folder"))
def test_refused_drafts(server, body, words):
    answer = server[1].post("/v1/drafts", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_drafts_are_changed_with_a_key_and_where_an_option_says_so(server, byte_target, tmp_path):
    assert httpx.post(f"{server[0].url}/v1/drafts", json={"draft": "other"}).status_code == 401
    with serving(ServeConfig(target=byte_target, port=0)) as other:
        assert httpx.post(f"{other.url}/v1/drafts", json={"draft": "other"}).status_code == 404
    with user_error("draft_folder .* asks for no API key"):
        Guard.of(ServeConfig(target=byte_target, host="0.0.0.0", draft_folder=str(tmp_path)))  # noqa: S104
    with user_error("draft_folder nowhere is no folder"):
        ServeConfig(target=byte_target, draft_folder="nowhere").check_inputs()


@pytest.mark.slow
def test_a_server_swaps_while_it_answers(tmp_path):
    """A real engine: streams go on, the version is in their ends and in the metrics."""
    shutil.copytree(TRAINED / "eagle3", tmp_path / "good")
    save_changed(TRAINED / "eagle3", tmp_path / "other", 0.01)
    options = {"draft": str(TRAINED / "eagle3"), "device": "cpu", "kv_cache_tokens": 4096}
    config = ServeConfig(target=str(TINY), port=0, draft_folder=str(tmp_path), **options)
    with serving(config, build_engine_of_process) as server, client_of(server) as client:
        body = {"prompt": "Tom has 3 apples.", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
        expected = client.post("/v1/completions", json=body).json()
        with ThreadPoolExecutor() as pool:
            futures = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(4)]
            swapped = client.post("/v1/drafts", json={"draft": "other", "trial_rounds": 0}).json()
            answers = [future.result().json() for future in futures]
        assert [answer["choices"][0]["text"] for answer in answers] == [expected["choices"][0]["text"]] * 4
        last = client.post("/v1/completions", json=body).json()
        assert last["choices"][0]["text"] == expected["choices"][0]["text"]
        assert last["metrics"]["speculative_decoding"]["weight_version"] == swapped["weight_version"]
        assert expected["metrics"]["speculative_decoding"]["weight_version"] != swapped["weight_version"]
        metrics = client.get("/metrics").text
        assert "slipstream_draft_swaps_total 1.0" in metrics
        assert f'draft="{swapped["weight_version"]}"' in metrics
        model = client.get("/v1/models").json()["data"][0]
        assert model["draft_fingerprint"].startswith(swapped["weight_version"])
