"""`serve --dry-run`: estimates the memory and start-up time of a server from config files; loads no weights. Counts the
layers of a target as quantised where the checkpoint's config lists them; the server goes by the files' tensors.

Bytes of weights, of KV and of request state are counted. Memory of passes and graphs is estimated, since the engine
measures it when it starts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from slipstream.kernels.kv.fp8 import E4M3
from slipstream.models.drafts.base import Choices, DraftConfig, check_unquantized, quantized_draft
from slipstream.models.drafts.speculators_layout import from_speculators
from slipstream.models.files.checkpoint import read_draft_tensors, read_json, resolve
from slipstream.models.files.names import is_checkpoint
from slipstream.models.targets.config import AttentionSpec, TargetSpec
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.sizes import target_size, weight_bytes
from slipstream.serve.drafters.registry import drafter_name, find_drafter
from slipstream.serve.engine.build import (
    FORCED_NODES,
    FORCED_ROWS,
    check_fp8_cache,
    pick_dtype,
    pick_max_model_len,
    pick_prompt_tokens,
)
from slipstream.serve.engine.calibration import read_user_text
from slipstream.serve.engine.kv_windows import pages_of_window
from slipstream.serve.engine.memory import GRAPH_BYTES
from slipstream.serve.options import ServeConfig, find_target
from slipstream.serve.runner.cuda_graphs import buckets, draft_sizes, head_sizes, most_node_rows, prompt_sizes
from slipstream.serve.runner.kv import Windows, find_windows, page_bytes
from slipstream.serve.runner.request_state import RequestState

GPUS = {"24 GB": 24, "32 GB": 32, "48 GB": 48, "80 GB": 80, "96 GB": 96, "141 GB": 141, "180 GB": 180}
USUAL_NODES = 8  # nodes that a draft proposes, where its options do not say
LOGITS_BYTES = 8  # per row with logits and token: logits and sampling's copy of them
# Seconds of a start on a server, with kernels compiled by an earlier one (docs/log/2026-11-23.md, "Start-up").
START_S = 5.0
CAPTURE_S = 0.03
COMPILE_S = 12.0
DISK_GBS = (1, 6)  # GB/s at which weights are read: from a disk, from the page cache


@dataclass(frozen=True, slots=True)
class Network:
    """A target or a draft."""

    name: str
    kind: str
    layers: tuple[AttentionSpec, ...]
    weights: int  # bytes
    dtype: torch.dtype
    kv_dtype: torch.dtype
    format: str | None = None  # format of quantised weights
    read: int = 0  # bytes that are read to make them
    dequantized: int = 0  # bytes of the largest 4-bit layer in 16 bits


class DryRun:
    """Raises ValueError, as the server would, for options that do not fit one another or the target."""

    def __init__(self, config: ServeConfig) -> None:
        read_user_text(config)
        name, path = find_target(config, weights=False)
        self.model = load_config(path, config.trust_remote_code)
        self.config = config = replace(config, prefill_budget=pick_prompt_tokens(config, self.model, config.device))
        dtype = pick_dtype(config.dtype, path, torch.device("cpu" if config.device == "cpu" else "cuda"))
        layers = tuple(layer.attention for layer in self.model.layers)
        if config.has_fp8_cache:
            check_fp8_cache(layers, torch.device("cpu"))
        kv_dtype = cache_dtype(config.has_fp8_cache, dtype)
        self.networks = [read_target(name, path, self.model, dtype, kv_dtype, config.quantization)]
        if is_checkpoint(config.draft):
            kv_dtype = cache_dtype(config.drafter.get("kv_cache_dtype") == "fp8", dtype)
            choices = Choices.of(SimpleNamespace(**config.drafter))
            window = config.drafter.get("window")
            self.networks.append(read_draft(config.draft, self.model, dtype, kv_dtype, choices, window))
        self.longest = pick_max_model_len(config.max_model_len, self.model)
        self.windows = find_windows(chain(*(network.layers for network in self.networks)), self.longest)
        self.most_nodes = FORCED_NODES if config.grammar_drafts else USUAL_NODES
        self.most_nodes = max(self.most_nodes, config.width or 1) if len(self.networks) > 1 else self.most_nodes

    @property
    def weights(self) -> int:
        return sum(network.weights for network in self.networks)

    def kv_bytes(self) -> list[int]:
        """Returns bytes of KV per token, by group of layers."""
        return page_bytes([(network.layers, network.kv_dtype) for network in self.networks], self.windows, 1)

    def state_bytes(self) -> int:
        """Returns bytes of request slots: page tables, sampling, penalties, masks."""
        config = self.config
        size = self.config.page_size
        pages = -(-(self.longest + 2 * self.most_nodes) // size)
        state = RequestState(
            num_slots=config.max_running,
            num_pages=pages,
            page_size=size,
            width=self.most_nodes,
            device=torch.device("cpu"),
            vocab_size=self.model.vocab_size,
            num_groups=len(self.windows),
        )
        return state.nbytes

    def num_graphs(self) -> int:
        config = self.config
        if not config.cuda_graph:
            return 0
        nodes = buckets(self._node_rows())
        prompts = prompt_sizes(config.captured_tokens + config.max_running) if config.captured_tokens else []
        heads = sum(len(head_sizes(rows, self._node_rows() + config.max_running)) for rows in prompts)
        drafts = 3 * len(draft_sizes(config.max_running)) if len(self.networks) > 1 else 0
        return 3 * (len(nodes) + heads) + 2 * drafts  # a pass that may be masked is two

    def pass_bytes(self) -> int:
        """Returns bytes of the largest pass's activations and logits, of a 4-bit layer that it dequantises, and of
        graphs."""
        config = self.config
        model = self.model
        item = self.networks[0].dtype.itemsize
        rows = max(config.prompt_tokens, config.captured_tokens + config.max_running, self._node_rows())
        widest = max(wide_activations(spec) for spec in model.layers)
        activations = rows * (8 * model.hidden_size + widest) * item
        logits = min(rows, self._node_rows() + config.max_running) * model.vocab_size * LOGITS_BYTES
        return activations + self.networks[0].dequantized + 2 * logits + GRAPH_BYTES * self.num_graphs()

    def cache_tokens(self, total: float) -> int:
        """Returns tokens that fit the KV cache on a GPU of `total` bytes; negative if even the rest does not fit."""
        config = self.config
        sizes = self.kv_bytes()
        free = config.mem_fraction * total - self.weights - self.state_bytes() - self.pass_bytes()
        for window, size in zip(self.windows[1:], sizes[1:], strict=True):
            assert window is not None
            pages = config.max_running * pages_of_window(window, 2 * self.most_nodes, config.page_size)
            free -= min(pages * config.page_size * size, max(free, 0) / 2)
        return int(free // max(sizes[0], 1))

    def start_seconds(self) -> tuple[float, float]:
        """Returns the seconds of a later start with weights in the page cache, and of the first one from a disk."""
        slow, fast = (sum(network.read for network in self.networks) / 1e9 / speed for speed in DISK_GBS)
        rest = START_S + CAPTURE_S * self.num_graphs()
        return rest + fast, rest + slow + COMPILE_S

    def _node_rows(self) -> int:
        config = self.config
        usual = (config.width or USUAL_NODES) if len(self.networks) > 1 else 1
        beside = min(config.max_running * (FORCED_NODES - 1), FORCED_ROWS) if config.grammar_drafts else 0
        return max(most_node_rows(config.max_running, usual), config.max_running + beside)


def wide_activations(spec: Any) -> int:
    """Returns how many numbers a row has in a layer's widest products."""
    attention = spec.attention
    heads = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    return heads + 3 * int(spec.mlp.intermediate_size)


