"""Which time counts as the host's, with a drafter that runs there."""

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.bench import host_clock
from slipstream.bench.host_clock import HostClock, HostTimes, host_figures
from slipstream.serve.engine.plan import PromptChunk, StepPlan
from slipstream.tests.bench.clocked_engine import Clock

PROMPT = StepPlan(0, chunks=(PromptChunk(0, 0, [5], None, True),))


class PlayedEngine(SimpleNamespace):
    """Rounds are received 2 s after they are ready and back after 10 s; stages take 4 s, other work 5 s."""

    def launch(self, batch: int) -> None:
        plan = StepPlan(1, slots=tuple(range(batch)))
        self.trace("ready", plan)
        self.clock.now += 2
        self.runner.on_launch()
        self.clock.now += 1
        self.trace("launched", plan)

    def land(self, batch: int) -> None:
        plan = StepPlan(1, slots=tuple(range(batch)))
        for event, seconds in (("read", 10), ("drafted", 4), ("committed", 5)):
            self.clock.now += seconds
            self.trace(event, plan)


@pytest.mark.parametrize(("device", "host"), [("cpu", 9.0), ("cuda", 11.0)])
def test_the_host_has_the_time_between_landing_and_launch(
    device: str, host: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(host_clock, "time", clock)
    state = SimpleNamespace(device=SimpleNamespace(type=device))
    engine: Any = PlayedEngine(clock=clock, num_in_flight=0, runner=SimpleNamespace(state=state))
    watched = HostClock(engine)
    watched.begin(2)
    for index, batch in enumerate((2, 2, 2, 1, 2, 2)):
        if index == 4:
            engine.trace("ready", PROMPT)
        engine.launch(batch)
        engine.land(batch)
    expected = [HostTimes(22.0, host, 4.0)] * 3
    assert watched.rounds == expected, "full batches without a prompt between"
    assert host_figures(expected)["host_share"] == round(host / 22, 4)
    engine.num_in_flight = 1
    engine.launch(2)
    assert watched.rounds[3].host_s == 0.0, "launched while another ran"
