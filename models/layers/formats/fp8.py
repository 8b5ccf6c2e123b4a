"""FP8: e4m3 weights with a scale of each output or of each block of 128 x 128.

Letters: I and O input and output channels.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from slipstream.kernels.gemm import fp8, streamed_fp8
from slipstream.kernels.gemm.activation import Activation, activation_mul
from slipstream.kernels.gemm.choose import Format as ProductFormat
from slipstream.kernels.gemm.choose import Kernel, Kind, Product, choose, device_of
from slipstream.kernels.gemm.expert_weights import FP8Weight
from slipstream.kernels.gemm.fixed_order import FP8Product
from slipstream.kernels.gemm.tiling import choose_split
from slipstream.kernels.kv.rope import Rotation
from slipstream.models.files.checkpoint import Values
from slipstream.models.files.quantization import BLOCK, expect, expect_blocks, object_field
from slipstream.models.layers.formats.base import FileTensor, Format, Quantization, QuantizedLinear, Tensors
from slipstream.models.layers.linear import CHUNK, Linear, copy_converted

FUSED_SCALES = "_scale_inv"  # of all experts' blocks in one tensor, as transformers 5 holds them


@dataclass(frozen=True, slots=True)
class FP8Format(Format):
    """e4m3 weights, multiplied by e4m3 inputs."""

    title = "FP8"
    variants = (
        "fp8 (per tensor, in blocks of 128 x 128), compressed-tensors float-quantized (per tensor, channel or block), "
        "modelopt (FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO)"
    )
    tensors = {"weight": (torch.float8_e4m3fn, torch.float8_e5m2)}
    scale_tensors = ("weight_scale", "weight_scale_inv")
    expert_capability = (9, 0)

    scales: Literal["tensor", "channel", "block"]
    """Scales of the weights: one, one per output, or one per block of 128 x 128. Inputs of blocks are scaled by row and
    128 inputs, others by row unless `static`."""
    scale_name: str = "weight_scale"
    static: bool = False
    """Whether the file has the inputs' scale."""
    on_the_fly: bool = False
    """Whether the file has 16-bit weights, which are quantised per output when they are loaded."""

    @classmethod
    def read(cls, method: str, values: Values) -> Quantization | None:
        """DeepSeek's and Qwen's, and older ones with a scale per tensor; and modelopt's."""
        if method == "modelopt":
            return cls._read_modelopt(values)
        if method != "fp8":
            return None
        expect(values, "fmt", None, "e4m3", "float8_e4m3fn")
        expect(values, "scale_fmt", None, "float")
        expect(values, "activation_scheme", None, "dynamic", "static")
        is_static = values.get("activation_scheme") == "static"
        block = values.get("weight_block_size")
        if block is None:
            return Quantization.uniform("fp8 per tensor", cls("tensor", static=is_static))
        expect_blocks(values, "weight_block_size")
        if is_static:
            raise ValueError(
                f"weight_block_size is {block} with static activations; activation_scheme must be 'dynamic'"
            )
        return Quantization.uniform("fp8 in blocks", cls("block", "weight_scale_inv"))

    @classmethod
    def _read_modelopt(cls, values: Values) -> Quantization | None:
        algorithm = str((object_field(values, "quantization") or values).get("quant_algo") or "").upper()
        formats = {
            "FP8": cls("tensor", static=True),
            "FP8_PER_CHANNEL_PER_TOKEN": cls("channel"),
            "FP8_PB_WO": cls("block"),
        }
        return Quantization.uniform(f"modelopt {algorithm}", formats[algorithm]) if algorithm in formats else None

    @classmethod
    def read_group(cls, kind: str, weights: Values, inputs: Values | None) -> Format | None:
        strategy = weights.get("strategy")
        is_fp8 = (weights.get("type"), weights.get("num_bits")) == ("float", 8) and inputs is not None
        if kind not in ("float-quantized", "naive-quantized") or not is_fp8 or inputs is None:
            return None
        expect(inputs, "num_bits", 8)
        expect(inputs, "type", "float")
        is_static = not inputs.get("dynamic", False)
        if strategy == "block":
            expect_blocks(weights, "block_structure")
            if is_static:
                raise ValueError(f"dynamic is {inputs.get('dynamic')!r}; inputs of weights in blocks must be dynamic")
            expect(inputs, "group_size", BLOCK)
            return cls("block")
        if strategy not in ("tensor", "channel"):
            return None
        expect(inputs, "strategy", "tensor", "token")
        return cls(strategy, static=is_static)

    @property
    def description(self) -> str:
        return f"fp8 per {self.scales}{', static inputs' if self.static else ''}"

    @property
    def is_fused(self) -> bool:
        return self.on_the_fly or self.scales == "block"

    def joins(self, num_outputs: int, names: Sequence[str], tensors: Tensors) -> bool:
        """A layer has one scale of its inputs, and no block of scales has outputs of two projections."""
        return not self.static and (self.scales != "block" or num_outputs % BLOCK == 0)

    def layer(self, linear: Linear, names: Sequence[str], tensors: Tensors) -> "FP8Linear":
        return FP8Linear(linear, self)

    def stand_ins(self, num_inputs: int) -> dict[str, Tensor]:
        return {"weight": torch.empty(0, dtype=fp8.E4M3, device="meta")}

    @staticmethod
    def shape_in_file(tensors: Tensors) -> tuple[int, int] | None:
        if "weight" not in tensors:
            return None
        outputs, inputs = tensors["weight"].shape
        return outputs, inputs


