"""What bench/training.py trains: target and draft of a real model's sizes with random weights, random rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from slipstream.bench.inflate_weights import SHAPES, Shape
from slipstream.models.config import ModelConfig, default_feature_layers
from slipstream.models.dflash import DFlash, DFlashConfig, default_block_feature_layers
from slipstream.models.eagle3 import Eagle3, Eagle3Config
from slipstream.models.frozen_target import FrozenTarget
from slipstream.models.layers import RotaryEmbedding
from slipstream.train import dflash, eagle3
from slipstream.train.batches import Batch, collate
from slipstream.train.training import DraftTraining

TINY = replace(
    SHAPES["mid"],
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=96,
    vocab_size=512,
    draft_vocab_size=128,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """Options of this benchmark."""

    shape: str = "qwen3-8b"
    """Sizes of target and draft: qwen3-8b, llama31-8b, mid or tiny."""
    drafter: Literal["dflash", "eagle3"] = "dflash"
    """Which training program."""
    sequence: int = 4096
    """Tokens in a packed row."""
    rows: int = 1
    """Packed rows in a step."""
    document: int = 1024
    """Tokens in a document; the first quarter is the prompt."""
    layers: int = 5
    """Layers of a block draft."""
    block: int = 16
    """Tokens of a block."""
    anchors: int = 512
    """Blocks per row."""
    loss: Literal["decay", "dpace"] = "decay"
    """Weights of a block's slots."""
    ttt_steps: int = 7
    """Steps of EAGLE3's training-time test."""
    reduced: bool = False
    """Give a block draft EAGLE3's reduced vocabulary."""
    compile: Literal["none", "draft", "target", "all"] = "none"
    """What torch compiles: the draft, the target's layers."""
    steps: int = 10
    """Steps measured, after three that warm up."""
    profile: bool = False
    """List the kernels of a step."""
    output: str | None = None
    """File to append the JSON line to."""

    def __post_init__(self) -> None:
        if self.shape not in (*SHAPES, "tiny"):
            raise ValueError(f"shape is {self.shape!r}; choose one of {', '.join(SHAPES)}, tiny")

    @property
    def sizes(self) -> Shape:
        return TINY if self.shape == "tiny" else SHAPES[self.shape]


def build(config: StepConfig, device: torch.device) -> DraftTraining:
    """Target and draft with random weights, made on the device."""
    shape = config.sizes
    names = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
    hf = Qwen3Config(
        **{name: getattr(shape, name) for name in names},
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        architectures=["Qwen3ForCausalLM"],
    )
    model = ModelConfig.from_hf(hf)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        target = AutoModelForCausalLM.from_config(hf, dtype=dtype, attn_implementation="sdpa")
        frozen = partial(freeze, config, target)
        make = make_dflash if config.drafter == "dflash" else make_eagle3
        rope = RotaryEmbedding(model.rope, model.head_dim, config.sequence + max(config.block, config.ttt_steps))
        return make(config, model, frozen, rope.to(device))


def freeze(config: StepConfig, target: PreTrainedModel, layers: tuple[int, ...]) -> FrozenTarget:
    frozen = FrozenTarget(target, layers)
    if config.compile in ("target", "all"):
        frozen.compile_layers()
    return frozen


def make_dflash(
    config: StepConfig, model: ModelConfig, frozen: Callable[..., FrozenTarget], rope: RotaryEmbedding
) -> DraftTraining:
    layers = default_block_feature_layers(model.num_layers, config.layers)
    sizes = {"num_layers": config.layers, "block_size": config.block, "feature_layers": layers, "mask_token_id": 3}
    size = config.sizes.draft_vocab_size if config.reduced else None
    draft = DFlash(DFlashConfig.from_target(model, draft_vocab_size=size, **sizes))
    if config.compile in ("draft", "all"):
        draft.compile()
    options = dflash.DraftOptions(anchors=config.anchors, loss=config.loss)
    return dflash.DFlashTraining(draft, frozen(layers), rope, options, depth=config.block - 1, seed=0)


def make_eagle3(
    config: StepConfig, model: ModelConfig, frozen: Callable[..., FrozenTarget], rope: RotaryEmbedding
) -> DraftTraining:
    layers = default_feature_layers(model.num_layers)
    size = config.sizes.draft_vocab_size
    draft = Eagle3(Eagle3Config.from_target(model, draft_vocab_size=size, feature_layers=layers))
    if config.compile in ("draft", "all"):
        draft.compile()
    options = eagle3.DraftOptions(ttt_steps=config.ttt_steps)
    return eagle3.Eagle3Training(draft, frozen(layers), rope, options, depth=config.ttt_steps)


def make_batch(config: StepConfig) -> Batch:
    """Full rows of documents; the draft vocabulary is the lowest ids, so tokens are drawn from those."""
    generator = torch.Generator().manual_seed(0)
    prompt = config.document // 4
    rows = []
    for _ in range(config.rows):
        tokens = torch.randint(4, config.sizes.draft_vocab_size, (config.sequence,), generator=generator)
        pieces = [piece.tolist() for piece in tokens.split(config.document)]
        rows.append([(piece, [i >= prompt for i in range(len(piece))]) for piece in pieces])
    return collate(rows, config.sequence)
