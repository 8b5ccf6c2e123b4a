"""Finds the drafter of a draft: by name, or by the `drafter` field of a checkpoint's config.json."""

import importlib
from dataclasses import fields, replace
from typing import Any

from slipstream.models.drafts.base import drafter_of
from slipstream.models.files.checkpoint import read_json, resolve
from slipstream.models.files.names import is_checkpoint
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import Target
from slipstream.serve.drafters.base import Drafter, DraftPlan
from slipstream.serve.engine.host_stages import HostStage

MODULES = {  # modules of this folder, each with a class `Drafter`; loaded when needed
    "dflash": "dflash",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "none": "none",
}
NGRAM = "ngram"  # no drafter but a host stage (ngram/stage.py), alone or before a draft network


def find_drafter(draft: str) -> type[Drafter]:
    """The drafter class for a name or a checkpoint (its config.json names the drafter)."""
    name = drafter_name(draft)
    if name not in MODULES and name != NGRAM:
        names = ", ".join([*MODULES, NGRAM])
        raise ValueError(f"drafter {name!r} does not exist; name a checkpoint folder or one of: {names}")
    module = MODULES["none" if name == NGRAM else name]
    return importlib.import_module(f"slipstream.serve.drafters.{module}").Drafter


def options_of(draft: str) -> type:
    """The options dataclass of the draft's drafter; for a checkpoint with those of n-gram lookahead."""
    options = find_drafter(draft).Options
    if draft == NGRAM:
        return _ngram().NgramOptions
    return _ngram().with_ngram_first(options) if is_checkpoint(draft) else options


def plan_draft(draft: str, values: dict[str, Any], target: TargetSpec) -> DraftPlan:
    """Plans the drafter and the host stages that draft beside it.

    Raises ValueError for a wrong option name or value, and if draft and target do not fit.
    """
    options = build_options(options_of(draft), values)
    plan = replace(find_drafter(draft).plan(draft, options, target), name=drafter_name(draft))
    ngram, _ = _ngram_options(draft, options)
    if ngram is None:
        return plan
    return replace(plan, host_widths=ngram.widths, branches=plan.branches or ngram.branches)


def load_drafter(draft: str, values: dict[str, Any], target: Target) -> tuple[Drafter, list[HostStage]]:
    """Builds what `plan_draft` plans, not yet attached."""
    options = build_options(options_of(draft), values)
    ngram, first = _ngram_options(draft, options)
    stages = [] if ngram is None else [_ngram().NgramStage(ngram, target.config.vocab_size, first)]
    return find_drafter(draft).load(draft, options, target), stages


def _ngram_options(draft: str, options: Any) -> tuple[Any, int]:
    """Returns the options of n-gram lookahead, None without it, and how many last tokens must have occurred before."""
    if draft == NGRAM:
        return options, 0
    if is_checkpoint(draft) and options.ngram_first:
        return options.ngram_options(), options.ngram_first
    return None, 0


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


def _ngram() -> Any:
    """Loaded where it is needed: its core is compiled code."""
    return importlib.import_module("slipstream.serve.drafters.ngram.stage")
