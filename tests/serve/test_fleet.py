"""A deployment without Ray: requests whose replica is lost, and the endpoints of `serve` before several replicas."""

import asyncio
import json
import math
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serve.fleet.client import FleetClient
from slipstream.serve.fleet.options import DeployConfig
from slipstream.serve.fleet.replica import Abort, Failure, ReplicaState, Reply
from slipstream.serve.http.engine_client import EngineError
from slipstream.serve.options import LearnOptions, ServeConfig
from slipstream.serve.request import EngineInfo, Output, Request, RequestStats, SamplingParams, TokenTrace
from slipstream.tests.serve.check_server import FOLDER, cases_of, faults_of
from slipstream.tests.serve.fake_engine import logprobs_of
from slipstream.tests.serve.fake_server import COMPLETIONS, MODEL, write_target
from slipstream.tests.serve.fleets import FleetServer, ScriptedFleet, fleet_serving

TEXT = list(range(40, 60))
LOST = Failure("lost", "")
CASES = [case for file in sorted(FOLDER.glob("*.yaml")) for case in cases_of(file) if case.server == "bytes"]
SHORT = [case for case in CASES if str(case).startswith(("chat", "responses", "tokens"))]


class Waiter:
    """Receives the outputs of a request."""

    def __init__(self):
        self.outputs: list[Output] = []
        self.error: Exception | None = None
        self.ended = asyncio.Event()

    def receive(self, output: Output):
        assert not self.ended.is_set()
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.set()

    def fail(self, error: Exception):
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.tokens]


def request_of(name: str = "call-0") -> Request:
    return Request(id=name, prompt=[1, 2, 3], params=SamplingParams(max_tokens=20))


def outputs_of(tokens: list[int], cuts: list[int], *, is_whole: bool, rich: bool = False) -> list[Reply]:
    """Replies with `tokens`, cut at `cuts`, with log-probabilities and traces if `rich`."""
    places = [0, *sorted(cuts), len(tokens)]
    replies = []
    for start, end in zip(places, places[1:], strict=False):
        part = tokens[start:end]
        is_last = is_whole and end == len(tokens)
        replies.append(
            [
                Output(
                    request_id="call-0",
                    tokens=part,
                    finish_reason="length" if is_last else None,
                    stats=RequestStats(completion_tokens=len(tokens)) if is_last else None,
                    logprobs=logprobs_of(part, 2) if rich else None,
                    trace=[TokenTrace("target", token, 0) for token in part] if rich else None,
                    prompt_logprobs=logprobs_of([2, 3], 1) if rich and start == 0 else None,
                )
            ]
        )
        if is_last:
            break
    return replies


def carried(fleet: ScriptedFleet, act: Callable[[FleetClient], Coroutine[Any, Any, None]] | None = None) -> Waiter:
    """Submits a request to a client of `fleet`, and waits for its end."""

    async def run():
        client = FleetClient([fleet])
        waiter = Waiter()
        client.submit(request_of(), waiter)
        assert client.num_open == 1
        if act is not None:
            await act(client)
        async with asyncio.timeout(10):
            await waiter.ended.wait()
        assert client.num_open == 0
        return waiter

    return asyncio.run(run())


CUTS = st.lists(st.integers(0, len(TEXT)), max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(TEXT)), CUTS, CUTS)
def test_a_request_goes_on_where_its_lost_replica_stopped(place, cuts, cuts_again):
    """With every token once, whatever the replies in which both replicas sent them."""
    first = outputs_of(TEXT[:place], [cut for cut in cuts if cut < place], is_whole=False, rich=True)
    fleet = ScriptedFleet([[*first, LOST], outputs_of(TEXT, cuts_again, is_whole=True, rich=True)])
    waiter = carried(fleet)
    assert waiter.tokens == TEXT
    assert [trace.position for output in waiter.outputs for trace in output.trace or ()] == TEXT
    expected = logprobs_of(TEXT, 2)
    assert [value for output in waiter.outputs for value in output.logprobs.tokens] == expected.tokens
    assert sum(output.prompt_logprobs is not None for output in waiter.outputs) == 1
    assert waiter.outputs[-1].stats == RequestStats(completion_tokens=len(TEXT))
    assert fleet.calls[1].avoid == "replica 0"


@pytest.mark.parametrize(
    ("scripts", "kind", "words"),
    [
        ([[*outputs_of(TEXT[:5], [], is_whole=False), LOST], outputs_of([40, 41, 9], [], is_whole=True)], EngineError,
         "the replica replica 0 was lost after 5 tokens of this answer, and another one answers otherwise"),
        ([[*outputs_of(TEXT[:5], [], is_whole=False), LOST], outputs_of(TEXT[:3], [], is_whole=True)], EngineError,
         "another one answers otherwise"),  # the second ends earlier
        ([[LOST], [*outputs_of(TEXT[:2], [], is_whole=False), LOST]], EngineError, "replica 1 was lost; the request"),
        ([[], []], EngineError, "replica 1 ended; the request was lost with it"),
        ([[Failure("refused", "too long")]], ValueError, "too long"),
        ([[Failure("failed", "no memory")]], EngineError, "no memory"),
    ],
)  # fmt: skip
def test_other_ends_are_errors(scripts, kind, words):
    fleet = ScriptedFleet(scripts)
    waiter = carried(fleet)
    assert type(waiter.error) is kind or isinstance(waiter.error, kind)
    assert words in str(waiter.error)
    assert len(fleet.calls) == len(scripts)
    assert fleet.aborts == ([Abort("call-0", "replica 1")] if "answers otherwise" in words else [])