def read_target(
    name: str, path: Path, spec: TargetSpec, dtype: torch.dtype, kv_dtype: torch.dtype, quantization: str | None
) -> Network:
    """Reads sizes of the target. `quantization`: the format into which the server would quantise the weights."""
    size = target_size(path, spec, dtype, quantization)
    layers = tuple(layer.attention for layer in spec.layers)
    format = None if size.quantization is None else size.quantization.name
    return Network(
        name, spec.architecture, layers, size.resident, dtype, kv_dtype, format, size.read, size.widest_dequantized
    )


def cache_dtype(is_fp8: bool, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of KV of a network that computes in `dtype`."""
    return E4M3 if is_fp8 else dtype


def read_draft(
    draft: str, target: TargetSpec, dtype: torch.dtype, kv_dtype: torch.dtype, choices: Choices, window: int | None
) -> Network:
    path = resolve(draft, weights=False)
    stored = read_json(path / "config.json")
    if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model.bin")):
        check_unquantized(read_draft_tensors(path), path)
    elif stored.get("quantization_config"):  # a draft on the hub, whose weights are not fetched
        raise quantized_draft(path, "its config.json has quantization_config")
    values: Mapping[str, Any] = from_speculators(stored)
    network: Any = getattr(find_drafter(draft), "Network", None)
    values = network.Config.settle(values, target, choices, None)
    config: DraftConfig = network.Config.from_json(values, target, None)
    with torch.device("meta"):
        module = network(config)
    if window is not None:
        module.limit_window(window)
    layers = module.attention_specs
    weights = weight_bytes(module, dtype)
    return Network(draft, drafter_name(draft), layers, weights, dtype, kv_dtype, read=weights)


def report(config: ServeConfig) -> str:
    """Returns the lines to print."""
    run = DryRun(config)
    return "\n".join([*_networks(run), *_kv(run.windows, run.kv_bytes()), "", *_gpus(run), "", *_start(run)])


def _networks(run: DryRun) -> Iterator[str]:
    for role, network in zip(("target", "draft"), run.networks, strict=False):
        kind = str(network.dtype).removeprefix("torch.")
        kind += ", KV in FP8" if network.kv_dtype != network.dtype else ""
        layers = "1 layer" if len(network.layers) == 1 else f"{len(network.layers)} layers"
        kind = kind if network.format is None else f"{network.format}, {kind}"
        yield f"{role}: {network.name} ({network.kind}, {layers}, {kind}), weights {gigabytes(network.weights)}"
    if len(run.networks) == 1:
        yield f"draft: {run.config.draft}"
    slots = run.config.max_running
    yield f"{slots} request slots: {gigabytes(run.state_bytes())} for page tables, sampling, penalties and masks"
    size = run.networks[0].dequantized
    share = f", {gigabytes(size)} of it for a 4-bit layer in 16 bits, for many rows" if size else ""
    yield f"passes and {run.num_graphs()} CUDA graphs: about {gigabytes(run.pass_bytes())}{share}"


def _kv(windows: Windows, sizes: Sequence[int]) -> Iterator[str]:
    for window, size in zip(windows, sizes, strict=True):
        if size:
            layers = "of layers that see all tokens" if window is None else f"of layers that see the last {window}"
            yield f"KV cache, {layers}: {size:,} bytes a token"


def _gpus(run: DryRun) -> Iterator[str]:
    fraction = run.config.mem_fraction
    longest = run.longest
    yield f"With {fraction:.0%} of a GPU's memory (--mem-fraction) the KV cache holds about:"
    sizes = {f"a GPU of {name}": 1e9 * size for name, size in GPUS.items()}
    if torch.cuda.is_available():
        sizes["this GPU"] = float(torch.cuda.mem_get_info()[1])
    for name, size in sizes.items():
        tokens = run.cache_tokens(size)
        if tokens < run.config.page_size:
            yield f"  {name}: does not fit"
            continue
        context = min(tokens, longest)
        full = min(tokens // context, run.config.max_running)
        requests = "1 request" if full == 1 else f"{full} requests at once"
        yield f"  {name}: {tokens:,} tokens: {requests} of {context:,}"


def _start(run: DryRun) -> Iterator[str]:
    later, first = run.start_seconds()
    yield (
        f"Start-up: about {later:.0f} s with weights in the page cache and kernels compiled; the first time, from a "
        f"disk at {DISK_GBS[0]} GB/s, about {first:.0f} s"
    )


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
