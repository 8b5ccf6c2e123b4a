"""The tables of layouts.yaml."""

from pathlib import Path

from slipstream.models.files.tables import read_tables

LAYOUTS = read_tables(Path(__file__).with_suffix(".yaml"))
