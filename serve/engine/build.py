"""Makes an engine from its plan: loads the weights, sizes the KV cache, captures and times passes."""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
import triton
from torch import Tensor

from slipstream import __version__, runtime
from slipstream.kernels.collectives.ranks import Ranks
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.models.files.checkpoint import weights_fingerprint
from slipstream.models.files.cost_tables import CostTables
from slipstream.models.layers.linear import Linear, cut_sums
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.decoder import Target, load_target
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.attention.base import load_backend
from slipstream.serve.drafters.base import Drafter
from slipstream.serve.drafters.registry import load_drafter
from slipstream.serve.engine import cost_files
from slipstream.serve.engine.acceptance_alarm import AcceptanceAlarm
from slipstream.serve.engine.acceptance_files import DIGITS, draft_facts, trained_record
from slipstream.serve.engine.budget import BudgetPolicy
from slipstream.serve.engine.calibration import fill_scales, prefill, read_text, read_user_text, scales_of, tokens_of
from slipstream.serve.engine.constraints import Constraints
from slipstream.serve.engine.cost_files import CostKey, text_hash
from slipstream.serve.engine.draft_windows import DraftWindows
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.engine_plan import EnginePlan, Space, kv_formats, read_plan
from slipstream.serve.engine.graph_keys import GraphKeys, GraphTable
from slipstream.serve.engine.host_stages import HostStage
from slipstream.serve.engine.kv_cache import GroupPages, PageCache
from slipstream.serve.engine.kv_states import StatePages
from slipstream.serve.engine.kv_windows import WindowPages
from slipstream.serve.engine.memory import Room, find_room, find_space, log_kv_cache, measure_workspace
from slipstream.serve.engine.planner import Planner
from slipstream.serve.engine.scheduler import Scheduler
from slipstream.serve.engine.step_costs import Costs, FittedCosts, StepCosts
from slipstream.serve.engine.team import LeadingRunner, Team
from slipstream.serve.grammar.grammars import Grammars
from slipstream.serve.options import EngineConfig
from slipstream.serve.request import EngineInfo
from slipstream.serve.runner.cuda_graphs import DraftGraphs, StepGraphs, capture_all
from slipstream.serve.runner.kept_states import KeptStates
from slipstream.serve.runner.kv import NetworkKV
from slipstream.serve.runner.model_runner import ModelRunner
from slipstream.serve.runner.recurrence import NUM_COLUMNS, RecurrentStates
from slipstream.serve.runner.request_state import RequestState
from slipstream.serve.runner.step import StepPasses

logger = logging.getLogger(__name__)

Capture = Callable[[StepPasses, GraphKeys], tuple[StepGraphs, DraftGraphs | None]]
Scales = Sequence[list[Tensor] | None]  # by network: scales of each layer where KV is in FP8


@dataclass(frozen=True, slots=True)
class Networks:
    """The target and its draft, loaded."""

    target: Target
    drafter: Drafter
    stages: list[HostStage]  # that draft on the host
    order: FixedOrder | None  # of the sums in the target's products
    scales: Scales


FindCosts = Callable[[EnginePlan, Networks, ModelRunner], Costs]


def build_engine(config: EngineConfig) -> Engine:
    """Builds an engine. Raises ValueError for options that do not fit one another, the target or the machine."""
    return build(read_plan(config))


def build(
    plan: EnginePlan,
    capture: Capture = capture_all,
    find_costs: "FindCosts | None" = None,
    team: Team | None = None,
) -> Engine:
    """Builds the engine that is planned. `capture`: captures passes; `find_costs`: knows what they cost. `team`: the
    other ranks, where they are there already."""
    find_costs = find_costs or measured_costs
    if plan.config.tp == 1:
        return make_engine(plan, capture, find_costs, None)
    is_owned = team is None
    team = team or Team(plan.config.tp, plan.device.device)
    with team.guard():
        team.order("load", plan)
        engine = make_engine(plan, capture, find_costs, team)
        if is_owned:
            weakref.finalize(engine, team.close)
        team.serve()
        return engine


