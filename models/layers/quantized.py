"""Linear layers with quantised weights: which they are, how they are stored, what multiplies them.

A network is built of plain layers; `quantize_linears` puts quantised ones in their places where a checkpoint's tensors
are quantised. A format's tensors are brought into one storage when they are loaded. Embeddings, norms and the head stay
as they are; a quantised head is dequantised, since drafts share it.
Letters: I and O input and output channels, G groups of inputs.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from slipstream.kernels.gemm import fp8, int4, int4_weight, streamed_fp8
from slipstream.kernels.gemm.activation import Activation, activation_mul, silu_mul
from slipstream.kernels.gemm.fixed_order import FP8Product
from slipstream.kernels.gemm.small_m import rotates
from slipstream.kernels.gemm.tiling import choose_tiling
from slipstream.kernels.kv.rope import Rotation
from slipstream.models.files.quantization import BLOCK, Format, FP8Format, Int4Format, Quantization
from slipstream.models.layers.decoder_layer import DecoderLayer
from slipstream.models.layers.linear import CHUNK, Head, Linear, copy_converted
from slipstream.models.layers.mlp import GatedMLP

logger = logging.getLogger(__name__)

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
QUANTIZED = {"weight": (torch.float8_e4m3fn, torch.float8_e5m2), "qweight": INTEGERS, "weight_packed": INTEGERS}
"""Tensors by which a quantised layer is known, with their dtypes."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds its n-th column
GATES = ".shared_expert_gate"  # routes, as a router does, which is not quantised either
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Ends of names of tensors for a KV cache in FP8 (models/targets/cache_scales.py)."""


class FileTensor(NamedTuple):
    """Shapes and dtypes that a file's tensor may have."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    is_optional: bool = False


