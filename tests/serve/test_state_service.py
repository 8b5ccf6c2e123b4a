"""States over a socket: who gets them, in which order, and what damage and strangers do."""

import multiprocessing
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
import torch
from torch import Tensor

from slipstream.models.states.address import Address
from slipstream.models.states.client import StateClient, StateRequest
from slipstream.models.states.shared import DeviceBlock, HostView, Views, memory_name
from slipstream.models.states.wire import HEADER, MAGIC, BrokenError, Connection, RefusedError, connect
from slipstream.models.targets.decoder import load_config
from slipstream.models.targets.frozen import load_frozen_target
from slipstream.serve.engine import state_service
from slipstream.serve.engine.process import Failed, build_engine, start_engine
from slipstream.serve.engine.state_service import MOST_OPEN, SLOTS, bind, open_service
from slipstream.serve.http.guard import Guard
from slipstream.serve.options import ServeConfig
from slipstream.tests.random_targets import FAMILIES, save_random_target
from slipstream.tests.serve.fake_server import serving, wait_until
from slipstream.tests.sources import ROOT
from slipstream.tests.state_engines import CPU, StateEngine, lend
from slipstream.tests.user_errors import user_error

LAYERS = (2, 0)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("target")
    save_random_target(FAMILIES["qwen3"], path)
    return path


@pytest.fixture
def engine(target, tmp_path) -> Iterator[StateEngine]:
    engine = StateEngine(target, Address("", path=str(tmp_path / "engine")), ["first key", "second key"])
    yield engine
    engine.close()


