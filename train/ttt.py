"""Training-time test (EAGLE-3, arXiv 2503.01840): the draft's own chain, run at every row of a packed batch at once.

Index t of step s reads token t+1+s and the state of step s-1 (at s = 0 the target's states at t) and predicts token
t+2+s. Row t asks if tokens t+1 (a possible root) and t+2 are supervised and of t's document; it counts at step s if all
of t+1 .. t+2+s are. Rows that ask run through the whole draft; earlier rows of their documents only contribute keys.

At step s a row sees its document's step-0 keys up to its own, and one key per later step, its own; one softmax over
all. Every step advances the rotary position by one.

With several layers the upper ones read states of earlier rows, too, so these run through the draft as those that ask do
(`find_rows`, all_run), but no head reads them.

Processes may share rows (row_ranks.py): then N, M and C are a process's own, with its halo, and K those of all.

Letters: N asking rows, M of them taught, C context rows, K = N + C keys, S own keys, Q/G query and KV heads, R = Q / G,
D head dim.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kernels.attention.packed import KeyValue, Runs, packed_attention, takes
from slipstream.kernels.kv.rope import rotate
from slipstream.kernels.loss_kinds import Kind
from slipstream.kernels.norm import norm_heads
from slipstream.models.layers.attention import Attention, AttentionLayer, Mask
from slipstream.models.layers.rope import RotaryEmbedding
from slipstream.train.acceptance import count_accepted, walk_answers, walk_metrics
from slipstream.train.batches import Batch, moved, possible_roots
from slipstream.train.losses import TargetHead, distillation_loss
from slipstream.train.row_ranks import Gathering, RowGroup
from slipstream.train.state_source import target_states
from slipstream.train.text_noise import RowValues
from slipstream.train.training import DraftTraining, Metrics


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows are indices into the flattened batch, ascending. Built on the host: no synchronisation with a device."""

    asking: Tensor  # (N,) int64
    context: Tensor  # (C,) int64
    counts: Tensor  # (steps, M) bool: every token that step s reads or predicts at this row is supervised
    keys: Tensor  # (K,) int64: reading order of the concatenation [context, asking]
    asking_positions: Tensor  # (N,) int64 position in the document
    context_positions: Tensor  # (C,) int64
    num_asking: list[int]  # per document
    num_keys: list[int]  # per document
    runs: list[tuple[int, int, int]]  # neighbouring asking rows: how many, first key and number of keys of the last one
    weights: Tensor | None = None  # (steps, M) fp32 of the tokens that the steps predict, if some are not 1
    taught: Tensor | None = None  # (M,) the places in `asking` of rows that are taught; None: all N, and M = N
    gathering: Gathering | None = None  # of key rows, where processes share a row; `keys` are places among all of them

    def of_taught(self, x: Tensor) -> Tensor:
        """x (N, ...) -> (M, ...)."""
        return x if self.taught is None else x[self.taught]


def find_rows(batch: Batch, num_steps: int, *, all_run: bool = False, group: RowGroup | None = None) -> Rows:
    """`batch` on the host. It must hold at least one asking row, as every batch of PackedRows does. all_run: context
    rows run through the draft as if they asked, but are not taught. `group`: shares the rows; this process gets its
    part."""
    documents = batch.documents.flatten()  # (B * S,)
    asking = possible_roots(batch) - 1  # a document's first token is never supervised
    last_asking = torch.full((int(documents.max()) + 2,), -1)  # by document; the extra entry is padding's, number -1
    last_asking.scatter_reduce_(0, documents[asking], asking, "amax")
    is_key = torch.arange(len(documents)) <= last_asking[documents]
    keys = is_key.nonzero().squeeze(1)
    counts = counting_rows(asking, num_steps)
    weights = None
    if batch.weights is not None:
        predicted = asking + 2 + torch.arange(num_steps).unsqueeze(1)
        weights = token_at(batch.weights.flatten(), predicted)
    taught = None
    if all_run:
        taught = torch.searchsorted(keys, asking)
        asking = keys
    context = is_key.index_fill(0, asking, False).nonzero().squeeze(1)
    order = torch.cat((context, asking)).argsort()
    rows = rows_of(batch, asking, context, keys, keys=order, counts=counts, weights=weights, taught=taught)
    return rows if group is None else part_of_rows(batch, rows, group)


