"""A DFLASH draft enlarged (bench/inflate.py) to the usual five layers over five target states.

Its residual stream starts from the target's embedding and ends at the target's head, so that the constant channel needs
nothing but the lift of the last norm. Added layers add next to nothing to the stream, and next to nothing is read of
added states. Block size and mask token stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.bench import inflate_draft
from slipstream.bench.inflate_draft import CPU, big_fields, check_draft, feature_layers, vocabulary
from slipstream.bench.inflate_shapes import Shape, check_room, places
from slipstream.bench.inflate_weights import LIFT, Inflation, Layer, Part, read_parts, take
from slipstream.models.config import ModelConfig
from slipstream.models.dflash import DFlashConfig, config_to_json, load_dflash

NUM_LAYERS = 5
NUM_STATES = 5


@dataclass(frozen=True, slots=True)
class Draft(inflate_draft.Draft):
    config: DFlashConfig

    @classmethod
    def load(cls, path: Path, model: ModelConfig) -> "Draft":
        module = load_dflash(path, model, torch.bfloat16, CPU)
        return cls(module.config, read_parts(module, module.config.layer_config()))

    def check(self, model: ModelConfig, shape: Shape) -> None:
        check_draft(self.config, model, shape)
        check_room("draft num_layers", self.config.num_layers, NUM_LAYERS)
        check_room("draft feature_layers", len(self.config.feature_layers), NUM_STATES)

    def states(self, shape: Shape) -> dict[int, int | None]:
        """States of the big target in rising order -> the small draft's feature that each is; None: an added one."""
        own = feature_layers(self.config, shape)
        free = [layer for layer in range(shape.num_layers) if layer not in own]
        count = NUM_STATES - len(own)
        added = [free[index * len(free) // count] for index in range(count)]
        return {layer: own.index(layer) if layer in own else None for layer in sorted((*own, *added))}

    def big_config(self, shape: Shape, **origin: Any) -> DFlashConfig:
        """An added layer has the window, or none, of the one before it."""
        layer_at = places(self.config.num_layers, NUM_LAYERS)
        before = [layer_at[max(big for big in layer_at if big <= index)] for index in range(NUM_LAYERS)]
        return replace(
            self.config,
            **big_fields(self.config, shape),
            num_layers=NUM_LAYERS,
            windowed_layers=tuple(index for index in range(NUM_LAYERS) if before[index] in self.config.windowed_layers),
            feature_layers=tuple(self.states(shape)),
            **origin,
        )

    def big_json(self, shape: Shape, **origin: Any) -> dict[str, Any]:
        return config_to_json(self.big_config(shape, **origin))

    def tensors(self, inflation: Inflation, shape: Shape) -> Iterator[Part]:
        small, config = None if inflation.random else self.weights, self.config
        yield "fc.weight", inflation.fusion(take(small, "fc"), list(self.states(shape).values()))
        yield "hidden_norm.weight", inflation.norm(take(small, "hidden_norm"))
        layer_at = places(config.num_layers, NUM_LAYERS)
        yield from inflation.layers(small, Layer.of(shape, config.head_dim), layer_at, NUM_LAYERS)
        yield "norm.weight", inflation.norm(take(small, "norm"), LIFT)
        if config.draft_vocab_size is not None:
            yield from vocabulary(self.weights["d2t"], config.vocab_size, shape)
