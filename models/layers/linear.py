"""Modules that own their weights: linear layers, embedding and output head.

Letters: I and O input and output channels, H hidden, V target and Vd draft vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor, nn

from slipstream.kernels.collectives.ranks import Ranks, RankSum
from slipstream.kernels.gemm.activation import Activation, activation_mul
from slipstream.kernels.gemm.choose import Format as ProductFormat
from slipstream.kernels.gemm.choose import Kind, Product
from slipstream.kernels.gemm.fixed_order import FixedOrder
from slipstream.kernels.gemm.fp8 import InputScales
from slipstream.kernels.gemm.gathered_head import DraftHead
from slipstream.kernels.gemm.leaves import LEAF_UNIT, LEAVES, MOST_LEAVES
from slipstream.kernels.gemm.linear import gated_linear, linear, rotated_linear
from slipstream.kernels.gemm.low_rank import LowRankChange
from slipstream.kernels.gemm.tiling import MAX_OUTPUTS
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
            # torch's kernel for up to 16 rows, which indexing does without, takes them one after another.
            return super().forward(input) if torch.is_grad_enabled() else self.weight[input]
        count = len(self.weight)
        rows = input - self.ranks.rank * count
        is_here = (rows >= 0) & (rows < count)
        part = super().forward(rows.where(is_here, 0)).masked_fill(~is_here[..., None], 0)
        return self.ranks.add(part, part.dtype)

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
    shares_inputs = False  # whether ranks share the inputs, not the outputs
    leaves = 0  # of the inputs, which an order adds along a tree that ranks share; 0: the order's own parts
    leaf_unit = LEAF_UNIT  # inputs that a leaf has a multiple of
    product_format: ProductFormat = "16 bits"
    sums_fast = False  # without an order: sums of many rows may be less exact than fp32, where a format gains by it
    units = (1, 1)  # of outputs and of inputs, which a slice of the weights does not cut
    sections: Mapping[str | None, Sequence[int]] = {}  # outputs in a part by kind; a rank has a slice of each
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  # of parameters that are not stored in the network's dtype
    reads_early = False  # whether `gated` reads what is older than the kernel before (kernels/gemm/small_m.py)
    change: LowRankChange | None = None  # adds to outputs what adapters make of inputs
    is_plain: ClassVar[bool] = True  # its weights are stored as one matrix (O, I) of floats

    def __init__(self, in_features: int, out_features: int | Mapping[str, int], bias: bool = False) -> None:
        sizes = {} if isinstance(out_features, int) else out_features
        super().__init__(in_features, out_features if isinstance(out_features, int) else sum(sizes.values()), bias)
        ends = zip(sizes.items(), accumulate(sizes.values()), strict=True)
        self.parts: dict[str | None, slice] = {part: slice(end - size, end) for (part, size), end in ends}

    def forward(self, input: Tensor) -> Tensor:
        if self.leaves and self.order is not None:
            return self.order.leaf_linear(input, self.weight, self.leaves, self.bias)
        multiply = linear if self.order is None else self.order.linear
        out = multiply(input, self.weight, self.bias)
        return out if self.change is None else self.change(out, input)

    def added(self, x: Tensor) -> Tensor | RankSum:
        """self(x), of the inputs of all ranks where these share them: of rows (T, I), plain or quantised, a sum that is
        to be added."""
        if self.ranks is None:
            return self(x)
        if not isinstance(x, Tensor) or x.dim() == 2:
            return RankSum(self.partial(x), x.dtype, self.ranks)
        return self.ranks.add(self.partial(x), x.dtype)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sums over all inputs: x (..., I) -> (..., O), with leaves in fp32."""
        if self.order is None or not self.leaves:
            return self(x)
        assert self.ranks is not None
        place = self.ranks.partial_rows(x.numel() // self.in_features, self.out_features)
        return self.order.leaf_linear(x, self.weight, self.leaves, self.bias, torch.float32, place)

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor | None:
        """Projects x (T, I) to q, k and v, rotates, and stores k and v in one kernel; returns q (T, Q * D). None where
        there is no such kernel."""
        if self.change is not None:
            return None
        if self.order is None:
            return rotated_linear(x, self.weight, self.bias, rotation)
        return self.order.rotated_linear(x, self.weight, self.bias, rotation, self.leaves)

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        """activation(first half of the outputs) * second half: (..., I) -> (..., O / 2)."""
        if self.bias is not None or self.change is not None:
            return activation_mul(self(x), activation)
        multiply = gated_linear if self.order is None else self.order.gated_linear
        return multiply(x, self.weight, activation, is_early=self.reads_early)

    def gated_mlp(self, x: Tensor, down: "Linear", activation: Activation = "silu") -> Tensor | None:
        """down(self.gated(x, activation)) where one kernel computes all of it, with the same bits, else None."""
        return None

    def input_scaling(self) -> Callable[[], InputScales] | None:
        """Returns what tells the scales of its inputs, where these are quantised."""
        return None

    def product(self, num_rows: int, kind: Kind, dtype: torch.dtype) -> Product:
        """Describes a product of rows in `dtype`, which may lie anywhere, for kernels/gemm/choose.py."""
        is_exact = self.order is not None
        product = Product(self.product_format, num_rows, self.out_features, self.in_features, kind, is_exact, dtype)
        return product._replace(leaves=self.leaves if is_exact else 0)

    def gated_kind(self, num_rows: int, activation: Activation) -> Kind:
        """Returns the kind of the product that `gated` computes."""
        return "gated" if self.bias is None else "plain"

    def mlp_product(self, down: "Linear", num_rows: int, dtype: torch.dtype) -> Product | None:
        """Describes the product of `gated_mlp`; None where there is none."""
        return None

    @property
    def scales_leaves(self) -> bool:
        """Whether leaves of an input row have scales of their own: a rank does not know the others' numbers."""
        return False

    @property
    def is_gated(self) -> bool:
        """Whether `gated` multiplies gate and up at once."""
        return "up_proj" in self.parts and self.bias is None

    def check_order(self, rows: Iterable[int]) -> None:
        """Lets the library compute these numbers of rows where it adds in the module's `order`."""
        assert self.order is not None
        if self.leaves:
            self.order.check_leaves(self.weight, self.leaves, rows)
        else:
            self.order.check(self.weight, self.bias, rows, gated=self.is_gated)

    def load(self, part: str | None, name: str, tensor: Tensor) -> None:
        """Stores a file's "weight" or "bias" of a part, or of all."""
        copy_converted(self.get_parameter(name)[self.parts.get(part, slice(None))], tensor)


def cut_sums(network: nn.Module, *, quantized: bool) -> list[str]:
    """Lets products of a `network` in an order add their inputs along trees that any number of ranks shares; returns
    the paths of layers that have another order on another number of ranks. `quantized`: also products of quantised
    weights, whose fastest kernels have no trees."""
    uncut = []
    for path, layer in network.named_modules():
        if isinstance(layer, Linear):
            if not layer.is_gated and not has_one_part(layer):
                layer.leaves = count_leaves(layer, quantized)
                uncut += [] if layer.leaves else [path]
        elif hasattr(layer, "cut_sums") and not layer.cut_sums():
            uncut.append(path)
    for module in network.modules():
        reader = getattr(getattr(module, "quantize", None), "__self__", None)
        if isinstance(reader, Linear) and reader.scales_leaves:  # the module would give a row one scale
            module.quantize = None  # type: ignore[assignment]
    return uncut


def count_leaves(layer: Linear, quantized: bool) -> int:
    """Returns the leaves of a layer's inputs; 0 where it has none."""
    leaves = LEAVES
    if layer.ranks is not None and not isinstance(layer, Head):
        leaves = 0 if layer.bias is not None else LEAVES // layer.ranks.world  # rank 0 adds it before other ranks' sums
    is_cut = bool(leaves and layer.leaf_unit) and layer.in_features % (leaves * layer.leaf_unit) == 0
    return leaves if is_cut and (layer.is_plain or quantized) else 0


def has_one_part(layer: Linear) -> bool:
    """Whether it is a head of so many outputs that a rank's share of them is not cut into parts, either."""
    if not isinstance(layer, Head):
        return False
    world = 1 if layer.ranks is None else layer.ranks.world
    return layer.out_features * world > MOST_LEAVES * MAX_OUTPUTS


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

    def cut(self, ids: Tensor, owner: nn.Module | None = None) -> DraftHead:
        """Copies of the rows `ids` (Vd,), which each rank has. They follow the weights, or those of `owner`, whose ids
        they are."""
        return DraftHead(derive(owner or self, lambda: self.table[ids]), ids)

    def gathered(self, ids: Tensor) -> DraftHead:
        """The rows `ids` (Vd,) in their place; ids may change between steps, -1 marks an unused one."""
        assert self.ranks is None, "ranks have no rows outside their part"
        return DraftHead(self.weight, ids, gathered=True)
