"""MTP heads, in their target's files or in a checkpoint of their own: what they hold, and what else it may mean."""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import torch

from slipstream.doctor.readings import Case, Reading
from slipstream.models.drafts.mtp import MTP, file_keys
from slipstream.models.drafts.mtp_trial import agreements, text_tokens
from slipstream.models.files.checkpoint import tensor_names
from slipstream.models.files.weights import public_tensors
from slipstream.models.layers.formats.base import QuantizedExperts, QuantizedLinear
from slipstream.models.layers.norm import RMSNorm
from slipstream.models.targets.config import MoESpec
from slipstream.models.targets.decoder import Target
from slipstream.models.targets.families import MTP_FORMS, Hidden

PLACES: dict[Hidden, str] = {"after_norm": "after the final norm", "before_norm": "before the final norm"}


@torch.no_grad()
def swap_inputs(module: MTP) -> None:
    """Lets eh_proj read [state ; embedding]."""
    for part in module.in_turn:
        weight = part.eh_proj.get_parameter("weight")
        weight.copy_(weight.roll(weight.shape[1] // 2, 1))


@torch.no_grad()
def swap_norms(module: MTP) -> None:
    """Norms the embedding by the state's norm, and the other way round."""
    for part in module.in_turn:
        weights = [norm.get_parameter("weight") for norm in (part.enorm, part.hnorm)]
        copies = [weight.clone() for weight in weights]
        for weight, other in zip(weights, reversed(copies), strict=True):
            weight.copy_(other)


@torch.no_grad()
def move_norms(module: MTP) -> None:
    """Reads weights of norms as they are where they are taken to be less 1, and the other way round."""
    for norm in module.modules():
        if isinstance(norm, RMSNorm):
            norm.get_parameter("weight").add_(-1 if module.config.norm_offset else 1)


def keep_first(module: MTP) -> None:
    """Lets the first module draft all tokens."""
    module.later = torch.nn.ModuleList()
    module.config = replace(module.config, num_modules=1)


def head_readings(case: Case) -> Iterator[Reading]:
    """Other readings of an MTP head."""
    module = case.network
    if not isinstance(module, MTP):
        return
    if case.subject.in_target:
        yield other_state(case, module)
    subject = case.subject
    if module.eh_proj.is_plain:
        yield Reading(
            "fc and norms",
            "eh_proj of [state ; embedding]",
            "eh_proj reads [embedding ; state], but the file has its columns for [state ; embedding], as of families "
            "that join them the other way round",
            f"swap the two halves of the columns of {name_of(case, 'eh_proj.weight')}",
            replace(subject, edits=(*subject.edits, swap_inputs)),
        )
    yield Reading(
        "fc and norms",
        "norms of embedding and state swapped",
        "the file calls the norm of the embedding by the name of the state's, and the other way round",
        f"swap {name_of(case, 'enorm.weight')} and {name_of(case, 'hnorm.weight')}",
        replace(subject, edits=(*subject.edits, swap_norms)),
    )
    less = "less 1"
    is_less = module.config.norm_offset
    yield Reading(
        "fc and norms",
        f"norms {'as they are' if is_less else less}",
        f"files of this family hold the weights of norms {less if is_less else 'as they are'}, but the head's norms "
        f"are there {'as they are' if is_less else less}",
        f"{'subtract 1 from' if is_less else 'add 1 to'} the weights of the head's norms",
        replace(subject, edits=(*subject.edits, move_norms)),
    )
    if module.config.num_modules > 1:
        count = MTP_FORMS[module.config.form].count if case.subject.in_target else "num_hidden_layers"
        yield Reading(
            "later steps",
            "the first module for all tokens",
            f"the files have {module.config.num_modules} modules, which draft in turn, but the first alone drafts "
            "better: the later ones were hardly trained, or for another order",
            f"write 1 as {count} in config.json",
            replace(subject, edits=(*subject.edits, keep_first)),
        )


def other_state(case: Case, module: MTP) -> Reading:
    """The head with the other one of the states that heads are known to read."""
    hidden = module.config.hidden
    [other] = [state for state in get_args(Hidden) if state != hidden]
    is_open = MTP_FORMS[module.config.form].hidden is None
    why = "which a trial on a short text chose" if is_open else "as all of its family"
    return Reading(
        "target's states",
        f"the state {PLACES[other]}",
        f"the head is read with the state {PLACES[hidden]}, {why}, but drafts better with the one {PLACES[other]}",
        f"serve with --drafter.hidden {other}" if is_open else "please report this with the name of the target",
        replace(case.subject, hidden=other),
    )


def name_of(case: Case, public: str) -> str:
    """Returns the name of a tensor in the files."""
    names = set(case.subject.files.tensors)
    if case.subject.in_target:
        assert case.target.path is not None
        names = tensor_names(case.target.path)
    return file_keys(names, case.target.config).get(public, public)


def facts(module: MTP, target: Target, *, in_target: bool) -> Iterator[tuple[str, str]]:
    """Names and values of what the head holds, how it is read, and how often it agrees with its target."""
    config = module.config
    form = MTP_FORMS.get(config.form)
    quantised = [part for part in module.modules() if isinstance(part, QuantizedLinear | QuantizedExperts)]
    weights = f"{len(quantised)} layers quantised" if quantised else str(target.dtype).removeprefix("torch.")
    yield "where", "the target's files" if in_target else "a draft checkpoint"
    yield "form", f"that of {config.form}" if form else "a layer of Qwen3's kind"
    yield (
        "tensors",
        f"{len(public_tensors(module))} in 16 bits or more, {weights}"
        if quantised
        else (f"{len(public_tensors(module))}, read in {weights}"),
    )
    window = config.layer_spec.attention.window
    attention = "full attention" if window is None else f"a window of {window}"
    yield "layer", f"{'experts' if isinstance(config.layer_spec.mlp, MoESpec) else 'an MLP'}, {attention}"
    yield "modules", f"{config.num_modules}, in turn" if config.num_modules > 1 else "1, for all tokens"
    yield "eh_proj", "reads [embedding ; state]"
    how = " (a trial chose)" if in_target and form is not None and form.hidden is None else ""
    yield "reads", f"the state {PLACES[config.hidden]}{how}"
    if target.tokenizer is None:
        return
    shares = agreements(module, target, text_tokens(target))
    yield "agrees with the target", ", ".join(f"{100 * shares[state]:.0f} % {PLACES[state]}" for state in PLACES)
