"""The tables of layouts.yaml."""

from pathlib import Path

import yaml

LAYOUTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
