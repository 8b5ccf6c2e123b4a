"""Stand-ins for the tensors by which quantised layers are known, where no files are read.

A checkpoint's config lists what is quantised. Such lists are not always right, so loading goes by the files' tensors;
but they are enough to count bytes before a checkpoint is downloaded.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slipstream.models.files.quantization import FP8Format, Quantization
from slipstream.models.layers.linear import Head, Linear
from slipstream.models.layers.moe import Experts
from slipstream.models.layers.quantized import GATES

MATRICES = ("gate_up_proj", "down_proj")  # of experts


def listed_tensors(network: nn.Module, quantization: Quantization) -> dict[str, Tensor]:
    """By names in files, on the meta device but for `g_idx`; for `quantize_linears`, which makes layers of the right
    sizes from them. Empty where weights are quantised on the fly: their files have 16 bits."""
    tensors: dict[str, Tensor] = {}
    if not quantization.on_the_fly:
        for path, module in network.named_modules():
            for name, num_inputs in _linears(path, module):
                tensors |= _of_linear(name, num_inputs, quantization)
            if isinstance(module, Experts) and quantization.name == "mxfp4" and not quantization.ignores(path):
                tensors |= {f"{path}.{name}_blocks": _empty(torch.uint8) for name in MATRICES}
    return tensors


def _linears(path: str, module: nn.Module) -> Iterator[tuple[str, int]]:
    """Names and numbers of inputs of the linear layers that files have for a module."""
    if isinstance(module, Linear) and not isinstance(module, Head) and not path.endswith(GATES):
        parent = path.rpartition(".")[0]
        for name in [f"{parent}.{part}" for part in module.parts] or [path]:
            yield name, module.in_features
    elif isinstance(module, Experts):
        for matrix in MATRICES:
            for part in module.parts(matrix):
                yield f"{path}.{part.removesuffix('.weight')}", module.get_parameter(matrix).shape[-1]


def _of_linear(name: str, num_inputs: int, quantization: Quantization) -> dict[str, Tensor]:
    format = quantization.listed_format(name)
    if format is None:
        return {}
    if isinstance(format, FP8Format):
        return {f"{name}.weight": _empty(torch.float8_e4m3fn)}
    is_packed = format.layout == "packed"
    tensors = {f"{name}.{'weight_packed' if is_packed else 'qweight'}": _empty(torch.int32)}
    if format.act_order:
        size = format.group_size if format.group_size > 0 else num_inputs
        groups = (torch.arange(num_inputs) // size).flip(0)  # any order but the usual one
        tensors[f"{name}.{'weight_g_idx' if is_packed else 'g_idx'}"] = groups
    return tensors


def _empty(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device="meta")
