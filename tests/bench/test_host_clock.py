"""Which time counts as the host's, with a drafter that runs there."""

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.bench import host_clock
from slipstream.bench.host_clock import HostClock, HostTimes, host_figures


class Clock:
    """Time that passes only where it is told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float, result: Any = None) -> Any:
        def work(*_: Any) -> Any:
            self.now += seconds
            return result

        return work


def test_the_host_has_the_time_between_landing_and_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take 1 s, with a captured round 6 s more behind it, arrivals 10 s, drafting 4 + 5 s, other work 5 s."""
    for device, captured, host, period in (
        ("cpu", False, 14.0, 25.0),
        ("cuda", False, 15.0, 25.0),
        ("cuda", True, 15.0, 31.0),
    ):
        clock = Clock()
        monkeypatch.setattr(host_clock, "time", clock)
        flight = SimpleNamespace(read=clock.passes(10, "tokens"))
        graphs = SimpleNamespace(round=clock.passes(1)) if captured else None
        engine: Any = SimpleNamespace(
            device=SimpleNamespace(type=device),
            overlap=False,
            _in_flight=[],
            drafter=SimpleNamespace(draft=clock.passes(4)),
            policy=None,
            executor=SimpleNamespace(
                store=clock.passes(5),
                prefill=clock.passes(100),
                graphs=graphs,
                round=clock.passes(1, flight),
            ),
        )
        if graphs is not None:
            behind = clock.passes(6, flight)
            engine.executor.round = lambda _, width, g=graphs, b=behind: (g.round([], "plain", width), b())[1]
        watched = HostClock(engine)
        watched.begin(2)
        for index, batch in enumerate((2, 2, 2, 1, 2, 2)):
            if index == 4:
                engine.executor.prefill([])
            assert engine.executor.round(SimpleNamespace(slots=[0] * batch), 8).read() == "tokens"
            for work in (engine.drafter.draft, engine.executor.store, clock.passes(5)):
                work()
        expected = [HostTimes(period, host, 9.0)] * 3
        assert watched.rounds == expected, "full batches without a prompt between"
        assert host_figures(expected)["host_share"] == round(host / period, 4)
        engine._in_flight.append("a round that runs")
        engine.executor.round(SimpleNamespace(slots=[0, 0]), 8)
        assert watched.rounds[3].host_s == 0.0, "launched while another ran"
