"""The part of a checkpoint's tensors that a rank of tensor parallelism has.

`TargetSpec.shard` says how large a rank's layers are. The rest follows: a tensor is cut along the axis in which the
rank's layer expects fewer numbers, whatever its format. Slices are views, or copies of several, so only their bytes are
read.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from slipstream.models.files.weights import Place, check_tensors, expected_tensors, places_of
from slipstream.models.layers.formats.base import FileTensor, QuantizedExperts, QuantizedLinear, Tensors
from slipstream.models.layers.formats.linear_experts import PROJECTIONS, LinearExperts
from slipstream.models.layers.linear import Linear
from slipstream.models.layers.moe import Experts

ADDED_BIASES = (".o_proj.bias", ".down_proj.bias", ".down_proj_bias")  # of outputs that ranks add up


class Slice(NamedTuple):
    """A rank's part of a tensor."""

    axis: int
    ranges: list[tuple[int, int]]  # start and length; several where outputs are of several kinds

    def read(self, tensor: Tensor) -> Tensor:
        """Returns a view, or a copy of several ranges."""
        views = [tensor.narrow(self.axis, start, length) for start, length in self.ranges]
        return views[0] if len(views) == 1 else torch.cat(views, self.axis)


def rank_tensors(
    network: nn.Module, local: nn.Module, tensors: Tensors, rank: int, world: int, source: Path
) -> dict[str, Tensor]:
    """Returns a rank's part of the `tensors` of `source`, by their names in files, for its network, `local`; `network`
    is the target's. Fused projections and experts come apart. Biases of outputs that ranks add up are zeros but on
    rank 0.

    Raises ValueError for tensors that do not fit `network`.
    """
    apart = take_apart(network, check_tensors(network, tensors, source), tensors)
    apart = rank_experts(network, local, apart, rank)
    slices = rank_slices(network, local, apart, rank, world)
    pieces = {name: slices[name].read(tensor) if name in slices else tensor for name, tensor in apart.items()}
    added = [name for name in pieces if rank > 0 and _is_added(name, local)]
    return pieces | {name: torch.zeros_like(pieces[name]) for name in added}


def _is_added(name: str, local: nn.Module) -> bool:
    """Whether a tensor is a bias of outputs that ranks add up; a rank has those of its whole experts."""
    if not name.endswith(ADDED_BIASES):
        return False
    owner = local.get_submodule(name.rpartition(".")[0])
    return not (isinstance(owner, Experts) and owner.spec.shares > 1)


def rank_experts(network: nn.Module, local: nn.Module, tensors: Tensors, rank: int) -> dict[str, Tensor]:
    """Leaves out experts that other ranks have, of those that files have apart; a rank numbers its own from 0."""
    places = places_of(network)
    renamed = {}
    for name, tensor in tensors.items():
        number, _, _ = (places[name].part or "").partition(".")
        if not number.isdigit():
            renamed[name] = tensor
            continue
        path, _, end = name.rpartition(f".{number}.")
        spec = cast(Experts, local.get_submodule(path)).spec
        expert = int(number) - (rank * spec.num_local if spec.shares > 1 else 0)
        if 0 <= expert < spec.num_local:
            renamed[f"{path}.{expert}.{end}"] = tensor
    return renamed


def rank_slices(network: nn.Module, local: nn.Module, tensors: Tensors, rank: int, world: int) -> dict[str, Slice]:
    """Returns a rank's slices by the names of tensors; tensors that every rank has whole are left out."""
    places = places_of(network)
    local_places = places_of(local)
    shapes = expected_tensors(network, places)
    local_shapes = expected_tensors(local, local_places)
    slices = {}
    for name, tensor in tensors.items():
        layout = shapes[name].shapes.index(tuple(tensor.shape))
        shape = local_shapes[name].shapes[layout]
        axis = _cut_axis(tensor.shape, shape)
        if axis is not None:
            sizes = _sections(places[name], tensor.shape[axis])
            lengths = _sections(local_places[name], shape[axis])
            starts = accumulate(sizes, initial=0)
            ranges = [
                (start + _slice_start(size, length, rank, world), length)
                for start, size, length in zip(starts, sizes, lengths, strict=False)
            ]
            slices[name] = Slice(axis, ranges)
    return slices


