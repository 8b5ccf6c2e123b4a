"""The tables of layouts.yaml."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.models.chat.quotes import quote
from slipstream.models.files.tables import read_tables

LAYOUTS = read_tables(Path(__file__).with_suffix(".yaml"))


def is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**31


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**53


def is_list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


TYPES = {
    "an integer below 2**31": is_integer,
    "a number below 2**53": is_number,
    "an object": lambda value: isinstance(value, dict),
    "a list of integers below 2**31": is_list_of(is_integer),
    "a list of numbers": is_list_of(is_number),
    "a list of texts": is_list_of(lambda value: isinstance(value, str)),
}
FIELD_TYPES = {name: kind for kind, names in LAYOUTS["field_types"].items() for name in names}


def check_types(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of config.json, in any section, that has another type than in any layout. Null and
    false say nothing."""
    for name, value in values.items():
        kind = FIELD_TYPES.get(name)
        if kind is not None and value is not None and value is not False and not TYPES[kind](value):
            raise ValueError(f"draft config: {name} is {quote(value)}; it must be {kind}")
        if isinstance(value, dict):
            check_types(value)
