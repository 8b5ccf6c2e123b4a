"""MXFP4, in which gpt-oss is published: experts in 4-bit floats, brought into words that are decoded in registers."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.kernels.gemm.expert_weights import ExpertMatrix
from slipstream.kernels.gemm.mxfp4 import BLOCK, CHUNK, GROUP, WIDEST, MXFP4Weight, pack_words
from slipstream.models.layers.formats.base import FilePiece, FileTensor, Format, Quantization, QuantizedExperts, Tensors
from slipstream.models.layers.linear import CHUNK as BYTES
from slipstream.models.layers.moe import Experts

MXFP4_BLOCKS = "_blocks"
MXFP4_SCALES = "_scales"


class MXFP4Experts(QuantizedExperts):
    """4-bit floats, 32 of which share a power of two; inputs of 16 bits."""

    unit = BLOCK

    def __init__(self, like: Experts) -> None:
        super().__init__(like)
        self.formats = [MXFP4Format()]
        self.wide: set[str] = set()  # projections with a scale above 2
        for name, (outputs, inputs) in self.shapes.items():
            if inputs % BLOCK:
                raise ValueError(f"{name} has {inputs} inputs; MXFP4 needs a multiple of {BLOCK}")
            chunks = -(-inputs // CHUNK)
            count = self.spec.num_local
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
            scales = (self.spec.num_local, outputs, inputs // BLOCK)
            for end, shape in ((MXFP4_BLOCKS, scales + (BLOCK // 2,)), (MXFP4_SCALES, scales)):
                pieces[f"{path}.{name}{end}"] = FilePiece(name, FileTensor((shape,), (torch.uint8,)))
        return pieces

    def load_part(self, part: str, tensors: Tensors) -> None:
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


@dataclass(frozen=True, slots=True)
class MXFP4Format(Format):
    title = "MXFP4"
    variants = "mxfp4 (experts)"
    expert_tensors = (MXFP4_BLOCKS,)
    experts = MXFP4Experts

    @classmethod
    def read(cls, method: str, values: Mapping[str, Any]) -> Quantization | None:
        return Quantization("mxfp4", [((), cls())]) if method == "mxfp4" else None

    @property
    def description(self) -> str:
        return "mxfp4"
