"""The port and the folder of a server, taken before anything slow is imported or loaded."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from diffgen.errors import StartFailed
from diffgen.http.args import HttpArgs


@contextlib.contextmanager
def listen(args: HttpArgs) -> Iterator[socket.socket]:
    """Raises :class:`StartFailed` where the port is taken."""
    try:
        found = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        reason = f"cannot listen at {args.host}:{args.port}: {error.strerror or error}; choose another port"
        raise StartFailed(reason, code="address_in_use") from None
    with listener:
        yield listener


@contextlib.contextmanager
def data_folder(args: HttpArgs, listener: socket.socket) -> Iterator[Path]:
    """Where jobs and files go. A port that the system chose is no name to find them by again."""
    if args.data_path is None and args.port == 0:
        with tempfile.TemporaryDirectory(prefix="diffgen-serve-") as folder:
            yield Path(folder)
    else:
        yield Path(args.data_path) if args.data_path is not None else default_folder(listener.getsockname()[1])


def default_folder(port: int) -> Path:
    """Of the user's own, one a port, so that a server finds its jobs again."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "diffgen" / f"serve-{port}"