def test_an_abort_reaches_the_replica_that_has_the_request():
    fleet = ScriptedFleet([outputs_of(TEXT, [2, 5], is_whole=True)], has_gate=True)

    async def act(client):
        client.abort("call-0")  # it has no replica yet
        for _ in range(3):
            fleet.step()
            await asyncio.sleep(0.01)
            client.abort("call-0")  # once is enough
        client.abort("call-1")  # no such request

    assert carried(fleet, act).tokens == TEXT
    assert fleet.aborts == [Abort("call-0", "replica 0")]


def test_an_abort_of_a_lost_request_waits_until_its_tokens_came_again():
    """A stop string ended the text: the end, with the counts, comes from the second replica."""
    first = [*outputs_of(TEXT[:6], [], is_whole=False), LOST]
    fleet = ScriptedFleet([first, outputs_of(TEXT, [3, 6, 9], is_whole=True)], has_gate=True)
    when = []

    async def act(client):
        for step in range(6):
            if step == 1:
                client.abort("call-0")
            fleet.step()
            await asyncio.sleep(0.01)
            when.append(len(fleet.aborts))

    assert carried(fleet, act).error is None
    assert fleet.aborts == [Abort("call-0", "replica 0"), Abort("call-0", "replica 1")]
    assert when == [0, 1, 1, 2, 2, 2]


def test_a_receiver_that_raises_ends_its_request_alone():
    class Broken(Waiter):
        def receive(self, output):
            raise LookupError("a bug")

    fleet = ScriptedFleet([outputs_of(TEXT, [3], is_whole=True), outputs_of(TEXT, [], is_whole=True)])

    async def run():
        client = FleetClient([fleet])
        waiters = (Broken(), Waiter())
        client.submit(request_of("call-0"), waiters[0])
        client.submit(request_of("call-1"), waiters[1])
        async with asyncio.timeout(10):
            await asyncio.gather(*(waiter.ended.wait() for waiter in waiters))
        return waiters

    broken, healthy = asyncio.run(run())
    assert "failed to handle the answer to call-0" in str(broken.error)
    assert fleet.aborts == [Abort("call-0", "replica 0")]
    assert healthy.tokens == TEXT


def test_a_request_that_ends_before_the_state_of_its_replica_is_known_counts_for_its_draft():
    fleet = ScriptedFleet([outputs_of(TEXT, [], is_whole=True)])

    async def run():
        client = FleetClient([fleet])
        waiter = Waiter()
        client.submit(request_of(), waiter)
        await waiter.ended.wait()
        fleet.replicas = [ReplicaState("replica 0", "other", EngineInfo(256, 128, 1024), 0, None)]
        await client.refresh()
        return client.counts_of["replica 0"]

    counts = asyncio.run(run())
    assert (counts.draft, counts.finished) == ("other", {"length": 1})


def test_a_share_of_calls_gets_the_second_draft():
    async def run():
        fleets = [ScriptedFleet([outputs_of(TEXT, [], is_whole=True)] * 1200) for _ in range(2)]
        client = FleetClient(fleets, share=0.25)
        waiters = [Waiter() for _ in range(1200)]
        for number, waiter in enumerate(waiters):
            client.submit(request_of(f"cmpl-{number // 3}-{number % 3}"), waiter)  # three choices a call
        await asyncio.gather(*(waiter.ended.wait() for waiter in waiters))
        calls = [{call.request.id.rpartition("-")[0] for call in fleet.calls} for fleet in fleets]
        assert not calls[0] & calls[1]
        return [len(names) for names in calls]

    first, second = asyncio.run(run())
    assert first + second == 400
    assert 70 <= second <= 130


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[FleetServer]:
    target = write_target(tmp_path_factory.mktemp("fleet") / "target")
    with fleet_serving(ServeConfig(target=str(target), served_model_name=MODEL), keys=["sesame"]) as deployment:
        yield deployment


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    headers = {"Authorization": "Bearer sesame"}
    with httpx.Client(base_url=server.url, timeout=120, headers=headers) as session:
        yield session


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_case(case, client):
    assert faults_of(case, client) == []


@pytest.mark.slow
def test_all_cases(client):
    assert {str(case): faults for case in CASES if (faults := faults_of(case, client))} == {}


