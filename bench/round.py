"""Measures the time of a round, a step that verifies equally many nodes of each request, by batch size: in the engine's
loop, and of its captured passes alone.

    python bench/round.py --target CKPT --draft CKPT --batch "[1,8,32]" --prompt-len 512 --new-tokens 256
    python bench/round.py --shape qwen3-30b-a3b --draft random --simulate-accept-length 2.99

Each batch size decodes with `--draft none` and with the draft, in one run. `ms` is wall time per round while all
requests decode; `graph_ms` of its graphs, replayed after the prompts; `gap_us` the median time between the end of one
round on the device, its result's copy included, and the start of the next. `floor_ms` is the time to read the weights
and the KV once per pass, and to read and write recurrent states, at the copy bandwidth measured in the same run
(`parts_floor_ms`: of the target's pass and of the draft's); of a mixture's weights those of the experts that are hit
(`experts`: how many in a layer of the target's pass, counted in a few rounds without graphs). A random draft repeats
itself, and equal tokens hit the same experts; for mixtures independent tokens take the place of its own. `--profile`
lists the kernels of a round.
Prints a table, then one JSON line per row.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from math import prod
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from slipstream.bench.engines import EngineBenchConfig
from slipstream.bench.gpu import copy_bandwidth, milliseconds, print_kernels, profile_kernels
from slipstream.bench.lines import Lines, origin, table
from slipstream.bench.random_targets import random_pair
from slipstream.config import run
from slipstream.kernels.gemm.router import Routing
from slipstream.models.layers.moe import Experts, Router
from slipstream.models.targets.config import AttentionSpec, RecurrentSpec
from slipstream.serve.engine.build import build_engine
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.plan import StepPlan
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import Request, SamplingParams
from slipstream.serve.runner.model_runner import InFlight, ModelRunner

COLUMNS = (  # heading, key of a line, format
    ("draft", "draft", "s"),
    ("batch", "batch", "d"),
    ("width", "width", "d"),
    ("ms", "ms", ".3f"),
    ("graph", "graph_ms", ".3f"),
    ("gap, us", "gap_us", ".0f"),
    ("floor", "floor_ms", ".3f"),
    ("share", "share_of_floor", ".2f"),
    ("experts", "experts_hit", ".1f"),
    ("tok/s", "tok_s", ".1f"),
    ("accept length", "accept_length", ".2f"),
    ("parts, ms", "parts_ms", ""),
    ("floors, ms", "parts_floor_ms", ""),
)
COUNTED = 4  # rounds, of a mixture's experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig(EngineBenchConfig):
    """Time of a round by batch size."""

    shape: str = ""
    """Random weights of these sizes in place of a checkpoint (bench/random_targets.py), made on the device."""
    draft: str = "none"
    """Draft checkpoint to compare with none; with `shape`, random: an EAGLE3 draft, or random:NAME: another one of
    bench/random_targets.py, such as random:dflash2 or random:mtp."""
    baseline: bool = True
    """Measure without a draft first."""
    width: list[int] = field(default_factory=lambda: [4])
    """Nodes that a round with the draft verifies of each request, measured one after another; 0: as the engine
    chooses."""
    batch: list[int] = field(default_factory=lambda: [1, 8, 32, 64])
    """Requests decoding at once."""
    prompt_len: int = 512
    """Tokens per prompt."""
    new_tokens: int = 256
    """Tokens generated per request."""
    long_prompt: int = 0
    """Tokens of a prompt whose time to the first token is measured, alone; 0: none."""
    temperature: float = 0.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling; below 1 it measures the filters."""
    simulate_accept_length: float | None = None
    """Simulated tokens per round, for drafts with random weights."""
    profile: bool = False
    """List the kernels of each round by time."""

    def __post_init__(self) -> None:
        if bool(self.target) == bool(self.shape):
            raise ValueError(f"target is {self.target!r} and shape {self.shape!r}; give one of the two")


def measured(config: RoundConfig) -> None:
    """Measures rounds of a checkpoint, or of random weights."""
    if not config.shape:
        rounds(config)
        return
    kind, _, name = config.draft.partition(":")
    with random_pair(config.shape, name or "eagle3") as pair:
        draft = pair.draft if kind == "random" else config.draft
        names = {pair.target: config.shape, pair.draft: f"random {name or 'eagle3'}"}
        rounds(replace(config, target=pair.target, shape="", draft=draft), names)


