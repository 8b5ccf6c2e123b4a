"""How many bytes a target's weights take, before any are read: from its config files alone."""

from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from slipstream.models.layers.formats.base import Quantization, QuantizedLinear
from slipstream.models.layers.formats.table import read_quantization
from slipstream.models.layers.quantized import quantize_by_config
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import Target


class TargetSize(NamedTuple):
    """Bytes. Layers count as quantised where the checkpoint's config lists them; loading goes by the files' tensors."""

    resident: int
    read: int  # from files: more than resident where weights are quantised on the fly
    quantization: Quantization | None
    widest_dequantized: int = 0  # the largest layer that is dequantised where it multiplies many rows


def target_size(path: Path, spec: TargetSpec, dtype: torch.dtype, quantization: str | None = None) -> TargetSize:
    """Returns the size of the checkpoint in folder `path`, whose other weights are stored in `dtype`. `quantization`:
    "fp8" to quantise it on the fly."""
    formats = read_quantization(path, quantization)
    with torch.device("meta"):
        target = Target(spec)
    plain = weight_bytes(target, dtype)
    if formats is None:
        return TargetSize(plain, plain, None)
    quantize_by_config(target, formats)
    resident = weight_bytes(target, dtype)
    layers = [layer for layer in target.modules() if isinstance(layer, QuantizedLinear)]
    widest = max((layer.dequantized_bytes(dtype) for layer in layers), default=0)
    return TargetSize(resident, plain if formats.on_the_fly else resident, formats, widest)


def weight_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Returns the bytes that the weights of a module on the meta device will take. Tied weights count once."""
    sizes = dict[int, int]()
    for owner in module.modules():
        dtypes = getattr(owner, "dtypes", {})
        for name, tensor in chain(owner.named_parameters(recurse=False), owner.named_buffers(recurse=False)):
            stored = dtypes.get(name, dtype if tensor.is_floating_point() else tensor.dtype)
            sizes[id(tensor)] = tensor.numel() * stored.itemsize
    return sum(sizes.values())
