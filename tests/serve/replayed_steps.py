"""Records the steps of an engine, and executes them in another process: python -m ... FOLDER."""

import hashlib
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.serve.engine.build import load_networks, make_runner
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.plan import StepOutput, StepPlan
from slipstream.serve.request import Request
from slipstream.serve.runner.cuda_graphs import capture_all
from slipstream.serve.runner.model_runner import InFlight, ModelRunner
from slipstream.tests.serve.engine_runs import run
from slipstream.tests.serve.played_graphs import play_all

Outputs = dict[int, StepOutput]  # by number of the plan


def record_steps(engine: Engine, requests: Sequence[Request], file: Path, patch: Any) -> list[StepPlan]:
    """Runs the requests, and writes the engine's plan and those of its steps, outputs and what they left."""
    plans = []
    outputs = Outputs()
    read = InFlight.read

    def reading(flight):
        outputs[flight.plan.number] = read(flight)
        return outputs[flight.plan.number]

    engine.trace = lambda event, plan: plans.append(pickle.dumps(plan)) if event == "launched" else None
    with patch.context() as scope:
        scope.setattr(InFlight, "read", reading)
        run(engine, list(requests))
        engine.drain()
    assert len(outputs) == len(plans)
    with file.open("wb") as stream:
        pickle.dump((engine.engine_plan, plans), stream)
    with file.with_suffix(".expected").open("wb") as stream:
        pickle.dump((outputs, digest(engine.runner)), stream)
    return list(map(pickle.loads, plans))


def digest(runner: ModelRunner) -> str:
    """Hashes the KV of all networks, states, but for dump pages, and what is stored for each request."""
    size = runner.state.page_size
    tensors = [cache.flat[:, :, size:] for kv in runner.passes.kv for cache in kv.caches]
    tensors += [tensor[: runner.state.padding] for tensor in runner.state.stored]
    if (states := runner.passes.states) is not None:
        tensors += [part[1:] for layer in states.layers for part in layer.values()]
        tensors.append(states.replays[: runner.state.padding])
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def check_replayed(folder: Path, name: str):
    """Another process got the same bits."""
    (outputs, left), (expected, expected_left) = (
        pickle.loads((folder / name).with_suffix(suffix).read_bytes())  # noqa: S301
        for suffix in (".replayed", ".expected")
    )
    assert outputs.keys() == expected.keys()
    for number, output in outputs.items():
        for field in StepOutput._fields:
            values = getattr(output, field)
            np.testing.assert_equal(values, getattr(expected[number], field), f"{field} of step {number}")
    assert left == expected_left


def main():
    for file in sorted(Path(sys.argv[1]).glob("*.steps")):
        plan, plans = pickle.loads(file.read_bytes())  # noqa: S301
        runner = make_runner(plan, load_networks(plan), play_all if plan.device.type == "cpu" else capture_all)
        runner.forget()
        steps = map(pickle.loads, plans)
        outputs = {step.number: runner.launch(step).read() for step in steps}
        file.with_suffix(".replayed").write_bytes(pickle.dumps((outputs, digest(runner))))


if __name__ == "__main__":
    main()
