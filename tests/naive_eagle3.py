"""An EAGLE3 draft written out from its public tensors, in fp64, with nothing kept between calls: the tests' oracle."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.kernels.sampling.sample import gumbel
from slipstream.models.drafts.base import DraftNetwork
from slipstream.models.files.weights import places_of


def turned(x: Tensor, theta: float, start: int = 0) -> Tensor:
    """Rotates x (n, heads, D): row i by start + i times the angle of each pair of components (j, j + D / 2)."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half:]) * turns(half, theta, start, len(x))
    return torch.cat((pairs.real, pairs.imag), dim=-1)


@cache
def turns(half: int, theta: float, start: int, count: int) -> Tensor:
    frequencies = theta ** (-torch.arange(half).double() / half)
    angles = torch.outer(torch.arange(start, start + count).double(), frequencies)[:, None]
    return torch.polar(torch.ones_like(angles), angles)


def attended(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """q (n, heads, D) over k and v (s, KV heads, D), none where `hidden` (n, s) -> (n, heads, D)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # heads of a group share theirs
    scores = torch.einsum("nhd,shd->hns", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hns,shd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class NaiveLayers:
    """A draft's public tensors in fp64, and the computations that all drafts share.

    `draft` is a folder, or a network in training: then gradients reach its parameters.
    """

    target_ids: Tensor

    def __init__(self, draft: Path | DraftNetwork, embeddings: Tensor):
        if isinstance(draft, Path):
            self.config = json.loads((draft / "config.json").read_text())
            tensors = load_file(draft / "model.safetensors")
        else:
            self.config = draft.config.to_json()
            state = draft.state_dict(keep_vars=True)
            tensors = {name: place.rows(state[place.key]) for name, place in places_of(draft).items()}
        self.weights = {key: tensor.double() for key, tensor in tensors.items() if tensor.is_floating_point()}
        if "d2t" in tensors:
            self.target_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        self.embeddings = embeddings.double()

    def _turn(self, x: Tensor, start: int = 0) -> Tensor:
        return turned(x, self.config["rope_theta"], start)

    def _project(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]

    def _gated(self, x: Tensor, layer: str) -> Tensor:
        """x (n, H) before its norm -> (n, I), the input of the layer's down_proj."""
        inner = self._norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (self._project(inner, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return gate * torch.sigmoid(gate) * up


class NaiveEagle3(NaiveLayers):
    """`embeddings` (V, H) are the target's. Plain rotary embedding only."""

    attention = "midlayer.self_attn"
    start = 0  # what lies before is not read: right for the last row, of a draft of one layer

    def fuse(self, aux_states: Tensor) -> Tensor:
        aux_states = aux_states.double()
        if self.config.get("norm_before_fc"):
            aux_states = self._norm(aux_states, "input_norm")
        if self.config.get("fc_norm"):
            count = len([name for name in self.weights if name.startswith("fc_norm.")])
            states = aux_states.split(aux_states.shape[-1] // count, dim=-1)
            aux_states = torch.cat([self._norm(state, f"fc_norm.{i}") for i, state in enumerate(states)], dim=-1)
        return self._project(aux_states, "fc") if "fc.weight" in self.weights else aux_states

    def states(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The layer over a whole sequence: embeds and hidden (n, H) -> (n, H), which the next step reads."""
        embeds = self._norm(embeds, "midlayer.input_layernorm")
        normed = self._norm(hidden, "midlayer.hidden_norm")
        residual = normed if self.config.get("norm_before_residual") else hidden
        x = residual + self._attention(torch.cat((embeds, normed), dim=-1))
        x = x + self._project(self._gated(x, "midlayer"), "midlayer.mlp.down_proj")
        for layer in (f"layers.{index}" for index in range(1, self.config["num_hidden_layers"])):
            x = x + self._attention(self._norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            x = x + self._project(self._gated(x, layer), f"{layer}.mlp.down_proj")
        return self._norm(x, "norm") if self.config.get("norm_output") else x

    def head_input(self, states: Tensor) -> Tensor:
        states = states.double()
        return states if self.config.get("norm_output") else self._norm(states, "norm")

    def logits(self, states: Tensor) -> Tensor:
        return self._project(self.head_input(states), "lm_head")

    def chains(self, aux_states: Tensor, tokens: Tensor, num_steps: int) -> dict[tuple[int, int], Tensor]:
        """(row, step) -> state (H,) in fp32, by target states (n, K * H) of a text's `tokens` (n,): from step 1 on the
        draft reads its own states, and the text's tokens as far as they go."""
        embeds = self.embeddings[tokens[1:]]
        fused = self.fuse(aux_states)
        states = {}
        for row in range(len(tokens) - 1):
            hidden = fused[: row + 1]
            for step in range(min(num_steps, len(tokens) - 1 - row)):
                state = self.states(embeds[: row + 1 + step], hidden)[-1:]
                states[row, step] = state[0].float()
                hidden = torch.cat((hidden, state))
        return states

    def greedy(self, aux_states: Tensor, tokens: list[int], depth: int) -> list[int]:
        """The `depth` tokens drafted after `tokens`, with target states (n, K * H) of all but the last of them."""
        return self.tree(aux_states, tokens, (1, depth), depth + 1, key=0, temperature=0.0)[0][1:]

    def tree(
        self, aux_states: Tensor, tokens: list[int], shape: tuple[int, int], nodes: int, key: int, temperature: float
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and scores of a proposal of `nodes` grown as EAGLE-2 does. shape: (children, depth).

        Every node's state is computed from its path alone.
        """
        states = {}

        def children_of(path):
            states[tuple(path)] = self._states_at(path, aux_states, tokens, states)
            logits = self.logits(states[tuple(path)][-1:])[0]
            position = torch.tensor([len(tokens) + len(path)])
            noise = gumbel(torch.tensor([key]), position, self.target_ids)[0].double()
            best = (logits + temperature * noise).log_softmax(0).sort(descending=True, stable=True)
            return list(zip(best.values.tolist(), self.target_ids[best.indices].tolist(), strict=True))

        return grown_tree(tokens[-1], shape, nodes, children_of)

    def _states_at(
        self, path: list[int], aux_states: Tensor, tokens: list[int], states_of: dict[tuple[int, ...], Tensor]
    ) -> Tensor:
        """States of the text and a path below it, the one that predicts the next token last; `states_of`: those of
        shorter paths."""
        before = states_of[tuple(path[:-1])] if path else self.fuse(aux_states)
        return self._with_state_behind(before, [*tokens, *path])

    def _with_state_behind(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        """`hidden` (n - 1, H), from before tokens (n,), and the draft's state that predicts the next token."""
        return torch.cat((hidden, self.states(self.embeddings[tokens[1:]], hidden)[-1:]))

    def _attention(self, x: Tensor, name: str = "") -> Tensor:
        """Causal attention of every row over all before it, or over its window; x (n, 2H) or (n, H) -> (n, H)."""
        name = name or self.attention
        n = len(x)
        q, k, v = (
            self._project(x, f"{name}.{part}_proj").view(n, -1, self.config["head_dim"]) for part in ("q", "k", "v")
        )
        if f"{name}.q_norm.weight" in self.weights:
            q = self._norm(q, f"{name}.q_norm")
            k = self._norm(k, f"{name}.k_norm")
        pairs = torch.ones(n, n, dtype=torch.bool)
        window = self.config.get("sliding_window") or n
        hidden = pairs.triu(1) | pairs.tril(-window)
        hidden[:, : self.start] = True
        outputs = attended(self._turn(q), self._turn(k), v, hidden)
        return self._project(outputs.flatten(1), f"{name}.o_proj")


def grown_tree(
    root: int, shape: tuple[int, int], nodes: int, children_of: Callable[[list[int]], list[tuple[float, int]]]
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and scores of a proposal of `nodes` grown as EAGLE-2 does. shape: (children, depth).

    `children_of` returns log-probabilities and tokens after a path, best first."""
    topk, depth = shape
    candidates = []  # score, path, parent
    frontier = [-1]
    for _ in range(depth):
        children = []
        for parent in frontier:
            score, path = candidates[parent][:2] if parent >= 0 else (0.0, [])
            for value, token in children_of(path)[:topk]:
                children.append(len(candidates))
                candidates.append((score + value, [*path, token], parent))
        frontier = sorted(children, key=lambda index: -candidates[index][0])[:topk]
    proposal = sorted(range(len(candidates)), key=lambda index: -candidates[index][0])[: nodes - 1]
    parents = [1 + proposal.index(candidates[index][2]) if candidates[index][2] >= 0 else 0 for index in proposal]
    scores = [0.0, *(candidates[index][0] for index in proposal)]
    return [root, *(candidates[index][1][-1] for index in proposal)], [-1, *parents], scores
