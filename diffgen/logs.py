"""Log lines of every process: text for people or JSON for programs, on stderr."""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

LogFormat = Literal["text", "json"]

# Libraries that would write to stderr in a form of their own.
_WITH_THEIR_OWN = ("torch", "diffusers", "transformers")

# Ids of the requests that this thread works for, for every line meanwhile, whoever writes it.
_requests: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("requests", default=())

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def set_up_logs(level: str, form: LogFormat, process: str) -> None:
    """Send lines of ``level`` and above to stderr, those of libraries that have been imported and Python's warnings
    included; ``process`` names this one in each."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(process) if form == "json" else _Text(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _WITH_THEIR_OWN:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True


@contextlib.contextmanager
def about(ids: Sequence[str]) -> Iterator[None]:
    """Lines of this thread tell these requests' ids as ``generation``."""
    token = _requests.set(tuple(ids))
    try:
        yield
    finally:
        _requests.reset(token)


def _details(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave as ``extra``, and the requests that the line is about."""
    found = {name: value for name, value in vars(record).items() if name not in _OWN}
    if _requests.get():
        found.setdefault("generation", " ".join(_requests.get()))
    return found


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        details = "".join(f" {name}={value}" for name, value in _details(record).items())
        return super().formatMessage(record) + details


class _Json(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_details(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
