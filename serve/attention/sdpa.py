"""Attention with torch's scaled_dot_product_attention over gathered pages: the CPU's backend and the reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from slipstream.kernels.norm import HeadNorms, rms_norm_each
from slipstream.kernels.speculation.verify import unpack
from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.serve.attention import base
from slipstream.serve.runner.batch import AttentionMetadata

# Without cuDNN, which prepares about 40 ms for every new prompt length.
GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(slots=True)
class Segment:
    """Requests start..end of a batch, with the same number of queries each, attended in one call."""

    requests: slice
    queries: slice  # of the packed tokens
    count: int  # queries per request
    pages: Tensor  # (b, p) int64
    is_whole: bool  # one request without committed tokens: its queries are its whole context
    # (b, 1, count or Q / G * count, p * page_size), 0 or -inf, by mask and window
    biases: dict[tuple[Mask, int | None], Tensor] = field(default_factory=dict)


class Backend(base.Backend):
    needs_host_lengths = True  # the host's bounds are the shapes of what it gathers
    phases = frozenset(base.PHASES)

    def __init__(self, cache: Tensor, rope: RotaryEmbedding) -> None:
        super().__init__(cache, rope)
        self.gathered = cache.new_empty(0)

    def plan(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata
        if not self.cache.is_cuda:
            self._find_angles(metadata.positions)
        counts = metadata.query_lens
        if len(set(counts)) == 1:
            self.segments = [self._segment(0, len(counts), 0)]
            return
        starts = [sum(counts[:index]) for index in range(len(counts))]
        self.segments = [self._segment(index, index + 1, start) for index, start in enumerate(starts)]

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        if k.is_cuda:
            super().write(k, v, layer)
        else:
            self._store(self._rotate(k), v, layer.id)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        if q.is_cuda:  # one launch instead of a dozen
            q = self.rotate_and_store(q, k, v, layer)
        else:
            q, k = self._norm_and_rotate(q, k, layer.norms)
            self._store(k, v, layer.id)
        parts = [self._attend(q[one.queries], layer.id, mask, layer.spec.window, one) for one in self.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _find_angles(self, positions: Tensor) -> None:
        """Of a pass on the CPU; the first half of `sin` is negated, for `_rotate`."""
        self.cos, self.sin = self.rope.cos_sin(positions)
        self.sin[..., : self.sin.shape[-1] // 2].neg_()

    def _norm_and_rotate(self, q: Tensor, k: Tensor, norms: HeadNorms | None) -> Sequence[Tensor]:
        """q (T, Q, D) and k (T, G, D), each operator on both at once: of few tokens the operators take the time."""
        sizes = q.shape[1], k.shape[1]
        heads = torch.cat((q, k), dim=1)  # (T, Q + G, D)
        if norms is not None:
            weights = norms.q.expand(sizes[0], -1), norms.k.expand(sizes[1], -1)
            heads = rms_norm_each(heads, torch.cat(weights), norms.eps)
        return self._rotate(heads).split(sizes, dim=1)

    def _rotate(self, x: Tensor) -> Tensor:
        """rotate_halves (kernels/kv/rope.py) of x (T, heads, D), in three operators: `sin` has the sign."""
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin).to(x.dtype)

    def _store(self, k: Tensor, v: Tensor, layer: int) -> None:
        keys, values = self.flat[layer]
        keys.index_copy_(0, self.metadata.slots, k)
        values.index_copy_(0, self.metadata.slots, v)

    def _attend(self, q: Tensor, layer: int, mask: Mask, window: int | None, segment: Segment) -> Tensor:
        """q (b * count, Q, D) -> the same shape."""
        b, p = segment.pages.shape
        page_size, G, D = self.cache.shape[3:]
        kv = self._gather(layer, segment.pages.flatten())
        k, v = kv.view(2, b, p * page_size, G, D).transpose(2, 3).unbind()  # (b, G, S, D) each
        group = q.shape[1] // G
        q = q.view(b, segment.count, G, group, D).permute(0, 2, 3, 1, 4)  # (b, G, Q / G, count, D)
        if b == 1 and q.is_cuda:
            return self._attend_one(q[0], k, v, mask, window, segment)
        if (mask, window) not in segment.biases:
            segment.biases[mask, window] = self._bias(mask, window, segment, q.dtype).repeat(1, 1, group, 1)
        q = q.reshape(b, G, group * segment.count, D)
        out = scaled_dot_product_attention(q, k, v, attn_mask=segment.biases[mask, window])
        out = out.view(b, G, group, segment.count, D).permute(0, 3, 1, 2, 4)
        return out.reshape(b * segment.count, G * group, D)

    def _gather(self, layer: int, pages: Tensor) -> Tensor:
        """Copies of a layer's pages (P,): (2, P, page_size, G, D).

        On a CPU all layers use one buffer: the allocator returns large blocks to the system, which clears every page of
        the next one.
        """
        cache = self.cache[layer]
        if cache.is_cuda:
            return cache.index_select(1, pages)
        shape = 2, len(pages), *cache.shape[2:]
        if self.gathered.numel() < math.prod(shape):
            self.gathered = cache.new_empty(math.prod(shape))
        return torch.index_select(cache, 1, pages, out=self.gathered[: math.prod(shape)].view(shape))

    def _attend_one(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: int | None, segment: Segment) -> Tensor:
        """One request on a GPU, where a prompt's bias is large: query heads that share a KV head become the
        batch instead of being stacked along the queries. q (G, Q / G, count, D), k and v (1, G, S, D) -> (count, Q, D).

        Not (G, Q / G, ...): with head stride 0 in the keys, torch's memory-efficient kernel reads a last block of one
        query (of 65, 129, ...) as one query per head and returns nonsense.
        """
        q, group = q.transpose(0, 1), q.shape[1]
        k, v = k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1)
        with sdpa_kernel(GPU_KERNELS):
            if segment.is_whole and mask == "causal" and window is None:
                k, v = k[:, :, : segment.count], v[:, :, : segment.count]
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                if (mask, window) not in segment.biases:
                    segment.biases[mask, window] = self._bias(mask, window, segment, q.dtype)
                out = scaled_dot_product_attention(q, k, v, attn_mask=segment.biases[mask, window])
        return out.permute(2, 1, 0, 3).flatten(1, 2)

    def _segment(self, start: int, end: int, first_query: int) -> Segment:
        metadata, page_size = self.metadata, self.cache.shape[3]
        count = metadata.query_lens[start]
        num_pages = -(-max(metadata.kv_bounds[start:end]) // page_size)
        pages = metadata.state.pages[metadata.requests[start:end], :num_pages]
        queries = slice(first_query, first_query + count * (end - start))
        is_whole = end - start == 1 and metadata.kv_bounds[start] == count
        return Segment(slice(start, end), queries, count, pages, is_whole)

    def _bias(self, mask: Mask, window: int | None, segment: Segment, dtype: torch.dtype) -> Tensor:
        """(b, 1, count, S): 0 where a query sees a key, -inf elsewhere. Keys are in slot order, not in depth order."""
        lengths = self.metadata.lengths[segment.requests, None, None]  # (b, 1, 1)
        size = segment.pages.shape[1] * self.cache.shape[3]
        keys = torch.arange(size, device=lengths.device)
        first, end = self.metadata.first_node, self.metadata.first_node + segment.count
        queries = torch.arange(first, end, device=lengths.device)[:, None]
        if mask == "causal":
            visible = keys <= lengths + queries
        elif mask == "block":
            visible = (keys < lengths + end).expand(-1, segment.count, -1)
        else:
            visible = self._tree_visible(keys, lengths, segment)
        if window is not None:
            assert mask == "causal", "only then slots are positions"
            visible = visible & (keys > lengths + queries - window)
        bias = torch.zeros(visible.shape, dtype=dtype, device=lengths.device)
        return bias.masked_fill_(~visible, -torch.inf)[:, None]

    def _tree_visible(self, keys: Tensor, lengths: Tensor, segment: Segment) -> Tensor:
        assert self.metadata.ancestors is not None
        end = self.metadata.first_node + segment.count  # nodes
        ancestors = unpack(self.metadata.ancestors[segment.requests], end)  # (b, count, end)
        node = keys - lengths  # (b, 1, S): which node a key is; negative for committed tokens
        in_tree = (node >= 0) & (node < end)
        index = node.clamp(0, end - 1).expand(-1, segment.count, -1)
        return (node < 0) | (in_tree & ancestors.gather(2, index))
