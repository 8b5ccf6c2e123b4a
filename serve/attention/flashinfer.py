"""Attention with FlashInfer's paged kernels (https://flashinfer.ai, written for 0.6.18).

A pass is planned on the host from exact lengths when its first layer asks, and run in every layer. Prompts take the
kernels that FlashInfer chooses (on Hopper FA3), nodes FA2, which splits long contexts; `flashinfer:fa2` and
`flashinfer:fa3` take one of them for both. A tree is a pass over the committed tokens, our kernel over the new nodes,
and a merge of the two: no mask of the context's size is built.
"""

import logging
import math
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

try:
    import flashinfer
    from flashinfer.jit.cpp_ext import get_cuda_path
    from flashinfer.prefill import get_batch_prefill_module
    from flashinfer.utils import determine_attention_backend
except ImportError as error:
    raise ValueError(
        f"attention backend 'flashinfer' cannot be loaded ({error}); "
        "pip install flashinfer-python, or choose another with attention"
    ) from error

from slipstream import runtime
from slipstream.kernels.attention.dense import add_sinks
from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import AttentionSpec
from slipstream.serve.attention import base
from slipstream.serve.attention.base import PHASES, KVFormat
from slipstream.serve.runner.batch import AttentionMetadata
from slipstream.serve.runner.kv import NetworkKV

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
# Partial results of split contexts: 2 programs per multiprocessor, each Q / G heads x 128 rows x D fp32. Enough for 148
# multiprocessors, D = 128 and 16 query heads per KV head.
WORKSPACE_BYTES = 384 * 2**20
TENSOR_CORE_GROUP = 4  # query heads per KV head from which decoding gains by tensor cores


class Variant(NamedTuple):
    """A variant of attention for which FlashInfer compiles separate kernels."""

    head_dim: int
    has_window: bool
    has_softcap: bool


class Build(threading.Thread):
    """Compiles the kernels for prompts, which takes about a minute unless FlashInfer's cache has them."""

    def __init__(self, dtype: torch.dtype, variant: Variant, kernels: str) -> None:
        super().__init__(daemon=True)
        self.dtype = dtype
        self.variant = variant
        self.kernels = kernels
        self.is_done = False

    def run(self) -> None:
        dtype = self.dtype
        D = self.variant.head_dim
        kernels = self.kernels
        has_window = self.variant.has_window
        has_softcap = self.variant.has_softcap
        runtime.lower_priority()  # the compilers take all cores, and the engine starts meanwhile
        try:
            with runtime.stage("FlashInfer's kernels for prompts, in the background"):
                if kernels == "auto":
                    shape = {"head_dim_qk": D, "head_dim_vo": D}
                    kernels = determine_attention_backend(torch.device("cuda"), 0, False, False, dtype, dtype, **shape)
                # 0: rotates nothing
                get_batch_prefill_module(
                    kernels, dtype, dtype, dtype, torch.int32, D, D, 0, has_window, has_softcap, False
                )
            self.is_done = True
        except Exception as error:
            remedy = "long prompts take the captured passes' kernels; mend nvcc or install flashinfer-jit-cache"
            logger.error("FlashInfer cannot compile its kernels (%s): %s", error, remedy)