def request(seed: int = 0, size: int = FAMILIES["qwen3"].hidden_size, **changes: Any) -> StateRequest:
    """Two packed rows of two documents each; the states of some of their tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 120, (2, 12), generator=generator, dtype=torch.int32)
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(2), 0]], dtype=torch.int32)
    rows = torch.tensor([0, 1, 2, 5, 6, 12, 13, 14, 20])
    final_rows = torch.tensor([2, 20])
    places = {"aux_states": torch.empty(len(rows), len(LAYERS), size), "final": torch.empty(len(final_rows), size)}
    fields = {"layers": LAYERS, "tokens": tokens, "positions": positions, "rows": rows}
    return StateRequest(**fields | {"final_rows": final_rows, "places": places} | changes)


def expected(target: Path, query: StateRequest) -> tuple[Tensor, Tensor]:
    frozen = load_frozen_target(target, LAYERS, CPU)
    aux_states, final = frozen.aux_states(query.tokens.long(), query.positions.long())
    return aux_states.flatten(0, 1)[query.rows].unflatten(1, (len(LAYERS), -1)), final.flatten(0, 1)[query.final_rows]


def test_states_are_those_of_the_target_in_process(target, engine):
    client = StateClient("endpoint", [engine.address], "second key", 5.0)
    check_states(client, target, [request(seed) for seed in range(7)])
    client.close()


def check_states(client: StateClient, target: Path, requests: list[StateRequest]):
    futures = [client.ask(query) for query in requests]
    for query, future in zip(requests, futures, strict=True):
        future.result(60)
        for name, states in zip(("aux_states", "final"), expected(target, query), strict=True):
            assert torch.equal(query.places[name], states)


def test_a_client_closes_in_the_middle_of_answers(engine, caplog):
    """Open requests end, and no engine is called lost."""
    client = StateClient("endpoint", [engine.address], "second key", 5.0)
    futures = [client.ask(request(seed)) for seed in range(20)]
    futures[0].result(30)
    client.close()
    for future in futures[1:]:
        with suppress(ValueError):
            future.result(30)
    with user_error("the connection to endpoint was closed"):
        client.ask(request()).result(30)
    wait_until(lambda: client.links[0].connection is None, "the end of the connection")
    assert not [record for record in caplog.records if record.name == "slipstream.models.states.client"]


@pytest.mark.parametrize(("key", "sentence"), [(None, "asks for a key"), ("wrong", "not one of the engine's")])
def test_nobody_gets_anything_without_a_key(engine, key, sentence):
    with pytest.raises(RefusedError, match=sentence):
        StateClient("endpoint", [engine.address], key, 5.0)
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(engine.address.place)
        stranger = Connection(end)
        assert set(stranger.receive().fields) == {"nonce", "has_key"}
        with suppress(ConnectionError):
            stranger.send("ask", request().fields, request().tensors)  # before a proof
        with pytest.raises(ConnectionError):
            stranger.receive()
    assert engine.num_passes == 0


def test_an_impostor_without_the_key_is_refused(tmp_path):
    path = str(tmp_path / "impostor")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def pretend():
        connection = Connection(listener.accept()[0])
        connection.send("challenge", {"nonce": "1", "has_key": True})
        connection.receive()
        connection.send("welcome", {"proof": "", "facts": {}})

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(RefusedError, match="does not know the key"):
        connect(Address("", path=path), "first key", 5.0)


class Proxy:
    """Passes bytes on between clients and an engine; damages the answers of the first connections, or cuts them."""

    def __init__(self, target: Address, path: str, manners: list[str]):
        self.target = target
        self.manners = manners
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            engine = socket.socket(socket.AF_UNIX)
            engine.connect(self.target.place)
            manner = self.manners.pop(0) if self.manners else "honest"
            for source, sink, how in ((client, engine, "honest"), (engine, client, manner)):
                threading.Thread(target=self.copy, args=(source, sink, how), daemon=True).start()

    @staticmethod
    def copy(source: socket.socket, sink: socket.socket, manner: str):
        count = 0
        with suppress(OSError):  # the other thread has closed both
            while data := bytearray(source.recv(1000)):
                if manner == "damage" and count > 1000:
                    data[len(data) // 2] ^= 1
                if manner == "cut" and count > 1000:
                    break
                sink.sendall(data)
                count += len(data)
        for end in (source, sink):
            end.close()


def test_damage_and_cuts_are_noticed_and_asked_again(target, engine, tmp_path):
    path = str(tmp_path / "proxy")
    Proxy(engine.address, path, ["damage", "cut", "damage"])
    client = StateClient("endpoint", [Address("", path=path)], "first key", 5.0)
    check_states(client, target, [request(seed) for seed in range(5)])
    client.close()


def test_a_request_that_always_fails_ends(engine, tmp_path):
    path = str(tmp_path / "proxy")
    Proxy(engine.address, path, ["damage"] * 20)
    client = StateClient("endpoint", [Address("", path=path)], "first key", 5.0)
    with user_error("a request has failed 5 times"):
        client.ask(request()).result(60)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers": (2, 9)}, "name distinct states"),
        ({"tokens": torch.full((2, 12), 5000, dtype=torch.int32)}, "outside the vocabulary"),
        ({"positions": torch.full((2, 12), 3, dtype=torch.int32)}, "do not count documents"),
        ({"rows": torch.tensor([24])}, "outside the text"),
        ({"positions": torch.zeros(1, 12, dtype=torch.int32)}, "tokens"),
        ({"tokens": torch.zeros(2, 12, dtype=torch.float8_e4m3fn)}, "no request"),
        ({"layers": ("x" * 60_000,)}, "no request"),
        ({"layers": (0.5,)}, "layers must be whole numbers"),
    ],
)
def test_wrong_requests_are_refused_and_others_go_on(engine, changes, sentence):
    client = StateClient("endpoint", [engine.address], "first key", 5.0)
    futures = [client.ask(request()), client.ask(request(**changes)), client.ask(request(2))]
    with pytest.raises(RefusedError, match=sentence):
        futures[1].result(30)
    futures[0].result(30)
    futures[2].result(30)
    client.close()


NO_FRAMES = (
    b"null",
    b"[" * 60_000,
    b"[1, {}, []]",
    b'["ask", [], []]',
    b'["ask", {}, [["tokens", "int32", [-1, -1]]]]',
    b'["ask", {}, [["tokens", "int32", [1e999]]]]',
    b'["ask", {}, [["tokens", "complex", [1]]]]',
    b'["ask", {}, [["tokens", "int32", [1]], ["rows", "int32", [0, 1%s]]]]' % (b"0" * 30),
)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "hello", [{"proof": "é", "nonce": "1"}, {"proof": "\ud800", "nonce": "\ud800"}, {"proof": [], "nonce": {}}]
)
def test_a_proof_may_be_anything(engine, hello):
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(engine.address.place)
        stranger = Connection(end)
        stranger.receive()
        stranger.send("hello", hello)
        assert stranger.receive().kind == "refusal"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_no_frame_ends_its_connection_alone(engine):
    client = StateClient("endpoint", [engine.address], "first key", 5.0)
    for meta in NO_FRAMES:
        stranger, _ = connect(engine.address, "first key", 5.0)
        stranger.end.sendall(HEADER.pack(MAGIC, len(meta), 4 * meta.startswith(b'["ask", {}')) + meta)
        with pytest.raises(BrokenError, match="closed the connection"):
            stranger.receive()
        client.ask(request()).result(30)
    client.close()


def test_a_fault_of_the_system_ends_no_service(engine, monkeypatch, caplog):
    """As when this process has too many files open."""
    monkeypatch.setattr(state_service, "RETRY_SECONDS", 0.01)
    service = engine.service
    monkeypatch.setattr(service, "listener", Mock(accept=Mock(side_effect=OSError(24, "Too many open files"))))
    connect(engine.address, "first key", 5.0)[0].close()  # `accept` has been called before
    wait_until(lambda: "Too many open files" in caplog.text, "a line of the log")
    monkeypatch.undo()
    connect(engine.address, "first key", 5.0)[0].close()


def test_more_connections_than_there_are_places_are_turned_away(engine, monkeypatch):
    monkeypatch.setattr("slipstream.serve.engine.state_service.MOST_CONNECTIONS", 2)
    client = StateClient("endpoint", [engine.address], "first key", 5.0)
    other, _ = connect(engine.address, "first key", 5.0)
    with pytest.raises(ConnectionError):
        connect(engine.address, "first key", 5.0)
    client.ask(request()).result(30)
    other.close()
    wait_until(lambda: engine.service.num_connections == 1, "the end of a connection")
    connect(engine.address, "first key", 5.0)[0].close()
    client.close()


def test_a_client_that_reads_nothing_holds_few_requests_and_others_are_served(engine):
    connection, _ = connect(engine.address, "first key", 30.0)
    connection.end.settimeout(0.3)
    query = request()
    query.tokens = query.tokens.repeat(1, 300)  # a long answer, which fills the socket
    query.positions = torch.arange(3600, dtype=torch.int32).expand(2, -1).contiguous()
    query.rows = torch.arange(7200).repeat(8)
    with suppress(TimeoutError):
        for number in range(200):
            connection.send("ask", query.fields, query.tensors)
            assert number < 150, "nobody holds it back"
    other = StateClient("endpoint", [engine.address], "second key", 30.0)
    other.ask(request()).result(30)
    assert engine.num_passes <= 2 * MOST_OPEN + 2
    other.close()
    connection.close()


def test_a_refusal_ends_all_connections(engine, tmp_path):
    """Another target, engines that differ, and one of several that does not answer."""
    save_random_target(FAMILIES["gemma3"], tmp_path / "other")
    other = StateEngine(tmp_path / "other", Address("", path=str(tmp_path / "second")), ["first key"])
    client = StateClient("endpoint", [engine.address], "first key", 60)
    with user_error("has another target"):
        client.check_target("0" * 64)
    for address, sentence in ((other.address, "engines that differ"), (Address("", path="none"), "does not answer")):
        with user_error(sentence):
            StateClient("endpoint", [engine.address, address], "first key", 0.1)
    wait_until(lambda: not engine.service.num_connections, "the end of all connections")
    other.close()


def test_an_engine_that_ends_keeps_no_client_that_it_greets(target, tmp_path, monkeypatch):
    engine = StateEngine(target, Address("", path=str(tmp_path / "engine")))
    greet = state_service.greet_client

    def greet_and_end(*args):
        result = greet(*args)
        engine.service.close()
        return result

    monkeypatch.setattr(state_service, "greet_client", greet_and_end)
    connection, _ = connect(engine.address, None, 60)
    wait_until(lambda: not engine.service.num_connections, "the end of the connection")
    connection.close()
    engine.close()


def test_clients_take_turns(target, tmp_path):
    engine = StateEngine(target, Address("", path=str(tmp_path / "engine")))
    clients = [StateClient("endpoint", [engine.address], None, 30.0) for _ in range(3)]
    futures = [[client.ask(request(seed)) for seed in range(6)] for client in clients]
    ends = []
    for index, answers in enumerate(futures):
        answers[-1].add_done_callback(lambda _, index=index: ends.append(index))
    for answers in futures:
        for future in answers:
            future.result(30)
    assert sorted(ends) == [0, 1, 2]
    assert engine.num_passes == 18
    engine.close()


@pytest.mark.slow
def test_a_server_gives_states_beside_its_answers(tmp_path):
    """With two ranks; the answers are those of a server that gives none."""
    target = ROOT / "assets" / "tiny-target"
    size = load_config(target).hidden_size
    path = str(tmp_path / "states")
    body = {"prompt": [5, 9, 33], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def ask(server, texts):
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        texts.append(str(answer["choices"][0]["token_ids"]))

    options = {"target": str(target), "port": 0, "kv_cache_tokens": 256}
    texts = []
    with serving(ServeConfig(**options), build_engine) as server:
        ask(server, texts)
    with serving(ServeConfig(**options, tp=2, states=path), build_engine) as server:
        client = StateClient("endpoint", [Address("", path=path)], None, 30.0)
        asking = threading.Thread(target=ask, args=(server, texts))
        asking.start()
        requests = [request(seed, size) for seed in range(20)]
        for future in [client.ask(query) for query in requests]:
            future.result(60)
        asking.join()
        client.close()
    assert len(set(texts)) == 1
    for query in requests[:3]:
        aux_states, final = expected(target, query)
        torch.testing.assert_close(query.places["aux_states"], aux_states, rtol=1e-4, atol=1e-5)  # two ranks add
        torch.testing.assert_close(query.places["final"], final, rtol=1e-4, atol=1e-5)


def test_an_address_that_others_reach_needs_a_key(monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    nothing = None
    config = ServeConfig(target="x", states="0.0.0.0:8199")
    for start in (Guard.of, partial(open_service, engine_path=Path(), passes=nothing, post=nothing, listener=nothing)):
        with user_error("there is no API key; add --api-key-file"):
            start(config)
    Guard.of(replace(config, api_key="key"))
    with user_error("states is '8:x'; give HOST:PORT"):
        ServeConfig(target="x", states="8:x")


def test_an_address_that_another_engine_has_is_refused_by_name(engine):
    """Before anything is loaded; also while that one loads, and though connections of the one before linger."""
    path = engine.address.path
    pipe = Mock()
    load = Mock()
    with pytest.raises(SystemExit):
        start_engine(load, ServeConfig(target="x", states=path), pipe, SimpleQueue())
    reason = f"cannot listen at states {path} (Address already in use); choose another --states"
    pipe.send.assert_called_once_with(Failed(reason))
    assert not load.called
    StateClient("endpoint", [engine.address], "first key", 5.0).close()
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        first.accept()[0].close()
    address = Address("127.0.0.1", port)
    with client, bind(address), user_error(f"states {address} .Address already in use"):
        bind(address)


def wide_request(seed: int) -> StateRequest:
    """A request for the states of `seed` + 1 times as many rows, which need no memory yet."""
    query = request(seed)
    query.rows = query.rows.repeat(1 + 1000 * seed)
    query.places["aux_states"] = query.places["aux_states"].repeat(1 + 1000 * seed, 1, 1).to("meta")
    return query


def shared_files() -> int:
    links = Path("/proc/self/fd").iterdir()
    return sum(link.is_symlink() and "memfd:states" in str(link.readlink()) for link in links)


def test_states_pass_through_memory_that_is_freed_with_the_connection(target, engine):
    before = shared_files()
    client = StateClient("endpoint", [engine.address], "first key", 30.0, device=CPU)
    check_states(client, target, [wide_request(seed) for seed in (0, 1, 6, 2, 9, 4)])  # blocks grow
    assert shared_files() > before
    client.close()
    wait_until(lambda: shared_files() == before, "the end of shared memory")


def test_a_client_that_keeps_its_slots_gets_no_more_states(engine):
    memory = memory_name(CPU)
    connection, _ = connect(engine.address, "first key", 30.0, memory)
    query = request()
    for _ in range(4):
        connection.send("ask", query.fields, query.tensors)
    slots = [connection.receive().fields["slot"] for _ in range(2)]
    assert sorted(slots) == [0, 1]
    other = StateClient("endpoint", [engine.address], "second key", 30.0)
    other.ask(request()).result(30)
    assert engine.num_passes == 3
    connection.send("taken", {"slot": slots[1]})
    assert connection.receive().fields["slot"] == slots[1]
    connection.send("taken", {"slot": [7]})
    with pytest.raises(BrokenError):
        connection.receive()
    wait_until(lambda: not shared_files(), "the end of shared memory")
    other.ask(request()).result(30)
    other.close()


def test_a_client_that_asks_on_and_returns_nothing_is_left(engine):
    """Its threads and its memory are free again."""
    connection, _ = connect(engine.address, "first key", 30.0, memory_name(CPU))
    query = request()
    with suppress(ConnectionError):
        for _ in range(MOST_OPEN + SLOTS + 1):
            connection.send("ask", query.fields, query.tensors)
        while connection.receive():
            pass
    wait_until(lambda: not engine.service.num_connections, "the end of the connection")
    wait_until(lambda: not shared_files(), "the end of shared memory")


def flip(view: HostView, place: Tensor):
    place.copy_(view.bytes[: len(place)])
    place[7] ^= 1


def fail(*_: object):
    raise OSError("no such process")


@pytest.mark.parametrize("fault", [{"copy": flip}, {"__init__": fail}])
def test_what_memory_does_not_bring_comes_through_the_socket(target, engine, monkeypatch, caplog, fault):
    for name, function in fault.items():
        monkeypatch.setattr(HostView, name, function)
    client = StateClient("endpoint", [engine.address], "first key", 30.0, device=CPU)
    requests = [request(seed) for seed in range(3)]
    for future in [client.ask(query) for query in requests]:
        future.result(30)
    for query in requests:
        assert torch.equal(query.places["aux_states"], expected(target, query)[0])
    assert caplog.text.count("states come through the socket from now on") == 1
    client.close()


def test_a_request_is_asked_again_as_it_was(target, engine, monkeypatch):
    """Where the engine is lost as its memory has been read: the next one may send states through the socket."""
    send = Connection.send
    query = wide_request(2)
    have_memory = []

    def lose(connection, kind, *args):
        if kind == "ask":
            have_memory.append(not query.places["aux_states"].is_meta)
        if kind == "taken" and len(have_memory) == 1:
            raise BrokenPipeError("lost")
        send(connection, kind, *args)

    monkeypatch.setattr(Connection, "send", lose)
    client = StateClient("endpoint", [engine.address], "first key", 30.0, device=CPU)
    client.ask(query).result(30)
    assert have_memory == [False, False]
    assert torch.equal(query.places["aux_states"], expected(target, query)[0])
    client.close()


def test_another_machine_gets_no_handle(engine, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("slipstream.models.states.client.memory_name", lambda _: "elsewhere")
    client = StateClient("endpoint", [engine.address], "first key", 30.0, device=CPU)
    client.ask(request()).result(30)
    assert not shared_files()
    assert "it can map none of this engine's memory" in caplog.text
    client.close()


def test_memory_without_a_handle_is_freed(monkeypatch):
    class Memory:
        is_free = False

        def tensor(self):
            return torch.zeros(8, dtype=torch.uint8)

        def handle(self):
            raise RuntimeError("operation not supported")

        def free(self):
            self.is_free = True

    memory = Memory()
    monkeypatch.setattr("slipstream.models.states.shared.DeviceMemory", lambda _: memory)
    monkeypatch.setattr("torch.cuda.device", nullcontext)
    with pytest.raises(RuntimeError, match="not supported"):
        DeviceBlock(8, torch.device("cuda", 0))
    assert memory.is_free


@pytest.mark.gpu
def test_memory_of_a_gpu_is_read_by_another_process():
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    sizes = [9, 100, 5_000_000, 70]  # the block grows
    process = context.Process(target=lend, args=(end, sizes))
    process.start()
    views = Views(torch.device("cuda", torch.cuda.device_count() - 1))
    for size in sizes:
        answer = views.take(pipe.recv())
        assert torch.equal(answer["aux_states"].cpu(), torch.arange(size).bfloat16())
        pipe.send("taken")
    views.close()
    pipe.send("closed")
    process.join()
    assert process.exitcode == 0
