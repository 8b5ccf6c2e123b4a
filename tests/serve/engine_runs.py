"""Tools of the engine's tests: engines over tiny targets, prompts, and running requests to their end."""

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.serve.drafters.base import Drafter
from slipstream.serve.engine import build
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.plan import StepOutput, StepPlan
from slipstream.serve.engine.scheduler import Sequence
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import (
    FinishReason,
    Logprobs,
    Output,
    Request,
    RequestStats,
    SamplingParams,
    TokenTrace,
)
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft
from slipstream.tests.serve.cache_invariants import check_scheduler
from slipstream.tests.tables import table_of

VOCAB = 120  # of the tiny targets
MOST_REQUESTS = 200  # of traffic that goes on until something rare was seen
Tokens = dict[str, list[int]]  # of answers, by request id
Nodes = tuple[list[int], list[int], list[float]]  # tokens, parents and scores of a proposal
Oracle = Callable[[list[int], Request], Nodes]  # of a text
SAMPLINGS: dict[str, dict[str, Any]] = table_of(__file__, "samplings")


def build_engine(target: Path, draft: Path | str = "none", **options: Any) -> Engine:
    """Slots store as many nodes as the draft has, unless `grammar_drafts` is on."""
    config = {"target": str(target), "draft": str(draft), "max_running": 8, "kv_cache_tokens": 2048}
    config["grammar_drafts"] = False
    return build.build_engine(EngineConfig(**config | options))


def random_prompt(length: int, seed: int) -> list[int]:
    """Returns random tokens without the targets' special ids."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def caches_of(engine: Engine) -> list[Tensor]:
    """(L, 2, slots, G, D) of each cache of each network."""
    return [cache.flat for network in engine.runner.passes.kv for cache in network.caches]


def bytes_of(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def make_request(name: str, prompt: list[int], **params: Any) -> Request:
    defaults = {"max_tokens": 24, "temperature": 0.0, "seed": 0}
    return Request(id=name, prompt=prompt, params=SamplingParams(**defaults | params))


def sized_requests(lengths: Iterable[int] = (1, 9, 33), **params: Any) -> list[Request]:
    """One for each length of prompt, which is its id and its seed, too."""
    return [
        make_request(str(length), random_prompt(length, length), **{"seed": length, "max_tokens": 18} | params)
        for length in lengths
    ]


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # index of the first token of each output
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str = ""
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    trace: list[TokenTrace] = field(default_factory=list)

    @property
    def counts(self) -> RequestStats:
        assert self.stats is not None, "the request has not ended"
        return self.stats


def collect(outputs: list[Output], answers: dict[str, Answer]):
    for output in outputs:
        answer = answers.setdefault(output.request_id, Answer())
        assert answer.finish_reason is None, "an output after the last one"
        answer.starts.append(len(answer.tokens))
        answer.tokens += output.tokens
        answer.finish_reason = output.finish_reason
        answer.stats = output.stats
        answer.error = output.error
        if output.logprobs is not None:
            answer.logprobs = Logprobs.join([answer.logprobs or Logprobs(), output.logprobs])
        assert output.trace is None or len(output.trace) == len(output.tokens)
        answer.trace += output.trace or []
        if output.prompt_logprobs is not None:
            assert answer.prompt_logprobs is None, "they come once"
            answer.prompt_logprobs = output.prompt_logprobs


def run(
    engine: Engine,
    requests: list[Request],
    after_step: Callable[[int, dict[str, Answer]], None] = lambda *_: None,
) -> dict[str, Answer]:
    """Answers by request id, once all have ended and nothing is left behind. `after_step` is called with the number of
    the step, from 0, and the answers so far."""
    answers = {}
    for request in requests:
        engine.add(request)
    for step in itertools.count():
        if not engine.has_work:
            break
        collect(engine.step(), answers)
        after_step(step, answers)
        check_scheduler(engine.scheduler)
    assert engine.num_open == 0
    assert answers.keys() == {request.id for request in requests}
    for answer in answers.values():
        assert answer.finish_reason is not None
        assert answer.counts.completion_tokens == len(answer.tokens)
    return answers


def watch_outputs(engine: Engine, look: Callable[[StepPlan, StepOutput], None]):
    """Calls `look` from now on with each step that was read, before it is committed."""
    commit = engine.planner.commit

    def looking(plan, output, *options):
        look(plan, output)
        return commit(plan, output, *options)

    engine.planner.commit = looking


def record_proposals(drafter: Drafter) -> dict[int, tuple[list[int], list[float]]]:
    """Records from now on the tokens and scores of the last proposal, by request slot."""
    propose = drafter.propose
    proposed = {}

    def recorded(batch, width):
        proposal = propose(batch, width)
        nodes = zip(proposal.tokens.tolist(), proposal.scores.tolist(), strict=True)
        proposed.update(zip(batch.requests.tolist(), nodes, strict=True))
        return proposal

    drafter.propose = recorded
    return proposed


def run_checked(engine: Engine, oracle: Oracle, requests: list[Request]) -> dict[str, Answer]:
    """Runs as `run`, with the widest proposals. After every step each decoding request's stored proposal and its scores
    must be the oracle's for its text. It is asked after the run, for a request's longest text first (`KnownStates`)."""
    policy = engine.planner.policy
    policy.fixed = policy.widths[-1]
    proposed = record_proposals(engine.runner.drafter)
    steps = []

    def record(*_):
        for sequence in decoding(engine):
            stored = tuple(engine.runner.state.proposals[:2, sequence.slot].tolist())
            steps.append((sequence.request, [*sequence.tokens], stored, proposed[sequence.slot][1]))

    answers = run(engine, requests, record)
    for request, text, stored, scores in sorted(steps, key=lambda step: (step[0].id, -len(step[1]))):
        tokens, parents, expected = oracle(text, request)
        assert stored == (tokens, parents), request.id
        assert scores == pytest.approx(expected, abs=1e-3), request.id
    return answers


def check_proposals(engine: Engine, oracle: Oracle, target: Path, requests: list[Request]):
    """Every proposal is the oracle's, some drafted tokens are accepted, and the answers are the target's."""
    answers = run_checked(engine, oracle, requests)
    assert tokens_of(answers) == plain_answers(target, requests)
    counts = [answer.counts for answer in answers.values()]
    assert 0 < sum(count.accepted_tokens for count in counts) < sum(count.drafted_tokens for count in counts)


def remembered(oracle: Oracle) -> Oracle:
    """The same, computed once for a text, however often engines come by it."""
    nodes = {}

    def recall(tokens, request):
        key = (tuple(tokens), request.seed, request.choice, request.params.temperature)
        if key not in nodes:
            nodes[key] = oracle(tokens, request)
        return nodes[key]

    return recall


def counted_bins(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, for each step that teaches the policy, how many requests it teaches of."""
    counts = []
    record = engine.planner.policy.record

    def watch(slots, *arguments):
        counts.append(len(slots))
        record(slots, *arguments)

    monkeypatch.setattr(engine.planner.policy, "record", watch)
    return counts


