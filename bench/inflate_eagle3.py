"""An EAGLE3 draft enlarged (bench/inflate.py). Its residual stream starts from fc, which must pass the constant on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.bench import inflate_draft
from slipstream.bench.inflate_draft import CPU, big_fields, check_draft, feature_layers, vocabulary
from slipstream.bench.inflate_shapes import Shape
from slipstream.bench.inflate_weights import LIFT, Inflation, Layer, Part, read_parts, take, within
from slipstream.models.config import ModelConfig
from slipstream.models.eagle3 import Eagle3Config, config_to_json, load_eagle3

NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class Draft(inflate_draft.Draft):
    config: Eagle3Config

    @classmethod
    def load(cls, path: Path, model: ModelConfig) -> "Draft":
        module = load_eagle3(path, model, torch.bfloat16, CPU)
        return cls(module.config, read_parts(module, module.config.layer_config()))

    def check(self, model: ModelConfig, shape: Shape) -> None:
        check_draft(self.config, model, shape)

    def big_config(self, shape: Shape, **origin: Any) -> Eagle3Config:
        return replace(
            self.config,
            **big_fields(self.config, shape),
            target_hidden_size=shape.hidden_size,
            feature_layers=feature_layers(self.config, shape),
            **origin,
        )

    def big_json(self, shape: Shape, **origin: Any) -> dict[str, Any]:
        return config_to_json(self.big_config(shape, **origin))

    def tensors(self, inflation: Inflation, shape: Shape) -> Iterator[Part]:
        """The small draft's tokens come first in the big one's vocabulary."""
        small, config = None if inflation.random else self.weights, self.config
        is_normed = [layer == config.target_num_layers for layer in config.feature_layers]
        fusion = inflation.fusion(take(small, "fc"), range(len(is_normed)))
        yield "fc.weight", inflation.pass_constant(fusion, is_normed)
        sizes = Layer.of(shape, config.head_dim, num_inputs=2, qk_norm=False, norms=NORMS)
        for name, tensor in inflation.layer(within(small, "midlayer."), sizes):
            yield f"midlayer.{name}.weight", tensor
        yield "norm.weight", inflation.norm(take(small, "norm"), LIFT)
        yield "lm_head.weight", inflation.head(take(small, "lm_head"), shape.draft_vocab_size)
        yield from vocabulary(self.weights["d2t"], config.vocab_size, shape)
