"""Classes of context lengths, by which acceptance is counted and reported."""

from bisect import bisect_right

BOUNDS = (1024, 4096, 16384)  # tokens
CLASSES = ("<1k", "1-4k", "4-16k", "16k+")


def context_class(num_tokens: int) -> str:
    """Returns the class of a text of so many tokens."""
    return CLASSES[bisect_right(BOUNDS, num_tokens)]
