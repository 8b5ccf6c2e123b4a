"""Sources of drafts, which `--draft` names: a checkpoint, the target's own files, or a drafter without files.

A kind of source is a class here, which `source_of` chooses. Imports no torch, so that programs can check options at
once.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from slipstream.models.chat.quotes import JSON_TYPES, json_type
from slipstream.models.drafts.layouts import LAYOUTS
from slipstream.models.drafts.speculators_layout import drafter_of_kind, speculators_kind
from slipstream.models.files.checkpoint import (
    Values,
    architecture_name,
    checkpoint_fingerprint,
    named_target,
    read_json,
    resolve,
    tokenizer_hash,
    weights_fingerprint,
)
from slipstream.models.files.names import check_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.models.layers.formats.base import Quantization
    from slipstream.models.targets.config import TargetSpec

logger = logging.getLogger(__name__)

FOREIGN_ARCHITECTURES: dict[str, str] = LAYOUTS["architectures"]
UNSUPPORTED_ARCHITECTURES: dict[str, str] = LAYOUTS["unsupported_architectures"]
# Fields of config.json that are read as lists and objects.
CONTAINERS: dict[str, type] = {
    "layer_types": list,
    "eagle_config": dict,
    "dflash_config": dict,
    "speculators_config": dict,
}


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafter without files, such as none or ngram; base of those with files."""

    name: str  # as --draft gives it
    target: str = ""  # the name or folder of the target; empty: the source may name it

    has_network: ClassVar[bool] = False
    """Whether weights draft."""
    is_in_target: ClassVar[bool] = False
    """Whether these weights are in the target's files."""

    @property
    def drafter(self) -> str:
        """The drafter that it calls for. Raises ValueError for files of an unknown kind."""
        return self.name

    def check(self) -> None:
        """Raises ValueError for a source that does not exist, and if nothing names the target."""
        if not self.target:
            raise ValueError(
                f"target is empty and draft {self.name!r} is not a checkpoint that names one; add --target"
            )

    def find_target(self, revision: str | None, *, trust_remote_code: bool, weights: bool) -> tuple[str, Path]:
        """Returns the name and folder of the target. `revision`: in place of the one that the source names; `weights`:
        fetch them from the hub, too."""
        if not self.target:
            self.check()
        return self.target, resolve(self.target, revision, trust_remote_code=trust_remote_code, weights=weights)

    def check_files(self) -> None:
        """Raises ValueError for a source without files."""
        check_checkpoint("draft", self.name)

    def folder(self) -> Path:
        """Returns the folder of its files, fetched from the hub. Raises ValueError for a source without files."""
        return resolve(self.name)

    def quantization(self, target: "TargetSpec", option: str | None) -> "Quantization | None":
        """Reads how its weights are stored; None: in 16 bits. `option`: that of the target, such as fp8."""
        return None

    def read_config(self) -> Values:
        """Reads config.json; empty without files."""
        return {}

    def read_run(self) -> Values:
        """Reads run.json, which our trainer writes; empty where there is none."""
        return {}

    @property
    def shape(self) -> str:
        """A text on which the times of its passes depend."""
        return self.name

    @property
    def fingerprint(self) -> str:
        """A hash of its files; without files its name."""
        return self.name


class TargetHead(DraftSource):
    """A module in the target's own files that predicts a token more (models/drafts/mtp.py)."""

    has_network = True
    is_in_target = True

    def check_files(self) -> None:
        self.check()

    def folder(self) -> Path:
        return resolve(self.target)

    def quantization(self, target: "TargetSpec", option: str | None) -> "Quantization | None":
        from slipstream.models.drafts.mtp import mtp_quantization
        from slipstream.models.layers.formats.table import read_quantization

        return mtp_quantization(read_quantization(self.folder(), option), target)


class DraftCheckpoint(DraftSource):
    """A folder or a hub id (owner/name), from any trainer, the target's maker among them."""

    has_network = True

    @property
    def drafter(self) -> str:
        return drafter_of(self.read_config(), self.name)

    def check(self) -> None:
        check_checkpoint("draft", self.name)

    def find_target(self, revision: str | None, *, trust_remote_code: bool, weights: bool) -> tuple[str, Path]:
        how: dict[str, bool] = {"trust_remote_code": trust_remote_code, "weights": weights}
        if self.target:
            return self.target, resolve(self.target, revision, **how)
        folder = resolve(self.name, weights=weights)
        try:
            name = named_target(folder)
            revision = revision or read_json(folder / "config.json").get("target_revision")
            if name:
                return name, resolve(name, revision, **how)
        except ValueError as error:
            raise ValueError(
                f"the target that draft {self.name} names cannot be read ({error}); add --target"
            ) from error
        raise ValueError(f"draft {self.name} names no target; add --target")

    def read_config(self) -> Values:
        return read_json(self.folder() / "config.json")

    def read_run(self) -> Values:
        path = self.folder() / "run.json"
        return read_json(path) if path.exists() else {}

    @property
    def shape(self) -> str:
        return (self.folder() / "config.json").read_text()

    @property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint(self.folder())


def source_of(draft: str, target: str = "") -> DraftSource:
    """Returns the source that `draft` names. Whether it exists is asked later."""
    if "/" in draft or (draft and Path(draft).is_dir()):
        return DraftCheckpoint(draft, target)
    return TargetHead(draft, target) if draft == "mtp" else DraftSource(draft, target)


def drafter_of(config: Values, draft: str) -> str:
    """The drafter that config.json calls for. `draft` names the checkpoint.

    First asked is `speculators_model_type`, which says how the whole file is laid out: that library keeps fields that
    it does not know, so a draft that it trained on from one of ours still has our `drafter`. `drafter` comes second,
    other trainers' architectures last. Raises ValueError for a kind or an architecture that is not supported, and for
    a config.json that is damaged.
    """
    for name, container in CONTAINERS.items():
        value = config.get(name)
        if not isinstance(value, container | None):
            raise ValueError(f"draft {draft}: {name} in config.json is {json_type(value)}, not {JSON_TYPES[container]}")
    kind = speculators_kind(config)
    if kind is not None:
        return drafter_of_kind(kind)
    if "drafter" in config:
        return str(config["drafter"])
    architecture = architecture_name(config)
    if architecture == "LlamaForCausalLM" and config.get("num_hidden_layers") == 1:  # as EAGLE's authors write
        return "eagle3" if "draft_vocab_size" in config else "eagle"
    if architecture in UNSUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"draft {draft} has architecture {architecture}: {UNSUPPORTED_ARCHITECTURES[architecture]} is not supported"
        )
    if architecture not in FOREIGN_ARCHITECTURES:
        raise ValueError(
            f"draft {draft} has architecture {architecture}; known drafts: {', '.join(FOREIGN_ARCHITECTURES)}; "
            "if it is the model to draft for, name it as target"
        )
    return FOREIGN_ARCHITECTURES[architecture]


def warn_if_changed(source: DraftSource, target: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """A draft for another target still gives right output, only fewer accepted tokens: worth a warning, not an end."""
    config = source.read_config()
    message = "draft %s was trained for other %s than %s holds: expect fewer accepted tokens"
    expected = config.get("target_fingerprint")
    if expected and expected != weights_fingerprint(target):
        logger.warning(message, source.name, "weights", target)
    expected = config.get("tokenizer_hash")
    if expected and expected != tokenizer_hash(tokenizer):
        logger.warning(message, source.name, "tokenizer rules", target)
