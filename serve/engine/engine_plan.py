"""Plans an engine before any weights are read: widths, rows, KV windows, dtypes, backends, captured passes.

An EnginePlan is plain data. `build` makes an engine of it, `serve --dry-run` reads its sizes, and another process with
the same plan makes a runner that executes the same steps.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.kv.fp8 import E4M3
from slipstream.models.drafts.source import source_of
from slipstream.models.files.checkpoint import read_json
from slipstream.models.layers.linear import Linear
from slipstream.models.targets.config import AttentionSpec, MoESpec, TargetSpec, check_aux_layers
from slipstream.models.targets.decoder import Target, load_config
from slipstream.serve.attention.base import FEATURES, KVFormat, choose_backends, load_backend
from slipstream.serve.drafters.base import DraftPlan
from slipstream.serve.drafters.registry import plan_draft
from slipstream.serve.engine.calibration import read_user_text
from slipstream.serve.engine.graph_keys import GraphKeys, most_node_rows
from slipstream.serve.engine.plan import MAX_STEPS_IN_FLIGHT
from slipstream.serve.engine.planner import PassLimits
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.runner.kv import Groups, find_groups, page_bytes
from slipstream.serve.runner.recurrence import NUM_COLUMNS, record_bytes, state_bytes

logger = logging.getLogger(__name__)

FORCED_NODES = 16  # nodes of a proposal that a grammar forces, root included
FORCED_ROWS = 64  # rows that captured passes have for these beside roots, if the drafter needs fewer
FP8_CAPABILITY = (8, 9)
EXPERT_TOKENS = 512  # tokens per expert in a long prompt's step: with fewer, blocks have many empty rows
MOST_PROMPT_TOKENS = 8192  # prompt tokens of a step
FAST_PROMPT_TOKENS = 2048  # prompt tokens of a step with --fast, whose attention takes them in much less time
INPUTS = 64  # products in a fixed order need a multiple of so many inputs
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The properties of a device that a plan depends on."""

    type: str  # cpu or cuda
    is_present: bool = True  # False: a GPU that another machine has, which can do what the newest can
    name: str = ""
    capability: tuple[int, int] = FP8_CAPABILITY
    order_faults: Mapping[torch.dtype, str] = field(
        default_factory=dict
    )  # reasons why sums have no fixed order; empty: they have

    @classmethod
    def of(cls, device: torch.device) -> "DeviceFacts":
        faults = {dtype: FixedOrder.fault(device, dtype) for dtype in DTYPES}
        if device.type == "cpu":
            return cls("cpu", order_faults=faults)
        name = torch.cuda.get_device_name(device)
        return cls("cuda", name=name, capability=torch.cuda.get_device_capability(device), order_faults=faults)

    @property
    def device(self) -> torch.device:
        return torch.device(self.type)

    def check_ranks(self, count: int) -> None:
        """Raises ValueError where this machine has no device for each of `count` ranks."""
        if count == 1 or self.type == "cpu" or not self.is_present:
            return
        present = torch.cuda.device_count()
        if present < count:
            raise ValueError(f"tp is {count}, but torch finds {present} GPU{'s' if present > 1 else ''}; lower tp")
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        if len(names) > 1:
            raise ValueError(f"tp is {count}, but the GPUs differ ({', '.join(names)}); choose equal ones")


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The KV of the target or of a draft."""

    layers: tuple[AttentionSpec, ...]  # those with attention
    kv_dtype: torch.dtype
    reads_target: bool = False  # its layers read the target's KV

    @property
    def has_codes(self) -> bool:
        """Whether KV is in FP8, with scales."""
        return self.kv_dtype == E4M3


@dataclass(frozen=True, slots=True)
class Space:
    """Size of the KV cache."""

    num_pages: tuple[int, ...]  # by group, dump pages included
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Everything that is decided about an engine."""

    config: EngineConfig  # with the prompt tokens of a step
    path: Path  # folder of the target
    spec: TargetSpec
    part: TargetSpec  # a rank's part of the target; all ranks' are equal
    draft: DraftPlan
    device: DeviceFacts
    dtype: torch.dtype
    networks: tuple[NetworkPlan, ...]  # a rank's: the target's part and, if its KV is kept, the draft
    groups: Groups  # of caches
    max_model_len: int  # before the size of the cache limits it
    widths: tuple[int, ...]  # numbers of nodes that the draft network may propose
    usual_nodes: int  # most nodes of a proposal, but for those that grammars force
    forced_nodes: int  # most nodes of a proposal that a grammar forces; 1: none
    node_rows: int  # nodes of the largest pass
    limits: PassLimits
    backends: Mapping[str, str]  # names of attention backends, by phase
    inexact: str  # why a row's bits may depend on the rows beside it; empty where they do not
    captures: bool  # whether passes are captured
    overlap: bool  # whether tokens are read one step later
    graphs: GraphKeys
    space: Space | None = None  # measured when the weights are loaded

    @property
    def max_reserve(self) -> int:
        """KV tokens that the steps in flight write beyond a request's committed ones."""
        return self.limits.reserve * (MAX_STEPS_IN_FLIGHT if self.overlap else 1)

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a page, by cache group."""
        networks = [(network.layers, network.kv_dtype) for network in self.networks]
        sizes = page_bytes(networks, self.groups, self.config.page_size)
        states = len(self.config.keep_states) * self.spec.hidden_size * self.dtype.itemsize
        sizes[0] += states * self.config.page_size
        if "state" in self.groups:
            sizes[self.groups.index("state")] = state_bytes(self.part.recurrent)
        return sizes

    @property
    def record_bytes(self) -> int:
        """Bytes of what recurrent layers record of nodes, for all slots."""
        return record_bytes(self.part.recurrent, self.dtype, self.config.max_running + 1, self.limits.most_nodes)

    @property
    def window_reserve(self) -> int:
        """Tokens beyond the committed ones for which a window group has pages: what steps in flight write, and a chunk
        of a prompt that cannot be shorter."""
        return self.max_reserve + (self.limits.grid if self.spec.recurrent else 0)

    def pages_for(self, num_tokens: int) -> int:
        """Returns the pages of a request of that many tokens: entries of its page tables."""
        columns = NUM_COLUMNS if self.spec.recurrent else 0
        return max(-(-(num_tokens + self.max_reserve) // self.config.page_size), columns)


def read_plan(config: EngineConfig, device: DeviceFacts | None = None, *, weights: bool = True) -> EnginePlan:
    """Plans an engine from the files that the options name. `device`: this machine's; `weights`: fetch those of a
    target on the hub, too. Raises ValueError for options that do not fit one another, the target or the device."""
    read_user_text(config)
    name, path = find_target(config, weights=False)
    if weights and not Path(name).is_dir():
        read_plan(config, device, weights=False)  # refuses before a download what needs no weights
        _, path = find_target(config)
    device = device or DeviceFacts.of(torch.device(pick_device(config.device)))
    device.check_ranks(config.tp)
    spec = load_config(path, config.trust_remote_code)
    draft = plan_draft(source_of(config.draft, str(path)), config.drafter, spec)
    return plan_engine(config, path, spec, draft, device, pick_dtype(config.dtype, path, device))


def plan_engine(
    config: EngineConfig, path: Path, spec: TargetSpec, draft: DraftPlan, device: DeviceFacts, dtype: torch.dtype
) -> EnginePlan:
    """Plans an engine for a target of shape `spec` in the folder `path`, which computes in `dtype`. Raises ValueError
    for options that do not fit one another, the target or the device."""
    part = shard(config, spec, draft)
    prompt_tokens = pick_prompt_tokens(config, spec, device.type)
    enough_tokens = enough_prompt_tokens(config, prompt_tokens)
    config = replace(config, prefill_budget=prompt_tokens)
    if spec.recurrent and config.prefill_graph_tokens is None:  # a graph would hold each token's kernels apart
        config = replace(config, prefill_graph_tokens=0)
    offered = pick_widths(config.width, tuple(sorted({*draft.widths, *draft.host_widths})))
    usual_nodes = max(offered)
    network_nodes = min(usual_nodes, draft.widths[-1])
    # Widths of the draft's pass; a fixed width is cut to the widest that the drafter can propose.
    widths = {min(width, network_nodes) for width in offered} | ({1} if config.width is None else set())
    node_rows = most_node_rows(config.max_running, usual_nodes)
    forced_nodes = 1
    if config.grammar_drafts:  # a fixed width is theirs, too
        forced_nodes = FORCED_NODES if config.width is None else usual_nodes
        beside = min(config.max_running * (forced_nodes - 1), FORCED_ROWS)
        node_rows = max(node_rows, config.max_running + beside)
    networks = plan_networks(config, part, draft, dtype, device)
    formats = kv_formats(networks, device, dtype)
    backends = choose_backends(config.attention, formats, is_present=device.is_present)
    captures, overlap = pick_modes(config, device, {phase: backends[phase] for phase in formats})
    if config.keep_states:
        check_aux_layers(config.keep_states, spec.num_layers)
    inexact = find_inexact(config, part, device, dtype, backends["verify"])
    if inexact:
        check_inexact(config, inexact)
    max_model_len = pick_max_model_len(config.max_model_len, spec)
    most_nodes = max(usual_nodes, forced_nodes)
    captured_tokens = config.captured_tokens if captures else 0
    grid = math.lcm(config.page_size, *(layer.grid for layer in spec.recurrent)) if spec.recurrent else 1
    if (captured_tokens or prompt_tokens) < grid:
        name = "prefill_graph_tokens" if captured_tokens else "prefill_budget"
        raise ValueError(
            f"{name} is {captured_tokens or prompt_tokens}, and this target computes prompts by {grid} tokens; raise "
            f"it to {grid} at least"
        )
    limits = PassLimits(
        most_nodes=most_nodes,
        of_network=network_nodes,
        reserve=most_nodes + (draft.scratch[network_nodes] if draft.scratch else 0),
        prompt_rows=captured_tokens or prompt_tokens,
        enough_prompt_rows=enough_tokens,
        grid=grid,
        prompts_by="prefill" if inexact else "verify",  # other backends add in orders of their own
        branches=draft.branches,
        chain_nodes=draft.chain_nodes if draft.branches else usual_nodes,
    )
    chain_rows = min(node_rows, config.max_running * draft.chain_nodes) if draft.branches else None
    return EnginePlan(
        config=config,
        path=path,
        spec=spec,
        part=part,
        draft=draft,
        device=device,
        dtype=dtype,
        networks=networks,
        groups=find_groups(
            chain(*(network.layers for network in networks)), max_model_len, has_states=bool(spec.recurrent)
        ),
        max_model_len=max_model_len,
        widths=tuple(sorted(widths)),
        usual_nodes=usual_nodes,
        forced_nodes=forced_nodes,
        node_rows=node_rows,
        limits=limits,
        backends=backends,
        inexact=inexact,
        captures=captures,
        overlap=overlap,
        graphs=GraphKeys.for_sizes(config.max_running, node_rows, captured_tokens, widths, chain_rows)
        if captures
        else GraphKeys(),
    )


def check_inexact(config: EngineConfig, reason: str) -> None:
    """Raises ValueError where the options demand bits that do not depend on other requests, which `reason` rules
    out."""
    if config.exact:
        raise ValueError(
            f"exact is true, but {reason}; change that, or leave exact out (exact-check: --engine.exact false)"
        )
    if config.tp_exact:
        raise ValueError(f"tp_exact is true, but {reason}; change that, or leave tp_exact out")


def shard(config: EngineConfig, spec: TargetSpec, draft: DraftPlan) -> TargetSpec:
    """Returns a rank's part of a target. Raises ValueError where ranks do not divide it, or do not run its draft."""
    if config.tp > 1 and draft.reads_target:
        raise ValueError(
            f"tp is {config.tp}, and this draft ({draft.name}) reads the target's KV, of which a rank has a part; use "
            "another draft, or tp 1"
        )
    if config.tp > 1 and config.drafter.get("token_map_dynamic"):
        raise ValueError(
            f"tp is {config.tp}, and drafter.token_map_dynamic reads rows of the whole output head, of which a rank "
            "has a part; leave the option out, or use tp 1"
        )
    if config.ep and not any(isinstance(layer.mlp, MoESpec) or layer.experts for layer in spec.layers):
        raise ValueError("ep is true, but the target has no experts to give to devices; leave ep out")
    try:
        return spec.shard(0, config.tp, whole_experts=config.whole_experts)
    except ValueError as error:
        raise ValueError(f"tp is {config.tp}, but {error}") from error


