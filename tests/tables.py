"""Tables of cases, in a YAML file beside a test's module and of its name: the test's columns, then its rows."""

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

Test = Callable[..., None]
Value = TypeVar("Value")


def each_case(*rows: Any) -> Callable[[Test], Test]:
    """Runs a test for each row of its table, and for these, which YAML cannot say."""

    def decorate(test):
        columns, *table = table_of(inspect.getfile(inspect.unwrap(test)), test.__name__)
        return pytest.mark.parametrize(columns, [*table, *rows])(test)

    return decorate


def table_of(module: str, name: str) -> Any:
    """module: path of a test's file."""
    return _tables(Path(module).with_suffix(".yaml"))[name]


@cache
def _tables(file: Path) -> dict[str, Any]:
    return yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def objects_of(module: str, name: str, kind: Callable[..., Value]) -> dict[str, Value]:
    """A table's rows by name, each a `kind` of its fields, with tuples for lists."""
    return {key: kind(**_tuples(fields)) for key, fields in table_of(module, name).items()}


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
