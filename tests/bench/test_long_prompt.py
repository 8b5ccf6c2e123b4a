"""The benchmark of long prompts, with a clocked engine and a real one."""

import json

import pytest

from slipstream.bench import long_prompt, streams
from slipstream.bench.long_prompt import Arrival, Load, LongPromptConfig, figures, long_prompts
from slipstream.bench.streams import Streams
from slipstream.bench.workload import Task
from slipstream.serve.request import Output, Request
from slipstream.tests.bench.clocked_engine import Clock, ClockedEngine
from slipstream.tests.sources import TINY

LONG = [7] * 100
CHUNKS = 2
CHUNK_S = 20.0


class ChunkedEngine(ClockedEngine):
    """Everything waits while a long prompt is computed, in two steps of 20 s; other steps take 1 s."""

    left = 0  # chunks to compute

    def add(self, request: Request):
        super().add(request)
        if len(request.prompt) >= len(LONG):
            self.left = CHUNKS

    def step(self) -> list[Output]:
        if self.left:
            self.left -= 1
            self.clock.now += CHUNK_S - (0.0 if self.left else 1.0)
            if self.left:
                return []
        return super().step()


@pytest.fixture
def running(monkeypatch) -> Load:
    clock = Clock()
    for module in (long_prompt, streams):
        monkeypatch.setattr(module, "time", clock)
    config = LongPromptConfig(target="x", streams=3, stream_len=12, quiet_steps=5)
    return Load(config, Streams(ChunkedEngine(clock)), [Task([1, 2, 3], 12)])


def test_a_gap_spans_the_time_until_the_first_token(running):
    assert running.alone(LONG) == CHUNKS * CHUNK_S
    running.start()
    assert len(running.streams.open) == 3
    for _ in range(3):
        arrival = running.arrive(LONG)
        assert (arrival.first_token_s, arrival.gap_s, arrival.quiet_gap_s) == (CHUNKS * CHUNK_S, CHUNKS * CHUNK_S, 1.0)
        assert arrival.tok_s < arrival.quiet_tok_s
    assert len(running.streams.open) == 3, "streams that ended were followed by others"
    assert len(running.streams.all) > 6


def test_streams_end_one_after_another(running):
    running.start()
    assert [request.params.max_tokens for request in running.streams.engine.running.values()] == [4, 8, 12]


def test_figures_are_medians():
    arrivals = [
        Arrival(0.2, 0.3, 0.01, 50.0, 100.0),
        Arrival(0.4, None, 0.02, 60.0, 110.0),
        Arrival(0.3, 0.5, None, 70.0, 120.0),
    ]
    line = figures([0.1, 0.2, 0.15], arrivals, [])
    assert (line["gap_ms"], line["gap_ms_most"], line["quiet_gap_ms"]) == (400.0, 500.0, 15.0)
    assert (line["first_token_ms"], line["alone_ms"], line["ratio"]) == (300.0, 150.0, 2.0)
    assert (line["tok_s"], line["quiet_tok_s"], line["accept_length"]) == (60.0, 110.0, None)
    assert line["gaps_ms"] == [300.0, None, 500.0]


def test_the_program(tmp_path, capsys):
    config = LongPromptConfig(
        target=str(TINY),
        engine={"kv_cache_tokens": 1024},
        output=str(tmp_path / "lines"),
        streams=2,
        stream_len=24,
        prompt_len=120,
        arrivals=2,
        quiet_steps=3,
    )
    long_prompts(config)
    line = json.loads((tmp_path / "lines").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    assert (line["streams"], line["prompt_len"], line["arrivals"], line["draft"]) == (2, 120, 2, "none")
    assert all(len(line[name]) == 2 for name in ("gaps_ms", "first_tokens_ms", "alones_ms"))
    assert line["ratio"] == pytest.approx(line["first_token_ms"] / line["alone_ms"], abs=1e-3)
    assert line["gap_ms"] > 0
    assert line["accept_length"] == 1.0


@pytest.mark.parametrize("name", ["streams", "arrivals", "quiet_steps", "prompt_len"])
def test_numbers_are_at_least_1(name):
    with pytest.raises(ValueError, match=f"{name} is 0; give at least 1"):
        LongPromptConfig(**{name: 0})