class Planner:
    """One of FlashInfer's wrappers, planned anew for every pass."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.copied = torch.cuda.Event()

    def plan(self, *args: Any, **options: Any) -> None:
        self.copied.synchronize()  # sync: the pinned buffer that a plan is copied from must not change before it was
        self.wrapper.plan(*args, **options)
        self.copied.record()


class Backend(base.Backend):
    needs_host_lengths = True
    phases = frozenset(PHASES)
    features = frozenset(base.FEATURES)
    gpu_features = frozenset({"soft caps of scores"})
    prompt_kernels: ClassVar[str] = "auto"
    node_kernels: ClassVar[str] = "fa2"  # FA3 reads a context in one program per query head

    def __init__(self, kv: NetworkKV, ropes: Sequence[RotaryEmbedding]) -> None:
        super().__init__(kv, ropes)
        self.workspace = _workspace(self.layers[0].device)
        self.planners: dict[tuple[str, Mask, AttentionSpec], Planner] = {}  # by kind of pass
        self.planned: dict[tuple[Mask, AttentionSpec], Any] = {}  # the wrappers planned for this pass

    @classmethod
    def fault(cls, kv: KVFormat) -> str:
        if kv.device.type != "cuda":
            return "it needs a GPU"
        if kv.dtype not in DTYPES:
            return f"it has no kernels for {kv.dtype}, only for bfloat16 and float16"
        if set(kv.head_dims) - {*HEAD_DIMS}:
            dims = ", ".join(map(str, kv.head_dims))
            return f"it has no kernels for head dim {dims}, only for {', '.join(map(str, HEAD_DIMS))}"
        if not _can_compile():
            return (
                "it compiles kernels at first use and finds no nvcc: install the CUDA toolkit or flashinfer-jit-cache"
            )
        return super().fault(kv)

    @classmethod
    def prepare(cls, kv: KVFormat) -> None:
        for variant in _variants(kv.layers):
            _build(kv.dtype, variant, cls.prompt_kernels)

    @property
    def is_ready(self) -> bool:
        dtype = self.layers[0].dtype
        variants = _variants(self.kv.specs)
        return all(_build(dtype, variant, self.prompt_kernels).is_done for variant in variants)

    def plan_reads(self, metadata: AttentionMetadata) -> None:
        super().plan_reads(metadata)
        self.planned = {}

    def attend_stored(self, q: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        metadata = self.metadata
        if max(metadata.query_lens) == 1 and not metadata.first_node:
            mask = "causal"  # a node without others sees the same keys under every mask
        keys, values = self.layers[layer.id]  # (num_pages, page_size, G, D)
        if mask == "tree" and layer.spec.window is not None:  # windows count depth, theirs order
            return self.attend_nodes(q, layer, mask, sinks=layer.sinks).flatten(0, 1)
        if (mask, layer.spec) not in self.planned:
            self.planned[mask, layer.spec] = self._plan_pass(mask, layer)
        wrapper = self.planned[mask, layer.spec]
        if mask != "tree" and layer.sinks is None:
            return wrapper.run(q, (keys, values), out=torch.empty_like(q))
        out, lse = wrapper.run(q, (keys, values), out=torch.empty_like(q), return_lse=True)
        if mask == "tree":
            out, lse = self._add_tree((out, lse), q, layer)
        return out if layer.sinks is None else add_sinks(out, lse * math.log(2), layer.sinks)

    def _add_tree(self, committed: tuple[Tensor, Tensor], q: Tensor, layer: AttentionLayer) -> list[Tensor]:
        """Merges `committed`, attention (T, Q, D) over the committed tokens and its log2-sum-exp2 (T, Q), with that
        over the new nodes: the same two, over all."""
        T, Q, D = q.shape
        G = layer.spec.num_kv_heads
        out, lse = self.attend_nodes(q, layer, "tree", prefix=False, return_lse=True)
        rows = T * G  # a thread block merges one row: all Q heads would be too many threads
        merged = flashinfer.merge_state(
            committed[0].view(rows, Q // G, D),
            committed[1].view(rows, Q // G),
            out.view(rows, Q // G, D),
            lse.view(rows, Q // G) / math.log(2),
        )
        return [x.view(T, Q, *x.shape[2:]) for x in merged]

    def _plan_pass(self, mask: Mask, layer: AttentionLayer) -> Any:
        """The wrapper for this pass, mask and layer. With "tree" it will see the committed tokens only."""
        spec = layer.spec
        query_lens = torch.tensor(self.metadata.query_lens, dtype=torch.int32)
        lengths = self._committed_lengths()
        table = self._page_table(layer, lengths, lengths if mask == "tree" else lengths + query_lens)
        dtype = self.layers[layer.id].dtype
        options: dict[str, Any] = dict.fromkeys(("q_data_type", "kv_data_type"), dtype)
        # How many keys before its own a query sees; -1: all.
        options |= {"window_left": -1 if spec.window is None else spec.window - 1, "sm_scale": spec.score_scale}
        options |= {"logits_soft_cap": spec.softcap} if spec.softcap is not None else {}
        if max(self.metadata.query_lens) == 1:
            planner = self._planner("decode", "causal", spec)
            planner.plan(*table, spec.num_heads, spec.num_kv_heads, spec.head_dim, self.page_size, **options)
        else:
            kind = "prompt" if self.metadata.phase == "prefill" else "nodes"
            planner = self._planner(kind, mask, spec)
            planner.plan(
                _starts(query_lens),
                *table,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                self.page_size,
                causal=mask == "causal",
                **options,
            )
        return planner.wrapper

    def _committed_lengths(self) -> Tensor:
        """(B,) int32 on the host. In prefill its bounds are exact."""
        if self.metadata.phase != "prefill":
            return self.metadata.lengths.int().cpu()  # sync
        ends = self.metadata.kv_bounds
        counts = self.metadata.query_lens
        return torch.tensor(ends, dtype=torch.int32) - torch.tensor(counts, dtype=torch.int32)

    def _page_table(self, layer: AttentionLayer, committed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns, for lengths (B,) int32 on the host, the start of each request's pages (B + 1,) on the host, the
        pages, request after request, on the device, and the tokens in each last page (B,) on the host. All int32.

        Without pages that lie wholly before the window: they belong to others by now. Windows count from the end.
        """
        metadata = self.metadata
        page_size = self.page_size
        window = layer.spec.window
        ends = (lengths + page_size - 1) // page_size
        window_starts = committed + metadata.first_node + 1 - (window or 0)
        firsts = window_starts.clamp(min=0) // page_size if window is not None else torch.zeros_like(ends)
        if metadata.read_starts is not None:
            firsts = firsts.maximum(metadata.read_starts[metadata.requests].int().cpu() // page_size)  # sync
        starts = _starts(ends - firsts)
        upload = metadata.state.upload
        total = int(starts[-1])
        owners = torch.repeat_interleave(upload((ends - firsts).tolist()), output_size=total)
        numbers = torch.arange(total, device=owners.device) - upload((starts[:-1] - firsts).tolist())[owners]
        pages = metadata.state.pages[self.groups[layer.id], metadata.requests[owners], numbers].int()
        return starts, pages, lengths - (ends - 1).clamp(min=0) * page_size

    def _planner(self, kind: str, mask: Mask, spec: AttentionSpec) -> Planner:
        """The wrapper of "decode", or of "nodes" or a "prompt" with that mask; each has buffers of its own."""
        key = kind, mask, spec
        if key not in self.planners:
            with torch.inference_mode(False):  # a wrapper writes into its buffers in other modes, too
                self.planners[key] = Planner(self._make_wrapper(kind, spec))
        return self.planners[key]

    def _make_wrapper(self, kind: str, spec: AttentionSpec) -> Any:
        if kind == "decode":
            tensor_cores = spec.num_heads // spec.num_kv_heads >= TENSOR_CORE_GROUP
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=tensor_cores)
        kernels = self.prompt_kernels if kind == "prompt" else self.node_kernels
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend=kernels)


