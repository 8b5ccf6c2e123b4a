"""The kernels that bench/kernel_times.py times at Llama-3.1-8B's sizes: ours, torch's and FlashInfer's.

Cases with much data have several sets of buffers, which keeps the L2 cache cold.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.attention.ragged import Segments, plan_work_triton, ragged_attention_triton
from slipstream.kernels.attention.tree import tree_attention_triton
from slipstream.kernels.gemm.activation import silu_mul, silu_mul_triton
from slipstream.kernels.gemm.choose import FAST_ROWS, FEW_ROWS
from slipstream.kernels.gemm.gathered_head import (
    DraftHead,
    choose_tiling,
    gathered_linear_triton,
    head_logits,
    head_topk,
    head_topk_triton,
)
from slipstream.kernels.gemm.linear import gated_linear
from slipstream.kernels.gemm.linear import linear as plain_linear
from slipstream.kernels.gemm.small_m import gated_linear_few_rows_triton, linear_few_rows_triton
from slipstream.kernels.gemm.tiling import Tiling
from slipstream.kernels.gemm.tiling import choose_tiling as choose_linear_tiling
from slipstream.kernels.kv.fp8 import encode
from slipstream.kernels.kv.rope import rotate_and_store, rotate_and_store_triton
from slipstream.kernels.norm import HeadNorms, add_rms_norm_triton, rms_norm_pair_triton, rms_norm_triton
from slipstream.kernels.sampling.filters import Filters
from slipstream.kernels.sampling.sample import Sampling, sample, sample_triton

H = 4096
Q = 32
G = 8
D = 128
V = 128_256
INTERMEDIATE = 14336
EPS = 1e-5
PAGE_SIZE = 16
SCALE = 0.02  # of e4m3 codes of normal numbers
COLD_BYTES = 256 * 2**20  # four times an H200's L2
GATED = "gated"
LINEARS = {  # outputs, inputs
    "qkv": ((Q + 2 * G) * D, H),
    "o": (H, Q * D),
    "gate_up": (2 * INTERMEDIATE, H),
    GATED: (2 * INTERMEDIATE, H),
    "down": (H, INTERMEDIATE),
    "head": (V, H),
    "draft fc": (H, 3 * H),
    "draft qkv": ((Q + 2 * G) * D, 2 * H),
    "draft head": (32_000, H),
}
DRAFT_VOCAB = 32_768  # rows of a draft's head
CHILDREN = 4  # of a tree's node
HEAD_TILES = ((64, 64, 1, 4, 4), (64, 64, 1, 6, 4), (64, 128, 1, 4, 4), (128, 64, 1, 3, 4), (128, 64, 1, 4, 4))
HEAD_TILES += ((128, 64, 1, 6, 4), (128, 64, 1, 4, 8), (128, 128, 1, 3, 8), (256, 64, 1, 3, 8))
TABLE_TOKENS = 32_768  # that a page table has room for
MAX_LAYERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Our kernel and its peers for the same work, each called with one of `sets`."""

    bytes: int
    """Bytes that one call must read and write."""
    sets: Sequence[Any]
    ours: Callable[[Any], Any] | None
    peers: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    beside: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Sets of those `peers` that need their own."""
    tunings: Callable[[], Iterator[tuple[tuple[int, ...], Callable[[Any], Any]]]] | None = None
    """Tilings to try, the chosen one first."""


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=scale)


def copies(num_bytes: int, rows: int) -> int:
    """One up to 32 rows, where latency dominates; above, enough to exceed the L2 cache."""
    return 1 if rows <= 32 else max(2, min(32, COLD_BYTES // num_bytes))


def flashinfer(make: Callable[[Any], Callable[[Any], Any]]) -> dict[str, Callable[[Any], Any]]:
    """Empty if FlashInfer is not installed."""
    if find_spec("flashinfer") is None:
        return {}
    import flashinfer

    return {"flashinfer": make(flashinfer)}


def over_rows(moved: int, *shape: int, **kernels: Any) -> Case:
    """A case of kernels over tensors (..., rows, channels) in bf16 that read and write `moved` values."""
    return Case(bytes=2 * moved, sets=random(copies(2 * moved, shape[-2]), *shape), **kernels)


def norm(rows: int) -> Case:
    weight = random(H)
    library = flashinfer(lambda lib: lambda x: lib.norm.rmsnorm(x, weight, EPS))
    peers = library | {"torch": lambda x: F.rms_norm(x, (H,), weight, EPS)}
    return over_rows(2 * rows * H, rows, H, ours=lambda x: rms_norm_triton(x, weight, EPS), peers=peers)


def add_norm(rows: int) -> Case:
    weight = random(H)
    library = flashinfer(lambda lib: lambda pair: lib.norm.fused_add_rmsnorm(*pair, weight, EPS))
    peers = library | {"torch": lambda pair: F.rms_norm(pair[0] + pair[1], (H,), weight, EPS)}
    return over_rows(4 * rows * H, 2, rows, H, ours=lambda pair: add_rms_norm_triton(*pair, weight, EPS), peers=peers)


def norm_pair(rows: int) -> Case:
    weights = (random(H), random(H))

    def in_torch(pair: Tensor) -> Tensor:
        return torch.cat([F.rms_norm(x, (H,), weight, EPS) for x, weight in zip(pair, weights, strict=True)], dim=-1)

    def ours(pair: Tensor) -> Tensor:
        return rms_norm_pair_triton(*pair, weights, EPS)

    return over_rows(4 * rows * H, 2, rows, H, ours=ours, peers={"torch": in_torch})


def activation(rows: int) -> Case:
    peers = flashinfer(lambda lib: lib.activation.silu_and_mul) | {"torch": silu_mul.reference}
    return over_rows(3 * rows * INTERMEDIATE, rows, 2 * INTERMEDIATE, ours=silu_mul_triton, peers=peers)


def rope(rows: int, normed: bool) -> Case:
    """FlashInfer takes two launches, rotation and append; its page table is one request's. With q/k norms, as Qwen3 has
    them, it and torch take two more."""
    num_bytes = rows * (2 * Q + 4 * G) * D * 2
    pages = -(-rows // PAGE_SIZE)
    positions = torch.arange(rows, device="cuda")
    batch = torch.zeros(rows, dtype=torch.int32, device="cuda")
    cos, sin = torch.rand(2, rows, D, device="cuda")
    norms = HeadNorms(random(D), random(D), EPS) if normed else None
    table = torch.cat((cos[:, : D // 2], sin[:, : D // 2]), dim=1)
    sets = []
    for _ in range(copies(num_bytes, rows)):
        q, k, v = random(rows, (Q + 2 * G) * D).view(rows, -1, D).split([Q, G, G], dim=1)
        sets.append((q, k, v, random(pages, PAGE_SIZE, G, D), random(pages, PAGE_SIZE, G, D)))

    def run(kernel: Callable[..., Tensor], buffers: tuple[Tensor, ...]) -> Tensor:
        q, k, v, keys, values = buffers
        keys = keys.flatten(0, 1)
        values = values.flatten(0, 1)
        return kernel(q, k, v, cos, sin, positions, positions, keys, values, norms)

    def in_flashinfer(lib: Any) -> Callable[[Any], None]:
        places = positions.int()
        indices = torch.arange(pages, dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, pages], dtype=torch.int32, device="cuda")
        last = torch.tensor([rows - (pages - 1) * PAGE_SIZE], dtype=torch.int32, device="cuda")

        def call(buffers: tuple[Tensor, ...]) -> None:
            q, k, v, keys, values = buffers
            if norms is not None:
                q = lib.norm.rmsnorm(q, norms.q, EPS)
                k = lib.norm.rmsnorm(k, norms.k, EPS)
            lib.rope.apply_rope_with_cos_sin_cache_inplace(positions, q.flatten(1), k.flatten(1), D, table)
            lib.page.append_paged_kv_cache(k, v, batch, places, (keys, values), indices, starts, last)

        return call

    peers = flashinfer(in_flashinfer) | {"torch": partial(run, rotate_and_store.reference)}
    ours = partial(run, rotate_and_store_triton)
    return Case(bytes=num_bytes, sets=sets, ours=ours, peers=peers)


def language_logits(rows: int) -> Tensor:
    """Probabilities that fall with a shuffled rank, as a language model's do."""
    ranks = torch.rand(rows, V, device="cuda").argsort(dim=1) + 1
    return (20 - 1.6 * ranks.float().log()).bfloat16()


