"""Trials of grammars: the order of tries, what is cancelled and remembered, by hand; and the processes themselves."""

import asyncio
import itertools
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psutil
import pytest

from slipstream import runtime
from slipstream.models.targets.pretrained import load_tokenizer
from slipstream.serve.grammar import trial
from slipstream.serve.grammar.grammars import compile_with, make_compiler, read_vocabulary, translate
from slipstream.serve.grammar.trial import Crashed, TooLong, TrialProcess, Unavailable
from slipstream.serve.grammar.trial_process import TooSlow, check_speed
from slipstream.serve.grammar.trials import LEAST_SIZE, MOST_LONG, MOST_SHORT, SHORT_SECONDS, Trials
from slipstream.serve.http.engine_client import EngineClient
from slipstream.serve.http.launch import prepare
from slipstream.serve.listener import bind
from slipstream.serve.options import ServeConfig
from slipstream.serve.request import Grammar
from slipstream.tests.serve.fake_engine import FakeEngine
from slipstream.tests.serve.fake_server import COMPLETIONS, client_of, serving
from slipstream.tests.sources import TINY
from slipstream.tests.user_errors import user_error

LIMIT = 20.0


def translation_of(text: str) -> Grammar:
    return Grammar("ast", f"translated {text}")


class Desk:
    """Trials whose attempts end when the test says so."""

    def __init__(self, seconds: float = LIMIT):
        self.begun = []
        self.running: dict[str, asyncio.Future[Grammar]] = {}
        self.abandoned = []
        self.trials = Trials(self, seconds)
        self.requests: dict[str, list[asyncio.Task[Grammar]]] = {}

    def start(self): ...

    def close(self): ...

    async def attempt(self, grammar: Grammar, seconds: float, abandoned: asyncio.Event) -> Grammar:
        self.begun.append((grammar.text, seconds))
        end = self.running[grammar.text] = asyncio.get_running_loop().create_future()
        left = asyncio.create_task(abandoned.wait())
        await asyncio.wait((end, left), return_when=asyncio.FIRST_COMPLETED)
        del self.running[grammar.text]
        left.cancel()
        if abandoned.is_set():
            self.abandoned.append(grammar.text)
            return grammar
        return end.result()

    async def ask(self, *texts: str):
        """A request for each."""
        for text in texts:
            task = asyncio.create_task(self.trials.admit(Grammar("regex", text)))
            self.requests.setdefault(text, []).append(task)
        await self.settle()

    async def leave(self, text: str):
        """One of the requests ends."""
        self.requests[text].pop().cancel()
        await self.settle()

    async def end(self, text: str, error: Exception | None = None):
        if error is None:
            self.running[text].set_result(translation_of(text))
        else:
            self.running[text].set_exception(error)
        await self.settle()

    async def settle(self):
        for _ in range(20):
            await asyncio.sleep(0)

    def outcome(self, text: str) -> str:
        """Returns the outcome of the request that came first, or "" while it waits."""
        task = self.requests[text][0]
        if not task.done():
            return ""
        error = task.exception()
        if error is not None:
            return f"{type(error).__name__}: {error}"
        assert task.result() == translation_of(text)
        return "compiled"


def played(play: Callable[[Desk], Awaitable[None]], seconds: float = LIMIT):
    async def run():
        desk = Desk(seconds)
        await play(desk)
        for text, tasks in desk.requests.items():
            for _ in [task for task in tasks if not task.done()]:
                await desk.leave(text)
        assert not desk.running, "a trial goes on, though nobody wants it"
        await desk.trials.aclose()

    asyncio.run(run())


def test_everyone_has_a_short_try_before_anyones_second():
    async def play(desk):
        await desk.ask("slow", "slower", "quick")
        await desk.end("slow", TooLong())
        await desk.end("slower", TooLong())
        assert [text for text, seconds in desk.begun if seconds == SHORT_SECONDS] == ["slow", "slower", "quick"]
        assert [text for text, seconds in desk.begun if seconds == LIMIT] == ["slow"]
        await desk.end("quick")
        assert desk.outcome("quick") == "compiled"
        await desk.ask("late")
        await desk.end("late")
        assert desk.outcome("late") == "compiled", "while a slow one has its long try"
        await desk.end("slow")
        assert desk.outcome("slow") == "compiled"
        await desk.end("slower", TooLong())
        assert "longer than 20 s of CPU time to compile" in desk.outcome("slower")

    played(play)


