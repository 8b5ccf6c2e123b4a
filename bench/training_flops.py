"""Arithmetic that a training step needs, by part: what its products take in exact numbers, recomputed or wasted work
left out. A product of (m, k) and (k, n) is 2 m k n operations; backward it is that again for each operand that learns.

Of elementwise arithmetic the convolutions' taps alone are counted, a multiplication and an addition each. Steps of
recurrent states are left out.
"""

import torch
from torch import Tensor, nn

from slipstream.models.drafts.convolution import BlockConvolution
from slipstream.models.drafts.dflash import DFlash
from slipstream.models.drafts.heads.confidence import ConfidenceHead
from slipstream.models.drafts.heads.lilicorr import LiLiCorr
from slipstream.models.drafts.heads.markov import MarkovHead
from slipstream.models.drafts.heads.selector import CandidateSelector
from slipstream.models.targets.config import AttentionSpec, DeltaNetSpec, MoESpec, TargetSpec
from slipstream.models.targets.frozen import FrozenTarget
from slipstream.train.batches import Batch
from slipstream.train.blocks import draw_anchors, find_blocks
from slipstream.train.dflash import DFlashTraining
from slipstream.train.eagle3 import Eagle3Training
from slipstream.train.training import DraftTraining
from slipstream.train.ttt import find_rows


def step_flops(training: DraftTraining, batch: Batch) -> dict[str, int]:
    """By part of the step, forward and backward together."""
    if isinstance(training, DFlashTraining):
        return dflash_flops(training, batch)
    assert isinstance(training, Eagle3Training)
    return eagle3_flops(training, batch)


