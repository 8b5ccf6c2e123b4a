"""Ranks of tensor parallelism: answers are those of one rank, and a lost rank ends all. Ranks are processes on the CPU,
started once for each number of them; the oracle is the engine of one rank, which other tests compare."""

import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2MoeConfig

from slipstream.models.targets.config import MoESpec
from slipstream.serve.engine import team as teams
from slipstream.serve.engine.build import build
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.engine_plan import DeviceFacts, read_plan
from slipstream.serve.engine.team import RankError, Team
from slipstream.serve.exact_check import ExactCheckConfig, check
from slipstream.serve.llm import LLM
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request, SamplingParams
from slipstream.tests.mtp_targets import KINDS
from slipstream.tests.pairwise import gate_of, grouped
from slipstream.tests.random_drafts import save_random_dflash, save_random_draft, save_random_eagle
from slipstream.tests.random_targets import SHAPE, save_random_target
from slipstream.tests.serve import correctness
from slipstream.tests.serve.engine_runs import Answer, make_request, random_prompt, run, sized_requests, tokens_of
from slipstream.tests.serve.fake_server import wait_until
from slipstream.tests.serve.played_graphs import equal_costs, gpu_plan, play_all
from slipstream.tests.serve.replayed_steps import digest, record_steps
from slipstream.tests.serve.test_draft_swaps import save_changed
from slipstream.tests.serve.test_draft_vocabulary import save_map
from slipstream.tests.serve.test_lossless import AnyPolicy
from slipstream.tests.serve.test_replay import DRAFTERS as REPLAYED
from slipstream.tests.serve.test_replay import SIZES as MOST_SIZES
from slipstream.tests.serve.test_replay import requests_of_all_kinds
from slipstream.tests.sources import HYBRID, TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

CPU = torch.device("cpu")
GPU = pytest.mark.gpu
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SOME = ("none", "eagle3, tree", "dflash", "ngram")
FEATURES = [("dense", 2, name) for name in correctness.DRAFTERS]
FEATURES += [(kind, 2, name) for kind in ("hybrid", "windows") for name in SOME] + [("dense", 4, name) for name in SOME]
FEW = correctness.FEW | {"prefill_budget": None, "grammar_drafts": True}
SIZES = MOST_SIZES | {"kv_cache_tokens": 96, "grammar_drafts": False}
HYBRID_SIZES = SIZES | {"prefill_budget": 64}  # they compute prompts by 64 tokens
MakeTeam = Callable[[int], Team]
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {  # draft, options
    **REPLAYED,
    "eagle": ("eagle", {"depth": 3}),
    "token map": ("eagle", {"depth": 3, "token_map": "map"}),
}
FAMILIES = ("qwen3", "qwen2-moe", "qwen3-5", "gpt-oss", "gemma4-shared", "phi3-window")
WHOLE = ("glm4-moe", "gpt-oss", "mixtral")  # families of experts that 4 ranks divide
GATE = [("qwen2-moe", "tree", 2), ("qwen3-5", "ngram", 2)]


@pytest.fixture(scope="module")
def make_team() -> Iterator[MakeTeam]:
    running = {}

    def make(world):
        if world not in running:
            running[world] = Team(world, CPU)
            running[world].is_kept = True
        return running[world]

    yield make
    for team in running.values():
        team.close()
        assert all(member.process.returncode == 0 for member in team.members)


def save_draft(target: Path, name: str, folder: Path) -> str:
    """A draft of a kind; those without files are their names."""
    if name in ("none", "ngram"):
        return name
    if not (folder / name).exists():
        if name == "dflash":
            save_random_dflash(target, folder / name)
        elif name == "eagle":
            save_random_eagle(target, folder / name)
        else:
            save_random_draft(target, folder / name, draft_vocab_size=80)
    return str(folder / name)


def answers_of(
    target: Path, requests: Sequence[Request], make_team: MakeTeam, world: int, **options: Any
) -> tuple[dict[str, Answer], Engine]:
    """The answers of an engine of `world` ranks, whose steps verify and draft any numbers of nodes."""
    config = {"target": str(target), "device": "cpu", "tp": world, **SIZES}
    engine = build(read_plan(EngineConfig(**config | options)), team=make_team(world) if world > 1 else None)
    engine.planner.policy = AnyPolicy(engine.planner, random.Random(0))
    answers = run(engine, list(requests))
    engine.close()
    return answers, engine


