"""Quotes what a client sent, shortened, so that an error stays a sentence. Imports nothing else."""

QUOTED_CHARS = 60
PLACE_CHARS = 300  # of the path of a field, or of several names
JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def shorten(text: str, max_chars: int = QUOTED_CHARS) -> str:
    """Returns `text`, or its first `max_chars` characters and an ellipsis. Halves of surrogate pairs, which no encoding
    has, become escapes."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def quote(value: object) -> str:
    """The repr of a value, shortened."""
    try:
        return shorten(repr(value))
    except ValueError:  # Python writes no integers of more than 4,300 digits
        return "a value of too many digits"


def json_type(value: object) -> str:
    """Returns the name of a value's type in JSON, with its article."""
    return JSON_TYPES.get(type(value), f"a {type(value).__name__}")
