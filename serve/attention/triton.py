"""Attention by our own Triton kernels. They plan nothing on the host, so a round is one CUDA graph."""

from torch import Tensor

from slipstream.kernels.norm import HeadNorms
from slipstream.kernels.rope import rotate_and_store, store
from slipstream.kernels.tree_attention import MAX_HEAD_DIM, tree_attention
from slipstream.models.layers import Mask, RotaryEmbedding
from slipstream.serve.attention.base import KVFormat
from slipstream.serve.batch import Batch


class Backend:
    """All requests of a pass have as many queries, at most 64 with earlier nodes; `write` takes any number."""

    is_ready = True
    needs_host_lengths = False
    phases = frozenset({"verify", "draft"})

    def __init__(self, cache: Tensor, rope: RotaryEmbedding) -> None:
        self.cache = cache
        self.flat = cache.flatten(2, 3)  # (L, 2, slots, G, D), a view
        self.rope = rope

    @classmethod
    def fault(cls, kv: KVFormat) -> str:
        if kv.head_dim > MAX_HEAD_DIM:
            return f"it has no kernels for head dim {kv.head_dim}, only up to {MAX_HEAD_DIM}"
        return ""

    @classmethod
    def prepare(cls, kv: KVFormat) -> None:
        pass

    def plan(self, batch: Batch) -> None:
        self.batch = batch

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        batch, (keys, values) = self.batch, self.flat[layer]
        store(k, v, self.rope.cos, self.rope.sin, batch.positions, batch.slots, keys, values)

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
        batch, (keys, values) = self.batch, self.flat[layer]
        N, D = batch.query_lens[0], q.shape[-1]
        assert set(batch.query_lens) == {N}, batch.query_lens
        where = self.rope.cos, self.rope.sin, batch.positions, batch.slots, keys, values
        q = rotate_and_store(q, k, v, *where, norms)
        keys, values = self.cache[layer]  # (num_pages, page_size, G, D)
        requests = batch.state.pages, batch.rows, batch.lengths, batch.ancestors
        nodes = q.unflatten(0, (-1, N))
        out = tree_attention(nodes, keys, values, *requests, mask, D**-0.5, first_node=batch.first_node, window=window)
        assert isinstance(out, Tensor)
        return out.flatten(0, 1)
