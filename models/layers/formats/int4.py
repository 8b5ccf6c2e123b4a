"""4-bit integers with groups of inputs that share a scale: AWQ's, GPTQ's and compressed-tensors' files.

Letters: I and O input and output channels, G groups of inputs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, cast

import torch
from torch import Tensor

from slipstream.kernels.gemm import int4, int4_weight
from slipstream.kernels.gemm.activation import Activation
from slipstream.kernels.gemm.choose import choose, device_of
from slipstream.kernels.kv.rope import Rotation
from slipstream.models.files.checkpoint import Values
from slipstream.models.files.quantization import expect, group_size_field, object_field
from slipstream.models.layers.formats.base import INTEGERS, FileTensor, Format, Quantization, QuantizedLinear, Tensors
from slipstream.models.layers.linear import CHUNK, Linear

GROUP_IDS = ("g_idx", "weight_g_idx")
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds its n-th column


@dataclass(frozen=True, slots=True)
class Int4Format(Format):
    """4-bit weights, multiplied by 16-bit inputs: (code - zero) * scale."""

    title = "4 bits"
    variants = "compressed-tensors pack-quantized (4 bits), awq (gemm), gptq (4 bits, v1 and v2)"
    tensors = dict.fromkeys(("qweight", "weight_packed"), INTEGERS)
    scale_tensors = ("weight_scale", "scales")
    across_outputs = ("qweight", "qzeros", "scales", "g_idx")  # AWQ's and GPTQ's

    layout: Literal["awq", "gptq", "packed"]
    group_size: int
    """Inputs that share a scale; -1: all."""
    symmetric: bool = False
    """All zeros are 8."""
    zero_offset: int = 0
    """Added to the file's zeros."""
    act_order: bool = False
    """Whether groups may be of inputs that are not neighbours (desc_act, actorder). The file's g_idx decides."""

    @classmethod
    def read(cls, method: str, values: Values) -> Quantization | None:
        if method == "awq":
            return cls._read_awq(values)
        return cls._read_gptq(values) if method == "gptq" else None

    @classmethod
    def _read_awq(cls, values: Values) -> Quantization:
        """config.json's names, or AutoAWQ's own ones of quant_config.json."""
        is_old = "bits" not in values and not values.keys().isdisjoint(("w_bit", "q_group_size"))
        expect(values, "w_bit" if is_old else "bits", 4)
        version = str(values.get("version", "gemm")).lower()
        if version != "gemm":
            raise ValueError(f"version is {values['version']!r}")
        expect(values, "zero_point", None, True)
        size = group_size_field(values, "group_size" if "group_size" in values else "q_group_size")
        return Quantization.uniform(f"awq, groups of {size}", cls("awq", size))

    @classmethod
    def _read_gptq(cls, values: Values) -> Quantization:
        expect(values, "bits", 4)
        expect(values, "checkpoint_format", None, "", "gptq", "gptq_v2")
        expect(values, "is_marlin_format", None, False)
        dynamic = object_field(values, "dynamic")
        for pattern in dynamic:
            change = object_field(dynamic, pattern)
            override = {name: change[name] for name in ("bits", "group_size", "sym") if name in change}
            if not pattern.startswith("-:") and any(values.get(name) != value for name, value in override.items()):
                raise ValueError(f"dynamic gives {pattern} another format, {override}")
        is_second = values.get("checkpoint_format") == "gptq_v2"
        size = group_size_field(values, "group_size")
        is_symmetric = bool(values.get("sym", True))
        is_ordered = bool(values.get("desc_act", False))
        format = cls("gptq", size, is_symmetric, zero_offset=0 if is_second else 1, act_order=is_ordered)
        return Quantization.uniform(f"gptq{'_v2' if is_second else ''}, groups of {size}", format)

    @classmethod
    def read_group(cls, kind: str, weights: Values, inputs: Values | None) -> Format | None:
        strategy = weights.get("strategy")
        is_int4 = (weights.get("type"), weights.get("num_bits")) == ("int", 4) and inputs is None
        if kind != "pack-quantized" or not is_int4 or strategy not in ("group", "channel"):
            return None
        size = -1 if strategy == "channel" else group_size_field(weights, "group_size")
        is_ordered = weights.get("actorder") in ("group", "dynamic")
        return cls("packed", size, symmetric=bool(weights.get("symmetric", True)), act_order=is_ordered)

    @property
    def description(self) -> str:
        return f"int4, groups of {self.group_size}"

    def joins(self, num_outputs: int, names: Sequence[str], tensors: Tensors) -> bool:
        """A layer has one order of its inputs."""
        return not self._has_order(names, tensors)

    def _has_order(self, names: Sequence[str], tensors: Tensors) -> bool:
        """Whether groups of a layer in files, whatever the config says, are of inputs that are not neighbours."""
        keys = (f"{name}.{kind}" for name, kind in product(names, GROUP_IDS))
        ids = [tensors[key] for key in keys if key in tensors]
        return any(is_shuffled(groups, self.group_size if self.group_size > 0 else len(groups)) for groups in ids)

    def layer(self, linear: Linear, names: Sequence[str], tensors: Tensors) -> "Int4Linear":
        return Int4Linear(linear, self, self._has_order(names, tensors))

    def stand_ins(self, num_inputs: int) -> dict[str, Tensor]:
        is_packed = self.layout == "packed"
        tensors = {"weight_packed" if is_packed else "qweight": torch.empty(0, dtype=torch.int32, device="meta")}
        if self.act_order:
            size = self.group_size if self.group_size > 0 else num_inputs
            groups = (torch.arange(num_inputs) // size).flip(0)  # any order but the usual one
            tensors["weight_g_idx" if is_packed else "g_idx"] = groups
        return tensors

    @staticmethod
    def shape_in_file(tensors: Tensors) -> tuple[int, int] | None:
        if "weight_packed" in tensors:
            outputs, words = tensors["weight_packed"].shape
            return outputs, words * 8
        if not tensors.keys() >= {"qweight", "scales"}:
            return None
        rows, outputs = tensors["qweight"].shape
        is_awq = tensors["scales"].shape[1] != outputs
        return (outputs * 8, rows) if is_awq else (outputs, rows * 8)


class Int4Linear(QuantizedLinear):
    """Weights of 4 bits, inputs of 16 (kernels/gemm/int4.py)."""

    format: Int4Format
    product_format = "int4"
    leaf_unit = int4_weight.CHUNK
    unsliced: tuple[str, ...] = GROUP_IDS

    def __init__(self, like: Linear, format: Int4Format, act_order: bool) -> None:
        """`act_order`: groups are not of neighbouring inputs (GPTQ's desc_act); then the weights are stored by group,
        and inputs are gathered."""
        super().__init__(like)
        self.format = format
        outputs = self.out_features
        inputs = self.in_features
        for part in self.parts or [None]:
            if self.size_of(part) % 8 or inputs % 8:
                raise ValueError(f"weights of {self.size_of(part)} x {inputs} do not fill words of 8; int4 needs that")
        padded_inputs = -(-inputs // int4_weight.CHUNK) * int4_weight.CHUNK
        self.group_size = format.group_size if format.group_size > 0 else padded_inputs
        self.num_groups = -(-inputs // self.group_size)
        self.register_buffer("words", torch.empty(outputs, int4_weight.num_words(inputs), dtype=torch.int32))
        units = int4_weight.num_pairs(inputs, self.group_size), outputs, 2
        self.register_buffer("scales", torch.empty(units))  # in the network's dtype
        if not format.symmetric:
            self.register_buffer("zeros", torch.empty(units, dtype=torch.int16))
        self.orders: dict[str | None, Tensor] = {}  # of parts, on the host
        self.units = (8, math.lcm(8, max(format.group_size, 1)))
        if act_order:
            self.register_buffer("permutation", torch.empty(inputs, dtype=torch.int64))
            self.units = (8, inputs)
            self.unsliced = ()

    def _file_tensors(self, outputs: int) -> dict[str, FileTensor]:
        inputs = self.in_features
        groups = self.num_groups
        scales = ((groups, outputs),)
        group_ids = ((inputs,),)
        if self.format.layout == "packed":
            return {
                "weight_packed": FileTensor(((outputs, inputs // 8),), INTEGERS),
                "weight_scale": FileTensor(((outputs, groups),)),
                "weight_shape": FileTensor(((2,),), INTEGERS, is_optional=True),
                "weight_zero_point": FileTensor(((outputs // 8, groups),), INTEGERS, is_optional=self.format.symmetric),
                "weight_g_idx": FileTensor(group_ids, INTEGERS, is_optional=True),
            }
        packed = (inputs // 8, outputs) if self.format.layout == "gptq" else (inputs, outputs // 8)
        names = {
            "qweight": FileTensor((packed,), INTEGERS),
            "qzeros": FileTensor(((groups, outputs // 8),), INTEGERS),
            "scales": FileTensor(scales),
        }
        if self.format.layout == "gptq":
            names["g_idx"] = FileTensor(group_ids, INTEGERS, is_optional=True)
            names["bias"] = FileTensor(((outputs,),), is_optional=True)  # zeros where the network has none
        return names

    def load_part(self, part: str | None, tensors: Tensors) -> None:
        rows = self.rows_of(part)
        order = self._order(part, tensors.get("g_idx", tensors.get("weight_g_idx")))
        scales = tensors["weight_scale"] if self.format.layout == "packed" else tensors["scales"].t()
        stored = self.get_buffer("scales")
        stored[:, rows] = int4_weight.pack_units(scales.to(stored.device), self.group_size, self.in_features).to(
            stored.dtype
        )
        self._load_zeros(rows, tensors)
        words = self.get_buffer("words")[rows]
        step = max(CHUNK // (16 * self.in_features) // 8 * 8, 8)
        for start in range(0, len(words), step):
            stop = min(start + step, len(words))
            codes = self._codes(tensors, slice(start, stop), words.device)
            words[start:stop] = int4_weight.pack_codes(codes if order is None else codes[:, order.to(codes.device)])
        if self.bias is not None:
            self._load_bias(part, tensors)
        elif "bias" in tensors and bool(tensors["bias"].count_nonzero()):
            raise ValueError(f"{part or 'a projection'} has a bias, which this architecture does not know")

    def _codes(self, tensors: Tensors, outputs: slice, device: torch.device) -> Tensor:
        """(outputs, I) of 0 to 15, in the file's order of inputs."""
        if self.format.layout == "packed":
            return _nibbles(tensors["weight_packed"][outputs].to(device)).flatten(1)
        if self.format.layout == "awq":
            return _awq_columns(tensors["qweight"], outputs, device).t()
        words = tensors["qweight"][:, outputs].to(device)  # (I / 8, outputs)
        return _nibbles(words.t()).flatten(1)

    def _load_zeros(self, rows: slice, tensors: Tensors) -> None:
        count = rows.stop - rows.start
        device = self.get_buffer("words").device
        if self.format.layout == "packed":
            if self.format.symmetric:
                return
            zeros = _nibbles(tensors["weight_zero_point"].to(device).t()).flatten(1).t()
        elif self.format.layout == "awq":
            zeros = _awq_columns(tensors["qzeros"], slice(0, count), device).t()
        else:
            words = tensors["qzeros"].to(device, torch.int64)
            zeros = _nibbles(words + 0x11111111 * self.format.zero_offset).flatten(1).t()  # a zero of 0 borrowed
        zeros = zeros.to(torch.uint8)
        if not self.format.symmetric:
            units = int4_weight.pack_units(zeros, self.group_size, self.in_features)
            self.get_buffer("zeros")[:, rows] = units.to(torch.int16)
        elif bool((zeros != int4_weight.SYMMETRIC_ZERO).any()):
            raise ValueError(
                "the config says that weights are symmetric, but zeros of the file are not 8; is sym false?"
            )

    def _order(self, part: str | None, groups: Tensor | None) -> Tensor | None:
        """Inputs by their group, from the group of each; None if that is their order in all parts."""
        if "permutation" not in self._buffers:
            return None
        groups = torch.arange(self.in_features) // self.group_size if groups is None else groups
        order = groups.argsort(stable=True)
        if is_shuffled(groups[order], self.group_size):
            raise ValueError(f"{part or 'a projection'}: its groups (g_idx) do not have {self.group_size} inputs each")
        if part in self.orders:  # loaded again
            self.orders.clear()
        self.orders[part] = order
        if any(not torch.equal(order, other) for other in self.orders.values()):
            raise ValueError(f"{', '.join(map(str, self.orders))} read one input, but their g_idx differ")
        self.get_buffer("permutation").copy_(order)
        return order

    def stored_in(self, buffers: Tensors) -> int4_weight.Int4Weight:
        zeros = None if self.format.symmetric else buffers["zeros"]
        return int4_weight.Int4Weight(buffers["words"], buffers["scales"], zeros, self.group_size, self.in_features)

    @property
    def stored(self) -> int4_weight.Int4Weight:
        return self.stored_in(cast(dict[str, Tensor], self._buffers))

    def _add_leaves(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        flat = self._sorted(x.reshape(-1, self.in_features))
        out = int4.int4_leaf_linear(flat, self.stored, self.leaves, self.bias, dtype, self.order)
        return out.view(*x.shape[:-1], out.shape[-1])

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        if activation != "silu" or self.bias is not None:  # for which there is no fused kernel
            return super().gated(x, activation)
        return self._multiply(x, gated=True)

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor | None:
        weight = self.stored
        if self.leaves or x.dim() != 2 or not rotation.is_whole or not int4.runs_kernel(x, weight):
            return None
        product = int4.int4_product(x, weight, "rotated", self.order is not None, rotation)
        if choose(product, device_of(x)).kernel == "apart":
            return None
        return int4.int4_linear_triton(self._sorted(x), weight, self.bias, order=self.order, rotation=rotation)

    def _multiply(self, x: Tensor, gated: bool) -> Tensor:
        flat = self._sorted(x.reshape(-1, self.in_features))
        out = int4.int4_linear(flat, self.stored, self.bias, gated, self.order)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _sorted(self, x: Tensor) -> Tensor:
        """x (M, I) with inputs by their groups."""
        return x.index_select(1, self.get_buffer("permutation")) if "permutation" in self._buffers else x

    def check_order(self, rows: Iterable[int]) -> None:
        """Checks the numbers of rows that dequantised weights multiply."""
        assert self.order is not None
        many = [count for count in rows if int4.dequantizes(self.stored, count, self.is_gated)]
        if many:
            weight = int4_weight.dequantize(self.stored, self.get_buffer("scales").dtype)
            if self.leaves:
                self.order.check_leaves(weight, self.leaves, many)
                return
            part = int4.part_of(self.stored, self.is_gated)
            self.order.check(weight, self.bias, many, gated=self.is_gated, part=part)

    def dequantized_bytes(self, dtype: torch.dtype) -> int:
        return self.out_features * self.in_features * dtype.itemsize

    def dequantized(self) -> Tensor:
        weight = int4_weight.dequantize(self.stored, torch.float32)
        return weight[:, self.get_buffer("permutation").argsort()] if "permutation" in self._buffers else weight


def _nibbles(words: Tensor) -> Tensor:
    """words (..., n) -> (..., n, 8) of 0 to 15, low nibbles first."""
    return words.int().unsqueeze(-1) >> torch.arange(0, 32, 4, device=words.device) & 15


def _awq_columns(words: Tensor, columns: slice, device: torch.device) -> Tensor:
    """words (n, O / 8) -> (n, columns), whose ends are multiples of 8."""
    packed = words[:, columns.start // 8 : columns.stop // 8].to(device)
    return _nibbles(packed)[..., torch.tensor(AWQ_PLACES, device=device)].flatten(1)


def is_shuffled(groups: Tensor, group_size: int) -> bool:
    """Whether the groups of inputs (I,) are not their positions over group_size."""
    return not torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // group_size)
