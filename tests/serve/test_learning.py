"""The engine's end of learning: texts that opted out never reach the trainer, and a trainer that dies is replaced."""

import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch

from slipstream.models.files.atomic import atomic_folder
from slipstream.models.files.learning import LearnJob, Line, Load, ServedText, StateQuestion, Verdict
from slipstream.models.files.outputs import CHECKPOINT
from slipstream.models.files.state_store import encode
from slipstream.models.targets.frozen import load_frozen_target
from slipstream.serve import cli
from slipstream.serve.engine import learning
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.learning import Learner, Unsent
from slipstream.serve.engine.state_passes import StatePasses
from slipstream.serve.http.engine_client import EngineClient
from slipstream.serve.options import LearnOptions, ServeConfig
from slipstream.serve.request import Request, SamplingParams
from slipstream.tests.serve.engine_runs import build_engine, make_request, run
from slipstream.tests.serve.fake_server import wait_until
from slipstream.tests.sources import ROOT, TINY
from slipstream.tests.tables import each_case
from slipstream.tests.user_errors import user_error

DRAFT = ROOT / "tests" / "assets" / "eagle3"


def memory_of(pid: int) -> Iterator[bytes]:
    """Dumps what a process has written to: its private memory, region by region."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            first, last, mode = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
            if mode != "rw-p" or "[vvar" in line:
                continue
            memory.seek(int(first, 16))
            yield memory.read(int(last, 16) - int(first, 16))


def names_in_memory(pid: int, spans: dict[str, bytes]) -> set[str]:
    return {name for region in memory_of(pid) for name, span in spans.items() if span in region}


def ask(engine: Engine, salt: str, first: int) -> dict[str, bytes]:
    """Asks eight questions. Returns the bytes of the states of each text, in its middle, as they came and in fp8."""
    spans = {}
    note = engine.on_states

    def listen(sequence, read):
        states = read(len(sequence.tokens))
        middle = states[len(states) // 2]
        spans[f"raw {sequence.request.id}"] = middle.numpy().tobytes()
        spans[sequence.request.id] = encode(middle, "fp8")[0].view(torch.uint8).numpy().tobytes()
        note(sequence, read)

    engine.on_states = listen
    params = SamplingParams(max_tokens=12, temperature=0.0)
    questions = {str(number): [1, 300 + number, 17, 25] for number in range(first, first + 8)}
    run(engine, [Request(id=name, prompt=ids, params=params, namespace=salt) for name, ids in questions.items()])
    engine.on_states = note
    return spans


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_states_arrive_as_they_were(dtype):
    ends = socket.socketpair()
    sender, receiver = map(Line, ends)
    states = torch.randn(3, 7, 8).to(dtype)
    for values in (states, states.transpose(0, 1)):
        sender.send(ServedText("a", [1, 2], 1, values))
        text = receiver.receive()
        assert (text.client, text.tokens, text.num_prompt, text.scales) == ("a", [1, 2], 1, None)
        assert text.states.dtype == dtype
        assert torch.equal(text.states.float(), values.float())
    ends[0].sendall(pickle.dumps(text)[:-1])
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        receiver.receive()
    for end in ends:
        end.close()


def test_a_server_goes_on_from_what_an_earlier_one_has_learnt(tmp_path):
    """Not from drafts of others, nor from other folders, which stay as they are."""
    output = tmp_path / "learnt"
    options = {"target": str(TINY), "draft": str(DRAFT)}
    config = ServeConfig(**options, learn=LearnOptions(device="cpu", output=str(output)))
    config.check_inputs()
    assert config.go_on() is config
    shutil.copytree(DRAFT, output)
    (output / "run.json").write_text(json.dumps({"learned_from": str(DRAFT)}))
    config.check_inputs()
    assert config.go_on().draft == replace(config, draft=f"{DRAFT}/").go_on().draft == str(output)
    (output / "run.json").write_text(json.dumps({"learned_from": "another"}))
    with user_error("was learnt from draft another"):
        config.go_on()
    (output / "thesis.txt").write_text("mine")
    with user_error("thesis.txt"):
        config.check_inputs()
    (output / "thesis.txt").unlink()
    for wrong, sentence in (
        ({"data": str(DRAFT)}, "report.json does not exist"),
        ({"output": str(DRAFT)}, "which is read"),
    ):
        with user_error(sentence):
            ServeConfig(**options, learn=LearnOptions(device="cpu", **wrong)).check_inputs()
        with user_error("nothing learns"):
            LearnOptions(**wrong)


def test_two_servers_do_not_learn_into_one_folder(tmp_path, capfd):
    """Not by another name of it either, nor once what was learnt has taken its place."""
    output = tmp_path / "learnt"
    options = {"target": str(TINY), "draft": str(DRAFT), "port": 0}
    (tmp_path / "link").symlink_to(output)
    first, second = (
        ServeConfig(**options, learn=LearnOptions(device="cpu", output=str(tmp_path / name)))
        for name in ("learnt", "link")
    )
    with first.lock_output():
        with atomic_folder(output, CHECKPOINT.check) as new:
            shutil.copytree(DRAFT, new, dirs_exist_ok=True)
        (output / "run.json").write_text(json.dumps({"learned_from": str(DRAFT)}))
        assert cli.run(second, EngineClient()) == 1
    assert f"learn.output {tmp_path}/link is being written by process {os.getpid()} on host" in capfd.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"learnt", "link"}


@each_case()
def test_a_gpu_of_the_engine_is_known(device, engine_device, tp, shared):
    plan = SimpleNamespace(device=SimpleNamespace(type=engine_device), config=SimpleNamespace(tp=tp))
    assert learning.is_shared(device, plan) == shared


def test_a_gpu_of_the_engine_without_room_is_refused(monkeypatch, capfd):
    """Before the engine loads anything."""
    monkeypatch.setattr(learning, "is_shared", lambda *_: True)
    config = learning.with_states(ServeConfig(target=str(TINY), draft=str(DRAFT), device="cpu"))
    monkeypatch.setattr(learning, "MODULE", "slipstream.no_such_module")
    with user_error(r"learn\.device is cuda:0, where training does not start \(status 1, "):
        Learner(config, LearnOptions(device="cuda:0"))
    assert "no_such_module" in capfd.readouterr().err
    with user_error(r"learn\.share is 1\.5"):
        LearnOptions(share=1.5)


@each_case()
def test_weights_that_pass_after_their_trainers_end_are_saved(outcomes, is_saved, tmp_path, monkeypatch):
    """A program that offers a draft and ends stands for the trainer; `outcomes` follow."""
    folder = tmp_path / "learnt"
    program = "import sys, socket; from slipstream.models.files.learning import Line, Offer; "
    program += f"Line(socket.socket(fileno=int(sys.argv[1]))).send(Offer({str(DRAFT)!r}, 1.0, 2.0, {{}}))"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda argv, **options: start([argv[0], "-c", program, argv[4]], **options)
    )
    config = learning.with_states(ServeConfig(target=str(TINY), draft=str(DRAFT), device="cpu"))
    offers = []
    with closing(Learner(config, LearnOptions(device="cpu", output=str(folder)))) as learner:
        learner.attach(build_engine(TINY, DRAFT, device="cpu"), offers.append, lambda call: call())
        wait_until(lambda: bool(learner._orphan), "the trainer has ended")
        assert [offer.folder for offer in offers] == [str(DRAFT)]
        for outcome in outcomes:
            learner.judge(outcome)
    assert (folder / "config.json").is_file() == is_saved


@pytest.fixture
def make_learner(monkeypatch) -> Iterator[Callable[[LearnOptions], tuple[Engine, Learner]]]:
    monkeypatch.setattr(learning, "LEAST_SECONDS", 0.0)
    learners = []

    def make(options):
        config = learning.with_states(ServeConfig(target=str(TINY), draft=str(DRAFT), device="cpu"))
        engine = build_engine(TINY, DRAFT, device="cpu", keep_states=config.keep_states)
        learners.append(Learner(engine.config, options))
        learners[-1].attach(engine, offers.append, lambda call: call())
        return engine, learners[-1]

    offers = []
    yield make
    for learner in learners:
        learner.close()
        assert not psutil.pid_exists(learner.process.pid)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_of_a_tenant_that_opted_out_is_in_the_trainers_memory(make_learner):
    """Texts of others are, those from before and after."""
    engine, learner = make_learner(LearnOptions(device="cpu"))
    shared = ask(engine, "", 0)
    private = ask(engine, "salt", 50)
    shared |= ask(engine, "", 100)
    pid = learner.process.pid
    assert len(shared) == 32
    assert len(private) == 16
    wait_until(lambda: "107" in names_in_memory(pid, {"107": shared["107"]}), "the last text arrives")
    names = names_in_memory(pid, shared | private)
    assert {name for name in names if "raw" not in name} == {name for name in shared if "raw" not in name}
    assert names <= shared.keys(), "what came may still lie in memory that was freed"
    assert learner.num_dropped == 0


def test_states_that_a_trainer_asks_for_are_the_targets(make_learner, monkeypatch):
    """Without memory for them, or of ids that are no tokens, there are none, and the next ones come."""
    engine, learner = make_learner(LearnOptions(device="cpu"))
    layers = engine.config.keep_states
    target = load_frozen_target(TINY, layers, torch.device("cpu"))
    ends = [Line(end) for end in socket.socketpair()]
    for unknown in (-1, engine.info.vocab_size, 1 << 40):
        learner.answer(StateQuestion([[3, unknown, 4]]), ends[0])
        assert len(ends[1].receive().states) == 0
    compute = StatePasses.compute
    for lengths, has_memory in (((2,), True), ((9,), False), ((40, 7), True)):
        documents = [list(range(3, 3 + length)) for length in lengths]
        error = Mock(side_effect=torch.OutOfMemoryError)
        monkeypatch.setattr(StatePasses, "compute", compute if has_memory else error)
        learner.answer(StateQuestion(documents), ends[0])
        states = ends[1].receive().states
        if not has_memory:
            assert len(states) == 0
            continue
        for tokens, part in zip(documents, states.split(lengths), strict=True):
            expected, _ = target.aux_states(torch.tensor([tokens]), torch.arange(len(tokens))[None])
            torch.testing.assert_close(part.flatten(1), expected[0])


@pytest.mark.slow
def test_a_trainer_beside_the_engine_is_told_of_work(monkeypatch):
    """It starts with a tenth of the time, and is ready before the engine takes memory."""
    monkeypatch.setattr(learning, "is_shared", lambda *_: True)
    config = learning.with_states(ServeConfig(target=str(TINY), draft=str(DRAFT), device="cpu"))
    with closing(Learner(config, LearnOptions(device="cpu"))) as learner:
        job = LearnJob(**json.loads(psutil.Process(learner.process.pid).cmdline()[-1]))
        assert job.share == 0.1
        load = Load(job.folder)
        engine = build_engine(TINY, DRAFT, device="cpu", keep_states=config.keep_states)
        learner.attach(engine, lambda _: None, lambda call: call())
        engine.add(make_request("a", [1, 2, 3]))
        assert load.is_busy()
        while engine.has_work:
            engine.step()
        assert load.is_busy(), "another request may follow"
        assert not engine.work_idle()
        assert not load.is_busy()


def serve_and_learn(output: str, end: Connection):
    """A server whose trials all pass. Never ends."""
    config = learning.with_states(ServeConfig(target=str(TINY), draft=str(DRAFT), device="cpu"))
    learner = Learner(config, LearnOptions(device="cpu", output=output))
    end.send((learner.process.pid, learner._folder.name))
    engine = build_engine(TINY, DRAFT, device="cpu", keep_states=config.keep_states)
    learner.attach(engine, lambda _: learner.judge("passed"), lambda call: call())
    for first in range(0, 64, 8):
        ask(engine, "", first)
    threading.Event().wait()


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starts", "learns"])
def test_a_killed_server_leaves_what_passed_and_nothing_else(tmp_path, moment):
    """Neither process nor file, while the trainer loads or trains; another server goes on."""
    output = tmp_path / "learnt"
    config = ServeConfig(target=str(TINY), draft=str(DRAFT), learn=LearnOptions(device="cpu", output=str(output)))
    context = multiprocessing.get_context("spawn")
    end, other = context.Pipe()
    server = context.Process(target=serve_and_learn, args=(str(output), other))
    server.start()
    trainer, folder = end.recv()
    assert is_alive(trainer)
    assert Path(folder).is_dir()
    if moment == "learns":
        wait_until(output.is_dir, "weights pass")
    server.kill()
    server.join()
    wait_until(lambda: not is_alive(trainer), "the trainer ends")
    assert not Path(folder).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["learnt"] * (moment == "learns")
    with config.lock_output():
        draft = config.go_on().draft
    assert draft == str(output if moment == "learns" else DRAFT)
    engine = build_engine(TINY, draft, device="cpu")
    (answer,) = run(engine, [make_request("a", [1, 301, 17, 25], max_tokens=12)]).values()
    assert len(answer.tokens) == 12


@pytest.mark.slow
def test_a_killed_trainer_is_replaced_and_goes_on_from_what_passed(make_learner, tmp_path, monkeypatch):
    output = tmp_path / "learnt"
    engine, learner = make_learner(LearnOptions(device="cpu", output=str(output)))
    shutil.copytree(DRAFT, output)  # as if it had passed
    killed = learner.process.pid
    line = learner._line
    late = threading.Event()
    learner._unsent.put(Unsent(Verdict("passed"), line, SimpleNamespace(synchronize=late.wait)))
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: learner._line is not line, "another trainer")
    argv = psutil.Process(learner.process.pid).cmdline()
    assert f'"draft": "{output}"' in argv[-1]
    messages = []
    monkeypatch.setattr(learner._line, "send", messages.append)
    late.set()
    assert ask(engine, "", 0)
    wait_until(lambda: len(messages) == 8, "it learns")
    assert {type(message) for message in messages} == {ServedText}, "no verdict on weights of the dead one"
