"""The processes of the ranks above 0, as rank 0 sees them. Imports no torch: they start while rank 0 imports its own
modules."""

import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

from slipstream import runtime
from slipstream.serve import processes
from slipstream.serve.pipe import Pipe

MODULE = "slipstream.serve.engine.follower"


@dataclass(slots=True, eq=False)
class Member:
    """A rank above 0, as rank 0 sees it."""

    name: str  # rank and device, for messages
    process: subprocess.Popen[bytes]
    channel: Pipe
    life: socket.socket  # brings signs of life (BEAT), or a last sentence
    heard: float = field(default_factory=time.monotonic)
    memory: int = 0


_prepared: list[Member] = []


def prepare(world: int) -> None:
    """Starts the processes of all ranks but 0, for the next `take`. They import their modules and wait for orders."""
    for rank in range(len(_prepared) + 1, world):
        _prepared.append(_start(rank, world))


def take(world: int) -> list[Member]:
    """Returns the ranks above 0, and starts those that are not prepared."""
    prepare(world)
    return [_prepared.pop(0) for _ in range(1, world)]


def _start(rank: int, world: int) -> Member:
    channel, peer = socket.socketpair()
    life, peer_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with peer, peer_life:
        ends = (peer.fileno(), peer_life.fileno())
        argv = [sys.executable, "-P", "-m", MODULE, *map(str, ends), str(rank), str(world)]
        with runtime.blocked_signals():
            environment = processes.child_environment()
            process = subprocess.Popen(argv, pass_fds=ends, stdin=subprocess.DEVNULL, env=environment)
    return Member(f"rank {rank}", process, Pipe(channel), life)
