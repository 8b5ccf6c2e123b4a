"""Training from the states of engines: the bits of training with the target in process, whatever dies."""

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.models.states.address import Address
from slipstream.models.states.client import StateRequest
from slipstream.tests.state_engines import StateEngine
from slipstream.tests.train.runs import (
    assert_same_run,
    end_program,
    records,
    refusal,
    start_program,
    weights,
)
from slipstream.train import dflash, eagle
from slipstream.train.eagle3 import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine(target_path, tmp_path) -> Iterator[StateEngine]:
    engine = StateEngine(target_path, Address("", path=str(tmp_path / "engine")))
    yield engine
    engine.close()


def free_port() -> int:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return int(end.getsockname()[1])


def test_a_run_has_the_bits_of_one_with_the_target_in_process(arguments, finished, engine, tmp_path, monkeypatch):
    """Its states come through shared memory: with none to map the run would fail."""
    monkeypatch.setattr(StateRequest, "allocate", None)
    main(arguments(tmp_path / "run", states__endpoint=engine.address))
    assert engine.num_passes > 6  # and those of evaluations
    assert_same_run(tmp_path / "run", finished)


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_other_drafts_get_the_states_that_they_read(run_flags, engine, tmp_path, kind):
    """EAGLE reads the state after the final norm twice: as its input and to be taught."""
    program = {"eagle": eagle.main, "dflash": dflash.main}[kind]
    changes = {"draft__block_size": 4, "draft__mask_token_id": 7} if kind == "dflash" else {}
    program(run_flags(tmp_path / "in process", **changes))
    program(run_flags(tmp_path / "remote", states__endpoint=engine.address, **changes))
    assert_same_run(tmp_path / "remote", tmp_path / "in process")


def test_states_in_fp8_are_those_of_a_capture_in_fp8(arguments, engine, capture_to, tmp_path):
    stored = capture_to("--layers", "2", "0", "4", dtype="fp8")
    main(arguments(tmp_path / "stored", data__aux_states=stored))
    main(arguments(tmp_path / "remote", states__endpoint=engine.address, states__dtype="fp8"))
    for line, expected in zip(records(tmp_path / "remote"), records(tmp_path / "stored"), strict=True):
        assert line == pytest.approx(expected, rel=1e-3)


def test_two_engines_share_the_work_and_one_may_die(arguments, finished, target_path, tmp_path):
    engines = [StateEngine(target_path, Address("127.0.0.1", free_port()), ["k"]) for _ in range(2)]
    key = tmp_path / "key"
    key.write_text("k\n")

    def die():
        while engines[1].num_passes < 2:
            time.sleep(0.001)
        engines[1].close()

    thread = threading.Thread(target=die)
    thread.start()
    addresses = "[" + ",".join(f'"{engine.address}"' for engine in engines) + "]"
    main(arguments(tmp_path / "run", states__endpoint=addresses, states__api_key_file=key))
    thread.join()
    assert engines[0].num_passes > 2
    engines[0].close()
    assert_same_run(tmp_path / "run", finished)


def test_an_engine_that_comes_back_goes_on(arguments, finished, target_path, tmp_path):
    address = Address("127.0.0.1", free_port())
    engines = [StateEngine(target_path, address)]

    def restart():
        for count in (1, 3):
            while engines[-1].num_passes < count:
                time.sleep(0.001)
            engines[-1].close()
            time.sleep(0.1)
            engines.append(StateEngine(target_path, address))

    thread = threading.Thread(target=restart)
    thread.start()
    main(arguments(tmp_path / "run", states__endpoint=address))
    thread.join()
    engines[-1].close()
    assert_same_run(tmp_path / "run", finished)


