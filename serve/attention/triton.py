"""Attention by our own Triton kernels. They plan nothing on the host, so a pass is one CUDA graph."""

from torch import Tensor

from slipstream.kernels.attention.paged import MAX_HEAD_DIM
from slipstream.kernels.attention.ragged import plan_work, ragged_attention
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
        if metadata.segments is None:
            N = metadata.query_lens[0]
            assert set(metadata.query_lens) == {N}, metadata.query_lens
            out = self.attend_nodes(q, layer, mask, sinks=layer.sinks, scales=self.scales[layer.id])
            assert isinstance(out, Tensor)
            return out.flatten(0, 1)
        spec = layer.spec
        keys, values = self.layers[layer.id]
        return ragged_attention(
            q,
            keys,
            values,
            metadata.state.pages[self.groups[layer.id]],
            metadata.segments,
            metadata.ancestors,
            mask,
            spec.score_scale,
            window=spec.window,
            softcap=spec.softcap,
            sinks=layer.sinks,
            scales=self.scales[layer.id],
            paths=metadata.paths,
            work=metadata.works[self._geometry(spec)],
            is_old_plan=True,  # the tokens' embedding came after it
        )

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
