"""A DFLASH draft and its heads, written out from its public tensors, in fp64, with nothing kept between blocks: the
tests' oracle."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.sampling.sample import gumbel
from slipstream.models.drafts.base import DraftNetwork
from slipstream.models.drafts.heads.config import BlockSizes, LiLiCorrConfig
from slipstream.models.drafts.heads.lilicorr import LiLiCorr
from slipstream.tests.naive_eagle3 import NaiveLayers, attended

Scores = Callable[[int, int, int], Tensor]  # of a slot's candidates (k,), after one of the slot before with this token


@dataclass(frozen=True, slots=True)
class Block:
    """The last layer's parts for n slots."""

    residual: Tensor  # (n, H) what its MLP's output is added to
    activations: Tensor  # (n, I) what down_proj reads
    states: Tensor  # (n, H) normed: what the target's head reads


class NaiveDFlash(NaiveLayers):
    """`embeddings` and `head` (V, H) are the target's. Plain rotary embedding only."""

    def __init__(self, draft: Path | DraftNetwork, embeddings: Tensor, head: Tensor, num_candidates: int | None = None):
        """`num_candidates` of each slot; by default as many as a chain needs."""
        self.target_ids = torch.arange(len(head))
        super().__init__(draft, embeddings)
        self.head = head.double()[self.target_ids]
        heads = self.heads
        usual = heads.get("selector_top_k") or heads.get("lilicorr_candidate_topk")
        self.num_candidates = usual or num_candidates or (64 if heads.get("markov_rank") else 1)
        if (sizes := LiLiCorrConfig.from_json(heads)) is not None:
            size = self.config["hidden_size"]
            slots = self.config["block_size"]
            eps = self.config["rms_norm_eps"]
            self.scorer = LiLiCorr(
                sizes, BlockSizes(size, len(head), len(self.head), slots, slots - 1, False, eps), ()
            ).double()
            parts = {name: x for name, x in self.weights.items() if name.startswith("lilicorr.")}
            self.scorer.load_state_dict({name.removeprefix("lilicorr."): x for name, x in parts.items()})

    @property
    def heads(self) -> dict[str, Any]:
        return self.config["dflash_config"]

    @property
    def first(self) -> int:
        return 0 if self.config.get("sample_from_anchor") else 1

    def fuse(self, aux_states: Tensor) -> Tensor:
        aux_states = aux_states.double()
        if self.heads.get("tap_norms"):
            states = aux_states.split(aux_states.shape[-1] // len(self.heads["target_layer_ids"]), dim=-1)
            aux_states = torch.cat([self._norm(x, f"aux_hidden_norms.{i}") for i, x in enumerate(states)], dim=-1)
        return self._norm(aux_states @ self.weights["fc.weight"].T, "hidden_norm")

    def block(self, aux_states: Tensor, anchor: int, slots: int) -> Block:
        """The block after aux hidden states (a, K * H) of the a tokens before `anchor`, which has position a."""
        tokens = [anchor] + [self.heads["mask_token_id"]] * (slots - 1)
        context = self.fuse(aux_states)
        x = self.embeddings[tokens] * self.heads.get("input_embedding_scale", 1.0)
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}"
            normed, finish = self._convolved(self._norm(x, f"{name}.input_layernorm"), f"{name}.attention_conv")
            rows = self._norm(context, f"{name}.input_layernorm") if self.heads.get("context_norms") else context
            x = x + finish(self._attention(rows, normed, layer))
            normed, finish = self._convolved(self._norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp_conv")
            gate, up = (self._project(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            residual = x
            activations = gate * torch.sigmoid(gate) * up
            x = residual + finish(self._project(activations, f"{name}.mlp.down_proj"))
        return Block(residual, activations, self._norm(x, "norm"))

    def _convolved(self, x: Tensor, name: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """x (n, H), a sublayer's input, convolved along the block, and the function that convolves its output."""
        if f"{name}.base_kernel" not in self.weights:
            return x, lambda output: output
        deltas = self._project(x, f"{name}.kernel_projection").unflatten(-1, (2, 2, -1))  # side, tap, group

        def convolve(rows, side):
            outputs = torch.zeros_like(rows)
            for tap in range(2):
                kernel = deltas[:, side, tap].repeat_interleave(self.heads["conv_group_size"], dim=-1)
                kernel = kernel + self.weights[f"{name}.base_kernel"][side, tap]
                outputs[tap:] += kernel[tap:] * rows[: len(rows) - tap]
            return outputs

        return convolve(x, 0), lambda output: convolve(output, 1)

    def logits(self, states: Tensor) -> Tensor:
        logits = states.double() @ self.head.T * self.heads.get("output_multiplier", 1.0)
        cap = self.heads.get("final_logit_softcapping")
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def greedy(self, aux_states: Tensor, tokens: list[int], depth: int) -> list[int]:
        """The `depth` tokens drafted after `tokens` by a block that is no longer than they need."""
        return self.chain(aux_states, tokens, depth + 1, depth + 1, key=0, temperature=0.0)[0]

    def chain(
        self, aux_states: Tensor, tokens: list[int], width: int, slots: int, key: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        """The width - 1 tokens that a block of `slots` slots drafts after `tokens`, and the sums of log-probabilities
        up to each; aux hidden states of all tokens but the last."""
        candidates, mass, after, trust = self.lattice(aux_states, tokens, width - 1, slots, key, temperature)
        drafted = []
        scores = [0.0]
        choice = 0
        for slot in range(width - 1):
            before = drafted[-1] if drafted else tokens[-1]
            slot_scores = after(slot, choice, before)
            choice = int(slot_scores.argmax())
            step = slot_scores.log_softmax(0)[choice] + mass[slot] if trust is None else trust(slot, before)
            drafted.append(candidates[slot][choice])
            scores.append(scores[-1] + float(step))
        return drafted, scores[1:]

    def tree(
        self, aux_states: Tensor, tokens: list[int], sizes: tuple[int, int, int, int], key: int, temperature: float
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and scores of the best nodes; sizes: nodes, K, slots of the block, children of a node."""
        count, depth, slots, topk = sizes
        candidates, mass, after, trust = self.lattice(aux_states, tokens, depth, slots, key, temperature)
        nodes = [(0.0, ())]  # score, candidates from the root on
        for _, path in nodes:  # grows while it is read
            if len(path) < depth:
                slot = len(path)
                before = candidates[slot - 1][path[-1]] if path else tokens[-1]
                steps = after(slot, path[-1] if path else 0, before).log_softmax(0) + mass[slot]
                score = next(score for score, other in nodes if other == path)
                best = sorted(range(len(steps)), key=lambda choice: -float(steps[choice]))[:topk]
                if trust is not None:
                    steps[best[0]] = trust(slot, before)
                nodes += [(score + float(steps[choice]), (*path, choice)) for choice in best]
        best_nodes = sorted(nodes, key=lambda node: -node[0])[:count]
        places = {path: place for place, (_, path) in enumerate(best_nodes)}
        drafted = [candidates[len(path) - 1][path[-1]] for _, path in best_nodes[1:]]
        return (
            [tokens[-1], *drafted],
            [-1, *(places[path[:-1]] for _, path in best_nodes[1:])],
            [score for score, _ in best_nodes],
        )

    def lattice(
        self, aux_states: Tensor, tokens: list[int], count: int, slots: int, key: int, temperature: float
    ) -> tuple[list[list[int]], list[float], Scores, Callable[[int, int], Tensor] | None]:
        """Candidates' target ids, logarithms of their joint probabilities, scores, and logarithms of the confidence
        head after a token, at `count` slots."""
        states = self.block(aux_states, tokens[-1], slots).states[self.first :][:count]
        logits = self.logits(states)
        keys = torch.tensor([key]).expand(count)
        noise = temperature * gumbel(keys, torch.arange(count) + len(tokens), self.target_ids).double()
        is_scored = "lilicorr_candidate_topk" in self.heads
        best = (logits if is_scored else logits + noise).log_softmax(-1).sort(descending=True, stable=True)
        values, columns = (x[:, : self.num_candidates] for x in (best.values, best.indices))
        candidates = self.target_ids[columns]
        weights = self.weights
        mass = values.logsumexp(-1).tolist()
        extra = noise.gather(1, columns)
        if is_scored:
            start, edges = self.scorer(
                self.embeddings[candidates][None], values[None], states[None], self.fuse(aux_states)[-1:]
            )

        def after(slot, choice, before):
            if is_scored:
                return (edges[0, slot - 1, choice] if slot else start[0]) + extra[slot]
            slot_scores = values[slot]
            if "candidate_selector.predecessor_codebook" in weights:
                query = self._project(states[slot], "candidate_selector.hidden_projection")
                query = query * weights["candidate_selector.predecessor_codebook"][before]
                slot_scores = slot_scores + weights["candidate_selector.successor_codebook"][columns[slot]] @ query
            if "markov_head.markov_w1.weight" in weights:
                query = embedded = weights["markov_head.markov_w1.weight"][before]
                if "markov_head.gate_proj.weight" in weights:
                    query = (
                        self._project(torch.cat((states[slot], embedded)), "markov_head.gate_proj").sigmoid() * query
                    )
                slot_scores = slot_scores + weights["markov_head.markov_w2.weight"][columns[slot]] @ query
            return slot_scores

        def trust(slot, before):
            embedded = weights.get("markov_head.markov_w1.weight")
            read = states[slot] if embedded is None else torch.cat((states[slot], embedded[before]))
            temperatures = self.heads.get("confidence_temperatures") or [1.0] * count
            bias = (self.heads.get("confidence_biases") or [0.0] * count)[slot]
            return (self._project(read, "confidence_head.proj")[0] / temperatures[slot] + bias).sigmoid().log()

        has_trust = "confidence_head.proj.weight" in weights
        return candidates.tolist(), mass, after, trust if has_trust else None

    def _attention(self, context: Tensor, x: Tensor, layer: int) -> Tensor:
        """x (n, H), normed -> (n, H): every slot sees the context and the block, or causally a window of both."""
        name = f"layers.{layer}.self_attn"
        a = len(context)
        n = len(x)
        size = self.config["head_dim"]
        rows = torch.cat((context, x))
        q = self._norm(self._project(x, f"{name}.q_proj").view(n, -1, size), f"{name}.q_norm")
        k = self._norm(self._project(rows, f"{name}.k_proj").view(a + n, -1, size), f"{name}.k_norm")
        v = self._project(rows, f"{name}.v_proj").view(a + n, -1, size)
        keys = torch.arange(a + n)[None]
        queries = torch.arange(a, a + n)[:, None]
        hidden = torch.zeros(n, a + n, dtype=torch.bool)
        if self.config["layer_types"][layer] == "sliding_attention":
            is_later = (keys > queries) & (not self.config.get("sliding_window_non_causal"))
            hidden = is_later | (keys <= queries - self.config["sliding_window"])
        outputs = attended(self._turn(q, a), self._turn(k), v, hidden)
        if (gate := self.heads.get("output_gate")) is not None:
            factors = self._project(x, f"{name}.gate_proj")
            factors = factors.sigmoid() if gate["activation"] == "sigmoid" else (1 + factors.exp()).log()
            outputs = outputs * factors.view(n, -1, 1 if gate["by_head"] else size)
        return self._project(outputs.flatten(1), f"{name}.o_proj")
