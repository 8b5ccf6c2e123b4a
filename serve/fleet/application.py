"""The application for Ray Serve: ingresses, and replicas of one target with one draft or two.

KubeRay names `build` as its import path; `slipstream deploy` calls `application`. This is the only module that needs
Ray, besides the program (deploy.py).
"""

import asyncio
import logging
import os
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.serve import logs
from slipstream.serve.fleet.client import FleetClient, ReplicaLost
from slipstream.serve.fleet.ingress import Ingress
from slipstream.serve.fleet.metrics import IngressReport
from slipstream.serve.fleet.options import DeployConfig
from slipstream.serve.fleet.replica import Abort, Call, Replica, ReplicaState, Reply
from slipstream.serve.fleet.routing import Placed, PrefixTable, page_keys, rank_replicas
from slipstream.serve.http.engine_client import EngineClient, EngineError
from slipstream.serve.http.guard import Guard
from slipstream.serve.http.request_log import HEADER
from slipstream.serve.options import ServeConfig

INGRESS = "Ingress"
FAREWELL_SECONDS = 0.1  # for a replica to tell ingresses that its engine has ended
TELL_SECONDS = 1.0  # between messages of an ingress to the others
PLACE_SECONDS = 60.0  # for a request to wait until a replica is there
STATE_SECONDS = 2.0  # for replicas to tell their states
ROUTER = "slipstream.serve.fleet.application:PrefixRouter"
POLICY = "slipstream.serve.fleet.scaling:ScalingPolicy"

# By name of the deployment, of this process: Serve makes the routers, and nobody else can reach them.
TABLES = defaultdict[str, PrefixTable](PrefixTable)

logger = logging.getLogger(__name__)


class PrefixRouter(RequestRouter):
    """Offers a request to replicas in the order of `rank_replicas`. One object in each ingress and deployment, on its
    event loop."""

    def initialize_state(self, **_: Any) -> None:
        self._table = TABLES[self._deployment_id.name]
        self._draw = random.Random()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or it would ask again at once, for ever
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        message = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(message, Abort):
            return [[by_name[message.replica]]] if message.replica in by_name else []
        loads = {name: self._load(replica) for name, replica in by_name.items()}
        if not isinstance(message, Call):
            return [[by_name[name]] for name in rank_replicas({}, 0, loads, self._draw)]
        loads.pop(message.avoid, None)  # without another one the request waits for a new one
        keys = page_keys(message.request.prompt, message.request.namespace)
        names = rank_replicas(self._table.matches(keys), len(keys), loads, self._draw)
        return [[by_name[name]] for name in names]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        message = pending_request.args[0] if pending_request.args else None
        if isinstance(message, Call):
            message.replica = replica_id.unique_id
            self._table.add(page_keys(message.request.prompt, message.request.namespace), message.replica)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._table.forget(replica_id.unique_id)

    def _load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


class RayFleet:
    """The replicas of one deployment, through a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        handle._init(_run_router_in_separate_loop=False)  # on this event loop: a hop between threads takes milliseconds
        # By gRPC, not through Ray's object store, which takes twice as long.
        self._handle = handle.options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )

    async def generate(self, call: Call) -> AsyncIterator[Reply]:
        replies = self._handle.options(method_name="generate", stream=True).remote(call)
        try:
            yield await self._first(call, replies)
            async for reply in replies:
                yield reply
        except (RayError, RayServeException, grpc.RpcError) as error:
            name = call.replica or "that was to compute this request"
            raise ReplicaLost(f"the replica {name} was lost ({type(error).__name__})") from error

    async def _first(self, call: Call, replies: Any) -> Reply:
        """Waits for the first reply, however long the replica takes, but not for a replica. Raises EngineError."""
        first = asyncio.ensure_future(anext(replies))
        try:
            await asyncio.wait({first}, timeout=PLACE_SECONDS)
            if not first.done() and not call.replica:
                replies.cancel()
                raise EngineError(f"no replica took the request within {PLACE_SECONDS:g} s; send it again")
            return await first
        except StopAsyncIteration:
            raise ReplicaLost(f"the replica {call.replica} ended") from None
        finally:
            first.cancel()

    async def abort(self, message: Abort) -> None:
        try:
            async with asyncio.timeout(STATE_SECONDS):
                await self._handle.options(method_name="abort").remote(message)
        except (RayError, RayServeException, grpc.RpcError, TimeoutError):
            logger.info("request %s could not be aborted: its replica is gone", message.request_id)

    async def states(self) -> list[ReplicaState]:
        return await answers(self._handle, "state")


async def answers(handle: DeploymentHandle, method: str, *arguments: Any) -> list[Any]:
    """Returns what the replicas of a deployment answer in time."""
    try:
        values = await handle.broadcast(method, *arguments).results_async(
            timeout_s=STATE_SECONDS, return_exceptions=True
        )
    except (RayError, RayServeException, grpc.RpcError, TimeoutError):
        return []
    return [value for value in values if not isinstance(value, BaseException)]


class ReplicaActor:
    """A replica in an actor of Ray. Serve calls `check_health`, and replaces the actor when it fails."""

    async def __init__(self, values: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        config = DeployConfig.read(values)
        logs.configure(config.log_format)
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(name, EngineClient(), draft=config.draft, health_timeout=config.health_timeout)
        await self._replica.start(config)
        self._watcher = asyncio.create_task(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        """Ends the actor when its engine has ended by itself: Ray sees that at once, the next look at its health only
        later, and meanwhile the idlest replica of all would get every request."""
        await self._replica.engine.ended.wait()
        logger.error("%s; the replica ends", self._replica.engine.failure)
        await asyncio.sleep(FAREWELL_SECONDS)
        os._exit(1)

    async def generate(self, call: Call) -> AsyncIterator[Reply]:
        async for reply in self._replica.generate(call):
            yield reply

    async def abort(self, message: Abort) -> None:
        self._replica.abort(message)

    async def state(self) -> ReplicaState:
        return self._replica.state()

    async def check_health(self) -> None:
        self._replica.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._replica.scaling_stats()

    async def __del__(self) -> None:
        self._watcher.cancel()
        await self._replica.stop()


@serve.ingress()
class IngressActor:
    """An ingress in an actor of Ray, which serves its ASGI application."""

    async def __init__(  # type: ignore[misc]
        self,
        values: dict[str, Any],
        key_digests: list[bytes],
        fleets: list[DeploymentHandle],
        retained: list[DeploymentHandle],  # of another version of the target, which another ingress still uses
    ) -> None:
        config = DeployConfig.read(values)
        logs.configure(config.log_format)
        context = serve.get_replica_context()
        self._values = values
        client = FleetClient([RayFleet(handle) for handle in fleets], config.second_share)
        self._ingress = await Ingress.open(config, client, key_digests)
        api = self._ingress.api
        api.name = context.replica_id.unique_id
        self._siblings = serve.get_deployment_handle(context.deployment, context.app_name)
        api.gather_reports = self._reports
        self._teller = asyncio.create_task(self._tell()) if config.ingresses > 1 else None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return SingleRequestId(self._ingress.app())

    async def drain(self) -> int:
        """Refuses new requests from now on. Returns how many are open."""
        self._ingress.api.is_draining = True
        return self._ingress.api.engine.num_open

    async def report(self) -> IngressReport:
        return self._ingress.api.report()

    async def values(self) -> dict[str, Any]:
        """Returns the options that it was started with."""
        return self._values

    async def learn(self, news: dict[str, list[Placed]]) -> None:
        """Takes what another ingress knows of the places of prompts, by deployment."""
        for name, prompts in news.items():
            TABLES[name].learn(prompts)

    async def _tell(self) -> None:
        """Tells the other ingresses where prompts went. Ends with the actor."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            news = {name: prompts for name, table in TABLES.items() if (prompts := table.take_news())}
            if news:
                await answers(self._siblings, "learn", news)

    async def _reports(self) -> list[IngressReport]:
        return await answers(self._siblings, "report") or [self._ingress.api.report()]

    async def __del__(self) -> None:
        if self._teller is not None:
            self._teller.cancel()
        await self._ingress.close()


