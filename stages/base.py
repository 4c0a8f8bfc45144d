"""What every stage is: see :class:`diffgen.worker.context.Stage` for the contract."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import ClassVar

from diffgen.request import Req, Update
from diffgen.worker.context import StageContext


class PipelineStage(abc.ABC):
    """A part of a pipeline, cut into units. A stage keeps nothing between requests; its state is in the request."""

    name: ClassVar[str]
    prepares: ClassVar[bool] = False
    stepped: ClassVar[bool] = False
    encodes: ClassVar[bool] = False

    def units(self, req: Req) -> int:
        """Units the request has in this stage; 0 skips it."""
        return 1

    def batch_key(self, req: Req) -> Hashable:
        """Requests with equal keys may share the next unit; None shares with no other."""
        return None

    @abc.abstractmethod
    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        """Compute the next unit of each request; return new values in order and change no request."""
