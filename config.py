"""Program options: a dataclass, overridden by YAML files, overridden by dotted flags (jsonargparse)."""

import sys
from collections.abc import Sequence
from typing import TypeVar

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

set_parsing_settings(docstring_parse_attribute_docstrings=True)

ConfigT = TypeVar("ConfigT")


def build_parser(config_class: type, *, prog: str, description: str) -> ArgumentParser:
    """Parser with one dotted flag per field of `config_class` (nested dataclasses included), `--config` and
    `--print_config`."""
    parser = ArgumentParser(prog=prog, description=description, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file with these options; may be given more than once")
    parser.add_class_arguments(config_class, as_group=False)
    return parser


def option_names(parser: ArgumentParser) -> list[str]:
    """Every option of `parser` in dotted form, sorted; what the frozen-options tests compare."""
    skipped = {"help", "config", "print_config", "print_shtab"}
    names = {action.dest for action in parser._actions if action.option_strings}
    return sorted(name for name in names if name.split(".")[0] not in skipped and not name.endswith(".help"))


def parse(config_class: type[ConfigT], argv: Sequence[str] | None = None, *, prog: str, description: str) -> ConfigT:
    """Reads `argv` (default: the command line) into `config_class`.

    Exits with status 2 and one message on a bad value or an unknown key; the message then lists the valid keys.
    """
    parser = build_parser(config_class, prog=prog, description=description)
    return instantiate(parser, config_class, parse_or_exit(parser, argv))


def parse_or_exit(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    try:
        return parser.parse_args(argv)
    except Exception as error:  # jsonargparse and argparse raise several unrelated types; the process ends here
        message = str(error).strip()
        print(f"{parser.prog}: error: {message}", file=sys.stderr)
        if "unrecognized" in message or "does not accept" in message:
            print(f"valid options: {', '.join(option_names(parser))}", file=sys.stderr)
        raise SystemExit(2) from error


def instantiate(parser: ArgumentParser, config_class: type[ConfigT], namespace: Namespace) -> ConfigT:
    values = parser.instantiate(namespace).as_dict()
    values.pop("config", None)
    try:
        return config_class(**values)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