def test_what_nobody_wants_any_more_is_cancelled():
    async def play(desk):
        await desk.ask("running", "queued", "shared", "shared", "last")
        await desk.leave("queued")
        await desk.leave("shared")
        await desk.leave("running")
        assert desk.abandoned == ["running"]
        await desk.end("shared")
        await desk.end("last")
        assert [text for text, _ in desk.begun] == ["running", "shared", "last"]
        assert desk.outcome("shared") == desk.outcome("last") == "compiled"
        await desk.ask("slow", "slow too")
        await desk.end("slow", TooLong())
        await desk.end("slow too", TooLong())
        await desk.leave("slow too")
        await desk.leave("slow")
        assert desk.abandoned == ["running", "slow"]
        assert ("slow too", LIMIT) not in desk.begun
        await desk.ask("running")
        await desk.end("running")
        assert desk.outcome("running") == "compiled", "an abandoned one may come again"

    played(play)


def test_too_many_are_refused():
    async def play(desk):
        names = [f"quick {index}" for index in range(MOST_SHORT + 1)]  # one of them runs
        await desk.ask(names[0])
        await desk.ask(*names[1:], "one more")
        assert desk.outcome("one more").startswith(f"Busy: {MOST_SHORT} grammars wait")
        for name in names:
            await desk.end(name)
        assert {desk.outcome(name) for name in names} == {"compiled"}
        slow = [f"slow {index}" for index in range(MOST_LONG + 1)]
        await desk.ask("slow 0")
        await desk.ask(*slow[1:], "slow, too")
        for name in (*slow, "slow, too"):
            await desk.end(name, TooLong())
        assert desk.outcome("slow, too").startswith(f"Busy: {MOST_LONG} grammars wait")
        await desk.ask("quick")
        await desk.end("quick")
        assert desk.outcome("quick") == "compiled"

    played(play)


def test_translations_are_forgotten_where_they_take_too_much_memory(monkeypatch):
    async def play(desk):
        monkeypatch.setattr("slipstream.serve.grammar.trials.MOST_REMEMBERED", 3 * (LEAST_SIZE + len("translated 1")))
        for text in "1", "2", "3", "1", "4":
            await desk.ask(text)
            if text in desk.running:
                await desk.end(text)
        await desk.ask("1", "3", "2")
        assert "2" in desk.running
        assert [text for text, _ in desk.begun] == ["1", "2", "3", "4", "2"], "2 was not asked for as lately as 1"

    played(play)


def test_only_verdicts_are_remembered():
    """Whether a trial takes too long, crashes or cannot begin, says nothing of the next."""

    async def play(desk):
        for error in (TooLong(), TooSlow("takes 101 ms"), Crashed(), Unavailable("no process"), OSError("no file")):
            await desk.ask("unlucky")
            await desk.end("unlucky", error)
            assert desk.requests.pop("unlucky")[0].exception() is not None
        await desk.ask("unlucky")
        await desk.end("unlucky")
        await desk.ask("wrong")
        await desk.end("wrong", ValueError("is wrong"))
        num_begun = len(desk.begun)
        for _ in range(2):
            await desk.ask("unlucky", "wrong")
        assert [task.result() for task in desk.requests["unlucky"]] == [translation_of("unlucky")] * 3
        assert [str(task.exception()) for task in desk.requests["wrong"]] == ["is wrong"] * 3
        assert len(desk.begun) == num_begun

    played(play, seconds=SHORT_SECONDS)


@pytest.mark.parametrize("is_always", [False, True])
def test_a_grammar_is_refused_for_its_own_slowness(is_always, monkeypatch):
    """A busy machine may slow down a mask, or all of them a little."""
    steps = itertools.cycle([0.5] if is_always else [0, 0.5, 0, 0.01, 0, 0.03])
    now = itertools.accumulate(steps).__next__
    vocabulary = read_vocabulary(load_tokenizer(TINY))
    compiled = compile_with(make_compiler(vocabulary), translate(Grammar("regex", "([a-z]+ ){1,30}[a-z]+")))
    monkeypatch.setattr("slipstream.serve.grammar.trial_process.time.thread_time", now)
    if not is_always:
        check_speed(compiled, vocabulary)
        return
    with pytest.raises(TooSlow, match="takes 1000 ms for a token"):
        check_speed(compiled, vocabulary)


@contextmanager
def processes() -> Iterator[TrialProcess]:
    process = TrialProcess(partial(load_tokenizer, TINY), json_whitespace=0)
    try:
        yield process
    finally:
        process.close()


