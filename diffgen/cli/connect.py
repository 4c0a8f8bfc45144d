"""The generator that a command uses: one of its own, or a running server."""

from __future__ import annotations

import sys
from pathlib import Path

from diffgen.api import DiffGenerator
from diffgen.cli.settings import ServerSettings
from diffgen.errors import InvalidRequest


def open_generator(server: ServerSettings, quiet: bool = True) -> DiffGenerator:
    """Start the model, or connect to the server that was named."""
    address, token_file = server.connect.connect, server.connect.token_file
    if address is not None:
        return DiffGenerator.connect(address, token=None if token_file is None else read_token(token_file))
    if not quiet and sys.stderr.isatty():  # it may take minutes
        print(f"diffgen: loading {server.options.get('model_path') or 'the bundled model'}", file=sys.stderr)
    return DiffGenerator.from_pretrained(limits=server.limits, **server.options)


def read_token(path: str) -> str:
    """The token that a file holds, without the newline at its end. Raises :class:`InvalidRequest`."""
    try:
        return Path(path).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, ValueError) as error:  # a ValueError where it is no UTF-8, or the path holds a NUL
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"cannot read token_file {path!r}: {reason}", param="token_file") from None
