"""Tells checkpoints from names of drafters. Imports nothing else, so that programs can check options at once."""

from pathlib import Path


def is_checkpoint(name: str) -> bool:
    """True for a local folder or a hub id (owner/name); False for the bare name of a drafter."""
    return "/" in name or (name != "" and Path(name).is_dir())
