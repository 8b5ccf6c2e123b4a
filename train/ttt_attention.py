"""Attention of training-time test: at step s a row sees its document's step-0 keys up to its own, and one key per later
step, its own; one softmax over all. Every step turns the rotary position by one.

On a GPU, in bf16 and fp16, one kernel takes the step-0 keys of all rows at once; elsewhere a product takes them
document by document.
Letters (train/ttt.py): N asking rows, C context rows, K = N + C keys, S own keys, Q/G query and KV heads, R = Q / G,
D head dim.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from slipstream.kernels.norm import HeadNorms, norm_heads
from slipstream.kernels.packed_attention import KeyValue, Runs, packed_attention, takes
from slipstream.kernels.rope import rotate
from slipstream.models.layers import Mask, RotaryEmbedding
from slipstream.train.ttt import Rows


class TTTAttention(ABC):
    """Of one pass over `rows`. Call order: write (context rows), then per step attend (asking rows) and next_step."""

    def __init__(self, rows: Rows, rope: RotaryEmbedding) -> None:
        self.rows = rows
        self.rope = rope
        self.step = 0
        self.context: KeyValue | None = None  # (C, G, D) each
        self.shared: KeyValue | None = None  # of step 0 (K, G, D), in reading order
        self.own: list[KeyValue] = []  # of each later step (N, G, D)

    def next_step(self) -> None:
        self.step += 1

    @torch.compiler.disable  # a compiled draft stops here, and need not be compiled again for every step
    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        """k and v (C, G, D) of the context rows."""
        assert layer == 0
        self.context = self.turn(k, self.rows.context_positions, v.dtype), v

    @torch.compiler.disable
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
        """q (N, Q, D), k and v (N, G, D) of the asking rows -> (N, Q, D)."""
        assert layer == 0
        assert mask == "causal"
        assert window is None
        q, k = norm_heads(q, k, norms)
        q, k = (self.turn(x, self.rows.asking_positions + self.step, v.dtype) for x in (q, k))
        if self.step == 0:
            assert self.context is not None
            context_k, context_v = self.context
            self.shared = self.in_reading_order(context_k, k), self.in_reading_order(context_v, v)
        else:
            self.own.append((k, v.contiguous()))  # a view of the projection would keep all of that
        assert self.shared is not None
        return self.compute(q, *self.shared)

    def turn(self, x: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return rotate(x, self.rope.cos, self.rope.sin, positions, dtype)

    def in_reading_order(self, context: Tensor, asking: Tensor) -> Tensor:
        return torch.cat((context, asking)).index_select(0, self.rows.keys)

    @abstractmethod
    def compute(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (N, Q, D) over the step-0 keys and values (K, G, D) and `own`: (N, Q, D)."""


class DocumentTTTAttention(TTTAttention):
    """All scores of a document at once."""

    def compute(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = (q * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))  # (N, G, R, D)
        if self.step == 0:
            self.biases = self.make_biases(q.shape[2], q.dtype)  # per document (N * R, K): 0 where visible, else -inf
        own_scores = q.new_empty(*q.shape[:3], 0)  # (N, G, R, S)
        if self.own:
            own_scores = torch.stack([(q * own_k.unsqueeze(2)).sum(-1) for own_k, _ in self.own], dim=-1)
        asked = (x.split(self.rows.num_asking) for x in (q, own_scores))
        seen = (x.split(self.rows.num_keys) for x in (k, v))
        documents = zip(*asked, *seen, self.biases, strict=True)
        outputs, weights = zip(*(attend_document(*document) for document in documents), strict=True)
        output, own_weights = torch.cat(outputs), torch.cat(weights)
        for index, (_, own_v) in enumerate(self.own):
            output = output + own_weights[..., index, None] * own_v.unsqueeze(2)
        return output.flatten(1, 2)

    def make_biases(self, heads: int, dtype: torch.dtype) -> list[Tensor]:
        keys = self.in_reading_order(self.rows.context, self.rows.asking)
        splits = zip(self.rows.asking.split(self.rows.num_asking), keys.split(self.rows.num_keys), strict=True)
        biases = []
        for asking, seen in splits:
            bias = torch.zeros(len(asking), len(seen), dtype=dtype, device=keys.device)
            bias.masked_fill_(seen > asking.unsqueeze(1), -torch.inf)
            biases.append(bias.repeat_interleave(heads, dim=0))
        return biases


def attend_document(q: Tensor, own_scores: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """One document: q (N, G, R, D) scaled, own_scores (N, G, R, S), k and v (K, G, D), bias (N * R, K).

    Returns the step-0 keys' part of the output (N, G, R, D) and the weights of the own steps (N, G, R, S).
    """
    num_rows, groups, heads, size = q.shape
    num_keys = len(k)
    folded = q.transpose(0, 1).reshape(groups, num_rows * heads, size)  # heads of a group share its keys
    scores = torch.baddbmm(bias.expand(groups, -1, -1), folded, k.permute(1, 2, 0))  # (G, N * R, K)
    own_scores = own_scores.transpose(0, 1).reshape(groups, num_rows * heads, -1)
    scores, dtype = torch.cat((scores, own_scores), dim=-1), torch.promote_types(v.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=dtype).to(v.dtype)
    output = weights[..., :num_keys] @ v.transpose(0, 1)
    return (
        output.view(groups, num_rows, heads, size).transpose(0, 1),
        weights[..., num_keys:].view(groups, num_rows, heads, -1).transpose(0, 1),
    )


class PackedTTTAttention(DocumentTTTAttention):
    """All documents at once; no scores are kept, and none outside a document is computed. What its kernel does not
    take, fp32 above all, goes document by document."""

    def __init__(self, rows: Rows, rope: RotaryEmbedding) -> None:
        super().__init__(rows, rope)
        self.runs = Runs.of(rows.runs, len(rows.keys), rows.keys.device)

    def compute(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, self.runs, self.own) if takes(v) else super().compute(q, k, v)


def ttt_attention(rows: Rows, rope: RotaryEmbedding) -> TTTAttention:
    """`rows` on the device."""
    kind = PackedTTTAttention if rows.asking.is_cuda else DocumentTTTAttention
    return kind(rows, rope)
