"""Modules that own their weights: linear layers, embedding and output head.

Letters: I and O input and output channels, H hidden, V target and Vd draft vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.kernels.collectives.ranks import Ranks
from slipstream.kernels.gemm.activation import Activation, activation_mul
from slipstream.kernels.gemm.choose import Format as ProductFormat
from slipstream.kernels.gemm.choose import Kind, Product
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.gemm.fp8 import InputScales
from slipstream.kernels.gemm.gathered_head import DraftHead
from slipstream.kernels.gemm.linear import gated_linear, linear, rotated_linear
from slipstream.kernels.kv.rope import Rotation

CHUNK = 64 << 20  # bytes converted at once: the most that loading needs beside the weights


def copy_converted(place: Tensor, tensor: Tensor) -> None:
    """Copies `tensor`, which may be a view of a mapped file, to `place`; converts it on the device of `place`."""
    rows = max(1, CHUNK // max(1, tensor[:1].nbytes))
    for target, source in zip(place.split(rows), tensor.split(rows), strict=True):
        target.copy_(source if target.dtype == source.dtype else source.to(target.device))


def derive(owner: nn.Module, make: Callable[[], Tensor]) -> Tensor:
    """make(), a copy of weights of `owner`, which follows them when they are loaded again."""
    tensor = make()
    owner.__dict__.setdefault("derived", []).append((tensor, make))
    return tensor


def remake_derived(module: nn.Module) -> None:
    """Computes anew, in place, what modules within `module` have derived of their weights."""
    for owner in module.modules():
        for tensor, make in owner.__dict__.get("derived", []):
            tensor.copy_(make())


class Embedding(nn.Embedding):
    ranks: Ranks | None = None  # which share the table: each has as many rows; None: all rows are here

    def forward(self, input: Tensor) -> Tensor:
        if self.ranks is None:
            return super().forward(input)
        count = len(self.weight)
        rows = input - self.ranks.rank * count
        is_here = (rows >= 0) & (rows < count)
        part = super().forward(rows.where(is_here, 0)).masked_fill(~is_here[..., None], 0)
        return self.ranks.add(part.float(), part.dtype)

    @property
    def table(self) -> Tensor:
        """All rows (V, H); a copy where ranks share them."""
        return self.weight if self.ranks is None else self.ranks.collect(self.weight)

    def reset_parameters(self) -> None:
        """Leaves the weights as they are: they are loaded. torch's way, on a meta device, imports its compiler."""


