"""Keys and values of context rows in every layer of a draft, normed, rotated and stored in one launch.

A block draft (models/dflash.py) projects one feature of each committed token to the KV of all its layers: one product
and this kernel, whatever the number of layers.
Letters: T rows, L layers, G KV heads, D head dim, P positions of the tables.
"""

import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.launch import pdl_options, use_triton, wait_for_inputs
from slipstream.kernels.norm import rms_norm_reference
from slipstream.kernels.rope import rotate_and_store_reference

HEADS_PER_PROGRAM = 8  # two warps load 16 bytes per thread at D = 128


def store_context(
    kv: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> None:
    """Norms every key head by k_norm (L, D), rotates it by its row's position, and stores keys and values.

    kv (T, L * 2 * G * D): each layer's keys before its values; cos, sin (P, D) fp32 tables whose halves are equal;
    positions, slots (T,) int64; cache (L, 2, slots, G, D), contiguous, written in place. A key is rounded behind the
    norm and behind the rotation, as by rms_norm and rotate_and_store.
    """
    run = store_context_triton if use_triton(kv) else store_context_reference
    run(kv, k_norm, eps, cos, sin, positions, slots, cache)


def store_context_reference(
    kv: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> None:
    """Same signature as `store_context`, layer by layer."""
    rows = kv.unflatten(-1, (len(cache), 2, *cache.shape[3:]))  # (T, L, 2, G, D)
    for layer, (keys, values) in enumerate(cache):
        k, v = rms_norm_reference(rows[:, layer, 0], k_norm[layer], eps), rows[:, layer, 1]
        rotate_and_store_reference(k[:, :0], k, v, cos, sin, positions, slots, keys, values)


def store_context_triton(
    kv: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
) -> None:
    """Same signature as `store_context`, by the kernel."""
    L, _, num_slots, G, D = cache.shape
    assert kv.shape == (len(slots), L * 2 * G * D)
    assert all(x.is_contiguous() for x in (kv, k_norm, cos, sin, positions, slots, cache))
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(G))
    if len(slots):
        _store_context[(len(slots), L, triton.cdiv(G, heads))](
            kv, k_norm, cos, sin, positions, slots, cache, eps, num_slots,
            L=L, G=G, D=D, HALF=triton.next_power_of_2(D // 2), HEADS=heads, num_warps=2, **pdl_options(kv.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def _store_context(
    kv_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, cache_ptr, eps, num_slots,
    L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row (axis 0), one layer (axis 1), HEADS of its KV heads (axis 2)."""
    wait_for_inputs(PDL)
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    is_dim = dim < D // 2
    inside = (head < G) & is_dim
    source = kv_ptr + (row * L + layer) * 2 * G * D + head * D + dim
    target = cache_ptr + (layer * 2 * num_slots + tl.load(slots_ptr + row)) * G * D + head * D + dim
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / D + eps)[:, None]
    weight = k_norm_ptr + layer * D + dim
    first *= scale * tl.load(weight, mask=is_dim, other=0.0).to(tl.float32)
    second *= scale * tl.load(weight + D // 2, mask=is_dim, other=0.0).to(tl.float32)
    first = first.to(cache_ptr.dtype.element_ty).to(tl.float32)
    second = second.to(cache_ptr.dtype.element_ty).to(tl.float32)
    angle = tl.load(positions_ptr + row) * D + dim
    cos = tl.load(cos_ptr + angle, mask=is_dim, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=is_dim, other=0.0)
    tl.store(target, (first * cos - second * sin).to(cache_ptr.dtype.element_ty), mask=inside)
    tl.store(target + D // 2, (second * cos + first * sin).to(cache_ptr.dtype.element_ty), mask=inside)
    source += G * D
    target += num_slots.to(tl.int64) * G * D
    tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)
    tl.store(target + D // 2, tl.load(source + D // 2, mask=inside, other=0.0), mask=inside)