def kv_formats(networks: Sequence[NetworkPlan], device: DeviceFacts, dtype: torch.dtype) -> dict[str, KVFormat]:
    """Returns the KV that the attention of each phase works on."""
    phases = zip(("prefill", "verify", "draft"), (networks[0], *networks), strict=False)
    return {phase: KVFormat(device.device, dtype, network.layers, network.has_codes) for phase, network in phases}


def plan_networks(
    config: EngineConfig, spec: TargetSpec, draft: DraftPlan, dtype: torch.dtype, device: DeviceFacts
) -> tuple[NetworkPlan, ...]:
    target_layers = spec.attention
    if draft.reads_target:
        (target,) = plan_networks(config, spec, DraftPlan(), dtype, device)
        return target, NetworkPlan(draft.layers, target.kv_dtype, reads_target=True)
    kinds = [(target_layers, config.has_fp8_cache), (draft.layers, draft.kv_cache_dtype == "fp8")]
    networks = []
    for layers, is_fp8 in kinds if draft.layers else kinds[:1]:
        if is_fp8:
            check_fp8_cache(layers, device)
        networks.append(NetworkPlan(layers, E4M3 if is_fp8 else dtype))
    return tuple(networks)


def pick_modes(config: EngineConfig, device: DeviceFacts, backends: Mapping[str, str]) -> tuple[bool, bool]:
    """Returns whether passes are captured, and whether their tokens are read one step later (overlap)."""
    captures = device.type == "cuda" and config.cuda_graph
    if captures and device.is_present:
        names = {name for phase, name in backends.items() if phase != "prefill"}
        if planned := sorted(name for name in names if load_backend(name).needs_host_lengths):
            logger.warning("no CUDA graphs, since attention by %s plans on the host", " and ".join(planned))
            captures = False
    return captures, captures and config.overlap  # others wait for the device in each step


