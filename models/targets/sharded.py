"""A frozen target with sharded layers: each process holds a slice of every layer, and all gather the layer that runs
(FSDP2's `fully_shard`). Embedding, final norm and head stay whole, since training reads them at any time.

All processes must run the target equally often, each on its own rows.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel


def sharding_mesh(device: torch.device, *, within_machine: bool) -> DeviceMesh:
    """The processes that shard a target: those of this machine, or all. Raises ValueError if there is only one."""
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    size = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if within_machine else world  # set by torchrun and accelerate
    if size < 2:
        raise ValueError(
            f"target_sharding is {'machine' if within_machine else 'all'!r}, but there is one process"
            f"{' on this machine' if within_machine else ''}; start the run on several GPUs, or set it to none"
        )
    if world % size:
        raise ValueError(
            f"target_sharding is 'machine', but the {world} processes are no multiple of the {size} on this machine; "
            "start equally many on each, or set it to all"
        )
    return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("copies", "shares"))["shares"]


def share_out(
    model: PreTrainedModel,
    layers: nn.ModuleList,
    source: PreTrainedModel | None,
    mesh: DeviceMesh,
    device: torch.device,
) -> None:
    """Fills `model`, which is on the meta device, one tensor at a time from `source`, which the mesh's first process
    alone has, on its host: slices of `layers`, the rest whole.

    `state_dict()` of a layer still gives whole tensors, if all processes call it. Raises ValueError for a model whose
    weights do not match its config, such as a quantized one.
    """
    weights = Weights(source, mesh, device)
    weights.check(model)
    start = next(name for name, module in model.named_modules() if module is layers)
    model.requires_grad_(False)
    rest = {name: weights.receive(name) for name in weights.shapes if not name.startswith(f"{start}.")}
    model.load_state_dict(rest, strict=False, assign=True)
    model.tie_weights()
    replicated = {parameter for parameter in model.parameters() if not parameter.is_meta}
    for index, layer in enumerate(layers):
        _share_layer(layer, f"{start}.{index}.", weights, mesh)
    # The decoder is not sharded itself: as the layers' root it lets a layer be gathered while the one before runs.
    fully_shard(model.get_decoder(), mesh=mesh, reshard_after_forward=True, ignored_params=replicated)


def _share_layer(layer: nn.Module, prefix: str, weights: "Weights", mesh: DeviceMesh) -> None:
    for name, parameter in layer.named_parameters():
        parameter.data = parameter.data.to(weights.shapes[prefix + name][1])
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    slices: dict[str, Tensor] = {}
    for name, empty in layer.state_dict(keep_vars=True).items():
        tensor = weights.receive(prefix + name)
        slices[name] = distribute_tensor(tensor, mesh, empty.placements) if isinstance(empty, DTensor) else tensor
    layer.load_state_dict(slices, assign=True)
    layer.register_state_dict_post_hook(_gather)


def _gather(_layer: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            state[name] = tensor.full_tensor()


class Weights:
    """Broadcasts the tensors of a model that one process of the mesh holds. All processes call every method."""

    def __init__(self, source: PreTrainedModel | None, mesh: DeviceMesh, device: torch.device) -> None:
        self.tensors: Mapping[str, Tensor] = {} if source is None else source.state_dict()
        self.group = mesh.get_group()
        self.device = device
        shared: list[Any] = [{name: (tuple(x.shape), x.dtype) for name, x in self.tensors.items()}]
        distributed.broadcast_object_list(shared, group=self.group, group_src=0)
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = shared[0]

    def check(self, model: PreTrainedModel) -> None:
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        shapes = {name: shape for name, (shape, _) in self.shapes.items()}
        strange = sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))
        if strange:
            raise ValueError(
                f"{type(model).__name__} cannot be sharded: its files and its config disagree on "
                f"{', '.join(strange[:3])}; set target_sharding to none, or dequantize the model first"
            )

    def receive(self, name: str) -> Tensor:
        shape, dtype = self.shapes[name]
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if name in self.tensors:
            tensor.copy_(self.tensors[name])
        distributed.broadcast(tensor, group=self.group, group_src=0)
        return tensor