def test_a_key_is_refused_whichever_replica_would_answer(server):
    num_calls = len(server.fleet.calls)
    for _ in range(8):
        answer = httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "x"}, headers={"Authorization": "Bearer no"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert len(server.fleet.calls) == num_calls


def test_metrics_have_a_label_for_each_replica(client):
    for number in range(6):
        client.post(COMPLETIONS, json={"prompt": f"{number}" * 40, "max_tokens": 5}).raise_for_status()
    text = client.get("/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for name in ("r0", "r1"):
        labels = f'draft="fake",replica="{name}"'
        assert f"slipstream_engine_up{{{labels}}} 1.0" in lines
        assert any(line.startswith(f"slipstream_replica_accept_length_count{{{labels}}}") for line in lines)
    assert any(line.startswith('slipstream_time_to_first_token_seconds_count{ingress="ingress"}') for line in lines)
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))  # one family of each name


def test_an_engine_that_is_killed_costs_no_answer(tmp_path):
    """Streams are in the middle of their text when one of two engines is killed."""
    config = ServeConfig(target=str(write_target(tmp_path / "target")), served_model_name=MODEL)
    prompts = [letter * 20 + "end" for letter in "abcdefgh"]
    body = {"max_tokens": 150, "cache_salt": "slow", "stream": True, "ignore_eos": True}

    def event_text(line):
        return "" if not line.startswith("data: {") else json.loads(line[6:])["choices"][0]["text"]

    async def stream(session, prompt, first_texts):
        text = ""
        async with session.stream("POST", COMPLETIONS, json={**body, "prompt": prompt}) as answer:
            async for line in answer.aiter_lines():
                assert '"error"' not in line, line
                if not text and event_text(line):
                    first_texts.release()
                text += event_text(line)
        return text

    async def run(deployment):
        first_texts = asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=deployment.url, timeout=120) as session:
            streams = [asyncio.create_task(stream(session, prompt, first_texts)) for prompt in prompts]
            for _ in prompts:
                await first_texts.acquire()
            engine = deployment.fleet.replicas["r0"].engine
            assert engine.num_open > 0
            os.kill(engine.pid or 0, signal.SIGKILL)
            return await asyncio.gather(*streams)

    with fleet_serving(config) as deployment:
        texts = asyncio.run(run(deployment))
        assert texts == [(prompt * 10)[:150] for prompt in prompts]
        assert deployment.ingress.api.engine.counts_of["r0"].lost > 0
        assert httpx.get(f"{deployment.url}/health").json()["status"] == "ok"
        os.kill(deployment.fleet.replicas["r1"].engine.pid or 0, signal.SIGKILL)
        answer = httpx.post(f"{deployment.url}{COMPLETIONS}", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) in [(500, "engine_failed"), (503, "engine_failed")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 0}, "replicas is 0; give at least 1"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas is 2 and replicas 3; give at least as many as replicas"),
        ({"second_share": 1.0}, "second_share is 1.0; it must be between 0 and 1"),
        ({"cpus": 0}, "cpus is 0; it must be a number above 0"),
        ({"cpus": math.inf}, "cpus is inf; it must be a number above 0"),
        ({"cpus": math.nan}, "cpus is nan; it must be a number above 0"),
        ({"dry_run": True}, "dry_run is an option of `serve`"),
        ({"draft_folder": "x"}, "draft_folder changes the draft of one server; change a deployment's by"),
        ({"learn": LearnOptions(device="cpu")}, "learn.device changes the draft of one server"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        DeployConfig(target="x", **options)


def test_versions_change_with_what_they_name():
    """A draft restarts replicas alone; a key, ingresses alone; a target, all, under another name."""
    config = DeployConfig(target="x", draft="ngram", api_key="secret")
    assert "secret" not in json.dumps(config.values())

    def versions(keys=[], **changes):  # noqa: B006
        other = DeployConfig.read({**config.values(), **changes})
        return other.target_version, other.replica_version, other.ingress_version(keys)

    target, replica, ingress = versions()
    assert versions(draft="none")[::2] == (target, ingress)
    assert versions(draft="none")[1] != replica
    assert versions(drafter={"depth": 2})[1] != replica
    assert versions(replicas=7, max_replicas=9) == (target, replica, ingress)
    assert versions(cluster="local", surge=False) == (target, replica, ingress)
    assert versions(ingresses=2)[:2] == (target, replica)
    assert versions(keys=[b"1"])[:2] == (target, replica)
    assert versions(keys=[b"1"])[2] != ingress
    assert not {*versions(target="y")} & {target, replica, ingress}


def test_the_second_draft_differs_in_its_draft_alone():
    config = DeployConfig(target="x", draft="ngram", second_draft="none", replicas=3, max_replicas=4)
    first, second = config.drafts()
    assert first == config
    assert (second.draft, second.replicas, second.max_replicas) == ("none", 1, None)
    assert second.target_version == first.target_version
    assert config.most_replicas == 5
