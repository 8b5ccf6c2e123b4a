"""Engines that give states, for tests: threads of this process, each with its own target."""

import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import torch

from slipstream.models.files.checkpoint import weights_fingerprint
from slipstream.models.files.state_store import StateStore
from slipstream.models.states.address import Address
from slipstream.models.states.shared import Slot
from slipstream.models.targets.decoder import load_config, load_target
from slipstream.serve.engine.state_passes import StatePasses
from slipstream.serve.engine.state_service import StateService, bind, facts_of
from slipstream.tests.serve.fake_server import wait_until

CPU = torch.device("cpu")


class StateEngine:
    """An engine at `address`. `close` is its death; `num_passes` counts what it has computed."""

    def __init__(self, target: Path, address: Address, keys: Sequence[str] = ()):
        self.address = address
        self.num_passes = 0
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        passes = StatePasses(load_target(target, load_config(target), torch.float32, CPU))
        self.service = StateService(
            bind(address), keys, facts_of(passes, weights_fingerprint(target)), passes, self._work.put
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while (call := self._work.get()) is not None:
            self.num_passes += 1  # first: a client may count as soon as it has its answer
            call()

    def close(self):
        self.service.close()
        wait_until(lambda: not self.service.num_connections, "the end of all connections")
        self._work.put(None)  # after the work that frees their memory
        self._thread.join()


def lend(pipe: Connection, sizes: Sequence[int]):
    """Another process's slot on a GPU, filled with counts up to each of `sizes`, one after the other."""
    slot = Slot(0)
    for size in sizes:
        fields, total = slot.fill({"aux_states": torch.arange(size, device="cuda").bfloat16()})
        pipe.send(fields | {"sum": int(total)})
        pipe.recv()
    pipe.recv()  # the views are closed
    slot.close()


def assert_same_states(store: StateStore, expected: StateStore, tolerance: float):
    """Every document's, in the same shards."""
    assert store.index.shards == expected.index.shards
    for number, span in enumerate(expected.index.shards):
        for slot in range(span.count):
            reference = expected.read(number, slot)
            for name, tensor in store.read(number, slot).items():
                other = reference[name]
                if tensor.is_floating_point():
                    torch.testing.assert_close(tensor.float(), other.float(), rtol=tolerance, atol=1e-4)
                else:
                    assert torch.equal(tensor, other)
