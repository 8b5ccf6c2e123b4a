"""Short soaks of a real server, and what their figures are."""

import json
import subprocess
import sys

import pytest

from slipstream.bench.soak import Tally, summary
from slipstream.tests.sources import ROOT


def test_figures():
    tally = Tally(health_s=[0.001] * 99 + [0.5], memory_mb=[(10, 100.0), (31, 300.0), (40, 400.0), (50, 350.0)])
    for outcome, wrong in (("stop", ""), ("stop", ""), ("lost", "finish reasons []")):
        tally.end(outcome, wrong=wrong)
    figures = summary(tally, 60.4)
    assert (figures["requests"], figures["outcomes"], figures["wrong"]) == (3, {"stop": 2, "lost": 1}, 1)
    assert (figures["health_p50_ms"], figures["health_max_ms"]) == (1.0, 500.0)
    assert figures["memory_mb_after_30_s"] == [300, 400, 350]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("clients", "--clients=20", "--minutes=0.1"), ("fuzz", "--requests=300", "--tp=2")]
)
def test_a_short_soak_finds_nothing_wrong(options):
    done = subprocess.run([sys.executable, "bench/soak.py", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["requests"] >= 20
    assert figures["left"] == {"open": 0, "pages_used": 0}