def find_inexact(config: EngineConfig, spec: TargetSpec, device: DeviceFacts, dtype: torch.dtype, verify: str) -> str:
    """Says why a row's bits may depend on the rows beside it; empty where they do not. `verify`: the backend."""
    if config.exact is False:
        return "exact is false (--fast)"
    if fault := device.order_faults.get(dtype, ""):
        return fault
    with torch.device("meta"):
        target = Target(spec)
    if fault := find_unordered(target):
        return fault
    if device.is_present and not load_backend(verify).is_exact:
        name = config.attention if config.attention != "auto" else "the attention of verify"
        return f"attention is {name!r}, which adds in an order of its own"
    return ""


def find_unordered(target: Target) -> str:
    """Says why layers do not add in one order on a GPU; empty where they do."""
    if not all(layer.has_kernels for layer in target.config.recurrent):
        return "layers with recurrent state add in an order of their own"
    linears = [module for module in target.modules() if isinstance(module, Linear)]
    if odd := {linear.in_features for linear in linears if linear.in_features % INPUTS}:
        return f"a layer has {min(odd)} inputs, no multiple of {INPUTS}"
    return ""


def check_fp8_cache(layers: Sequence[AttentionSpec], device: DeviceFacts) -> None:
    """Raises ValueError where an FP8 KV cache was not tried with such layers, or the GPU has no FP8."""
    faults = [name for name, has_it in FEATURES.items() if any(map(has_it, layers))]
    if faults:
        raise ValueError(
            f"kv_cache_dtype is 'fp8', which was not tried with {' and '.join(faults)}; leave it out for this model"
        )
    if device.capability < FP8_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype is 'fp8', which {device.name} does not compute (compute capability 8.9 and later do); "
            "leave it out"
        )


