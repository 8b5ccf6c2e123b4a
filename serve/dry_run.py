"""`serve --dry-run`: estimates the memory and start-up time of a server from config files; loads no weights. Counts the
layers of a target as quantised where the checkpoint's config lists them; the server goes by the files' tensors.

Bytes of weights, of KV and of request state are counted. Memory of passes and graphs is estimated, since the engine
measures it when it starts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.models.layers.quantized import quantize_by_config
from slipstream.models.targets.config import LayerSpec, RecurrentSpec
from slipstream.models.targets.decoder import Target
from slipstream.models.targets.sizes import target_size, weight_bytes
from slipstream.serve.drafters.options import options_for
from slipstream.serve.drafters.registry import build_options, find_drafter
from slipstream.serve.engine.build import make_state
from slipstream.serve.engine.engine_plan import DeviceFacts, EnginePlan, read_plan
from slipstream.serve.engine.memory import fitting_pools, graph_bytes
from slipstream.serve.options import ServeConfig, find_target

GPUS = {"24 GB": 24, "32 GB": 32, "48 GB": 48, "80 GB": 80, "96 GB": 96, "141 GB": 141, "180 GB": 180}
LOGITS_BYTES = 8  # per row with logits and token: logits and sampling's copy of them
# Seconds of a start on a server, with kernels compiled by an earlier one (docs/log/2026-11-23.md, "Start-up"; of a
# graph docs/log/2026-11-30.md).
START_S = 5.0
CAPTURE_S = 0.015
COMPILE_S = 12.0
DISK_GBS = (1, 6)  # GB/s at which weights are read: from a disk, from the page cache


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a target or a draft."""

    name: str
    kind: str
    size: int  # bytes
    read: int  # bytes that are read to make them
    format: str | None = None  # format of quantised weights
    dequantized: int = 0  # bytes of the largest 4-bit layer in 16 bits


class DryRun:
    """Raises ValueError, as the server would, for options that do not fit one another or the target."""

    def __init__(self, config: ServeConfig) -> None:
        name, _ = find_target(config, weights=False)
        self.plan = read_plan(config, facts_of(config.device), weights=False)
        self.networks = [target_weights(name, self.plan), *draft_weights(self.plan)]

    @property
    def weights(self) -> int:
        return sum(network.size for network in self.networks)

    def state_bytes(self) -> int:
        """Returns bytes of request slots: page tables, sampling, penalties, masks."""
        plan = self.plan
        state = make_state(plan, plan.pages_for(plan.max_model_len), torch.device("cpu"))
        return state.nbytes + plan.record_bytes

    def pass_bytes(self) -> int:
        """Returns bytes of the largest pass's activations and logits, of a 4-bit layer that it dequantises, and of
        graphs."""
        plan = self.plan
        config = plan.config
        rows = max(config.prompt_tokens, config.captured_tokens + config.max_running, plan.node_rows)
        widest = max(wide_activations(spec) for spec in plan.part.layers)
        activations = rows * (8 * plan.spec.hidden_size + widest) * plan.dtype.itemsize
        logits = min(rows, plan.node_rows + config.max_running) * plan.spec.vocab_size * LOGITS_BYTES
        return activations + self.networks[0].dequantized + 2 * logits + graph_bytes(plan)

    def cache_tokens(self, total: float) -> int:
        """Returns tokens that fit the KV cache on a GPU of `total` bytes; negative if even the rest does not fit."""
        config = self.plan.config
        free = int(config.mem_fraction * total - self.weights - self.state_bytes() - self.pass_bytes())
        most_pages = free // max(self.plan.page_bytes[0], 1)
        return fitting_pools(self.plan, free, most_pages)[0] * config.page_size if free >= 0 else -1

    def start_seconds(self) -> tuple[float, float]:
        """Returns the seconds of a later start with weights in the page cache, and of the first one from a disk, from
        which each rank reads its part of the target."""
        size = sum(network.read for network in self.networks) / 1e9
        of_others = (self.plan.config.tp - 1) * self.networks[0].read / 1e9
        slow, fast = DISK_GBS
        start = START_S + CAPTURE_S * self.plan.graphs.num_graphs
        return start + size / fast, start + (size + of_others) / slow + COMPILE_S


def facts_of(device: str) -> DeviceFacts:
    """Returns the facts of the device that a server would have: a GPU of another machine, if this one has none."""
    if device == "cpu":
        return DeviceFacts.of(torch.device("cpu"))
    return DeviceFacts.of(torch.device("cuda")) if torch.cuda.is_available() else DeviceFacts("cuda", is_present=False)


