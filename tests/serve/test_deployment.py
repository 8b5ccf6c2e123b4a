"""A deployment on Ray, in processes of its own: the cases of a server, updates under load, and what clients see when
parts are killed. The tests share a deployment, in their order. Skipped where Ray is not installed."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from slipstream.serve.listener import bind
from slipstream.serve.load import Answer, Client
from slipstream.tests.serve.check_server import FOLDER, cases_of, faults_of
from slipstream.tests.sources import ROOT

pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
pytestmark = pytest.mark.slow
KEY = "sesame"
FILES = ("chat", "responses", "tools", "tokens", "refusals", "logprobs")  # the others ask for the gate's limits
START_SECONDS = 300.0
NUM_CLIENTS = 12
QUESTIONS = [f"What is {number} * {number + 7}?" for number in range(60)]


class Deployment:
    """`slipstream deploy`, and clients of it."""

    def __init__(self, folder: Path):
        self.folder = folder
        target = shutil.copytree(ROOT / "assets" / "tiny-target", folder / "target")
        (folder / "keys").write_text(f"{KEY}\n")
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {"target": str(target), "draft": "ngram", "replicas": 2, "port": port, "kv_cache_tokens": 32768}
        self.file = folder / "fleet.yaml"
        self.file.write_text(yaml.safe_dump({**options, "api_key_file": str(folder / "keys"), "max_running": 16}))
        self.log = folder / "log"
        with self.log.open("w") as log:
            command = [*self.command(), "--cluster", "local"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, cwd=folder)
        self.wait(lambda: "model at" in self.log.read_text(), "the deployment answers")

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}

    def command(self, **options: Any) -> list[str]:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "slipstream.cli", "deploy", str(self.file), *words]

    def update(self, **options: Any):
        """Runs the command again, with other options."""
        ended = subprocess.run(
            self.command(**options), capture_output=True, text=True, env=self.environment, cwd=self.folder
        )
        assert ended.returncode == 0, ended.stderr

    def wait(self, condition: Callable[[], bool], event: str, seconds: float = START_SECONDS):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"not within {seconds} s: {event}"
            time.sleep(0.5)

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, headers={"Authorization": f"Bearer {KEY}"})

    def samples(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Values of a metric by some of its labels, added up."""
        with self.client as client:
            text = client.get("/metrics").raise_for_status().text
        total = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"slipstream_{name}":
                    place = tuple(sample.labels[label] for label in labels)
                    total[place] = total.get(place, 0.0) + sample.value
        return total

    def wait_for_replicas(self, number: int = 2):
        def are_there():
            with suppress(httpx.HTTPError):
                return sum(self.samples("engine_up", "replica").values()) == number
            return False

        self.wait(are_there, f"{number} replicas answer")

    def processes(self, name: str) -> list[psutil.Process]:
        """Ray's processes whose title has `name`."""
        processes = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if any(name in word for word in process.cmdline()):
                    processes.append(process)
        return processes

    def under_load(self, act: Callable[[], object], seconds: float = 0.0) -> list[Answer]:
        """Has clients ask, streamed and greedy, while `act` runs, and for so many seconds after it."""
        stop = asyncio.Event()

        async def ask(client, number):
            answers = []
            while not stop.is_set():
                question = QUESTIONS[(number + NUM_CLIENTS * len(answers)) % len(QUESTIONS)]
                messages = [{"role": "user", "content": question}]
                answer = await client.ask(messages, {"max_tokens": 32, "temperature": 0, "stream": number % 3 > 0})
                answers.append(answer)
                self.texts.setdefault(question, set()).add(answer.text if answer.error is None else "")
            return answers

        async def run():
            async with Client(self.url, connections=NUM_CLIENTS, api_key=KEY) as client:
                tasks = [asyncio.create_task(ask(client, number)) for number in range(NUM_CLIENTS)]
                await asyncio.sleep(3)
                await asyncio.to_thread(act)
                await asyncio.sleep(seconds)
                stop.set()
                return [answer for answers in await asyncio.gather(*tasks) for answer in answers]

        self.texts: dict[str, set[str]] = {}
        return asyncio.run(run())

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(90)
        finally:
            self.process.kill()


def test_after_sigterm_open_requests_finish_and_new_ones_are_refused(tmp_path):
    deployed = Deployment(tmp_path)
    try:
        answers = deployed.under_load(lambda: deployed.process.send_signal(signal.SIGTERM), seconds=4)
        assert any("the server is shutting down" in error for error in errors_of(answers))
        assert [answer.error for answer in answers if answer.error is not None and answer.arrivals_s] == []
        broken = ("ServerDisconnected", "ClientPayloadError", "broke off")
        assert [error for error in errors_of(answers) if any(words in error for words in broken)] == []
        assert deployed.process.wait(90) in (0, -signal.SIGTERM)
    finally:
        deployed.process.kill()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    deployed = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        yield deployed
    finally:
        deployed.end()