SLOW = Grammar("regex", "(a|b|ab|ba|aab|bba)*" * 600)  # some seconds
QUICK = Grammar("json_schema", '{"type": "string", "maxLength": 9}')
QUICK_OBJECT = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}')


def test_a_server_tries_grammars_with_its_own_limit_of_white_space():
    async def admitted(config):
        async with prepare(config, bind(config.host, config.port), EngineClient(FakeEngine)) as server:
            return await server.api.trials.admit(QUICK_OBJECT)

    config = ServeConfig(target=str(TINY), port=0, json_whitespace=3)
    assert asyncio.run(admitted(config)) == translate(QUICK_OBJECT, 3)


def test_trials_end_within_their_limits_and_none_hurts_another(monkeypatch, capfd):
    """One process, started as a server starts it, is loaded for all of them."""
    forked = trial.subprocess
    monkeypatch.setattr(trial, "subprocess", subprocess)
    monkeypatch.setattr(trial, "WALL_FACTOR", 1000)  # the machine may be busy
    monkeypatch.setattr(runtime, "NICENESS", 0)  # or the trials wait for other tests

    async def run(process):
        cancelled = asyncio.Event()
        assert await process.attempt(QUICK, 9.0, cancelled) == translate(QUICK, 0), (
            "equal schemas have equal translations"
        )
        assert (
            translate(QUICK_OBJECT, 0) == await process.attempt(QUICK_OBJECT, 9.0, cancelled) != translate(QUICK_OBJECT)
        )
        loaded = psutil.Process(process.pid)
        await process.attempt(Grammar("regex", "(^a)b\\é"), 9.0, cancelled)
        assert not capfd.readouterr().err, "a client could fill the log"
        with user_error("cannot be used"):
            await process.attempt(Grammar("regex", "(a"), 9.0, cancelled)
        with user_error("takes .* ms for a token"):
            await process.attempt(Grammar("regex", "(" * 30 + "[a-z ]" + ")*" * 30), 9.0, cancelled)
        with pytest.raises(TooLong):
            await process.attempt(SLOW, 0.1, cancelled)
        left = asyncio.Event()
        running = asyncio.create_task(process.attempt(SLOW, 1000.0, left))
        other = asyncio.create_task(process.attempt(QUICK, 9.0, cancelled))
        while not loaded.children():
            await asyncio.sleep(0.01)
        await other
        left.set()
        await running
        assert loaded.children() == []
        running = asyncio.create_task(process.attempt(SLOW, 1000.0, cancelled))
        while not (children := loaded.children()):
            await asyncio.sleep(0.01)
        os.kill(children[0].pid, signal.SIGKILL)  # as the kernel does where memory is short
        with pytest.raises(Crashed):
            await running
        assert process.pid == loaded.pid
        monkeypatch.setattr(trial, "subprocess", forked)
        loaded.kill()
        await process.attempt(QUICK, 9.0, cancelled)
        assert process.pid != loaded.pid
        process.close()

    with processes() as process:
        asyncio.run(run(process))


def test_without_a_process_nothing_is_tried():
    async def run():
        process = TrialProcess(partial(load_tokenizer, TINY / "missing"))
        with pytest.raises(Unavailable, match="does not start"):
            await process.attempt(QUICK, 9.0, asyncio.Event())

    asyncio.run(run())


def test_clients_learn_what_is_wrong_with_a_grammar_before_a_stream_begins(byte_target):
    with (
        serving(ServeConfig(target=byte_target, port=0)) as server,
        client_of(server) as client,
    ):
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"contains": {}}}}
        unknown = {"type": "structural_tag", "format": {"type": "x"}}
        for field, fields, message in (
            ("regex", {"regex": "(a"}, "cannot be used"),
            ("regex", {"regex": "a" * 70_000}, "has 70000 characters; the limit is 65536"),
            (
                "response_format.json_schema.schema",
                {"response_format": schema},
                '"contains" at the root is not supported',
            ),
            ("response_format", {"response_format": unknown}, "cannot be used"),
        ):
            answer = client.post(COMPLETIONS, json={"prompt": "x", "stream": True, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert error["message"].startswith(f"{field}: ")
            assert message in error["message"]
        body = {"prompt": "x", "max_tokens": 2, "n": 2, "regex": "[a-c]+"}
        assert client.post(COMPLETIONS, json=body).status_code == 200
        server.api.trials._short.capacity = 0
        busy = client.post(COMPLETIONS, json={**body, "regex": "[a-d]+"})
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "server_overloaded")
        assert client.post(COMPLETIONS, json=body).status_code == 200, "a known one"