def sampling(rows: int, name: str) -> Case:
    """FlashInfer reads fp32 logits and draws noise of its own."""
    num_bytes = rows * V * 2
    sets = [language_logits(rows) for _ in range(copies(num_bytes, rows))]
    top_k, top_p = SETTINGS.get(name, (0, 1.0))
    keys = torch.arange(rows, device="cuda") * 12345
    positions = torch.arange(rows, device="cuda")
    filters = Filters(*(torch.full((rows,), value, device="cuda") for value in (top_k, top_p, 0.0)))
    temperature = None if name == "sample greedy" else torch.ones(rows, device="cuda")
    settings = Sampling(keys, temperature, filters if name in SETTINGS else None)

    def in_flashinfer(lib: Any) -> Callable[[Any], Any]:
        library = lib.sampling
        ks = filters.top_k.int()
        ps = filters.top_p
        if name == "sample":
            return lambda x: library.sampling_from_logits(x, seed=1, offset=0)
        if top_k:
            return lambda x: library.top_k_top_p_sampling_from_logits(x, ks, ps, seed=1, offset=0)
        return lambda x: library.top_p_sampling_from_probs(x.softmax(-1), ps, seed=1, offset=0)

    return Case(
        bytes=num_bytes,
        sets=sets,
        ours=lambda x: sample_triton(x, positions, settings),
        peers=({} if temperature is None else flashinfer(in_flashinfer))
        | {"torch": lambda x: sample.reference(x, positions, settings)},
        beside={"flashinfer": [logits.float() for logits in sets]},
    )