def rows_of(batch: Batch, asking: Tensor, context: Tensor, key_rows: Tensor, **fields: Any) -> Rows:
    """`key_rows` (K,): the keys' rows of the batch, ascending. `fields`: those that do not follow from these."""
    documents = batch.documents.flatten()
    positions = batch.positions.flatten()
    sizes = (documents[rows].unique_consecutive(return_counts=True)[1].tolist() for rows in (asking, key_rows))
    num_asking, num_keys = sizes
    return Rows(
        asking=asking,
        context=context,
        asking_positions=positions[asking],
        context_positions=positions[context],
        num_asking=num_asking,
        num_keys=num_keys,
        runs=find_runs(asking, key_rows, asking - positions[asking]),
        **fields,
    )


def part_of_rows(batch: Batch, batch_rows: Rows, group: RowGroup) -> Rows:
    """This process's part of `batch_rows`, those of the batch."""
    asking = batch_rows.asking
    counts = batch_rows.counts
    documents = batch.documents.flatten()
    num_steps, num_taught = counts.shape
    places = torch.arange(len(asking)) if batch_rows.taught is None else batch_rows.taught  # of rows that are taught
    parts = group.parts(num_taught)
    starts = [int(places[part.start]) if part.start else 0 for part in parts]
    owned = [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(asking)], strict=True)]
    contexts = [batch_rows.context[part.start : part.stop] for part in group.parts(len(batch_rows.context))]
    key_rows = [
        torch.cat((context, asking[part.start : part.stop])) for context, part in zip(contexts, owned, strict=True)
    ]
    part = parts[group.index]
    num_own = len(owned[group.index])
    begin = min(owned[group.index].start, len(asking) - 1)
    first = min(part.start, num_taught - 1)
    stop = max(min(part.stop + num_steps, num_taught), first + 1)  # with the halo, and one row at least
    local = asking[begin : max(begin + num_own, int(places[stop - 1]) + 1)]
    rows_of_all = torch.cat(key_rows)
    order = rows_of_all.argsort()
    order = order[torch.isin(documents[rows_of_all[order]], documents[local])]
    local_counts = counts[:, first:stop].clone()
    local_counts[:, len(part) :] = False
    return rows_of(
        batch,
        local,
        contexts[group.index],
        rows_of_all[order],
        counts=local_counts,
        keys=order,
        weights=None if batch_rows.weights is None else batch_rows.weights[:, first:stop],
        taught=None if batch_rows.taught is None else batch_rows.taught[first:stop] - begin,
        gathering=Gathering(group, [len(rows) for rows in key_rows], num_own),
    )


def find_runs(asking: Tensor, keys: Tensor, starts: Tensor) -> list[tuple[int, int, int]]:
    """Asking rows (N,) and key rows (K,), ascending; where each asking row's document starts (N,). Runs never cross
    documents: the last two rows of one do not ask."""
    is_first = torch.ones(len(asking) + 1, dtype=torch.bool)
    is_first[1:-1] = asking[1:] != asking[:-1] + 1
    bounds = is_first.nonzero().squeeze(1)
    first = bounds[:-1]
    last = bounds[1:] - 1
    columns = last - first + 1, torch.searchsorted(keys, starts[first]), asking[last] - starts[first] + 1
    return list(zip(*(column.tolist() for column in columns), strict=True))


def counting_rows(asking: Tensor, num_steps: int) -> Tensor:
    """(S, N) bool: a row counts at step s if the s rows after it ask too, so if entry n + s is its s-th neighbour."""
    counts = torch.zeros(num_steps, len(asking), dtype=torch.bool)
    for step in range(min(num_steps, len(asking))):
        counts[step, : len(asking) - step] = asking[step:] == asking[: len(asking) - step] + step
    return counts


