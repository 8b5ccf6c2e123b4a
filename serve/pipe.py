"""A stream of pickled messages over a socket, between a server and its engine and between ranks. Imports no torch.

A message travels as an 8-byte length and a pickle.
"""

import pickle
import socket
import struct
import threading
from typing import Any

HEADER = struct.Struct("!Q")


class Pipe:
    """Threads may send, and one may receive, at the same time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._file = end.makefile("rb")

    def send(self, message: object) -> None:
        """Raises OSError where the other end is closed."""
        self.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_bytes(self, payload: bytes) -> None:
        with self._sending:
            self._socket.sendall(HEADER.pack(len(payload)) + payload)

    def receive(self) -> Any:
        """Blocks for the next message. Raises EOFError or OSError at the end."""
        return pickle.loads(self._read(*HEADER.unpack(self._read(HEADER.size))))

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def close(self) -> None:
        self._file.close()
        self._socket.close()