def long_requests() -> list[Request]:
    """Four of them need more KV than there is."""
    return [
        replace(request, params=replace(request.params, max_tokens=16, ignore_eos=True))
        for request in requests_of_all_kinds()
    ]


@cache
def answers_alone(target: Path, family: str) -> dict[str, Answer]:
    """The answers of one rank, without a draft."""
    config = EngineConfig(target=str(target), device="cpu", **sizes_of(family))
    return run(build(read_plan(config)), long_requests())


def sizes_of(family: str) -> dict[str, Any]:
    if family == "gpt-oss":  # its windows give pages back
        return SIZES | {"kv_cache_tokens": 94}
    return HYBRID_SIZES if family == "qwen3-5" else SIZES


def check_alike(answers: dict[str, Answer], expected: dict[str, Answer]):
    assert tokens_of(answers) == tokens_of(expected)
    for name, answer in answers.items():
        assert answer.finish_reason == expected[name].finish_reason
        for field in ("logprobs", "prompt_logprobs"):
            assert correctness.is_near(getattr(answer, field), getattr(expected[name], field)), (name, field)


def test_ranks_swap_the_draft_together(make_target, make_team, tmp_path):
    """After random steps, while requests run: a rank with other weights would propose, and so verify, other nodes. Each
    draft is accepted as in an engine of one rank, which has its rows of the target's head, too."""
    target = make_target("qwen2-moe")
    save_random_eagle(target, tmp_path / "a", draft_vocab_size=80)
    save_changed(tmp_path / "a", tmp_path / "b", 0.1)
    config = EngineConfig(target=str(target), draft=str(tmp_path / "a"), device="cpu", width=4, **SIZES)
    requests = long_requests()[:4]
    alone = answers_alone(target, "qwen2-moe")
    counts = []
    for world in (1, 2):
        team = make_team(world) if world > 1 else None
        engine = build(read_plan(replace(config, tp=world)), team=team)
        generator = random.Random(1)

        def swap(*_, engine=engine, generator=generator):
            if generator.random() < 0.3:
                name = "a" if engine.counts().draft.num_swaps % 2 else "b"
                engine.swap_draft(engine.stage_draft(str(tmp_path / name)), trial_rounds=0)

        answers = run(engine, requests, swap)
        check_alike(answers, {name: alone[name] for name in answers})
        assert engine.counts().draft.num_swaps > 2
        counts.append({name: answer.counts for name, answer in answers.items()})
        engine.close()
    assert counts[0] == counts[1]


@grouped("family", "world")
@pytest.mark.parametrize(
    ("family", "drafter", "world"),
    gate_of([(family, name, world) for world in (2, 4) for family in FAMILIES for name in DRAFTERS], GATE),
)
def test_answers_do_not_depend_on_the_number_of_ranks(family, drafter, world, make_target, make_team, tmp_path):
    """Requests of all kinds with prefix hits, chunks of prompts, preemption, masks and log-probabilities."""
    target = make_target(family)
    draft, options = DRAFTERS[drafter]
    if "token_map" in options:
        options = options | {"token_map": save_map(tmp_path)}
    requests = long_requests()
    expected = answers_alone(target, family)
    path = save_draft(target, draft, tmp_path)
    sizes = sizes_of(family)
    answers, engine = answers_of(target, requests, make_team, world, draft=path, drafter=options, **sizes)
    check_alike(answers, expected)
    assert engine.scheduler.num_preemptions > 0 or drafter in ("none", "ngram first")
    assert world * engine.engine_plan.part.num_heads == engine.engine_plan.spec.num_heads
    drafted = sum(answer.counts.drafted_tokens for answer in answers.values())
    assert (drafted > 0) == (drafter != "none")


