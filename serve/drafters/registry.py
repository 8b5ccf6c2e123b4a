"""Finds the drafter that a draft calls for, and plans and loads it with the host stages beside it."""

import importlib
from dataclasses import fields, replace
from typing import Any

from slipstream.models.drafts.source import DraftSource
from slipstream.models.targets.config import TargetSpec
from slipstream.models.targets.decoder import Target
from slipstream.serve.drafters.base import Drafter, DraftPlan, DraftWeights
from slipstream.serve.drafters.options import NGRAM, options_for, options_of
from slipstream.serve.engine.host_stages import HostStage


def find_drafter(source: DraftSource) -> type[Drafter]:
    """Returns the drafter's class. Raises ValueError if there is none of its name."""
    name = source.drafter
    options_of(name)
    module = "none" if name == NGRAM else name
    return importlib.import_module(f"slipstream.serve.drafters.{module}").Drafter


def plan_draft(source: DraftSource, values: dict[str, Any], target: TargetSpec) -> DraftPlan:
    """Plans the drafter and the host stages that draft beside it.

    Raises ValueError for a wrong option name or value, and if draft and target do not fit.
    """
    options = build_options(options_for(source), values)
    plan = replace(find_drafter(source).plan(source, options, target), name=source.drafter, source=source)
    ngram, _ = _ngram_options(source, options)
    if ngram is None:
        return plan
    chain_nodes = plan.chain_nodes if plan.branches else plan.widths[-1]
    return replace(plan, host_widths=ngram.widths, branches=plan.branches or ngram.branches, chain_nodes=chain_nodes)


def load_drafter(source: DraftSource, values: dict[str, Any], target: Target) -> tuple[Drafter, list[HostStage]]:
    """Builds what `plan_draft` plans, not yet attached."""
    options = build_options(options_for(source), values)
    ngram, first = _ngram_options(source, options)
    stages: list[HostStage] = []
    if ngram is not None:
        from slipstream.serve.drafters.ngram.stage import NgramStage  # here: its core is compiled code

        stages = [NgramStage(ngram, target.config.vocab_size, first)]
    return find_drafter(source).load(source, options, target), stages


def read_weights(
    source: DraftSource, values: dict[str, Any], drafter: Drafter, name: str, target: Target
) -> DraftWeights:
    """Reads the weights of a checkpoint for a drafter that serves, whose name and options are given. Raises ValueError
    for a draft of another network."""
    if not source.has_network or source.is_in_target:
        raise ValueError(f"draft is {source.name!r}; name the checkpoint of a draft, whose weights are loaded")
    source.check()
    if source.drafter != name:
        raise ValueError(
            f"draft {source.name} is of drafter {source.drafter}, and {name} drafts here; start an engine with it"
        )
    return drafter.read_weights(source, build_options(options_for(source), values), target)


def _ngram_options(source: DraftSource, options: Any) -> tuple[Any, int]:
    """Returns the options of n-gram lookahead, None without it, and how many last tokens must have occurred before."""
    if source.drafter == NGRAM:
        return options, 0
    if source.has_network and options.ngram_first:
        return options.ngram_options(), options.ngram_first
    return None, 0


def build_options(options: type, values: dict[str, Any]) -> Any:
    """Raises ValueError for an unknown name, with the valid ones."""
    names = [field.name for field in fields(options)]
    unknown = sorted(values.keys() - set(names))
    if unknown:
        raise ValueError(f"drafter option {unknown[0]!r} does not exist; valid: {', '.join(names) or '(none)'}")
    return options(**values)
