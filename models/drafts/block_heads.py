"""Parts of block drafts besides their layers: convolutions inside the block, heads that join its slots, and a head that
predicts how far the target will accept it.

    convolution  each sublayer's input and output mix a row of the block with the row before (DFlash 2)
    selector     a score for every pair of neighbouring candidates, of low rank (DFlash 2)
    Markov head  a bias of low rank on a slot's logits by the token before (DSpark, arXiv 2607.05147)
    LiLiCorr     candidates of all slots attend to each other and are then scored in pairs (arXiv 2608.20530)
    confidence   the probability that a slot's token is accepted if all before it are (DSpark)

Modules and tensors are called as in public files, so that a state dict is the file. The convolution, the selector and
the Markov head are the identity at first: a draft that gets them drafts what it did before.

Letters: S rows of a block, K slots that draft, k candidates of a slot, p predecessors, H hidden, r rank, V target and
Vd draft vocabulary; ...: any leading dims.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.kernels.block_conv import block_conv
from slipstream.kernels.gemm.linear import linear
from slipstream.kernels.speculation.lattice import Factors
from slipstream.models.drafts.head_options import LiLiCorrConfig, MarkovType
from slipstream.models.layers.attention import Attention, Mask
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.linear import Embedding, Linear, derive
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import LayerSpec

NUM_FEATURES = 5  # of a candidate, for LiLiCorr
SPREAD = 0.02  # standard deviation of LiLiCorr's factor heads: zeros on both sides would get no gradient


class BlockConvolution(nn.Module):
    """A causal convolution along the rows of a block, whose kernel depends on the row (DFlash 2):

        y[i, c] = sum over t < taps of (base[t, c] + delta[i, t, c // group]) * x[i - t, c]

    with rows before the block's first taken as zero. The sublayer's normed input gives the deltas of two convolutions:
    side 0 is that of the input itself, side 1 that of the sublayer's output.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps = taps
        self.groups = hidden_size // group_size
        identity = torch.zeros(2, taps, hidden_size)
        identity[:, 0] = 1.0
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = Linear(hidden_size, 2 * taps * self.groups)
        nn.init.zeros_(self.kernel_projection.get_parameter("weight"))

    def prepare(self, x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Normed input (..., H), whole blocks of `block_size` rows one after another -> the convolved input (..., H),
        and the deltas (..., taps, H / group) for `finish`."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))
        return block_conv(x, delta[..., 0, :, :], self.base_kernel[0], block_size), delta[..., 1, :, :]

    def finish(self, y: Tensor, delta: Tensor, block_size: int) -> Tensor:
        """The sublayer's output (..., H), convolved."""
        return block_conv(y, delta, self.base_kernel[1], block_size)


class ConvolvedLayer(DecoderLayer):
    """A pre-norm layer whose attention and MLP each stand between two convolutions along the block."""

    def __init__(self, spec: LayerSpec, index: int, hidden_size: int, eps: float, taps: int, group_size: int) -> None:
        super().__init__(spec, index, hidden_size, eps)
        self.attention_conv = BlockConvolution(hidden_size, taps, group_size)
        self.mlp_conv = BlockConvolution(hidden_size, taps, group_size)

    def forward_block(
        self, residual: Tensor, delta: Tensor | None, attention: Attention, mask: Mask, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, of blocks of `block_size` rows, one after another."""
        normed, residual = self.norm_input(residual, delta, None)
        normed, kernel = self.attention_conv.prepare(normed, block_size)
        attended = self.attention_conv.finish(self.self_attn(normed, attention, mask), kernel, block_size)
        normed, residual = self.post_attention_layernorm.add(residual, attended)
        normed, kernel = self.mlp_conv.prepare(normed, block_size)
        return residual, self.mlp_conv.finish(self.mlp(normed), kernel, block_size)


class CandidateSelector(nn.Module):
    """Scores a candidate b after a predecessor a at a slot with state h (DFlash 2), `*` elementwise:

        score(a, b) = logit(b) + < A[a] * (W h), C[b] >

    Predecessors are target ids, since any token may be the anchor; successors are the draft's.
    """

    def __init__(self, hidden_size: int, rank: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank))  # A
        self.successor_codebook = nn.Parameter(torch.zeros(draft_vocab_size, rank))  # C
        self.hidden_projection = Linear(hidden_size, rank)  # W

    def forward(self, hidden: Tensor, unary: Tensor, previous: Tensor, successors: Tensor) -> Tensor:
        """hidden (..., H), unary (..., k) logits of the successors (..., k), draft ids; previous (..., p) target ids ->
        scores (..., p, k)."""
        query = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden).unsqueeze(-2)
        keys = F.embedding(successors, self.successor_codebook)
        return unary.unsqueeze(-2) + query.to(keys.dtype) @ keys.mT

    def factors(self) -> Factors:
        """For kernels: what scores pairs of tokens, with `slots`."""
        return Factors(self.predecessor_codebook, self.successor_codebook)

    def slots(self, hidden: Tensor) -> Tensor:
        """hidden (..., H) -> (..., r)."""
        return self.hidden_projection(hidden)

    def keep_successors(self, ids: Tensor) -> None:
        """Drops all successors but ids (Vd,), in this order. Any token may be a predecessor."""
        self.successor_codebook = nn.Parameter(self.successor_codebook[ids], requires_grad=False)


class MarkovHead(nn.Module):
    """A bias on a slot's logits by the token x before it (DSpark, arXiv 2607.05147, section 3):

        vanilla  W2 W1[x]
        gated    W2 (sigmoid(G [h ; W1[x]] + g) * W1[x]),  h the slot's state

    x is a target id, since any token may be the anchor.
    """

    def __init__(
        self, hidden_size: int, rank: int, vocab_size: int, draft_vocab_size: int, kind: MarkovType = "vanilla"
    ) -> None:
        super().__init__()
        self.markov_w1 = Embedding(vocab_size, rank)
        self.markov_w2 = Linear(rank, draft_vocab_size)
        self.gate_proj = Linear(hidden_size + rank, rank, bias=True) if kind == "gated" else None
        nn.init.normal_(self.markov_w1.get_parameter("weight"))
        nn.init.zeros_(self.output_rows)

    @property
    def output_rows(self) -> Tensor:
        """W2 (Vd, r)."""
        return self.markov_w2.get_parameter("weight")

    def embed(self, previous: Tensor) -> Tensor:
        """W1[x] (..., r) of target ids (...)."""
        return self.markov_w1(previous)

    def features(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Computes the inputs of W2 from hidden (..., H) of the slots and the target ids (...) before them -> (...,
        r)."""
        embedded = self.embed(previous)
        if self.gate_proj is None:
            return embedded
        gate = self.gate_proj(torch.cat((hidden.to(embedded.dtype), embedded), dim=-1))
        return torch.sigmoid(gate) * embedded

    def forward(self, hidden: Tensor, unary: Tensor, previous: Tensor, successors: Tensor) -> Tensor:
        """hidden (..., H), unary (..., k) logits of the successors (..., k), draft ids; previous (..., p) target ids ->
        logits (..., p, k) after each."""
        wide = hidden.unsqueeze(-2).expand(*previous.shape, -1)
        rows = F.embedding(successors, self.output_rows)  # (..., k, r)
        return unary.unsqueeze(-2) + self.features(wide, previous).to(rows.dtype) @ rows.mT

    def factors(self) -> Factors:
        """For kernels: what scores pairs of tokens, with `slots`. A gate's share of the token before it is computed for
        all tokens."""
        gates = None
        if (gate := self.gate_proj) is not None:
            rank = self.markov_w1.embedding_dim
            gates = derive(self, lambda: linear(self.markov_w1.weight, gate.weight[:, -rank:]))
        return Factors(self.markov_w1.weight, self.markov_w2.weight, gates)

    def slots(self, hidden: Tensor) -> Tensor | None:
        """hidden (..., H) -> a gate's share of it (..., r); None: there is no gate."""
        return (
            None
            if self.gate_proj is None
            else linear(hidden, self.gate_proj.weight[:, : hidden.shape[-1]], self.gate_proj.bias)
        )

    def keep_successors(self, ids: Tensor) -> None:
        """Drops all successors but ids (Vd,), in this order. Any token may be a predecessor."""
        self.markov_w2.weight = nn.Parameter(self.markov_w2.weight[ids], requires_grad=False)


class ConfidenceHead(nn.Module):
    """The logit of the probability that a slot's token is accepted if those before it are: w [h ; W1[x]] + b, with W1
    of the Markov head and x the token before, or w h + b without one (DSpark, arXiv 2607.05147, section 3)."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        """`rank`: of the Markov head's W1[x]; 0 without one."""
        super().__init__()
        self.proj = Linear(hidden_size + rank, 1, bias=True)

    def forward(self, hidden: Tensor, embedded: Tensor | None = None) -> Tensor:
        """hidden (..., H), embedded (..., r) where there is a Markov head -> logits (...)."""
        x = hidden if embedded is None else torch.cat((hidden, embedded.to(hidden.dtype)), dim=-1)
        return self.proj(x).squeeze(-1)

    def slots(self, hidden: Tensor) -> Tensor:
        """hidden (..., H) -> its share of the logits (...)."""
        return linear(hidden, self.proj.weight[:, : hidden.shape[-1]], self.proj.bias).squeeze(-1)

    def by_token(self, markov: MarkovHead | None) -> Tensor | None:
        """(V,) fp32 the share of the token before; None: it has none."""
        if markov is None:
            return None
        rank = markov.markov_w1.embedding_dim
        return derive(self, lambda: linear(markov.markov_w1.weight, self.proj.weight[:, -rank:]).squeeze(-1).float())


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


class LiLiCorr(nn.Module):
    """Scores the candidates of all slots against each other (arXiv 2608.20530).

    A node is a candidate c of a slot with state h: the sum of projections of c's embedding, of h, and of what its
    log-probability says, and of embeddings of slot and rank. Nodes attend to all others; then with a = the anchor's
    context, f = silu(W [x ; a ; x * a] + b), and u(.) = . / |.|

        score(i after the anchor) = scale * < u(O_a a), u(I f_i) >
        score(j after i)          = scale * < u(O f_i), u(I f_j) >

    A slot's logits enter through the nodes alone: there is no start from which it leaves a chain as it was.
    """

    def __init__(self, config: LiLiCorrConfig, hidden_size: int, block_size: int, eps: float) -> None:
        super().__init__()
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
