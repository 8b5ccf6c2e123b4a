"""Log-probabilities of answers and prompts: with every drafter those of transformers, step by step."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.kernels.sampling import logprobs as kernels
from slipstream.serve.engine import build as engine_build
from slipstream.serve.request import MOST_LOGPROBS, Logprobs, Request, SamplingParams
from slipstream.serve.runner import logits as runner_logits
from slipstream.tests.pairwise import some_of
from slipstream.tests.serve.engine_runs import (
    DRAFTERS,
    SAMPLINGS,
    VOCAB,
    Answer,
    Build,
    acceptance,
    build_engine,
    counted_bins,
    drafted_engines,
    make_request,
    random_prompt,
    run,
    texts_of,
    tokens_of,
)
from slipstream.tests.serve.played_graphs import build_played, replays_of
from slipstream.tests.tables import each_case

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(target) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Returns requests of every sampling, some with log-probabilities of the answer, the prompt, or both."""
    fields_of_requests = [
        {"logprobs": 5},
        {},
        {"logprobs": 0, "prompt_logprobs": 2},
        {"logprobs": 20},
    ]
    fields_of_requests.append({"prompt_logprobs": 0})
    return [
        make_request(
            f"{name} {index}", random_prompt(5 + 9 * index, index), max_tokens=20, seed=index, **fields, **params
        )
        for index, fields in enumerate(fields_of_requests)
        for name, params in SAMPLINGS.items()
        if (index + len(name)) % 2
    ]


@pytest.fixture(scope="module")
def build(target, requests, tmp_path_factory) -> Build:
    """(drafter, engine options) -> engine. Drafts know the answers."""
    return drafted_engines(target, tmp_path_factory.mktemp("drafts"), texts_of(target, requests))


@torch.inference_mode()
def expected_rows(model: Any, request: Request, tokens: list[int]) -> Tensor:
    """(tokens of prompt and answer - 1, V): log-probabilities of what may follow each."""
    logits = model(torch.tensor([request.prompt + tokens])).logits[0, :-1]
    return logits.float().log_softmax(dim=-1)


