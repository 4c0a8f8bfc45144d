"""Small HTTP servers in a thread, for tests to talk to."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

S = TypeVar("S", bound=http.server.ThreadingHTTPServer)


class Quiet(http.server.BaseHTTPRequestHandler):
    """Writes no log."""

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def running(server: S) -> Iterator[S]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
