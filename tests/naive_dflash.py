"""A DFLASH draft written out from its public tensors, in fp64, with nothing kept between blocks: the tests' oracle."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.kernels.sampling.sample import gumbel
from slipstream.models.drafts.base import DraftNetwork
from slipstream.tests.naive_eagle3 import NaiveLayers, attended


@dataclass(frozen=True, slots=True)
class Block:
    """The last layer's parts for n slots."""

    residual: Tensor  # (n, H) what its MLP's output is added to
    activations: Tensor  # (n, I) what down_proj reads
    states: Tensor  # (n, H) normed: what the target's head reads


class NaiveDFlash(NaiveLayers):
    """`embeddings` and `head` (V, H) are the target's. Plain rotary embedding only."""

    def __init__(self, draft: Path | DraftNetwork, embeddings: Tensor, head: Tensor) -> None:
        self.target_ids = torch.arange(len(head))
        super().__init__(draft, embeddings)
        self.head = head.double()[self.target_ids]

    def block(self, aux_states: Tensor, anchor: int, slots: int) -> Block:
        """The block after aux hidden states (a, K * H) of the a tokens before `anchor`, which has position a."""
        tokens = [anchor] + [self.config["dflash_config"]["mask_token_id"]] * (slots - 1)
        context = self._norm(aux_states.double() @ self.weights["fc.weight"].T, "hidden_norm")
        x = self.embeddings[tokens]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            x = x + self._attention(context, self._norm(x, f"{name}.input_layernorm"), layer)
            residual, activations = x, self._gated(x, name)
            x = residual + self._project(activations, f"{name}.mlp.down_proj")
        return Block(residual, activations, self._norm(x, "norm"))

    def logits(self, states: Tensor) -> Tensor:
        return states.double() @ self.head.T

    def greedy(self, aux_states: Tensor, tokens: list[int], depth: int) -> list[int]:
        """The `depth` tokens drafted after `tokens` by a block that is no longer than they need."""
        return self.chain(aux_states, tokens, depth + 1, depth + 1, key=0, temperature=0.0)[0]

    def chain(
        self, aux_states: Tensor, tokens: list[int], width: int, slots: int, key: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        """The width - 1 tokens that a block of `slots` slots drafts after `tokens`, and the sums of log-probabilities
        up to each; aux hidden states of all tokens but the last."""
        states = self.block(aux_states, tokens[-1], slots).states
        drafted, scores = [], [0.0]
        for index in range(width - 1):
            state = states[index + (0 if self.config.get("sample_from_anchor") else 1)]
            position = torch.tensor([len(tokens) + index])
            noise = gumbel(torch.tensor([key]), position, self.target_ids)[0].double()
            best = (self.head @ state + temperature * noise).log_softmax(0).max(0)
            drafted.append(int(self.target_ids[best.indices]))
            scores.append(scores[-1] + float(best.values))
        return drafted, scores[1:]

    def _attention(self, context: Tensor, x: Tensor, layer: int) -> Tensor:
        """x (n, H), normed -> (n, H): every slot sees the context and the block, or causally a window of both."""
        name, (a, n) = f"layers.{layer}.self_attn", (len(context), len(x))
        size, rows = self.config["head_dim"], torch.cat((context, x))
        q = self._norm(self._project(x, f"{name}.q_proj").view(n, -1, size), f"{name}.q_norm")
        k = self._norm(self._project(rows, f"{name}.k_proj").view(a + n, -1, size), f"{name}.k_norm")
        v = self._project(rows, f"{name}.v_proj").view(a + n, -1, size)
        keys, queries = torch.arange(a + n)[None], torch.arange(a, a + n)[:, None]
        hidden = torch.zeros(n, a + n, dtype=torch.bool)
        if self.config["layer_types"][layer] == "sliding_attention":
            is_later = (keys > queries) & (not self.config.get("sliding_window_non_causal"))
            hidden = is_later | (keys <= queries - self.config["sliding_window"])
        outputs = attended(self._turn(q, a), self._turn(k), v, hidden)
        return self._project(outputs.flatten(1), f"{name}.o_proj")
