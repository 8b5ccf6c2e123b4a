"""An ingress: everything of `serve` but its engine. It checks keys and limits, renders prompts to tokens, has replicas
compute them, and turns their tokens into text, by the handlers of serve/http. Knows nothing of Ray.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Self

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from slipstream.serve.fleet.client import FleetClient, first_state
from slipstream.serve.fleet.metrics import FleetCollector, IngressReport, render
from slipstream.serve.grammar.trials import Trials
from slipstream.serve.http.app import Api, create_app
from slipstream.serve.http.frontend import Frontend, TargetText
from slipstream.serve.http.guard import Guard
from slipstream.serve.options import ServeConfig

REFRESH_SECONDS = 1.0  # between looks at the replicas

logger = logging.getLogger(__name__)


class FleetApi(Api):
    """The endpoints, with /metrics of all ingresses and replicas."""

    name = "ingress"
    gather_reports: Callable[[], Awaitable[list[IngressReport]]] | None = None
    engine: FleetClient

    def report(self) -> IngressReport:
        return IngressReport(self.name, list(self.metrics.registry.collect()), dict(self.engine.counts_of))

    async def prometheus(self, request: Request) -> Response:
        await self.engine.refresh()
        reports = [self.report()] if self.gather_reports is None else await self.gather_reports()
        collector = FleetCollector(reports, self.engine.replicas.values())
        text, content_type = render(collector, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})


class Ingress:
    """The text side of a deployment."""

    def __init__(self, api: FleetApi, places: int) -> None:
        """`places`: open requests that a replica takes, running and waiting."""
        self.api = api
        self._places = places
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, config: ServeConfig, client: FleetClient, key_digests: Iterable[bytes] = ()) -> Self:
        """Waits for the first replica. Raises ValueError, in a sentence, for what cannot be used."""
        guard = Guard(digests=key_digests)
        text = await asyncio.to_thread(TargetText.read, config)
        while (state := first_state(client.replicas.values())) is None:
            await client.refresh()
            await asyncio.sleep(0.1)
        trials = Trials.of(config)
        trials.start()
        api = FleetApi(config, Frontend(config, state.info, text), client, guard, trials)
        ingress = cls(api, config.max_running + config.max_waiting)
        ingress.take_states()
        ingress._watcher = asyncio.create_task(ingress._watch())
        return ingress

    def app(self) -> Starlette:
        return create_app(self.api)

    def take_states(self) -> None:
        """Sets what depends on the replicas: how many requests may be open, and whose draft is reported."""
        client = self.api.engine
        states = client.replicas.values()
        self.api.max_open = max(self._places * sum(state.problem is None for state in states), 1)
        state = first_state(states)
        if state is not None:
            self.api.frontend.draft_fingerprint = state.info.draft_fingerprint
            self.api.frontend.num_spec_tokens = state.info.num_spec_tokens
            self.api.frontend.draft_adapters = state.info.draft_adapters

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.api.engine.refresh()
            except Exception:
                logger.exception("the replicas could not be asked for their states")
            self.take_states()

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        await self.api.trials.aclose()
        self.api.close()
