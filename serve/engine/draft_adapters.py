"""Which LoRA adapter drafts for a request: the one that it names, or by chance. Imports no torch."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from xxhash import xxh3_64_intdigest

from slipstream.serve.request import NO_ADAPTER, Request


def with_adapter(request: Request, names: Sequence[str], shares: Sequence[float]) -> Request:
    """Gives a request the adapter that it names; of those that name none each adapter gets its share, by a hash of the
    id. Acceptance is watched by adapter, too."""
    name = request.params.draft_adapter
    if name is None:
        place = xxh3_64_intdigest(request.id.encode()) / 2**64
        name = next((name for name, end in zip(names, accumulate(shares), strict=True) if place < end), NO_ADAPTER)
    number = (NO_ADAPTER, *names).index(name)
    return replace(request, adapter=number, labels=(*request.labels, f"adapter {name}"))
