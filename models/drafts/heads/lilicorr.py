"""LiLiCorr: candidates of all slots attend to each other and are then scored in pairs (arXiv 2608.20530).

Losses, of blocks whose tokens the draft's vocabulary has, up to the first that is no candidate:

    scorer_ce       cross-entropy of a slot's scores after the text's token before, against the text
    scorer_regret   by how much the target prefers the text to what the scores choose
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.models.drafts.heads.base import (
    Block,
    Candidates,
    Head,
    HeadLosses,
    JoiningHead,
    TokenLosses,
    TrainedSlots,
)
from slipstream.models.drafts.heads.config import BlockSizes, LiLiCorrConfig
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.norm import RMSNorm

NUM_FEATURES = 5  # of a candidate
SPREAD = 0.02  # standard deviation of the factor heads: zeros on both sides would get no gradient


class ScorerMLP(nn.Module):
    """down(silu(up(x)))."""

    def __init__(self, size: int, inner: int, output: int) -> None:
        super().__init__()
        self.up_proj = Linear(size, inner, bias=True)
        self.down_proj = Linear(inner, output, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class ScorerAttention(nn.Module):
    """Full attention with a bias, by the names of torch's MultiheadAttention."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = Linear(size, size, bias=True)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x (B, N, h), bias (heads, N, N) -> (B, N, h)."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, N, h / heads) each
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype).unsqueeze(0))
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class ScorerLayer(nn.Module):
    """A pre-norm layer over the nodes of a lattice."""

    def __init__(self, size: int, config: LiLiCorrConfig, eps: float) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(size, eps)
        self.attn = ScorerAttention(size, config.num_heads)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = ScorerMLP(size, int(size * config.mlp_ratio), size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class LiLiCorr(JoiningHead):
    """Scores the candidates of all slots against each other.

    A node is a candidate c of a slot with state h: the sum of projections of c's embedding, of h, and of what its
    log-probability says, and of embeddings of slot and rank. Nodes attend to all others; then with a = the anchor's
    context, f = silu(W [x ; a ; x * a] + b), and u(.) = . / |.|

        score(i after the anchor) = scale * < u(O_a a), u(I f_i) >
        score(j after i)          = scale * < u(O f_i), u(I f_j) >

    A slot's logits enter through the nodes alone: there is no start from which it leaves a chain as it was.
    """

    Config = LiLiCorrConfig
    name = "lilicorr"
    is_identity = False
    is_noisy = False
    reads_context = True
    trains_candidates = True
    overlaps = False
    is_taught = True
    loss_weights = {"ce": 1.0, "scorer_ce": 0.25, "scorer_regret": 0.25}

    def __init__(self, config: LiLiCorrConfig, sizes: BlockSizes, heads: Sequence[Head]) -> None:
        super().__init__(config, sizes, heads)
        hidden_size = sizes.hidden_size
        block_size = sizes.block_size
        eps = sizes.rms_norm_eps
        self.config = config
        self.block_size = block_size
        size = config.hidden_size or hidden_size
        self.token_proj: nn.Module = nn.Identity() if size == hidden_size else Linear(hidden_size, size, bias=True)
        self.pass_hidden_proj = Linear(hidden_size, size, bias=True)
        self.context_proj = Linear(hidden_size, size, bias=True)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES)
        self.feature_mlp = ScorerMLP(NUM_FEATURES, size, size)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, block_size - 1, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.candidate_topk, size))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.num_heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.num_heads))
        self.layers = nn.ModuleList(ScorerLayer(size, config, eps) for _ in range(config.num_layers))
        self.output_norm = RMSNorm(size, eps)
        self.anchor_norm = RMSNorm(size, eps)
        self.factor_input_proj = Linear(3 * size, size, bias=True)
        self.out_head, self.in_head, self.anchor_out_head = (
            Linear(size, config.factor_dim, bias=True) for _ in range(3)
        )
        for head in (self.out_head, self.in_head, self.anchor_out_head):
            nn.init.normal_(head.get_parameter("weight"), std=SPREAD)
            nn.init.zeros_(head.get_parameter("bias"))

    def forward(self, embedded: Tensor, log_probs: Tensor, hidden: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """embedded (B, K, k, H) candidates' embeddings of the target, log_probs (B, K, k), hidden (B, K, H), context
        (B, H) of the last row before the block -> scores start (B, k) and edges (B, K - 1, k, k), fp32."""
        K, k = log_probs.shape[1:]
        nodes = self.token_proj(embedded) + self.pass_hidden_proj(hidden).unsqueeze(2)
        features = self.feature_norm(candidate_features(log_probs).to(nodes.dtype))
        nodes = nodes + self.feature_mlp(features) + self.slot_embedding[0, :, :K] + self.rank_embedding[0, :, :, :k]
        x = nodes.flatten(1, 2)
        bias = self.attention_bias(K, k)
        if not len(x):
            x = x + bias.sum()  # attention of no blocks gives it no gradient, which all processes wait for
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (K, k))
        anchor = self.anchor_norm(self.context_proj(context))  # (B, h)
        wide = anchor[:, None, None].expand_as(x)
        factors = F.silu(self.factor_input_proj(torch.cat((x, wide, x * wide), dim=-1)))
        first = self.unit(self.anchor_out_head(anchor))
        outgoing = self.unit(self.out_head(factors[:, :-1]))
        incoming = self.unit(self.in_head(factors))
        scale = self.config.logit_scale
        start = scale * (incoming[:, 0] @ first.unsqueeze(2)).squeeze(2)
        return start, scale * (outgoing @ incoming[:, 1:].mT)

    def scores(self, block: Block, candidates: Candidates) -> Tensor:
        """Adds the requests' noise to the scores: log-probabilities are read as in training, without it."""
        assert block.embed is not None
        assert block.context is not None
        embedded = block.embed(candidates.tokens)
        start, edges = self(embedded, candidates.values, block.hidden, block.context)
        k = start.shape[1]
        scores = torch.cat((start[:, None, None].expand(-1, -1, k, -1), edges), dim=1)
        return scores if block.noise is None else scores + block.noise(candidates)[:, :, None]

    def loss(self, slots: TrainedSlots, tokens: TokenLosses, weights: Mapping[str, float]) -> HeadLosses:
        """A candidate's log-probability keeps its gradient: the draft's layers learn from the scorer, too."""
        assert tokens.candidates is not None
        blocks = slots.whole_blocks
        shape = (len(blocks), *slots.is_known.shape[1:])
        numbers = torch.empty(slots.is_known.shape, dtype=torch.int64, device=slots.places.device)
        numbers.flatten()[slots.places] = torch.arange(len(slots.places), device=slots.places.device)
        slot_numbers = numbers[blocks].flatten()  # (B * K,) which of the M
        rows = tokens.candidates[slot_numbers]
        labels = slots.labels[slot_numbers]
        logits = slots.logits(torch.cat((rows, labels.unsqueeze(1)), dim=1), slot_numbers)
        normalisers = tokens.entropies[slot_numbers] + logits[:, -1]
        log_probs = (logits[:, :-1] - normalisers.unsqueeze(1)).unflatten(0, shape)
        embedded = slots.embed(rows).unflatten(0, shape)
        start, edges = self(embedded, log_probs, slots.hidden[blocks], slots.context(blocks))
        scored_slots = scorer_slots(start, edges, rows.unflatten(0, shape), labels.view(shape))
        teacher = slots.teacher(rows, slot_numbers).unflatten(0, shape)
        slot_weights = tokens.weights[blocks]
        losses = scorer_losses(scored_slots, teacher)
        return HeadLosses({name: (values, slot_weights) for name, values in losses.items()})

    def unit(self, x: Tensor) -> Tensor:
        return F.normalize(x.float(), dim=-1, eps=self.config.vector_eps)

    def attention_bias(self, slots: int, candidates: int) -> Tensor:
        """(heads, N, N) of the N = slots * candidates nodes: by the distance of their slots."""
        slot = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(candidates)
        distance = slot.unsqueeze(1) - slot
        same = (distance == 0) * self.same_slot_bias[:, None, None]
        return self.relative_slot_bias[:, distance + self.block_size - 1] + same