def pick_max_model_len(max_model_len: int | None, model: TargetSpec) -> int:
    """Returns the context length: at most the target's positions."""
    longest = model.most_positions
    if max_model_len is not None and max_model_len > longest:
        raise ValueError(
            f"max_model_len is {max_model_len}; lower it to {longest}, the most positions of this target, or extend it "
            "in its config.json (max_position_embeddings, rope_scaling)"
        )
    return max_model_len or longest


def pick_prompt_tokens(config: EngineConfig, model: TargetSpec, device: str) -> int:
    """Returns the most prompt tokens of a step; more for mixtures of experts, since each step of a prompt reads nearly
    all of them."""
    if config.prefill_budget is not None or device == "cpu":
        return config.prompt_tokens
    min_tokens = FAST_PROMPT_TOKENS if config.exact is False else config.prompt_tokens
    mixtures = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoESpec)]
    expert_tokens = max((EXPERT_TOKENS * spec.num_experts // spec.top_k for spec in mixtures), default=0)
    return max(min(expert_tokens, MOST_PROMPT_TOKENS), min_tokens)


def enough_prompt_tokens(config: EngineConfig, max_tokens: int) -> int:
    """Returns the prompt tokens after which a step admits no further prompt: half of `max_tokens`, or all if the user
    set a budget. So the first of several prompts need not wait for steps as large as those of a long one."""
    return max(max_tokens // 2, config.prompt_tokens)


def pick_widths(width: int | None, offered: tuple[int, ...]) -> tuple[int, ...]:
    if width is None:
        return offered
    if width not in offered:
        raise ValueError(f"width is {width}; this drafter offers {', '.join(map(str, offered))}")
    return (width,)


def pick_device(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU; choose cpu, or install a CUDA build of torch")
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def pick_dtype(name: str, path: Path, device: DeviceFacts) -> torch.dtype:
    if name == "auto" and device.type == "cpu":
        return torch.float32
    if name == "auto":
        config = read_json(path / "config.json")
        name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return getattr(torch, name)
