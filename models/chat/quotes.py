"""Quotes what a client sent, shortened, so that an error stays a sentence. Imports nothing else."""

QUOTED_CHARS = 60
PLACE_CHARS = 300  # of the path of a field, or of several names


def shorten(text: str, most: int = QUOTED_CHARS) -> str:
    """`text`, or its first `most` characters and an ellipsis. Halves of surrogate pairs, which no encoding has, are
    written as escapes."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= most else f"{text[:most]}…"


def quote(value: object) -> str:
    """The repr of a value, shortened."""
    try:
        return shorten(repr(value))
    except ValueError:  # Python writes no integers of more than 4,300 digits
        return "a value of too many digits"
