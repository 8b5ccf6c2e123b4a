"""Weights between files, which name every projection, and modules, which fuse those of one input (layers.Linear) and
those of all experts (layers.Experts).

A module is built on the meta device. Its storage is allocated once and filled tensor by tensor, so loading takes the
memory of the weights and little more. Loading again fills the same storage, which captured graphs hold on to.
"""

from collections.abc import Callable, Container, Mapping
from functools import reduce
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from slipstream.models.layers.formats.base import FLOATS, FileTensor, QuantizedExperts, QuantizedLinear, Tensors
from slipstream.models.layers.linear import Linear, copy_converted, remake_derived
from slipstream.models.layers.moe import Experts
from slipstream.models.layers.norm import RMSNorm

Network = TypeVar("Network", bound=nn.Module)


class Place(NamedTuple):
    """Where a tensor of a file goes."""

    key: str  # in the module's state_dict
    owner: nn.Module
    part: str | None  # of a fused projection; None: the whole tensor
    expected: FileTensor | None = None  # for quantised modules, whose state_dict has other tensors

    def rows(self, tensor: Tensor) -> Tensor:
        if isinstance(self.owner, Experts):
            return self.owner.piece(self.part, self.key.rpartition(".")[2], tensor)
        return tensor if self.part is None else tensor[cast(Linear, self.owner).parts[self.part]]

    def load(self, tensor: Tensor) -> None:
        name = self.key.rpartition(".")[2]
        if isinstance(self.owner, Linear | Experts):
            self.owner.load(self.part, name, tensor)
        elif isinstance(self.owner, RMSNorm):
            self.owner.load(name, tensor)
        else:
            copy_converted(getattr(self.owner, name), tensor)


def public_tensors(module: nn.Module, state: Tensors | None = None) -> dict[str, Tensor]:
    """Views of a module's tensors by their names in files; tied ones appear once.

    `state`: its state_dict, gathered by the caller where it is sharded. Default: the module's own tensors. Quantised
    layers are left out.
    """
    state = tensors_of(module) if state is None else state
    places = {name: place for name, place in places_of(module).items() if place.expected is None}
    return {name: place.rows(state[place.key].detach()) for name, place in places.items()}


@torch.no_grad()
def load_weights(
    module: Network, tensors: dict[str, Tensor], dtype: torch.dtype | None, device: torch.device, source: Path
) -> Network:
    """Fills `module` with the `tensors` of `source`, by their names in files, and freezes it.

    Tensors on the meta device are allocated on `device` in `dtype` (None: the file's), or as their owner's `dtypes`
    says. Empties `tensors`, so that mapped files (checkpoint.read_tensors) are released in turn. Fused projections and
    experts may be in parts. Raises ValueError that names every missing, unexpected or misshapen key, before anything is
    filled."""
    places = check_tensors(module, tensors, source)

    def dtype_in_file(key: str) -> torch.dtype:
        return reduce(torch.promote_types, (tensors[name].dtype for name, place in places.items() if place.key == key))

    allocate(module, dtype or dtype_in_file, device)
    _fill(tensors, places)
    remake_derived(module)
    return module.eval().requires_grad_(False)


def check_tensors(module: nn.Module, tensors: Tensors, source: Path) -> dict[str, Place]:
    """Returns the places of the `tensors` of `source`. Raises ValueError as `load_weights`."""
    places = places_of(module, fused=tensors)
    expected = expected_tensors(module, places)
    faults = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys()) if not expected[name].is_optional]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        faults += _faults(name, tensors[name], expected[name])
    if faults:
        raise ValueError(f"{source} does not fit its config: {'; '.join(faults)}")
    return places


def expected_tensors(module: nn.Module, places: Mapping[str, Place]) -> dict[str, FileTensor]:
    """Returns shapes and dtypes that a file's tensors may have, by their names."""
    targets = tensors_of(module)
    return {name: place.expected or _expected(targets[place.key], place) for name, place in places.items()}


