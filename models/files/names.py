"""Tells folders and hub ids apart. Imports nothing else, so that programs can check options at
once."""

from pathlib import Path

KEY_FILE = "a text file with the key"  # the value to name for api_key_file


def may_be_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def check_checkpoint(option: str, name: str | None) -> None:
    """Raises ValueError for a checkpoint that is neither a folder nor, by its name, on the hub."""
    is_file = bool(name) and Path(str(name)).is_file()
    if is_file or (name and not may_be_hub_id(name) and not Path(name).is_dir()):
        fault = "is a file" if is_file else "does not exist"
        raise ValueError(f"{option} {name} {fault}; name a folder or a hub id such as owner/model")


def check_file(option: str, name: str | None, remedy: str) -> None:
    """Raises ValueError if an input is named and is not a file."""
    if name is not None and not Path(name).is_file():
        fault = "is a folder" if Path(name).is_dir() else "does not exist"
        raise ValueError(f"{option} {name} {fault}; name {remedy}")


def check_folder(option: str, name: str | None, remedy: str) -> None:
    """Raises ValueError if an input is named and is not a folder."""
    if name is not None and not Path(name).is_dir():
        fault = "is a file" if Path(name).is_file() else "does not exist"
        raise ValueError(f"{option} {name} {fault}; name {remedy}")