@grouped("world")
@pytest.mark.parametrize(
    ("family", "world"),
    gate_of([*((family, world) for world in (2, 4) for family in WHOLE), ("qwen2-moe", 2)], [("qwen2-moe", 2)]),
)
def test_answers_with_whole_experts(family, world, make_target, make_team):
    """A mixture's shared expert is cut, and belongs to rank 0's sum."""
    target = make_target(family)
    answers, engine = answers_of(target, long_requests(), make_team, world, ep=True)
    check_alike(answers, answers_alone(target, family))
    part = engine.engine_plan.part.layers[-1]
    experts = part.experts or part.mlp
    assert isinstance(experts, MoESpec)
    assert world * experts.num_local == experts.num_experts


@grouped("world")
@pytest.mark.parametrize(
    ("kind", "world"), gate_of([(kind, world) for world in (2, 4) for kind in KINDS], [(next(iter(KINDS)), 2)])
)
def test_mtp_heads_draft_alike(kind, world, make_mtp, make_team):
    target = make_mtp(kind).folder
    requests = sized_requests((1, 9, 33), temperature=0.0)
    expected, _ = answers_of(target, requests, make_team, 1, **HYBRID_SIZES)
    answers, _ = answers_of(target, requests, make_team, world, draft="mtp", drafter={"depth": 3}, **HYBRID_SIZES)
    check_alike(answers, expected)


def draft_for(target: Path, drafter: str, folder: Path, answers: dict[str, Answer]) -> str:
    """Returns the option `draft`: a checkpoint that knows the target's answers, or a drafter without one."""
    name = correctness.DRAFTERS[drafter][0]
    if name in ("none", "ngram"):
        return name
    correctness.save_draft(target, name, folder / name, answers)
    return str(folder / name)


@pytest.mark.slow
@grouped("kind", "world")
@pytest.mark.parametrize(("kind", "world", "drafter"), FEATURES)
def test_every_feature_on_bundled_targets(kind, drafter, world, make_team, tmp_path):
    """The cases of docs/correctness.md."""
    target = correctness.find_target(kind, tmp_path)
    expected = correctness.answers_alone(target)
    draft = draft_for(target, drafter, tmp_path, expected)
    requests = correctness.requests_of(target, correctness.all_cases())
    answers, _ = answers_of(
        target, requests, make_team, world, draft=draft, drafter=correctness.DRAFTERS[drafter][1], **FEW
    )
    assert not correctness.differences(answers, expected)


@pytest.fixture(scope="module")
def gpu_team() -> Iterator[MakeTeam]:
    team = Team(2, torch.device("cuda"))
    team.is_kept = True
    yield lambda _world: team
    team.close()


@cache
def answers_on_gpus(make: MakeTeam, tp: int, dtype: str) -> dict[str, Answer]:
    """Answers without a draft."""
    requests = correctness.requests_of(TINY, correctness.all_cases())
    return answers_of(TINY, requests, make, tp, device="cuda", dtype=dtype, **FEW)[0]


@GPU
@TWO_GPUS
@grouped("dtype")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", correctness.DRAFTERS)
def test_on_gpus(dtype, drafter, gpu_team, tmp_path):
    """Captured passes of the bundled target; in fp32 also against one GPU, whose sums have another order."""
    expected = answers_on_gpus(gpu_team, 2, dtype)
    if dtype == "float32":
        assert not correctness.differences(expected, answers_on_gpus(gpu_team, 1, dtype))
    draft = draft_for(TINY, drafter, tmp_path, expected)
    requests = correctness.requests_of(TINY, correctness.all_cases())
    config = {"device": "cuda", "dtype": dtype, **FEW}
    answers, engine = answers_of(
        TINY, requests, gpu_team, 2, draft=draft, drafter=correctness.DRAFTERS[drafter][1], **config
    )
    assert engine.engine_plan.captures
    assert not correctness.differences(answers, expected)


