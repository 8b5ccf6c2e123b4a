"""What bench/kernel_times.py times: our kernels, torch's and FlashInfer's for the same work, at Llama-3.1-8B's sizes.

A case holds one call per set of buffers, several of them, so that large work finds nothing in the L2 cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from slipstream.kernels.activation import silu_mul_reference, silu_mul_triton
from slipstream.kernels.filters import Filters, filter_thresholds_triton
from slipstream.kernels.gathered_head import (
    DraftHead,
    choose_tiling,
    gathered_linear_triton,
    head_logits,
    head_sample_reference,
    head_sample_triton,
    head_topk_reference,
    head_topk_triton,
)
from slipstream.kernels.kv import move_rows_reference, move_rows_triton
from slipstream.kernels.norm import HeadNorms, add_rms_norm_triton, rms_norm_pair_triton, rms_norm_triton
from slipstream.kernels.rope import rotate_and_store_reference, rotate_and_store_triton
from slipstream.kernels.sampling import Sampling, sample_reference, sample_triton
from slipstream.kernels.small_m_gemm import (
    MAX_GATED_ROWS,
    MAX_ROWS,
    Tiling,
    gated_linear_few_rows_triton,
    linear_few_rows_triton,
)
from slipstream.kernels.small_m_gemm import choose_tiling as choose_linear_tiling
from slipstream.kernels.tree_attention import Blocks, Parts, choose_blocks, choose_parts, tree_attention_triton
from slipstream.kernels.verify import (
    ancestor_masks_reference,
    ancestor_masks_triton,
    verify_reference,
    verify_triton,
)

H, Q, G, D, V, LAYERS = 4096, 32, 8, 128, 128_256, 32
INTERMEDIATE = 14336
EPS, PAGE_SIZE, NODES = 1e-5, 16, 16
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
    "qwen3 gate_up": (24_576, H),
    "qwen3 head": (151_936, H),
}
DRAFT_VOCAB, CHILDREN = 32_768, 4  # rows of a draft's head, children of a tree's node
HEAD_CUTS = [  # outputs, depth, split, stages, warps
    (128, 64, 1, 3, 4),
    (128, 64, 1, 4, 4),
    (128, 64, 1, 6, 4),
    (128, 64, 1, 4, 8),
    (128, 128, 1, 3, 8),
    (64, 64, 1, 4, 4),
    (64, 64, 1, 6, 4),
    (64, 128, 1, 4, 4),
    (256, 64, 1, 3, 8),
]
TABLE_TOKENS = 32_768  # that a page table has room for
MAX_LAYERS = 128
SMALL_TILES = ((32, 2, 4), (32, 4, 3), (32, 4, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3))
ATTENTION_TILES = (*SMALL_TILES, (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3))  # (tokens, warps, stages)

Calls = list[Callable[[], Any]]
Cuts = Iterator[tuple[tuple[int, ...], Calls]]


@dataclass(frozen=True, slots=True)
class Case:
    """`bytes`: what one call must read and write. `tunings`: ways to cut the work, the chosen one first."""

    kernel: str
    rows: int
    bytes: int
    ours: Calls
    torch: Calls = field(default_factory=list)
    flashinfer: Calls = field(default_factory=list)
    others: dict[str, Calls] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    tunings: Callable[[], Cuts] | None = None


def all_cases(row_counts: list[int], names: list[str]) -> Iterator[Case]:
    """Cases of the kernels whose names begin like one of `names` (all, if it is empty), made when asked for."""
    for name, make in MAKERS.items():
        if not names or name.startswith(tuple(names)):
            for rows in row_counts:
                if rows <= LARGEST.get(name, rows):
                    yield make(name, rows)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def copies(num_bytes: int, rows: int) -> int:
    """One up to 32 rows, whose time is latency; beyond, enough to pass the L2 cache."""
    return 1 if rows <= 32 else max(2, min(32, COLD_BYTES // num_bytes))


def flashinfer_calls(make: Callable[[Any], Calls]) -> Calls:
    """No calls where FlashInfer is missing."""
    if find_spec("flashinfer") is None:
        return []
    import flashinfer

    return make(flashinfer)


def norm(name: str, rows: int) -> Case:
    num_bytes = 2 * rows * H * 2
    xs, weight = random(copies(num_bytes, rows), rows, H), random(H)
    return Case(
        name,
        rows,
        num_bytes,
        [lambda x=x: rms_norm_triton(x, weight, EPS) for x in xs],
        [lambda x=x: F.rms_norm(x, (H,), weight, EPS) for x in xs],
        flashinfer_calls(lambda lib: [lambda x=x: lib.norm.rmsnorm(x, weight, EPS) for x in xs]),
    )


def add_norm(name: str, rows: int) -> Case:
    num_bytes = 4 * rows * H * 2
    pairs, weight = random(copies(num_bytes, rows), 2, rows, H), random(H)
    return Case(
        name,
        rows,
        num_bytes,
        [lambda p=p: add_rms_norm_triton(p[0], p[1], weight, EPS) for p in pairs],
        [lambda p=p: F.rms_norm(p[0] + p[1], (H,), weight, EPS) for p in pairs],
        flashinfer_calls(lambda lib: [lambda p=p: lib.norm.fused_add_rmsnorm(p[0], p[1], weight, EPS) for p in pairs]),
    )


def norm_pair(name: str, rows: int) -> Case:
    num_bytes = 4 * rows * H * 2
    pairs, weights = random(copies(num_bytes, rows), 2, rows, H), (random(H), random(H))

    def in_torch(pair: Tensor) -> Tensor:
        return torch.cat([F.rms_norm(x, (H,), weight, EPS) for x, weight in zip(pair, weights, strict=True)], dim=-1)

    ours: Calls = [lambda p=p: rms_norm_pair_triton(p[0], p[1], weights, EPS) for p in pairs]
    return Case(name, rows, num_bytes, ours, [lambda p=p: in_torch(p) for p in pairs])


def activation(name: str, rows: int) -> Case:
    num_bytes = 3 * rows * INTERMEDIATE * 2
    xs = random(copies(num_bytes, rows), rows, 2 * INTERMEDIATE)
    return Case(
        name,
        rows,
        num_bytes,
        [lambda x=x: silu_mul_triton(x) for x in xs],
        [lambda x=x: silu_mul_reference(x) for x in xs],
        flashinfer_calls(lambda lib: [lambda x=x: lib.activation.silu_and_mul(x) for x in xs]),
    )


def rope(name: str, rows: int) -> Case:
    """FlashInfer takes two launches, rotation and append; its page table is one request's. With q/k norms, as Qwen3 has
    them, it and torch take two more."""
    num_bytes = rows * (2 * Q + 4 * G) * D * 2
    pages = -(-rows // PAGE_SIZE)
    positions, batch = torch.arange(rows, device="cuda"), torch.zeros(rows, dtype=torch.int32, device="cuda")
    cos, sin = torch.rand(2, rows, D, device="cuda")
    norms = HeadNorms(random(D), random(D), EPS) if name.startswith("norm") else None
    table = torch.cat((cos[:, : D // 2], sin[:, : D // 2]), dim=1)
    sets = []
    for _ in range(copies(num_bytes, rows)):
        q, k, v = random(rows, (Q + 2 * G) * D).view(rows, -1, D).split([Q, G, G], dim=1)
        sets.append((q, k, v, random(pages, PAGE_SIZE, G, D), random(pages, PAGE_SIZE, G, D)))

    def run(kernel: Callable[..., Tensor]) -> Calls:
        flat = [(q, k, v, keys.flatten(0, 1), values.flatten(0, 1)) for q, k, v, keys, values in sets]
        return [lambda s=s: kernel(s[0], s[1], s[2], cos, sin, positions, positions, s[3], s[4], norms) for s in flat]

    def in_flashinfer(lib: Any) -> Calls:
        places, indices = positions.int(), torch.arange(pages, dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, pages], dtype=torch.int32, device="cuda")
        last = torch.tensor([rows - (pages - 1) * PAGE_SIZE], dtype=torch.int32, device="cuda")

        def call(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
            if norms is not None:
                q, k = lib.norm.rmsnorm(q, norms.q, EPS), lib.norm.rmsnorm(k, norms.k, EPS)
            lib.rope.apply_rope_with_cos_sin_cache_inplace(positions, q.flatten(1), k.flatten(1), D, table)
            lib.page.append_paged_kv_cache(k, v, batch, places, (keys, values), indices, starts, last)

        return [lambda s=s: call(*s) for s in sets]

    triton, reference = run(rotate_and_store_triton), run(rotate_and_store_reference)
    return Case(name, rows, num_bytes, triton, reference, flashinfer_calls(in_flashinfer))


def language_logits(rows: int) -> Tensor:
    """Probabilities that fall with a shuffled rank, as a language model's do."""
    ranks = torch.rand(rows, V, device="cuda").argsort(dim=1) + 1
    return (20 - 1.6 * ranks.float().log()).bfloat16()