def make_engine(plan: EnginePlan, capture: Capture, find_costs: "FindCosts", team: Team | None) -> Engine:
    """See `build`; the other ranks load their parts by now."""
    config = plan.config
    networks = load_networks(plan, meet=None if team is None else team.meet)
    with runtime.stage("sizing the KV cache"):
        rooms = [measure(plan, networks), *(team.answers() if team is not None else ())]
        space = find_space(plan, min(rooms))
        plan = replace(plan, space=space)
    if team is None:
        runner = make_runner(plan, networks, capture)
    else:
        team.order("make_runner", space, capture)
        runner = make_runner(plan, networks, capture, partial(LeadingRunner, team))
    with runtime.stage("timing passes"):
        costs = find_costs(plan, networks, runner)
        runner.time_sums()
        runner.forget()
    plan = replace(plan, graphs=runner.graphs)
    load = partial(load_tokenizer, plan.path, config.trust_remote_code)
    end_ids = networks.target.end_ids
    vocab_size = plan.spec.vocab_size
    grammars = Grammars(load, vocab_size, end_ids, config.json_whitespace)
    stages = [*networks.stages, Constraints(end_ids, vocab_size, grammars, plan.forced_nodes)]
    for stage in stages:
        stage.attach(config.max_running, pinned=plan.device.type == "cuda")
    scheduler = Scheduler(
        cache=make_cache(plan, space),
        max_running=config.max_running,
        max_model_len=space.max_model_len,
        max_chunks=plan.graphs.num_chunks or None,
        stop_ids=end_ids,
        lookahead=plan.draft.lookahead,
        max_reserve=plan.max_reserve,
    )
    info = EngineInfo(
        max_model_len=space.max_model_len,
        vocab_size=vocab_size,
        kv_cache_tokens=(space.num_pages[0] - 1) * config.page_size,
        inexact=plan.inexact,
        fingerprint=fingerprint(plan, networks),
        draft_fingerprint=plan.draft.source.fingerprint,
        num_spec_tokens=plan.usual_nodes - 1,
        draft_adapters=plan.draft.adapters,
    )
    planner = make_planner(plan, scheduler, costs, networks, runner)
    return Engine(plan, info, planner, runner, stages, networks.drafter.check, grammars, team)


def load_networks(plan: EnginePlan, rank: int = 0, meet: Callable[[], Ranks] | None = None) -> Networks:
    """Loads target and draft; of a target that ranks share, this one's part. `meet`: joins the ranks."""
    config = plan.config
    device = plan.device.device
    with runtime.stage("loading the weights"):
        target = load_target(
            plan.path, plan.spec, plan.dtype, device, config.trust_remote_code, config.quantization, rank, config.tp,
            whole_experts=config.whole_experts,
        )  # fmt: skip
        if meet is not None:
            target.join(meet())
        drafter, stages = load_drafter(plan.draft.source, config.drafter, target)
    if any(scale is not None for scale in target.cache_scales) and not plan.networks[0].has_codes:
        logger.info("the checkpoint has scales for a KV cache in FP8, which --kv-cache-dtype fp8 would use")
    if target.has_mtp and plan.draft.name != "mtp":
        logger.info("the checkpoint has a head that drafts (MTP): --draft mtp serves with it")
    load_backend(plan.backends["prefill"]).prepare(kv_formats(plan.networks, plan.device, plan.dtype)["prefill"])
    order = fix_order(plan, target)
    networks = Networks(target, drafter, stages, order, [None for _ in plan.networks])
    if any(network.has_codes for network in plan.networks):
        with runtime.stage("scales of the KV cache"):
            networks = replace(networks, scales=find_scales(plan, networks))
    return networks