def test_a_run_ends_if_no_engine_is_left_and_continues_later(arguments, target_path, tmp_path):
    address = Address("", path=str(tmp_path / "engine"))
    engine = StateEngine(target_path, address)

    def die():
        while not (tmp_path / "run" / "step-2").exists():
            time.sleep(0.001)
        engine.close()

    thread = threading.Thread(target=die)
    thread.start()
    flags = arguments(tmp_path / "run", states__endpoint=address, states__timeout=0.5, checkpoint__every=1)
    message = refusal([*flags, "--optim.steps=12"])
    thread.join()
    assert "states.endpoint" in message
    assert "continues from the newest checkpoint" in message
    engine = StateEngine(target_path, address)
    main(arguments(tmp_path / "whole", states__endpoint=address, optim__steps=12))
    main([*flags, "--optim.steps=12"])
    engine.close()
    expected = weights(tmp_path / "whole", 12)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "run", 12).items())


def test_the_run_starts_an_engine_and_ends_it(arguments, finished, tmp_path):
    before = children(os.getpid())
    main([*arguments(tmp_path / "run"), "--states.engine.device=cpu"])
    assert children(os.getpid()) == before
    assert_same_run(tmp_path / "run", finished)


@pytest.mark.slow
def test_two_processes_share_a_started_engine_of_two_ranks(arguments, tmp_path):
    flags = arguments(tmp_path / "run")
    end_program(start_program(ROOT / "train" / "eagle3.py", *flags, num_processes=2))
    flags = arguments(tmp_path / "remote")
    end_program(
        start_program(
            ROOT / "train" / "eagle3.py", *flags, "--states.engine.device=cpu", "--states.engine.tp=2", num_processes=2
        )
    )
    for line, expected in zip(records(tmp_path / "remote"), records(tmp_path / "run"), strict=True):
        assert line == pytest.approx(expected, rel=1e-4)  # ranks add in another order


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_reported(arguments, tmp_path):
    program = start_program(ROOT / "train" / "eagle3.py", *arguments(tmp_path / "run"), "--states.engine.tpp=2")
    printed, _ = program.communicate(timeout=300)
    assert program.returncode == 1
    assert "states.engine has no option tpp" in printed
    assert "ended with status 1" in printed


def test_options_that_do_not_go_together(arguments, tmp_path, exits):
    for flags, sentence in (
        (["--states.endpoint=nowhere"], "states.endpoint is 'nowhere'; give HOST:PORT"),
        (["--states.endpoint=/a/b", "--states.devices=1"], "give either"),
        (["--states.endpoint=/a/b", "--data.aux_states=/x"], "data.aux_states is given together with states.endpoint"),
        (["--states.endpoint=/a/b", "--target_sharding=all"], "target_sharding is given together with"),
        (["--states.dtype=fp8"], "needs an engine"),
    ):
        with exits(sentence):
            main([*arguments(tmp_path / "run"), *flags])


def test_another_target_is_refused(arguments, gemma_path, tmp_path):
    engine = StateEngine(gemma_path, Address("", path=str(tmp_path / "engine")))
    message = refusal(arguments(tmp_path / "run", states__endpoint=engine.address))
    engine.close()
    assert "has another target" in message


@pytest.mark.slow
def test_kills_at_random_points_lose_nothing(arguments, tmp_path):
    """The trainer dies, and the engine that it has started."""
    main(arguments(tmp_path / "expected", optim__steps=40))
    flags = arguments(tmp_path / "run", optim__steps=40, checkpoint__every=2)
    chance = random.Random(5)
    for kill in ("trainer", "engine", "trainer", "engine"):
        program = start_program(ROOT / "train" / "eagle3.py", *flags, "--states.engine.device=cpu")
        while program.poll() is None and not children(program.pid):
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 8.0))
        victims = [program.pid] if kill == "trainer" else children(program.pid)
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        program.communicate(timeout=120)
    end_program(start_program(ROOT / "train" / "eagle3.py", *flags, "--states.engine.device=cpu"))
    expected = weights(tmp_path / "expected", 40)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "run", 40).items())


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
