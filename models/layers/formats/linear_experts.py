"""Experts in a format of linear layers. They are stored as a quantised layer stores its weights, with the experts in
front, so each expert is loaded by the layer's own code.

Letters: E experts, I their intermediate size, H hidden.
"""

import copy
import math
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from slipstream.kernels.collectives.ranks import Ranks
from slipstream.kernels.gemm.expert_weights import ExpertMatrix, FP8Weight
from slipstream.kernels.gemm.fp8 import InputScales
from slipstream.models.layers.formats.base import FilePiece, FileTensor, QuantizedExperts, QuantizedLinear, Tensors
from slipstream.models.layers.moe import Experts

PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class LinearExperts(QuantizedExperts):
    """Experts in a format of linear layers.

    `layers` has a layer for each projection of one expert, on the meta device; the buffers of all experts are stored
    together. A static scale of inputs is the largest of all experts', since inputs are quantised before they go to
    experts.
    """

    def __init__(self, like: Experts, layers: Mapping[str, QuantizedLinear]) -> None:
        super().__init__(like)
        self.layers = dict(layers)
        self.formats = [layer.format for layer in layers.values()]
        self.unsliced = tuple(name for layer in layers.values() for name in layer.unsliced)
        self.unit = math.lcm(layers["gate_up_proj"].units[0], layers["down_proj"].units[1])
        dtypes = {}
        for name, layer in layers.items():
            for key, tensor in layer.named_buffers():
                stacked = torch.empty(self.spec.num_local, *tensor.shape, dtype=tensor.dtype)
                self.register_buffer(f"{name}_{key}", stacked)
                if key in layer.dtypes:
                    dtypes[f"{name}_{key}"] = layer.dtypes[key]
            if layer.shared_scale is not None:
                self.register_buffer(f"{name}_largest_scale", torch.empty(()))
                dtypes[f"{name}_largest_scale"] = torch.float32
        self.dtypes = dtypes  # type: ignore[misc]

    def expert(self, name: str, expert: int) -> QuantizedLinear:
        """A projection of one expert, whose buffers are views."""
        layer = copy.copy(self.layers[name])
        layer._buffers = {key: self.get_buffer(f"{name}_{key}")[expert] for key in layer._buffers}
        return layer

    def input_scaling(self) -> Callable[[], InputScales] | None:
        return None if self.layers["gate_up_proj"].input_scaling() is None else self._scales_of_inputs

    def _scales_of_inputs(self) -> InputScales:
        matrix = self.matrix("gate_up_proj")
        assert isinstance(matrix, FP8Weight)
        return matrix.inputs

    def matrix(self, name: str) -> ExpertMatrix:
        layer = self.layers[name]
        buffers = {key: self.get_buffer(f"{name}_{key}") for key in layer._buffers}
        if layer.shared_scale is not None:
            buffers[layer.shared_scale] = self.get_buffer(f"{name}_largest_scale")
        return layer.stored_in(buffers)

    def join(self, ranks: Ranks) -> None:
        super().join(ranks)
        for name, layer in self.layers.items():
            if layer.shared_scale is not None:
                scale = self.get_buffer(f"{name}_largest_scale")
                scale.copy_(ranks.collect(scale[None]).max())

    def file_pieces(self, path: str, fused: Container[str]) -> dict[str, FilePiece]:
        pieces: dict[str, FilePiece] = {}
        for name, parts in PROJECTIONS.items():
            layer = self.layers[name]
            if f"{path}.{name}" in fused:
                pieces |= self._fused_pieces(path, name)
                continue
            for expert in range(self.spec.num_local):
                for part in parts:
                    for key, expected in layer.file_tensors(part if layer.parts else None).items():
                        pieces[f"{path}.{expert}.{part}.{key}"] = FilePiece(f"{expert}.{part}", expected)
        return pieces

    def _fused_pieces(self, path: str, name: str) -> dict[str, FilePiece]:
        layer = self.layers[name]
        pieces = {}
        for end, key in layer.fused_names.items():
            expected = layer.file_tensors(None)[key]
            shapes = [shape[::-1] if self.spec.transposed and not end else shape for shape in expected.shapes]
            stacked = tuple((self.spec.num_local, *shape) for shape in shapes)
            pieces[f"{path}.{name}{end}"] = FilePiece(name, FileTensor(stacked, expected.dtypes))
        return pieces

    def load_part(self, part: str, tensors: Tensors) -> None:
        if part in PROJECTIONS:
            name = part
            for expert in range(self.spec.num_local):
                self.expert(name, expert).load_part(None, self._of_fused(name, expert, tensors))
        else:
            number, _, projection = part.partition(".")
            name = "down_proj" if projection == "down_proj" else "gate_up_proj"
            self.expert(name, int(number)).load_part(projection if self.layers[name].parts else None, tensors)
        shared = self.layers[name].shared_scale
        if shared is not None:
            self.get_buffer(f"{name}_largest_scale").copy_(self.get_buffer(f"{name}_{shared}").max())

    def _of_fused(self, name: str, expert: int, tensors: Tensors) -> dict[str, Tensor]:
        """An expert's tensors, as a linear layer's."""
        expert_tensors = {key: tensors[name + end][expert] for end, key in self.layers[name].fused_names.items()}
        if self.spec.transposed:
            weight = expert_tensors["weight"].t()
            if name == "gate_up_proj":  # gate and up alternate
                weight = torch.cat((weight[::2], weight[1::2]))
            expert_tensors["weight"] = weight
        return expert_tensors