def decoding(engine: Engine) -> list[Sequence]:
    return [sequence for sequence in engine.scheduler._running if sequence.decoding]


def check_prefix_hits(engine: Engine, oracle: Oracle, usable: tuple[int, int, int]):
    """`run_checked` with a prompt of 40 tokens, then with prompts that have in common with it, or with its answer, all
    of it, 32 and 50 tokens, of which pages may hold the first `usable`."""
    prompt = random_prompt(40, 1)
    first = run_checked(engine, oracle, [make_request("first", prompt, max_tokens=16)])
    longer = prompt + first["first"].tokens[:10]
    variants = prompt, prompt[:32] + random_prompt(9, 2), longer + random_prompt(3, 3)
    for variant, count in zip(variants, usable, strict=True):
        answers = run_checked(engine, oracle, [make_request("next", variant, max_tokens=12)])
        page_size = engine.config.page_size
        assert answers["next"].counts.cached_tokens == count // page_size * page_size


def plain_answers(target: Path, requests: list[Request], **options: Any) -> Tokens:
    """Tokens by request id without a draft, computed once for a target, requests and options of the engine."""
    key = str(target), repr(requests), repr(options)
    if key not in _PLAIN:
        _PLAIN[key] = tokens_of(run(build_engine(target, **options), requests))
    return dict(_PLAIN[key])


_PLAIN: dict[tuple[str, str, str], Tokens] = {}


def texts_of(target: Path, requests: list[Request], **options: Any) -> list[tuple[int, list[int]]]:
    """The target's own answers, for a draft to know: length of the prompt, and all tokens."""
    answers = plain_answers(target, requests, **options)
    return [(len(request.prompt), request.prompt + answers[request.id]) for request in requests]


DRAFTERS: dict[str, dict[str, Any]] = {  # of every kind, with options
    "none": {},
    "eagle3": {"depth": 4},
    "eagle3 tree": {"depth": 3, "topk": 3, "nodes": 8},
    "dflash": {},
    "ngram": {"nodes": 9},
}
Build = Callable[..., Engine]