def rounds(config: RoundConfig, names: Mapping[str, str] | None = None) -> None:
    """`names`: of targets and drafts with random weights, by their folders."""
    names = names or {}
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    lines = Lines(config.output, {"engine": config.engine} if config.engine else None)
    drafted = [(config.draft, width) for width in config.width if config.draft != "none"]
    undrafted = [("none", 1)] if config.baseline or not drafted else []
    for draft, width in undrafted + drafted:
        engine = build(config, draft, width)
        if draft in names and routers_of(engine) and engine.team is None:  # other ranks would propose others
            propose_independent_tokens(engine)
        if config.long_prompt:
            ms = first_token_ms(engine, config.long_prompt)
            print(f"{names.get(draft, draft)}: {config.long_prompt} tokens of one prompt take {ms:.1f} ms", flush=True)
            line = {"target": config.target, "draft": draft, "long_prompt": config.long_prompt, "prompt_ms": ms}
            lines.add(origin("round", "cuda") | with_names(line, names))
        for batch in config.batch:
            line = measure(engine, config, batch, bandwidth)
            lines.add(with_names(line, names))
            print(table(COLUMNS, lines.all[-1:], heading=batch == config.batch[0]), flush=True)
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    lines.print()


def with_names(line: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return line | {key: names.get(line[key], line[key]) for key in ("target", "draft")}


def build(config: RoundConfig, draft: str, width: int) -> Engine:
    """An engine whose rounds all verify `width` nodes of each request, or as many as it chooses (0)."""
    options: dict[str, Any] = {"target": config.target, "grammar_drafts": False, **config.engine}
    if draft != "none":
        options |= {"drafter": config.drafter, "width": width or None}
        options |= {"simulate_accept_length": config.simulate_accept_length}
    length = max(config.prompt_len + config.new_tokens, config.long_prompt + 1)
    start = time.monotonic()
    engine = build_engine(EngineConfig(draft=draft, max_running=max(config.batch), max_model_len=length, **options))
    print(f"{draft}: ready after {time.monotonic() - start:.1f} s; {engine.info.kv_cache_tokens} tokens of KV cache")
    return engine


def measure(engine: Engine, config: RoundConfig, batch: int, bandwidth: float) -> dict[str, Any]:
    """Measures the second of two runs; the first warms up."""
    decode(engine, config, batch)
    before = torch.cuda.memory_allocated()
    with recorded(engine.runner) as flights:
        seconds, rounds, tokens = decode(engine, config, batch)
    growth = torch.cuda.memory_allocated() - before
    graph_ms, parts = replay(engine, config, batch)
    nodes = nodes_of(engine, batch)  # before rounds without graphs, which take longer, have a part in it
    hit = count_experts(engine, config, batch)
    ms = 1000 * seconds / rounds
    floors = {part: 1000 * read / bandwidth for part, read in bytes_read(engine, config, batch, nodes, hit).items()}
    floor = sum(floors.values())
    return {
        **origin("round", "cuda"),
        "target": config.target,
        "draft": engine.config.draft,
        "batch": batch,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "width": round(nodes),
        "chosen": engine.config.draft != "none" and engine.config.width is None,
        "ms": round(ms, 3),
        "graph_ms": graph_ms,
        "gap_us": gap_us(flights),
        "parts_ms": parts,
        "floor_ms": round(floor, 3),
        "parts_floor_ms": {part: round(part_floor, 3) for part, part_floor in floors.items()},
        "share_of_floor": round(floor / ms, 3),
        "experts_hit": None if hit is None else round(hit, 1),
        "tok_s": round(tokens / seconds, 1),
        "accept_length": round(tokens / rounds / batch, 3),
        "rounds": rounds,
        "memory_growth_mb": round(growth / 2**20, 2),
    }


def propose_independent_tokens(engine: Engine) -> None:
    """Replaces the tokens of each proposal on the device, which takes a round some 10 us longer on an H200."""
    runner = engine.runner
    launch = runner.launch
    tokens = runner.state.stored.tokens[:, 1:]  # the first one is the request's own last token
    noises = cycle(torch.randint_like(tokens.expand(64, *tokens.shape), engine.info.vocab_size))

    def launch_and_replace(plan: StepPlan, **options: bool) -> InFlight:
        flight = launch(plan, **options)
        tokens.copy_(torch.where(tokens < 0, tokens, next(noises)))  # unused nodes stay
        return flight

    runner.launch = launch_and_replace  # type: ignore[method-assign]


@contextmanager
def recorded(runner: ModelRunner) -> Iterator[list[InFlight]]:
    """Lists what the runner launches."""
    flights: list[InFlight] = []
    launch = runner.launch

    def launch_and_record(plan: StepPlan, **options: bool) -> InFlight:
        flights.append(launch(plan, **options))
        return flights[-1]

    with patch.object(runner, "launch", launch_and_record):
        yield flights


def gap_us(flights: Sequence[InFlight]) -> float:
    """The median time between two rounds on the device, all of which have been read."""
    rounds = [flight for flight in flights if flight.plan.slots]
    gaps: list[float] = []
    for before, after in pairwise(rounds):
        assert before.landed is not None, "rounds of a GPU"
        gaps.append(1000 * before.landed.elapsed_time(after.started))
    return round(median(gaps), 1)


def first_token_ms(engine: Engine, length: int) -> float:
    """Median time of prompts that come one after another and have nothing in common; the first two warm up."""
    generator = torch.Generator().manual_seed(0)
    times = list[float]()
    for index in range(7):
        prompt = torch.randint(20, engine.info.vocab_size, (length,), generator=generator).tolist()
        start = time.perf_counter()
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        engine.add(Request(id=f"long {index}", prompt=prompt, params=params))
        while engine.has_work:
            engine.step()
        times.append(1000 * (time.perf_counter() - start))
    return round(median(times[2:]), 2)


def start_requests(engine: Engine, config: RoundConfig, batch: int) -> None:
    """Steps until all prompts are computed and all requests decode, and nothing is in flight."""
    params = SamplingParams(
        max_tokens=config.new_tokens, temperature=config.temperature, top_p=config.top_p, seed=0, ignore_eos=True
    )
    generator = torch.Generator().manual_seed(batch)
    for index in range(batch):
        prompt = torch.randint(20, min(4000, engine.info.vocab_size), (config.prompt_len,), generator=generator)
        engine.add(Request(id=str(index), prompt=prompt.tolist(), params=params))
    started: set[str] = set()
    while len(started) < batch:
        outputs = engine.step()
        started |= {output.request_id for output in outputs if output.tokens}
        for output in outputs:
            if output.error:
                raise ValueError(f"request {output.request_id} of {batch} failed: {output.error}")
            if output.finish_reason:
                raise ValueError(
                    f"new_tokens is {config.new_tokens}: a request ended before all {batch} prompts were computed; "
                    "raise it, or lower batch or prompt_len"
                )
    engine.drain()  # these rounds would be counted although they end before the clock starts


def decode(engine: Engine, config: RoundConfig, batch: int) -> tuple[float, int, int]:
    """Seconds, rounds and tokens from the moment all requests decode until the first one ends."""
    start_requests(engine, config, batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    rounds = 0
    tokens = 0
    ended = False
    while not ended:
        outputs = engine.step()
        rounds += bool(outputs)
        tokens += sum(len(output.tokens) for output in outputs)
        ended = any(output.finish_reason for output in outputs)
    seconds = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    return seconds, rounds, tokens


def replay(engine: Engine, config: RoundConfig, batch: int) -> tuple[float | None, dict[str, float]]:
    """Milliseconds of a round's captured passes alone: both, the target's, the draft's. None where other ranks, which
    execute plans, would not take part."""
    runner = engine.runner
    if runner.steps is None:
        return None, {}
    start_requests(engine, config, batch)
    if engine.team is not None:
        if config.profile:
            print_kernels(profile_kernels(engine.step))  # with what a kernel waits for other ranks
        abort(engine, batch)
        return None, {}
    plan = engine.planner.plan()
    assert plan is not None
    plan = engine.planner.choose(plan)
    runner.prepare(plan)
    state = runner.state
    steps = runner.steps
    drafts = runner.drafts
    columns = (state.lengths, state.proposals, state.stored.roots)
    originals = [column.clone() for column in columns]

    def restore() -> None:
        for column, values in zip(columns, originals, strict=True):
            column.copy_(values)

    def target() -> None:
        steps.finish(plan, steps.launch(plan))

    def draft() -> None:
        if drafts is not None and plan.draft_graph is not None:
            drafts.run(plan)

    def one_round() -> None:
        target()
        draft()

    times = [milliseconds(run, restore) for run in (one_round, target, draft)]
    if config.profile:
        print_kernels(profile_kernels(one_round))
    restore()
    abort(engine, batch)
    return round(times[0], 3), {"target": round(times[1], 3), "draft": round(times[2], 3)}


def abort(engine: Engine, batch: int) -> None:
    for index in range(batch):
        engine.abort(str(index))


def routers_of(engine: Engine) -> list[Router]:
    return [module for module in engine.runner.target.modules() if isinstance(module, Router)]


def count_experts(engine: Engine, config: RoundConfig, batch: int) -> float | None:
    """Mean number of experts that a round hits in a layer, over layers and COUNTED rounds after the prompts."""
    routers = routers_of(engine)
    if not routers:
        return None
    counts: list[int] = []

    def count(*called: Any) -> None:
        routing: Routing = called[-1]
        counts.append(len(routing.experts[routing.experts >= 0].unique()))

    start_requests(engine, config, batch)
    with ExitStack() as stack:
        for router in routers:
            stack.enter_context(router.register_forward_hook(count))
        for name in ("steps", "drafts"):  # graphs, which run no hooks
            stack.enter_context(patch.object(engine.runner, name, None))
        stack.enter_context(patch.object(engine.planner.policy.costs, "observe"))  # rounds without graphs are slow
        for _ in range(COUNTED):
            engine.step()
        engine.drain()
    abort(engine, batch)
    return sum(counts) / len(counts)


def bytes_read(engine: Engine, config: RoundConfig, batch: int, nodes: float, hit: float | None) -> dict[str, float]:
    """The least bytes of weights and KV that a round reads: of the target's pass, and of all of the draft's. `nodes`:
    of each request; `hit`: experts of a layer, for mixtures."""
    length = config.prompt_len + config.new_tokens / 2
    target, *drafted = (weights + batch * kv for kv, weights in passes(engine, length, nodes, hit))
    return {"target": target, "draft": sum(drafted)}


def nodes_of(engine: Engine, batch: int) -> float:
    """Nodes that rounds verify of each of `batch` requests, on average if the engine chooses."""
    if engine.config.draft == "none" or engine.config.width is not None:
        return engine.planner.limits.most_nodes
    return engine.planner.policy.metrics()["nodes_per_step"] / batch


def weight_bytes(layers: nn.ModuleList, hit: float | None) -> float:
    """Bytes of the target's layers, of experts those that are hit."""
    total = float(sum(x.nbytes for x in layers.state_dict().values()))
    for experts in (module for module in layers.modules() if isinstance(module, Experts)):
        assert hit is not None, "layers with experts were counted"
        total -= (1 - hit / experts.spec.num_local) * sum(x.nbytes for x in experts.state_dict().values())
    return total


def passes(engine: Engine, length: float, nodes: float, hit: float | None) -> Iterator[tuple[float, float]]:
    """(bytes of a request's KV and states at that length, bytes of weights) of the target's pass over `nodes` of each
    request, and of each of the draft's; embeddings are not read.

    A block draft fills its block in one pass; others take a pass a token, of which EAGLE3's first alone reads fc. Each
    reads the draft's head, or the rows of the target's that stand for it.
    """
    target = engine.runner.target
    drafter = engine.runner.drafter
    item = target.dtype.itemsize
    head = sum(x.nbytes for x in target.lm_head.parameters())
    layers = [layer.mixer for layer in engine.engine_plan.part.layers]
    yield kv_bytes(layers, length, item), weight_bytes(target.layers, hit) + head
    module = getattr(drafter, "module", None)
    drafted = round(nodes) - 1
    if module is None or drafted < 1:
        return
    draft_head = drafter.vocabulary.head  # type: ignore[attr-defined]
    rows_read = draft_head.size * draft_head.weight[0].nbytes
    weights = {name: x for name, x in module.named_parameters() if not name.startswith(("lm_head.", "embed_tokens."))}
    is_block = hasattr(module.config, "block_size")
    has_fc = getattr(module.config, "has_fc", False)
    for step in range(1 if is_block else drafted):
        read = sum(x.nbytes for name, x in weights.items() if not (step and has_fc and name.startswith("fc.")))
        yield kv_bytes(engine.engine_plan.draft.layers, length, item), read + rows_read


def kv_bytes(layers: Sequence[AttentionSpec | RecurrentSpec], length: float, item: int) -> float:
    """Bytes of KV that a pass reads, and of fp32 states that it reads and writes."""
    total = 0.0
    for spec in layers:
        if isinstance(spec, RecurrentSpec):
            total += 2 * 4 * sum(prod(shape) for shape in spec.state_shapes.values())
        else:
            total += item * min(length, spec.window or length) * 2 * spec.num_kv_heads * spec.head_dim
    return total


if __name__ == "__main__":
    run(measured, RoundConfig, "bench/round.py")