def errors_of(answers: list[Answer]) -> list[str]:
    return [answer.error for answer in answers if answer.error is not None]


def test_the_cases_of_a_server_pass(deployment):
    cases = [case for name in FILES for case in cases_of(FOLDER / f"{name}.yaml") if "gate" not in case.tags]
    with deployment.client as client:
        faults = {str(case): faults for case in cases if (faults := faults_of(case, client, "target"))}
    assert faults == {}


def test_a_wrong_key_is_refused(deployment):
    for _ in range(4):
        assert httpx.get(f"{deployment.url}/v1/models", headers={"Authorization": "Bearer no"}).status_code == 401


def test_a_draft_is_replaced_without_a_failed_or_changed_answer(deployment):
    answers = deployment.under_load(lambda: deployment.update(draft="none"), seconds=10)
    assert errors_of(answers) == []
    assert all(len(texts) == 1 for texts in deployment.texts.values())
    by_draft = deployment.samples("replica_requests_total", "draft")
    assert by_draft["ngram",] > 20
    assert by_draft["none",] > 20


def test_an_update_that_cannot_start_leaves_what_runs(deployment):
    command = deployment.command(draft="none", kv_cache_tokens=16)
    ended = subprocess.run(command, capture_output=True, text=True, env=deployment.environment, cwd=deployment.folder)
    assert ended.returncode == 1
    assert "slipstream deploy: error: the deployment failed (the KV cache holds 0 tokens" in ended.stderr
    assert sum(deployment.samples("engine_up", "replica").values()) == 2
    deployment.update(draft="none")


@pytest.mark.parametrize("part", ["actor", "engine"])
def test_a_replica_that_is_killed_costs_no_answer(part, deployment):
    deployment.wait_for_replicas()
    replica = deployment.processes("ray::ServeReplica:slipstream:Replicas")[0]
    engines = [child for child in replica.children() if any("spawn_main" in word for word in child.cmdline())]
    victim = replica if part == "actor" else engines[0]
    answers = deployment.under_load(victim.kill, seconds=8)
    assert errors_of(answers) == []
    assert all(len(texts) == 1 for texts in deployment.texts.values())
    assert sum(deployment.samples("replica_resumed_total", "replica").values()) > 0
    deployment.wait_for_replicas()


def test_an_ingress_that_is_killed_breaks_off_its_open_answers_alone(deployment):
    [ingress] = deployment.processes("ray::ServeReplica:slipstream:Ingress")
    answers = deployment.under_load(ingress.kill, seconds=45)
    assert len(errors_of(answers)) <= NUM_CLIENTS
    assert answers[-1].error is None
    deployment.wait_for_replicas()


def test_another_target_replaces_the_first_beside_it(deployment):
    """A copy, whose answers are the same, under another name: no request meets a server without replicas."""
    copy = shutil.copytree(ROOT / "assets" / "tiny-target", deployment.folder / "second")
    answers = deployment.under_load(
        lambda: deployment.update(target=copy, served_model_name="target", draft="none"), seconds=5
    )
    assert errors_of(answers) == []
    assert all(len(texts) == 1 for texts in deployment.texts.values())
    deployment.wait_for_replicas()


def test_a_second_draft_gets_its_share(deployment):
    target = deployment.folder / "second"
    deployment.update(
        target=target, served_model_name="target", draft="none", second_draft="ngram", second_share=0.3, replicas=1
    )
    deployment.wait_for_replicas(2)
    with deployment.client as client:
        for number in range(100):
            body = {"prompt": f"{number} * 3 =", "max_tokens": 4, "ignore_eos": True}
            client.post("/v1/completions", json=body).raise_for_status()
    by_draft = deployment.samples("replica_accept_length_count", "draft")
    assert 12 <= by_draft["ngram",] <= 55
    by_end = deployment.samples("replica_requests_total", "draft")
    assert by_end["none",] + by_end["ngram",] == 100


def test_requests_go_on_without_rays_head_until_the_command_ends(deployment):
    [head] = deployment.processes("gcs_server")
    processes = psutil.Process(deployment.process.pid).children(recursive=True)
    try:
        answers = deployment.under_load(head.kill, seconds=8)
        assert errors_of(answers) == []
        deployment.process.wait(180)
        assert deployment.process.returncode != 0
    finally:
        for process in processes:  # HAProxy outlives Ray
            with suppress(psutil.Error):
                process.kill()
