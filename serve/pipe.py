"""Messages between the server's process and the engine's over a pair of sockets: an 8-byte length, then a pickle.

The engine's end blocks; the server's is an asyncio stream, so that neither a full pipe nor half a message stops its
event loop.
"""

import asyncio
import pickle
import socket
import struct
from typing import Any

HEADER = struct.Struct("!Q")


def frame(message: object) -> bytes:
    payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(payload)) + payload


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises EOFError or OSError when there will be none."""
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return pickle.loads(await reader.readexactly(size))


class Pipe:
    """The engine's end. One thread may send while another one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._file = end, end.makefile("rb")

    def send(self, message: object) -> None:
        """Raises ConnectionError if the server has hung up."""
        self._socket.sendall(frame(message))

    def receive(self) -> Any:
        """Raises EOFError or OSError when there will be no more messages."""
        (size,) = HEADER.unpack(self._read(HEADER.size))
        return pickle.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data
