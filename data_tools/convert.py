"""Writes a draft checkpoint in the layout that another server or trainer reads.

    slipstream convert --input runs/draft --layout speculators --output runs/draft-vllm
    slipstream convert --input owner/draft --target Qwen/Qwen3-8B --layout sglang --output runs/draft

Reads every layout that it writes, and all that `serve` loads. Weights keep their bits; a draft that does not fit its
target, or that another layout cannot hold, is refused.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.data_tools.command_line import run
from slipstream.data_tools.draft_forms import FORMS, Form, Layout, names_in, read_target
from slipstream.data_tools.layout_report import changes
from slipstream.models.atomic import atomic_folder
from slipstream.models.checkpoint import (
    named_target,
    read_draft_tensors,
    read_json,
    resolve,
    weight_files,
    write_checkpoint,
)
from slipstream.models.draft import drafter_of
from slipstream.models.outputs import CHECKPOINT, check_output_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """Options of `slipstream convert`."""

    input: str = ""
    """Draft checkpoint to read: a folder or a hub id."""
    output: str = ""
    """Folder to write."""
    overwrite: bool = False
    """Replace `output` if it is a draft checkpoint that was written here, and nothing else."""
    layout: Literal["sglang", "speculators"] = "sglang"
    """sglang: the public layout, ours too (SGLang, SpecForge, vLLM). speculators: what vLLM and that library load"""
    target: str = ""
    """The draft's target (folder or hub id). Default: the one that the draft names."""

    def __post_init__(self) -> None:
        for name in ("input", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; name a draft checkpoint to read (input) and a folder (output)")


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
    inputs = {"input": [config.input], "target": [config.target]}
    check_output_folder(config.output, CHECKPOINT, inputs, overwrite=config.overwrite)
    path = resolve(config.input)
    values = read_json(path / "config.json")
    form = form_of(values, config.input)
    layout, target = layout_of(form, config), read_target(config.target or target_of(path))
    written = layout.write(form.read(path, target), target)
    provenance: dict[str, Any] = {"argv": sys.argv, "converted": config.input}
    if (path / "run.json").exists():
        provenance["run"] = read_json(path / "run.json")
    if Path(target.name).is_dir():
        provenance["target_path"] = str(Path(target.name).resolve())
    with atomic_folder(Path(config.output), CHECKPOINT.check) as folder:
        write_checkpoint(folder, written.values, written.tensors, provenance)
    print(f"{config.output}: {len(written.tensors)} tensors, layout {config.layout}")

    def rename(name: str) -> str:
        return layout.name(form.public_name(name))

    for line in changes(tensor_names(path), list(written.tensors), rename, values, written.values):
        print(f"  {line}")
    if max(written.layers, default=0) >= target.config.num_layers - 1:
        print("  note: it reads the last layer's output, which other servers take behind the final norm or not at all")


def form_of(values: Mapping[str, Any], name: str) -> Form:
    drafter = str(values.get("speculators_model_type") or drafter_of(values, name))
    if drafter not in FORMS:
        raise ValueError(f"input {name} is a draft of the kind {drafter}; kinds that convert: {', '.join(FORMS)}")
    return FORMS[drafter]


def layout_of(form: Form, config: ConvertConfig) -> Layout:
    if config.layout not in form.layouts:
        raise ValueError(
            f"layout {config.layout} has no place for drafts such as {config.input}; use {', '.join(form.layouts)}"
        )
    return form.layouts[config.layout]


def target_of(path: Path) -> str:
    """The target that a draft names. Raises ValueError where it names none."""
    name = named_target(path)
    if not name:
        raise ValueError("the draft names no target; add --target with the model that it was trained for")
    return name


def tensor_names(path: Path) -> list[str]:
    """Of the files that a draft is read from."""
    files = weight_files(path)
    return [key for file in files for key in sorted(names_in(file))] if files else sorted(read_draft_tensors(path))


if __name__ == "__main__":
    main()
