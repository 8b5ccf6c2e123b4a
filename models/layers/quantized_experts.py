"""Experts with quantised weights: how files hold them, and how they are stored for kernels/gemm/expert_weights.py.

As with linear layers, a network is built of plain experts, and `quantize_experts` puts quantised ones in their places
where a checkpoint's tensors are quantised. FP8 and 4-bit integers are stored as a quantised linear layer stores them,
with the experts in front: so each expert is loaded by the layer's own code. MXFP4, in which gpt-oss is published, is
brought into words that are decoded in registers.
Letters: E experts, I their intermediate size, H hidden.
"""

import copy
import math
from collections.abc import Container, Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from slipstream.kernels.gemm.expert_weights import ExpertMatrix, FP8Weight
from slipstream.kernels.gemm.fp8 import E4M3, InputScales
from slipstream.kernels.gemm.mxfp4 import BLOCK, CHUNK, GROUP, WIDEST, MXFP4Weight, pack_words
from slipstream.models.files.quantization import Format, FP8Format, Quantization
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.linear import CHUNK as BYTES
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.listed_tensors import listed_tensors
from slipstream.models.layers.moe import Experts
from slipstream.models.layers.quantized import (
    FLOATS,
    FileTensor,
    FP8Linear,
    Int4Linear,
    QuantizedLinear,
    format_in_file,
    quantize_linears,
    quantized_layer,
)

PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
FUSED_SCALES = "_scale_inv"  # of all experts' blocks in one tensor, as transformers 5 holds them
MXFP4_BLOCKS = "_blocks"
MXFP4_SCALES = "_scales"


class FilePiece(NamedTuple):
    """A tensor in files, and the part of the experts that it belongs to."""

    part: str
    expected: FileTensor