def wide_activations(spec: LayerSpec) -> int:
    """Returns how many numbers a row has in a layer's widest products."""
    attention = spec.mixer
    mlp = 3 * int(spec.mlp.intermediate_size)
    if isinstance(attention, RecurrentSpec):
        return 4 * sum(math.prod(shape) for shape in attention.record_shapes.values()) + mlp
    queries = 2 if attention.gate is None else 4  # with the gate, and what it multiplies
    heads = (queries * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    return heads + mlp


def target_weights(name: str, plan: EnginePlan) -> Weights:
    size = target_size(plan.path, plan.part, plan.dtype, plan.config.quantization)
    format = None if size.quantization is None else size.quantization.name
    return Weights(name, plan.spec.architecture, size.resident, size.read, format, size.widest_dequantized)


def draft_weights(plan: EnginePlan) -> Iterator[Weights]:
    """Yields those of the draft network, if there is one."""
    source = plan.draft.source
    if plan.draft.network is not None:
        with torch.device("meta"):
            network: Any = find_drafter(source)
            module = network.Network(plan.draft.network)
            quantize_by_config(module, source.quantization(plan.spec, plan.config.quantization))
            target = Target(plan.spec)
        size = weight_bytes(module, plan.dtype)
        target.path = plan.path
        target.trust_remote_code = plan.config.trust_remote_code
        network.of(module, build_options(options_for(source), plan.config.drafter), target)  # refuses what does not fit
        yield Weights(source.name, plan.draft.name, size, size)


def report(config: ServeConfig) -> str:
    """Returns the lines to print."""
    run = DryRun(config)
    return "\n".join([*_networks(run), *_kv(run.plan), "", *_gpus(run), "", *_start(run)])


def _networks(run: DryRun) -> Iterator[str]:
    plan = run.plan
    for role, network, kv in zip(("target", "draft"), run.networks, plan.networks, strict=False):
        count = len(plan.spec.layers) if role == "target" else len(kv.layers)
        kind = str(plan.dtype).removeprefix("torch.")
        kind += ", KV in FP8" if kv.has_codes else ""
        layers = "1 layer" if count == 1 else f"{count} layers"
        kind = kind if network.format is None else f"{network.format}, {kind}"
        yield f"{role}: {network.name} ({network.kind}, {layers}, {kind}), weights {gigabytes(network.size)}"
    if len(run.networks) == 1:
        yield f"draft: {plan.config.draft}"
    if plan.config.tp > 1:
        yield _ranks(run)
    slots = plan.config.max_running
    yield f"{slots} request slots: {gigabytes(run.state_bytes())} for page tables, sampling, penalties and masks"
    size = run.networks[0].dequantized
    share = f", {gigabytes(size)} of it for a 4-bit layer in 16 bits, for many rows" if size else ""
    yield f"passes and {plan.graphs.num_graphs} CUDA graphs: about {gigabytes(run.pass_bytes())}{share}"


def _ranks(run: DryRun) -> str:
    """The parts of ranks, of which the sizes above and below are those of one."""
    plan = run.plan
    count = plan.config.tp
    total = target_size(plan.path, plan.spec, plan.dtype, plan.config.quantization).resident
    repeated = (count * run.networks[0].size - total) // (count - 1)
    pairs = zip(plan.spec.attention, plan.part.attention, strict=True)
    copies = max((count * part.num_kv_heads // spec.num_kv_heads for spec, part in pairs), default=1)
    heads = f"; {copies} ranks have the same KV heads" if copies > 1 else ""
    draft = " and the draft" if len(run.networks) > 1 else ""
    return f"on each of {count} ranks; all have {gigabytes(repeated)} of the target's {gigabytes(total)}{draft}{heads}"


def _kv(plan: EnginePlan) -> Iterator[str]:
    for retention, size in zip(plan.groups, plan.page_bytes, strict=True):
        if retention == "state":
            yield f"states of recurrent layers: {size:,} bytes a request, and as much for each cached one"
        elif size:
            layers = "of layers that see " + ("all tokens" if retention == "all" else f"the last {retention}")
            yield f"KV cache, {layers}: {size // plan.config.page_size:,} bytes a token"


def _gpus(run: DryRun) -> Iterator[str]:
    config = run.plan.config
    gpu = "each GPU" if config.tp > 1 else "a GPU"
    yield f"With {config.mem_fraction:.0%} of {gpu}'s memory (--mem-fraction) the KV cache holds about:"
    sizes = {f"a GPU of {name}": 1e9 * size for name, size in GPUS.items()}
    if torch.cuda.is_available():
        sizes["this GPU"] = float(torch.cuda.mem_get_info()[1])
    for name, size in sizes.items():
        tokens = run.cache_tokens(size)
        if tokens < config.page_size:
            yield f"  {name}: does not fit"
            continue
        context = min(tokens, run.plan.max_model_len)
        full = min(tokens // context, config.max_running)
        requests = "1 request" if full == 1 else f"{full} requests at once"
        yield f"  {name}: {tokens:,} tokens: {requests} of {context:,}"


def _start(run: DryRun) -> Iterator[str]:
    later, first = run.start_seconds()
    yield (
        f"Start-up: about {later:.0f} s with weights in the page cache and kernels compiled; the first time, from a "
        f"disk at {DISK_GBS[0]} GB/s, about {first:.0f} s"
    )


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