class FP8Linear(QuantizedLinear):
    """Weights and inputs in e4m3 (kernels/gemm/fp8.py). A norm that it alone reads may quantise its inputs, and so may
    the gated product before it."""

    format: FP8Format
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
        self.fused_names = {"": "weight"} if format.on_the_fly else {"": "weight", FUSED_SCALES: format.scale_name}
        if format.static:
            self.shared_scale = "input_scale"
            self.register_buffer("input_scales", torch.empty(max(len(self.parts), 1)))  # by part
            self.register_buffer("input_scale", torch.empty(()))  # the largest: parts have one input
        if format.scales == "block":
            self.units = (BLOCK, BLOCK)
        # A rank that quantises its part of an output's weights cannot know the largest number of all.
        self.leaf_unit = 0 if format.on_the_fly and self.shares_inputs else BLOCK

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

    def load_part(self, part: str | None, tensors: Tensors) -> None:
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

    @property
    def scales_leaves(self) -> bool:
        is_by_row = not self.format.static and self.format.scales != "block"
        return self.leaves > 0 and self.shares_inputs and is_by_row

    def _add_leaves(self, x: Tensor | fp8.QuantizedRows, dtype: torch.dtype) -> Tensor:
        if isinstance(x, fp8.QuantizedRows):
            assert not self.scales_leaves
            rows = x
        else:
            leaves = self.leaves if self.scales_leaves else 1
            rows = fp8.quantize_leaves(x.reshape(-1, self.in_features), self.scales_of_inputs(), leaves)
        out = fp8.fp8_leaf_linear(rows, *self._matrix, self.leaves, self.bias, dtype)
        return out if isinstance(x, fp8.QuantizedRows) else out.view(*x.shape[:-1], -1)

    def gated(self, x: Tensor | fp8.QuantizedRows, activation: Activation = "silu") -> Tensor:
        rows = x.codes if isinstance(x, fp8.QuantizedRows) else x
        num_rows = len(rows) if rows.dim() == 2 else 0
        if self.gated_kind(num_rows, activation) == "gated":
            return self._multiply(x, gated=True)
        if activation == "silu" and self.quantize is not None and num_rows > fp8.FEW_GATED_ROWS:
            return cast(Tensor, fp8.quantized_silu_mul(self(x), self.quantize()))
        return activation_mul(self(x), activation)

    def gated_mlp(self, x: Tensor | fp8.QuantizedRows, down: Linear, activation: Activation = "silu") -> Tensor | None:
        rows = x.codes if isinstance(x, fp8.QuantizedRows) else x
        is_known = activation == "silu" and rows.dim() == 2
        product = self.mlp_product(down, len(rows), x.dtype) if is_known else None
        if product is None or choose(product, device_of(rows)).kernel == "apart":
            return None
        return streamed_fp8.fp8_mlp(self._quantized(x), self._matrix, cast(FP8Linear, down)._matrix)  # noqa: SLF001

    def mlp_product(self, down: Linear, num_rows: int, dtype: torch.dtype) -> Product | None:
        is_fp8 = isinstance(down, FP8Linear) and self.product_format == down.product_format and not down.format.static
        if not is_fp8 or self.bias is not None or down.bias is not None or down.leaves:
            return None
        product = self.product(num_rows, "mlp", dtype)
        return product._replace(num_outputs=down.out_features, size=down.in_features)

    def gated_kind(self, num_rows: int, activation: Activation) -> Kind:
        """Above few rows the activation's kernel quantises for the next layer. In an order it may only where the plain
        product has one part, as the gated one."""
        has_one_part = self.order is None or choose_split(self.out_features, self.in_features) == 1
        if self.quantize is not None and num_rows > fp8.FEW_GATED_ROWS and has_one_part:
            return "plain"
        return super().gated_kind(num_rows, activation)

    @property
    def product_format(self) -> ProductFormat:  # type: ignore[override]
        return "fp8 blocks" if self.format.scales == "block" else "fp8"

    def product(self, num_rows: int, kind: Kind, dtype: torch.dtype) -> Product:
        return super().product(num_rows, kind, dtype)._replace(library=self._library(num_rows))

    @property
    def _matrix(self) -> streamed_fp8.FP8Matrix:
        return streamed_fp8.FP8Matrix(self.get_buffer("weight"), self.get_buffer("weight_scale"))

    def rotated(self, x: Tensor | fp8.QuantizedRows, rotation: Rotation) -> Tensor | None:
        rows = x.codes if isinstance(x, fp8.QuantizedRows) else x
        if self.leaves or rows.dim() != 2 or not rotation.is_whole or not fp8.runs_kernels(rows, self.in_features):
            return None
        product = self.product(len(rows), "rotated", x.dtype)._replace(head_dim=rotation.head_dim)
        if choose(product, device_of(rows)).kernel == "apart":
            return None
        return fp8.fp8_linear_triton(self._quantized(x), *self._matrix, self.bias, rotation=rotation)

    def _quantized(self, x: Tensor | fp8.QuantizedRows) -> fp8.QuantizedRows:
        return x if isinstance(x, fp8.QuantizedRows) else fp8.quantize_rows(x, self.scales_of_inputs())

    def stored_in(self, buffers: Tensors) -> FP8Weight:
        static = buffers["input_scale"] if self.format.static else None
        return FP8Weight(
            buffers["weight"], buffers["weight_scale"], fp8.InputScales(static, self.format.scales == "block")
        )

    def input_scaling(self) -> Callable[[], fp8.InputScales]:
        return self.scales_of_inputs

    def scales_of_inputs(self) -> fp8.InputScales:
        static = self.get_buffer("input_scale") if self.format.static else None
        return fp8.InputScales(static, self.format.scales == "block")

    def check_order(self, rows: Iterable[int]) -> None:
        assert self.order is not None
        by_library = self.order.fp8_by_library.setdefault(self._key, set())
        by_library |= fp8.rows_by_library(rows, *self._matrix, self.bias)

    @property
    def _key(self) -> FP8Product:
        return self.out_features, self.in_features, self.bias is not None, self.format.scales == "block"

    def _library(self, num_rows: int) -> Kernel | None:
        """In an order: the library, where it keeps it and is faster."""
        is_seen = self.order is not None and num_rows in self.order.fp8_by_library.get(self._key, ())
        return "library" if is_seen else None

    def _multiply(self, x: Tensor | fp8.QuantizedRows, gated: bool) -> Tensor:
        weight, scale = self._matrix
        if not isinstance(x, fp8.QuantizedRows):
            rows = fp8.quantize_rows(x.reshape(-1, self.in_features), self.scales_of_inputs())
            out = self._multiply(rows, gated)
            return out.view(*x.shape[:-1], out.shape[-1])
        is_exact = self.order is not None
        library = self._library(len(x.codes))
        product = fp8.fp8_product(x, weight, scale, "gated" if gated else "plain", None, is_exact, library)
        if choose(product, device_of(x.codes)).kernel == "library":
            split = choose_split(self.out_features, self.in_features) if is_exact else 1
            return fp8.library_linear(x, weight, scale, self.bias, split, fast=self.sums_fast and not is_exact)
        return fp8.fp8_linear(x, weight, scale, self.bias, gated)

    def dequantized(self) -> Tensor:
        return fp8.dequantize_weight(self.get_buffer("weight"), self.get_buffer("weight_scale"))
