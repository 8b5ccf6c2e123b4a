"""What bench/kernel_times.py times: our kernels, torch's and FlashInfer's for the same work, at Llama-3.1-8B's sizes.

A case holds one call per set of buffers, `copies` of them, so that large work finds nothing in the L2 cache.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.activation import silu_mul_reference, silu_mul_triton
from slipstream.kernels.filters import Filters, filter_thresholds_triton
from slipstream.kernels.kv import move_rows_reference, move_rows_triton
from slipstream.kernels.norm import HeadNorms, add_rms_norm_triton, rms_norm_pair_triton, rms_norm_triton
from slipstream.kernels.rope import rotate_and_store_reference, rotate_and_store_triton
from slipstream.kernels.sampling import Sampling, sample_reference, sample_triton
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
LINEARS = {  # outputs, inputs
    "qkv": ((Q + 2 * G) * D, H),
    "o": (H, Q * D),
    "gate_up": (2 * INTERMEDIATE, H),
    "down": (H, INTERMEDIATE),
    "lm_head": (V, H),
}

Calls = list[Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """`bytes`: what one call must read and write."""

    kernel: str
    rows: int
    bytes: int
    ours: Calls
    torch: Calls
    flashinfer: Calls


def all_cases(row_counts: list[int], names: list[str]) -> Iterator[Case]:
    """Cases of the kernels `names` (all, if it is empty), made when they are asked for."""
    for name, make in MAKERS.items():
        if not names or name in names:
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
    return Case(name, rows, num_bytes, ours, [lambda p=p: in_torch(p) for p in pairs], [])


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
    return Case(name, rows, num_bytes, ours, [lambda x=x: x.float().sort(dim=-1) for x in sets], [])


def proposals(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    parents = torch.arange(NODES, dtype=torch.int32, device="cuda") // 2 - 1
    parents = parents.clamp(min=0).index_fill(0, torch.zeros(1, dtype=torch.int64, device="cuda"), -1)
    tokens = torch.arange(NODES, dtype=torch.int32, device="cuda").repeat(rows, 1)
    return tokens, parents.repeat(rows, 1), torch.randint(NODES, (rows, NODES), device="cuda")


def masks(name: str, rows: int) -> Case:
    parents = proposals(rows)[1]
    ours, reference = (lambda: ancestor_masks_triton(parents)), (lambda: ancestor_masks_reference(parents))
    return Case(name, rows, rows * NODES * 12, [ours], [reference], [])


def acceptance(name: str, rows: int) -> Case:
    tokens, parents, sampled = proposals(rows)
    above = ancestor_masks_triton(parents)
    ours: Calls = [lambda: verify_triton(tokens, parents, sampled, above)]
    return Case(name, rows, rows * NODES * 32, ours, [lambda: verify_reference(tokens, parents, sampled, above)], [])


def moves(name: str, rows: int) -> Case:
    """Every request moves half of its nodes, in all layers."""
    slots = torch.randperm(rows * NODES, device="cuda").view(rows, NODES)
    sources = slots.clone()
    sources[:, 1 : NODES // 2 + 1] = slots[:, NODES // 2 :]
    cache = random(LAYERS, 2, rows * NODES, G, D)
    num_bytes = 2 * rows * NODES // 2 * LAYERS * 2 * G * D * 2
    ours: Calls = [lambda: move_rows_triton(cache, sources, slots)]
    return Case(name, rows, num_bytes, ours, [lambda: move_rows_reference(cache, sources, slots)], [])


def linear(name: str, rows: int) -> Case:
    """cuBLAS as it is: the floor under a pass."""
    outputs, inputs = LINEARS[name.removeprefix("linear ")]
    num_bytes = 2 * (outputs * inputs + rows * (outputs + inputs))
    x = random(rows, inputs)
    weights = [random(outputs, inputs) for _ in range(max(2, COLD_BYTES // (2 * outputs * inputs)))]
    return Case(name, rows, num_bytes, [], [lambda w=w: F.linear(x, w) for w in weights], [])


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
}
SMALL = ["sample greedy", "sample", *SETTINGS, "filter_thresholds", "ancestor_masks", "verify", "move_rows"]
LARGEST = dict.fromkeys([*SMALL, *(name for name in MAKERS if name.startswith("linear "))], 128)
