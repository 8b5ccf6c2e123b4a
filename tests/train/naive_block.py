"""DFLASH as a server runs it, one block of one document at a time, with attention spelt out: the oracle of training."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.kernels.norm import HeadNorms, norm_heads
from slipstream.models.dflash import DFlash
from slipstream.tests.train.naive_draft import attended, head_logits, target_features, turned


class OneBlock:
    """Attention of a block whose anchor stands at position `anchor`, over context rows at positions 0 .. anchor - 1."""

    def __init__(self, theta: float, anchor: int) -> None:
        self.theta = theta
        self.anchor = anchor
        self.context: dict[int, list[tuple[int, Tensor, Tensor]]] = {}  # layer -> (position, k (G, D), v (G, D))

    def write(self, k: Tensor, v: Tensor, layer: int) -> None:
        assert len(k) == self.anchor
        self.context[layer] = [(i, turned(k[i], i, self.theta), v[i]) for i in range(self.anchor)]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        mask: str,
        window: int | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        q, k = norm_heads(q, k, norms)
        own = [(self.anchor + i, turned(k[i], self.anchor + i, self.theta), v[i]) for i in range(len(k))]
        rows = []
        for slot in range(len(q)):
            position = self.anchor + slot
            seen = [
                (key, value)
                for place, key, value in self.context[layer] + own
                if mask == "block" or (window is not None and position - window < place <= position)
            ]
            rows.append(attended(turned(q[slot], position, self.theta), *map(list, zip(*seen, strict=True))))
        return torch.stack(rows)


class NaiveBlock:
    """A draft and its target on one document (T,)."""

    def __init__(self, draft: DFlash, target: PreTrainedModel) -> None:
        self.draft = draft
        self.target = target

    def states(self, tokens: Tensor, anchor: int, size: int | None = None) -> Tensor:
        """Final states (S, H) of the block at `anchor`; of `tokens` only those up to the anchor are read."""
        config, embedding = self.draft.config, self.target.get_input_embeddings().weight.detach()
        attention = OneBlock(config.rope.theta, anchor)
        features = target_features(self.target, tokens[:anchor], config.feature_layers)
        self.draft.write_context(self.draft.fuse(features), attention)
        block = [int(tokens[anchor])] + [config.mask_token_id] * ((size or config.block_size) - 1)
        return self.draft(embedding[block], attention)

    def logits(self, states: Tensor) -> Tensor:
        return head_logits(self.draft, self.target, states)

    def propose(self, prefix: Tensor, depth: int) -> list[int]:
        """Greedy draft tokens after `prefix`, whose last token is the anchor; the block is no longer than they need."""
        best = self.logits(self.states(prefix, len(prefix) - 1, depth + 1)[1:]).argmax(dim=-1)
        ids = self.draft.target_ids
        return (best if ids is None else ids[best]).tolist()
