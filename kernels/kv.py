"""Rows of the paged KV cache: moving accepted tree nodes down to follow the committed ones."""

from torch import Tensor


def move_rows(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copies KV rows in every layer, in place. cache (L, 2, slots, G, D); sources, destinations (R,) int64 slots.

    Rows are read before any is written, so ranges may overlap; a source equal to its destination is a no-op.
    """
    cache.index_copy_(2, destinations, cache.index_select(2, sources))