def weights_of(module: nn.Module) -> int:
    """Entries of a module's matrices."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim == 2)


def target_flops(target: FrozenTarget, batch: Batch) -> dict[str, int]:
    """The frozen target's pass without its head."""
    config = target.model.config
    assert isinstance(config, TargetSpec)
    lengths = document_lengths(batch)
    pairs = int((lengths * (lengths + 1) // 2).sum())
    mixers = [layer.mixer for layer in config.layers]
    width = sum(mixer.num_heads * mixer.head_dim for mixer in mixers if isinstance(mixer, AttentionSpec))
    return {
        "target": 2 * weights_read(target) * batch.tokens.numel(),
        "target attention": 4 * width * pairs,
    }


def weights_read(target: FrozenTarget) -> int:
    """Entries of the matrices of the target's layers that a token is multiplied by: of experts, those it chooses."""
    config = target.model.config
    assert isinstance(config, TargetSpec)
    size = config.hidden_size
    total = 0
    for layer in config.layers:
        mlp = layer.mlp
        if isinstance(layer.mixer, DeltaNetSpec):
            values = layer.mixer.num_value_heads * (layer.mixer.value_dim + 1)
            total += size * (sum(layer.mixer.sizes) + 2 * values)
        else:
            attention = layer.attention
            total += 2 * size * attention.head_dim * (attention.num_heads + attention.num_kv_heads)
        if isinstance(mlp, MoESpec):
            total += size * (3 * (mlp.top_k * mlp.intermediate_size + mlp.shared_size) + mlp.num_experts)
        else:
            total += (2 if mlp.activation == "relu2" else 3) * size * mlp.intermediate_size
    return total


def document_lengths(batch: Batch) -> Tensor:
    names = batch.documents[batch.documents >= 0]
    return names.unique(return_counts=True)[1]


def dflash_flops(training: DFlashTraining, batch: Batch) -> dict[str, int]:
    """FLOPs of N blocks of S slots of which M have a loss. Logits of candidates, which training computes apart from
    those of the whole vocabulary, count only where the latter are not computed."""
    draft = training.draft
    config = training.draft.config
    anchors = draw_anchors(batch, training.options.anchors, training.seed)[0]
    blocks = find_blocks(batch, anchors, config.block_size, first_slot=config.first_slot)
    labelled = blocks.counts & (training.head_rows[blocks.labels] >= 0)
    counting = int((labelled if draft.head(ConfidenceHead) is None else blocks.counts).sum())
    tokens = batch.tokens.numel()
    slots = blocks.positions.numel()
    keys_values = 2 * config.num_kv_heads * config.head_dim * config.hidden_size * config.num_layers
    pairs = int((blocks.anchors - blocks.starts + config.block_size).sum()) * config.block_size
    convolutions = [module for module in draft.modules() if isinstance(module, BlockConvolution)]
    mixing = sum(weights_of(module.kernel_projection) for module in convolutions)
    flops = target_flops(training.target, batch) | {
        "context": 4 * weights_of(draft.fc) * tokens + 6 * keys_values * tokens,
        "blocks": 6 * (weights_of(draft.layers) - mixing) * slots,
        "block attention": 12 * config.num_heads * config.head_dim * pairs * config.num_layers,
        "head": 4 * training.head.rows.numel() * counting,
    }
    if convolutions:
        taps = sum(slots - len(blocks) * tap for tap in range(config.conv_kernel_size))  # none reaches before a block
        flops["convolutions"] = 6 * mixing * slots
        flops["convolutions' taps"] = 6 * 2 * config.hidden_size * taps * len(convolutions)
    num_whole = int(labelled.all(dim=1).sum())
    flops |= teacher_flops(training, counting, num_whole * config.num_proposals)
    return flops | block_head_flops(draft, counting) | scorer_flops(draft, num_whole)


def teacher_flops(training: DFlashTraining, counting: int, in_whole_blocks: int) -> dict[str, int]:
    """The target's head at slots with a loss, forward only: over the draft's vocabulary for a confidence head, else
    over the candidates of the selector, or of LiLiCorr in whole blocks."""
    draft = training.draft
    config = draft.config
    row = 2 * config.hidden_size
    if draft.head(ConfidenceHead) is not None:
        return {"teacher": row * len(training.head.rows) * counting}
    if draft.head(CandidateSelector) is not None:
        return {"teacher": row * config.num_candidates * counting}
    return {"teacher": row * config.num_candidates * in_whole_blocks} if draft.head(LiLiCorr) is not None else {}


def block_head_flops(draft: DFlash, counting: int) -> dict[str, int]:
    """Heads that read one slot and the token before it, of rank r: the selector's projection of the state and its
    products with k candidates, the Markov head's products with Vd tokens and its gate, the confidence head."""
    flops = {}
    if (selector := draft.head(CandidateSelector)) is not None:
        pairs = selector.successors.shape[1] * draft.config.num_candidates
        flops["selector"] = 6 * (weights_of(selector.hidden_projection) + pairs) * counting
    if (markov := draft.head(MarkovHead)) is not None:
        gate = 0 if markov.gate_proj is None else weights_of(markov.gate_proj)
        flops["Markov head"] = 6 * (weights_of(markov.markov_w2) + gate) * counting
    if (confidence := draft.head(ConfidenceHead)) is not None:
        flops["confidence head"] = 6 * weights_of(confidence) * counting
    return flops


def scorer_flops(draft: DFlash, num_blocks: int) -> dict[str, int]:
    """LiLiCorr over the K * k nodes of each whole block. Candidates' embeddings are frozen."""
    scorer = draft.head(LiLiCorr)
    config = draft.config
    if scorer is None:
        return {}
    K = config.num_proposals
    k = config.num_candidates
    factors = scorer.config.factor_dim
    nodes = K * k
    out = weights_of(scorer.out_head)  # the three heads of factors are alike
    by_node = 4 * weights_of(scorer.token_proj) + 6 * weights_of(scorer.feature_mlp) + 6 * weights_of(scorer.layers)
    by_node += 6 * weights_of(scorer.factor_input_proj)
    by_block = 6 * weights_of(scorer.context_proj) + 6 * weights_of(scorer.pass_hidden_proj) * K
    heads = 6 * out * (nodes + k * (K - 1) + 1)
    edges = 6 * factors * (k + k * k * (K - 1))
    width = scorer.out_head.in_features
    return {
        "scorer": num_blocks * (by_node * nodes + by_block + heads + edges),
        "scorer's attention": num_blocks * 12 * width * nodes**2 * len(scorer.layers),
    }


def eagle3_flops(training: Eagle3Training, batch: Batch) -> dict[str, int]:
    """FLOPs of the steps of training-time test; their attention over keys of later steps, one each, is left out."""
    draft = training.draft
    steps = training.options.ttt_steps
    rows = find_rows(batch, steps)
    config = training.draft.config
    asking = len(rows.asking)
    context = len(rows.context)
    attention = draft.midlayer.self_attn
    size = config.hidden_size
    context_weights = (
        weights_of(attention) - weights_of(attention.o_proj) - attention.sizes[0] * config.head_dim * 2 * size
    )
    keys = torch.cat((rows.context, rows.asking))[rows.keys]
    document = batch.documents.flatten()
    first = torch.searchsorted(document[keys], document[rows.asking])
    pairs = int((torch.searchsorted(keys, rows.asking, right=True) - first).sum())
    predicted = sum(asking - step for step in range(steps))
    return target_flops(training.target, batch) | {
        "teacher": 2 * training.target.head.numel() * asking,
        "context": 4 * weights_of(draft.fc) * (asking + context) + 6 * context_weights * context,
        "draft": 6 * weights_of(draft.midlayer) * asking * steps,
        "draft attention": 12 * config.num_heads * config.head_dim * pairs * steps,
        "head": 6 * weights_of(draft.lm_head) * predicted,
    }