def allocate(module: nn.Module, dtype: torch.dtype | Callable[[str], torch.dtype], device: torch.device) -> None:
    """Allocates tensors that are on the meta device, in `dtype`, which may depend on a tensor's key, or as their
    owner's `dtypes` says."""
    for key, tensor in tensors_of(module).items():
        if tensor.is_meta:
            path, _, name = key.rpartition(".")
            owner = module.get_submodule(path)
            tensor_dtype = getattr(owner, "dtypes", {}).get(name)
            if not tensor.is_floating_point():
                tensor_dtype = tensor.dtype
            elif tensor_dtype is None:
                tensor_dtype = dtype if isinstance(dtype, torch.dtype) else dtype(key)
            empty = torch.empty(tensor.shape, dtype=tensor_dtype, device=device)
            torch.utils.swap_tensors(tensor, nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty)


def _expected(target: Tensor, place: Place) -> FileTensor:
    """A copy of the module's tensor, or of its rows, in any float dtype that needs no scale."""
    dtypes = (*FLOATS, torch.float64) if target.is_floating_point() else ()
    return FileTensor((tuple(place.rows(target).shape),), dtypes)


def _faults(name: str, tensor: Tensor, expected: FileTensor) -> list[str]:
    if tuple(tensor.shape) not in expected.shapes:
        return [f"{name} is {list(tensor.shape)}, the config says {list(expected.shapes[0])}"]
    if expected.dtypes and tensor.dtype not in expected.dtypes:
        dtypes = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
        return [f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {dtypes}"]
    return []


def _fill(tensors: dict[str, Tensor], places: Mapping[str, Place]) -> None:
    """Loads all tensors, those of a quantised layer's part at a time, and empties `tensors`."""
    together: dict[tuple[nn.Module, str | None], list[str]] = {}
    for name, place in places.items():
        if place.expected is not None and name in tensors:
            together.setdefault((place.owner, place.part), []).append(name)
    for name in list(tensors):
        place = places[name]
        if place.expected is None:
            place.load(tensors.pop(name))
        elif name in tensors:
            names = together[place.owner, place.part]
            part = {other.rpartition(".")[2]: tensors.pop(other) for other in names}
            if isinstance(place.owner, QuantizedExperts):
                place.owner.load_part(cast(str, place.part), part)
            else:
                cast(QuantizedLinear, place.owner).load_part(place.part, part)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a network by name; tied ones appear once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def places_of(module: nn.Module, fused: Container[str] = ()) -> dict[str, Place]:
    """Maps names in files to places. `fused`: keys of fused projections and experts that are not taken apart."""
    places: dict[str, Place] = {}
    for key in tensors_of(module):
        path, _, name = key.rpartition(".")
        owner = module.get_submodule(path)
        parent = path.rpartition(".")[0]
        if isinstance(owner, QuantizedLinear) or (isinstance(owner, QuantizedExperts) and name in owner._buffers):
            continue
        if isinstance(owner, Experts) and key not in fused and (apart := owner.parts(name)):
            places |= {f"{path}.{part}": Place(key, owner, part) for part in apart}
            continue
        parts = owner.parts if isinstance(owner, Linear) and key not in fused else {}
        for part in parts or [None]:
            places[f"{parent}.{part}.{name}".removeprefix(".") if part else key] = Place(key, owner, part)
    for path, owner in module.named_modules():
        if isinstance(owner, QuantizedLinear):
            places |= _quantized_places(path, owner, fused)
        if isinstance(owner, QuantizedExperts):
            pieces = owner.file_pieces(path, fused).items()
            places |= {name: Place(name, owner, piece.part, piece.expected) for name, piece in pieces}
    return places


def _quantized_places(path: str, owner: QuantizedLinear, fused: Container[str]) -> dict[str, Place]:
    parent = path.rpartition(".")[0]
    is_fused = any(f"{path}.{name}" in fused for name in owner.file_tensors(None))
    places: dict[str, Place] = {}
    for part in [None] if is_fused or not owner.parts else owner.parts:
        prefix = f"{parent}.{part}".removeprefix(".") if part else path
        for name, expected in owner.file_tensors(part).items():
            places[f"{prefix}.{name}"] = Place(f"{path}.{name}", owner, part, expected)
    return places