class QuantizedLinear(Linear):
    """A Linear whose files hold other tensors than it stores."""

    storage: ClassVar[Mapping[str, torch.dtype]] = {}
    """Buffers and their dtypes."""

    def __init__(self, like: Linear) -> None:
        """Takes the place of `like`, a layer on the meta device."""
        nn.Module.__init__(self)
        self.in_features = like.in_features
        self.out_features = like.out_features
        self.parts = like.parts
        self.bias = like.bias
        self.dtypes = dict(self.storage)  # type: ignore[misc]

    def file_tensors(self, part: str | None) -> dict[str, FileTensor]:
        """Tensors of a part in files, or of all parts, by name."""
        tensors = self._file_tensors(self.size_of(part))
        if self.bias is not None:
            tensors["bias"] = FileTensor(((self.size_of(part),),))
        return tensors

    def _file_tensors(self, outputs: int) -> dict[str, FileTensor]:
        raise NotImplementedError

    def load_part(self, part: str | None, tensors: Mapping[str, Tensor]) -> None:
        """Stores all tensors of a part. Raises ValueError for values that the format does not allow."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """(O, I) fp32."""
        raise NotImplementedError

    def rows_of(self, part: str | None) -> slice:
        return self.parts.get(part, slice(0, self.out_features))

    def size_of(self, part: str | None) -> int:
        rows = self.rows_of(part)
        return rows.stop - rows.start

    def check_order(self, rows: Iterable[int]) -> None:
        """Its kernels have one order."""

    def _load_bias(self, part: str | None, tensors: Mapping[str, Tensor]) -> None:
        if self.bias is not None:
            copy_converted(self.bias[self.rows_of(part)], tensors["bias"])


class FP8Linear(QuantizedLinear):
    """Weights and inputs in e4m3 (kernels/gemm/fp8.py). A norm that it alone reads may quantise its inputs.

    `quantize`: the scales of what reads its gated outputs, where that is one FP8 layer; then rows (T, O / 2) may come
    quantised.
    """

    quantize: Callable[[], fp8.InputScales] | None = None
    sums_fast = False  # without an order: sums of many rows by the tensor cores alone, in less than fp32
    storage = {"weight": fp8.E4M3} | dict.fromkeys(("weight_scale", "input_scales", "input_scale"), torch.float32)

    def __init__(self, like: Linear, format: FP8Format) -> None:
        super().__init__(like)
        self.format = format
        outputs = self.out_features
        inputs = self.in_features
        odd = {name: rows for name, rows in self.parts.items() if rows.start % BLOCK}
        if format.scales == "block" and odd:
            raise ValueError(f"parts of a projection begin within a block of {BLOCK} outputs: {odd}")
        blocks = -(-outputs // BLOCK), -(-inputs // BLOCK)
        self.register_buffer("weight", torch.empty(outputs, inputs, dtype=fp8.E4M3))
        self.register_buffer("weight_scale", torch.empty(blocks if format.scales == "block" else outputs))
        if format.static:
            self.register_buffer("input_scales", torch.empty(max(len(self.parts), 1)))  # by part
            self.register_buffer("input_scale", torch.empty(()))  # the largest: parts have one input
        if format.scales == "block":
            self.units = (BLOCK, BLOCK)

    def _file_tensors(self, outputs: int) -> dict[str, FileTensor]:
        inputs = self.in_features
        if self.format.on_the_fly:
            return {"weight": FileTensor(((outputs, inputs),))}
        blocks = -(-outputs // BLOCK), -(-inputs // BLOCK)
        shapes: dict[str, tuple[tuple[int, ...], ...]] = {
            "tensor": ((), (1,), (1, 1)),
            "channel": ((outputs, 1), (outputs,)),
            "block": (blocks, (blocks[0], 1, blocks[1], 1)),
        }
        single = ((), (1,), (1, 1))
        return {
            "weight": FileTensor(((outputs, inputs),), (fp8.E4M3,)),
            self.format.scale_name: FileTensor(shapes[self.format.scales]),
            "input_scale": FileTensor(single, is_optional=not self.format.static),
        }

    def load_part(self, part: str | None, tensors: Mapping[str, Tensor]) -> None:
        rows = self.rows_of(part)
        weight = self.get_buffer("weight")[rows]
        if self.format.on_the_fly:
            self._quantize(weight, self.get_buffer("weight_scale")[rows], tensors["weight"])
        else:
            copy_converted(weight, tensors["weight"])
            scale = tensors[self.format.scale_name]
            if self.format.scales == "block":
                blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
                scale = scale.reshape(scale.shape[0], -1)
                place = self.get_buffer("weight_scale")[blocks]
            else:
                place = self.get_buffer("weight_scale")[rows]
            place.copy_(scale.to(place.device).float().reshape(place.shape if scale.numel() > 1 else ()))
        if self.format.static:
            scales = self.get_buffer("input_scales")
            scales[list(self.parts).index(part) if part is not None else slice(None)] = tensors["input_scale"].item()
            self.get_buffer("input_scale").copy_(scales.max())
        self._load_bias(part, tensors)

    @staticmethod
    def _quantize(place: Tensor, scales: Tensor, weight: Tensor) -> None:
        rows = max(1, CHUNK // (16 * weight.shape[1]))  # in fp32, some times over
        for codes, chunk_scales, chunk in zip(place.split(rows), scales.split(rows), weight.split(rows), strict=True):
            quantized, new_scales = fp8.quantize_weight(chunk.to(place.device))
            codes.copy_(quantized)
            chunk_scales.copy_(new_scales)

    def forward(self, input: Tensor | fp8.QuantizedRows) -> Tensor:
        return self._multiply(input, gated=False)

    def gated(self, x: Tensor | fp8.QuantizedRows, activation: Activation = "silu") -> Tensor:
        if activation != "silu":  # for which there is no fused kernel
            return activation_mul(self(x), activation)
        rows = x.codes if isinstance(x, fp8.QuantizedRows) else x
        quantize = self.quantize
        if quantize is not None and rows.dim() == 2 and len(rows) > fp8.FEW_GATED_ROWS:  # few: gated by the product
            return cast(Tensor, fp8.quantized_silu_mul(self(x), quantize()))
        return silu_mul(self(x)) if self.bias is not None else self._multiply(x, gated=True)

    def gated_mlp(self, x: Tensor | fp8.QuantizedRows, down: Linear, activation: Activation = "silu") -> Tensor | None:
        if not isinstance(down, FP8Linear) or activation != "silu":
            return None
        gate_up = self._matrix
        down_matrix = down._matrix  # noqa: SLF001  of the same class
        is_plain = self.bias is None and down.bias is None and not down.format.static
        if not is_plain or not streamed_fp8.streams_fp8(x, gate_up, down_matrix):
            return None
        return streamed_fp8.fp8_mlp(self._quantized(x), gate_up, down_matrix)

    @property
    def _matrix(self) -> streamed_fp8.FP8Matrix:
        return streamed_fp8.FP8Matrix(self.get_buffer("weight"), self.get_buffer("weight_scale"))

    def rotated(self, x: Tensor | fp8.QuantizedRows, rotation: Rotation) -> Tensor | None:
        weight, scale = self._matrix
        rows = x.codes if isinstance(x, fp8.QuantizedRows) else x
        if rows.dim() != 2 or len(rows) > fp8.FEW_ROWS or not fp8.runs_kernels(rows, self.in_features):
            return None
        if not rotates(weight, rotation) or self._is_by_library(len(rows)):
            return None
        return fp8.fp8_linear_triton(self._quantized(x), weight, scale, self.bias, rotation=rotation)

    def _quantized(self, x: Tensor | fp8.QuantizedRows) -> fp8.QuantizedRows:
        return x if isinstance(x, fp8.QuantizedRows) else fp8.quantize_rows(x, self.scales_of_inputs())

    def scales_of_inputs(self) -> fp8.InputScales:
        static = self.get_buffer("input_scale") if self.format.static else None
        return fp8.InputScales(static, self.format.scales == "block")

    def check_order(self, rows: Iterable[int]) -> None:
        assert self.order is not None
        by_library = self.order.fp8_by_library.setdefault(self._product, set())
        by_library |= fp8.rows_by_library(rows, *self._matrix, self.bias)

    @property
    def _product(self) -> FP8Product:
        return self.out_features, self.in_features, self.bias is not None, self.format.scales == "block"

    def _multiply(self, x: Tensor | fp8.QuantizedRows, gated: bool) -> Tensor:
        weight, scale = self._matrix
        if not isinstance(x, fp8.QuantizedRows):
            rows = fp8.quantize_rows(x.reshape(-1, self.in_features), self.scales_of_inputs())
            out = self._multiply(rows, gated)
            return out.view(*x.shape[:-1], out.shape[-1])
        if not gated and (split := self._library_parts(x)):
            fast = self.sums_fast and self.order is None
            return fp8.library_linear(x, weight, scale, self.bias, split, fast=fast)
        return fp8.fp8_linear(x, weight, scale, self.bias, gated)

    def _library_parts(self, rows: fp8.QuantizedRows) -> int:
        """In how many parts the library multiplies; 0 where our kernels do: in an order, where it was not seen to keep
        it, and without one for few rows."""
        if self.order is not None:
            by_library = self._is_by_library(len(rows.codes))
            return choose_tiling(self.out_features, self.in_features).split if by_library else 0
        weight, scale = self._matrix
        return int(len(rows.codes) > fp8.FEW_ROWS and fp8.has_library(rows, weight, scale))

    def _is_by_library(self, num_rows: int) -> bool:
        """In an order: whether the library keeps it and is faster."""
        return self.order is not None and num_rows in self.order.fp8_by_library.get(self._product, ())

    def dequantized(self) -> Tensor:
        return fp8.dequantize_weight(self.get_buffer("weight"), self.get_buffer("weight_scale"))


class Int4Linear(QuantizedLinear):
    """Weights of 4 bits, inputs of 16 (kernels/gemm/int4.py)."""

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

    def load_part(self, part: str | None, tensors: Mapping[str, Tensor]) -> None:
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

    def _codes(self, tensors: Mapping[str, Tensor], outputs: slice, device: torch.device) -> Tensor:
        """(outputs, I) of 0 to 15, in the file's order of inputs."""
        if self.format.layout == "packed":
            return _nibbles(tensors["weight_packed"][outputs].to(device)).flatten(1)
        if self.format.layout == "awq":
            return _awq_columns(tensors["qweight"], outputs, device).t()
        words = tensors["qweight"][:, outputs].to(device)  # (I / 8, outputs)
        return _nibbles(words.t()).flatten(1)

    def _load_zeros(self, rows: slice, tensors: Mapping[str, Tensor]) -> None:
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

    @property
    def stored(self) -> int4_weight.Int4Weight:
        zeros = None if self.format.symmetric else self.get_buffer("zeros")
        return int4_weight.Int4Weight(
            self.get_buffer("words"), self.get_buffer("scales"), zeros, self.group_size, self.in_features
        )

    def forward(self, input: Tensor) -> Tensor:
        return self._multiply(input, gated=False)

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        if activation != "silu":  # for which there is no fused kernel
            return activation_mul(self(x), activation)
        return silu_mul(self(x)) if self.bias is not None else self._multiply(x, gated=True)

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor | None:
        weight = self.stored
        if x.dim() != 2 or len(x) > int4.FEW_ROWS or not int4.runs_kernel(x, weight):
            return None
        if not rotation.fits(int4.choose_int4_tiling(self.out_features, self.in_features).outputs):
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
            part = int4.part_of(self.stored, self.is_gated)
            self.order.check(weight, self.bias, many, gated=self.is_gated, part=part)

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


