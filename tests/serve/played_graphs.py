"""Captured passes without a GPU: a capture is played by calling the pass anew.

The passes are those of a GPU, of fixed sizes over static buffers and filled up with padding; their kernels' references
run.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from slipstream.models.files.cost_tables import CostTables
from slipstream.serve.engine import engine_plan
from slipstream.serve.engine.build import Capture, Networks, build, measured_costs
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.engine_plan import EnginePlan, read_plan
from slipstream.serve.engine.graph_keys import MODES, GraphKeys
from slipstream.serve.engine.plan import StepKey
from slipstream.serve.engine.step_costs import Costs, StepCosts
from slipstream.serve.options import EngineConfig
from slipstream.serve.runner.cuda_graphs import Capturer, DraftGraphs, Part, StepGraphs, make_graphs
from slipstream.serve.runner.model_runner import ModelRunner
from slipstream.serve.runner.step import StepPasses

ATTENTION = "prefill=sdpa,verify=triton,draft=triton"


class Played:
    """Stands for a captured graph."""

    def __init__(self, run: Callable[[], None]):
        self.run = run
        self.num_replays = 0

    def replay(self):
        self.num_replays += 1
        self.run()


class Player(Capturer):
    def __init__(self):
        pass

    def capture_all(
        self, kind: str, sizes: str, groups: Sequence[Sequence[Any]], capture: Callable[[Sequence[Any]], int]
    ):
        for keys in groups:
            assert capture(keys) == len(keys)

    def capture(self, part: Part, value: Any, description: str, remedy: str) -> Any:
        """A part's value is a list that holds what its last replay returned."""
        played = []

        def play():
            played[:] = [part(value[0] if value else None)]

        return Played(play), played


class EqualTimes(StepCosts):
    """No test depends on how fast this machine is."""

    def observe(self, *_: Any, **__: Any):
        pass


def play_all(passes: StepPasses, keys: GraphKeys) -> tuple[StepGraphs, DraftGraphs | None]:
    """Makes played passes, as `capture_all` makes captured ones."""
    steps, drafts = make_graphs(passes, keys, Player())
    steps.capture_all()
    if drafts is not None:
        drafts.capture_all()
    finish = steps.finish

    def finish_and_copy(plan, number):
        results, first = finish(plan, number)
        logprobs = None if results.logprobs is None else results.logprobs.clone()  # as a GPU's before the next replay
        return results._replace(logprobs=logprobs), first

    steps.finish = finish_and_copy
    return steps, drafts


def equal_costs(plan: EnginePlan, networks: Networks, runner: ModelRunner) -> Costs:
    """Returns costs as if passes of more than 16 rows cost by the row: numbers of nodes then change with the load."""
    steps = runner.steps
    if steps is None:
        return measured_costs(plan, networks, runner)
    target = {rows: max(1.0, rows / 16) for rows in (*steps.sizes, *steps.prompt_sizes)}
    draft = {key[:2]: 0.01 * key.width for key in plan.graphs.drafts}
    return EqualTimes(CostTables(dict.fromkeys(MODES, target), dict.fromkeys(MODES, draft)))


def gpu_plan(config: EngineConfig, *, captures: bool = True) -> EnginePlan:
    """Plans as for a GPU: two steps in flight and, if passes are captured, their keys."""
    config = replace(config, attention=ATTENTION) if config.attention == "auto" else config
    with patch.object(engine_plan, "pick_modes", lambda *_: (captures, True)):
        return read_plan(config)


def build_played(config: EngineConfig, capture: Capture = play_all) -> Engine:
    """`capture_all` on a GPU: passes are captured, and chosen as played ones are."""
    return build(gpu_plan(config), capture, equal_costs)


def build_eager(config: EngineConfig) -> Engine:
    """All passes are launched as they are, with as many pages and as many steps in flight as played ones."""
    return build(gpu_plan(config, captures=False))


def play(config: EngineConfig) -> Engine:
    """The host's proposals count as ready at once, so that no choice depends on how fast this machine is."""
    engine = build_played(config)
    engine.planner.policy.host_wait.record_wait = lambda _: None
    return engine


def replays_of(engine: Engine) -> dict[StepKey, int]:
    """The number of runs of each captured target pass."""
    steps = engine.runner.steps
    return {key: graphs[-1].num_replays for key, graphs in steps._graphs.items() if graphs[-1].num_replays}


def drafts_of(engine: Engine) -> dict[tuple[int, int, str], int]:
    """The number of runs of each captured draft pass: requests, width, mode."""
    drafts = engine.runner.drafts
    return {key: graphs[-1].num_replays for key, graphs in drafts._graphs.items() if graphs[-1].num_replays}
