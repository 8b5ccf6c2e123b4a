"""EAGLE3 as a server runs it, one token at a time, on one document: the oracle of everything that is trained."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.kernels.norm import HeadNorms
from slipstream.models.eagle3 import Eagle3


class ListAttention:
    """Rows come one by one; a row sees every row before it and itself. `position` is the row's, set by the caller."""

    def __init__(self, theta: float) -> None:
        self.theta = theta
        self.position = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, _layer: int, _mask: str, _window: int | None, norms: HeadNorms | None
    ) -> Tensor:
        assert norms is None
        self.keys.append(self.turn(k))
        self.values.append(v)
        return attended(self.turn(q), self.keys, self.values)

    def turn(self, x: Tensor) -> Tensor:
        return turned(x, self.position, self.theta)


def attended(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Queries (Q, D) of one row over all rows' keys and values, (G, D) each -> (Q, D)."""
    outputs = []
    for head in range(len(q)):
        group = head * len(keys[0]) // len(q)
        scores = torch.stack([q[head] @ key[group] for key in keys]) / q.shape[-1] ** 0.5
        outputs.append(scores.softmax(dim=0) @ torch.stack([value[group] for value in values]))
    return torch.stack(outputs)


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotates the pair (i, i + D/2) by position * theta ** (-2i / D), as complex numbers."""
    real, imaginary = x.chunk(2, dim=-1)
    angles = position * theta ** (-torch.arange(real.shape[-1]) / real.shape[-1])
    pairs = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def target_features(target: PreTrainedModel, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    """(T, K * Ht) from transformers' hidden states: entry i + 1 is layer i's output, the last one is normed."""
    num_layers = target.config.num_hidden_layers
    assert num_layers - 1 not in layers, "transformers does not report the last layer before the norm"
    with torch.no_grad():
        states = target(input_ids=tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([states[min(layer + 1, num_layers)][0] for layer in layers], dim=-1)


def head_logits(draft: Any, target: PreTrainedModel, states: Tensor) -> Tensor:
    """(..., H) -> (..., Vd) by the target's head, at the draft's tokens."""
    head, ids = target.get_output_embeddings().weight.detach(), draft.target_ids
    return states @ (head if ids is None else head[ids]).t()


class NaiveDraft:
    """A draft and its target on one document (S,)."""

    def __init__(self, draft: Eagle3, target: PreTrainedModel) -> None:
        self.draft = draft
        self.target = target

    def embed(self, token: Tensor) -> Tensor:
        return self.target.get_input_embeddings().weight.detach()[token]

    def prefixes(self, tokens: Tensor) -> Iterator[tuple[int, ListAttention, Tensor]]:
        """Per row t < S - 1: the attention after rows 0..t with the target's features, and row t's state (H,)."""
        attention = ListAttention(self.draft.config.rope.theta)
        features = target_features(self.target, tokens, self.draft.config.feature_layers)
        for row in range(len(tokens) - 1):
            attention.position = row
            state = self.draft(self.embed(tokens[row + 1]), self.draft.fuse(features[row]), attention)
            yield row, attention, state

    def chain(self, tokens: Tensor, num_steps: int) -> dict[tuple[int, int], Tensor]:
        """(row, step) -> state (H,), the draft reading its own states and the document's tokens as far as they go."""
        states = {}
        for row, attention, state in self.prefixes(tokens):
            own = copy.copy(attention)
            own.keys, own.values = list(attention.keys), list(attention.values)
            states[row, 0] = state
            for step in range(1, min(num_steps, len(tokens) - 1 - row)):
                own.position = row + step
                state = self.draft(self.embed(tokens[row + 1 + step]), state, own)
                states[row, step] = state
        return states

    def best(self, state: Tensor) -> int:
        """The draft's best token after state (H,), as an id of the target."""
        row = int(self.draft.logits(state).argmax())
        return row + int(self.draft.d2t[row])

    def propose(self, prefix: Tensor, depth: int) -> list[int]:
        """Greedy draft tokens after `prefix`, whose last token is the root: the draft reads what it proposes."""
        (*_, (row, attention, state)) = self.prefixes(prefix)
        proposed = []
        for step in range(1, depth + 1):
            proposed.append(self.best(state))
            attention.position = row + step
            if step < depth:
                state = self.draft(self.embed(torch.tensor(proposed[-1])), state, attention)
        return proposed