class FA2Backend(Backend):
    prompt_kernels = node_kernels = "fa2"


class FA3Backend(Backend):
    """FA3 wherever a request has more than one query."""

    prompt_kernels = node_kernels = "fa3"

    @classmethod
    def fault(cls, kv: KVFormat) -> str:
        fault = super().fault(kv)
        if not fault and torch.cuda.get_device_capability(kv.device)[0] != 9:
            return "FA3 kernels need a Hopper GPU (compute capability 9)"
        return fault


VARIANTS = {"fa2": FA2Backend, "fa3": FA3Backend}


def _starts(counts: Tensor) -> Tensor:
    """counts (B,) int32 -> (B + 1,) int32: 0 and the sums of the first 1, 2, ... counts."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))


def _variants(layers: Iterable[AttentionSpec]) -> set[Variant]:
    return {Variant(spec.head_dim, spec.window is not None, spec.softcap is not None) for spec in layers}


@cache
def _build(dtype: torch.dtype, variant: Variant, kernels: str) -> Build:
    build = Build(dtype, variant, kernels)
    build.start()
    return build


@cache
def _can_compile() -> bool:
    if find_spec("flashinfer_jit_cache"):
        return True
    try:
        return (Path(get_cuda_path()) / "bin/nvcc").exists()
    except RuntimeError:
        return False


@cache
def _workspace(device: torch.device) -> Tensor:
    """One for all wrappers of a device: it holds results between two kernels of one call, plans lie elsewhere."""
    with torch.inference_mode(False):
        return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
