"""A stand-in for the package flashinfer, in plain torch: attends as its wrappers do to what they were planned with.

Only what our backend uses, with the argument names and return values of flashinfer-python 0.6.18.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

BACKEND = "slipstream.serve.attention.flashinfer"
COMPILING = "flashinfer.jit.cpp_ext"


class Wrapper:
    """Base of both wrappers: a plan is read once per `plan`, not per `run`."""

    instances: list["Wrapper"] = []
    causal = False

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self.num_plans = 0
        self.instances.append(self)

    def _keep(self, starts: Tensor, table: tuple[Tensor, ...], shape: tuple[int, ...], dtype: torch.dtype):
        page_starts, pages, last_page_len = table
        for tensor in (starts, *table):
            assert tensor.dtype == torch.int32
        for tensor in (starts, page_starts, last_page_len):
            assert tensor.device.type == "cpu", "FlashInfer would wait for the device"
        assert len(starts) == len(page_starts) == len(last_page_len) + 1
        assert len(pages) == page_starts[-1]
        self.num_plans += 1
        self.starts = starts.tolist()
        self.shape = shape
        self.dtype = dtype
        self.pages = pages.split(page_starts.diff().tolist())
        self.lengths = [
            (len(pages) - 1) * shape[3] + int(last) if len(pages) else int(last)
            for pages, last in zip(self.pages, last_page_len, strict=True)
        ]

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        result = self._run(q, paged_kv_cache, out)
        return result if return_lse else result[0]

    def _run(self, q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> tuple[Tensor, Tensor]:
        """out (T, Q, D), filled, and the log2-sum-exp2 (T, Q) of the scaled scores, very low where nothing is seen."""
        assert q.shape[1:] == (self.shape[0], self.shape[2])
        assert {q.dtype, out.dtype, *(x.dtype for x in kv)} == {self.dtype}
        assert q.is_contiguous()
        assert all(x.shape[1:] == (self.shape[3], *self.shape[1:3]) for x in kv)
        group = q.shape[1] // kv[0].shape[2]
        lse = torch.full(q.shape[:2], -5e4)
        out.zero_()
        for request, pages in enumerate(self.pages):
            start, end = self.starts[request : request + 2]
            length = self.lengths[request]
            k, v = (
                x[pages.long()].flatten(0, 1)[:length].repeat_interleave(group, dim=1).float() for x in kv
            )  # (S, Q, D)
            scores = torch.einsum("nhd,shd->hns", q[start:end].float(), k) * self.scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if self.causal:
                visible = torch.ones(end - start, length, dtype=torch.bool).tril(length - (end - start))
                scores = scores.masked_fill(~visible, -torch.inf)
            if self.window_left >= 0:
                too_old = torch.ones(end - start, length, dtype=torch.bool).tril(
                    length - (end - start) - self.window_left - 1
                )
                scores = scores.masked_fill(too_old, -torch.inf)
            if length:
                out[start:end] = torch.einsum("hns,shd->nhd", scores.softmax(-1), v).to(out.dtype)
                lse[start:end] = scores.logsumexp(-1).t() / math.log(2)
        return out, lse


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False):
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ):
        assert q_data_type == kv_data_type
        self.window_left = window_left
        self.scale = sm_scale
        self.softcap = logits_soft_cap
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self._keep(starts, (indptr, indices, last_page_len), shape, q_data_type)
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto"):
        super().__init__(float_workspace_buffer, kv_layout)
        self.backend = backend

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int = -1,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ):
        assert q_data_type == kv_data_type
        table = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._keep(qo_indptr, table, (num_qo_heads, num_kv_heads, head_dim_qk, page_size), q_data_type)
        self.causal = causal
        self.window_left = window_left
        self.scale = sm_scale
        self.softcap = logits_soft_cap


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (rows, heads, D) over two sets of keys from that over each and their log2-sum-exp2 (rows, heads)."""
    assert all(x.is_contiguous() for x in (v_a, s_a, v_b, s_b))
    assert v_a.shape == v_b.shape
    assert s_a.shape == s_b.shape == v_a.shape[:2]
    assert s_a.dtype == s_b.dtype == torch.float32
    assert v_a.shape[1] * v_a.shape[2] // 8 <= 1024, "more threads than a block has"
    merged = torch.logaddexp2(s_a, s_b)
    out = v_a.float() * (s_a - merged).exp2()[..., None] + v_b.float() * (s_b - merged).exp2()[..., None]
    return out.to(v_a.dtype), merged


compiled: list[tuple[object, ...]] = []


def get_batch_prefill_module(*arguments: object):
    compiled.append(arguments)


class Event:
    """Stands for torch.cuda.Event."""

    def record(self): ...

    def synchronize(self): ...


@contextmanager
def installed(cuda_home: Path) -> Iterator[None]:
    """While it lasts, the backend is loaded anew and finds this for flashinfer, and nvcc nowhere but in `cuda_home`."""
    names = ("flashinfer", "flashinfer.jit", COMPILING, "flashinfer.prefill", "flashinfer.utils")
    modules = package, _, compiling, prefill, utils = [ModuleType(name) for name in names]
    for item in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, merge_state):
        setattr(package, item.__name__, item)
    compiling.get_cuda_path = lambda: str(cuda_home)
    prefill.get_batch_prefill_module = get_batch_prefill_module
    utils.determine_attention_backend = lambda *_, **__: "fa3"
    with replaced_modules({module.__name__: module for module in modules}):
        yield


@contextmanager
def missing() -> Iterator[None]:
    """While it lasts, `import flashinfer` fails, wherever this runs."""
    with replaced_modules({"flashinfer": None}):
        yield


@contextmanager
def replaced_modules(modules: dict[str, ModuleType | None]) -> Iterator[None]:
    before = {name: sys.modules.pop(name) for name in (*modules, BACKEND) if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in (*modules, BACKEND):
            sys.modules.pop(name, None)
        sys.modules.update(before)
