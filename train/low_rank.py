"""Training of a LoRA adapter: a draft's weights stay, and low-rank factors beside them are trained alone.

A layer's weight becomes a function of its own and the factors, so that losses, evaluations and whatever reads weights
know nothing of them. A batch computes it once.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from slipstream.models.drafts.adapters import ALPHA, Factors, layers_to_adapt, part_names
from slipstream.models.layers.linear import Linear

FIRST = ".parametrizations.weight.0.a."  # in names of the factors that do not begin at zero


class LowRank(nn.Module):
    """W (O, I) -> W + ALPHA * B A, for each part of a fused projection with factors of its own; at first W."""

    def __init__(self, layer: Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = layer.in_features**-0.5  # as peft begins
        sizes = [rows.stop - rows.start for rows in layer.parts.values()] or [layer.out_features]
        firsts = [torch.rand(rank, layer.in_features, generator=generator, device="cpu") for _ in sizes]
        self.a = nn.ParameterList([(2 * first - 1) * bound for first in firsts])
        self.b = nn.ParameterList([torch.zeros(size, rank) for size in sizes])

    def forward(self, weight: Tensor) -> Tensor:
        changes = [b @ a for a, b in zip(self.a, self.b, strict=True)]
        return weight + ALPHA * torch.cat(changes)


def adapt_layers(draft: nn.Module, rank: int, seed: int) -> None:
    """Lets the factors of all linear layers but heads be trained, and nothing else."""
    draft.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for _, layer in [*layers_to_adapt(draft)]:
        low_rank = LowRank(layer, rank, generator).to(layer.get_parameter("weight").device)
        parametrize.register_parametrization(layer, "weight", low_rank)


def factors_of(draft: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Returns the factors in a draft's `state` by module, as files name it."""
    factors = {}
    for path, layer in layers_to_adapt(draft):
        for index, name in enumerate(part_names(path, layer)):
            a, b = (state[f"{path}.parametrizations.weight.0.{letter}.{index}"] for letter in "ab")
            factors[name] = Factors(a, b)
    return factors


def place_of(name: str) -> str:
    """A draft's name that is valid elsewhere: the absolute path of a folder."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name
