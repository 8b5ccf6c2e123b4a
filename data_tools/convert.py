"""Writes a draft checkpoint in the layout that another server or trainer reads.

    slipstream convert --input runs/draft --layout speculators --output runs/draft-vllm
    slipstream convert --input owner/draft --target Qwen/Qwen3-8B --layout sglang --output runs/draft

Reads every layout that it writes, and all that `serve` loads. Weights keep their bits; a draft that does not fit its
target, or that another layout cannot hold, is refused.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.data_tools.command_line import run
from slipstream.data_tools.layout_report import changes
from slipstream.models.checkpoint import atomic_folder, read_json, resolve, write_checkpoint
from slipstream.models.config import ModelConfig
from slipstream.models.dflash_checkpoint import (
    ARCHITECTURE,
    DEEPSPEC_ARCHITECTURE,
    config_to_json,
    load_dflash,
    public_name,
    public_tensors,
)
from slipstream.models.speculators_layout import to_speculators
from slipstream.models.target import load_config

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
DRAFTERS = {ARCHITECTURE: "dflash", DEEPSPEC_ARCHITECTURE: "dflash"}  # by the first entry of `architectures`


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """Options of `slipstream convert`."""

    input: str = ""
    """Draft checkpoint to read: a folder or a hub id."""
    output: str = ""
    """Folder to write."""
    layout: Literal["sglang", "speculators"] = "sglang"
    """sglang: the public layout, ours too. speculators: what vLLM and that library load by itself."""
    target: str = ""
    """The draft's target (folder or hub id). Default: the one that the draft names."""

    def __post_init__(self) -> None:
        for name in ("input", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; name a draft checkpoint to read (input) and a folder (output)")


class Draft(NamedTuple):
    """A checkpoint's config.json and tensors, in one layout."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


class TargetFiles(NamedTuple):
    """What drafts need of their target."""

    name: str
    config: ModelConfig
    architectures: list[str]
    shared: dict[str, Tensor]  # EMBEDDING and HEAD, (V, H)


class Form(NamedTuple):
    """How drafts of one kind are read, strictly, and written: layout -> what it makes of the public one."""

    read: Callable[[Path, TargetFiles], Draft]
    rename: Callable[[str], str]  # a tensor's name in any file -> the public one
    layouts: Mapping[str, Callable[[Draft, TargetFiles], Draft]]
    layers: Callable[[Draft], list[int]]  # of the target, whose outputs a public draft reads


def main(argv: Sequence[str] | None = None) -> None:
    run(
        convert,
        ConvertConfig,
        argv,
        prog="slipstream convert",
        description="Write a draft checkpoint in the layout that another server or trainer reads.",
    )


def convert(config: ConvertConfig) -> None:
    """Writes `config.output` and prints what changed."""
    path = resolve(config.input)
    values = read_json(path / "config.json")
    form, target = FORMS[drafter_of(values, config.input)], read_target(config.target or target_of(values))
    public = form.read(path, target)
    written = form.layouts[config.layout](public, target)
    provenance: dict[str, Any] = {"argv": sys.argv, "converted": config.input}
    if (path / "run.json").exists():
        provenance["run"] = read_json(path / "run.json")
    with atomic_folder(Path(config.output)) as folder:
        write_checkpoint(folder, written.values, written.tensors, provenance)
    print(f"{config.output}: {len(written.tensors)} tensors, layout {config.layout}")
    for line in changes(tensor_names(path), list(written.tensors), form.rename, values, written.values):
        print(f"  {line}")
    if max(form.layers(public)) >= target.config.num_layers - 1:
        print("  note: it reads the last layer's output, which other servers take behind the final norm or not at all")


def drafter_of(values: Mapping[str, Any], name: str) -> str:
    architecture = (values.get("architectures") or ["(none)"])[0]
    drafter = values.get("drafter") or values.get("speculators_model_type") or DRAFTERS.get(architecture, architecture)
    if drafter not in FORMS:
        raise ValueError(f"input {name} is a draft of the kind {drafter}; kinds that convert: {', '.join(FORMS)}")
    return str(drafter)


def target_of(values: Mapping[str, Any]) -> str:
    """The target that a draft names. Raises ValueError where it names none."""
    verifier = (values.get("speculators_config") or {}).get("verifier") or {}
    name = values.get("target") or verifier.get("name_or_path")
    if not name:
        raise ValueError("the draft names no target; add --target with the model that it was trained for")
    return str(name)


def read_target(name: str) -> TargetFiles:
    path = resolve(name)
    config = load_config(path)
    files = {key: file for file in sorted(path.glob("*.safetensors")) for key in _names_in(file)}
    keys = {EMBEDDING: f"model.{EMBEDDING}", HEAD: f"model.{EMBEDDING}" if config.tie_word_embeddings else HEAD}
    missing = sorted(set(keys.values()) - files.keys())
    if missing:
        raise ValueError(f"target {name} lacks {', '.join(missing)} in its *.safetensors files")
    shared = {}
    for own, key in keys.items():
        with safe_open(files[key], "pt") as file:
            shared[own] = file.get_tensor(key)
    return TargetFiles(name, config, read_json(path / "config.json").get("architectures") or [], shared)


def read_dflash(path: Path, target: TargetFiles) -> Draft:
    """In the public layout, with the file's dtypes; names its target."""
    module = load_dflash(path, target.config, None, torch.device("cpu"), target.shared)
    dtype = str(module.fc.weight.dtype).removeprefix("torch.")
    values = config_to_json(module.config) | {"torch_dtype": dtype}
    values["target"] = values["target"] or target.name
    return Draft(values, public_tensors(module.config, module.state_dict()))


def dflash_to_sglang(draft: Draft, _target: TargetFiles) -> Draft:
    if draft.values.get("sample_from_anchor"):
        raise ValueError("this draft drafts from the anchor's slot, too (sample_from_anchor); SGLang's DFLASH does not")
    return draft


def dflash_to_speculators(draft: Draft, target: TargetFiles) -> Draft:
    """With copies of the target's embedding and head, whose rows are those of the draft's vocabulary."""
    dtype, copies = draft.tensors["fc.weight"].dtype, dict(target.shared)
    if "t2d" in draft.tensors:
        copies[HEAD] = copies[HEAD][draft.tensors["t2d"]]
    tensors = draft.tensors | {key: copy.to(dtype) for key, copy in copies.items()}
    return Draft(to_speculators(draft.values, draft.values["target"], target.architectures), tensors)


FORMS = {
    "dflash": Form(
        read=read_dflash,
        rename=public_name,
        layouts={"sglang": dflash_to_sglang, "speculators": dflash_to_speculators},
        layers=lambda draft: draft.values["dflash_config"]["target_layer_ids"],
    )
}


def tensor_names(path: Path) -> list[str]:
    return [key for file in sorted(path.glob("*.safetensors")) for key in sorted(_names_in(file))]


def _names_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


if __name__ == "__main__":
    main()
