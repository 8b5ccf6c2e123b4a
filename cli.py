"""`slipstream VERB ...`: one command for the programs of this package.

Invariant: a verb runs the program itself, so `slipstream prepare X` and `python data_tools/prepare.py X` are the same.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from slipstream.config import end_at_interrupts, errors_reported, nearest, raise_interrupts, run


class Verb(NamedTuple):
    """Import paths, MODULE:NAME, of a verb's parts. The program is imported after its options were read."""

    options: str  # of a module that loads neither torch nor anything else that takes long
    program: str
    purpose: str


VERBS = {
    "prepare": Verb(
        "data_tools.verb_options:PrepareConfig",
        "data_tools.prepare:prepare",
        "conversations to tokens and loss masks",
    ),
    "regenerate": Verb(
        "data_tools.verb_options:RegenerateConfig",
        "data_tools.regenerate:regenerate",
        "replace the answers by the target's own",
    ),
    "frequency-map": Verb(
        "data_tools.verb_options:FrequencyMapConfig",
        "data_tools.frequency_map:frequency_map",
        "count answer tokens, choose a draft vocabulary",
    ),
    "capture-states": Verb(
        "data_tools.verb_options:CaptureConfig",
        "data_tools.capture_states:capture_states",
        "run the target once, keep its states for training",
    ),
    "train eagle3": Verb(
        "train.eagle3_options:Eagle3Options",
        "train.eagle3:program",
        "train an EAGLE3 draft in one process",
    ),
    "train dflash": Verb(
        "train.dflash_options:DFlashOptions",
        "train.dflash:program",
        "train a DFLASH block draft in one process",
    ),
    "train eagle": Verb(
        "train.eagle_options:EagleOptions",
        "train.eagle:program",
        "train an EAGLE draft in one process",
    ),
    "train mtp": Verb(
        "train.mtp_options:MTPOptions",
        "train.mtp:program",
        "train an MTP head in one process",
    ),
    "adapt": Verb(
        "data_tools.verb_options:AdaptConfig",
        "data_tools.adapt:adapt",
        "go on training a draft with logged answers",
    ),
    "deploy": Verb(
        "serve.fleet.options:DeployConfig",
        "serve.fleet.deploy:deploy",
        "serve with many replicas, on a Ray cluster",
    ),
    "exact-check": Verb(
        "serve.exact_check:ExactCheckConfig",
        "serve.exact_check:check_and_report",
        "show that a draft changes no token of any answer",
    ),
    "doctor": Verb(
        "doctor.options:DoctorConfig",
        "doctor.cli:examine_and_report",
        "say why a draft is accepted badly, and what to do",
    ),
    "accept": Verb(
        "serve.measure.accept:AcceptConfig",
        "serve.measure.accept:accept",
        "accept length and speed-up of a draft, by category",
    ),
    "compare": Verb(
        "serve.measure.compare:CompareConfig",
        "serve.measure.compare:compare",
        "speed of several servers side by side, with intervals",
    ),
    "kernels": Verb(
        "serve.kernels_options:KernelsConfig",
        "serve.kernels:print_kernels",
        "print which kernel multiplies each layer of a target",
    ),
    "convert": Verb(
        "data_tools.verb_options:ConvertConfig",
        "data_tools.convert:convert",
        "write a draft in another server's or trainer's layout",
    ),
    "push": Verb(
        "train.push_options:PushConfig",
        "train.push:push",
        "upload a draft to the hub, with a model card",
    ),
    "report": Verb(
        "train.options:ReportConfig",
        "train.report:write_report",
        "draw a training run as an HTML page",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the verb that `argv` (default: the command line) begins with."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_group = any(name.startswith(f"{word} ") for word in arguments[:1] for name in VERBS)
    group = arguments[:1] if is_group else []
    rest = arguments[len(group) :]
    if not rest or rest[0] in ("-h", "--help"):
        with errors_reported(None, "slipstream"):
            print(overview(*group))
        return
    name = " ".join((*group, rest[0]))
    if name not in VERBS:
        alike = nearest(name, [*VERBS, *(verb.split()[0] for verb in VERBS)])
        hint = f"did you mean {alike[0]}?" if alike else f"valid verbs: {', '.join(VERBS)}"
        hint = "the server is the command `serve`" if name == "serve" else hint
        print(f"slipstream: error: unknown verb {name!r}; {hint}", file=sys.stderr)
        raise SystemExit(2)
    verb = VERBS[name]
    prog = f"slipstream {name}"
    with errors_reported(None, prog):
        options = load(verb.options)
    run(lambda config: load(verb.program, prog)(config), options, prog, rest[1:])


def load(path: str, prog: str = "slipstream") -> Any:
    end_at_interrupts(prog)
    try:
        module, name = path.split(":")
        return getattr(import_module(f"slipstream.{module}"), name)
    finally:
        raise_interrupts()


def overview(*group: str) -> str:
    """The verbs, or those that begin with the word `group`."""
    verbs = {name: verb for name, verb in VERBS.items() if name.split()[: len(group)] == list(group)}
    command = " ".join(("slipstream", *group, "VERB"))
    lines = [f"  {name:<16} {verb.purpose}" for name, verb in verbs.items()]
    server = "" if group else "; the server is the command `serve`"
    return "\n".join([f"usage: {command} [options]", "", *lines, "", f"{command} --help lists its options{server}"])


if __name__ == "__main__":
    main()
