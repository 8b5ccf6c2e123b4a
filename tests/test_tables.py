"""Tables in YAML: what Python, ruff and mypy would see of a dict, and that the package has the files."""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import pytest
import yaml
from pydantic import TypeAdapter

from slipstream.kernels.gemm.grouped import TILINGS
from slipstream.models.drafts.layouts import LAYOUTS
from slipstream.models.targets.families import FAMILIES, MIXTURES, MTP_FORMS, TABLES, TEXT_PARTS
from slipstream.serve.chat.forms import REASONING_FORMS, TOOL_FORMS
from slipstream.serve.drafters.options import DRAFTERS
from slipstream.serve.http.schemas import NEUTRAL_BY_PLACE, Neutral
from slipstream.tests.sources import ROOT

FILES = sorted(file for file in ROOT.glob("[!.]*/**/*.yaml") if not {"site-packages", "build"} & {*file.parts})
PACKAGE_DATA = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
PARTS = ("data_tools", "doctor", "kernels", "models", "serve", "train")
MERGE = "tag:yaml.org,2002:merge"
ROWS: dict[str, Mapping[Any, Any]] = {
    "experts": MIXTURES,
    "mtp": MTP_FORMS,
    "tools": TOOL_FORMS,
    "reasoning": REASONING_FORMS,
    **{f"tilings {format}": tilings for format, tilings in TILINGS.items()},
}


def repeated_keys(node: yaml.Node) -> Iterator[str]:
    """Yields keys that a mapping has twice, with their lines; a loader takes the last."""
    if isinstance(node, yaml.MappingNode):
        keys = [key for key, _ in node.value if key.tag != MERGE]
        names = [(key.tag, key.value) for key in keys]
        for index, key in enumerate(keys):
            if names[index] in names[:index]:
                yield f"line {key.start_mark.line + 1}: {key.value}"
        for _, value in node.value:
            yield from repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from repeated_keys(item)


def test_no_mapping_has_a_key_twice():
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    repeated = [
        f"{file.relative_to(ROOT)} {key}"
        for file in FILES
        for node in yaml.compose_all(file.read_text(encoding="utf-8"), loader)
        for key in repeated_keys(node)
    ]
    assert len(FILES) > 100
    assert not repeated
    assert [*repeated_keys(yaml.compose("{a: 1, b: [{c: 1, 2: 1, c: 2}]}"))] == ["line 1: c"]


def test_the_package_has_all_tables():
    installed = {
        str(file.relative_to(ROOT))
        for package, patterns in PACKAGE_DATA.items()
        for pattern in patterns
        for file in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    files = {str(file.relative_to(ROOT)) for file in FILES if file.relative_to(ROOT).parts[0] in PARTS}
    assert files
    assert files <= installed


@pytest.mark.parametrize("name", ROWS)
def test_fields_of_rows_have_their_types(name):
    for key, row in ROWS[name].items():
        for field, hint in get_type_hints(type(row)).items():
            value = getattr(row, field)
            try:
                TypeAdapter(hint).validate_python(value, strict=True)
            except ValueError as error:
                pytest.fail(f"{name}: {field} of {key} is {value!r}: {error}")


def test_names_in_tables_are_those_of_the_code():
    for table in ("experts", "mtp", "tensor_names", "needed_too"):
        assert TABLES[table].keys() <= FAMILIES.keys(), table
    assert {*TEXT_PARTS.values()} <= FAMILIES.keys()
    assert not TABLES["unserved"].keys() & FAMILIES.keys()
    assert {*LAYOUTS["architectures"].values()} <= DRAFTERS.keys()


def test_fields_without_effect_have_lists_of_values():
    places = [NEUTRAL_BY_PLACE[name] for name in ("completions", "message", "responses", "part")]
    places += [form["neutral"] for form in NEUTRAL_BY_PLACE["items"].values()]
    for place in places:
        TypeAdapter(Neutral).validate_python(place, strict=True)
