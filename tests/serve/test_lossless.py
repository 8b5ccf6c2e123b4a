"""Losslessness: with any drafter, in any batch, the tokens are those of the target alone.

The reference is `--draft none`, all requests in one batch; its greedy answers are those of transformers' generate, and
those of one request at a time are the same. Logits of passes of other numbers of rows differ by about 1e-6. So random
texts depend on the family alone: there are few, and in none of them does a token win by less than 5e-5.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.serve.drafters.options import DRAFTERS as TABLE
from slipstream.serve.engine import draft_windows, engine_plan
from slipstream.serve.engine.acceptance import BINS
from slipstream.serve.engine.budget import BudgetPolicy, Choice
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.host_wait import HostWait
from slipstream.serve.engine.planner import Planner
from slipstream.serve.request import Request
from slipstream.tests.pairwise import gate_of, grouped, rotating, some_of
from slipstream.tests.random_drafts import save_random_draft
from slipstream.tests.random_targets import CAPPED, FAMILIES, RELATIVES, load_model
from slipstream.tests.serve.cache_invariants import check_scheduler
from slipstream.tests.serve.engine_runs import (
    MOST_REQUESTS,
    SAMPLINGS,
    Answer,
    Tokens,
    acceptance,
    build_engine,
    collect,
    decoding,
    generated,
    inside_drafts,
    kinds_of_requests,
    make_request,
    plain_answers,
    random_prompt,
    run,
    serve_traffic,
    tokens_of,
    watch_outputs,
)
from slipstream.tests.serve.known_answers import (
    ending_requests,
    save_dflash,
    save_dflash2,
    save_dspark,
    save_eagle,
    save_lilicorr,
    uneven_requests,
)
from slipstream.tests.tables import table_of


# Drafter -> what makes its checkpoint for a target; none where it needs no checkpoint.
def save_eagle3(target: Path, folder: Path):
    save_random_draft(target, folder, draft_vocab_size=100)


def save_deep_eagle3(target: Path, folder: Path):
    save_random_draft(target, folder, draft_vocab_size=100, num_layers=2, fc_norm=True, norm_output=True)


CHECKPOINTS: dict[str, Callable[[Path, Path], None] | None] = {
    "none": None,
    "dflash": save_dflash,
    "dflash tree": save_dflash,
    "dflash2": save_dflash2,
    "dflash2 tree": save_dflash2,
    "dspark": save_dspark,
    "dspark tree": save_dspark,
    "lilicorr": save_lilicorr,
    "lilicorr tree": save_lilicorr,
    "eagle": save_eagle,
    "eagle tree": save_eagle,
    "eagle3": save_eagle3,
    "eagle3 deep": save_deep_eagle3,
    "ngram first": save_eagle3,
    "ngram": None,
}
OPTIONS: dict[str, dict[str, Any]] = table_of(__file__, "options")
LEARNING = ("ngram first", "ngram")  # drafters that know what earlier requests of the engine have said
BY_CHANCE = ("dflash2", "lilicorr")  # random selectors and scorers choose at random, at a temperature among few tokens
SEVERAL = ("dflash", "eagle", "eagle tree", "eagle3", "dflash2 tree", "dspark")
MIXTURES = ("qwen3-moe", "qwen2-moe", "mixtral")
SINKS_AND_CAPS = ("gpt-oss", "gemma2", "gemma3")
SHARED_KV = [name for name in ("gemma4-shared",) if name in RELATIVES]  # later than the oldest transformers we allow
KINDS = ("qwen3", "qwen3-moe", "mistral-window", *SHARED_KV)  # dense, a mixture of experts, windows
BLOCKS = [
    *("dflash tree", "dflash2", "dflash2 tree", "dspark", "dspark tree", "lilicorr"),
    "lilicorr tree",
]
# Drafters that fit targets of few families: test_gemma4_assistant.py, test_mtp.py.
FEW_FAMILIES = {"gemma4_assistant", "mtp"}
DRAFTERS = ["eagle tree", "ngram first", *(name for name in TABLE if name not in FEW_FAMILIES)]
# Later than the oldest transformers that we allow:
LATER_FAMILIES = ("gemma4", "gemma4-experts", "gemma4-shared", "laguna", "muse-glimmer")
LATER = [name for name in LATER_FAMILIES if name in RELATIVES]
WIDE = [name for name in ("gemma4-wide",) if name in RELATIVES]  # heads of 256 and 512 dims
OTHER_LAYERS = ("mistral-window", "qwen2-windows", "gemma3", *CAPPED, *MIXTURES, *LATER, *WIDE)
FEW = ("qwen3", "llama", "mistral-window", "qwen3-windows", "qwen3-tied")
EOS = 2  # of all random targets
BuildDrafted = Callable[..., Engine]


def drafted(
    drafters: Collection[str], *factors: Collection[Any], in_gate: Collection[tuple[Any, ...]] = ()
) -> list[Any]:
    """Returns cases for parametrize: the product of all drafters and `factors`. The gate runs `drafters`, as `rotating`
    has it, and `in_gate`."""
    other_drafters = [name for name in (*DRAFTERS, *BLOCKS) if name not in drafters]
    return [*rotating(drafters, *factors), *gate_of(product(other_drafters, *factors), in_gate)]


def is_right_now_and_then(drafter: str, answers: dict[str, Answer]) -> bool:
    """Else the test would prove little. Of drafts that choose by chance some accepted tokens in all answers are
    enough."""
    if drafter.startswith(BY_CHANCE):
        return sum(answer.counts.accepted_tokens for answer in answers.values()) >= 3
    return acceptance(answers) > 0.1


@pytest.fixture(scope="module")
def build(make_target, tmp_path_factory) -> BuildDrafted:
    """(family, drafter, engine options) -> engine. A new drafter of the folder needs an entry in CHECKPOINTS."""

    @cache
    def saved(family, save):
        folder = tmp_path_factory.mktemp("drafts") / "draft"
        save(make_target(family), folder)
        return folder

    def make(family, drafter, **options):
        save = CHECKPOINTS[drafter]
        options = {"drafter": OPTIONS.get(drafter, {})} | options
        return build_engine(make_target(family), drafter if save is None else saved(family, save), **options)

    return make


Reference = Callable[[str, list[Request]], Tokens]


@pytest.fixture(scope="module")
def reference(make_target) -> Reference:
    return lambda family, requests: plain_answers(make_target(family), requests, device="cpu")


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "sampling", "sizes", "family"),
    [
        *drafted(
            ["ngram first", "eagle3", "dflash", "eagle tree"],
            SAMPLINGS,
            [(1, 8), (16, 8), (16, 1)],
            FEW,
            in_gate=[
                ("none", "full", (16, 1), "mistral-window"),
            ],
        ),
        *drafted(["ngram", "eagle3"], ["greedy", "plain"], [(1, 8)], SINKS_AND_CAPS),
        *drafted(["eagle3", "ngram"], ["greedy", "plain"], [(16, 8)], MIXTURES),
    ],
)
def test_a_drafter_changes_no_token(drafter, sampling, sizes, family, build, reference):
    page_size, max_running = sizes
    requests = uneven_requests(SAMPLINGS[sampling])
    engine = build(family, drafter, max_running=max_running, page_size=page_size)
    answers = run(engine, requests)
    assert tokens_of(answers) == reference(family, requests)
    if drafter in LEARNING:  # random models do not repeat themselves
        answers = run(engine, requests)
        assert tokens_of(answers) == reference(family, requests)
    if drafter != "none" and family in FEW:
        assert is_right_now_and_then(drafter, answers)
        assert acceptance(answers) < 0.95
    if drafter not in ("none", *BLOCKS) and family in SINKS_AND_CAPS:
        assert acceptance(answers) > 0.05


@pytest.mark.gpu
@grouped("drafter")
@pytest.mark.parametrize("options", [{}, {"overlap": False, "page_size": 1}], ids=["overlap", "one by one"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", [*DRAFTERS, *BLOCKS])
def test_captured_steps_change_no_token(drafter, sampling, options, build, reference):
    requests = uneven_requests(SAMPLINGS[sampling])
    attention = "prefill=sdpa,verify=triton,draft=triton"
    engine = build("qwen3", drafter, device="cuda", dtype="float32", attention=attention, **options)
    if drafter.startswith(BY_CHANCE):  # by measured times it does not pay to verify what is hardly ever right
        engine.planner.policy = WidestDrafts(engine.planner, random.Random(0))
    for _ in range(2 if drafter in LEARNING else 1):
        answers = run(engine, requests)
        assert tokens_of(answers) == reference("qwen3", requests)
    if drafter != "none":
        assert is_right_now_and_then(drafter, answers)


@pytest.mark.gpu
@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "family"),
    list(product([*DRAFTERS, *BLOCKS], OTHER_LAYERS)),
)
def test_captured_steps_of_other_layers_change_no_token(drafter, family, build, reference):
    requests = uneven_requests(SAMPLINGS["plain"])
    attention = "prefill=sdpa,verify=triton,draft=triton"
    engine = build(family, drafter, device="cuda", dtype="float32", attention=attention)
    assert tokens_of(run(engine, requests)) == reference(family, requests)


@pytest.mark.parametrize(
    "family",
    some_of(
        FAMILIES | CAPPED | RELATIVES, ["qwen3", "mistral-window", "gpt-oss", "gemma2", "gemma3", "qwen3-moe", *LATER]
    ),
)
def test_the_reference_is_transformers_generate(family, make_target, reference):
    """Transformers reads each text at once, which costs less than all its beginnings; it generates one of them, too."""
    model = load_model(make_target(family), dtype=torch.float32)
    requests = uneven_requests(SAMPLINGS["greedy"])
    answers = reference(family, requests)
    for request in requests:
        tokens = answers[request.id]
        text = torch.tensor([request.prompt + tokens[:-1]])
        with torch.inference_mode():
            logits = model(text).logits[0, len(request.prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
        assert len(tokens) == request.params.max_tokens or tokens[-1] == EOS
        assert EOS not in tokens[:-1]
    assert answers[requests[1].id] == generated(model, requests[1])


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "family"),
    gate_of(
        product(("eagle3", "dflash", "eagle", *BLOCKS), sorted((FAMILIES | RELATIVES).keys() - {"qwen3", "llama"})),
        [
            *(("eagle3", family) for family in ("gemma3", "phi4-longrope", "gemma4-experts", "laguna", "muse-glimmer")),
        ],
    ),
)
def test_every_family_takes_a_draft(drafter, family, build, reference):
    requests = uneven_requests(SAMPLINGS["plain"])
    answers = run(build(family, drafter), requests)
    assert tokens_of(answers) == reference(family, requests)
    assert acceptance(answers) > 0


@grouped("drafter")
@pytest.mark.parametrize(("drafter", "family"), drafted(["none", "ngram first", "dflash"], KINDS))
def test_rows_of_one_batch_sample_each_in_its_own_way(drafter, family, build, reference):
    prompt = random_prompt(20, 1)
    requests = [make_request(name, prompt, seed=4, **sampling) for name, sampling in SAMPLINGS.items()]
    requests += [Request(id=f"choice {n}", prompt=prompt, params=requests[1].params, choice=n) for n in range(1, 4)]
    answers = tokens_of(run(build(family, drafter), requests))
    assert answers == reference(family, requests)
    assert len({tuple(tokens) for tokens in answers.values()}) == len(requests), "choices differ"


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "case", "family"),
    gate_of(
        product(SEVERAL, product([16, 1], ["stop token", "max_tokens"]), KINDS),
        [("eagle tree", (16, "stop token"), "qwen3"), ("dflash", (1, "max_tokens"), "mistral-window")],
    ),
)
def test_an_answer_may_end_inside_a_draft(drafter, case, family, build, reference):
    page_size, ending = case
    engine = build(family, drafter, page_size=page_size)
    requests = ending_requests()
    answers_to_ends = run(engine, requests)
    shorter = []
    expected = {}
    assert tokens_of(answers_to_ends) == reference(family, requests)
    for request in requests:
        tokens = answers_to_ends[request.id].tokens
        for index in inside_drafts(answers_to_ends[request.id]):
            if index and tokens[index] not in tokens[:index]:
                end = {"max_tokens": index + 1} if ending == "max_tokens" else {"stop_token_ids": (tokens[index],)}
                name = f"{request.id} to {index}"
                shorter.append(make_request(name, request.prompt, temperature=1.0, seed=request.params.seed, **end))
                expected[name] = tokens[: index + 1]
    assert len(shorter) > 8
    answers = run(build(family, drafter, page_size=page_size), shorter)
    assert tokens_of(answers) == expected
    assert {answer.finish_reason for answer in answers.values()} == {"stop" if ending == "stop token" else "length"}


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "family"),
    gate_of(product([*DRAFTERS, *BLOCKS], KINDS), [("eagle3", "qwen3"), ("ngram", "mistral-window")]),
)
def test_the_models_own_stop_ids_end_an_answer(drafter, family, build):
    endless = [
        make_request(str(seed), random_prompt(5, seed), temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)
        for seed in range(5)
    ]
    answers_to_ends = tokens_of(run(build(family, drafter), endless))
    assert {len(tokens) for tokens in answers_to_ends.values()} == {40}
    ending = [
        make_request(request.id, request.prompt, temperature=1.0, seed=request.params.seed, max_tokens=40)
        for request in endless
        if EOS in answers_to_ends[request.id]
    ]
    assert ending, "no text has the stop id: choose other seeds"
    for name, answer in run(build(family, drafter), ending).items():
        assert answer.tokens == answers_to_ends[name][: answers_to_ends[name].index(EOS) + 1]
        assert answer.finish_reason == "stop"


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "page_size", "family"),
    drafted(["dflash", "ngram", "eagle tree"], [1, 16], ["qwen3", "qwen3-moe", "qwen3-windows"]),
)
def test_preemption_changes_no_token(drafter, page_size, family, build, reference):
    is_windowed = page_size == 16 and drafter in ("dflash", "dflash tree", "dflash2", "dflash2 tree")
    length, size = (150, 384) if is_windowed else (40, 128)  # longer than the draft's window of 24
    size = size * 3 // 4 if "windows" in family else size  # whose layers give pages back
    if "windows" in family and is_windowed and drafter != "dflash":
        # two windows and what a block writes leave room for one request in the smaller cache
        length = 60
        size = 128
    requests = [
        make_request(str(seed), random_prompt(10, seed), temperature=1.0, seed=seed, max_tokens=length)
        for seed in range(6)
    ]
    options = {"page_size": page_size, "max_running": 6, "prefill_budget": 16}
    engine = build(family, drafter, kv_cache_tokens=size, **options)
    for _ in range(2 if drafter in LEARNING else 1):  # repeated answers grow by leaps
        assert tokens_of(run(engine, requests)) == reference(family, requests)
    assert engine.scheduler.num_preemptions > 0


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "sampling", "family"), drafted(["eagle", "ngram first", "dflash", "eagle3"], SAMPLINGS, KINDS)
)
def test_a_prefix_hit_changes_no_token(drafter, sampling, family, build, reference):
    first = make_request("first", random_prompt(50, 9), seed=1, ignore_eos=True, **SAMPLINGS[sampling])
    engine = build(family, drafter)
    tokens = run(engine, [first])["first"].tokens
    later = [
        make_request("again", first.prompt, seed=1, ignore_eos=True, **SAMPLINGS[sampling]),
        make_request("continued", first.prompt + tokens, seed=2, **SAMPLINGS[sampling]),
        make_request("parted", first.prompt[:40] + random_prompt(20, 3), seed=3, **SAMPLINGS[sampling]),
    ]
    private = Request(id="private", prompt=first.prompt, params=first.params, namespace="another")
    answers = run(engine, [*later, private])
    cached = {name: answer.counts.cached_tokens for name, answer in answers.items()}
    assert cached == {"again": 48, "continued": 64, "parted": 32, "private": 0}
    assert tokens_of(answers) == reference(family, [*later, private])
    assert answers["again"].tokens == answers["private"].tokens == tokens


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "steps", "family"), drafted(["dflash", "ngram first", "eagle3", "none"], [0, 1, 2, 5], KINDS)
)
def test_an_abort_leaves_the_others_alone(drafter, steps, family, build, reference):
    """Before the first step, inside a chunked prompt, while decoding; what it had was a beginning of its answer."""
    requests = uneven_requests(SAMPLINGS["plain"])
    engine = build(family, drafter, prefill_budget=40, max_running=5)
    answers = {}
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        collect(engine.step(), answers)
    aborted = [request.id for request in requests[::3] if not answers.get(request.id, Answer()).finish_reason]
    outputs = [engine.abort(name) for name in aborted]
    collect([output for output in outputs if output], answers)
    check_scheduler(engine.scheduler)
    assert {answers[name].finish_reason for name in aborted} == {"abort"}
    assert engine.abort(aborted[0]) is None
    while engine.has_work:
        collect(engine.step(), answers)
    check_scheduler(engine.scheduler)
    expected = reference(family, requests)
    for request in requests:
        tokens = answers[request.id].tokens
        assert tokens == expected[request.id][: len(tokens) if request.id in aborted else None]


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "page_size", "family"), drafted(["eagle tree", "ngram", "dflash", "eagle3"], [1, 16], KINDS)
)
def test_the_context_can_be_used_to_its_last_token(drafter, page_size, family, build, reference):
    request = make_request("long", random_prompt(216, 5), max_tokens=40, temperature=1.0, ignore_eos=True)
    engine = build(family, drafter, page_size=page_size)
    assert engine.info.max_model_len == 256
    answers = run(engine, [request])
    assert tokens_of(answers) == reference(family, [request])
    assert len(answers["long"].tokens) == 40


class AnyWait(HostWait):
    def __init__(self, rng: random.Random):
        super().__init__()
        self.rng = rng

    @property
    def pays(self) -> bool:
        return self.rng.random() < 0.5


class AnyPolicy(BudgetPolicy):
    """Whatever a policy may choose: each step verifies another number of nodes, which other tables prefer, drafts
    another width, takes another number of prompt tokens, and waits for the host or does not."""

    def __init__(self, planner: Planner, rng: random.Random):
        super().__init__(planner.policy.costs, planner.policy.widths)
        self.rng = rng
        self.limits = planner.limits
        self.host_wait = AnyWait(rng)
        self.acceptance.table = np.ones(BINS, np.float32)

    def choose(self, num_decoding: int, prompt_rows: int = 0, **_: Any) -> Choice:
        rng = self.rng
        max_nodes = num_decoding * self.limits.most_nodes
        if rng.random() < 0.3:
            probabilities = np.random.default_rng(self.acceptance.version).random(BINS, np.float32)
            self.acceptance.publish(np.where(probabilities < 0.1, np.float32(0), probabilities))
        nodes = rng.choice((num_decoding, rng.randint(num_decoding, max_nodes), max_nodes))
        return Choice(nodes, rng.choice(self.widths))

    def chunk_rows(self, num_decoding: int, *, filtered: bool = False) -> int:
        return self.rng.choice((0, 1, self.rng.randrange(40)))

    def record(self, *_: Any): ...


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "case", "family"),
    gate_of(
        product(
            (*DRAFTERS, *BLOCKS),
            product([False, True], [1, 16]),
            [*KINDS, "qwen3-windows", "qwen3-moe-windows", "gpt-oss"],
        ),
        [
            ("eagle3", (False, 1), "qwen3-moe-windows"),
            ("dflash", (True, 1), "qwen3"),
        ],
    ),
)
def test_no_token_depends_on_what_else_a_step_computes(drafter, case, family, build, reference, monkeypatch):
    counts = traffic_counts(drafter, case, family, build, reference, monkeypatch)
    assert counts["mixed"] > 3
    assert counts["cached"] > 0
    if drafter != "none":
        assert counts["ragged"] > 3, "requests of one step verify different numbers of nodes"
        assert counts["accepted"] > (0 if drafter.startswith("lilicorr") else 10)  # see BY_CHANCE


def traffic_counts(
    drafter: str,
    case: tuple[bool, int],
    family: str,
    build: BuildDrafted,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> Counter[str]:
    """Requests of all kinds come, are aborted, preempted and continued from cached pages, while every step computes any
    chunks of prompts beside any numbers of nodes. Returns what `watch` counts."""
    overlap, page_size = case
    rng = random.Random(f"{drafter} {overlap} {page_size} {family}")
    kinds = kinds_of_requests(random.Random(f"texts of {family}"), 12, longest=40)
    expected = reference(family, list(kinds.values()))
    if overlap:
        monkeypatch.setattr(engine_plan, "pick_modes", lambda *_: (False, True))
    engine = build(family, drafter, page_size=page_size, max_running=5, prefill_budget=32, kv_cache_tokens=400)
    engine.scheduler.max_chunks = rng.choice((2, None))
    engine.planner.policy = AnyPolicy(engine.planner, rng)
    counts = watch(engine)

    def more(number):
        is_rare = drafter != "none" and counts["ragged"] <= 3
        return number < 24 or (is_rare and number < MOST_REQUESTS)

    serve_traffic(engine, kinds, expected, rng, more, 8, lambda: preempt_some(engine, rng))
    return counts


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "case", "family"),
    gate_of(
        product(["eagle3 deep", "eagle tree", "dspark", "ngram first"], product([False, True], [1, 16]), KINDS),
        [("dspark", (False, 16), "qwen3")],
    ),
)
def test_no_token_depends_on_what_the_draft_reads(drafter, case, family, build, reference, monkeypatch):
    for name, value in {"WINDOW": 32, "GRAIN": 4, "SHORTEST": 40}.items():
        monkeypatch.setattr(draft_windows, name, value)
    counts = traffic_counts(drafter, case, family, build, reference, monkeypatch)
    assert min(counts["whole"], counts["windowed"]) > 5


Proposals = dict[tuple[int, ...], list[list[int]]]  # by request's seed and text: tokens and parents


def record(engine: Engine, proposals: Proposals):
    """Records all proposals from now on. Raises AssertionError where a text had another proposal before."""

    def look(event, plan):
        stored = engine.runner.state.stored
        for sequence in decoding(engine) if event == "committed" else ():
            if sequence.slot in plan.drafting:
                nodes = [stored.tokens[sequence.slot].tolist(), stored.parents[sequence.slot].tolist()]
                assert proposals.setdefault((sequence.request.seed, *sequence.tokens), nodes) == nodes

    engine.trace = look


@grouped("drafter")
@pytest.mark.parametrize(
    ("drafter", "page_size", "family"),
    gate_of(
        product(SEVERAL, [1, 16], [*KINDS, "qwen3-windows", "qwen3-moe-windows"]),
        [("eagle tree", 16, "qwen3-windows")],
    ),
)
def test_a_proposal_depends_on_its_text_alone(drafter, page_size, family, build):
    """A drafter's state of a text is right, whatever chunks and accepted nodes it came in."""
    rng = random.Random(f"{drafter} {page_size} {family}")
    kinds = kinds_of_requests(random.Random(f"texts of {family}"), 6, longest=30)
    proposals = Proposals()
    alone = build(family, drafter, max_running=1)
    alone.planner.policy = RootsAlone(alone.planner, rng)
    record(alone, proposals)
    expected = {name: run(alone, [request])[name].tokens for name, request in kinds.items()}
    engine = build(family, drafter, page_size=page_size, max_running=5, prefill_budget=32, kv_cache_tokens=400)
    engine.planner.policy = WidestDrafts(engine.planner, rng)
    record(engine, proposals)
    num_known = len(proposals)
    serve_traffic(engine, kinds, expected, rng, lambda number: number < 12, 8, lambda: preempt_some(engine, rng))
    assert len(proposals) == num_known, "texts that were not seen alone"


