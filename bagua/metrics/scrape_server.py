"""An HTTP server for scrapes within a training process: connections are few, and none stays open for long."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from typing import Any

__all__ = ["ScrapeServer"]

_MOST = 16  # connections; one more ends the oldest
_LONGEST_S = 10.0  # for a request and its answer
_LOOK_S = 0.5
_PAUSE_S = 0.05


class ScrapeServer(socketserver.ThreadingTCPServer):
    """Serves in threads of its own until it is closed.

    Args:
        address: name or address to bind.
        port: 0 chooses a free one; see `port`.
        handler: of requests, `http.server.BaseHTTPRequestHandler` with its methods.

    Raises:
        OSError: the port is in use, or the address is not one of this host.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: str, port: int, handler: type[socketserver.BaseRequestHandler]) -> None:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = found[0]
        self._begun: dict[Any, float] = {}  # by connection, the oldest first
        self._lock = threading.Lock()  # of `_begun`
        super().__init__(found[4], handler)  # pyright: ignore[reportArgumentType]
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_LOOK_S,), name="bagua-prometheus", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """That is bound."""
        return self.server_address[1]  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Stop, and end all connections."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        with self._lock:
            for sock in self._begun:
                _end(sock)

    def get_request(self) -> Any:
        """Accept a connection; not in a tight loop if no descriptor is left."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread."""
        with self._lock:
            if len(self._begun) >= _MOST:
                oldest = next(iter(self._begun))
                _end(oldest)
                del self._begun[oldest]
            self._begun[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has been answered."""
        with self._lock:
            self._begun.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that have been open for too long."""
        limit = time.monotonic() - _LONGEST_S
        with self._lock:
            for sock in [sock for sock, begun in self._begun.items() if begun < limit]:
                _end(sock)
                del self._begun[sock]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: the reader has gone, or was ended above."""


def _end(sock: socket.socket) -> None:
    """Wake the thread that reads from it or writes to it, which closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