@GPU
@TWO_GPUS
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_sums_in_the_order_of_any_number_of_gpus(kind, gpu_team, tmp_path):
    """In bf16, bit for bit; of layers wide enough for leaves."""
    sizes = SHAPE | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    experts = {"num_experts": 8, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 256}
    save_random_target(LlamaConfig(**sizes) if kind == "dense" else Qwen2MoeConfig(**sizes, **experts), tmp_path)
    answers = []
    for world in (1, 2):
        options = {"device": "cuda", "dtype": "bfloat16", "tp_exact": True}
        answers.append(answers_of(tmp_path, long_requests(), gpu_team, world, **options)[0])
    assert tokens_of(answers[1]) == tokens_of(answers[0])
    for name, answer in answers[0].items():
        assert answers[1][name].logprobs == answer.logprobs


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_captured_passes_and_their_replay(world, target, draft, make_team, tmp_path, monkeypatch):
    """Ranks that execute the plans of an engine get its bits; they need not be those of its processes."""
    options = {"draft": str(draft), "drafter": {"depth": 3}, **SIZES, "max_running": 2}
    config = EngineConfig(target=str(target), device="cpu", tp=world, **options)
    team = make_team(world)
    engine = build(gpu_plan(config), play_all, equal_costs, team)
    requests = long_requests()[::2]
    record_steps(engine, requests, tmp_path / "ranks.steps", monkeypatch)
    left = digest(engine.runner)
    engine.close()
    plan, plans = pickle.loads((tmp_path / "ranks.steps").read_bytes())  # noqa: S301
    again = build(plan, play_all, equal_costs, team)
    for step in map(pickle.loads, plans):
        again.runner.launch(step).read()
    assert digest(again.runner) == left
    again.close()


def test_room_is_that_of_the_smallest_device(target, make_team):
    """Memory is measured in each process, and rank 0 plans with the least."""
    config = EngineConfig(target=str(target), device="cpu", tp=2, max_running=2, max_model_len=64)
    engine = build(read_plan(config), team=make_team(2))
    assert engine.info.kv_cache_tokens >= 2 * 64
    assert len(engine.counts().rank_memory) == 2
    assert min(engine.counts().rank_memory) > 10**7
    assert len(engine.counts().rank_sum_seconds) == 2
    engine.close()


def test_an_error_of_a_rank_names_it(target, tmp_path, monkeypatch):
    """The ranks end, none is left, and every later call says the same. They find the modules of rank 0: those that it
    finds by its sys.path alone, and not those of the working directory."""
    (tmp_path / "random.py").write_text("raise RuntimeError('a file of the user')")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "module_of_a_user.py").write_text("class Thing: pass")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    team = Team(2, CPU)
    config = EngineConfig(target=str(target), device="cpu", tp=2, kv_cache_tokens=512)
    engine = build(read_plan(config), team=team)
    reports = []
    engine.watch(reports.append)
    engine.add(make_request("0", random_prompt(9, 0), max_tokens=200))
    engine.step()
    team.order("no_such_order", import_module("module_of_a_user").Thing())
    with pytest.raises(RankError, match=r"rank 1 \(cpu\) failed: AttributeError: .*no_such_order"):
        step_all(engine)
    team.members[0].process.wait(5)
    wait_until(lambda: bool(reports), "a report")
    assert len(reports) == 1
    engine.close()


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (signal.SIGKILL, "was killed by signal 9"),
        (signal.SIGSTOP, "has not answered for 1 s"),
    ],
)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[GPU, TWO_GPUS])]
)
def test_a_lost_rank_ends_all(device, number, sentence, busy, target, monkeypatch):
    """Whether it serves or waits; and so does an interrupt in a step, after which ranks are out of step."""
    monkeypatch.setattr(teams, "SILENCE_SECONDS", 1.0)
    config = EngineConfig(target=str(target), device=device, tp=2, kv_cache_tokens=512)
    engine = build(read_plan(config))
    reports = []
    engine.watch(reports.append)
    process = engine.team.members[0].process
    if busy:
        engine.add(make_request("0", random_prompt(9, 0), max_tokens=200))
        engine.step()
    os.kill(process.pid, number)
    if busy:
        with pytest.raises(RankError, match=rf"rank 1 \(.*\) {sentence}"):
            step_all(engine)
    wait_until(lambda: bool(reports), "a report")
    assert [sentence in report for report in reports] == [True]
    assert process.wait(5) == -signal.SIGKILL
    engine.close()
    with pytest.raises(RankError):
        engine.runner.check()