class Linear(nn.Linear):
    """x (..., I) -> x @ weight.T + bias (..., O). Projections of one input may be fused: `out_features` then gives the
    output rows of each, by its name in files, such as q_proj.

    It alone knows how weights are stored. Quantised ones are in formats/.
    """

    order: FixedOrder | None = None  # in which products are added on a GPU; None: the fastest
    ranks: Ranks | None = None  # which share the inputs, of a head the outputs; None: all weights are here
    product_format: ProductFormat = "16 bits"
    sums_fast = False  # without an order: sums of many rows may be less exact than fp32, where a format gains by it
    units = (1, 1)  # of outputs and of inputs, which a slice of the weights does not cut
    sections: Mapping[str | None, Sequence[int]] = {}  # outputs in a part by kind; a rank has a slice of each
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  # of parameters that are not stored in the network's dtype
    is_plain: ClassVar[bool] = True  # its weights are stored as one matrix (O, I) of floats

    def __init__(self, in_features: int, out_features: int | Mapping[str, int], bias: bool = False) -> None:
        sizes = {} if isinstance(out_features, int) else out_features
        super().__init__(in_features, out_features if isinstance(out_features, int) else sum(sizes.values()), bias)
        ends = zip(sizes.items(), accumulate(sizes.values()), strict=True)
        self.parts: dict[str | None, slice] = {part: slice(end - size, end) for (part, size), end in ends}

    def forward(self, input: Tensor) -> Tensor:
        multiply = linear if self.order is None else self.order.linear
        return multiply(input, self.weight, self.bias)

    def added(self, x: Tensor) -> Tensor:
        """self(x), of the inputs of all ranks where these share them."""
        part = self(x)
        return part if self.ranks is None else self.ranks.add(part.float(), part.dtype)

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor | None:
        """Projects x (T, I) to q, k and v, rotates, and stores k and v in one kernel; returns q (T, Q * D). None where
        there is no such kernel."""
        multiply = rotated_linear if self.order is None else self.order.rotated_linear
        return multiply(x, self.weight, self.bias, rotation)

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        """activation(first half of the outputs) * second half: (..., I) -> (..., O / 2)."""
        if self.bias is not None:
            return activation_mul(self(x), activation)
        multiply = gated_linear if self.order is None else self.order.gated_linear
        return multiply(x, self.weight, activation)

    def gated_mlp(self, x: Tensor, down: "Linear", activation: Activation = "silu") -> Tensor | None:  # noqa: ARG002
        """down(self.gated(x, activation)) where one kernel computes all of it, with the same bits, else None."""
        return None

    def input_scaling(self) -> Callable[[], InputScales] | None:
        """Returns what tells the scales of its inputs, where these are quantised."""
        return None

    def product(self, num_rows: int, kind: Kind, dtype: torch.dtype) -> Product:
        """Describes a product of rows in `dtype`, which may lie anywhere, for kernels/gemm/choose.py."""
        is_exact = self.order is not None
        return Product(self.product_format, num_rows, self.out_features, self.in_features, kind, is_exact, dtype)

    def gated_kind(self, num_rows: int, activation: Activation) -> Kind:  # noqa: ARG002
        """Returns the kind of the product that `gated` computes."""
        return "gated" if self.bias is None else "plain"

    def mlp_product(self, down: "Linear", num_rows: int, dtype: torch.dtype) -> Product | None:  # noqa: ARG002
        """Describes the product of `gated_mlp`; None where there is none."""
        return None

    @property
    def is_gated(self) -> bool:
        """Whether `gated` multiplies gate and up at once."""
        return "up_proj" in self.parts and self.bias is None

    def check_order(self, rows: Iterable[int]) -> None:
        """Lets the library compute these numbers of rows where it adds in the module's `order`."""
        assert self.order is not None
        self.order.check(self.weight, self.bias, rows, gated=self.is_gated)

    def load(self, part: str | None, name: str, tensor: Tensor) -> None:
        """Stores a file's "weight" or "bias" of a part, or of all."""
        copy_converted(self.get_parameter(name)[self.parts.get(part, slice(None))], tensor)


class Head(Linear):
    """Logits (..., V) of hidden states (..., H); and, for drafters, of rows that they choose."""

    def tie(self, embedding: Embedding) -> None:
        self.weight = embedding.weight

    def forward(self, input: Tensor) -> Tensor:
        logits = super().forward(input)
        return logits if self.ranks is None else self.ranks.gather(logits)

    @property
    def table(self) -> Tensor:
        """All rows (V, H); a copy where ranks share them."""
        return self.weight if self.ranks is None else self.ranks.collect(self.weight)

    def whole(self, ids: Tensor | None = None) -> DraftHead:
        """All rows; `ids` (V,) are the target's ids of a draft's own head."""
        return DraftHead(self.weight, ids, ranks=self.ranks)

    def cut(self, ids: Tensor) -> DraftHead:
        """Copies of the rows `ids` (Vd,), which each rank has."""
        return DraftHead(derive(self, lambda: self.table[ids]), ids)

    def gathered(self, ids: Tensor) -> DraftHead:
        """The rows `ids` (Vd,) in their place; ids may change between steps, -1 marks an unused one."""
        assert self.ranks is None, "ranks have no rows outside their part"
        return DraftHead(self.weight, ids, gathered=True)