class SingleRequestId:
    """ASGI middleware. Serve itself sends the id of a request back: a header is left out that would repeat it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None

        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if request_id is not None and headers.get(HEADER) == request_id:
                    del headers[HEADER]
            await send(message)

        await self._app(scope, receive, send_without)


def key_digests_of(config: ServeConfig) -> list[bytes]:
    """Returns digests of the keys, which may go to actors and logs; keys may not."""
    return Guard.of(config).digests


def replica_deployment(config: DeployConfig, place: int) -> Any:
    """Returns the bound deployment of one draft's replicas. `place`: 0 or 1, of the draft."""
    has_gpus = config.device == "cuda" or (config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    resources = {"num_cpus": config.cpus, "num_gpus": config.tp if has_gpus else 0}
    scaling: dict[str, Any] = {"num_replicas": config.replicas}
    if config.max_replicas is not None:
        policy = {"policy_function": POLICY, "policy_kwargs": {"aim": config.aim, "most_ms": config.itl_ms}}
        scaling = {
            "autoscaling_config": {
                "min_replicas": config.replicas,
                "max_replicas": config.max_replicas,
                "target_ongoing_requests": config.aim,
                "policy": policy,
            }
        }
    deployment = serve.deployment(ReplicaActor).options(
        name=f"Replicas-{config.target_version}{'-second' if place else ''}",
        max_ongoing_requests=2 * config.places,  # ingresses refuse what exceeds `places`; aborts always get through
        ray_actor_options=resources,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.drain_timeout,
        max_surge_percent=25 if config.surge else 0,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        max_constructor_retry_count=3,
        **scaling,
    )
    return pinned(deployment, config.replica_version).bind(config.values())


def pinned(deployment: Any, version: str) -> Any:
    """Gives a deployment a version, so that Serve restarts its actors when that changes, and at no other update."""
    return deployment.options(version=version, _internal=True)


def application(config: DeployConfig, key_digests: Sequence[bytes], retained: DeployConfig | None = None) -> Any:
    """Returns the application. `retained`: options of further replicas, for ingresses of another version."""
    digests = list(key_digests)
    fleets = [replica_deployment(draft, place) for place, draft in enumerate(config.drafts())]
    further: list[Any] = []
    if retained is not None:
        further = [replica_deployment(draft, place) for place, draft in enumerate(retained.drafts())]
    deployment = serve.deployment(IngressActor).options(
        name=INGRESS,
        num_replicas=config.ingresses,
        max_ongoing_requests=max(2 * config.places * config.most_replicas, 1024),
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.drain_timeout,
        max_surge_percent=100,
    )
    version = config.ingress_version(digests)
    return pinned(deployment, version).bind(config.values(), digests, fleets, further)


def build(values: dict[str, Any]) -> Any:
    """Returns the application of options by name, as KubeRay has them in `args`."""
    config = DeployConfig.read(values)
    config.check_inputs()
    return application(config, key_digests_of(config))
