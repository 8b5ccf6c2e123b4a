"""`slipstream VERB ...`: one command for the programs of this package.

Invariant: a verb runs the program itself, so `slipstream prepare X` and `python data_tools/prepare.py X` are the same.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

# Verb -> the module whose main(argv) runs it, and what it does.
VERBS = {
    "prepare": ("slipstream.data_tools.prepare", "conversations to tokens and loss masks"),
    "regenerate": ("slipstream.data_tools.regenerate", "replace the answers by the target's own"),
    "frequency-map": ("slipstream.data_tools.frequency_map", "count answer tokens, choose a draft vocabulary"),
    "capture-states": ("slipstream.data_tools.capture_states", "run the target once, keep its states for training"),
    "train": ("slipstream.train.command", "train a draft in one process: eagle3, dflash or eagle"),
    "exact-check": ("slipstream.serve.exact_check", "show that a draft changes no token of any answer"),
    "doctor": ("slipstream.doctor.cli", "say why a draft is accepted badly, and what to do"),
    "accept": ("slipstream.serve.measure.accept", "accept length and speed-up of a draft, by category"),
    "compare": ("slipstream.serve.measure.compare", "speed of several servers side by side, with intervals"),
    "convert": ("slipstream.data_tools.convert", "write a draft in another server's or trainer's layout"),
    "report": ("slipstream.train.report", "draw a training run as an HTML page"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the verb that `argv` (default: the command line) begins with."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return
    verb, *rest = arguments
    if verb not in VERBS:
        print(f"slipstream: error: unknown verb {verb!r}; valid verbs: {', '.join(VERBS)}", file=sys.stderr)
        raise SystemExit(2)
    import_module(VERBS[verb][0]).main(rest)


def overview() -> str:
    lines = [f"  {verb:<16} {purpose}" for verb, (_, purpose) in VERBS.items()]
    return "\n".join(["usage: slipstream VERB [options]", "", *lines, "", "slipstream VERB --help lists its options"])


if __name__ == "__main__":
    main()
