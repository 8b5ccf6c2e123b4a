"""`--init-from`: a draft's training starts from another draft, and says what it took over and what differs.

A file of weights does not say when it means something else: a mask token, target states, a window, a token map or the
convention of its blocks may differ in a draft whose tensors have the same shapes. So all of these are compared, and the
first tokens are called those of the other draft only if nothing differs but heads that start as the identity.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.models.drafts.base import HEAD, OWN_FIELDS, DraftConfig, DraftNetwork, load_draft
from slipstream.models.drafts.heads.table import HEADS
from slipstream.models.drafts.source import drafter_of
from slipstream.models.files.checkpoint import Values, read_json, resolve
from slipstream.models.files.weights import public_tensors
from slipstream.models.targets.config import TargetSpec

FC = "fc.weight"  # whose columns are target states, one after another
# Tensors with a row for each of the draft's tokens.
BY_TOKEN = (HEAD, *(f"{kind.name}.{parameter}" for kind in HEADS for parameter in kind.by_token))
MAPS = ("d2t", "t2d")
INHERITED = ("mask_token_id", "aux_layers")  # options that are those of the other draft unless they are given
IDENTITIES = ("attention_conv.", "mlp_conv.", *(f"{kind.name}." for kind in HEADS if kind.is_identity))
# Fields that say which heads a draft has, or nothing about its tokens: compared by their tensors, or not at all.
NOT_COMPARED = (
    *(*OWN_FIELDS, "conv_kernel_size", "conv_group_size", "heads"),
    *("max_position_embeddings", "draft_vocab_size", "target_hidden_size", "target_num_layers"),
)


def read_start(option: str, name: str, network: type[DraftNetwork], drafter: str, target: TargetSpec) -> DraftNetwork:
    """The draft at `name`, a folder or hub id that `option` gives, on the host in fp32. Raises ValueError for a draft
    of another kind, and for one that cannot be read."""
    path = resolve(name)
    kind = drafter_of(read_json(path / "config.json"), name)
    if kind != drafter:
        raise ValueError(
            f"{option} {name} is a draft of kind {kind}; training of {drafter} drafts starts from {drafter} drafts: "
            f"name another {option}"
        )
    return load_draft(network, path, target, torch.float32, torch.device("cpu"))


def inherit(options: Any, config: DraftConfig) -> Any:
    """Options of a draft with those that were left out as the other draft has them."""
    names = {field.name for field in fields(options)}
    missing = [name for name in INHERITED if name in names and getattr(options, name) is None]
    return replace(options, **{name: getattr(config, name) for name in missing})


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Tensors that a draft took over, and how it differs from the other."""

    complete: list[str]  # names of tensors that it took over
    partial: list[str]  # of tensors that took over some rows or columns
    new: list[str]  # of the draft's, which the other lacks or has in another shape
    ignored: list[str]  # of the other's, which the draft lacks or has in another shape
    differences: list[str]

    @property
    def is_exact(self) -> bool:
        """Whether the draft's first tokens are those of the other."""
        heads = all(any(part in name for part in IDENTITIES) for name in self.new)
        return heads and not (self.partial or self.ignored or self.differences)

    def lines(self, name: str) -> Iterator[str]:
        """The report."""
        yield f"init_from {name}: {len(self.complete)} tensors taken over"
        for label, names in (("partly", self.partial), ("new", self.new), ("left there", self.ignored)):
            if names:
                yield f"  {label}: {', '.join(shortened(names))}"
        for difference in self.differences:
            yield f"  differs: {difference}"
        if self.is_exact:
            yield "  exact: its first tokens are those of that draft"
        else:
            yield "  a warm start: its first tokens are not those of that draft"


@torch.no_grad()
def warm_start(draft: DraftNetwork, source: DraftNetwork) -> WarmStart:
    """Copies what both drafts have into `draft`. Rows that belong to tokens, and columns that belong to target states,
    go where they mean the same."""
    tensors = unmapped_tensors(draft)
    source_tensors = unmapped_tensors(source)
    complete: list[str] = []
    partial: list[str] = []
    for name in tensors.keys() & source_tensors.keys():
        is_complete = copy_tensor(name, tensors[name], source_tensors[name], draft, source)
        if is_complete is not None:
            (complete if is_complete else partial).append(name)
    copied = {*complete, *partial}
    return WarmStart(
        complete=[name for name in tensors if name in complete],
        partial=[name for name in tensors if name in partial],
        new=[name for name in tensors if name not in copied],
        ignored=[name for name in source_tensors if name not in copied],
        differences=list(differences(draft, source)),
    )


def unmapped_tensors(module: DraftNetwork) -> dict[str, Tensor]:
    """The tensors of a draft by their public names, without its token map."""
    return {name: x for name, x in public_tensors(module).items() if name not in MAPS}


def copy_tensor(name: str, tensor: Tensor, origin: Tensor, draft: DraftNetwork, source: DraftNetwork) -> bool | None:
    """Copies `origin` of the source into `tensor` of the draft. Whether all of it was copied; None: nothing was."""
    ids = token_ids(draft)
    source_ids = token_ids(source)
    if name in BY_TOKEN and tensor.shape[1:] == origin.shape[1:] and not torch.equal(ids, source_ids):
        places = torch.full((draft.config.vocab_size,), -1).index_copy(0, source_ids, torch.arange(len(source_ids)))[
            ids
        ]
        is_shared = places >= 0
        tensor[is_shared.to(tensor.device)] = origin[places[is_shared]].to(tensor.device, tensor.dtype)
        return False
    layers = aux_layers_of(draft)
    source_layers = aux_layers_of(source)
    if name == FC and layers != source_layers and tensor.shape[0] == origin.shape[0]:
        size = draft.config.target_hidden_size
        shared = [layer for layer in layers if layer in source_layers]
        for layer in shared:
            to = layers.index(layer) * size
            start = source_layers.index(layer) * size
            tensor[:, to : to + size] = origin[:, start : start + size].to(tensor.device, tensor.dtype)
        return set(layers) == set(source_layers) if shared else None
    if tensor.shape != origin.shape:
        return None
    tensor.copy_(origin)
    return True


def aux_layers_of(draft: DraftNetwork) -> tuple[int, ...]:
    return tuple(getattr(draft.config, "aux_layers", ()))


def token_ids(draft: DraftNetwork) -> Tensor:
    """(Vd,) int64 on the host."""
    ids = draft.target_ids
    return torch.arange(draft.config.vocab_size) if ids is None else ids.cpu()


def differences(draft: DraftNetwork, source: DraftNetwork) -> Iterator[str]:
    source_values = values_of(source.config)
    for name, value in values_of(draft.config).items():
        if name not in NOT_COMPARED and value != source_values[name]:
            yield f"{name} is {source_values[name]} there, {value} here"
    ids = token_ids(draft)
    source_ids = token_ids(source)
    if not torch.equal(ids, source_ids):
        num_shared = len(set(ids.tolist()) & set(source_ids.tolist()))
        yield f"the token map has {len(source_ids)} tokens there, {len(ids)} here, {num_shared} in both"
    fingerprints = source.config.target_fingerprint, draft.config.target_fingerprint
    if all(fingerprints) and len(set(fingerprints)) > 1:
        yield f"the target has other weights than the one that draft was trained for, {source.config.target}"


def values_of(config: DraftConfig) -> Values:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def shortened(names: list[str]) -> list[str]:
    """layers.0.x, layers.1.x -> layers.*.x, each once."""
    parts = (name.split(".") for name in names)
    return list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name) for name in parts))
