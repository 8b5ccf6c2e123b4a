"""Attention by our own Triton kernels. They plan nothing on the host, so a pass is one CUDA graph."""

from torch import Tensor

from slipstream.kernels.attention.paged import MAX_HEAD_DIM
from slipstream.kernels.attention.ragged import Segments, plan_work, ragged_attention
from slipstream.kernels.attention.tree import tree_attention
from slipstream.models.layers.attention import AttentionLayer, Mask
from slipstream.models.targets.config import AttentionSpec
from slipstream.serve.attention import base
from slipstream.serve.runner.batch import AttentionMetadata


class Backend(base.Backend):
    """Takes ragged passes, and others where all requests have as many queries, at most 64 with earlier nodes; `write`
    takes any number."""

    needs_host_lengths = False
    is_exact = reads_codes = True
    phases = frozenset({"verify", "draft"})
    features = gpu_features = frozenset(base.FEATURES)

    @classmethod
    def fault(cls, kv: base.KVFormat) -> str:
        if kv.head_dims[-1] > MAX_HEAD_DIM:
            return f"it has no kernels for head dim {kv.head_dims[-1]}, only up to {MAX_HEAD_DIM}"
        return super().fault(kv)

    def attend_stored(self, q: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        metadata = self.metadata
        keys, values = self.layers[layer.id]  # (num_pages, page_size, G, D)
        if metadata.segments is not None:
            return self._attend_ragged(metadata.segments, q, layer, mask)
        N = metadata.query_lens[0]
        spec = layer.spec
        assert set(metadata.query_lens) == {N}, metadata.query_lens
        pages = metadata.state.pages[self.groups[layer.id]]
        nodes = q.unflatten(0, (-1, N))
        out = tree_attention(
            nodes,
            keys,
            values,
            pages,
            metadata.requests,
            metadata.lengths,
            metadata.ancestors,
            mask,
            spec.score_scale,
            first_node=metadata.first_node,
            window=spec.window,
            softcap=spec.softcap,
            sinks=layer.sinks,
            scales=self.scales[layer.id],
        )
        assert isinstance(out, Tensor)
        return out.flatten(0, 1)

    def plan_reads(self, metadata: AttentionMetadata) -> None:
        """Plans the tiles of a ragged pass, before its tokens are embedded: see `ragged_attention`."""
        super().plan_reads(metadata)
        if metadata.segments is not None:
            for key in {self._geometry(spec) for spec in self.kv.specs}:  # layers that are alike share a plan
                num_heads, num_kv_heads, head_dim, window = key
                num_rows = len(metadata.positions)
                metadata.works[key] = plan_work(
                    metadata.segments, num_rows, num_heads, num_kv_heads, head_dim, self.kv.query_dtype, window=window
                )

    def _geometry(self, spec: AttentionSpec) -> tuple[int, int, int, int | None]:
        return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window

    def _attend_ragged(self, segments: Segments, q: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        """q (T, Q, D) rotated -> the same shape."""
        metadata = self.metadata
        spec = layer.spec
        keys, values = self.layers[layer.id]
        pages = metadata.state.pages[self.groups[layer.id]]
        work = metadata.works[self._geometry(spec)]
        return ragged_attention(
            q,
            keys,
            values,
            pages,
            segments,
            metadata.ancestors,
            mask,
            spec.score_scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=layer.sinks,
            scales=self.scales[layer.id],
            paths=metadata.paths,
            work=work,
            is_old_plan=True,  # the tokens' embedding came after it
        )