def fix_order(plan: EnginePlan, target: Target) -> FixedOrder | None:
    """Fixes the order of sums in the target's products, if answers are to be exact."""
    if plan.inexact:
        logger.info("answers may depend on the requests beside them: %s", plan.inexact)
        for module in target.modules():
            if isinstance(module, Linear):
                module.sums_fast = plan.config.exact is False
        return None
    logger.info("exact: answers are the same with and without a draft, alone and beside others")
    order = FixedOrder()
    for module in target.modules():
        if isinstance(module, Linear):
            module.order = order
    if plan.config.tp > 1 or plan.config.tp_exact:
        uncut = cut_sums(target, quantized=plan.config.tp_exact)
        if uncut and plan.config.tp_exact:
            raise ValueError(
                f"tp_exact is true, but the sums of {uncut[0]} depend on the number of ranks; leave tp_exact out"
            )
        if uncut:
            logger.info("answers depend on the number of ranks, as the sums of %s do", uncut[0])
        order.suits_ranks = not uncut
    return order


def find_scales(plan: EnginePlan, networks: Networks) -> Scales:
    """Returns the scales of networks whose KV is in FP8, from the target's files, or by calibration."""
    target_scales = networks.target.cache_scales or (None,) * len(plan.spec.attention)
    device = plan.device.device
    stored: list[Sequence[Tensor | None]] = [[None if scale is None else scale.to(device) for scale in target_scales]]
    if not plan.draft.reads_target:
        stored.append([None] * len(plan.draft.layers))
    is_incomplete = any(
        network.has_codes and any(scale is None for scale in layers)
        for network, layers in zip(plan.networks, stored, strict=False)
    )
    calibrated: Sequence[Sequence[Tensor | None]]
    calibrated, source = calibrate(plan, networks) if is_incomplete else (stored, "")
    pairs = zip(("target", "draft"), plan.networks, stored, calibrated, strict=False)
    scales = [
        fill_scales(role, file_scales, new_scales, source) if network.has_codes else None
        for role, network, file_scales, new_scales in pairs
    ]
    return [*scales, *[None] * (len(plan.networks) - len(scales))]


