"""Training-time test (EAGLE-3, arXiv 2503.01840): the draft's own chain, run at every row of a packed batch at once.

Index t of step s reads token t+1+s and the state of step s-1 (at s = 0 the target's features at t) and predicts token
t+2+s. Row t asks if tokens t+1 (a possible root) and t+2 are supervised and of t's document; it counts at step s if all
of t+1 .. t+2+s are. Rows that ask run through the whole draft; earlier rows of their documents only leave their keys.

Letters: N asking rows, C context rows, K = N + C keys, S own steps, Q/G query and KV heads, D head dim.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.models.layers import Mask, RotaryEmbedding, rotate
from slipstream.train.batches import Batch


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows are indices into the flattened batch, ascending. Made on the host, so that nothing waits for a device."""

    asking: Tensor  # (N,) int64
    context: Tensor  # (C,) int64
    counts: Tensor  # (steps, N) bool: every token that step s reads or predicts at this row is supervised
    keys: Tensor  # (K,) int64: reading order of the concatenation [context, asking]
    asking_positions: Tensor  # (N,) int64 position in the document
    context_positions: Tensor  # (C,) int64
    num_asking: list[int]  # per document
    num_keys: list[int]  # per document

    def to(self, device: torch.device) -> "Rows":
        return replace(
            self,
            asking=self.asking.to(device),
            context=self.context.to(device),
            counts=self.counts.to(device),
            keys=self.keys.to(device),
            asking_positions=self.asking_positions.to(device),
            context_positions=self.context_positions.to(device),
        )


def find_rows(batch: Batch, num_steps: int) -> Rows:
    """`batch` on the host. It must hold at least one asking row, as every batch of PackedRows does."""
    supervised, documents = batch.supervised.flatten(), batch.documents.flatten()  # (B * S,)
    same = documents[2:] == documents[:-2]  # a document is contiguous: t and t+2 enclose t+1
    asking = (supervised[1:-1] & supervised[2:] & same).nonzero().squeeze(1)
    names, num_asking = documents[asking].unique_consecutive(return_counts=True)
    last_asking = torch.full((int(documents.max()) + 2,), -1)  # by document; the extra entry is padding's, number -1
    last_asking[names] = asking[num_asking.cumsum(0) - 1]
    is_key = torch.arange(len(documents)) <= last_asking[documents]
    keys = is_key.nonzero().squeeze(1)
    num_keys = documents[keys].unique_consecutive(return_counts=True)[1]
    context = is_key.index_fill(0, asking, False).nonzero().squeeze(1)
    positions = batch.positions.flatten()
    return Rows(
        asking=asking,
        context=context,
        counts=counting_rows(asking, num_steps),
        keys=torch.cat((context, asking)).argsort(),
        asking_positions=positions[asking],
        context_positions=positions[context],
        num_asking=num_asking.tolist(),
        num_keys=num_keys.tolist(),
    )


def counting_rows(asking: Tensor, num_steps: int) -> Tensor:
    """(S, N) bool: a row counts at step s if the s rows after it ask too, so if entry n + s is its s-th neighbour."""
    counts = torch.zeros(num_steps, len(asking), dtype=torch.bool)
    for step in range(min(num_steps, len(asking))):
        counts[step, : len(asking) - step] = asking[step:] == asking[: len(asking) - step] + step
    return counts


class TTTAttention:
    """Attention of one pass over `rows`: at step s a row sees its document's step-0 keys up to its own, and one key per
    later step, its own; one softmax over all. Every step turns the rotary position by one.

    Call order: write (context rows), then per step attend (asking rows) and next_step.
    """

    def __init__(self, rows: Rows, rope: RotaryEmbedding) -> None:
        self.rows = rows
        self.rope = rope
        self.step = 0
        self.context: tuple[Tensor, Tensor] | None = None
        self.keys: list[Tensor] = []  # per document (K, G, D), rotated
        self.values: list[Tensor] = []
        self.biases: list[Tensor] = []  # per document (N * R, K): 0 where visible, else -inf
        self.own: list[tuple[Tensor, Tensor]] = []  # per later step k, v (N, G, 1, D)

    def next_step(self) -> None:
        self.step += 1

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        """k and v (C, G, D) of the context rows."""
        assert layer == 0
        self.context = rotate(k, *self.rope.cos_sin(self.rows.context_positions)), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, mask: Mask, window: int | None = None) -> Tensor:
        """q (N, Q, D), k and v (N, G, D) of the asking rows -> (N, Q, D)."""
        assert layer == 0
        assert mask == "causal"
        assert window is None
        cos, sin = self.rope.cos_sin(self.rows.asking_positions + self.step)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q = (q * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))  # (N, G, R, D): R query heads per KV head
        if self.step == 0:
            self._store_step_0(k, v)
            self._make_biases(q.shape[2], q.dtype)
        else:
            self.own.append((k.unsqueeze(2), v.unsqueeze(2)))
        own_scores = q.new_empty(*q.shape[:3], 0)  # (N, G, R, steps so far)
        if self.own:
            own_scores = torch.stack([(q * own_k).sum(-1) for own_k, _ in self.own], dim=-1)
        asked = (x.split(self.rows.num_asking) for x in (q, own_scores))
        documents = zip(*asked, self.keys, self.values, self.biases, strict=True)
        outputs, weights = zip(*(attend_document(*document) for document in documents), strict=True)
        output, own_weights = torch.cat(outputs), torch.cat(weights)
        for index, (_, own_v) in enumerate(self.own):
            output = output + own_weights[..., index, None] * own_v
        return output.flatten(1, 2)

    def _store_step_0(self, k: Tensor, v: Tensor) -> None:
        assert self.context is not None
        for own, context, store in ((k, self.context[0], self.keys), (v, self.context[1], self.values)):
            store += torch.cat((context, own)).index_select(0, self.rows.keys).split(self.rows.num_keys)

    def _make_biases(self, heads: int, dtype: torch.dtype) -> None:
        keys = torch.cat((self.rows.context, self.rows.asking))[self.rows.keys]
        splits = zip(self.rows.asking.split(self.rows.num_asking), keys.split(self.rows.num_keys), strict=True)
        for asking, seen in splits:
            bias = torch.zeros(len(asking), len(seen), dtype=dtype, device=keys.device)
            bias.masked_fill_(seen > asking.unsqueeze(1), -torch.inf)
            self.biases.append(bias.repeat_interleave(heads, dim=0))


def attend_document(q: Tensor, own_scores: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """One document: q (N, G, R, D) scaled, own_scores (N, G, R, S), k and v (K, G, D), bias (N * R, K).

    Returns the step-0 keys' part of the output (N, G, R, D) and the weights of the own steps (N, G, R, S).
    """
    num_rows, groups, heads, size = q.shape
    num_keys = len(k)
    folded = q.transpose(0, 1).reshape(groups, num_rows * heads, size)  # heads of a group share its keys
    scores = torch.baddbmm(bias.expand(groups, -1, -1), folded, k.permute(1, 2, 0))  # (G, N * R, K)
    own_scores = own_scores.transpose(0, 1).reshape(groups, num_rows * heads, -1)
    weights = torch.softmax(torch.cat((scores, own_scores), dim=-1), dim=-1, dtype=torch.float32).to(v.dtype)
    output = weights[..., :num_keys] @ v.transpose(0, 1)
    return (
        output.view(groups, num_rows, heads, size).transpose(0, 1),
        weights[..., num_keys:].view(groups, num_rows, heads, -1).transpose(0, 1),
    )