def check(logprobs: Logprobs | None, k: int | None, rows: Tensor, tokens: list[int]):
    """`rows` (N, V): what the tokens' places allow."""
    if k is None:
        assert logprobs is None
        return
    assert (
        len(logprobs) == len(logprobs.ranks) == len(logprobs.top) == len(logprobs.top_ids) == len(tokens) == len(rows)
    )
    scores = rows[torch.arange(len(tokens)), tokens]
    torch.testing.assert_close(torch.tensor(logprobs.tokens, dtype=scores.dtype), scores, atol=TOLERANCE, rtol=0)
    for row, token, rank, top, ids in zip(rows, tokens, logprobs.ranks, logprobs.top, logprobs.top_ids, strict=True):
        assert len(top) == len(ids) == len(set(ids)) == k
        best = row.sort(descending=True).values[:k]
        torch.testing.assert_close(torch.tensor(top), best, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(torch.tensor(top), row[ids], atol=TOLERANCE, rtol=0)
        near = row[token] + torch.tensor([TOLERANCE, -TOLERANCE])
        assert 1 + int((row > near[0]).sum()) <= rank <= 1 + int((row > near[1]).sum())


def check_answers(model: Any, requests: list[Request], answers: dict[str, Answer]):
    for request in requests:
        answer = answers[request.id]
        size = len(request.prompt)
        rows = expected_rows(model, request, answer.tokens)
        params = request.params
        check(answer.logprobs, params.logprobs, rows[size - 1 :], answer.tokens)
        check(answer.prompt_logprobs, params.prompt_logprobs, rows[: size - 1], request.prompt[1:])


@pytest.mark.parametrize("drafter", some_of(DRAFTERS, ["none", "eagle3 tree", "ngram"]))
def test_they_are_those_of_transformers(drafter, build, requests, model):
    engine = build(drafter)
    answers = run(engine, requests)
    if drafter == "ngram":  # it knows what it has seen
        answers = run(engine, requests)
    check_answers(model, requests, answers)
    if drafter != "none":
        assert acceptance(answers) > 0
    bare = [
        replace(request, params=replace(request.params, logprobs=None, prompt_logprobs=None)) for request in requests
    ]
    assert tokens_of(answers) == tokens_of(run(build("none"), bare)), "asking changes no token"


@pytest.mark.parametrize("drafter", some_of(["none", "eagle3 tree", "ngram"], ["none", "eagle3 tree"]))
def test_when_preempted(drafter, build, requests, model):
    """And with prompts cut into chunks, whose log-probabilities are begun anew."""
    engine = build(drafter, kv_cache_tokens=130, page_size=1, prefill_budget=16)
    answers = run(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    check_answers(model, requests, answers)


@pytest.mark.parametrize("drafter", some_of(["none", "eagle3", "eagle3 tree", "dflash"], ["eagle3 tree", "dflash"]))
def test_captured_passes(drafter, build, requests, model, monkeypatch):
    """Padding and steps in flight; passes that score prompts are launched as they are."""
    monkeypatch.setattr(engine_build, "build_engine", build_played)
    engine = build(drafter, max_running=4, prefill_graph_tokens=64)
    assert engine.overlap
    check_answers(model, requests, run(engine, requests))
    plain = [make_request("plain", random_prompt(9, 1), temperature=0.0)]
    before = replays_of(engine)
    run(engine, plain)
    after = replays_of(engine)
    assert {key[-1] for key in after if after[key] != before.get(key)} == {"plain"}, "others pay nothing"


@pytest.mark.parametrize("family", ["qwen3", "qwen3-windows"])
def test_prefix_hits(family, make_target):
    """Log-probabilities of an answer use them; those of a prompt cannot."""
    prompt = random_prompt(40, 1)
    path = make_target(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = build_engine(path, page_size=1)
    for name, params, cached in (
        ("first", {}, 0),
        ("answer", {"logprobs": 2}, 39),
        ("prompt", {"prompt_logprobs": 2}, 0),
        ("again", {"logprobs": 1}, 39),
    ):
        requests = [make_request(name, prompt, max_tokens=8, **params)]
        answers = run(engine, requests)
        check_answers(model, requests, answers)
        assert answers[name].counts.cached_tokens == cached


def test_a_prompt_alone(build, model):
    """No token is generated; beside others that get theirs. Prompts of whole pages, too."""
    sizes = (1, 2, 16, 30, 48)
    scored = [make_request(str(size), random_prompt(size, size), max_tokens=0, prompt_logprobs=3) for size in sizes]
    requests = [*scored, make_request("other", random_prompt(12, 1), logprobs=1)]
    for drafter in ("none", "eagle3"):
        answers = run(build(drafter), requests)
        check_answers(model, requests, answers)
        for request in scored:
            assert (answers[request.id].tokens, answers[request.id].finish_reason) == ([], "length")


def test_logits_of_prompts_are_held_in_parts(build, model, monkeypatch):
    engine = build("none")
    sizes = []
    logits = type(engine.runner.target).logits

    def watched(target, hidden):
        sizes.append(len(hidden))
        return logits(target, hidden)

    monkeypatch.setattr(runner_logits, "LOGITS_BYTES", 7 * 4 * VOCAB)
    monkeypatch.setattr(type(engine.runner.target), "logits", watched)
    scored = [make_request("0", random_prompt(60, 0), max_tokens=0, prompt_logprobs=1)]
    check_answers(model, scored, run(engine, scored))
    assert sizes == [1, *[7] * 8, 3]


def test_processed(target):
    """From the distribution that tokens are sampled from; tokens that cannot be sampled have none."""
    bias = {7: 3.0, 9: -100.0}
    prompt = random_prompt(9, 1)
    filtered = {"temperature": 0.5, "top_k": 4}
    kinds = {"filters": filtered, "greedy": {"temperature": 0.0, "logit_bias": bias}}
    requests = [
        make_request(name, prompt, logprobs=6, seed=3, max_tokens=12, **fields) for name, fields in kinds.items()
    ]
    raw, processed = (run(build_engine(target, logprobs_mode=mode), requests) for mode in ("raw", "processed"))
    assert tokens_of(raw) == tokens_of(processed)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    check_answers(model, requests, raw)
    for request in requests:
        answer = processed[request.id]
        rows = expected_rows(model, request, answer.tokens)[len(prompt) - 1 :]
        if request.id == "filters":
            rows = rows / 0.5
            rows = rows.masked_fill(rows < rows.topk(4).values[:, -1:], -torch.inf).log_softmax(dim=-1)
            assert all(top[4:] == [-torch.inf] * 2 for top in answer.logprobs.top)
            values = torch.tensor([top[:4] for top in answer.logprobs.top])
            torch.testing.assert_close(values, rows.topk(4).values, atol=TOLERANCE, rtol=0)
        else:
            rows = rows.clone()
            rows[:, list(bias)] += torch.tensor(list(bias.values()))
            check(answer.logprobs, 6, rows.log_softmax(dim=-1), answer.tokens)


def test_they_teach_what_drafts_are_accepted(build, monkeypatch):
    engine = build("eagle3")
    counted = counted_bins(engine, monkeypatch)
    params = {"max_tokens": 9, "ignore_eos": True}
    run(engine, [make_request("a", [5, 6], logprobs=1, **params), make_request("b", [7, 8], **params)])
    assert max(counted) == 2


@each_case()
def test_wrong_values_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_tokens": 9} | params)


def test_the_most_is_one_number():
    assert kernels.MOST_LOGPROBS == MOST_LOGPROBS