def calibrate(plan: EnginePlan, networks: Networks) -> tuple[Sequence[Sequence[Tensor | None]], str]:
    """Returns the scales of all layers by network, and the name of the text that calibrated them."""
    config = plan.config
    text = read_user_text(config) or read_text(None)
    tokens = tokens_of(text, plan.path, plan.max_model_len, config.trust_remote_code)
    num_pages = max(-(-(len(tokens) + plan.limits.reserve) // config.page_size), NUM_COLUMNS)
    sizes = [2 if retention == "state" else 1 + num_pages for retention in plan.groups]
    passes = make_passes(plan, networks, sizes, num_pages)
    prefill(ModelRunner(passes), tokens, max(plan.widths), plan.limits.prompts_by)
    source = f"{len(tokens)} tokens of {config.calibration_file or 'bundled text'}"
    return [scales_of(kv) for kv in passes.kv], source


def measure(plan: EnginePlan, networks: Networks) -> Room:
    """Measures the room of this rank's device, on a GPU by running the largest passes over a cache of one dump page."""
    if plan.device.type == "cpu":
        return find_room(plan, 0)
    passes = make_passes(plan, networks, [1] * len(plan.groups), plan.pages_for(plan.max_model_len))
    workspace = passes.state.nbytes + plan.record_bytes + measure_workspace(passes, plan)
    del passes
    return find_room(plan, workspace)


def make_runner(
    plan: EnginePlan, networks: Networks, capture: Capture, make: Callable[..., ModelRunner] = ModelRunner
) -> ModelRunner:
    space = plan.space
    assert space is not None
    passes = make_passes(plan, networks, space.num_pages, plan.pages_for(space.max_model_len))
    steps, drafts = capture(passes, plan.graphs) if plan.captures else (None, None)
    return make(passes, steps, drafts)


def make_state(plan: EnginePlan, pages_per_slot: int, device: torch.device) -> RequestState:
    return RequestState(
        plan.config.max_running,
        pages_per_slot,
        plan.config.page_size,
        plan.limits.most_nodes,
        device,
        plan.spec.vocab_size,
        len(plan.groups),
        has_read_starts=plan.draft.chooses_window,
        has_adapters=bool(plan.draft.adapters),
    )


def make_passes(plan: EnginePlan, networks: Networks, num_pages: Sequence[int], pages_per_slot: int) -> StepPasses:
    config = plan.config
    device = plan.device.device
    size = config.page_size
    state = make_state(plan, pages_per_slot, device)
    kv = [
        NetworkKV.allocate(network.layers, plan.groups, num_pages, size, plan.dtype, device, scales)
        for network, scales in zip(plan.networks, networks.scales, strict=True)
        if not network.reads_target
    ]
    read_kv = [kv[0].read_by(network.layers) for network in plan.networks if network.reads_target]
    states = None
    if recurrent := plan.part.recurrent:
        group = plan.groups.index("state")
        states = RecurrentStates(recurrent, group, num_pages[group], state, plan.dtype)
    store = None
    if config.keep_states:
        hidden_size = plan.spec.hidden_size
        store = KeptStates(config.keep_states, num_pages[0], size, hidden_size, plan.dtype, device)
    layers = chain(*(network.layers for network in plan.networks))
    kinds = {(spec.rope, spec.head_dim) for spec in layers}  # few: a draft mostly has its target's
    ropes = {
        (rope, head_dim): RotaryEmbedding(rope, head_dim, pages_per_slot * size, plan.max_model_len).to(device)
        for rope, head_dim in kinds
    }
    attention = {
        phase: load_backend(plan.backends[phase])(
            network_kv, [ropes[spec.rope, spec.head_dim] for spec in network_kv.specs]
        )
        for phase, network_kv in zip(("prefill", "verify", "draft"), (kv[0], *kv, *read_kv), strict=False)
    }
    networks.drafter.attach(networks.target, state, attention.get("draft"))
    return StepPasses(
        networks.target,
        attention,
        networks.drafter,
        state,
        tuple(kv),
        states,
        plan.usual_nodes,
        min(plan.usual_nodes, plan.limits.chain_nodes or plan.usual_nodes),
        plan.draft.branches,
        networks.order,
        config.simulate_accept_length,
        logprobs_of_samples=config.logprobs_mode == "processed",
        kept_states=store,
    )


def make_cache(plan: EnginePlan, space: Space) -> PageCache:
    log_kv_cache(plan, space)
    size = plan.config.page_size
    groups: list[GroupPages] = []
    for retention, pages in zip(plan.groups[1:], space.num_pages[1:], strict=True):
        if retention == "state":
            groups.append(StatePages(pages, size, plan.limits.grid))
        else:
            assert retention != "all", "one group keeps all tokens, the first"
            groups.append(WindowPages(pages, size, retention, plan.window_reserve))
    return PageCache(space.num_pages[0], size, groups)


def measured_costs(plan: EnginePlan, networks: Networks, runner: ModelRunner) -> Costs:
    """Returns the costs of steps: of captured passes as timed now, or at an earlier start with the same key."""
    config = plan.config
    if runner.steps is None:
        rows = max(config.prompt_tokens, config.max_running * plan.limits.most_nodes)
        return FittedCosts(rows + config.max_running)
    all_tables = find_tables(runner, cost_key(plan, networks))
    tables = all_tables.without_slow()
    runner.drop(all_tables.target["plain"].keys() - tables.target["plain"].keys())
    return StepCosts(tables)


def find_tables(runner: ModelRunner, key: CostKey) -> CostTables:
    assert runner.steps is not None
    saved = cost_files.load(key)
    if saved is not None:
        try:
            tables = CostTables.from_json(saved)
            tables.check_sizes(runner.steps.timed_sizes, runner.drafts.timed_sizes if runner.drafts is not None else [])
            return tables
        except ValueError as error:
            logger.warning("step times are measured again: %s", error)
    tables = runner.time_passes()
    cost_files.save(key, tables.to_json())
    return tables


def cost_key(plan: EnginePlan, networks: Networks) -> CostKey:
    config = plan.config
    names = (
        "attention",
        "page_size",
        "max_running",
        "prefill_budget",
        "prefill_graph_tokens",
        "width",
        "drafter",
        "grammar_drafts",
    )
    return CostKey(
        gpu=plan.device.name,
        torch=torch.__version__,
        triton=triton.__version__,
        slipstream=__version__,
        model=text_hash((plan.path / "config.json").read_text()),
        draft=text_hash(plan.draft.source.shape),
        options={
            "dtype": str(plan.dtype),
            "exact": networks.order is not None,
            "quantization": format_of(networks.target),
            "kv_cache_dtype": "fp8" if config.has_fp8_cache else "auto",
            **{name: getattr(config, name) for name in names},
            **({"tp": config.tp} if config.tp > 1 else {}),
            **({"keep_states": config.keep_states} if config.keep_states else {}),
            **({"tp_exact": True} if config.tp_exact else {}),
            **({"ep": True} if config.ep else {}),
        },
    )


def make_planner(
    plan: EnginePlan, scheduler: Scheduler, costs: Costs, networks: Networks, runner: ModelRunner
) -> Planner:
    config = plan.config
    policy = BudgetPolicy(
        costs,
        plan.widths,
        most_nodes=plan.limits.most_nodes,
        node_rows=plan.node_rows if plan.captures else None,
        fixed=config.width,
        itl_ms=config.itl_ms,
        num_slots=config.max_running,
        chain_nodes=plan.draft.chain_nodes,
    )
    prefill_backend = runner.passes.attention["prefill"]
    graphs = None
    if plan.captures:
        graphs = GraphTable(plan.graphs, lambda: plan.limits.prompts_by == "prefill" and prefill_backend.is_ready)
    return Planner(
        scheduler,
        policy,
        plan.limits,
        graphs,
        plan.draft.name,
        make_alarm(plan, networks),
        host_drafts=plan.forced_nodes > 1 or plan.draft.host_widths[-1] > 1,
        fixed_tokens=networks.drafter.fixed_tokens,
        windows=DraftWindows(config.max_running) if plan.draft.chooses_window else None,
    )


def make_alarm(plan: EnginePlan, networks: Networks) -> AcceptanceAlarm:
    source = plan.draft.source
    alarm = AcceptanceAlarm(plan.config.max_running, trained_record(source))
    of_target = {
        "target": weights_fingerprint(plan.path)[:DIGITS],
        "quantization": format_of(networks.target) or "none",
        "kv_cache": "fp8" if plan.config.has_fp8_cache else "auto",
    }
    alarm.facts = draft_facts(source, of_target)
    return alarm


def format_of(target: Target) -> str:
    """Returns the format of a target's weights; empty for one that is not quantised."""
    return target.quantization.name if target.quantization is not None else ""


def fingerprint(plan: EnginePlan, networks: Networks) -> str:
    """Hashes weights, arithmetic, versions and the device: equal fingerprints mean equal answers, if answers are
    exact."""
    page_size = str(plan.config.page_size)
    parts = [weights_fingerprint(plan.path), str(plan.dtype), page_size, __version__, torch.__version__]
    parts += [triton.__version__, format_of(networks.target)]
    scales = networks.scales[0]
    if scales is not None:  # the draft's scales do not change answers
        parts += ["fp8 KV cache", *(repr(scale.tolist()) for scale in scales)]
    if plan.device.type == "cuda":
        parts.append(plan.device.name)
    if networks.order is not None and networks.order.suits_ranks:
        parts.append("sums for any tp")
    elif plan.config.tp > 1:
        parts.append(f"tp {plan.config.tp}{', ep' if plan.config.whole_experts else ''}")
    if plan.inexact:
        parts += [plan.inexact, repr(plan.config)]
    return "fp_" + text_hash(" ".join(parts))[:12]
