"""Deployments without Ray: an ingress before replicas in the same process, each with the process of a fake engine."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from slipstream.serve.fleet.client import FleetClient, ReplicaLost
from slipstream.serve.fleet.ingress import Ingress
from slipstream.serve.fleet.replica import Abort, Call, Failure, Replica, ReplicaState, Reply
from slipstream.serve.fleet.routing import PrefixTable, page_keys, rank_replicas
from slipstream.serve.http.engine_client import EngineClient
from slipstream.serve.http.guard import Guard
from slipstream.serve.listener import address, bind
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.fake_engine import FakeEngine


class LocalFleet:
    """Replicas that are called directly, routed as in serve/fleet/application.py."""

    def __init__(self, replicas: Sequence[Replica]):
        self.replicas = {replica.name: replica for replica in replicas}
        self.table = PrefixTable()
        self.calls: list[Call] = []
        self._draw = random.Random(0)

    async def generate(self, call: Call) -> AsyncIterator[Reply]:
        healthy = {name: replica for name, replica in self.replicas.items() if replica.problem is None}
        loads = {name: replica.engine.num_open for name, replica in healthy.items() if name != call.avoid}
        keys = page_keys(call.request.prompt, call.request.namespace)
        names = rank_replicas(self.table.matches(keys), len(keys), loads, self._draw)
        if not names:
            raise ReplicaLost("no replica is left")
        call.replica = names[0]
        self.table.add(keys, call.replica)
        self.calls.append(call)
        async for reply in self.replicas[call.replica].generate(call):
            yield reply

    async def abort(self, message: Abort):
        self.replicas[message.replica].abort(message)

    async def states(self) -> list[ReplicaState]:
        return [replica.state() for replica in self.replicas.values()]


@dataclass
class ScriptedFleet:
    """Replies as its test says. A script that ends without an end of the request loses the replica."""

    scripts: list[list[Reply]]  # of the first call, of the second
    aborts: list[Abort] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    replicas: list[ReplicaState] = field(default_factory=list)
    has_gate: bool = False  # replies come one at each call of `step`

    def __post_init__(self):
        self._steps = asyncio.Semaphore(0)

    def step(self):
        self._steps.release()

    async def generate(self, call: Call) -> AsyncIterator[Reply]:
        script = self.scripts[len(self.calls)]
        call.replica = f"replica {len(self.calls)}"
        self.calls.append(call)
        for reply in script:
            if self.has_gate:
                await self._steps.acquire()
            if isinstance(reply, Failure) and reply.kind == "lost":
                raise ReplicaLost(f"{call.replica} was lost")
            yield reply

    async def abort(self, message: Abort):
        self.aborts.append(message)

    async def states(self) -> list[ReplicaState]:
        return self.replicas


@dataclass
class FleetServer:
    url: str
    ingress: Ingress
    fleet: LocalFleet


@contextmanager
def fleet_serving(config: ServeConfig, num_replicas: int = 2, keys: Sequence[str] = ()) -> Iterator[FleetServer]:
    """A deployment on a thread of this process."""
    servers = []

    async def run():
        replicas = [
            Replica(f"r{index}", EngineClient(FakeEngine), draft="fake", health_timeout=120)
            for index in range(num_replicas)
        ]
        await asyncio.gather(*(replica.start(config) for replica in replicas))
        fleet = LocalFleet(replicas)
        ingress = await Ingress.open(config, FleetClient([fleet]), Guard(keys).digests)
        listener = bind("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(ingress.app(), log_config=None, lifespan="off"))
        servers.append((FleetServer(address(listener), ingress, fleet), server))
        try:
            await server.serve([listener])
        finally:
            await ingress.close()
            await asyncio.gather(*(replica.stop() for replica in replicas))

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    while thread.is_alive() and not (servers and servers[0][1].started):
        time.sleep(0.01)
    assert thread.is_alive(), "the deployment did not start"
    try:
        yield servers[0][0]
    finally:
        servers[0][1].should_exit = True
        thread.join(120)
        assert not thread.is_alive(), "the deployment did not end"
