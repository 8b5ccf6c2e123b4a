"""Random bodies that the server accepts, on an engine with every host stage: it lives on, and requests beside them get
the answers that they get alone."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from slipstream.bench.fuzzed import BODIES, MODEL, Generator
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.engine.engine import Engine
from slipstream.serve.http.app import api_error
from slipstream.serve.http.frontend import Frontend
from slipstream.serve.http.limits import parse_json
from slipstream.serve.http.schemas import read_body
from slipstream.serve.llm import Answer
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Grammar, Request
from slipstream.tests.kernels.triton_runs import SLOW
from slipstream.tests.serve.cache_invariants import check_scheduler
from slipstream.tests.serve.engine_runs import SAMPLINGS, build_engine, make_request, run, tokens_of
from slipstream.tests.serve.test_overlap import build_overlapping

BATCH = 6  # bodies at a time, beside one other request
CONTEXT = 96
MOST_TRIES = 200


@pytest.fixture(scope="module", params=[build_engine, pytest.param(build_overlapping, marks=SLOW)])
def engine(request, shallow) -> Iterator[Engine]:
    options = {"max_model_len": CONTEXT, "kv_cache_tokens": 128, "page_size": 1, "grammar_drafts": True}
    built = request.param(shallow, "ngram", **options)
    yield built
    built.close()


@pytest.fixture(scope="module")
def frontend(engine, shallow) -> Frontend:
    config = ServeConfig(target=str(shallow), draft="ngram", served_model_name=MODEL, max_running=8, max_waiting=8)
    return Frontend(config, engine.info)


@pytest.fixture(scope="module")
def bystanders(shallow) -> dict[str, tuple[Request, list[int]]]:
    """Requests of every kind, with what each answers alone, by id."""
    prompt = load_tokenizer(shallow, False)("Tom has 12 boxes. How many").input_ids
    grammar = Grammar("regex", "[a-c ]{5,30}")
    kinds = [
        *SAMPLINGS.values(),
        {"min_tokens": 20, "bad_words": ((5, 6), (11,)), "temperature": 0.5},
        {"grammar": grammar, "temperature": 1.0},
        {"logprobs": 3, "speculation": {"trace": True}},
    ]
    requests = [make_request(f"beside {index}", prompt, seed=index, **kind) for index, kind in enumerate(kinds)]
    alone = build_engine(shallow, max_running=1)
    answers = tokens_of(run(alone, requests))
    alone.close()
    return {request.id: (request, answers[request.id]) for request in requests}


@dataclass(frozen=True, slots=True)
class Accepted:
    """A body without the fields that the server refuses, and its choices before they begin."""

    fields: dict[str, Any]
    answers: list[Answer]


def accepted(frontend: Frontend, path: str, fields: dict[str, Any], name: str) -> Accepted | None:
    """Reads a body as the server does. None where it is refused for what it must have."""
    kind = BODIES[path]
    while True:
        try:
            body = read_body(kind, parse_json(json.dumps(fields).encode(), frontend.limits.values))
            frontend.check_model(body.model)
            requests, form = frontend.read(body, name)
            return Accepted(
                fields, [Answer(request, form, body.stop, frontend.num_spec_tokens) for request in requests]
            )
        except Exception as error:
            refusal = api_error(error)
            assert refusal.status in (400, 404), (path, fields)
            field = (refusal.param or "").split(".")[0]
            if field not in fields or field == kind.prompt_field:
                return None
            del fields[field]


def accepted_with(generator: Generator, frontend: Frontend, path: str, field: str, name: str) -> Accepted:
    """A body that has the field."""
    for _ in range(MOST_TRIES):
        accepted_body = accepted(frontend, path, generator.body(path, field), name)
        if accepted_body is not None and field in accepted_body.fields:
            return accepted_body
    raise AssertionError(f"no value of {field} was accepted at {path}; bench/fuzzed.py needs examples of it")


def answer_all(engine: Engine, beside: Request, answers: dict[str, Answer]) -> tuple[list[int], Counter[str]]:
    """The tokens of one request, and how often the others ended for which reason."""
    tokens = []
    reasons = Counter()
    for request in (beside, *(answer.request for answer in answers.values())):
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if output.request_id == beside.id:
                tokens += output.tokens
                assert output.finish_reason != "error", output.error
                continue
            answer = answers[output.request_id]
            answer.add(output)
            end = output if output.finish_reason or not answer.text.stopped else engine.abort(output.request_id)
            if end is not None and end.finish_reason is not None:
                reasons[end.finish_reason] += 1
                assert end.finish_reason != "error" or end.is_refusal, (end.error, answer.request)
                answer.generation(end)
        check_scheduler(engine.scheduler)
    return tokens, reasons


@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=SLOW)])
def test_accepted_bodies_leave_the_engine_and_other_answers_alone(rounds, engine, frontend, bystanders, caplog):
    """Every field of every endpoint, in each round."""
    rng = random.Random(rounds)
    reasons = Counter()
    generator = Generator(rng, engine.info.vocab_size)
    pairs = [(path, field) for path, kind in BODIES.items() for field in kind.model_fields] * rounds
    rng.shuffle(pairs)
    for start in range(0, len(pairs), BATCH):
        batch = enumerate(pairs[start : start + BATCH], start)
        bodies = [accepted_with(generator, frontend, *pair, f"{number}") for number, pair in batch]
        request, expected = bystanders[rng.choice(sorted(bystanders))]
        answers = {answer.request.id: answer for body in bodies for answer in body.answers}
        tokens, ends = answer_all(engine, request, answers)
        assert tokens == expected, (request, bodies)
        reasons += ends
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert reasons["stop"] > len(pairs) / 20, reasons
