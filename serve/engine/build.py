"""Makes an engine: loads the weights, sizes the KV cache, captures and times passes."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import triton
from torch import Tensor

from slipstream import __version__, runtime
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.kv.fp8 import E4M3
from slipstream.models.files.checkpoint import (
    checkpoint_fingerprint,
    read_json,
    resolve,
    weights_fingerprint,
)
from slipstream.models.files.cost_tables import CostTables
from slipstream.models.files.names import is_checkpoint
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.quantized import FP8Linear
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import AttentionSpec, MoESpec, TargetSpec
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.attention.base import FEATURES, KVFormat, find_backends
from slipstream.serve.drafters.registry import drafter_name, load_drafter
from slipstream.serve.engine import cost_files
from slipstream.serve.engine.budget import BudgetPolicy
from slipstream.serve.engine.calibration import fill_scales, prefill, read_text, read_user_text, scales_of, tokens_of
from slipstream.serve.engine.constraints import Constraints
from slipstream.serve.engine.cost_files import CostKey, text_hash
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.kv_cache import PageCache
from slipstream.serve.engine.kv_windows import WindowPages
from slipstream.serve.engine.memory import Sizing, log_kv_cache, measure_workspace
from slipstream.serve.engine.plan import MAX_STEPS_IN_FLIGHT
from slipstream.serve.engine.planner import Limits, Planner
from slipstream.serve.engine.scheduler import Scheduler
from slipstream.serve.engine.step_costs import Costs, FittedCosts, StepCosts
from slipstream.serve.grammar.grammars import Grammars
from slipstream.serve.options import EngineConfig, find_target
from slipstream.serve.request import EngineInfo
from slipstream.serve.runner.cuda_graphs import DraftGraphs, StepGraphs, capture_all, most_node_rows
from slipstream.serve.runner.kv import NetworkKV, find_windows, page_bytes
from slipstream.serve.runner.model_runner import ModelRunner
from slipstream.serve.runner.request_state import RequestState
from slipstream.serve.runner.step import Runner

logger = logging.getLogger(__name__)

FORCED_NODES = 16  # nodes of a proposal that a grammar forces, root included
FORCED_ROWS = 64  # rows that captured passes have for these beside roots, if the drafter needs fewer
FP8_CAPABILITY = (8, 9)
EXPERT_TOKENS = 512  # tokens per expert in a long prompt's step: with fewer, blocks have many empty rows
MOST_PROMPT_TOKENS = 8192  # prompt tokens of a step
FAST_PROMPT_TOKENS = 2048  # prompt tokens of a step with --fast, whose attention takes them in much less time
INPUTS = 64  # products in a fixed order need a multiple of so many inputs


@dataclass(frozen=True, slots=True)
class Space:
    """Size of the KV cache."""

    num_pages: list[int]  # by group, dump pages included
    max_model_len: int
    max_reserve: int  # KV tokens that the steps in flight write beyond a request's committed ones


class Builder:
    """Builds an engine in steps; tests change single ones."""

    def __init__(self, config: EngineConfig) -> None:
        self.calibration_text = read_user_text(config)
        _, path = find_target(config)
        self.path = path
        self.model = model = load_config(path, config.trust_remote_code)
        self.device = torch.device(pick_device(config.device))
        prompt_tokens = pick_prompt_tokens(config, model, self.device.type)
        self.enough_prompt_tokens = enough_prompt_tokens(config, prompt_tokens)
        self.config = config = replace(config, prefill_budget=prompt_tokens)
        self.dtype = pick_dtype(config.dtype, path, self.device)
        with runtime.stage("loading the weights"):
            self.target = load_target(
                path, model, self.dtype, self.device, config.trust_remote_code, config.quantization
            )
            self.drafter, self.stages = load_drafter(config.draft, config.drafter, self.target)
        offered = {*self.drafter.widths, *(width for stage in self.stages for width in stage.widths)}
        widths = pick_widths(config.width, tuple(sorted(offered)))
        self.usual_nodes = max(widths)
        self.of_network = min(max(widths), max(self.drafter.widths))
        self.node_rows = most_node_rows(config.max_running, self.usual_nodes)
        self.forced_nodes = 1
        if config.grammar_drafts:  # a fixed width is theirs, too
            self.forced_nodes = FORCED_NODES if config.width is None else self.usual_nodes
            beside = min(config.max_running * (self.forced_nodes - 1), FORCED_ROWS)
            self.node_rows = max(self.node_rows, config.max_running + beside)
        self.most_nodes = max(self.usual_nodes, self.forced_nodes)
        # Widths of the draft's pass; a fixed width is cut to the widest that the drafter can propose.
        network_widths = {min(width, self.of_network) for width in widths}
        self.widths = tuple(sorted({1, *network_widths} if config.width is None else network_widths))
        self.reserve = self.most_nodes + self.drafter.scratch(self.of_network)
        self.longest = pick_max_model_len(config.max_model_len, model)
        layers = tuple(layer.attention for layer in model.layers)
        self.networks = [layers, self.drafter.kv] if self.drafter.kv else [layers]
        # By network: whether its KV is in FP8, and the scales of each layer once they are known.
        self.coded = [config.has_fp8_cache, self.drafter.kv_cache_dtype == "fp8"]
        self.coded = self.coded[: len(self.networks)]
        self.scales: list[list[Tensor] | None] = [None for _ in self.networks]
        for network, is_coded in zip(self.networks, self.coded, strict=True):
            if is_coded:
                check_fp8_cache(network, self.device)
        self.windows = find_windows(chain(*self.networks), self.longest)
        phases = dict(zip(("prefill", "verify", "draft"), (layers, *self.networks), strict=False))
        coded = dict(zip(phases, (self.coded[0], *self.coded), strict=False))
        formats = {phase: KVFormat(self.device, self.dtype, specs, coded[phase]) for phase, specs in phases.items()}
        if any(scale is not None for scale in self.target.cache_scales) and not self.coded[0]:
            logger.info("the checkpoint has scales for a KV cache in FP8, which --kv-cache-dtype fp8 would use")
        self.backends = find_backends(config.attention, formats)
        self.backends["prefill"].prepare(formats["prefill"])
        self.captures, self.overlap = self.pick_modes(phases)
        self.inexact = self.find_inexact()
        self.order = self.fix_order()

    def build(self) -> Engine:
        config = self.config
        if any(self.coded):
            with runtime.stage("scales of the KV cache"):
                self.scales = self.find_scales()
        with runtime.stage("sizing the KV cache"):
            space, pages_per_slot = self.size()
            passes = self.build_passes(space.num_pages, pages_per_slot)
        steps, drafts = self.capture(passes) if self.captures else (None, None)
        with runtime.stage("timing passes"):
            costs = self.find_costs(steps, drafts)
            self.drafter.forget()
        load = partial(load_tokenizer, self.path, config.trust_remote_code)
        grammars = Grammars(load, self.model.vocab_size, self.target.end_ids, config.json_whitespace)
        constraints = Constraints(self.target.end_ids, self.model.vocab_size, grammars, self.forced_nodes)
        stages = [*self.stages, constraints]
        for stage in stages:
            stage.attach(config.max_running, pinned=self.device.type == "cuda")
        scheduler = Scheduler(
            cache=self.make_cache(space),
            max_running=config.max_running,
            max_model_len=space.max_model_len,
            max_chunks=steps.num_chunks if steps is not None and steps.num_chunks else None,
            stop_ids=self.target.end_ids,
            lookahead=self.drafter.lookahead,
            max_reserve=space.max_reserve,
        )
        tokens = (space.num_pages[0] - 1) * config.page_size
        return Engine(
            config,
            EngineInfo(
                max_model_len=space.max_model_len,
                vocab_size=self.model.vocab_size,
                kv_cache_tokens=tokens,
                inexact=self.inexact,
                fingerprint=self.fingerprint(),
                draft_fingerprint=self.draft_fingerprint(),
                num_spec_tokens=self.usual_nodes - 1,
            ),
            self.make_planner(scheduler, costs),
            ModelRunner(passes, steps, drafts),
            stages,
            self.drafter.check,
            grammars,
            overlap=self.overlap,
        )

    def pick_modes(self, phases: Iterable[str]) -> tuple[bool, bool]:
        """Whether passes are captured, and whether their tokens are read one step later (overlap)."""
        planned = [phase for phase in phases if phase != "prefill" and self.backends[phase].needs_host_lengths]
        on_gpu = self.device.type == "cuda"
        if on_gpu and self.config.cuda_graph and planned:
            raise ValueError(
                f"attention is {self.config.attention!r}: its backend for {planned[0]} plans on the host, which a CUDA "
                f"graph cannot; choose another for {' and '.join(planned)}, or add --no-cuda-graph"
            )
        captures = on_gpu and self.config.cuda_graph
        return captures, captures and self.config.overlap  # others wait for the device in each step

    @property
    def branches(self) -> bool:
        """Whether some proposals are trees."""
        return self.drafter.branches or any(stage.branches for stage in self.stages)

    def find_inexact(self) -> str:
        """Says why a row's bits may depend on the rows beside it; empty where they do not."""
        verify = self.config.attention if self.config.attention != "auto" else "the attention of verify"
        inputs = {module.in_features for module in self.target.modules() if isinstance(module, Linear)}
        odd = {size for size in inputs if size % INPUTS}
        for is_at_fault, reason in (
            (self.config.exact is False, "exact is false (--fast)"),
            (fault := FixedOrder.fault(self.device, self.dtype), fault),
            (odd, f"a layer has {min(odd, default=0)} inputs, no multiple of {INPUTS}"),
            (not self.backends["verify"].is_exact, f"attention is {verify!r}, which adds in an order of its own"),
        ):
            if is_at_fault:
                return reason
        return ""

    def fix_order(self) -> FixedOrder | None:
        """Fixes the order of sums in the target's products. Raises ValueError if `exact` is set and impossible."""
        if self.inexact:
            if self.config.exact:
                raise ValueError(f"exact is true, but {self.inexact}; change that, or leave exact out")
            logger.info("answers may depend on the requests beside them: %s", self.inexact)
            for module in self.target.modules():
                if isinstance(module, FP8Linear):
                    module.sums_fast = self.config.exact is False
            return None
        logger.info("exact: answers are the same with and without a draft, alone and beside others")
        order = FixedOrder()
        for module in self.target.modules():
            if isinstance(module, Linear):
                module.order = order
        return order

    @property
    def quantization(self) -> str:
        """The target's formats; empty for one that is not quantised."""
        return self.target.quantization.name if self.target.quantization is not None else ""

    def fingerprint(self) -> str:
        """Hashes weights, arithmetic, versions and the device: equal fingerprints mean equal answers, if answers are
        exact."""
        config = self.config
        parts = [weights_fingerprint(self.path), str(self.dtype), str(config.page_size), __version__, torch.__version__]
        parts += [triton.__version__, self.quantization]
        if self.scales[0] is not None:  # the draft's scales do not change answers
            parts += ["fp8 KV cache", *(repr(scale.tolist()) for scale in self.scales[0])]
        if self.device.type == "cuda":
            parts.append(torch.cuda.get_device_name(self.device))
        if self.inexact:
            parts += [self.inexact, repr(config)]
        return "fp_" + text_hash(" ".join(parts))[:12]

    def draft_fingerprint(self) -> str:
        draft = self.config.draft
        return checkpoint_fingerprint(resolve(draft)) if is_checkpoint(draft) else draft

    def find_scales(self) -> list[list[Tensor] | None]:
        """Returns the scales of networks whose KV is in FP8, by layer: from the target's files, or by calibration."""
        target_scales = self.target.cache_scales or (None,) * self.model.num_layers
        stored: list[Sequence[Tensor | None]] = [
            [None if scale is None else scale.to(self.device) for scale in target_scales],
            [None] * len(self.drafter.kv),
        ]
        is_incomplete = any(
            coded and any(scale is None for scale in layers) for coded, layers in zip(self.coded, stored, strict=False)
        )
        calibrated: Sequence[Sequence[Tensor | None]]
        calibrated, source = self.calibrate() if is_incomplete else (stored, "")
        networks = zip(("target", "draft"), self.coded, stored, calibrated, strict=False)
        return [
            fill_scales(role, file_scales, new_scales, source) if coded else None
            for role, coded, file_scales, new_scales in networks
        ]

    def calibrate(self) -> tuple[Sequence[Sequence[Tensor | None]], str]:
        """Returns the scales of all layers by network, and the name of the text that calibrated them."""
        config = self.config
        text = self.calibration_text or read_text(None)
        tokens = tokens_of(text, self.path, self.longest, config.trust_remote_code)
        num_pages = -(-(len(tokens) + self.reserve) // config.page_size)
        passes = self.build_passes([1 + num_pages] * len(self.windows), num_pages)
        prefill(ModelRunner(passes), tokens, max(self.widths))
        source = f"{len(tokens)} tokens of {config.calibration_file or 'bundled text'}"
        return [scales_of(kv) for kv in passes.kv], source

    def size(self) -> tuple[Space, int]:
        """Returns the size of the KV cache, and the pages of a request's table."""
        config = self.config
        max_reserve = self.reserve * (MAX_STEPS_IN_FLIGHT if self.overlap else 1)
        dtypes = [E4M3 if coded else self.dtype for coded in self.coded]
        self.page_bytes = page_bytes(zip(self.networks, dtypes, strict=True), self.windows, config.page_size)
        sizing = Sizing(config, self.windows, self.page_bytes, self.device, max_reserve)
        longest = self.longest
        workspace = 0
        if self.device.type == "cuda":  # measured by running the largest passes over a cache of one dump page
            passes = self.build_passes([1] * len(self.windows), sizing.pages_for(longest))
            widths = self.widths if self.captures else ()
            workspace = passes.state.nbytes + measure_workspace(passes, config, widths, self.node_rows)
        num_pages = sizing.num_pages(longest, workspace)
        max_model_len = sizing.fit_to_cache(longest, num_pages[0])
        return Space(num_pages, max_model_len, max_reserve), sizing.pages_for(max_model_len)

    def make_cache(self, space: Space) -> PageCache:
        size = self.config.page_size
        log_kv_cache(self.windows, space.num_pages, self.page_bytes, size)
        pairs = list(zip(self.windows, space.num_pages, strict=True))
        groups = [WindowPages(pages, size, window, space.max_reserve) for window, pages in pairs if window is not None]
        return PageCache(space.num_pages[0], size, groups)

    def build_passes(self, num_pages: list[int], pages_per_slot: int) -> Runner:
        config = self.config
        device = self.device
        size = self.config.page_size
        vocab_size = self.model.vocab_size
        num_groups = len(self.windows)
        state = RequestState(config.max_running, pages_per_slot, size, self.most_nodes, device, vocab_size, num_groups)
        kv = [
            NetworkKV.allocate(layers, self.windows, num_pages, size, self.dtype, device, scales)
            for layers, scales in zip(self.networks, self.scales, strict=True)
        ]
        kinds = {(spec.rope, spec.head_dim) for spec in chain(*self.networks)}  # few: a draft mostly has its target's
        ropes = {
            (rope, head_dim): RotaryEmbedding(rope, head_dim, pages_per_slot * size, self.longest).to(device)
            for rope, head_dim in kinds
        }
        pairs = [
            (network_kv, [ropes[spec.rope, spec.head_dim] for spec in layers])
            for network_kv, layers in zip(kv, self.networks, strict=True)
        ]
        attention = {phase: self.backends[phase](*pairs[0]) for phase in ("prefill", "verify")}
        draft_attention = self.backends["draft"](*pairs[1]) if self.drafter.kv else None
        self.drafter.attach(self.target, state, draft_attention)
        return Runner(
            self.target,
            attention,
            self.drafter,
            state,
            tuple(kv),
            self.usual_nodes,
            self.branches,
            self.order,
            config.simulate_accept_length,
            logprobs_of_samples=config.logprobs_mode == "processed",
        )

    def capture(self, passes: Runner) -> tuple[StepGraphs, DraftGraphs | None]:
        return capture_all(passes, self.config, self.widths, self.node_rows)

    def find_costs(self, steps: StepGraphs | None, drafts: DraftGraphs | None) -> Costs:
        """Returns the costs of steps: of captured passes as timed now, or at an earlier start with the same key."""
        config = self.config
        if steps is None:
            rows = max(config.prompt_tokens, config.max_running * self.most_nodes)
            return FittedCosts(rows + config.max_running)
        all_tables = self.find_tables(steps, drafts)
        tables = all_tables.without_slow()
        steps.drop(all_tables.target["plain"].keys() - tables.target["plain"].keys())
        return StepCosts(tables)

    def find_tables(self, steps: StepGraphs, drafts: DraftGraphs | None) -> CostTables:
        key = self.cost_key()
        saved = cost_files.load(key)
        if saved is not None:
            try:
                tables = CostTables.from_json(saved)
                tables.check_sizes(steps.timed_sizes, drafts.timed_sizes if drafts is not None else [])
                return tables
            except ValueError as error:
                logger.warning("step times are measured again: %s", error)
        tables = CostTables(steps.time_all(), drafts.time_all() if drafts is not None else {"plain": {}, "all": {}})
        cost_files.save(key, tables.to_json())
        return tables

    def cost_key(self) -> CostKey:
        config = self.config
        draft = self.config.draft
        config_file = resolve(draft) / "config.json" if is_checkpoint(draft) else None
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
            gpu=torch.cuda.get_device_name(self.device),
            torch=torch.__version__,
            triton=triton.__version__,
            slipstream=__version__,
            model=text_hash((find_target(config)[1] / "config.json").read_text()),
            draft=draft if config_file is None else text_hash(config_file.read_text()),
            options={
                "dtype": str(self.dtype),
                "exact": self.order is not None,
                "quantization": self.quantization,
                "kv_cache_dtype": "fp8" if config.has_fp8_cache else "auto",
                **{name: getattr(config, name) for name in names},
            },
        )

    def make_planner(self, scheduler: Scheduler, costs: Costs) -> Planner:
        config = self.config
        policy = BudgetPolicy(
            costs,
            self.widths,
            most_nodes=self.most_nodes,
            node_rows=self.node_rows if self.captures else None,
            fixed=config.width,
            itl_ms=config.itl_ms,
            max_chunk_ms=config.max_chunk_ms,
        )
        prompts = config.captured_tokens if self.captures and config.captured_tokens else config.prompt_tokens
        limits = Limits(self.most_nodes, self.of_network, self.reserve, prompts, self.enough_prompt_tokens)
        host_drafts = self.forced_nodes > 1 or any(max(stage.widths) > 1 for stage in self.stages)
        return Planner(
            scheduler,
            policy,
            limits,
            drafter_name(config.draft),
            host_drafts=host_drafts,
            fixed_tokens=self.drafter.fixed_tokens,
        )


def build_engine(config: EngineConfig) -> Engine:
    """Builds an engine. Raises ValueError for options that do not fit one another, the target or the machine."""
    return Builder(config).build()


def check_fp8_cache(layers: Sequence[AttentionSpec], device: torch.device) -> None:
    """Raises ValueError where an FP8 KV cache was not tried with such layers, or the GPU has no FP8."""
    faults = [name for name, has_it in FEATURES.items() if any(map(has_it, layers))]
    if faults:
        raise ValueError(
            f"kv_cache_dtype is 'fp8', which was not tried with {' and '.join(faults)}; leave it out for this model"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype is 'fp8', which {torch.cuda.get_device_name(device)} does not compute (compute capability "
            "8.9 and later do); leave it out"
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


def pick_dtype(name: str, path: Path, device: torch.device) -> torch.dtype:
    if name == "auto" and device.type == "cpu":
        return torch.float32
    if name == "auto":
        config = read_json(path / "config.json")
        name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return getattr(torch, name)
