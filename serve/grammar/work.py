"""The limit of the work that the schemas of one request may cause, and the error for schemas that cannot be served.

The limit of 64 KiB bounds the length of a schema but not the work: references, combinations and comparisons multiply
it. So all code that reads schemas charges its steps to one counter per request. A step takes some microseconds."""

from slipstream.models.chat.quotes import PLACE_CHARS, shorten

MOST_STEPS = 100_000


class Unsupported(ValueError):
    """`keyword` at `place`, a JSON pointer, cannot be served."""

    def __init__(self, place: str, keyword: str, reason: str = "is not supported; leave it out") -> None:
        name = shorten(keyword) if " " in keyword else f'"{shorten(keyword)}"'
        super().__init__(f"{name} at {shorten(place, PLACE_CHARS) or 'the root'} {reason}")
        self.place = place


class Work:
    """Counts the steps of one request."""

    def __init__(self, limit: int = MOST_STEPS) -> None:
        self._limit = limit
        self.num_steps = 0

    def charge(self, place: str, steps: int = 1) -> None:
        """Adds steps. Raises Unsupported if the request has taken too many."""
        self.num_steps += steps
        if self.num_steps > self._limit:
            fault = f"takes, with those before it, more than {self._limit} steps to read"
            remedy = "send fewer or shorter schemas, or fewer values, alternatives and references"
            raise Unsupported(place, "the schema", f"{fault}; {remedy}")
