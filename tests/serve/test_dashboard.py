"""The Grafana dashboard: every query names metrics that exist and, run by Prometheus over a real server, finds data."""

import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from slipstream.serve.engine import process
from slipstream.serve.engine.counts import EngineCounts
from slipstream.serve.fleet.metrics import FleetCollector, render
from slipstream.serve.http.metrics import EngineView, Metrics
from slipstream.serve.options import ServeConfig
from slipstream.tests.serve.engine_runs import build_engine
from slipstream.tests.serve.fake_server import COMPLETIONS, serving, wait_until
from slipstream.tests.sources import ROOT, TINY

DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: slipstream, static_configs: [{{targets: ["{server}"]}}]}}]
"""


def test_queries_name_metrics_that_exist(make_target):
    gauges = build_engine(make_target("llama")).metrics()
    text, _ = Metrics().render(EngineView(gauges, EngineCounts(), num_open=0, is_up=True, is_ready=True))
    text += render(FleetCollector([], []), "")[0]
    kinds = dict(re.findall(r"# TYPE (\w+) (\w+)", text.decode()))
    histograms = [name for name, kind in kinds.items() if kind == "histogram"]
    names_of_server = {*kinds, *(name + end for name in histograms for end in ("_bucket", "_sum", "_count"))}
    names_of_dashboard = set(re.findall(r"slipstream_\w+", json.dumps(DASHBOARD)))  # of variables, too
    assert not names_of_dashboard - names_of_server
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@contextmanager
def prometheus(folder: Path, server: str) -> Iterator[httpx.Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "prometheus.yml").write_text(CONFIG.format(server=server))
    options = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder, "web.listen-address": address}
    command = ["prometheus", "--log.level=error", *(f"--{name}={value}" for name, value in options.items())]
    process = subprocess.Popen(command)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=120) as client:
            wait_until(lambda: is_ready(client), "Prometheus is ready")
            yield client
    finally:
        process.terminate()
        process.wait(20)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus (Debian: apt-get install prometheus)")
def test_prometheus_finds_data_for_every_query(tmp_path):
    config = ServeConfig(target=str(TINY), draft="ngram", port=0, max_running=4, kv_cache_tokens=4096)
    with (
        serving(config, process.build_engine) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        prometheus(tmp_path, server.url.removeprefix("http://")) as api,
    ):
        question = "Tom has 3 boxes of 12 eggs. How many eggs does he have?"
        body = {"prompt": question, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        end = time.monotonic() + 12
        while time.monotonic() < end:
            assert client.post(COMPLETIONS, json=body).status_code == 200
            assert client.post(COMPLETIONS, json={"prompt": 5}).status_code == 400
        # A deployment alone has series of replicas.
        empty = [(title, query) for title, query in QUERIES if "_replica_" not in query and not values(api, query)]
    assert len(QUERIES) > 30
    assert not empty, empty


def values(prometheus: httpx.Client, query: str) -> list[float]:
    """The numbers that a query finds now, of all servers."""
    query = query.replace("$__rate_interval", "10s").replace("$instance", ".*")
    answer = prometheus.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    numbers = [float(sample["value"][1]) for sample in answer["data"]["result"]]
    return [number for number in numbers if not math.isnan(number)]
