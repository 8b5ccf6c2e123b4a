"""Attention of a target over packed documents, in training: every token sees its document up to itself.

A kernel takes all documents at once on a GPU, in bf16 and fp16 (torch's FlashAttention-2, Dao 2023, arXiv 2307.08691);
elsewhere they are attended one by one. Letters: T tokens, Q/G query and KV heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream.kernels.attention.dense import add_sinks, dense_attention
from slipstream.kernels.attention.packed import takes
from slipstream.kernels.kv.rope import rotate
from slipstream.kernels.norm import norm_heads
from slipstream.models.layers.attention import Attention, AttentionLayer, Mask
from slipstream.models.layers.recurrence import Record, RecurrentMixer, scan, zero_state
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.models.targets.config import AttentionSpec, RopeConfig


class PackedAttention(Attention):
    """Call `plan` for each batch of rows, then run the target."""

    def __init__(self) -> None:
        self._ropes: dict[tuple[RopeConfig, int], RotaryEmbedding] = {}
        self._length = 0  # positions of their tables
        self._latest: dict[tuple[int | None, int, int], tuple[int, Tensor, Tensor]] = {}  # layer, k and v, by kind

    def plan(self, positions: Tensor) -> None:
        """positions (B, S) of the rows' tokens, from 0 in each document; padding tokens are documents of one."""
        self.max_tokens = positions.shape[1]  # of a document
        self.positions = positions.flatten()
        starts = (self.positions == 0).nonzero().flatten().int()  # sync
        self.ends = torch.cat((starts, starts.new_tensor([len(self.positions)])))  # (documents + 1,), from 0
        if self.max_tokens > self._length:
            self._length = self.max_tokens
            self._ropes.clear()

    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        raise AssertionError("a target's rows all ask")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        """q (T, Q, D), k and v (T, G, D) -> (T, Q, D)."""
        assert mask == "causal"
        spec = layer.spec
        rope = self._rope(layer.spec, q.device)
        is_last = layer.norms is not None and layer.norms.last
        if not is_last:
            q, k, v = norm_heads(q, k, v, layer.norms)
        if rope.query_scales is not None:
            q = q.float() * rope.query_scales[self.positions, None, None]
        q, k = (rotate(x, rope.cos, rope.sin, self.positions, v.dtype) for x in (q, k))
        if is_last:
            q, k, v = norm_heads(q, k, v, layer.norms)
        k, v = self._shared(k, v, layer)
        if q.is_cuda and takes(v) and spec.softcap is None:
            return self._attend_all(q, k, v, layer)
        return self._attend_each(q, k, v, layer)

    def _shared(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """k and v, or those of the layer that it reads: the last one with heads and a window like its own."""
        spec = layer.spec
        kind = spec.window, spec.num_kv_heads, spec.head_dim
        if spec.kv_source is None:
            self._latest[kind] = layer.id, k, v
        source, k, v = self._latest[kind]
        assert source in (spec.kv_source, layer.id)
        return k, v

    def recur(self, records: Record, layer: RecurrentMixer) -> Tensor:
        """Each document from an empty state, as a prompt; all documents at once."""
        starts = self.ends[:-1].long()
        counts = self.ends.diff()
        rows = starts[:, None] + torch.arange(int(counts.max()), device=starts.device)  # sync
        rows = rows.clamp(max=len(self.positions) - 1)
        state = zero_state(layer.spec.state_shapes, len(starts), starts.device)
        documents = {name: values[rows] for name, values in records.items()}
        outputs = scan(layer, state, documents, counts, counts, torch.zeros_like(counts)).outputs
        return outputs[(self.positions == 0).cumsum(0) - 1, self.positions]

    def _rope(self, spec: AttentionSpec, device: torch.device) -> RotaryEmbedding:
        key = (spec.rope, spec.head_dim)
        if key not in self._ropes:
            self._ropes[key] = RotaryEmbedding(spec.rope, spec.head_dim, self._length).to(device)
        return self._ropes[key]

    def _attend_all(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        spec = layer.spec
        sinks = layer.sinks
        left = None if spec.window is None else spec.window - 1
        ends = self.ends
        length = self.max_tokens
        dropout = 0.0
        is_causal = True
        has_debug_mask = False
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            q.contiguous(),
            k,
            v.contiguous(),
            ends,
            ends,
            length,
            length,
            dropout,
            is_causal,
            has_debug_mask,
            scale=spec.score_scale,
            window_size_left=left,
        )
        return output if sinks is None else add_sinks(output, lse.t(), sinks)

    def _attend_each(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        spec = layer.spec
        sinks = layer.sinks
        output = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # the result for a document of one token
        ends = self.ends.tolist()
        for start, end in zip(ends, ends[1:], strict=False):
            if end > start + 1 or sinks is not None:
                q_own, k_own, v_own = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
                if spec.softcap is not None or sinks is not None:
                    output[start:end] = _attend_densely(q_own[0], k_own[0], v_own[0], layer)
                    continue
                is_narrow = spec.window is not None and end - start > spec.window
                mask = _band(end - start, spec, q.device) if is_narrow else None
                options: dict[str, Any] = {"is_causal": mask is None, "scale": spec.score_scale, "enable_gqa": True}
                attended = scaled_dot_product_attention(q_own, k_own, v_own, mask, **options)
                output[start:end] = attended[0].transpose(0, 1)
        return output


def _attend_densely(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """q (Q, count, D), k and v (G, count, D) -> (count, Q, D), with a soft cap or sinks. The queries of a KV head at a
    time."""
    spec = layer.spec
    group = q.shape[0] // k.shape[0]
    visible = _band(q.shape[1], spec, q.device)
    bias = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, -torch.inf)
    heads = []
    for index, queries in enumerate(q.split(group)):
        sinks = None if layer.sinks is None else layer.sinks[index * group : (index + 1) * group, None]
        heads.append(dense_attention(queries, k[index], v[index], bias, spec.score_scale, spec.softcap, sinks))
    return torch.cat(heads).transpose(0, 1)


def _band(count: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """(count, count) bool: what each token sees."""
    places = torch.arange(count, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < (spec.window or count))