def _sections(place: Place, size: int) -> list[int]:
    """Returns the numbers of a tensor's rows, `size` in all, that are of the same kind of outputs: scales and packed
    rows are fewer than outputs."""
    sections = getattr(place.owner, "sections", {}).get(place.part, [size])
    return [section * size // sum(sections) for section in sections]


def rank_heads(scales: Tensor | None, num_heads: int, rank: int, world: int) -> Tensor | None:
    """Returns the scales of a rank's `num_heads` KV heads, of those of all heads (2, G)."""
    if scales is None:
        return None
    return scales.narrow(1, _slice_start(scales.shape[1], num_heads, rank, world), num_heads)


def _slice_start(size: int, length: int, rank: int, world: int) -> int:
    """Returns where a rank's `length` of `size` begin. Neighbours have the same where there are fewer slices than
    ranks, as with KV heads."""
    return rank * (size // length) // world * length


def sliceable(network: nn.Module, tensors: Tensors) -> dict[str, Tensor]:
    """Leaves out tensors that a rank's part does without: group ids of inputs in the usual order, which would not begin
    at 0 in a slice."""
    places = places_of(network, fused=tensors)
    owners = {name: places[name].owner for name in tensors if name in places}
    left_out = {
        name
        for name, owner in owners.items()
        if isinstance(owner, QuantizedLinear | QuantizedExperts) and name.rpartition(".")[2] in owner.unsliced
    }
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


def check_units(network: nn.Module, local: nn.Module, world: int) -> None:
    """Raises ValueError where a rank's part cuts what a format of weights stores together: a block, a group of inputs,
    a word. Layers of `local` need not be quantised yet."""
    for path, layer in network.named_modules():
        for kind, size, local_size, unit in _sizes(layer, local.get_submodule(path)):
            if local_size != size and local_size % unit:
                option = "--tp-exact, " if isinstance(layer, Experts) else ""
                raise ValueError(
                    f"{path} has {size} {kind}, which {world} ranks cut into {local_size}; its format of weights keeps "
                    f"{unit} together: use {option}fewer ranks, or a checkpoint in another format"
                )
        is_turned = isinstance(layer, LinearExperts) and layer.spec.transposed
        if is_turned and layer.layers["down_proj"].fused_names and layer.unit > 1:
            raise ValueError(f"{path} has transposed experts in FP8 blocks, which are not cut; use 1 rank, not {world}")


def _sizes(layer: nn.Module, part: nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """Yields sizes of a layer: the kind, the layer's and the rank's, and what the latter must be a multiple of."""
    if isinstance(layer, Linear) and isinstance(part, Linear):
        outputs, inputs = layer.units
        yield "inputs", layer.in_features, part.in_features, inputs
        for name, rows in layer.parts.items():
            local_rows = part.parts[name]
            sections = layer.sections.get(name, [rows.stop - rows.start])
            local_sections = part.sections.get(name, [local_rows.stop - local_rows.start])
            for size, local_size in zip(sections, local_sections, strict=True):
                yield f"outputs of {name}", size, local_size, outputs
    elif isinstance(layer, Experts) and isinstance(part, Experts):
        yield "channels in an expert", layer.spec.intermediate_size, part.spec.intermediate_size, layer.unit


def take_apart(network: nn.Module, places: Mapping[str, Place], tensors: Tensors) -> dict[str, Tensor]:
    """Returns tensors with views of its parts in the place of each fused one, by their names in files."""
    shapes = expected_tensors(network, places_of(network))
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        owner = places[name].owner
        if isinstance(owner, Linear) and name not in shapes:
            apart |= _projections(name, owner, tensor, shapes)
        elif isinstance(owner, Experts) and name not in shapes:
            apart |= _experts(name, owner, tensor)
        else:
            apart[name] = tensor
    return apart


def _experts(name: str, experts: Experts, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields names and views of the projections of each expert in a fused tensor."""
    path, _, kind = name.rpartition(".")
    matrix = next(matrix for matrix in PROJECTIONS if kind.startswith(matrix))
    names = experts.layers[matrix].fused_names if isinstance(experts, LinearExperts) else {"": "weight"}
    parts = PROJECTIONS[matrix]
    for expert, rows in enumerate(tensor):
        for part, view in zip(parts, rows.chunk(len(parts)), strict=True):
            yield f"{path}.{expert}.{part}.{names[kind.removeprefix(matrix)]}", view


def _projections(
    name: str, layer: Linear, tensor: Tensor, shapes: Mapping[str, FileTensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields names and views of the projections in a fused tensor."""
    path, _, kind = name.rpartition(".")
    parent = path.rpartition(".")[0]
    for part, rows in layer.parts.items():
        part_name = f"{parent}.{part}.{kind}"
        shape = next(shape for shape in shapes[part_name].shapes if len(shape) == tensor.dim())
        axis = _cut_axis(tensor.shape, shape)
        start = 0 if axis is None else rows.start * tensor.shape[axis] // layer.out_features
        yield part_name, tensor if axis is None else tensor.narrow(axis, start, shape[axis])


def _cut_axis(shape: Sequence[int], part: Sequence[int]) -> int | None:
    """Returns the axis along which `part` is smaller; None where it is all of `shape`."""
    return next((axis for axis, size in enumerate(part) if size != shape[axis]), None)
