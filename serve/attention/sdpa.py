"""Attention with torch's scaled_dot_product_attention over gathered pages: the CPU's backend and the reference.
Layers with soft caps or sinks take plain torch instead, which holds scores in fp32."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from slipstream.kernels.attention.dense import dense_attention
from slipstream.kernels.attention.paged import sees
from slipstream.kernels.kv.fp8 import E4M3, decode
from slipstream.kernels.kv.rope import store_encoded
from slipstream.kernels.norm import HeadNorms, rms_norm, rms_norm_each
from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.serve.attention import base
from slipstream.serve.runner.batch import AttentionMetadata
from slipstream.serve.runner.kv import NetworkKV
from slipstream.serve.runner.request_state import KVSlots

# Without cuDNN, which prepares about 40 ms for every new prompt length.
GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MANY_REQUESTS = 16  # from here on a CPU attends to requests with equal numbers of queries in one call
MOST_AT_ONCE = 16384  # tokens that such a call copies, padded to the longest request


class View(NamedTuple):
    """The pages of b requests that a layer reads."""

    pages: Tensor  # (b, p) int64
    counts: list[int]  # (b,) how many of them hold a request's own text; the others lie behind it
    positions: Tensor  # (b or 1, p * page_size) of their tokens; those of nodes in node order


class Kind(NamedTuple):
    """The properties of a layer that its scores' bias depends on."""

    mask: Mask
    window: int | None
    stacked: int  # copies of each query's row, for query heads that share a KV head
    dtype: torch.dtype


class Share(NamedTuple):
    """The queries, pages and bias of one request of a segment, in layers that are alike."""

    queries: slice  # of the segment
    pages: Tensor  # (1, p) int64
    bias: Tensor | None  # (1, 1, count or count * Q / G, S), S = p * page_size


@dataclass(slots=True)
class Segment:
    """Requests of a batch whose masks are made together."""

    requests: slice
    queries: slice  # of the packed tokens
    counts: tuple[int, ...]  # (b,) queries of each request
    is_whole: bool  # one request without committed tokens: its queries are its whole context
    views: dict[tuple[int, int | None], View] = field(default_factory=dict)  # by group and window
    biases: dict[Kind, Tensor] = field(default_factory=dict)  # (b, 1, N or N * Q / G, p * page_size), 0 or -inf
    shares: dict[tuple[int, Kind], list[Share]] = field(default_factory=dict)  # by group, too

    @property
    def max_queries(self) -> int:
        """N."""
        return max(self.counts)


