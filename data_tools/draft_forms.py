"""How `slipstream convert` reads and writes drafts of each kind.

Every kind has one public layout, ours too; other layouts are made from it, and reading comes back to it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.models import dflash, eagle, eagle3
from slipstream.models.checkpoint import public_tensors, read_json, resolve, weight_files
from slipstream.models.config import ModelConfig
from slipstream.models.draft import EMBEDDING, HEAD
from slipstream.models.speculators_layout import layer_name, to_speculators
from slipstream.models.target import load_config

CPU = torch.device("cpu")


class Draft(NamedTuple):
    """A checkpoint's config.json and tensors, in one layout."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]
    layers: tuple[
        int, ...
    ]  # target states (ids of models/config.py) that it picks; none for EAGLE, which has no choice


class TargetFiles(NamedTuple):
    """What drafts need of their target."""

    name: str
    config: ModelConfig
    architectures: list[str]
    shared: dict[str, Tensor]  # EMBEDDING and HEAD, (V, H)


class Layout(NamedTuple):
    """What is made of a draft in the public layout, and how its tensors are called then."""

    write: Callable[[Draft, TargetFiles], Draft]
    name: Callable[[str], str] = str  # public name -> the one here


class Form(NamedTuple):
    """Drafts of one kind: how they are read, strictly, and their layouts by name."""

    read: Callable[[Path, TargetFiles], Draft]
    public_name: Callable[[str], str]  # a tensor's name in any file -> the public one
    layouts: Mapping[str, Layout]


def read_target(name: str) -> TargetFiles:
    path = resolve(name)
    config = load_config(path, is_served=False)
    files = {key: file for file in weight_files(path) for key in names_in(file)}
    keys = {EMBEDDING: f"model.{EMBEDDING}", HEAD: f"model.{EMBEDDING}" if config.tie_word_embeddings else HEAD}
    missing = sorted(set(keys.values()) - files.keys())
    if missing:
        raise ValueError(f"target {name} lacks {', '.join(missing)} in its *.safetensors files")
    shared = {}
    for own, key in keys.items():
        with safe_open(files[key], "pt") as file:
            shared[own] = file.get_tensor(key)
    return TargetFiles(name, config, read_json(path / "config.json").get("architectures") or [], shared)


def names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def read_dflash(path: Path, target: TargetFiles) -> Draft:
    """In the public layout, with the file's dtypes; names its target."""
    module = dflash.load_dflash(path, target.config, None, CPU, target.shared)
    return _public_draft(module, module.fc.weight.dtype, dflash.config_to_json(module.config), target)


def read_eagle3(path: Path, target: TargetFiles) -> Draft:
    module = eagle3.load_eagle3(path, target.config, None, CPU, target.shared)
    return _public_draft(module, module.fc.weight.dtype, eagle3.config_to_json(module.config), target)


def read_eagle(path: Path, target: TargetFiles) -> Draft:
    module = eagle.load_eagle(path, target.config, None, CPU, target.shared)
    draft = _public_draft(module, module.fc.weight.dtype, eagle.config_to_json(module.config), target)
    return draft._replace(layers=())


def eagle_name(key: str) -> str:
    return key.removeprefix("model.")


def _public_draft(module: Any, dtype: torch.dtype, values: dict[str, Any], target: TargetFiles) -> Draft:
    values |= {"torch_dtype": str(dtype).removeprefix("torch."), "target": values["target"] or target.name}
    return Draft(values, public_tensors(module.config, module.state_dict()), module.config.feature_layers)


def as_it_is(draft: Draft, _target: TargetFiles) -> Draft:
    return draft


def dflash_to_sglang(draft: Draft, _target: TargetFiles) -> Draft:
    if draft.values.get("sample_from_anchor"):
        raise ValueError("this draft drafts from the anchor's slot, too (sample_from_anchor); SGLang's DFLASH does not")
    return draft


def dflash_to_speculators(draft: Draft, target: TargetFiles) -> Draft:
    """With copies of the target's embedding and head, whose rows are those of the draft's vocabulary."""
    copies = dict(target.shared)
    if "t2d" in draft.tensors:
        copies[HEAD] = copies[HEAD][draft.tensors["t2d"]]
    return _speculators_draft(draft, draft.tensors, copies, target)


def eagle3_to_speculators(draft: Draft, target: TargetFiles) -> Draft:
    """With its own embedding or a copy of the target's; a draft of the whole vocabulary has no map there."""
    if target.config.num_layers in draft.layers:
        raise ValueError(
            f"this draft reads state {target.config.num_layers}, after the target's final norm; speculators and vLLM "
            "have none but the layers' own"
        )
    is_reduced = draft.values["draft_vocab_size"] < draft.values["vocab_size"]
    tensors = {layer_name(key): x for key, x in draft.tensors.items() if is_reduced or key not in ("d2t", "t2d")}
    return _speculators_draft(draft, tensors, {EMBEDDING: target.shared[EMBEDDING]}, target)


def _speculators_draft(
    draft: Draft, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor], target: TargetFiles
) -> Draft:
    dtype = draft.tensors["fc.weight"].dtype
    values = to_speculators(draft.values, draft.values["target"], target.architectures)
    return Draft(values, {**{key: copy.to(dtype) for key, copy in copies.items()}, **tensors}, draft.layers)


FORMS = {
    "dflash": Form(
        read_dflash,
        dflash.public_name,
        {"sglang": Layout(dflash_to_sglang), "speculators": Layout(dflash_to_speculators)},
    ),
    "eagle3": Form(
        read_eagle3,
        eagle3.public_name,
        {"sglang": Layout(as_it_is), "speculators": Layout(eagle3_to_speculators, layer_name)},
    ),
    "eagle": Form(read_eagle, eagle_name, {"sglang": Layout(as_it_is)}),
}