def linear(rows: int, name: str) -> Case:
    """Our kernel up to its largest number of rows, as callers get it or, with a tiling, that of small_m.py; and
    cuBLAS."""
    outputs, inputs = LINEARS[name]
    is_gated = name == GATED
    x = random(rows, inputs)
    kernel = gated_linear_few_rows_triton if is_gated else linear_few_rows_triton

    def tunings() -> Iterator[Any]:
        size = outputs // 2 if is_gated else outputs
        for tiling in (choose_linear_tiling(size, inputs, is_gated, rows), *linear_tilings(name)):
            yield astuple(tiling), lambda w, tiling=tiling: kernel(x, w, tiling=tiling)

    is_ours = rows <= (FEW_ROWS if is_gated else FAST_ROWS)
    return Case(
        bytes=2 * (outputs * inputs + rows * (outputs // (1 + is_gated) + inputs)),
        sets=[random(outputs, inputs) for _ in range(1 + COLD_BYTES // (2 * outputs * inputs))],
        ours=partial(gated_linear if is_gated else plain_linear, x) if is_ours else None,
        peers={"torch": lambda w: silu_mul_triton(F.linear(x, w)) if is_gated else F.linear(x, w)},
        tunings=tunings if is_ours else None,
    )


def linear_tilings(shape: str) -> list[Tiling]:
    """Few enough to compile and time in a minute for the five shapes of a target; compiled ones are shared."""
    if shape == GATED:
        cuts = [(64, 64, 1, 3), (64, 64, 1, 4), (64, 64, 1, 6), (64, 128, 1, 3), (128, 64, 1, 3)]
        cuts += [(128, 64, 1, 3, 8), (128, 64, 1, 4, 8)]
    elif LINEARS[shape][0] >= 20_000:
        cuts = [(128, 64, 1, 3), (128, 64, 1, 4), (128, 64, 1, 6), (128, 128, 1, 3), (64, 128, 1, 3), (64, 128, 1, 5)]
    else:
        cuts = [(64, 128, split, stages) for split in (1, 2, 4) for stages in (4, 6)]
        cuts += [(64, 64, 4, 6), (128, 64, 4, 4), (128, 64, 8, 4)]
    return [Tiling(*cut) for cut in cuts]


def draft_head(rows: int, name: str) -> Case:
    """Our kernel over a subset of the head's rows, read through a random index: logits, a sample, or the best tokens
    for a tree; torch's way stores the logits. `bytes` counts the subset's weights."""
    hidden = random(rows, H)
    positions = torch.arange(rows, device="cuda")
    keys = torch.randint(2**62, (rows,), device="cuda")
    sampling = Sampling(keys, torch.ones(rows, device="cuda"), None)
    weight = torch.empty(V, H, dtype=torch.bfloat16, device="cuda").normal_(std=3 * H**-0.5)
    subsets = [torch.randperm(V, device="cuda")[:DRAFT_VOCAB] for _ in range(2)]  # 268 MB each, they take turns
    is_logits = name == "head logits"
    k = 1 if name == "head sample" else CHILDREN

    def ours(head: DraftHead, tiling: Tiling | None = None) -> Any:
        if is_logits:
            return gathered_linear_triton(hidden, head.weight, head.ids, tiling)
        return head_topk_triton(head, hidden, k, positions, sampling, tiling)

    def in_torch(head: DraftHead) -> Any:
        return head_logits(head, hidden) if is_logits else head_topk.reference(head, hidden, k, positions, sampling)

    def tunings() -> Iterator[Any]:
        for tiling in (choose_tiling(rows), *(Tiling(*cut) for cut in HEAD_TILES)):
            yield astuple(tiling), partial(ours, tiling=tiling)

    heads = [DraftHead(weight, ids, gathered=True) for ids in subsets]
    return Case(bytes=2 * DRAFT_VOCAB * H, sets=heads, ours=ours, peers={"torch": in_torch}, tunings=tunings)


def context_lengths(batch: int, context: int, ragged: bool) -> Tensor:
    """(batch,) int64 `context` or, if ragged, between 0.1 and 1.9 times as many."""
    spread = torch.linspace(0.1, 1.9, batch)[torch.randperm(batch)] if ragged and batch > 1 else torch.ones(batch)
    return (spread * context).long().cuda()


def paged_cache(tokens: Tensor, page_size: int, num_bytes: int, kv_dtype: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """A shuffled page table with room for `tokens` (R,) of each request, the KV of as many layers as exceed the L2
    cache, if a layer reads num_bytes, and the scales of its codes."""
    longest = -(-int(tokens.max()) // page_size)  # in pages
    num_pages = len(tokens) * longest + 1
    capacity = max(longest, TABLE_TOKENS // page_size)
    pages = torch.zeros(len(tokens), capacity, dtype=torch.int64, device="cuda")
    pages[:, :longest] = (torch.randperm(num_pages - 1, device="cuda") + 1).view(len(tokens), longest)
    layers = min(MAX_LAYERS, max(2, -(-COLD_BYTES // num_bytes)))
    cache = random(layers, 2, num_pages, page_size, G, D)
    if kv_dtype == "bf16":
        return pages, cache, None
    scales = torch.full((2, G), SCALE, device="cuda")
    return pages, torch.stack([encode(layer, scales[0, :, None]) for layer in cache]), scales


def kv_bytes(tokens: int, kv_dtype: str) -> int:
    """Bytes of a layer's keys and values."""
    return tokens * 2 * G * D * (2 if kv_dtype == "bf16" else 1)


def attention(batch: int, context: int, nodes: int, page_size: int, ragged: bool, window: int, kv_dtype: str) -> Case:
    """Tree attention: `nodes` per request, `batch` requests, after `context` committed tokens on average, of which a
    node sees the last `window`; 0: all.

    Each layer has its own KV under one shuffled page table, so KV comes from memory as in a model.
    """
    lengths = context_lengths(batch, context, ragged)
    visible = lengths.clamp(max=window) if window else lengths
    num_bytes = kv_bytes(int(visible.sum()) + batch * nodes, kv_dtype)
    pages, cache, scales = paged_cache(lengths + nodes, page_size, num_bytes, kv_dtype)
    q = random(len(cache), batch, nodes, Q, D)
    ancestors = (1 | 1 << torch.arange(nodes, device="cuda")).expand(batch, nodes).contiguous()  # the root's children

    rows = torch.arange(batch, device="cuda")
    options: dict[str, Any] = {"mask": "tree", "scale": D**-0.5, "window": window or None, "scales": scales}

    def attend(layer: int) -> Any:
        keys, values = cache[layer]
        return tree_attention_triton(q[layer], keys, values, pages, rows, lengths, ancestors, **options)

    return Case(bytes=num_bytes, sets=range(len(cache)), ours=attend)


def ragged_pass(
    batch: int,
    context: int,
    nodes: int,
    page_size: int,
    ragged: bool,
    window: int,
    kv_dtype: str,
    chunks: int,
    chunk_rows: int,
) -> tuple[Case, Case]:
    """Attention of a ragged pass, and its plan: `nodes` of each of `batch` requests and `chunks` of prompts, of
    chunk_rows tokens each, after `context` tokens on average, of which a row sees the last `window`; 0: all."""
    lengths = context_lengths(batch + chunks, context, ragged)
    counts = torch.tensor([nodes] * batch + [chunk_rows] * chunks, device="cuda")
    visible = (lengths.clamp(max=window) if window else lengths) + counts
    num_bytes = kv_bytes(int(visible.sum()), kv_dtype)
    pages, cache, scales = paged_cache(lengths + counts, page_size, num_bytes, kv_dtype)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(dim=0))).int()
    segments = Segments(starts, torch.arange(batch + chunks, device="cuda"), lengths, batch, nodes)
    T = batch * nodes + chunks * chunk_rows
    q = random(len(cache), T, Q, D)
    ancestors = (1 | 1 << torch.arange(nodes, device="cuda")).repeat(batch + -(-chunks * chunk_rows // nodes))[:T]

    def plan(_: Any = None) -> Any:
        return plan_work_triton(segments, T, Q, G, D, q.dtype, window=window or None)

    work = plan()
    options: dict[str, Any] = {"mask": "tree", "scale": D**-0.5, "window": window or None, "scales": scales}
    options["work"] = work

    def attend(layer: int) -> Tensor:
        keys, values = cache[layer]
        return ragged_attention_triton(q[layer], keys, values, pages, segments, ancestors, **options)

    planned = sum(tiles.records.nbytes + tiles.ranges.nbytes for tiles in work if tiles is not None)
    return Case(bytes=num_bytes, sets=range(len(cache)), ours=attend), Case(bytes=planned, sets=[None], ours=plan)


SETTINGS = {"sample top_k top_p": (20, 0.8), "sample top_p": (0, 0.9)}
MAKERS: dict[str, Callable[[int], Case]] = {
    "rms_norm": norm,
    "add_rms_norm": add_norm,
    "rms_norm_pair": norm_pair,
    "silu_mul": activation,
    "rotate_and_store": partial(rope, normed=False),
    "norm_rotate_and_store": partial(rope, normed=True),
    **{name: partial(sampling, name=name) for name in ("sample greedy", "sample", *SETTINGS)},
    **{f"linear {name}": partial(linear, name=name) for name in LINEARS},
    **{name: partial(draft_head, name=name) for name in ("head logits", "head sample", "head topk")},
}
LARGE = ("rms_norm", "add_rms_norm", "rms_norm_pair", "silu_mul", "rotate_and_store", "norm_rotate_and_store")
MOST_ROWS = 128  # of all others
