"""Attention by our own Triton kernels. They plan nothing on the host, so a round is one CUDA graph."""

from torch import Tensor

from slipstream.kernels.attention.tree import MAX_HEAD_DIM, tree_attention
from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.serve.attention import base


class Backend(base.Backend):
    """All requests of a pass have as many queries, at most 64 with earlier nodes; `write` takes any number."""

    needs_host_lengths = False
    phases = frozenset({"verify", "draft"})

    @classmethod
    def fault(cls, kv: base.KVFormat) -> str:
        if kv.head_dims[-1] > MAX_HEAD_DIM:
            return f"it has no kernels for head dim {kv.head_dims[-1]}, only up to {MAX_HEAD_DIM}"
        return super().fault(kv)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        metadata, (keys, values) = self.metadata, self.layers[layer.id]  # (num_pages, page_size, G, D)
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
