"""Attention with FlashInfer's paged kernels (https://flashinfer.ai, written for 0.6.18).

A pass is planned on the host from exact lengths when its first layer asks, and run in every layer. Prompts take the
kernels that FlashInfer chooses (on Hopper FA3), rounds FA2, which splits long contexts; `flashinfer:fa2` and
`flashinfer:fa3` take one of them for both. A tree is a pass over the committed tokens, our kernel over the new nodes,
and a merge of the two: no mask of the context's size is built.
"""

import logging
import math
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

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
from slipstream.kernels.attention.tree import tree_attention
from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.serve.attention import base
from slipstream.serve.attention.base import PHASES, KVFormat
from slipstream.serve.runner.batch import AttentionMetadata

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
# Partial results of split contexts: 2 programs per multiprocessor, each Q / G heads x 128 rows x D fp32. Enough for 148
# multiprocessors, D = 128 and 16 query heads per KV head.
WORKSPACE_BYTES = 384 * 2**20
TENSOR_CORE_GROUP = 4  # query heads per KV head from which decoding gains by tensor cores


class Build(threading.Thread):
    """Compiles the kernels for prompts, which takes about a minute unless FlashInfer's cache has them."""

    def __init__(self, dtype: torch.dtype, head_dim: int, kernels: str) -> None:
        super().__init__(daemon=True)
        self.dtype, self.head_dim, self.kernels = dtype, head_dim, kernels
        self.is_done = False

    def run(self) -> None:
        dtype, D, kernels = self.dtype, self.head_dim, self.kernels
        options = (0, False, False)  # rotates nothing, no window, no soft cap
        try:
            with runtime.stage("FlashInfer's kernels for prompts, in the background"):
                if kernels == "auto":
                    shape = {"head_dim_qk": D, "head_dim_vo": D}
                    kernels = determine_attention_backend(torch.device("cuda"), 0, False, False, dtype, dtype, **shape)
                get_batch_prefill_module(kernels, dtype, dtype, dtype, torch.int32, D, D, *options, False)
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
    prompt_kernels: ClassVar[str] = "auto"
    round_kernels: ClassVar[str] = "fa2"  # FA3 reads a context in one program per query head

    def __init__(self, cache: Tensor, rope: RotaryEmbedding) -> None:
        super().__init__(cache, rope)
        self.workspace = _workspace(cache.device)
        self.planners: dict[str, Planner] = {}  # kind of pass -> its wrapper, made once
        self.planned: dict[tuple[Mask, int | None], Any] = {}  # by mask and window: the wrappers planned for this pass

    @classmethod
    def fault(cls, kv: KVFormat) -> str:
        if kv.device.type != "cuda":
            return "it needs a GPU"
        if kv.dtype not in DTYPES:
            return f"it has no kernels for {kv.dtype}, only for bfloat16 and float16"
        if kv.head_dim not in HEAD_DIMS:
            return f"it has no kernels for head dim {kv.head_dim}, only for {', '.join(map(str, HEAD_DIMS))}"
        if not _can_compile():
            return (
                "it compiles kernels at first use and finds no nvcc: install the CUDA toolkit or flashinfer-jit-cache"
            )
        return ""

    @classmethod
    def prepare(cls, kv: KVFormat) -> None:
        _build(kv.dtype, kv.head_dim, cls.prompt_kernels)

    @property
    def is_ready(self) -> bool:
        return _build(self.cache.dtype, self.cache.shape[-1], self.prompt_kernels).is_done

    def plan(self, metadata: AttentionMetadata) -> None:
        super().plan(metadata)
        self.planned = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        metadata, window, q = self.metadata, layer.spec.window, self.rotate_and_store(q, k, v, layer)
        if max(metadata.query_lens) == 1 and not metadata.first_node:
            mask = "causal"  # what a node without others sees does not depend on the mask
        assert window is None or mask == "causal", "a window is one of positions, and a tree's slots are none"
        if (mask, window) not in self.planned:
            self.planned[mask, window] = self._plan_pass(mask, window, q.shape[1])
        wrapper = self.planned[mask, window]
        keys, values = self.cache[layer.id]  # (num_pages, page_size, G, D)
        if mask != "tree":
            return wrapper.run(q, (keys, values), out=torch.empty_like(q))
        committed = wrapper.run(q, (keys, values), out=torch.empty_like(q), return_lse=True)
        return self._add_tree(committed, q, keys, values)

    def _add_tree(self, committed: tuple[Tensor, Tensor], q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Merges `committed`, attention (T, Q, D) over the committed tokens and its log2-sum-exp2 (T, Q), with that
        over the new nodes."""
        metadata, (T, Q, D), G = self.metadata, q.shape, keys.shape[2]
        nodes = q.view(len(metadata.query_lens), -1, Q, D)
        where = (metadata.state.pages, metadata.requests, metadata.lengths)
        out, lse = tree_attention(
            nodes, keys, values, *where, metadata.ancestors, "tree", D**-0.5,
            first_node=metadata.first_node, prefix=False, return_lse=True,
        )  # fmt: skip
        rows = (T * G, Q // G)  # a thread block merges one row: all Q heads would be too many threads
        parts = [committed[0].view(*rows, D), committed[1].view(rows), out.view(*rows, D), lse.view(rows) / math.log(2)]
        return flashinfer.merge_state(*parts)[0].view(T, Q, D)

    def _plan_pass(self, mask: Mask, window: int | None, num_heads: int) -> Any:
        """The wrapper for this pass, mask and window. With "tree" it will see the committed tokens only."""
        query_lens = torch.tensor(self.metadata.query_lens, dtype=torch.int32)
        lengths = self._committed_lengths()
        table = self._page_table(lengths if mask == "tree" else lengths + query_lens)
        page_size, G, D = self.cache.shape[3:]
        shape, dtypes = (num_heads, G, D, page_size), dict.fromkeys(("q_data_type", "kv_data_type"), self.cache.dtype)
        window_left = -1 if window is None else window - 1  # how many keys before its own a query sees; -1: all
        if max(self.metadata.query_lens) == 1:
            planner = self._planner("decode", num_heads, "causal", window)
            planner.plan(*table, *shape, window_left=window_left, **dtypes)
        else:
            kind = "prompt" if self.metadata.phase == "prefill" else "round"
            planner, causal = self._planner(kind, num_heads, mask, window), mask == "causal"
            planner.plan(_starts(query_lens), *table, *shape, causal=causal, window_left=window_left, **dtypes)
        return planner.wrapper

    def _committed_lengths(self) -> Tensor:
        """(B,) int32 on the host. In prefill its bounds are exact."""
        if self.metadata.phase != "prefill":
            return self.metadata.lengths.int().cpu()  # sync
        ends, counts = self.metadata.kv_bounds, self.metadata.query_lens
        return torch.tensor(ends, dtype=torch.int32) - torch.tensor(counts, dtype=torch.int32)

    def _page_table(self, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For lengths (B,) int32 on the host: where each request's pages start (B + 1,), on the host; the pages, one
        request's after the other's, on the device; the tokens in each last page (B,), on the host. All int32."""
        metadata, page_size = self.metadata, self.cache.shape[3]
        counts = (lengths + page_size - 1) // page_size
        starts = _starts(counts)
        upload, total = metadata.state.upload, int(starts[-1])
        owners = torch.repeat_interleave(upload(counts.tolist()), output_size=total)
        numbers = torch.arange(total, device=owners.device) - upload(starts.tolist())[owners]
        pages = metadata.state.pages[metadata.requests[owners], numbers].int()
        return starts, pages, lengths - (counts - 1).clamp(min=0) * page_size

    def _planner(self, kind: str, num_heads: int, mask: Mask, window: int | None) -> Planner:
        """The wrapper of "decode", or of a "round" or "prompt" with that mask; each has buffers of its own."""
        name = f"{kind} {mask} {window}"
        if name not in self.planners:
            with torch.inference_mode(False):  # a wrapper writes into its buffers in other modes, too
                self.planners[name] = Planner(self._make_wrapper(kind, num_heads))
        return self.planners[name]

    def _make_wrapper(self, kind: str, num_heads: int) -> Any:
        if kind == "decode":
            tensor_cores = num_heads // self.cache.shape[4] >= TENSOR_CORE_GROUP
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=tensor_cores)
        kernels = self.prompt_kernels if kind == "prompt" else self.round_kernels
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend=kernels)


class FA2Backend(Backend):
    prompt_kernels = round_kernels = "fa2"


class FA3Backend(Backend):
    """FA3 wherever a request has more than one query."""

    prompt_kernels = round_kernels = "fa3"

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


@cache
def _build(dtype: torch.dtype, head_dim: int, kernels: str) -> Build:
    build = Build(dtype, head_dim, kernels)
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