class WidestDrafts(AnyPolicy):
    """Steps draft as much as they can."""

    def choose(self, *arguments: Any, **options: Any) -> Choice:
        return super().choose(*arguments, **options)._replace(width=self.widths[-1])


class RootsAlone(WidestDrafts):
    """And verify none of it."""

    def choose(self, num_decoding: int, prompt_rows: int = 0, **options: Any) -> Choice:
        return super().choose(num_decoding, prompt_rows, **options)._replace(nodes=num_decoding)


def preempt_some(engine: Engine, rng: random.Random):
    check_scheduler(engine.scheduler)
    if engine.scheduler.num_running > 1 and rng.random() < 0.1:
        engine.scheduler._preempt_newest()


def watch(engine: Engine) -> Counter[str]:
    """Counts from now on the steps with nodes and chunks, steps that verify different numbers of nodes of their
    requests, accepted tokens, prompts that begin in the cache, and texts that a draft reads whole or from a window."""
    counts = Counter()

    def look(plan, output):
        counts["mixed"] += bool(plan.slots and plan.chunks)
        counts["ragged"] += len(set(output.num_verified[: len(plan.slots)].tolist())) > 1
        counts["accepted"] += int((output.num_emitted[: len(plan.slots)] - 1).sum())
        admitted = {admission.slot for admission in plan.admissions}
        counts.update("windowed" if start > 0 else "whole" for _, start in plan.read_starts)
        counts["cached"] += sum(chunk.start > 0 for chunk in plan.chunks if chunk.slot in admitted)

    watch_outputs(engine, look)
    return counts
