"""MTP heads from draft checkpoints into copies of their target, in its own names, and back.

vLLM, SGLang and transformers read such a head in the target's files alone. A copy shares the files that do not change
with the source by hard links where the disk allows it; in copies of the others the head's bytes are replaced, so that
neither order nor shape of a tensor changes. A target without the head gets it in a file of its own.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.data_tools.options import show_table
from slipstream.data_tools.verb_options import ConvertConfig
from slipstream.models.drafts.adapters import read_chain
from slipstream.models.drafts.base import EMBEDDING, HEAD, DraftFiles, build_draft
from slipstream.models.drafts.mtp import MTP, MTPConfig, drop_later_copies, file_keys, is_later_copy
from slipstream.models.files.atomic import atomic_folder, put_json
from slipstream.models.files.checkpoint import (
    INDEX,
    read_draft_tensors,
    read_header,
    read_json,
    read_tensors,
    target_path,
    weight_files,
    weights_fingerprint,
    write_checkpoint,
    write_tensors,
)
from slipstream.models.files.outputs import CHECKPOINT, FolderKind
from slipstream.models.files.weights import public_tensors
from slipstream.models.layers.formats.base import Tensors
from slipstream.models.layers.quantized import CACHE_SCALES
from slipstream.models.targets.adapt import NORM
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import target_name
from slipstream.models.targets.families import MTP_FORMS

CPU = torch.device("cpu")
HEAD_FILE = "model-mtp.safetensors"
SINGLE_FILE = "model.safetensors"  # which some readers take before an index
SMALL = re.compile(r".+\.(json|jinja|model|txt|tiktoken|py|md)|(LICENSE|NOTICE).*")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TARGET = FolderKind(
    "a target with a trained MTP head",
    ("config.json", "run.json"),
    (r"model[^/]*\.safetensors(\.index\.json)?", r"[^/]+\.safetensors", rf"(?:{SMALL.pattern})"),
)


class Place(NamedTuple):
    """Where a tensor lies in a target's files."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes in the file


@dataclass(frozen=True, slots=True)
class Source:
    """A target's folder, before it is copied."""

    name: str
    path: Path
    config: TargetSpec
    shared: Tensors  # EMBEDDING and HEAD, (V, H)

    def places(self) -> dict[str, Place]:
        """Returns the places of all tensors, by their names in the files."""
        places = {}
        for file in weight_files(self.path):
            header, base = read_header(file)
            header.pop("__metadata__", None)
            for key, entry in header.items():
                start, _ = entry["data_offsets"]
                places[key] = Place(file, entry["dtype"], tuple(entry["shape"]), base + start)
        return places

    def build(self, files: DraftFiles, path: Path) -> MTP:
        """Returns the network of a draft's `files`, which lie in `path`. Raises ValueError where they do not fit the
        target."""
        return build_draft(MTP, files, path, self.config, None, CPU, self.shared)


def stitch(config: ConvertConfig, draft: Path, source: Source) -> None:
    """Writes a copy of the target with the MTP head of the checkpoint `draft` to `config.output`."""
    draft, adapters = read_chain(draft)
    files = DraftFiles(read_json(draft / "config.json"), read_draft_tensors(draft))
    module = source.build(files, draft)
    for adapter in adapters:
        adapter.merge(module)
    read = module.file_tensors(public_tensors(module)) if adapters else files.tensors
    if not module.config.form:
        raise ValueError(
            f"input {config.input} is an MTP head in no target's form, since files of {source.config.architecture} "
            "have no such layer: serve it with Slipstream"
        )
    tensors = {key: tensor for key, tensor in read.items() if key not in ("d2t", "t2d")}
    places = source.places()
    keys = file_keys(places, source.config)
    with atomic_folder(Path(config.output), TARGET.check) as folder:
        if keys.keys() - {EMBEDDING, HEAD}:
            replaced = replacements(tensors, keys, places, source)
            copy_with(replaced, places, source, folder)
        else:
            replaced = tensors
            add_file(tensors, places, source, folder)
        copy_small_files(source, folder)
        run = {"argv": sys.argv, "converted": config.input, "target": source.name}
        put_json(folder / "run.json", run)
    print(f"{config.output}: the target {source.name} with the MTP head of {config.input}")
    show_table({"tensors": f"{len(replaced)} of {len(places.keys() | replaced.keys())} are the head's"})
    if module.config.draft_vocab_size is not None:
        print("  note: the token map of the draft is left out; other servers choose among all tokens")


def replacements(
    tensors: Tensors, keys: Mapping[str, str], places: Mapping[str, Place], source: Source
) -> dict[str, Tensor]:
    """Returns the head's tensors by their names in the target's files, in the files' dtypes. `keys` maps their public
    names to the files'. Copies of embedding and head stay, and scales of a cache."""
    weights = {name: tensors[key] for name, key in file_keys(tensors, source.config).items()}
    keys = {
        name: key
        for name, key in keys.items()
        if name not in (EMBEDDING, HEAD) and not is_later_copy(name) and not name.endswith(CACHE_SCALES)
    }
    for key in keys.values():
        if places[key].dtype not in DTYPES:
            raise ValueError(
                f"target {source.name}: {key} is {places[key].dtype}, of a quantised MTP layer, which a trained one "
                "does not replace; name the target in 16 bits"
            )
    replaced = {}
    for name, key in keys.items():
        place = places[key]
        tensor = weights.pop(name) if name in weights else stacked(name, weights)
        if tensor is None or tuple(tensor.shape) != place.shape:
            shape = "nothing" if tensor is None else list(tensor.shape)
            raise ValueError(f"target {source.name}: {key} is {list(place.shape)}, but the draft has {shape} for it")
        replaced[key] = tensor.to(DTYPES[place.dtype])
    if weights:
        raise ValueError(f"target {source.name} has no place for {', '.join(sorted(weights))} of the draft")
    return replaced


