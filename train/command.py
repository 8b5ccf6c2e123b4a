"""`slipstream train DRAFTER ...`: trains in this process, as `python train/DRAFTER.py ...` does.

    slipstream train eagle3 --config configs/eagle3/tiny.yaml --output runs/draft

Several processes are started by `accelerate launch train/DRAFTER.py ...`.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

DRAFTERS = ("eagle3", "dflash", "eagle")
USAGE = f"usage: slipstream train {{{','.join(DRAFTERS)}}} [options]"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program of the drafter that `argv` (default: the command line) begins with."""
    drafter, *options = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if drafter in ("-h", "--help"):
        print(f"{USAGE}\n\nslipstream train eagle3 --help lists its options")
        return
    if drafter not in DRAFTERS:
        print(f"slipstream train: error: unknown drafter {drafter!r}; give {' or '.join(DRAFTERS)}", file=sys.stderr)
        raise SystemExit(2)
    import_module(f"slipstream.train.{drafter}").main(options)
