"""An EAGLE3 draft written out from its public files, in fp64 and with nothing kept between calls: the tests' oracle."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.kernels.sampling import gumbel


class NaiveLayers:
    """A draft's public files in fp64, and what all drafts compute from them alike."""

    target_ids: Tensor

    def __init__(self, folder: Path, embeddings: Tensor) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.weights = {key: tensor.double() for key, tensor in tensors.items() if tensor.is_floating_point()}
        if "d2t" in tensors:
            self.target_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        self.embeddings = embeddings.double()

    def _turn(self, x: Tensor, start: int = 0) -> Tensor:
        """Rotates x (n, heads, D): row i by start + i times the angle of each pair of components (j, j + D / 2)."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        angles = torch.outer(torch.arange(start, start + len(x)).double(), frequencies)[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    def _project(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", torch.zeros(()))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"]


class NaiveEagle3(NaiveLayers):
    """`embeddings` (V, H) are the target's. Plain rotary embedding only."""

    attention = "midlayer.self_attn"

    def fuse(self, features: Tensor) -> Tensor:
        return features.double() @ self.weights["fc.weight"].T

    def states(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The layer over a whole sequence: embeds and hidden (n, H) -> (n, H) before the final norm."""
        x = hidden + self._attention(
            torch.cat(
                (self._norm(embeds, "midlayer.input_layernorm"), self._norm(hidden, "midlayer.hidden_norm")), dim=-1
            )
        )
        inner = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = (inner @ self.weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (gate * torch.sigmoid(gate) * up) @ self.weights["midlayer.mlp.down_proj.weight"].T

    def logits(self, states: Tensor) -> Tensor:
        return self._norm(states, "norm") @ self.weights["lm_head.weight"].T

    def chain(self, features: Tensor, tokens: list[int], depth: int, key: int, temperature: float) -> list[int]:
        """The `depth` tokens drafted after `tokens`, with target features (n, K * H) of all but the last of them."""
        embeds, hidden = self.embeddings[tokens[1:]], self.fuse(features)
        drafted: list[int] = []
        while len(drafted) < depth:
            state = self.states(embeds, hidden)[-1:]
            position = torch.tensor([len(tokens) + len(drafted)])
            noise = gumbel(torch.tensor([key]), position, self.target_ids)[0].double()
            best = int((self.logits(state)[0] + temperature * noise).argmax())
            drafted.append(int(self.target_ids[best]))
            embeds = torch.cat((embeds, self.embeddings[drafted[-1:]]))
            hidden = torch.cat((hidden, state))
        return drafted

    def tree(
        self, features: Tensor, tokens: list[int], shape: tuple[int, int], nodes: int, key: int, temperature: float
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and scores of a proposal of `nodes` grown as EAGLE-2 does. shape: (children, depth).

        Every node's state is computed from its path alone.
        """
        topk, depth = shape
        found: list[tuple[float, list[int], int]] = []  # score, path, parent
        frontier = [-1]
        for level in range(depth):
            children: list[int] = []
            for parent in frontier:
                score, path = found[parent][:2] if parent >= 0 else (0.0, [])
                logits = self.logits(self._state_behind(features, tokens, path))[0]
                position = torch.tensor([len(tokens) + level])
                noise = gumbel(torch.tensor([key]), position, self.target_ids)[0].double()
                best = (logits + temperature * noise).log_softmax(0).sort(descending=True, stable=True)
                for value, column in list(zip(best.values.tolist(), best.indices.tolist(), strict=True))[:topk]:
                    children.append(len(found))
                    found.append((score + value, [*path, int(self.target_ids[column])], parent))
            frontier = sorted(children, key=lambda index: -found[index][0])[:topk]
        chosen = sorted(range(len(found)), key=lambda index: -found[index][0])[: nodes - 1]
        parents = [1 + chosen.index(found[index][2]) if found[index][2] >= 0 else 0 for index in chosen]
        scores = [0.0, *(found[index][0] for index in chosen)]
        return [tokens[-1], *(found[index][1][-1] for index in chosen)], [-1, *parents], scores

    def _state_behind(self, features: Tensor, tokens: list[int], path: list[int]) -> Tensor:
        """The state (1, H) that says what follows tokens + path."""
        hidden = self.fuse(features)
        for count in range(len(path) + 1):
            embeds = self.embeddings[[*tokens[1:], *path[:count]]]
            hidden = torch.cat((hidden, self.states(embeds, hidden)[-1:]))
        return hidden[-1:]

    def _attention(self, x: Tensor) -> Tensor:
        """Causal attention of every row over all before it; x (n, 2H) -> (n, H)."""
        name, n = self.attention, len(x)
        size = self.config["head_dim"]
        q, k, v = (self._project(x, f"{name}.{part}_proj").view(n, -1, size) for part in ("q", "k", "v"))
        q, k = self._turn(q), self._turn(k)
        outputs = []
        for head in range(q.shape[1]):
            shared = head * k.shape[1] // q.shape[1]
            scores = q[:, head] @ k[:, shared].T / math.sqrt(size)
            scores = scores.masked_fill(torch.arange(n)[None] > torch.arange(n)[:, None], -torch.inf)
            outputs.append(scores.softmax(-1) @ v[:, shared])
        return self._project(torch.cat(outputs, dim=-1), f"{name}.o_proj")
