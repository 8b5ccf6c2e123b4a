"""The port of a server, taken before anything is loaded. Imports next to nothing."""

import errno
import socket
from contextlib import suppress
from typing import Any


def bind(host: str, port: int) -> socket.socket:
    """Takes the port of an HTTP server. Raises ValueError, in a sentence, if it cannot."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"cannot listen on host {host!r} ({error.strerror}); choose another --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        take(listener, place)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"cannot listen on host {host!r}: this machine has no such address; choose another --host"
            ) from error
        raise ValueError(f"cannot listen on {host} port {port} ({error.strerror}); choose another --port") from error
    return listener


def take(listener: socket.socket, place: tuple[Any, ...] | str) -> None:
    """Binds a socket; nobody can connect until it listens. Two sockets that may both reuse an address share it until
    one listens, so a port is only reused where connections of an earlier server linger, and this socket lets no other
    have it: SO_REUSEADDR is set again before it listens, else its closed connections keep the port. Raises OSError, and
    closes the socket, if others have the port."""
    with suppress(OSError):
        listener.bind(place)
        return
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        listener.close()
        raise


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
