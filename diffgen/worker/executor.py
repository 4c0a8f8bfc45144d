"""ParallelExecutor: one unit of work on this rank, according to the layout."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from diffgen.distributed.groups import lacks_memory
from diffgen.distributed.layout import Layout
from diffgen.distributed.rows import map_rows_over
from diffgen.errors import DiffgenError, GenerationError, OutOfMemory
from diffgen.media.pixels import check_finite
from diffgen.request import Req, Update
from diffgen.worker.context import Predict, Row, Stage, StageContext, StageError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ParallelExecutor:
    """Runs units. It is the only place that knows which ranks take part in what.

    Guidance branches and outputs are shared out here; tokens, weights and rows of a decode by what ``layout`` has put
    into the models. Every rank ends a unit with the same values.
    """

    def __init__(self, device: torch.device, layout: Layout | None = None) -> None:
        self.device = device
        self.layout = layout or Layout()

    def waits_for_peers(self, stage: Stage) -> bool:
        """Whether a rank that leaves a unit of this stage early may leave others waiting in a collective."""
        if self.layout.peers_hear:
            return False
        dims = self.layout.dims
        return dims.tp > 1 if stage.prepares else dims.world > 1

    def run(self, stage: Stage, reqs: Sequence[Req]) -> list[Update | StageError]:
        """One unit of ``stage`` for each request, as new values that are not yet written into any of them.

        An error is every member's: which of them caused it shows when each runs alone.
        """
        context = StageContext(self.device, self.map_rows)

        def compute() -> list[Update | StageError]:
            updates = stage.run(reqs, context)
            if len(updates) != len(reqs):
                raise RuntimeError(f"the stage returned {len(updates)} updates for {len(reqs)} requests")
            return [_checked(stage, update) for update in updates]

        found = self.attempt(stage.name, compute)
        return [found for _ in reqs] if isinstance(found, StageError) else found

    def attempt(self, what: str, compute: Callable[[], T]) -> T | StageError:
        """What ``compute`` returns, or the error of the requests that it is for: theirs alone, whatever it raises."""
        failure: DiffgenError
        try:
            with torch.inference_mode():
                return compute()
        except DiffgenError as error:
            failure = error.prefixed(what)
        except Exception as error:
            if lacks_memory(error):
                lack = f"out of memory in {what}: {str(error) or 'MemoryError'}"
                failure = OutOfMemory(f"{lack}; ask for a smaller size or n")
            else:
                # A failing model must not take the rank with it: whatever it raises is the answer of these requests.
                logger.exception("%s failed", what)
                failure = GenerationError(f"{what} failed: {type(error).__name__}: {error}")
        if isinstance(failure, OutOfMemory):
            # Only now, for the exception held the frames in which it was raised, and what they had computed.
            self._free_memory()
        return StageError(failure)

    def map_rows(self, predict: Predict, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Predictions of all rows, those of equal key in one forward, on every rank."""
        if self.layout.cfg.size > 1:
            return map_rows_over(self.layout.cfg, predict, rows, _forwards)
        return _forwards(predict, rows)

    def _free_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _forwards(predict: Predict, rows: Sequence[Row]) -> list[torch.Tensor]:
    predictions: dict[int, torch.Tensor] = {}
    order = sorted(range(len(rows)), key=lambda index: repr(rows[index].key))
    for _, members in itertools.groupby(order, key=lambda index: repr(rows[index].key)):
        indices = list(members)
        for index, prediction in zip(indices, predict([rows[index] for index in indices]), strict=True):
            predictions[index] = prediction
    return [predictions[index] for index in range(len(rows))]


def _checked(stage: Stage, update: Update) -> Update | StageError:
    try:
        if isinstance(update.latents, torch.Tensor):
            check_finite(update.latents, "latents", "use bfloat16 or float32 in place of float16")
        for branch in () if not isinstance(update.branches, tuple) else update.branches:
            for name, values in branch.items():
                check_finite(values, f"values of {name}", "use bfloat16 or float32")
    except DiffgenError as error:
        return StageError(error.prefixed(stage.name))
    return update