@pytest.mark.slow
def test_an_interrupt_within_a_step_ends_the_ranks(target, monkeypatch):
    config = EngineConfig(target=str(target), device="cpu", tp=2, kv_cache_tokens=512)
    engine = build(read_plan(config))
    assert engine.team is not None
    engine.add(make_request("0", random_prompt(9, 0), max_tokens=200))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_draft", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(RankError, match="rank 0 .cpu. failed with KeyboardInterrupt"):
        engine.step()
    engine.close()
    assert engine.team.members[0].process.wait(5) == -signal.SIGKILL


@pytest.mark.slow
def test_ranks_that_draw_other_tokens_end(target):
    """Here by other noise on rank 0; each would go on with a text of its own."""
    config = EngineConfig(target=str(target), device="cpu", tp=2, kv_cache_tokens=512, max_model_len=256)
    engine = build(read_plan(config))
    engine.add(make_request("0", random_prompt(9, 0), max_tokens=240, temperature=1.0, ignore_eos=True))
    engine.step()
    engine.runner.state.keys += 1
    with pytest.raises(RankError, match=r"rank 1 \(cpu\) has drawn other tokens than rank 0 in step"):
        step_all(engine, pause=0.01)
    engine.close()


def step_all(engine: Engine, pause: float = 0.0):
    while engine.has_work:
        engine.step()
        time.sleep(pause)  # as long as a large target takes


def interrupt(_: object):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_idle_work_and_the_next_turn(make_team):
    """The next turn finds what ranks have computed of an ended conversation."""
    turns = []
    for world in (1, 2):
        config = EngineConfig(target=str(HYBRID), device="cpu", tp=world, kv_cache_tokens=2048, max_running=2)
        engine = build(read_plan(config), team=make_team(world) if world > 1 else None)
        prompt = random_prompt(90, 0)
        answer = run(engine, [make_request("0", prompt, max_tokens=60, ignore_eos=True)])["0"]
        while engine.work_idle():
            pass
        text = [*prompt, *answer.tokens, *random_prompt(9, 1)]
        turns.append(run(engine, [make_request("1", text, max_tokens=20)])["1"])
        engine.close()
    alone, shared = turns
    assert shared.tokens == alone.tokens
    assert shared.counts.cached_tokens == alone.counts.cached_tokens >= 128


@pytest.mark.slow
def test_llm_over_ranks():
    """In the caller's process, which may run another group of processes: the ranks leave that alone."""
    params = SamplingParams(max_tokens=16, temperature=0.7, seed=3)
    answers = []
    for tp in (1, 2):
        with LLM(str(TINY), "ngram", device="cpu", kv_cache_tokens=2048, tp=tp) as llm:
            answers.append(llm.generate(["Tom has 3 apples", "1 2 3 4"], params))
    assert [answer.text for answer in answers[0]] == [answer.text for answer in answers[1]]


@pytest.mark.slow
def test_exact_check_compares_numbers_of_ranks(target, capsys):
    options = {"requests": 3, "output_len": 6, "longest_prompt": 20}
    engine = {"exact": None, "device": "cpu"}
    assert check(ExactCheckConfig(target=str(target), tp=[1, 2], engine=engine, **options)) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "3 of 3" in line]
    assert [sum(f"tp {tp} " in row for row in rows) for tp in (1, 2)] == [4, 4]


@each_case()
def test_what_ranks_cannot_do_is_refused_before_anything_is_loaded(family, options, message, make_target, tmp_path):
    target = make_target(family)
    if "draft" in options:
        save_random_draft(target, tmp_path / "eagle3")
        drafter = options["drafter"] | {"token_map": save_map(tmp_path)}
        options = options | {"draft": str(tmp_path / "eagle3"), "drafter": drafter}
    with user_error(message):
        read_plan(EngineConfig(target=str(target), device="cpu", **options))


def test_ranks_need_as_many_equal_devices(monkeypatch):
    gpu = DeviceFacts("cuda", name="H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    with user_error("tp is 4, but torch finds 2 GPUs; lower tp"):
        gpu.check_ranks(4)
    with user_error(r"tp is 2, but the GPUs differ \(GPU 0, GPU 1\)"):
        gpu.check_ranks(2)
    gpu.check_ranks(1)
    DeviceFacts("cuda", is_present=False).check_ranks(8)
    DeviceFacts("cpu").check_ranks(8)
