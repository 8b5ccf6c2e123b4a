"""How the data programs run and report."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from slipstream.config import parse

ConfigT = TypeVar("ConfigT")


def run(
    program: Callable[[ConfigT], None],
    config_class: type[ConfigT],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
) -> None:
    """Parses `argv` (default: the command line) and calls `program`.

    A ValueError or OSError becomes one sentence on stderr and exit status 1, an interrupt exit status 130.
    """
    config = parse(config_class, argv, prog=prog, description=description)
    try:
        program(config)
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def show_table(rows: Mapping[str, object]) -> None:
    """Prints names and values in two columns."""
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value:,}" if type(value) is int else f"  {name:<{width}}  {value}")