def drafted_engines(target: Path, folder: Path, texts: list[tuple[int, list[int]]]) -> Build:
    """(one of DRAFTERS, engine options) -> engine. The drafts, which lie in `folder`, know the texts."""
    save_random_draft(target, folder / "eagle3")
    save_random_dflash(target, folder / "dflash", texts)
    return engines_of(target, folder)


def engines_of(target: Path, folder: Path, **shared: Any) -> Build:
    """As `drafted_engines`, of drafts that lie in `folder` already. `shared`: options of all engines."""

    def make(drafter, **options):
        name = drafter.split()[0]
        draft = name if name in ("none", "ngram") else folder / name
        return build_engine(target, draft, drafter=DRAFTERS[drafter], **shared | options)

    return make


def accepted(answers: dict[str, Answer]) -> int:
    return sum(answer.counts.accepted_tokens for answer in answers.values())


def generated(model: Any, request: Request, **options: Any) -> list[int]:
    """The greedy answer of transformers' `model`."""
    prompt = torch.tensor([request.prompt])
    options |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": request.params.max_tokens}
    return model.generate(prompt, do_sample=False, **options)[0, len(request.prompt) :].tolist()


def kinds_of_requests(
    rng: random.Random, count: int, longest: int, *, longest_prompt: int | None = None
) -> dict[str, Request]:
    """Requests by id, of every kind of sampling; some prompts begin alike. Answers have fewer than `longest` tokens,
    prompts fewer than 100; with `longest_prompt` every fourth has up to so many, most of them short."""

    def prompt(index):
        if longest_prompt is not None and index % 4 == 3:
            return random_prompt(int(longest_prompt ** rng.random()), index)
        return random_prompt(40, index % 5)[: rng.randrange(1, 40)] + random_prompt(rng.randrange(1, 60), index)

    return {
        str(index): make_request(
            str(index),
            prompt(index),
            max_tokens=rng.randrange(1, longest),
            seed=index,
            ignore_eos=rng.random() < 0.7,
            **list(SAMPLINGS.values())[index % len(SAMPLINGS)],
        )
        for index in range(count)
    }


def serve_traffic(
    engine: Engine,
    kinds: dict[str, Request],
    expected: Tokens,
    rng: random.Random,
    more: Callable[[int], bool],
    most_open: int,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Keeps up to `most_open` requests open, drawn from `kinds`, as long as `more` of their number, and until one was
    preempted; aborts some. Each must get the beginning of what is expected, and all of it if it was not aborted. Calls
    `check` after every step."""
    open_kinds = {}
    answers = {}
    number = 0

    def goes_on():
        return more(number) or (number < MOST_REQUESTS and not engine.scheduler.num_preemptions)

    while goes_on() or engine.has_work:
        while len(open_kinds) < most_open and goes_on():
            kind = rng.choice(sorted(kinds))
            number = number + 1
            engine.add(Request(id=f"r{number}", prompt=kinds[kind].prompt, params=kinds[kind].params))
            open_kinds[f"r{number}"] = kind
        outputs = engine.step()
        if rng.random() < 0.05 and open_kinds:
            aborted = engine.abort(rng.choice(sorted(open_kinds)))
            outputs += [aborted] if aborted else []
        collect(outputs, answers)
        for name in [output.request_id for output in outputs if output.finish_reason]:
            answer = answers.pop(name)
            kind = open_kinds.pop(name)
            tokens = expected[kind] if answer.finish_reason != "abort" else expected[kind][: len(answer.tokens)]
            assert answer.tokens == tokens, (name, kinds[kind].params)
        check()
    assert not open_kinds
    assert engine.scheduler.num_preemptions > 0
    return number


def inside_drafts(answer: Answer) -> list[int]:
    """Indices of tokens that came first among several of one round: an answer that ends there ends inside a draft."""
    ends = [*answer.starts[1:], len(answer.tokens)]
    return [start for start, end in zip(answer.starts, ends, strict=True) if end - start > 1]


def tokens_of(answers: dict[str, Answer]) -> Tokens:
    return {name: answer.tokens for name, answer in answers.items()}


def acceptance(answers: dict[str, Answer]) -> float:
    """Accepted share of all drafted tokens."""
    counts = [answer.counts for answer in answers.values()]
    return sum(count.accepted_tokens for count in counts) / sum(count.drafted_tokens for count in counts)
