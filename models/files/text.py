"""Text files that options name."""

from pathlib import Path


def read_text_file(option: str, name: str) -> str:
    """The text of the file that `option` names. Raises ValueError naming both."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fault = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"{option} is {name!r}, which cannot be read ({fault}); name a text file") from error


def read_key(name: str | None, option: str = "api_key_file") -> str | None:
    """The API key in the file that `option` names, if it is set."""
    return None if name is None else read_text_file(option, name).strip()
