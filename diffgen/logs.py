"""Log lines of every process: text for people or JSON for programs, on stderr."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

LogFormat = Literal["text", "json"]

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def set_up_logs(level: str, form: LogFormat, process: str) -> None:
    """Send lines of ``level`` and above to stderr; ``process`` names this one in each."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(process) if form == "json" else _Text(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _details(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave as ``extra``."""
    return {name: value for name, value in vars(record).items() if name not in _OWN}


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
