"""Addresses of engines that give states. Imports no torch, so that programs can check options at once."""

import socket
from typing import NamedTuple


class Address(NamedTuple):
    """Where an engine listens: a host and a port, or a path."""

    host: str
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, option: str, text: str) -> "Address":
        """Raises ValueError naming `option` for anything but HOST:PORT, PORT or a path with a slash."""
        if "/" in text:
            return cls("", path=text)
        host, _, port = text.rpartition(":")
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{option} is {text!r}; give HOST:PORT, such as 127.0.0.1:8100, or the path of a socket")
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    @property
    def family(self) -> int:
        if self.path:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def place(self) -> str | tuple[str, int]:
        """The argument of `bind` and `connect`."""
        return self.path or (self.host, self.port)
