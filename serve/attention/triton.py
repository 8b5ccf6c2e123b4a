"""Attention by our own Triton kernels. They plan nothing on the host, so a pass is one CUDA graph."""

from torch import Tensor

from slipstream.kernels.attention.ragged import plan_work, ragged_attention
from slipstream.kernels.attention.tree import MAX_HEAD_DIM, tree_attention
from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.serve.attention import base


class Backend(base.Backend):
    """Takes ragged passes, and others where all requests have as many queries, at most 64 with earlier nodes; `write`
    takes any number."""

    needs_host_lengths = False
    phases = frozenset({"verify", "draft"})

    @classmethod
    def fault(cls, kv: base.KVFormat) -> str:
        if kv.head_dims[-1] > MAX_HEAD_DIM:
            return f"it has no kernels for head dim {kv.head_dims[-1]}, only up to {MAX_HEAD_DIM}"
        return super().fault(kv)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        metadata, (keys, values) = self.metadata, self.layers[layer.id]  # (num_pages, page_size, G, D)
        if metadata.segments is not None:
            return self._attend_ragged(self.rotate_and_store(q, k, v, layer), layer, mask)
        N, spec = metadata.query_lens[0], layer.spec
        assert set(metadata.query_lens) == {N}, metadata.query_lens
        q = self.rotate_and_store(q, k, v, layer)
        pages = metadata.state.pages[self.groups[layer.id]]
        requests = pages, metadata.requests, metadata.lengths, metadata.ancestors
        nodes = q.unflatten(0, (-1, N))
        out = tree_attention(
            nodes,
            keys,
            values,
            *requests,
            mask,
            spec.score_scale,
            first_node=metadata.first_node,
            window=spec.window,
        )
        assert isinstance(out, Tensor)
        return out.flatten(0, 1)

    def _attend_ragged(self, q: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        """q (T, Q, D) rotated -> the same shape."""
        metadata, spec, (keys, values) = self.metadata, layer.spec, self.layers[layer.id]
        assert metadata.segments is not None
        key = len(q), spec.num_heads, spec.num_kv_heads, spec.head_dim, q.dtype
        if (*key, spec.window) not in metadata.works:  # layers that are alike share a plan
            metadata.works[*key, spec.window] = plan_work(metadata.segments, *key, window=spec.window)
        work, pages = metadata.works[*key, spec.window], metadata.state.pages[self.groups[layer.id]]
        where = pages, metadata.segments, metadata.ancestors
        return ragged_attention(q, keys, values, *where, mask, spec.score_scale, window=spec.window, work=work)