def sampling(name: str, rows: int) -> Case:
    """FlashInfer reads fp32 logits and draws noise of its own."""
    num_bytes = rows * V * 2
    sets = [language_logits(rows) for _ in range(copies(num_bytes, rows))]
    full = [logits.float() for logits in sets]
    top_k, top_p = SETTINGS.get(name, (0, 1.0))
    keys, positions = torch.arange(rows, device="cuda") * 12345, torch.arange(rows, device="cuda")
    filters = Filters(*(torch.full((rows,), value, device="cuda") for value in (top_k, top_p, 0.0)))
    temperature = None if name == "sample greedy" else torch.ones(rows, device="cuda")
    settings = Sampling(keys, temperature, filters if name in SETTINGS else None)

    def in_flashinfer(lib: Any) -> Calls:
        library = lib.sampling
        if name == "sample":
            return [lambda x=x: library.sampling_from_logits(x, seed=1, offset=0) for x in full]
        if top_k:
            ks, ps = filters.top_k.int(), filters.top_p
            return [lambda x=x: library.top_k_top_p_sampling_from_logits(x, ks, ps, seed=1, offset=0) for x in full]
        return [
            lambda x=x: library.top_p_sampling_from_probs(x.softmax(-1), filters.top_p, seed=1, offset=0) for x in full
        ]

    return Case(
        name,
        rows,
        num_bytes,
        [lambda x=x: sample_triton(x, positions, settings) for x in sets],
        [lambda x=x: sample_reference(x, positions, settings) for x in sets],
        [] if temperature is None else flashinfer_calls(in_flashinfer),
    )


