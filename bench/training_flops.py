"""Arithmetic that a training step needs, by part: what its products take in exact numbers, recomputed or wasted work
left out. A product of (m, k) and (k, n) is 2 m k n operations; backward it is that again for each operand that learns.
"""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.targets.config import MoESpec, TargetSpec
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
    config: Any = target.model.config
    lengths = document_lengths(batch)
    pairs = int((lengths * (lengths + 1) // 2).sum())
    width = (config.num_heads if isinstance(config, TargetSpec) else config.num_attention_heads) * config.head_dim
    return {
        "target": 2 * weights_read(target) * batch.tokens.numel(),
        "target attention": 4 * width * pairs * len(target.layers),
    }


def weights_read(target: FrozenTarget) -> int:
    """Entries of the matrices of the target's layers that a token is multiplied by: of experts, those it chooses."""
    config: Any = target.model.config
    if not isinstance(config, TargetSpec):
        return weights_of(target.layers)
    total, size = 0, config.hidden_size
    for layer in config.layers:
        attention, mlp = layer.attention, layer.mlp
        total += 2 * size * attention.head_dim * (attention.num_heads + attention.num_kv_heads)
        if isinstance(mlp, MoESpec):
            total += size * (3 * (mlp.top_k * mlp.intermediate_size + mlp.shared_size) + mlp.num_experts)
        else:
            total += 3 * size * mlp.intermediate_size
    return total


def document_lengths(batch: Batch) -> Tensor:
    names = batch.documents[batch.documents >= 0]
    return names.unique(return_counts=True)[1]


def dflash_flops(training: DFlashTraining, batch: Batch) -> dict[str, int]:
    draft, config = training.draft, training.draft.config
    blocks = find_blocks(batch, draw_anchors(batch, training.options.anchors, training.seed)[0], config.block_size)
    known = blocks.counts & (training.head_rows[blocks.labels] >= 0)
    tokens, slots = batch.tokens.numel(), blocks.positions.numel()
    keys_values = 2 * config.num_kv_heads * config.head_dim * config.hidden_size * config.num_layers
    pairs = int((blocks.anchors - blocks.starts + config.block_size).sum()) * config.block_size
    return target_flops(training.target, batch) | {
        "context": 4 * weights_of(draft.fc) * tokens + 6 * keys_values * tokens,
        "blocks": 6 * weights_of(draft.layers) * slots,
        "block attention": 12 * config.num_heads * config.head_dim * pairs * config.num_layers,
        "head": 4 * training.head.rows.numel() * int(known.sum()),
    }


def eagle3_flops(training: Eagle3Training, batch: Batch) -> dict[str, int]:
    """Of the steps of training-time test; their attention over keys of later steps, one each, is left out."""
    draft, steps = training.draft, training.options.ttt_steps
    rows, config = find_rows(batch, steps), training.draft.config
    asking, context = len(rows.asking), len(rows.context)
    attention, size = draft.midlayer.self_attn, config.hidden_size
    context_weights = (
        weights_of(attention) - weights_of(attention.o_proj) - attention.sizes[0] * config.head_dim * 2 * size
    )
    seen = torch.cat((rows.context, rows.asking))[rows.keys]
    document = batch.documents.flatten()
    first = torch.searchsorted(document[seen], document[rows.asking])
    pairs = int((torch.searchsorted(seen, rows.asking, right=True) - first).sum())
    predicted = sum(asking - step for step in range(steps))
    return target_flops(training.target, batch) | {
        "teacher": 2 * training.target.head.numel() * asking,
        "context": 4 * weights_of(draft.fc) * (asking + context) + 6 * context_weights * context,
        "draft": 6 * weights_of(draft.midlayer) * asking * steps,
        "draft attention": 12 * config.num_heads * config.head_dim * pairs * steps,
        "head": 6 * weights_of(draft.lm_head) * predicted,
    }
