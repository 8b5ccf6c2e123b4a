"""Captures states that engines compute (`serve --states`), a few passes ahead of what is written."""

from collections import deque
from collections.abc import Callable, Iterable

import torch

from slipstream.data_tools.state_shards import Capturer, Document, keep
from slipstream.models.files.state_store import ShardTensors, StateFormat, encode
from slipstream.models.states.client import StateClient, StateRequest, empty_places
from slipstream.models.states.wire import NAMES

PASSES_AHEAD = 4


class EngineCapturer(Capturer):
    """A Capturer whose target runs elsewhere."""

    def __init__(self, client: StateClient, form: StateFormat, batch_tokens: int) -> None:
        self.client = client
        self.form = form
        self.device = torch.device("cpu")
        self.batch_tokens = min(batch_tokens, client.facts.max_tokens)

    def run(self, batches: Iterable[list[Document]], shard: ShardTensors, advance: Callable[[int], object]) -> None:
        pending = deque[tuple[list[Document], StateRequest]]()
        for batch in batches:
            request = self._request(batch)
            self.client.ask(request)
            pending.append((batch, request))
            if len(pending) > PASSES_AHEAD:
                self._store(*pending.popleft(), shard, advance)
        while pending:
            self._store(*pending.popleft(), shard, advance)

    def _request(self, batch: list[Document]) -> StateRequest:
        """Asks for all states of a pass, whose documents are one row."""
        positions = torch.cat([torch.arange(len(document.tokens)) for document in batch])
        supervised = torch.cat([document.supervised for document in batch])
        final_rows = supervised.nonzero().squeeze(1) if self.form.last_hidden else positions[:0]
        facts = self.client.facts
        dtype = NAMES["fp8" if self.form.dtype == "fp8" else facts.dtype]
        shape = len(self.form.layers), facts.hidden_size
        return StateRequest(
            layers=self.form.layers,
            tokens=torch.cat([document.tokens for document in batch])[None].int(),
            positions=positions[None].int(),
            rows=torch.arange(len(positions)),
            final_rows=final_rows,
            places=empty_places(len(positions), len(final_rows), shape, dtype),
        )

    def _store(
        self, batch: list[Document], request: StateRequest, shard: ShardTensors, advance: Callable[[int], object]
    ) -> None:
        request.done.result()
        counts = [len(document.tokens) for document in batch]
        finals = [int(document.supervised.sum()) for document in batch]
        for name, stored, sizes in (("aux", "features", counts), ("final", "last_hidden", finals)):
            if stored == "last_hidden" and not self.form.last_hidden:
                continue
            values = request.places["aux_states" if name == "aux" else name]
            scales = request.places.get(f"{name}_scales")
            if scales is None:
                values, _ = encode(values, self.form.dtype)
            parts = values.split(sizes)
            scale_parts = [None] * len(batch) if scales is None else scales.split(sizes)
            for document, part, scale in zip(batch, parts, scale_parts, strict=True):
                keep(shard.document(document.slot), stored, part, scale)
        advance(sum(counts))