def quantize_linears(network: nn.Module, quantization: Quantization | None, tensors: Mapping[str, Tensor]) -> None:
    """Puts quantised layers into `network`, on the meta device, where `tensors` of its files are quantised.

    Heads stay as they are (`dequantize_head`). Raises ValueError for a fused projection whose parts differ.
    """
    is_on_the_fly = quantization is not None and quantization.on_the_fly
    for path, linear in list(network.named_modules()):
        if is_on_the_fly and path.endswith(GATES):
            continue
        if isinstance(linear, Linear) and not isinstance(linear, Head):
            quantized = _quantized(path, linear, quantization, tensors)
            if quantized is not None:
                parent, _, name = path.rpartition(".")
                setattr(network.get_submodule(parent), name, quantized)
    for module in network.modules():
        for norm, reader in module.norm_readers if isinstance(module, DecoderLayer) else ():
            norm.quantize = reader.scales_of_inputs if isinstance(reader, FP8Linear) else None
        if isinstance(module, GatedMLP) and isinstance(module.gate_up_proj, FP8Linear):
            down = module.down_proj
            module.gate_up_proj.quantize = down.scales_of_inputs if isinstance(down, FP8Linear) else None


def _quantized(
    path: str, linear: Linear, quantization: Quantization | None, tensors: Mapping[str, Tensor]
) -> QuantizedLinear | None:
    parent, _, name = path.rpartition(".")
    names = [f"{parent}.{part}".removeprefix(".") for part in linear.parts]
    if not names or any(f"{path}.{kind}" in tensors for kind in QUANTIZED):
        names = [path]
    format_of_part = {name: format_in_file(name, quantization, tensors) for name in names}
    formats = set(format_of_part.values())
    if len(formats) > 1:
        raise ValueError(f"parts of {path} differ in format, and it multiplies them at once: {format_of_part}")
    (format,) = formats
    if format is None:
        return None
    with torch.device("meta"):
        return quantized_layer(linear, format, names, tensors)