def candidate_features(log_probs: Tensor) -> Tensor:
    """log_probs (B, K, k), best first -> (B, K, k, 5): log p, p, log p - the best, rank from 0 to 1, is the best."""
    count = log_probs.shape[-1]
    log_probs = log_probs.float()
    rank = torch.arange(count, device=log_probs.device) / max(count - 1, 1)
    columns = log_probs, log_probs.exp(), log_probs - log_probs.amax(-1, keepdim=True), rank, (rank == 0).float()
    return torch.stack([column.expand_as(log_probs) for column in columns], dim=-1)


class ScorerSlots(NamedTuple):
    """Slots of whole blocks."""

    scores: Tensor  # (B, K, k) of a slot's candidates after the text's token before
    places: Tensor  # (B, K) where the text's token is among them
    inside: Tensor  # (B, K) bool: the text's tokens up to this one are all among the candidates


def scorer_slots(start: Tensor, edges: Tensor, rows: Tensor, labels: Tensor) -> ScorerSlots:
    """start (B, k), edges (B, K - 1, k, k), candidates' rows (B, K, k), labels (B, K) rows."""
    matches = rows == labels.unsqueeze(2)
    places = matches.long().argmax(dim=2)
    inside = matches.any(dim=2).long().cumprod(dim=1).bool()
    before = places[:, :-1, None, None].expand(-1, -1, 1, rows.shape[2])
    scores = torch.cat((start.unsqueeze(1), edges.gather(2, before).squeeze(2)), dim=1)
    return ScorerSlots(scores.float(), places, inside)


def scorer_losses(slots: ScorerSlots, teacher: Tensor) -> dict[str, Tensor]:
    """`teacher` (B, K, k): the target's logits of the candidates -> losses (B, K) by name, 0 outside the prefix."""
    scores = slots.scores
    gold = slots.places.unsqueeze(2)
    gold_scores = scores.gather(2, gold).squeeze(2)
    regret = F.relu(teacher.gather(2, gold) - teacher)
    losses = {
        "scorer_ce": scores.logsumexp(dim=2) - gold_scores,
        "scorer_regret": (scores.softmax(dim=2) * regret).sum(dim=2),
    }
    return {name: loss * slots.inside for name, loss in losses.items()}
