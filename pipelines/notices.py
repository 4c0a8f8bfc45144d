"""What diffusers logs while one of its pipelines is called: text that it cut off, a size that it changed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator


class _Collector(logging.Handler):
    """The warnings of one thread, each once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: dict[str, None] = {}
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.found[" ".join(record.getMessage().split())] = None


@contextlib.contextmanager
def noticed() -> Iterator[dict[str, None]]:
    """The warnings that diffusers logs in this thread meanwhile, as keys in order."""
    collector, logger = _Collector(), logging.getLogger("diffusers")
    logger.addHandler(collector)
    try:
        yield collector.found
    finally:
        logger.removeHandler(collector)
