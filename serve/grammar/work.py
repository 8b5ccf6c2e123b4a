"""How much work the schemas of one request may make, and the refusal of what makes more or cannot be served.

A text of 64 KiB bounds the length of a schema and not the work: references, combinations and comparisons multiply. So
everything that reads schemas charges its steps to one counter per request. A step takes some microseconds.
"""

from slipstream.models.chat.quotes import PLACE_CHARS, shorten

MOST_STEPS = 100_000


class Unsupported(ValueError):
    """`keyword` at `place`, a JSON pointer, cannot be served."""

    def __init__(self, place: str, keyword: str, reason: str = "is not supported; leave it out") -> None:
        name = shorten(keyword) if " " in keyword else f'"{shorten(keyword)}"'
        super().__init__(f"{name} at {shorten(place, PLACE_CHARS) or 'the root'} {reason}")
        self.place = place
        self.keyword = keyword


class Work:
    """Steps of one request."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most = most
        self.num_steps = 0

    def charge(self, place: str, steps: int = 1) -> None:
        """Raises Unsupported where all that was charged is too much."""
        self.num_steps += steps
        if self.num_steps > self._most:
            fault = f"takes, with those before it, more than {self._most} steps to read"
            remedy = "send fewer or shorter schemas, or fewer values, alternatives and references"
            raise Unsupported(place, "the schema", f"{fault}; {remedy}")