def format_in_file(
    name: str, quantization: Quantization | None, tensors: Mapping[str, Tensor], is_quantized: bool | None = None
) -> Format | None:
    """Format of the linear layer with this name in files; None for 16 or 32 bits. `is_quantized`: whether its tensors
    are, where they have other names than a layer's."""
    if is_quantized is None:
        stored = ((tensors.get(f"{name}.{kind}"), dtypes) for kind, dtypes in QUANTIZED.items())
        is_quantized = any(tensor is not None and tensor.dtype in dtypes for tensor, dtypes in stored)
    if quantization is not None and quantization.on_the_fly != is_quantized:
        return quantization.format_of(name)
    if is_quantized:
        why = "leave quantization out" if quantization else "no file says how; add quantization_config to config.json"
        raise ValueError(f"{name} is quantised already; {why}")
    return None


def quantized_layer(
    linear: Linear, format: Format, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> QuantizedLinear:
    """In the place of `linear`, on the meta device; `names` are those of its parts in files."""
    if isinstance(format, FP8Format):
        return FP8Linear(linear, format)
    layer = Int4Linear(linear, format, act_order=False)
    ids = (tensors.get(f"{name}.{kind}") for name, kind in product(names, ("g_idx", "weight_g_idx")))
    if any(groups is not None and is_shuffled(groups, layer.group_size) for groups in ids):
        return Int4Linear(linear, format, act_order=True)
    return layer


def dequantize_head(
    name: str, quantization: Quantization | None, tensors: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Replaces the tensors of a quantised head, called `name`, by its weights in `dtype`: drafts share them."""
    keys = {key.removeprefix(f"{name}."): key for key in tensors if key.startswith(f"{name}.")}
    if quantization is None or quantization.on_the_fly:
        return
    format = format_in_file(name, quantization, tensors)
    if format is None:
        return
    outputs, inputs = _shape_of(keys, tensors)
    with torch.device("meta"):
        layer = quantized_layer(Linear(inputs, outputs), format, [name], tensors)
    missing = [
        key for key, expected in layer.file_tensors(None).items() if key not in keys and not expected.is_optional
    ]
    if missing:
        raise ValueError(f"{name} is quantised, but the file lacks {', '.join(f'{name}.{key}' for key in missing)}")
    layer.to_empty(device="cpu")
    layer.load_part(None, {key: tensors.pop(full) for key, full in keys.items()})
    tensors[f"{name}.weight"] = layer.dequantized().to(dtype)
    logger.info("%s is quantised in the file; it is dequantised to %s, for drafts share it", name, dtype)


def _shape_of(keys: Mapping[str, str], tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    if "weight" in keys:
        outputs, inputs = tensors[keys["weight"]].shape
    elif "weight_packed" in keys:
        outputs, words = tensors[keys["weight_packed"]].shape
        inputs = words * 8
    else:
        rows, outputs = tensors[keys["qweight"]].shape
        is_awq = tensors[keys["scales"]].shape[1] != outputs
        inputs, outputs = (rows, outputs * 8) if is_awq else (rows * 8, outputs)
    return outputs, inputs
