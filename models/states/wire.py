"""Frames of tensors between an engine that gives states and its clients, over a TCP or Unix socket.

A frame is a header, a JSON object that names its tensors, their bytes, and a checksum of these and the object. A
connection begins with a proof of the key in both directions (HMAC over a fresh number of each side), so no key crosses
the network. What follows is not encrypted.
"""

import hmac
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64

from slipstream.models.files.checkpoint import Values
from slipstream.models.states.address import Address

MAGIC = b"SLS1"
HEADER = struct.Struct("!4sIQ")  # magic; bytes of the JSON object; bytes of the tensors
CHECKSUM_BYTES = 8
PIECE_BYTES = 1 << 19  # that are hashed while a core's cache holds them
MOST_META = 1 << 16  # bytes of a JSON object
MOST_BODY = 1 << 40  # bytes of tensors, unless a reader knows better
GREETING_SECONDS = 10.0  # for the proofs of the key
KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # finds a machine that is gone in 30 s
NAMES = {"int32": torch.int32, "int64": torch.int64, "bool": torch.bool, "fp8": torch.float8_e4m3fn}
NAMES |= {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES_OF = {dtype: name for name, dtype in NAMES.items()}

Allocate = Callable[[str, tuple[int, ...], torch.dtype], Tensor]


class BrokenError(ConnectionError):
    """A connection that ended, or that brought something else than frames."""


class RefusedError(ValueError):
    """The other side refuses: asking again does not help."""


class Frame(NamedTuple):
    kind: str
    fields: Values
    tensors: Mapping[str, Tensor]


@dataclass(slots=True)
class Connection:
    """An end of a connection. One thread may send and another receive at the same time."""

    end: socket.socket

    def __post_init__(self) -> None:
        # Buffers keep the sizes that the system finds: large ones leave a core's cache, and cost a third of the rate.
        if self.end.family != socket.AF_UNIX:
            self.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    self.end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, kind: str, fields: Values, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Sends contiguous tensors of the host. Raises OSError if the other side is gone."""
        tensors = tensors or {}
        shapes = [[name, NAMES_OF[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
        meta = json.dumps([kind, fields, shapes]).encode()
        assert len(meta) <= MOST_META
        parts = [memory_of(tensor) for tensor in tensors.values()]
        head = HEADER.pack(MAGIC, len(meta), sum(map(len, parts)))
        digest = xxh3_64(meta)
        self.end.sendall(head + meta)
        for piece in pieces(parts):
            digest.update(piece)
            self.end.sendall(piece)
        self.end.sendall(digest.digest())

    def receive(self, allocate: Allocate | None = None, *, limit: int = MOST_BODY) -> Frame:
        """Waits for a frame. `allocate` makes the tensors (name, shape, dtype) that its bytes are written into;
        `limit`: most bytes of these. Raises BrokenError at the end of the connection, for a wrong checksum and for
        other bytes; TimeoutError."""
        magic, meta_size, size = HEADER.unpack(read_bytes(self.end, HEADER.size))
        if magic != MAGIC or meta_size > MOST_META or size > limit:
            raise BrokenError("the other side sends no frames of this version, or too large ones")
        meta = read_bytes(self.end, meta_size)
        try:
            kind, fields, shapes = json.loads(meta)
            listed = [(str(name), tuple(map(int, shape)), NAMES[dtype]) for name, dtype, shape in shapes]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise BrokenError("a frame is damaged") from error
        sizes = [prod(shape) * dtype.itemsize for _, shape, dtype in listed]
        is_whole = all(number >= 0 for _, shape, _ in listed for number in shape) and sum(sizes) == size
        are_strides = all(prod(number or 1 for number in shape) <= MOST_BODY for _, shape, _ in listed)
        if not (is_whole and are_strides) or not isinstance(kind, str) or not isinstance(fields, dict):
            raise BrokenError("a frame is damaged")
        allocate = allocate or (lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
        tensors = {name: allocate(name, shape, dtype) for name, shape, dtype in listed}
        digest = xxh3_64(meta)
        for piece in pieces(memory_of(tensor) for tensor in tensors.values()):
            read_into(self.end, piece)
            digest.update(piece)
        if digest.digest() != read_bytes(self.end, CHECKSUM_BYTES):
            raise BrokenError("a frame has another checksum than its bytes")
        return Frame(kind, fields, tensors)

    def wake(self) -> None:
        """Ends calls of other threads that wait for frames; the other side notices nothing yet."""
        with suppress(OSError):  # it has ended
            self.end.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Ends the connection, and calls of other threads that wait for it."""
        with suppress(OSError):  # it has ended
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host; writing there changes it."""
    assert tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def pieces(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            yield part[start : start + PIECE_BYTES]


def read_bytes(end: socket.socket, size: int) -> bytearray:
    place = bytearray(size)
    read_into(end, memoryview(place))
    return place


def read_into(end: socket.socket, place: memoryview) -> None:
    while len(place):
        count = end.recv_into(place)
        if not count:
            raise BrokenError("the other side has closed the connection")
        place = place[count:]


def proof(key: str, role: str, nonces: str) -> str:
    return hmac.digest(key.encode(), f"{role} {nonces}".encode(errors="surrogatepass"), "sha256").hex()


def is_proof(claim: object, key: str, role: str, nonces: str) -> bool:
    return hmac.compare_digest(proof(key, role, nonces).encode(), str(claim).encode(errors="surrogatepass"))


def greet_client(connection: Connection, keys: Sequence[str], facts: Values, memory: str) -> bool:
    """Lets a client prove that it has one of `keys` (none: anybody may come), and proves to have it, too; `facts` go to
    the client. Returns whether it maps `memory`, as `connect` names it. Raises RefusedError for a client without."""
    connection.end.settimeout(GREETING_SECONDS)
    nonce = secrets.token_hex(16)
    connection.send("challenge", {"nonce": nonce, "has_key": bool(keys)})
    fields = connection.receive(limit=0).fields
    nonces = f"{nonce} {fields.get('nonce')}"
    accepted = [key for key in keys if is_proof(fields.get("proof"), key, "client", nonces)]
    if keys and not accepted:
        connection.send("refusal", {"error": "the key is not one of the engine's"})
        raise RefusedError("a client has no key of this engine")
    answer = proof(accepted[0], "engine", nonces) if accepted else ""
    connection.send("welcome", {"proof": answer, "facts": facts})
    connection.end.settimeout(None)
    return bool(fields.get("memory") == proof(memory, "memory", nonces))


def connect(address: Address, key: str | None, timeout: float, memory: str = "") -> tuple[Connection, dict[str, Any]]:
    """Connects to an engine and returns its facts. `memory`: a name of what this process could map, which only an
    engine with the same learns. Raises OSError if there is none, and RefusedError if it does not accept the key, or has
    another itself."""
    end = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        end.settimeout(GREETING_SECONDS)
        end.connect(address.place)
        connection = Connection(end)
        challenge = connection.receive(limit=0).fields
        if challenge.get("has_key") and key is None:
            raise RefusedError(f"the engine at {address} asks for a key; name its file in api_key_file")
        nonce = os.urandom(16).hex()
        nonces = f"{challenge.get('nonce')} {nonce}"
        claims = {"proof": proof(key or "", "client", nonces), "memory": memory and proof(memory, "memory", nonces)}
        connection.send("hello", {"nonce": nonce, **claims})
        welcome = connection.receive(limit=0)
        if welcome.kind == "refusal":
            raise RefusedError(f"the engine at {address} refuses: {welcome.fields.get('error')}")
        is_proven = is_proof(welcome.fields.get("proof"), key or "", "engine", nonces)
        if challenge.get("has_key") and not is_proven:
            raise RefusedError(f"the engine at {address} does not know the key")
        end.settimeout(timeout)
        return connection, welcome.fields["facts"]
    except BaseException:
        end.close()
        raise