class Backend(base.Backend):
    reads_codes = supports_ragged_nodes = True
    needs_host_lengths = True  # the host's bounds are the shapes of what it gathers
    phases = frozenset(base.PHASES)
    features = gpu_features = frozenset(base.FEATURES)

    def __init__(self, kv: NetworkKV, ropes: Sequence[RotaryEmbedding]) -> None:
        super().__init__(kv, ropes)
        self.gathered = self.layers[0].new_empty(0)
        self.score_scales = [spec.score_scale for spec in kv.specs]
        self.query_dtype = kv.query_dtype

    def plan_reads(self, metadata: AttentionMetadata) -> None:
        """A pass whose requests have unlike numbers of nodes has masks (B, N, N). Prompts may be long and unlike in
        length, so each has a mask of its own."""
        super().plan_reads(metadata)
        counts = metadata.query_lens
        if metadata.phase != "prefill" or len(set(counts)) == 1:
            self.segments = [self._segment(0, len(counts), 0)]
            return
        starts = [0, *accumulate(counts)]
        self.segments = [self._segment(index, index + 1, starts[index]) for index in range(len(counts))]

    def plan_writes(self, positions: Tensor, slots: KVSlots) -> None:
        super().plan_writes(positions, slots)
        if not self.layers[0].is_cuda:
            self._find_angles(positions)

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        if k.is_cuda:
            super().write(k, v, layer)
        else:
            self._store(self._rotate(k, layer), v, layer)

    def rotate_and_store(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        if q.is_cuda:  # one launch instead of a dozen
            return super().rotate_and_store(q, k, v, layer)
        q, k = self._norm_and_rotate(q, k, layer)
        norms = layer.norms
        if norms is not None and norms.v is not None:
            v = rms_norm(v, norms.v, norms.eps)
        self._store(k, v, layer)
        return q

    def attend_stored(self, q: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        parts = [self._attend(q[segment.queries], layer, mask, segment) for segment in self.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _find_angles(self, positions: Tensor) -> None:
        """Computes the angles of a pass on the CPU, for `_rotate`; the first half of sin is negated."""
        self.angles: dict[RotaryEmbedding, tuple[Tensor, Tensor]] = {}
        for rope in self.ropes:
            if rope not in self.angles:
                cos = rope.cos[positions].unsqueeze(-2)  # (T, 1, R)
                sin = rope.sin[positions].unsqueeze(-2)
                self.angles[rope] = cos, sin
                sin[..., : sin.shape[-1] // 2].neg_()

    def _norm_and_rotate(self, q: Tensor, k: Tensor, layer: AttentionLayer) -> Sequence[Tensor]:
        """q (T, Q, D) and k (T, G, D), each operator on both at once: of few tokens the operators take the time."""
        sizes = q.shape[1], k.shape[1]
        heads = torch.cat((q, k), dim=1)  # (T, Q + G, D)
        norms = layer.norms
        is_last = norms is not None and norms.last
        if norms is not None and not is_last:
            heads = self._norm(heads, sizes, norms)
        query_scales = self.ropes[layer.id].query_scales
        if query_scales is not None:
            factors = query_scales[self.positions].view(-1, 1, 1)
            q = self._rotate(heads[:, : sizes[0]].float() * factors, layer).to(q.dtype)
            return q, self._rotate(heads[:, sizes[0] :], layer)
        heads = self._rotate(heads, layer)
        if norms is not None and is_last:
            heads = self._norm(heads, sizes, norms)
        return heads.split(sizes, dim=1)

    def _norm(self, heads: Tensor, sizes: Sequence[int], norms: HeadNorms) -> Tensor:
        """heads (T, Q + G, D); sizes: Q and G."""
        weights = norms.q.expand(sizes[0], -1), norms.k.expand(sizes[1], -1)
        return rms_norm_each(heads, torch.cat(weights), norms.eps)

    def _rotate(self, x: Tensor, layer: AttentionLayer) -> Tensor:
        """rotate_halves (kernels/kv/rope.py) of x (T, heads, D), in three operators: `sin` has the sign."""
        cos, sin = self.angles[self.ropes[layer.id]]  # (T, 1, R)
        R = cos.shape[-1]
        rest = x[..., cos.shape[-1] :]
        turned = x[..., :R]
        turned = torch.addcmul(turned * cos, turned.roll(R // 2, -1), sin).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    def _store(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        if layer.spec.kv_source is not None:  # k and v have no heads
            return
        keys, values = self.flat[layer.id]
        slots = self.slots.of(self.groups[layer.id])
        if (scales := self.scales[layer.id]) is not None:
            store_encoded(k, v, slots, keys, values, scales)
            return
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def _attend(self, q: Tensor, layer: AttentionLayer, mask: Mask, segment: Segment) -> Tensor:
        """q (T, Q, D) of a segment -> the same shape.

        On a CPU requests are computed one by one: no node is padded, and the copy of a request's keys stays in the
        cache until they are read. Of many short requests the calls take the time, so they share one.
        """
        is_even = len(set(segment.counts)) == 1
        if is_even and (q.is_cuda or self._is_one_call(layer, segment)):
            return self._attend_pages(q, self._view(layer, segment).pages, self._bias(layer, mask, segment), layer)
        shares = self._shares(layer, mask, segment)
        parts = [self._attend_pages(q[share.queries], share.pages, share.bias, layer) for share in shares]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _is_one_call(self, layer: AttentionLayer, segment: Segment) -> bool:
        if len(segment.counts) < MANY_REQUESTS:
            return False
        return self._view(layer, segment).pages.numel() * self.page_size <= MOST_AT_ONCE

    def _attend_pages(self, q: Tensor, pages: Tensor, bias: Tensor | None, layer: AttentionLayer) -> Tensor:
        """q (b * count, Q, D) attends to pages (b, p) -> the same shape. No bias: of a whole prompt on a GPU."""
        b, p = pages.shape
        G, D = self.layers[layer.id].shape[3:]
        kv = self._read(layer.id, pages.flatten())
        k, v = kv.view(2, b, p * self.page_size, G, D).transpose(2, 3).unbind()  # (b, G, S, D) each
        count = len(q) // b
        group = q.shape[1] // G
        if b == 1 and q.is_cuda and _is_plain(layer):
            return self._attend_one(q, k, v, bias, self.score_scales[layer.id])
        q = q.view(b, count, G, group, D).transpose(1, 2)  # (b, G, count, Q / G, D)
        assert bias is not None
        if not _is_plain(layer):
            return self._attend_densely(q, k, v, bias, layer)
        q = q.reshape(b, G, count * group, D)
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.score_scales[layer.id])
        return out.view(b, G, count, group, D).transpose(1, 2).reshape(b * count, G * group, D)

    def _attend_densely(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, layer: AttentionLayer) -> Tensor:
        """Attends with soft caps or sinks. q (b, G, count, Q / G, D), k and v (b, G, S, D) -> (b * count, Q, D)."""
        spec = layer.spec
        sinks = layer.sinks
        if sinks is not None:
            sinks = sinks.view(*q.shape[1:4:2], 1)
        q = q.transpose(2, 3)
        k = k[:, :, None]
        v = v[:, :, None]
        out = dense_attention(q, k, v, bias[:, :, None], self.score_scales[layer.id], spec.softcap, sinks)
        return out.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)

    def _read(self, layer: int, pages: Tensor) -> Tensor:
        """Keys and values of pages (P,) as queries take them: (2, P, page_size, G, D). What is attended to is what a
        later pass reads, of a pass's own tokens, too."""
        scales = self.scales[layer]
        if scales is None:
            return self._gather(self.layers[layer], pages)
        codes = self._gather(self.layers[layer].view(torch.uint8), pages).view(E4M3)  # torch gathers no e4m3 on a CPU
        return decode(codes, scales[:, None, None, :, None], self.query_dtype)

    def _gather(self, cache: Tensor, pages: Tensor) -> Tensor:
        """Copies of pages (P,) of a layer's cache: (2, P, page_size, G, D).

        On a CPU all layers use one buffer: the allocator returns large blocks to the system, which clears every page of
        the next one.
        """
        if cache.is_cuda:
            return cache.index_select(1, pages)
        shape = 2, len(pages), *cache.shape[2:]
        if self.gathered.numel() < math.prod(shape):
            self.gathered = cache.new_empty(math.prod(shape))
        return torch.index_select(cache, 1, pages, out=self.gathered[: math.prod(shape)].view(shape))

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """One request on a GPU, where a prompt's bias is large: query heads that share a KV head become the
        batch instead of being stacked along the queries. q (count, Q, D), k and v (1, G, S, D) -> (count, Q, D).

        Not (G, Q / G, ...): with head stride 0 in the keys, torch's memory-efficient kernel reads a last block of one
        query (of 65, 129, ...) as one query per head and returns nonsense.
        """
        count, _, D = q.shape
        G = k.shape[1]
        q = q.view(count, G, -1, D).permute(2, 1, 0, 3)  # (Q / G, G, count, D)
        k = k.expand(len(q), -1, -1, -1)
        v = v.expand(len(q), -1, -1, -1)
        with sdpa_kernel(GPU_KERNELS):
            if bias is None:
                out = scaled_dot_product_attention(q, k[:, :, :count], v[:, :, :count], is_causal=True, scale=scale)
            else:
                out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        return out.permute(2, 1, 0, 3).flatten(1, 2)

    def _segment(self, start: int, end: int, first_query: int) -> Segment:
        metadata = self.metadata
        counts = metadata.query_lens[start:end]
        is_whole = metadata.kv_bounds[start:end] == counts and len(counts) == 1
        return Segment(slice(start, end), slice(first_query, first_query + sum(counts)), counts, is_whole)

    def _view(self, layer: AttentionLayer, segment: Segment) -> View:
        """Leaves out pages that lie wholly before the window: they belong to others by now."""
        group = self.groups[layer.id]
        window = layer.spec.window
        if (group, window) in segment.views:
            return segment.views[group, window]
        metadata = self.metadata
        size = self.page_size
        table = metadata.state.pages[group]
        bounds = metadata.kv_bounds[segment.requests]
        rows = metadata.requests[segment.requests]
        device = table.device
        ends = [min(-(-bound // size), table.shape[1]) for bound in bounds]
        starts = [0] * len(bounds) if metadata.read_starts is None else metadata.read_starts[rows].tolist()  # sync
        if window is None and not any(starts):
            positions = torch.arange(max(ends) * size, device=device)
            view = segment.views[group, window] = View(table[rows, : max(ends)], ends, positions[None])
            return view
        firsts = [
            max(start, 0 if window is None else length + 1 - window) // size
            for start, length in zip(starts, self._lengths(segment), strict=True)
        ]
        counts = [end - first for first, end in zip(firsts, ends, strict=True)]
        pages = torch.tensor(firsts, device=device)[:, None] + torch.arange(max(counts), device=device)  # (b, p)
        positions = pages[..., None] * size + torch.arange(size, device=device)  # (b, p, page_size)
        pages = table[rows[:, None], pages.clamp(max=table.shape[1] - 1)]
        view = segment.views[group, window] = View(pages, counts, positions.flatten(1))
        return view

    def _lengths(self, segment: Segment) -> list[int]:
        """Committed tokens of each request, on the host. A prompt's bounds are exact."""
        metadata = self.metadata
        requests = segment.requests
        if metadata.phase == "prefill":
            return [bound - count for bound, count in zip(metadata.kv_bounds[requests], segment.counts, strict=True)]
        return metadata.lengths[requests].tolist()  # sync

    def _shares(self, layer: AttentionLayer, mask: Mask, segment: Segment) -> list[Share]:
        """The share of each request of the segment."""
        key = self.groups[layer.id], self._kind(layer, mask, segment)
        if key not in segment.shares:
            view = self._view(layer, segment)
            bias = self._bias(layer, mask, segment)
            shares = []
            start = 0
            for index, count in enumerate(segment.counts):
                pages = view.pages[index, : view.counts[index]]
                share_bias = None
                if bias is not None:
                    share_bias = bias[index, None, :, : count * key[1].stacked, : len(pages) * self.page_size]
                shares.append(Share(slice(start, start + count), pages[None], share_bias))
                start += count
            segment.shares[key] = shares
        return segment.shares[key]

    def _kind(self, layer: AttentionLayer, mask: Mask, segment: Segment) -> Kind:
        window = layer.spec.window
        *_, G, _ = self.layers[layer.id].shape
        if not _is_plain(layer):
            return Kind(mask, window, 1, torch.float32)
        by_head = self.layers[layer.id].is_cuda and (len(segment.counts) == 1 or len(set(segment.counts)) > 1)
        return Kind(mask, window, 1 if by_head else layer.spec.num_heads // G, self.query_dtype)

    def _bias(self, layer: AttentionLayer, mask: Mask, segment: Segment) -> Tensor | None:
        """(b, 1, N or N * Q / G, S): 0 where a query sees a key, -inf elsewhere. None: of a whole prompt on a GPU,
        whose kernel knows what is causal."""
        kind = self._kind(layer, mask, segment)
        if segment.is_whole and self.layers[layer.id].is_cuda and kind[:2] == ("causal", None) and _is_plain(layer):
            return None
        if kind in segment.biases:
            return segment.biases[kind]
        positions = self._view(layer, segment).positions  # (b or 1, S) of the keys
        metadata = self.metadata
        first_node = metadata.first_node
        device = positions.device
        nodes = positions - metadata.lengths[segment.requests, None]  # (b, S): which node a key is; below 0 committed
        queries = torch.arange(first_node, first_node + segment.max_queries, device=device)
        ancestors = metadata.ancestors[segment.requests] if metadata.ancestors is not None else None
        ends = first_node + torch.tensor(segment.counts, device=device)[:, None]
        is_visible = (nodes < ends)[:, None]  # (b, N, S) with the next line; one query sees all tokens up to its own
        if segment.max_queries > 1 or kind.mask != "causal" or kind.window is not None:
            is_visible = is_visible & sees(nodes, queries, ancestors, kind.mask, kind.window)
        bias = torch.zeros(is_visible.shape, dtype=kind.dtype, device=device).masked_fill_(~is_visible, -torch.inf)
        segment.biases[kind] = bias[:, None].repeat_interleave(kind.stacked, dim=2)
        return segment.biases[kind]


def _is_plain(layer: AttentionLayer) -> bool:
    """Whether torch's kernels compute what the layer asks for."""
    return layer.spec.softcap is None and layer.sinks is None
