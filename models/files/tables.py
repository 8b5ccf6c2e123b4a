"""Reads tables of this package in YAML, which stand beside the modules that explain them."""

from pathlib import Path
from typing import Any

import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C it takes a tenth of the time, at each start


def read_tables(file: Path) -> Any:
    return yaml.load(file.read_text(encoding="utf-8"), LOADER)
