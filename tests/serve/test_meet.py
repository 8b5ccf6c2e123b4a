"""How ranks meet, and how rank 0 misses them."""

import multiprocessing
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace

import psutil
import pytest
import torch

from slipstream.kernels.collectives.join import join_ranks
from slipstream.serve.engine import members
from slipstream.serve.engine import team as teams
from slipstream.serve.engine.build import build
from slipstream.serve.engine.engine_plan import read_plan
from slipstream.serve.options import EngineConfig
from slipstream.serve.pipe import Pipe

CPU = torch.device("cpu")
WORLD = 3


def test_all_have_joined_when_one_goes_on(tmp_path, monkeypatch):
    """Rank 0 may remove the file then, which the others read while they join."""
    joined = set()

    def join_late(device, rank, world, file):
        ranks = join_ranks(device, rank, world, file)
        time.sleep(0.2 * rank)
        joined.add(rank)
        return ranks

    def meet(rank):
        teams.meet(CPU, rank, WORLD, str(tmp_path / "ranks"))
        return set(joined)

    monkeypatch.setattr(teams, "join_ranks", join_late)
    with ThreadPoolExecutor(WORLD) as pool:
        assert list(pool.map(meet, range(WORLD))) == [{0, 1, 2}] * WORLD


def test_ranks_that_have_started_are_taken():
    before = {process.pid for process in psutil.Process().children()}
    members.prepare(2)
    started = {process.pid for process in psutil.Process().children()} - before
    team = teams.Team(2, CPU)
    assert {member.process.pid for member in team.members} == started
    assert not members._prepared
    team.close()
    team._watch()  # as its thread, where that begins late


def lose_a_rank(target: str, end: Connection):
    """Builds an engine in this process, whose other rank is killed when rank 0 begins to join."""
    team = teams.Team(2, CPU)
    process = team.members[0].process

    def join_none(*arguments):
        process.kill()
        return join_ranks(*arguments)

    teams.join_ranks = join_none
    try:
        build(read_plan(EngineConfig(target=target, device="cpu", tp=2, kv_cache_tokens=512)), team=team)
    except teams.RankError as error:
        end.send((str(error), process.pid))


@pytest.mark.slow
def test_a_rank_that_dies_while_rank_0_joins_is_named(target):
    """By an engine that ends, though torch waits for the rank for minutes. A process, as nothing ends that wait."""
    end, engine_end = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    engine = context.Process(target=lose_a_rank, args=(str(target), engine_end), daemon=True)
    engine.start()
    assert end.poll(120), "the engine waits"
    sentence, rank = end.recv()
    assert sentence == "rank 1 (cpu) was killed by signal 9 (SIGKILL)"
    engine.join(30)
    assert engine.exitcode == 0
    assert not psutil.pid_exists(rank)


def test_a_rank_is_not_missed_while_rank_0_was_stopped(monkeypatch):
    """As by Ctrl-Z; then all of its ranks were."""
    now = 0.0
    sleeps = iter([6.0])

    class Selector:
        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def register(self, *_): ...

        def select(self, seconds):
            nonlocal now
            now += next(sleeps, seconds)
            return []

    process = SimpleNamespace(kill=lambda: None, poll=lambda: None, wait=lambda _: None)
    ends = socket.socketpair()
    member = teams.Member("rank 1", process, Pipe(ends[0]), ends[1], heard=0.0)
    monkeypatch.setattr(members, "take", lambda _: [member])
    monkeypatch.setattr(teams, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(teams, "selectors", SimpleNamespace(DefaultSelector=Selector, EVENT_READ=1))
    monkeypatch.setattr(teams, "BUILD_SILENCE_SECONDS", 4.0)
    team = teams.Team(2, CPU)
    assert team._failed.wait(30)
    assert team.failure == "rank 1 (cpu) has not answered for 4 s"
    assert 9 < now < 11
    team.close()