def stacked(name: str, weights: dict[str, Tensor]) -> Tensor | None:
    """Takes the matrices of experts out of `weights` that files have in one tensor called `name`; None if it is no such
    tensor."""
    layer, _, projection = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(projection, ())
    experts: list[Tensor] = []
    while parts and (names := [f"{layer}.{len(experts)}.{part}.weight" for part in parts]) and names[0] in weights:
        experts.append(torch.cat([weights.pop(part) for part in names]))
    return torch.stack(experts) if experts else None


def copy_with(tensors: Tensors, places: Mapping[str, Place], source: Source, folder: Path) -> None:
    """Copies the weight files, with `tensors` in the places of theirs."""
    changed = {places[key].file for key in tensors}
    for file in weight_files(source.path):
        if file not in changed:
            link(file, folder / file.name)
            continue
        shutil.copyfile(file, folder / file.name)
        with (folder / file.name).open("r+b") as stream:
            for key, tensor in tensors.items():
                if places[key].file == file:
                    stream.seek(places[key].start)
                    stream.write(tensor.contiguous().view(torch.uint8).numpy().data)
    if (source.path / INDEX).exists():
        shutil.copyfile(source.path / INDEX, folder / INDEX)


def add_file(tensors: Tensors, places: Mapping[str, Place], source: Source, folder: Path) -> None:
    """Links the weight files, and writes `tensors` to one more."""
    if read_json(source.path / "config.json").get("quantization_config"):
        raise ValueError(
            f"target {source.name} is quantised and has no MTP layer; its config would have to except one in 16 bits: "
            "name the target in 16 bits"
        )
    names = {}
    for file in weight_files(source.path):
        names[file] = "model-target.safetensors" if file.name == SINGLE_FILE else file.name
        link(file, folder / names[file])
    write_tensors(folder / HEAD_FILE, tensors, {"format": "pt"})
    files_of = {key: names[place.file] for key, place in places.items()} | dict.fromkeys(tensors, HEAD_FILE)
    total = sum((folder / name).stat().st_size for name in {*names.values(), HEAD_FILE})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files_of.items()))}
    put_json(folder / INDEX, index)


def copy_small_files(source: Source, folder: Path) -> None:
    """Copies config.json, which then has the head, tokenizer, templates, code and licence."""
    for file in sorted(source.path.iterdir()):
        if file.is_file() and SMALL.fullmatch(file.name) and file.name not in (INDEX, "run.json"):
            shutil.copyfile(file, folder / file.name)
    values = read_json(folder / "config.json")
    text = values["text_config"] if isinstance(values.get("text_config"), dict) else values
    count = MTP_FORMS[source.config.architecture].count
    if not text.get(count):
        text[count] = 1
        put_json(folder / "config.json", values)


def link(file: Path, name: Path) -> None:
    """Makes `name` a hard link to `file`, or a copy where that cannot be."""
    try:
        os.link(file.resolve(), name)
    except OSError:
        shutil.copyfile(file, name)


def provenance(config: ConvertConfig, target: str) -> dict[str, Any]:
    """The run.json of a draft that was converted."""
    return {"argv": sys.argv, "converted": config.input, **target_path(target)}


def extract(config: ConvertConfig, source: Source) -> None:
    """Writes the MTP head in the target's files as a draft checkpoint to `config.output`."""
    tensors = read_tensors(source.path)
    keys = file_keys(tensors, source.config)
    if source.config.mtp is None or not keys:
        raise ValueError(
            f"input {config.input} is a target without an MTP layer; name a draft, or a target that has one"
        )
    origin = {"target": source.name, "target_fingerprint": weights_fingerprint(source.path)}
    values = {**MTPConfig.from_target(source.config, **origin).to_json(), "torch_dtype": "bfloat16"}
    if not MTP_FORMS[source.config.architecture].has_norm:
        norm = next(key for key in tensors if target_name(key) == NORM)
        keys = {**keys, NORM: norm}
    drop_later_copies({name: tensors[key] for name, key in keys.items()}, source.shared, source.path)
    keys = {name: key for name, key in keys.items() if not is_later_copy(name)}
    head = {key: tensors[key] for key in keys.values()}
    source.build(DraftFiles(values, head), source.path)
    head = {key: head[key] for name, key in keys.items() if name not in (EMBEDDING, HEAD)}
    with atomic_folder(Path(config.output), CHECKPOINT.check) as folder:
        write_checkpoint(folder, values, head, provenance(config, source.name))
    print(f"{config.output}: the MTP head of {config.input}, {len(head)} tensors")