def filtering(name: str, rows: int) -> Case:
    """The four launches of the search alone, beside torch's sort."""
    num_bytes = rows * V * 2
    sets = [language_logits(rows) for _ in range(copies(num_bytes, rows))]
    filters = Filters(*(torch.full((rows,), value, device="cuda") for value in (20, 0.8, 0.0)))
    ones = torch.ones(rows, device="cuda")
    ours: Calls = [lambda x=x: filter_thresholds_triton(x, ones, filters, None, 1) for x in sets]
    return Case(name, rows, num_bytes, ours, [lambda x=x: x.float().sort(dim=-1) for x in sets])


def proposals(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    parents = torch.arange(NODES, dtype=torch.int32, device="cuda") // 2 - 1
    parents = parents.clamp(min=0).index_fill(0, torch.zeros(1, dtype=torch.int64, device="cuda"), -1)
    tokens = torch.arange(NODES, dtype=torch.int32, device="cuda").repeat(rows, 1)
    return tokens, parents.repeat(rows, 1), torch.randint(NODES, (rows, NODES), device="cuda")


def masks(name: str, rows: int) -> Case:
    parents = proposals(rows)[1]
    ours, reference = (lambda: ancestor_masks_triton(parents)), (lambda: ancestor_masks_reference(parents))
    return Case(name, rows, rows * NODES * 12, [ours], [reference])


def acceptance(name: str, rows: int) -> Case:
    tokens, parents, sampled = proposals(rows)
    above = ancestor_masks_triton(parents)
    ours: Calls = [lambda: verify_triton(tokens, parents, sampled, above)]
    return Case(name, rows, rows * NODES * 32, ours, [lambda: verify_reference(tokens, parents, sampled, above)])


def moves(name: str, rows: int) -> Case:
    """Every request moves half of its nodes, in all layers."""
    slots = torch.randperm(rows * NODES, device="cuda").view(rows, NODES)
    sources = slots.clone()
    sources[:, 1 : NODES // 2 + 1] = slots[:, NODES // 2 :]
    cache = random(LAYERS, 2, rows * NODES, G, D)
    num_bytes = 2 * rows * NODES // 2 * LAYERS * 2 * G * D * 2
    ours: Calls = [lambda: move_rows_triton(cache, sources, slots)]
    return Case(name, rows, num_bytes, ours, [lambda: move_rows_reference(cache, sources, slots)])


def linear(name: str, rows: int) -> Case:
    """Ours where it takes so many rows, cuBLAS as it is: the floor under a pass."""
    shape = name.removeprefix("linear ")
    (outputs, inputs), is_gated = LINEARS[shape], shape == GATED
    num_bytes = 2 * (outputs * inputs + rows * (outputs // (1 + is_gated) + inputs))
    x = random(rows, inputs)
    weights = [random(outputs, inputs) for _ in range(1 + COLD_BYTES // (2 * outputs * inputs))]
    ours = gated_linear_few_rows_triton if is_gated else linear_few_rows_triton
    product = (lambda x, w: silu_mul_triton(F.linear(x, w))) if is_gated else F.linear

    def tunings() -> Cuts:
        tiles = outputs // 2 if is_gated else outputs
        for tiling in (choose_linear_tiling(tiles, inputs, is_gated, rows), *linear_tilings(shape)):
            yield astuple(tiling), [partial(ours, x, w, tiling=tiling) for w in weights]

    if rows > (MAX_GATED_ROWS if is_gated else MAX_ROWS):
        return Case(name, rows, num_bytes, [], [partial(product, x, w) for w in weights])
    calls: Calls = [partial(ours, x, w) for w in weights]
    return Case(name, rows, num_bytes, calls, [partial(product, x, w) for w in weights], tunings=tunings)


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


def draft_head(name: str, rows: int) -> Case:
    """A set of a head's rows read through an index in random order (gathered), beside copies of them (static) and the
    whole head (full): logits, the sample behind them, or the best that a tree takes. "two steps" stores the logits,
    "fused" does not. The bytes are the set's weights."""
    hidden, positions = random(rows, H), torch.arange(rows, device="cuda")
    keys, temperature = torch.randint(2**62, (rows,), device="cuda"), torch.ones(rows, device="cuda")
    sampling = Sampling(keys, temperature, None)
    weight = torch.empty(V, H, dtype=torch.bfloat16, device="cuda").normal_(std=3 * H**-0.5)
    sets = [torch.randperm(V, device="cuda")[:DRAFT_VOCAB] for _ in range(2)]  # 268 MB each, they take turns
    gathered = [DraftHead(weight, ids, gathered=True) for ids in sets]
    static, full = [DraftHead(weight[ids], ids) for ids in sets], [DraftHead(weight)]
    ways: dict[str, Callable[..., Any]] = {"two steps": lambda head: head_logits(head, hidden)}

    def fused(head: DraftHead, tiling: Tiling | None = None) -> Any:
        return gathered_linear_triton(hidden, head.weight, head.ids, tiling)

    if name == "head sample":
        ways["two steps"] = lambda head: head_sample_reference(head, hidden, positions, sampling)
        ways["fused"] = fused = lambda head, tiling=None: head_sample_triton(head, hidden, positions, sampling, tiling)
    elif name == "head topk":
        ways["two steps"] = lambda head: head_topk_reference(head, hidden, CHILDREN, positions, sampling)
        ways["fused"] = fused = lambda head, tiling=None: head_topk_triton(
            head, hidden, CHILDREN, positions, sampling, tiling
        )
    heads = {"gathered": gathered, "static": static, "full": full}
    calls: dict[str, Calls] = {
        f"{kind}, {way}": [partial(run, head) for head in turns]
        for kind, turns in heads.items()
        for way, run in ways.items()
    }

    def tunings() -> Cuts:
        for tiling in (choose_tiling(rows), *(Tiling(*cut) for cut in HEAD_CUTS)):
            yield astuple(tiling), [partial(fused, head, tiling) for head in gathered]

    ours = calls.pop("gathered, fused" if "fused" in ways else "gathered, two steps")
    return Case(name, rows, 2 * DRAFT_VOCAB * H, ours, others=calls, tunings=tunings)


def attention(batch: int, context: int, nodes: int, page_size: int, ragged: bool) -> Case:
    """`nodes` new ones of each of `batch` requests behind `context` committed tokens, on average, by the tree kernel.

    A layer has KV of its own under one shuffled page table, so that KV comes from memory as it does in a model.
    """
    spread = torch.linspace(0.1, 1.9, batch)[torch.randperm(batch)] if ragged and batch > 1 else torch.ones(batch)
    lengths = (spread * context).long().cuda()
    longest = -(-(int(lengths.max()) + nodes) // page_size)  # in pages
    num_pages, capacity = batch * longest + 1, max(longest, TABLE_TOKENS // page_size)
    pages = torch.zeros(batch, capacity, dtype=torch.int64, device="cuda")
    pages[:, :longest] = (torch.randperm(num_pages - 1, device="cuda") + 1).view(batch, longest)
    num_bytes = (int(lengths.sum()) + batch * nodes) * 2 * G * D * 2  # KV of one layer
    cache = random(min(MAX_LAYERS, max(2, -(-COLD_BYTES // num_bytes))), 2, num_pages, page_size, G, D)
    q = random(len(cache), batch, nodes, Q, D)
    ancestors = (1 | 1 << torch.arange(nodes, device="cuda")).expand(batch, nodes).contiguous()  # the root's children
    where = (pages, torch.arange(batch, device="cuda"), lengths, ancestors)
    heads = Q // G
    chosen = choose_blocks(batch, nodes * heads, D, 2)
    parts = choose_parts(batch, G * -(-nodes * heads // chosen.rows), chosen.rows, capacity * page_size, D)

    def attend(layer: int, blocks: Blocks, parts: Parts) -> Tensor:
        keys, values = cache[layer]
        out = tree_attention_triton(q[layer], keys, values, *where, "tree", D**-0.5, blocks=blocks, parts=parts)
        assert isinstance(out, Tensor)
        return out

    def calls(blocks: Blocks, parts: Parts) -> Calls:
        return [partial(attend, layer, blocks, parts) for layer in range(len(cache))]

    def tunings() -> Cuts:
        expected, most = attend(0, chosen, parts).float(), parts.most
        yield (*chosen, *parts), calls(chosen, parts)
        for tile in ATTENTION_TILES:
            blocks = Blocks(chosen.rows, *tile)
            for cut in (
                *(Parts(number) for number in sorted({max(1, most // 2), most, min(64, 2 * most)})),
                *(Parts(most, tokens) for tokens in (64, 256) if most > 1),
            ):
                try:
                    out = attend(0, blocks, cut).float()
                except OutOfResources:
                    continue  # such blocks do not fit the device
                assert (out - expected).norm() < 0.02 * expected.norm(), f"{blocks} in {cut} gives something else"
                yield (*blocks, *cut), calls(blocks, cut)

    sizes = {"batch": batch, "context": context, "nodes": nodes, "page_size": page_size, "ragged": int(ragged)}
    return Case("attention", batch * nodes, num_bytes, calls(chosen, parts), sizes=sizes, tunings=tunings)


SETTINGS = {"sample top_k top_p": (20, 0.8), "sample top_p": (0, 0.9)}
MAKERS: dict[str, Callable[[str, int], Case]] = {
    "rms_norm": norm,
    "add_rms_norm": add_norm,
    "rms_norm_pair": norm_pair,
    "silu_mul": activation,
    "rotate_and_store": rope,
    "norm_rotate_and_store": rope,
    "sample greedy": sampling,
    "sample": sampling,
    **dict.fromkeys(SETTINGS, sampling),
    "filter_thresholds": filtering,
    "ancestor_masks": masks,
    "verify": acceptance,
    "move_rows": moves,
    **dict.fromkeys((f"linear {part}" for part in LINEARS), linear),
    **dict.fromkeys(("head logits", "head sample", "head topk"), draft_head),
}
SMALL = ["sample greedy", "sample", *SETTINGS, "filter_thresholds", "ancestor_masks", "verify", "move_rows"]
LARGEST = dict.fromkeys([*SMALL, *(name for name in MAKERS if name.startswith(("linear ", "head ")))], 128)
