"""Denoising by a function that makes the whole picture in one call, and tells of each of its steps.

Such a call cannot be left and entered again, so it runs in a thread of its own, which stands still between units: a
unit lets it go on to its next step. What it has done cannot be taken back: of all stages only these change something,
the call that a request holds, before their values are committed. So a unit is never shared and never computed twice;
where it fails on any rank, the request fails.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch

from diffgen.request import UNSET, Req, Update
from diffgen.worker.context import StageContext
from stages.base import PipelineStage

#: Called by the function at the end of each step, with its latents where it has any; returns when it may go on.
Pause = Callable[[torch.Tensor | None], None]


class CallsWhole(Protocol):
    def steps(self, req: Req) -> int:
        """How often :meth:`call` is going to pause."""
        ...

    def call(self, req: Req, pause: Pause) -> Any:
        """Make the request's outputs. What it raises out of ``pause`` it must let through."""
        ...

    def outputs(self, req: Req, called: Any) -> Update:
        """What :meth:`call` returned, as the request's frames or latents."""
        ...


class _Interrupted(BaseException):
    """Ends a call from within; no ``except Exception`` on its way holds it up."""


@dataclasses.dataclass
class _Told:
    """What the thread says when it stands still or ends."""

    latents: torch.Tensor | None = None
    done: bool = False
    made: Any = None
    error: BaseException | None = None


class StepwiseCall:
    """A function that goes on to its next pause at each :meth:`advance`.

    When nothing holds the call any more its function ends: it is interrupted in the pause in which it stands.
    """

    def __init__(self, function: Callable[[Pause], Any]) -> None:
        self.told = _Told()
        self._go: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Told] = queue.SimpleQueue()
        # It knows nothing of this object, or it would keep it from being dropped.
        self._thread = threading.Thread(
            target=_run, args=(function, self._go, self._answers), name=f"steps-{id(self):x}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _interrupt, self._go, self._thread)

    def advance(self) -> None:
        """Let the function go on to its next pause or its end. Raises what it raises."""
        if self.told.done:
            return
        self._go.put(True)
        self.told = self._answers.get()
        error, self.told.error = self.told.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and through it what the function holds


def _run(function: Callable[[Pause], Any], go: queue.SimpleQueue[bool], answers: queue.SimpleQueue[_Told]) -> None:
    def wait() -> None:
        if not go.get():
            raise _Interrupted

    def pause(latents: torch.Tensor | None) -> None:
        answers.put(_Told(latents))
        wait()

    try:
        wait()
        answers.put(_Told(done=True, made=function(pause)))
    except _Interrupted:
        pass
    except BaseException as error:
        # The border of the thread: whatever it raises is raised where it is waited for.
        answers.put(_Told(done=True, error=error))


def _interrupt(go: queue.SimpleQueue[bool], thread: threading.Thread) -> None:
    go.put(False)
    if thread is not threading.current_thread():
        thread.join()


@dataclasses.dataclass(frozen=True)
class Running:
    """``Req.extra`` while a call runs: the call, and how many units its denoising has."""

    call: StepwiseCall
    steps: int


class StepwiseDenoisingStage(PipelineStage):
    """A unit is a step of the family's own loop; the first also does what comes before it, such as the text."""

    name: ClassVar[str] = "denoise"
    stepped: ClassVar[bool] = True

    def __init__(self, family: CallsWhole) -> None:
        self.family = family

    def units(self, req: Req) -> int:
        return req.extra.steps if isinstance(req.extra, Running) else self.family.steps(req)

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        return [self._step(req, ctx.device) for req in reqs]

    def _step(self, req: Req, device: torch.device) -> Update:
        running = req.extra
        if not isinstance(running, Running):
            family = self.family
            # A copy, for the request is going to hold the call.
            own = dataclasses.replace(req)

            def call(pause: Pause) -> Any:
                if device.type == "cuda":
                    torch.cuda.set_device(device)  # a thread begins with the first
                return family.call(own, pause)

            running = Running(StepwiseCall(call), family.steps(req))
        running.call.advance()
        latents = running.call.told.latents
        return Update(extra=running, latents=latents if isinstance(latents, torch.Tensor) else UNSET)


class StepwiseFinishStage(PipelineStage):
    """One unit: the rest of the call, which is its decoding."""

    name: ClassVar[str] = "decode"

    def __init__(self, family: CallsWhole) -> None:
        self.family = family

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        return [self._finish(req) for req in reqs]

    def _finish(self, req: Req) -> Update:
        assert isinstance(req.extra, Running)
        call = req.extra.call
        while not call.told.done:
            call.advance()
        update = self.family.outputs(req, call.told.made)
        update.extra = None
        return update
