"""What the ranks say of their work, asked once for all who want to know."""

from __future__ import annotations

import asyncio

from diffgen.api import DiffGenerator
from diffgen.errors import DiffgenError
from diffgen.wire.messages import Status

# An answer comes between two units of work, of which the watchdog ends those that take too long.
_PATIENCE_S = 86400.0


class Statuses:
    """Has at most one question on its way. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._coming: asyncio.Task[Status] | None = None
        self._last: Status | None = None

    async def next(self, generator: DiffGenerator) -> Status:
        """As it is at the end of the unit in work. Raises :class:`DiffgenError` where the ranks have gone."""
        if self._coming is None or self._coming.done():
            self._coming = asyncio.create_task(self._ask(generator))
        return await asyncio.shield(self._coming)  # one who leaves must not stop it for the others

    async def within(self, seconds: float, generator: DiffGenerator) -> Status | None:
        """The next, or where the unit in work takes longer the one before; None where the ranks have gone."""
        try:
            async with asyncio.timeout(seconds):
                return await self.next(generator)
        except (TimeoutError, DiffgenError):
            return self._last

    async def _ask(self, generator: DiffGenerator) -> Status:
        try:
            self._last = await asyncio.to_thread(generator.status, _PATIENCE_S)
        except DiffgenError:
            self._last = None
            raise
        return self._last
