"""Rotary embedding (RoFormer, arXiv 2104.09864) in one launch each: of queries and keys after their norms, with the
write of keys and values into the paged cache; of the keys of context rows, in every layer of a block draft at once
(models/drafts/dflash.py projects one context state of each committed token to the KV of all its layers); alone, for
training. Where heads have no norms, the product that projects few rows does the first of these itself (`Rotation`).

The cache holds numbers of the network's dtype, or FP8 (e4m3) codes with a scale of each head: see `encode`.
A head's first R dims are rotated, mostly all D: the pairs are (i, i + R / 2), and the other dims stay.
Letters: T packed tokens, L layers, Q/G query and KV heads, D head dim, P positions of the tables.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.kv.fp8 import encode, encode_triton
from slipstream.kernels.launch import Op, on_gpu, pdl_options, prefetch_lines, wait_for_inputs
from slipstream.kernels.norm import HeadNorms, norm_heads


class Rotation(NamedTuple):
    """Arguments of `rotate_and_store`, for heads without norms: queries are rotated, keys rotated and stored, values
    stored."""

    cos: Tensor  # (P, D) fp32
    sin: Tensor
    positions: Tensor  # (T,) int64
    slots: Tensor
    keys: Tensor  # (slots, G, D)
    values: Tensor
    scales: Tensor | None = None

    @property
    def head_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def is_whole(self) -> bool:
        """Whether all dims of a head are rotated, as products do it."""
        return self.cos.shape[1] == self.head_dim

    def arguments(self, num_heads: int) -> tuple[Any, ...]:
        """Arguments of kernels that call `load_angles` and `store_heads`. num_heads: Q."""
        assert all(x.is_contiguous() for x in (*self[:6], *self[6:]) if x is not None)
        return *self, num_heads, self.keys.shape[1]


NO_ROTATION = (None,) * 7 + (0, 0)  # its arguments where a product rotates nothing
HEADS_PER_PROGRAM = 32  # in four warps: as fast as fewer for one token, and faster for 32


@Op
def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
    scales: Tensor | None = None,
    query_scales: Tensor | None = None,
    is_old_position: bool = False,  # noqa: ARG001
) -> Tensor:
    """Norms q, k and v as `norms` say, rotates q and k by their positions, and stores k and v in their slots.

    q (T, Q, D), k and v (T, G, D), strided views with contiguous last dims; cos, sin (P, R) fp32 tables whose halves
    are equal ("half" convention); positions, slots (T,) int64; keys, values (slots, G, D)
    one layer of the cache, contiguous, written in place. fp32 inside, rounded once, and once between norm and rotation.
    scales (2, G) fp32, of keys and of values: the cache then holds e4m3 codes, x / scale. query_scales (P,) fp32:
    factors of q by position. G = 0: stores nothing.
    is_old_position: another kernel ran after the one that wrote the positions, so these are read before waiting.
    Returns the rotated q (T, Q, D), contiguous.
    """
    is_last = norms is not None and norms.last
    if not is_last:
        q, k, v = norm_heads(q, k, v, norms)
    # (T, 1, R)
    cos = cos[positions, None]
    sin = sin[positions, None]
    dtype = q.dtype
    k = rotate_halves(k if scales is None or is_last else k.float(), cos, sin)
    if query_scales is not None:
        q = q.float() * query_scales[positions, None, None]
    q = rotate_halves(q, cos, sin).to(dtype)
    if is_last:
        q, k, v = norm_heads(q, k, v, norms)
    if not k.shape[1]:
        return q
    if scales is None:
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
    else:
        store_encoded(k, v, slots, keys, values, scales)
    return q


def store_encoded(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor, scales: Tensor) -> None:
    """Stores k and v (T, G, D) as e4m3 codes; scales (2, G)."""
    for cache, x, scale in zip((keys, values), (k, v), scales, strict=True):
        # torch copies no e4m3 by index on a CPU
        cache.view(torch.uint8).index_copy_(0, slots, encode(x, scale[:, None]).view(torch.uint8))


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first R dims of x (..., heads, D) by the "half" convention; cos, sin (..., R)."""
    if cos.shape[-1] < x.shape[-1]:
        turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat((rotate_halves(turned, cos, sin), rest), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


@Op
def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotates x (T, heads, D), strided with contiguous last dim, by its rows' positions (T,) int64: (T, heads, D) of
    `dtype`, contiguous on a GPU. cos, sin (P, R) as for `rotate_and_store`. fp32 inside; differentiable in x."""
    return rotate_halves(x, cos[positions, None], sin[positions, None]).to(dtype)


class _Rotation(torch.autograd.Function):
    """Backward rotates by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.dtype = x.dtype
        return _rotated(x, cos, sin, positions, dtype, 1.0)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin, positions = ctx.saved_tensors
        return _rotated(upstream, cos, sin, positions, ctx.dtype, -1.0), None, None, None, None


rotate.kernel(when=on_gpu)(_Rotation.apply)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, dtype: torch.dtype, sign: float) -> Tensor:
    T, heads, D = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    assert all(table.is_contiguous() for table in (cos, sin, positions))
    out = torch.empty(T, heads, D, dtype=dtype, device=x.device)
    if T and heads:
        _rotate_kernel[(T, triton.cdiv(heads, HEADS_PER_PROGRAM))](
            x, cos, sin, positions, out, x.stride(0), x.stride(1), heads, sign,
            D=D, R=cos.shape[1], HALF=triton.next_power_of_2(D // 2), HEADS=HEADS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip
    return out


@rotate_and_store.kernel()
def rotate_and_store_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
    scales: Tensor | None = None,
    query_scales: Tensor | None = None,
    is_old_position: bool = False,
) -> Tensor:
    (T, Q, D), G = q.shape, k.shape[1]
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert scales is None or not G or (scales.shape == (2, G) and scales.is_contiguous())
    assert all(x.is_contiguous() for x in (cos, sin, positions, slots, keys, values))
    assert query_scales is None or query_scales.is_contiguous()
    out = torch.empty(T, Q, D, dtype=q.dtype, device=q.device)
    programs = triton.cdiv(Q, HEADS_PER_PROGRAM) + triton.cdiv(G, HEADS_PER_PROGRAM)
    q_norm, k_norm, eps, is_last, v_norm = norms or (None, None, 0.0, False, None)
    _rotate_and_store[(T, programs)](
        q, k, v, cos, sin, positions, slots, keys, values, out, q_norm, k_norm, v_norm, scales, query_scales, eps,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], Q, G,
        D=D, R=cos.shape[1], HALF=triton.next_power_of_2(D // 2), HEADS=HEADS_PER_PROGRAM, NORM_LAST=is_last,
        IS_OLD=is_old_position, num_warps=4, **pdl_options(q.device),
    )  # fmt: skip
    return out


@triton.jit
def _rotate_and_store(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, keys_ptr, values_ptr, out_ptr,
    q_norm_ptr, k_norm_ptr, v_norm_ptr, scales_ptr, query_scales_ptr, eps, q_token_stride, q_head_stride,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, Q, G,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORM_LAST: tl.constexpr,
    IS_OLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token (axis 0) and HEADS of its query heads, or HEADS of its KV heads (the last programs of axis 1)."""
    dim = tl.arange(0, HALF)[None, :]
    if q_norm_ptr is not None:
        _prefetch_norm(q_norm_ptr, dim, D)
        _prefetch_norm(k_norm_ptr, dim, D)
    if v_norm_ptr is not None:
        _prefetch_norm(v_norm_ptr, dim, D)
    if not IS_OLD:
        wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(Q, HEADS)
    has_queries = part < query_parts
    head = (part - tl.where(has_queries, 0, query_parts)) * HEADS + tl.arange(0, HEADS)[:, None]
    inside = (head < tl.where(has_queries, Q, G)) & (dim < D // 2)
    position = tl.load(positions_ptr + token)
    angle = position * R + dim
    cos = tl.load(cos_ptr + angle, mask=dim < R // 2, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=dim < R // 2, other=0.0)
    if IS_OLD:
        wait_for_inputs(PDL)
    if has_queries:
        q = q_ptr + token * q_token_stride + head * q_head_stride
        if query_scales_ptr is not None:
            factor = tl.load(query_scales_ptr + position)
            cos *= factor
            sin *= factor
        target = out_ptr + (token * Q + head) * D
        _rotate_heads(q, target, cos, sin, inside, q_norm_ptr, eps, None, dim, D, R, NORM_LAST)
    else:
        cell = (tl.load(slots_ptr + token) * G + head) * D
        k = k_ptr + token * k_token_stride + head * k_head_stride
        v = v_ptr + token * v_token_stride + head * v_head_stride + dim
        k_scale = None
        v_scale = None
        if scales_ptr is not None:
            k_scale, v_scale = _load_scales(scales_ptr, head, G)
        _rotate_heads(k, keys_ptr + cell, cos, sin, inside, k_norm_ptr, eps, k_scale, dim, D, R, NORM_LAST)
        _copy_heads(v, values_ptr + cell + dim, inside, v_norm_ptr, eps, v_scale, dim, D)


@triton.jit
def _prefetch_norm(norm_ptr, dim, D: tl.constexpr):
    half = norm_ptr + tl.minimum(dim, D // 2 - 1)
    prefetch_lines(half)
    prefetch_lines(half + D // 2)


@triton.jit
def _rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, positions_ptr, out_ptr, token_stride, head_stride, num_heads, sign,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, by its angle times `sign`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    angle = tl.load(positions_ptr + token) * R + dim
    cos = tl.load(cos_ptr + angle, mask=dim < R // 2, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=dim < R // 2, other=0.0) * sign
    source = x_ptr + token * token_stride + head * head_stride
    inside = (head < num_heads) & (dim < D // 2)
    target = out_ptr + (token * num_heads + head) * D
    _rotate_heads(source, target, cos, sin, inside, None, 0.0, None, dim, D, R, False)


@triton.jit
def _rotate_heads(
    source, target, cos, sin, inside, norm_ptr, eps, scale, dim, D: tl.constexpr, R: tl.constexpr,
    NORM_LAST: tl.constexpr,
):  # fmt: skip
    """source, target (HEADS, 1): pointers to heads. norm_ptr (D,), or None; scale (HEADS, 1) of e4m3 codes, or None."""
    first_dims, second_dims = _pairs(dim, D, R)
    first = tl.load(source + first_dims, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_dims, mask=inside, other=0.0).to(tl.float32)
    if NORM_LAST:
        first, second = _turn(first, second, cos, sin)
        first = first.to(source.dtype.element_ty).to(tl.float32)
        second = second.to(source.dtype.element_ty).to(tl.float32)
    if norm_ptr is not None:
        first, second = _norm_halves(first, second, norm_ptr + first_dims, norm_ptr + second_dims, eps, dim, source, D)
    if not NORM_LAST:
        first, second = _turn(first, second, cos, sin)
    _store_half(target + first_dims, first, inside, scale)
    _store_half(target + second_dims, second, inside, scale)


@triton.jit
def _turn(first, second, cos, sin):
    """States which products are fused with a sum, so that all kernels give the same bits."""
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


@triton.jit
def head_outputs(tile, OUTPUTS: tl.constexpr, D: tl.constexpr):
    """Features (OUTPUTS,) of a tile: of a head of D dims, one half of them pairs with the other. D = 0: in order."""
    place = tl.arange(0, OUTPUTS)
    if D == 0:
        outputs = tile * OUTPUTS + place
    else:
        HALF: tl.constexpr = OUTPUTS // 2
        TILES: tl.constexpr = D // OUTPUTS
        outputs = tile // TILES * D + place // HALF * (D // 2) + tile % TILES * HALF + place % HALF
    return outputs


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, positions_ptr, slots_ptr, row, num_rows, tile, OUTPUTS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """cos, sin (ROWS, OUTPUTS / 2) and slots (ROWS, 1) of rows (ROWS,), for `store_heads`. D = 0: none."""
    if D == 0:
        angles = ()
    else:
        dim = (tile % (D // OUTPUTS) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2))[None, :]
        inside = (row < num_rows)[:, None]
        angle = tl.load(positions_ptr + row[:, None], mask=inside, other=0) * D + dim
        slot = tl.load(slots_ptr + row[:, None], mask=inside, other=0)
        angles = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle), slot  # type: ignore[assignment]
    return angles


@triton.jit
def store_heads(
    rounded, angles, valid, row, tile, out_ptr, keys_ptr, values_ptr, scales_ptr, Q, G, D: tl.constexpr
):  # fmt: skip
    """Rotates and stores the features `head_outputs` of rows: (ROWS, OUTPUTS), rounded as a product rounds them.
    Queries go to out (T, Q, D); valid, row (ROWS, 1)."""
    ROWS: tl.constexpr = rounded.shape[0]
    OUTPUTS: tl.constexpr = rounded.shape[1]
    TILES: tl.constexpr = D // OUTPUTS
    cos, sin, slot = angles
    head = tile // TILES
    dim = (tile % TILES * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2))[None, :]
    halves = tl.permute(tl.reshape(rounded, (ROWS, 2, OUTPUTS // 2)), (0, 2, 1))
    first, second = tl.split(halves)
    inside = valid & (dim < D)
    turned, other_turned = _turn(first.to(tl.float32), second.to(tl.float32), cos, sin)
    if head < Q:
        target = out_ptr + (row.to(tl.int64) * Q + head) * D + dim
        _store_half(target, turned, inside, None)
        _store_half(target + D // 2, other_turned, inside, None)
    else:
        scale = None
        cell = (slot * G + (head - Q) % G) * D + dim
        if scales_ptr is not None:  # keys' before values'
            scale = tl.full((1, 1), tl.load(scales_ptr + head - Q), tl.float32)
        if head < Q + G:
            _store_half(keys_ptr + cell, turned, inside, scale)
            _store_half(keys_ptr + cell + D // 2, other_turned, inside, scale)
        else:
            _store_half(values_ptr + cell, first, inside, scale)
            _store_half(values_ptr + cell + D // 2, second, inside, scale)


@triton.jit
def _copy_heads(source, target, inside, norm_ptr, eps, scale, dim, D: tl.constexpr):
    """source, target (HEADS, HALF): pointers to the first half of each head. norm_ptr (D,), or None."""
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + D // 2, mask=inside, other=0.0)
    if norm_ptr is not None:
        first, second = _norm_halves(
            first.to(tl.float32), second.to(tl.float32), norm_ptr + dim, norm_ptr + dim + D // 2, eps, dim, source, D
        )
    _store_half(target, first, inside, scale)
    _store_half(target + D // 2, second, inside, scale)


@triton.jit
def _store_half(target, half, inside, scale):
    if scale is not None:
        tl.store(target, encode_triton(half, scale), mask=inside)
    else:
        tl.store(target, half.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _load_scales(scales_ptr, head, G):
    """Loads the scales of keys and of values of heads (HEADS, 1). Heads past the last have 1."""
    k_scale = tl.load(scales_ptr + head, mask=head < G, other=1.0)
    return k_scale, tl.load(scales_ptr + G + head, mask=head < G, other=1.0)


@triton.jit
def _pairs(dim, D: tl.constexpr, R: tl.constexpr):
    """The dims of a head in D / 2 pairs: R / 2 that are rotated, then those that stay."""
    first_dims = dim
    second_dims = dim + D // 2
    if R < D:
        first_dims = tl.where(dim < R // 2, dim, dim + R // 2)
        second_dims = tl.where(dim < R // 2, dim + R // 2, dim + D // 2)
    return first_dims, second_dims


@triton.jit
def _norm_halves(first, second, first_weight, second_weight, eps, dim, source, D: tl.constexpr):
    """Norms heads (HEADS, D) in fp32 by weights at pointers; rounded as at `source`."""
    squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
    factor = tl.rsqrt(squares / D + eps)
    return _scaled(first * factor, first_weight, dim, source, D), _scaled(
        second * factor, second_weight, dim, source, D
    )


@triton.jit
def _scaled(half, weight, dim, source, D: tl.constexpr):
    """Rounded as a separate norm would round."""
    weights = tl.load(weight, mask=dim < D // 2, other=0.0).to(tl.float32)
    return (half * weights).to(source.dtype.element_ty).to(tl.float32)


@Op
def store_context(
    kv: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Norms every key head by k_norm (L, D), rotates it by its row's position, and stores keys and values.

    kv (T, L * 2 * G * D): each layer's keys before its values; cos, sin (P, R) fp32 tables whose halves are equal;
    positions, slots (T,) int64; cache (L, 2, slots, G, D), contiguous, written in place. Keys are rounded after norm
    and rotation, as in rms_norm and rotate_and_store. scales (L, 2, G) fp32: the cache then holds e4m3 codes.
    """
    keys, values = kv.unflatten(-1, (len(cache), 2, *cache.shape[3:])).unbind(2)  # (T, L, G, D) both
    keys = (F.rms_norm(keys.float(), k_norm.shape[-1:], None, eps) * k_norm[:, None].float()).to(kv.dtype).float()
    cos, sin = (table.index_select(0, positions)[:, None, None] for table in (cos, sin))  # (T, 1, 1, R)
    R = cos.shape[-1]
    half = cos.shape[-1] // 2
    turned = keys[..., :R] * cos  # as rotate_halves, with fewer passes over many rows
    turned[..., :half].addcmul_(keys[..., half:R], sin[..., :half], value=-1)
    turned[..., half:].addcmul_(keys[..., :half], sin[..., half:])
    keys = torch.cat((turned, keys[..., R:]), dim=-1) if keys.shape[-1] > R else turned
    keys = keys if scales is not None else keys.to(kv.dtype)
    for part, x in enumerate((keys, values)):  # all layers at once: of few rows an operator costs its start
        cells = cache[:, part]
        if scales is not None:  # torch copies no e4m3 by index on a CPU
            cells = cells.view(torch.uint8)
            x = encode(x, scales[:, part, :, None]).view(torch.uint8)
        cells.index_copy_(1, slots, x.transpose(0, 1))


@store_context.kernel()
def store_context_triton(
    kv: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    scales: Tensor | None = None,
) -> None:
    L, _, num_slots, G, D = cache.shape
    assert kv.shape == (len(slots), L * 2 * G * D)
    assert all(x.is_contiguous() for x in (kv, k_norm, cos, sin, positions, slots, cache))
    assert scales is None or (scales.shape == (L, 2, G) and scales.is_contiguous())
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(G))
    if len(slots):
        _store_context[(len(slots), L, triton.cdiv(G, heads))](
            kv, k_norm, cos, sin, positions, slots, cache, scales, eps, num_slots,
            L=L, G=G, D=D, R=cos.shape[1], HALF=triton.next_power_of_2(D // 2), HEADS=heads, num_warps=2,
            **pdl_options(kv.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots"])
def _store_context(
    kv_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, cache_ptr, scales_ptr, eps, num_slots,
    L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row (axis 0), one layer (axis 1), HEADS of its KV heads (axis 2)."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    inside = (head < G) & (dim < D // 2)
    source = kv_ptr + (row * L + layer) * 2 * G * D + head * D
    target = cache_ptr + (layer * 2 * num_slots + tl.load(slots_ptr + row)) * G * D + head * D
    angle = tl.load(positions_ptr + row) * R + dim
    cos = tl.load(cos_ptr + angle, mask=dim < R // 2, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=dim < R // 2, other=0.0)
    k_scale = None
    v_scale = None
    if scales_ptr is not None:
        k_scale, v_scale = _load_scales(scales_ptr + layer * 2 * G, head, G)
    _rotate_heads(source, target, cos, sin, inside, k_norm_ptr + layer * D, eps, k_scale, dim, D, R, False)
    values = target + num_slots.to(tl.int64) * G * D + dim
    _copy_heads(source + G * D + dim, values, inside, None, eps, v_scale, dim, D)