class TTTAttention(Attention):
    """Attention of one pass over `rows`. Call order: write (context rows, if there are any), then per step attend of
    every layer (asking rows) and next_step.

    One kernel takes all documents at once on a GPU, in bf16 and fp16; elsewhere products take them one by one.
    """

    def __init__(self, rows: Rows, rope: RotaryEmbedding, *, is_packed: bool | None = None) -> None:
        """`rows` on the device. `is_packed`: whether to use the kernel where it takes the dtype; default: on a GPU."""
        self.rows = rows
        self.rope = rope
        self.step = 0
        self.context: KeyValue | None = None  # (C, G, D) each
        self.shared: dict[int, KeyValue] = {}  # by layer, of step 0 (K, G, D), in reading order
        self.own: dict[int, list[KeyValue]] = {}  # by layer, of each later step (N, G, D)
        self.begun: dict[int, int] = {}  # by layer, its first step, which is its step 0
        self.biases: dict[tuple[int | None, int], list[Tensor]] = {}  # by window and step: see make_biases
        self.runs: Runs | None = None
        if rows.asking.is_cuda if is_packed is None else is_packed:
            self.runs = Runs.of(rows.runs, len(rows.keys), rows.keys.device)

    def next_step(self) -> None:
        self.step += 1

    @torch.compiler.disable  # else a compiled draft would be recompiled for every step
    def write(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> None:
        """k and v (C, G, D) of the context rows."""
        assert layer.id == 0, "context rows of drafts with several layers run through them"
        self.context = self.turn(k, self.rows.context_positions, v.dtype), v

    @torch.compiler.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, mask: Mask) -> Tensor:
        """q (N, Q, D), k and v (N, G, D) of the asking rows -> (N, Q, D). In a layer with a window W a query at
        position p sees positions above p - W."""
        assert mask == "causal", "a chain sees what comes before it"
        q, k, v = norm_heads(q, k, v, layer.norms)
        q, k = (self.turn(x, self.rows.asking_positions + self.step, v.dtype) for x in (q, k))
        step_keys = self.own.setdefault(layer.id, [])
        if self.begun.setdefault(layer.id, self.step) < self.step:
            step_keys.append((k, v.contiguous()))  # a view would keep the whole projection alive
        elif self.context is None and self.rows.gathering is None:
            assert not len(self.rows.context), "context rows are written first"
            self.shared[layer.id] = k, v.contiguous()
        else:
            context_k, context_v = self.context or (k[:0], v[:0])
            self.shared[layer.id] = self.in_reading_order(context_k, k), self.in_reading_order(context_v, v)
        shared = self.shared[layer.id]
        window = layer.spec.window
        if self.runs is not None and takes(v) and window is None:
            return packed_attention(q, *shared, self.runs, step_keys)
        return self.by_document(q, *shared, step_keys, self.step - self.begun[layer.id], window)

    def turn(self, x: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return rotate(x, self.rope.cos, self.rope.sin, positions, dtype)

    def in_reading_order(self, context: Tensor, asking: Tensor) -> Tensor:
        gathering = self.rows.gathering
        rows = torch.cat((context, asking)) if gathering is None else gathering.join(context, asking)
        return rows.index_select(0, self.rows.keys)

    def by_document(
        self, q: Tensor, k: Tensor, v: Tensor, step_keys: list[KeyValue], step: int = 0, window: int | None = None
    ) -> Tensor:
        """q (N, Q, D) of a layer's step over its step-0 keys and values (K, G, D) and later steps': (N, Q, D)."""
        q = (q * q.shape[-1] ** -0.5).unflatten(1, (k.shape[1], -1))  # (N, G, R, D)
        moved = 0 if window is None else step  # a window moves on with the position of the query
        if (window, moved) not in self.biases:
            self.biases[window, moved] = self.make_biases(q.shape[2], q.dtype, moved, window)
        step_keys = step_keys if window is None else step_keys[max(0, step - window) :]
        own_scores = q.new_empty(*q.shape[:3], 0)  # (N, G, R, S)
        if step_keys:
            own_scores = torch.stack([(q * own_k.unsqueeze(2)).sum(-1) for own_k, _ in step_keys], dim=-1)
        query_parts = (x.split(self.rows.num_asking) for x in (q, own_scores))
        key_parts = (x.split(self.rows.num_keys) for x in (k, v))
        documents = zip(*query_parts, *key_parts, self.biases[window, moved], strict=True)
        outputs, weights = zip(*(attend_document(*document) for document in documents), strict=True)
        output = torch.cat(outputs)
        own_weights = torch.cat(weights)
        for index, (_, own_v) in enumerate(step_keys):
            output = output + own_weights[..., index, None] * own_v.unsqueeze(2)
        return output.flatten(1, 2)

    def make_biases(self, heads: int, dtype: torch.dtype, moved: int, window: int | None) -> list[Tensor]:
        """Per document (N * R, K): 0 where a query of the step sees a step-0 key, else -inf."""
        keys = self.in_reading_order(self.rows.context, self.rows.asking)
        splits = zip(self.rows.asking.split(self.rows.num_asking), keys.split(self.rows.num_keys), strict=True)
        biases = []
        for asking, key_rows in splits:
            bias = torch.zeros(len(asking), len(key_rows), dtype=dtype, device=keys.device)
            hidden = key_rows > asking.unsqueeze(1)
            if window is not None:
                hidden |= key_rows <= asking.unsqueeze(1) + moved - window
            bias.masked_fill_(hidden, -torch.inf)
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
    scores = torch.cat((scores, own_scores), dim=-1)
    dtype = torch.promote_types(v.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=dtype).to(v.dtype)
    output = weights[..., :num_keys] @ v.transpose(0, 1)
    return (
        output.view(groups, num_rows, heads, size).transpose(0, 1),
        weights[..., num_keys:].view(groups, num_rows, heads, -1).transpose(0, 1),
    )


@dataclass(frozen=True, slots=True)
class ChainStep:
    """Step s of the chain at its first n = N - s asking rows; entry i is taught by the target's state at row i + s."""

    states: Tensor  # (n, H) the draft's
    final: Tensor  # (n, Ht) the target's states after its final norm
    teacher: Tensor  # (n, ...) what `ChainTraining.teach` makes of them
    best: Tensor  # (n,) the target's best tokens
    counts: Tensor  # (n,) bool
    row_weights: Tensor  # (n,) fp32 of the predicted tokens where the row counts, else 0
    weights: Tensor  # (n,) fp32: row_weights where the draft's vocabulary has the best token, else 0


class ChainTraining(DraftTraining):
    """Training of a draft that continues from its own states (EAGLE, EAGLE3): its chain, the sum of its losses and the
    held-out walk."""

    rates = {"muon": 0.015, "adamw": 0.003}

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.is_known = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        self.is_known[self.target_ids.to(self.device)] = True

    @abstractmethod
    def teach(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The target's states (N, Ht) after its final norm -> the teacher (N, ...), best tokens (N,)."""

    @abstractmethod
    def objective(self, index: int, step: ChainStep) -> tuple[Tensor, Tensor, Metrics]:
        """Loss of step number `index`, summed over its rows, target ids of the drafted tokens (n,), and sums over rows,
        times `row_weights`, to log."""

    @abstractmethod
    def predictions(self, states: Tensor, noise: RowValues | None = None) -> Tensor:
        """Target id of the best draft token, of logits plus `noise`, at the draft's states: (N, H) -> (N,)."""

    def augment(self, batch: Batch, aux_states: Tensor, final: Tensor) -> Tensor:
        """The states (B * S, K * Ht) that the draft reads in training, from the target's and its final states."""
        return aux_states

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """The objective of every counting (row, step).

        A row whose best target token is outside the draft vocabulary has no part in the loss of distributions; it
        counts as missed in the metrics `accept_rate_i`, the agreement with the target's best token at step i.
        """
        loss = torch.zeros((), device=self.device)
        metrics = Metrics()
        for index, step in enumerate(self.backbone(batch)):
            step_loss, drafted, sums = self.objective(index, step)
            loss = loss + step_loss
            agreements = ((drafted == step.best) & step.counts).sum()
            metrics[f"accept_rate_{index}"] = torch.stack((agreements, step.counts.sum()))
            for name, total in sums.items():
                metrics[f"{name}_{index}"] = torch.stack((total.detach(), step.row_weights.sum()))
        return loss, metrics

    def backbone(self, batch: Batch) -> Iterator[ChainStep]:
        """The draft's chain over the batch, with what it is taught."""
        num_steps = self.options.ttt_steps
        rows, tokens, aux_states, final = self.read(batch, num_steps)
        taught = final[rows.of_taught(rows.asking) + 1]
        teacher, best = self.teach(taught)
        is_known = self.is_known[best]
        for index, states in enumerate(self.chain(rows, tokens, self.augment(batch, aux_states, final), num_steps)):
            length = max(len(states) - index, 0)
            counts = rows.counts[index, :length]
            row_weights = counts.float() if rows.weights is None else counts * rows.weights[index, :length]
            yield ChainStep(
                states=states[:length],
                final=taught[index:],
                teacher=teacher[index:],
                best=best[index:],
                counts=counts,
                row_weights=row_weights,
                weights=row_weights * is_known[index:],
            )

    def read(self, batch: Batch, num_steps: int) -> tuple[Rows, Tensor, Tensor, Tensor]:
        """Rows, and flattened over the batch: tokens (B * S,), aux states (B * S, K * Ht), final states (B * S, Ht)."""
        all_run = len(self.draft.config.layers) > 1
        group = self.row_group if self.training else None
        rows = moved(find_rows(batch, num_steps, all_run=all_run, group=group), self.device)
        aux_states, final = target_states(self.target, batch, self.device)
        return rows, batch.tokens.to(self.device).flatten(), aux_states, final

    def chain(self, rows: Rows, tokens: Tensor, aux_states: Tensor, num_steps: int) -> Iterator[Tensor]:
        """The draft's states (M, H) of each step; from step 1 on it reads its own."""
        attention = TTTAttention(rows, self.rope)
        if len(self.draft.config.layers) == 1:
            context = self.embeds(token_at(tokens, rows.context + 1), rows.context_positions)
            self.draft.write_context(context, self.draft.fuse(aux_states[rows.context]), attention)
        state = self.draft.fuse(aux_states[rows.asking])
        for step in range(num_steps):
            network, earlier = self.network_of(step)
            embeds = self.embeds(token_at(tokens, rows.asking + 1 + step), rows.asking_positions + earlier)
            state = network(embeds, state, attention)
            yield rows.of_taught(state)
            attention.next_step()

    def network_of(self, step: int) -> tuple[nn.Module, int]:
        """The part of the draft that runs a step, and in how many steps it has run before."""
        return self.draft, step

    def embeds(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The embeddings (N, H) of tokens (N,) that the draft reads at positions (N,)."""
        return self.target.embed(tokens)

    def evaluate(self, batch: Batch) -> Metrics:
        """Also `accept_length_with_target_states`, as if every step read the target's states, as the first one does:
        about the most that better later steps can reach."""
        rows, tokens, aux_states, final = self.read(batch, self.depth)
        asking = rows.of_taught(rows.asking)
        text = torch.stack([token_at(tokens, asking + 2 + step) for step in range(self.depth)])  # (depth, N)
        predicted = []
        for step, states in enumerate(self.chain(rows, tokens, aux_states, self.depth)):
            noise = None
            if self.temperature:
                noise = partial(self.step_noise, batch, asking + 1 + step, text[step], final)
            predicted.append(self.predictions(states, noise))
        # Where step s counts, the row s further asks, too: its first step drafts the same token.
        first_steps = torch.stack([predicted[0].roll(-step) for step in range(self.depth)])
        chains = torch.stack((torch.stack(predicted), first_steps))
        accepted, bound = (count_accepted(chain, text, rows.counts).cpu() for chain in chains)  # sync
        asking = asking.cpu()
        length = walk_metrics(list(walk_answers(batch, asking, bound)), 0)["accept_length"]
        return self.walk(batch, asking, accepted) | {"accept_length_with_target_states": length}

    def step_noise(self, batch: Batch, rows: Tensor, text: Tensor, final: Tensor, part: slice) -> Tensor:
        """The noise of a part of a step's tokens `text` (N,), which the target says at `rows` (N,)."""
        return self.text_noise(batch, rows[part].clamp(max=len(final) - 1), text[part], final)


class FrozenHeadTraining(ChainTraining):
    """Training of a draft that is read with the target's frozen head (EAGLE, MTP)."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.head = TargetHead(self.target, self.target_ids)

    def teach(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return states, self.target.logits(states, self.target_ids[:0])[1]

    def distance(self, step: ChainStep, kind: Kind) -> tuple[Tensor, Tensor]:
        """The summed distance of this kind from the target's distribution, and target ids of the drafted tokens."""

        def teach(part: slice) -> Tensor:
            return self.target.logits(step.teacher[part], self.target_ids)[0]

        loss, rows = distillation_loss(step.states, self.head.rows, teach, step.weights, kind)
        return loss, self.head.ids[rows]

    def predictions(self, states: Tensor, noise: RowValues | None = None) -> Tensor:
        return self.head.predictions(states, noise)


def token_at(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens[index], the last one beyond the end: rows that no longer count still have to read something."""
    return tokens[index.clamp(max=len(tokens) - 1)]
