"""Target states from engines that run the target (`serve --states`, or one that the trainer starts).

A batch asks for its states when it is read, `states.prefetch` batches ahead of the loop, and carries places that an
engine's answer fills: the rows that training reads, in the order in which a capture on disk would give them.
"""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from slipstream.models.files.scratch import ScratchFolder
from slipstream.models.files.text import read_key
from slipstream.models.states.address import Address
from slipstream.models.states.client import StateClient, StateFacts, StateRequest
from slipstream.models.states.wire import NAMES
from slipstream.train.batches import Batch, PackedRows
from slipstream.train.cached_states import empty_states
from slipstream.train.options import StateOptions
from slipstream.train.state_source import document_rows, rows_of
from slipstream.train.training import DraftTraining

MODULE = "slipstream.serve.engine.state_process"
EngineProcess = subprocess.Popen[bytes]


class EngineStates:
    """Adds the states that engines compute to batches."""

    def __init__(
        self, client: StateClient, layers: tuple[int, ...], *, final_state: bool, is_fp8: bool, pinned: bool
    ) -> None:
        """`layers`: those that the draft reads, in its order; some may be wanted twice. `final_state`: also the state
        after the final norm. `pinned`: pin memory, for asynchronous copies."""
        self.client = client
        self.facts: StateFacts = client.facts
        self.layers = layers
        self.takes_final = final_state and self.facts.num_layers not in layers
        self.is_fp8 = is_fp8
        self.pinned = pinned

    def add(self, batch: Batch, documents: list[int]) -> Batch:
        """Asks for the states of a batch and returns at once. Raises ValueError for one that is too large."""
        if batch.tokens.numel() > self.facts.max_tokens:
            raise ValueError(
                f"a batch has {batch.tokens.numel()} tokens, and an engine computes {self.facts.max_tokens} at once; "
                "lower data.batch_size or data.max_length"
            )
        starts, needed = document_rows(batch)
        rows = rows_of(starts, needed)
        final_rows = rows[batch.supervised.flatten()[rows]] if self.takes_final else rows[:0]
        states = empty_states(
            rows,
            final_rows,
            rows[:0],
            shape=(len(self.layers), self.facts.hidden_size),
            dtype=NAMES["fp8" if self.is_fp8 else self.facts.dtype],
            pinned=self.pinned,
            on_meta=True,
        )
        request = StateRequest(
            layers=self.layers,
            tokens=batch.tokens.int(),
            positions=batch.positions.int(),
            rows=states.rows,
            final_rows=states.final_rows,
            places=states.states,
            pinned=self.pinned,
        )
        return replace(batch, cached=replace(states, copies=(self.client.ask(request),)))


class Engines:
    """The engines of a run: those that its options name, or one on each machine that its first process there starts."""

    def __init__(self, options: StateOptions, addresses: list[Address], process: EngineProcess | None = None) -> None:
        self.options = options
        self.addresses = addresses
        self.process = process  # of the engine that this process has started
        self.client: StateClient | None = None

    @classmethod
    @contextmanager
    def open(
        cls, options: StateOptions, accelerator: Accelerator, target: Mapping[str, object]
    ) -> Iterator["Engines | None"]:
        """`target`: the engine options that name it. A started engine loads while the trainer does. None where the run
        uses no engines."""
        if not options.is_used:
            yield None
            return
        with ScratchFolder("states") as folder:
            process = None
            if not options.endpoint and accelerator.is_local_main_process:
                path = str(Path(folder) / "engine")
                process = start_engine(path, {"exact": False, **target, **options.engine}, options.devices)
            engines = cls(options, options.addresses() or [shared_address(process, folder)], process)
            try:
                yield engines
            finally:
                engines.close()

    def connect(
        self, training: DraftTraining, rows: Mapping[str, PackedRows], layers: tuple[int, ...], fingerprint: str
    ) -> None:
        """Makes the batches of `rows`, by split, carry states of `layers`, and frees the target's layers, which do not
        run here. Raises ValueError for an engine that does not answer or has another target than `fingerprint`'s."""
        options = self.options
        key = read_key(options.api_key_file, "states.api_key_file")
        client = self.client = StateClient(
            options.name,
            self.addresses,
            key,
            options.timeout,
            waits=not options.endpoint,
            ended=self.ended,
            device=training.device,
        )
        client.check_target(fingerprint)
        source = EngineStates(
            client,
            layers,
            final_state=training.reads_final_state,
            is_fp8=options.dtype == "fp8",
            pinned=training.device.type == "cuda",
        )
        for packed in rows.values():
            packed.add_states = source.add
            packed.batches_ahead = options.prefetch
        training.target.layers.to("meta")

    def ended(self) -> str:
        """Says that the engine which this process has started is gone; empty otherwise."""
        status = None if self.process is None else self.process.poll()
        if status is None:
            return ""
        return (
            f"the engine that states.engine asks for has ended with status {status}; see its messages above, and run "
            "the same command again, which continues from the newest checkpoint"
        )

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.process is not None:
            assert self.process.stdin is not None
            with suppress(OSError):
                self.process.stdin.close()  # at which it ends
            self.process.wait()


def shared_address(process: EngineProcess | None, folder: str) -> Address:
    """The address of the engine on this machine, which one of the processes here has started in its `folder`."""
    machine = platform.node()
    entries = [] if process is None else [(machine, str(Path(folder) / "engine"))]
    return Address("", path=dict(gather_object(entries))[machine])


def start_engine(path: str, engine: Mapping[str, object], devices: tuple[int, ...]) -> EngineProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # a launcher's, not the engine's
        environment.pop(name, None)
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    # Ctrl-C and job managers signal every process. The engine inherits this mask, and ends with its standard input.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        process = subprocess.Popen([sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert process.stdin is not None
    process.stdin.write(json.dumps({"path": path, "engine": engine}).encode() + b"\n")
    process.stdin.flush()
    return process
