"""An engine that gives states and serves nothing else: python -m slipstream.serve.engine.state_process.

A trainer starts it (train/engine_states.py). It reads a JSON object, the address and the options of the engine, as the
first line of its standard input, has neither KV cache nor captured passes, and ends when that input does.
"""

import slipstream.runtime  # noqa: F401  before torch, for which it sets the thread policy

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from queue import SimpleQueue

from slipstream.models.files.checkpoint import weights_fingerprint
from slipstream.models.states.address import Address
from slipstream.serve import logs
from slipstream.serve.engine.build import load_networks
from slipstream.serve.engine.engine_plan import read_plan
from slipstream.serve.engine.state_passes import StatePasses
from slipstream.serve.engine.state_service import StateService, bind, facts_of
from slipstream.serve.engine.team import Team
from slipstream.serve.options import EngineConfig

logger = logging.getLogger(__name__)


def main() -> None:
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_input, daemon=True).start()
    logs.configure("text")
    try:
        unknown = order["engine"].keys() - {option.name for option in fields(EngineConfig)}
        if unknown:
            raise ValueError(f"states.engine has no option {', '.join(sorted(unknown))}; see `serve --help`")
        passes, fingerprint = load(EngineConfig(**order["engine"]))
        work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        listener = bind(Address("", path=order["path"]))
        StateService(listener, (), facts_of(passes, fingerprint), passes, work.put)
        while True:
            work.get()()
    except (ValueError, OSError) as error:
        logger.error("the engine of states: %s", " ".join(str(error).split()))
        os._exit(1)


def load(config: EngineConfig) -> tuple[StatePasses, str]:
    """The target over all ranks, and the fingerprint of its weights. Raises ValueError for options that do not fit."""
    plan = read_plan(config)
    fingerprint = weights_fingerprint(plan.path)
    if config.tp == 1:
        return StatePasses(load_networks(plan).target), fingerprint
    team = Team(config.tp, plan.device.device)
    with team.guard():
        team.order("load_target", plan)
        networks = load_networks(plan, meet=team.meet)
        team.serve()
    team.watch(lambda _: os._exit(1))
    return StatePasses(networks.target, team), fingerprint


def end_with_input() -> None:
    """Exits once the trainer is gone, even in the middle of a pass or while loading."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
