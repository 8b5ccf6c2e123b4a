"""Attention by our own Triton kernels. They plan nothing on the host, so a round is one CUDA graph."""

from torch import Tensor

from slipstream.kernels.attention.tree import MAX_HEAD_DIM, tree_attention
from slipstream.kernels.norm import HeadNorms
from slipstream.models.layers.attention import Mask
from slipstream.serve.attention import base


class Backend(base.Backend):
    """All requests of a pass have as many queries, at most 64 with earlier nodes; `write` takes any number."""

    needs_host_lengths = False
    phases = frozenset({"verify", "draft"})

    @classmethod
    def fault(cls, kv: base.KVFormat) -> str:
        if kv.head_dim > MAX_HEAD_DIM:
            return f"it has no kernels for head dim {kv.head_dim}, only up to {MAX_HEAD_DIM}"
        return ""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        mask: Mask,
        window: int | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        metadata, (keys, values) = self.metadata, self.cache[layer]  # (num_pages, page_size, G, D)
        N, D = metadata.query_lens[0], q.shape[-1]
        assert set(metadata.query_lens) == {N}, metadata.query_lens
        q = self.rotate_and_store(q, k, v, layer, norms)
        requests = metadata.state.pages, metadata.requests, metadata.lengths, metadata.ancestors
        nodes = q.unflatten(0, (-1, N))
        out = tree_attention(
            nodes, keys, values, *requests, mask, D**-0.5, first_node=metadata.first_node, window=window
        )
        assert isinstance(out, Tensor)
        return out.flatten(0, 1)
