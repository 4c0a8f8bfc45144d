"""Progress of one request on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from diffgen.wire.messages import Progress


class ProgressBar:
    """A bar on stderr for the stages of more than one unit; nothing where stderr is no terminal or ``quiet``."""

    def __init__(self, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        if not self._shown or progress.total < 2:
            return
        from tqdm import tqdm

        if self._bar is None or self._bar.desc != progress.stage:
            self.close()
            self._bar = tqdm(
                total=progress.total, desc=progress.stage, file=sys.stderr, leave=False, dynamic_ncols=True
            )
        self._bar.update(progress.step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