class QuantizedExperts(Experts):
    """Experts whose files hold other tensors than they store. Biases are stored as they are."""

    def __init__(self, like: Experts) -> None:
        """Takes the place of `like`, on the meta device."""
        nn.Module.__init__(self)
        self.spec = like.spec
        self.clamped = like.clamped
        self.hidden_size = like.down_proj.shape[1]
        self.gate_up_proj_bias = like.gate_up_proj_bias
        self.down_proj_bias = like.down_proj_bias

    def file_pieces(self, path: str, fused: Container[str]) -> dict[str, FilePiece]:
        """Maps names in files to pieces, for experts called `path`; `fused`: names of tensors that hold all experts."""
        raise NotImplementedError

    def load_part(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """Stores all tensors of a part, by the last part of their names. Raises ValueError for values that the format
        does not allow."""
        raise NotImplementedError


class MXFP4Experts(QuantizedExperts):
    """4-bit floats, 32 of which share a power of two; inputs of 16 bits."""

    unit = BLOCK

    def __init__(self, like: Experts) -> None:
        super().__init__(like)
        self.wide: set[str] = set()  # projections with a scale above 2
        for name, (outputs, inputs) in self.shapes.items():
            if inputs % BLOCK:
                raise ValueError(f"{name} has {inputs} inputs; MXFP4 needs a multiple of {BLOCK}")
            chunks = -(-inputs // CHUNK)
            count = self.spec.num_experts
            groups = outputs // GROUP
            self.register_buffer(f"{name}_words", torch.empty(count, groups, chunks, GROUP, BLOCK, dtype=torch.int16))
            self.register_buffer(f"{name}_scales", torch.empty(count, groups, chunks, GROUP, dtype=torch.int32))

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(O, I) of each projection."""
        size = self.spec.intermediate_size
        return {"gate_up_proj": (2 * size, self.hidden_size), "down_proj": (self.hidden_size, size)}

    def matrix(self, name: str) -> ExpertMatrix:
        words = self.get_buffer(f"{name}_words")
        scales = self.get_buffer(f"{name}_scales")
        return MXFP4Weight(words, scales, self.shapes[name][1], name in self.wide)

    def file_pieces(self, path: str, fused: Container[str]) -> dict[str, FilePiece]:
        pieces = {}
        for name, (outputs, inputs) in self.shapes.items():
            scales = (self.spec.num_experts, outputs, inputs // BLOCK)
            for end, shape in ((MXFP4_BLOCKS, scales + (BLOCK // 2,)), (MXFP4_SCALES, scales)):
                pieces[f"{path}.{name}{end}"] = FilePiece(name, FileTensor((shape,), (torch.uint8,)))
        return pieces

    def load_part(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        blocks = tensors[part + MXFP4_BLOCKS]
        scales = tensors[part + MXFP4_SCALES]
        largest = int(scales.max())
        if largest == 255:
            raise ValueError(f"{part}{MXFP4_SCALES} has 255, which is no power of two; the file is damaged")
        (self.wide.add if largest > WIDEST else self.wide.discard)(part)
        words = self.get_buffer(f"{part}_words")
        packed = self.get_buffer(f"{part}_scales")
        halves = 2 if part == "gate_up_proj" else 1  # gate and up alternate in files
        groups = max(1, BYTES // (64 * blocks[0, 0].nbytes * GROUP))
        for expert in range(len(blocks)):
            for half in range(halves):
                stored = [tensor[expert].chunk(halves)[half].split(groups) for tensor in (words, packed)]
                loaded = [tensor[expert, half::halves].split(groups * GROUP) for tensor in (blocks, scales)]
                for *places, block, scale in zip(*stored, *loaded, strict=True):
                    packed_block = pack_words(block.to(words.device), scale.to(words.device))
                    for place, tensor in zip(places, packed_block, strict=True):
                        place.copy_(tensor)


class LinearExperts(QuantizedExperts):
    """Experts in a format of linear layers: FP8 or 4-bit integers.

    `layers` has a layer for each projection of one expert, on the meta device; the buffers of all experts are stored
    together. A static scale of inputs is the largest of all experts', since inputs are quantised before they go to
    experts.
    """

    def __init__(self, like: Experts, layers: Mapping[str, QuantizedLinear]) -> None:
        super().__init__(like)
        self.layers = dict(layers)
        self.unit = math.lcm(layers["gate_up_proj"].units[0], layers["down_proj"].units[1])
        dtypes = {}
        for name, layer in layers.items():
            for key, tensor in layer.named_buffers():
                stacked = torch.empty(self.spec.num_experts, *tensor.shape, dtype=tensor.dtype)
                self.register_buffer(f"{name}_{key}", stacked)
                if key in layer.dtypes:
                    dtypes[f"{name}_{key}"] = layer.dtypes[key]
            if isinstance(layer, FP8Linear) and layer.format.static:
                self.register_buffer(f"{name}_largest_scale", torch.empty(()))
                dtypes[f"{name}_largest_scale"] = torch.float32
        self.dtypes = dtypes  # type: ignore[misc]

    def expert(self, name: str, expert: int) -> QuantizedLinear:
        """A projection of one expert, whose buffers are views."""
        layer = copy.copy(self.layers[name])
        layer._buffers = {key: self.get_buffer(f"{name}_{key}")[expert] for key in layer._buffers}
        return layer

    @property
    def is_fp8(self) -> bool:
        return isinstance(self.layers["gate_up_proj"], FP8Linear)

    def scales_of_inputs(self) -> InputScales:
        """Scales of the inputs of FP8 experts."""
        matrix = self.matrix("gate_up_proj")
        assert isinstance(matrix, FP8Weight)
        return matrix.inputs

    def matrix(self, name: str) -> ExpertMatrix:
        layer = self.layers[name]
        if isinstance(layer, FP8Linear):
            static = self.get_buffer(f"{name}_largest_scale") if layer.format.static else None
            scales = InputScales(static, layer.format.scales == "block")
            return FP8Weight(self.get_buffer(f"{name}_weight"), self.get_buffer(f"{name}_weight_scale"), scales)
        assert isinstance(layer, Int4Linear)
        layer = copy.copy(layer)
        layer._buffers = {key: self.get_buffer(f"{name}_{key}") for key in layer._buffers}
        return layer.stored

    def file_pieces(self, path: str, fused: Container[str]) -> dict[str, FilePiece]:
        pieces: dict[str, FilePiece] = {}
        for name, parts in PROJECTIONS.items():
            layer = self.layers[name]
            if f"{path}.{name}" in fused:
                pieces |= self._fused_pieces(path, name)
                continue
            for expert in range(self.spec.num_experts):
                for part in parts:
                    for key, expected in layer.file_tensors(part if layer.parts else None).items():
                        pieces[f"{path}.{expert}.{part}.{key}"] = FilePiece(f"{expert}.{part}", expected)
        return pieces

    def _fused_pieces(self, path: str, name: str) -> dict[str, FilePiece]:
        layer = self.layers[name]
        count = self.spec.num_experts
        assert isinstance(layer, FP8Linear)
        expected = layer.file_tensors(None)
        weight = expected["weight"]
        shape = weight.shapes[0][::-1] if self.spec.transposed else weight.shapes[0]
        pieces = {f"{path}.{name}": FilePiece(name, FileTensor(((count, *shape),), weight.dtypes))}
        if not layer.format.on_the_fly:
            sizes = tuple((count, *shape) for shape in expected[layer.format.scale_name].shapes)
            pieces[f"{path}.{name}{FUSED_SCALES}"] = FilePiece(name, FileTensor(sizes))
        return pieces

    def load_part(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        if part in PROJECTIONS:
            name = part
            for expert in range(self.spec.num_experts):
                self.expert(name, expert).load_part(None, self._of_fused(name, expert, tensors))
        else:
            expert = int(part.partition(".")[0])
            projection = part.partition(".")[2]
            name = "down_proj" if projection == "down_proj" else "gate_up_proj"
            self.expert(name, expert).load_part(projection if self.layers[name].parts else None, tensors)
        if f"{name}_largest_scale" in self._buffers:
            self.get_buffer(f"{name}_largest_scale").copy_(self.get_buffer(f"{name}_input_scale").max())

    def _of_fused(self, name: str, expert: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """An expert's tensors, as a linear layer's."""
        layer = cast(FP8Linear, self.layers[name])
        weight = tensors[name][expert]
        if self.spec.transposed:
            weight = weight.t()
            if name == "gate_up_proj":  # gate and up alternate
                weight = torch.cat((weight[::2], weight[1::2]))
        expert_tensors = {"weight": weight}
        if not layer.format.on_the_fly:
            expert_tensors[layer.format.scale_name] = tensors[name + FUSED_SCALES][expert]
        return expert_tensors


def quantize_experts(
    network: nn.Module, quantization: Quantization | None, tensors: Mapping[str, Tensor], device: torch.device
) -> None:
    """Puts quantised experts into `network`, on the meta device, where `tensors` of its files are quantised.

    Raises ValueError for experts of a layer that differ in format, formats that experts cannot have, and FP8 on a GPU
    that does not multiply it.
    """
    for path, experts in list(network.named_modules()):
        if isinstance(experts, Experts):
            with torch.device("meta"):
                quantized = _quantized(path, experts, quantization, tensors)
            if quantized is not None:
                parent, _, name = path.rpartition(".")
                setattr(network.get_submodule(parent), name, quantized)
                _check_device(path, quantized, device)
    for module in network.modules():
        for norm, reader in module.norm_readers if isinstance(module, DecoderLayer) else ():
            if isinstance(reader, LinearExperts) and reader.is_fp8:
                norm.quantize = reader.scales_of_inputs
                norm.keeps_rows = True


def quantize_by_config(network: nn.Module, quantization: Quantization | None) -> None:
    """Puts quantised layers and experts into `network`, on the meta device, as if files had each in the format that
    their config lists for it: for estimates and random weights."""
    tensors = {} if quantization is None else listed_tensors(network, quantization)
    quantize_linears(network, quantization, tensors)
    quantize_experts(network, quantization, tensors, torch.device("cpu"))


def _quantized(
    path: str, experts: Experts, quantization: Quantization | None, tensors: Mapping[str, Tensor]
) -> QuantizedExperts | None:
    if any(f"{path}.{name}{MXFP4_BLOCKS}" in tensors for name in PROJECTIONS):
        if quantization is None or quantization.on_the_fly:
            why = "leave quantization out" if quantization else "no file says how; add quantization_config"
            raise ValueError(f"{path} is quantised already; {why}")
        return MXFP4Experts(experts)
    formats = {name: _format(path, name, experts, quantization, tensors) for name in PROJECTIONS}
    if None in formats.values():
        if set(formats.values()) != {None}:
            raise ValueError(f"projections of {path} differ, all or none must be quantised: {formats}")
        return None
    layers: dict[str, QuantizedLinear] = {}
    for name, parts in PROJECTIONS.items():
        hidden, size = experts.down_proj.shape[1:]
        linear = Linear(size, hidden) if name == "down_proj" else Linear(hidden, dict.fromkeys(parts, size))
        names = [f"{path}.{expert}.{part}" for expert in range(experts.spec.num_experts) for part in parts]
        layers[name] = quantized_layer(linear, cast(Format, formats[name]), names, tensors)
        if "permutation" in layers[name]._buffers:
            raise ValueError(
                f"{path} has act order (groups of inputs that are not neighbours: g_idx), which is not supported for "
                "experts; use a checkpoint that was quantised with desc_act false"
            )
    return LinearExperts(experts, layers)


def _format(
    path: str, name: str, experts: Experts, quantization: Quantization | None, tensors: Mapping[str, Tensor]
) -> Format | None:
    """Format of a projection of all experts."""
    fused = tensors.get(f"{path}.{name}")
    if fused is not None:
        is_quantized = fused.dtype not in FLOATS
        format = format_in_file(f"{path}.{name}", quantization, tensors, is_quantized)
        if format is not None and not (
            isinstance(format, FP8Format) and (format.on_the_fly or format.scales == "block")
        ):
            raise ValueError(
                f"{path}.{name} holds all experts, which is read for 16 bits and FP8 in blocks alone; use a checkpoint "
                "that has its experts apart"
            )
        return format
    examples: dict[Format | None, str] = {}
    for expert in range(experts.spec.num_experts):
        for part in PROJECTIONS[name]:
            module = f"{path}.{expert}.{part}"
            examples.setdefault(format_in_file(module, quantization, tensors), module)
    if len(examples) > 1:
        raise ValueError(f"experts of {path} differ in format, and one kernel multiplies them: {examples}")
    return next(iter(examples))


def _check_device(path: str, experts: QuantizedExperts, device: torch.device) -> None:
    is_fp8 = any(tensor.dtype == E4M3 for tensor in experts.buffers())
    if is_fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        raise ValueError(
            f"{path} is in FP8, and {torch.cuda.get_device_name(device)} does not multiply it: experts in FP8 need "
            "compute capability 9.0 (Hopper) or later; use a checkpoint with 16 or 4 bits"
        )
