"""A door that the kernel answers for a busy process.

A heartbeat stops when a process dies, and also when one long call holds the interpreter's lock. A listening socket
tells the two apart: the kernel completes a connection to a process that lives, however busy, refuses it for one that
died, and gives no answer for a host that is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket

_KNOCK_SECONDS = 1.0
_BACKLOG = 1024  # knocks that nobody has looked at yet; more would look like a host that is gone


class Door:
    """A listening socket of this process; `address` is where others knock."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.bind((_own_address(), 0))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        host, port = self._socket.getsockname()
        self.address = f"{host}:{port}"

    def look(self) -> None:
        """Let go of those who knocked."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                visitor, _ = self._socket.accept()
                visitor.close()

    def close(self) -> None:
        self._socket.close()


def knock(address: str) -> bool:
    """Whether the process behind `address` lives."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def _own_address() -> str:
    """The address under which the store's node sees this one. Nothing is sent: the kernel picks a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
