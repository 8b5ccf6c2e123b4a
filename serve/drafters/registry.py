"""How a draft finds its drafter: by name, or by the `drafter` field of a checkpoint's config.json."""

import importlib
from dataclasses import fields
from typing import Any

from slipstream.models.drafts.base import drafter_of
from slipstream.models.files.checkpoint import is_checkpoint, read_json, resolve
from slipstream.models.targets.decoder import Target
from slipstream.serve.drafters.base import Drafter

MODULES = {  # of this folder, each with a class `Drafter`; loaded when needed
    "dflash": "dflash",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mixed": "mixed",
    "ngram": "ngram.drafter",
    "none": "none",
}


def find_drafter(draft: str) -> type[Drafter]:
    """The drafter class for a name or a checkpoint (its config.json names the drafter)."""
    name = drafter_name(draft)
    if name not in MODULES:
        raise ValueError(f"drafter {name!r} does not exist; name a checkpoint folder or one of: {', '.join(MODULES)}")
    return importlib.import_module(f"slipstream.serve.drafters.{MODULES[name]}").Drafter


def options_of(draft: str) -> type:
    """The options dataclass of the draft's drafter; for a checkpoint with those of n-gram lookahead."""
    own = find_drafter(draft).Options
    if not is_checkpoint(draft):
        return own
    return importlib.import_module("slipstream.serve.drafters.mixed").options_class(own)


def load_drafter(draft: str, values: dict[str, Any], target: Target) -> Drafter:
    """Builds the drafter. Raises ValueError for a wrong option name or value, and if draft and target do not fit."""
    options = build_options(options_of(draft), values)
    drafter = find_drafter(draft).load(draft, options, target)
    if not is_checkpoint(draft) or not options.ngram_first:
        return drafter
    mixed = importlib.import_module("slipstream.serve.drafters.mixed")
    return mixed.Drafter(drafter, options, target.config.vocab_size)


def drafter_name(draft: str) -> str:
    if not is_checkpoint(draft):
        return draft
    return drafter_of(read_json(resolve(draft) / "config.json"), draft)


def build_options(options: type, values: dict[str, Any]) -> Any:
    """Raises ValueError for an unknown name, with the valid ones."""
    names = [field.name for field in fields(options)]
    unknown = sorted(values.keys() - set(names))
    if unknown:
        raise ValueError(f"drafter option {unknown[0]!r} does not exist; valid: {', '.join(names) or '(none)'}")
    return options(**values)
