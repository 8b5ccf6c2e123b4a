"""The port of a server. Imports next to nothing, so that a port in use is known before anything is loaded."""

import errno
import socket
from contextlib import suppress


def bind(host: str, port: int) -> socket.socket:
    """Takes the port before anything is loaded; nobody can connect until the server listens. Two sockets that may both
    reuse an address share it until one listens, so a port is only reused where connections of an earlier server linger,
    and this socket lets no other have it: the server sets SO_REUSEADDR again before it listens."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"cannot listen on host {host!r} ({error.strerror}); choose another --host") from error
    listener = socket.socket(family, kind, protocol)
    try:
        with suppress(OSError):
            listener.bind(place)
            return listener
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"cannot listen on host {host!r}: this machine has no such address; choose another --host"
            ) from error
        raise ValueError(f"cannot listen on {host} port {port} ({error.strerror}); choose another --port") from error
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
