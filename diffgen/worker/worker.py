"""GPUWorker: a rank's requests, and the tick by which they change."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import resource
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from diffgen.distributed.groups import Control
from diffgen.errors import PEER_FAILED, DiffgenError, ErrorInfo, RanksDiverged, without_paths
from diffgen.logs import about
from diffgen.request import UNSET, Req, TensorHeader, Update
from diffgen.scheduler.plan import MAX_UNIT_REQS, Admit, Outcome, Plan, Position
from diffgen.wire.messages import Preview
from diffgen.worker.context import Pipeline, Stage, StageError
from diffgen.worker.executor import ParallelExecutor

logger = logging.getLogger(__name__)

# A rank that only follows another's failure has nothing to say about it.
_OK, _FAILED, _FOLLOWS = 0, 1, 2
# For a failure to be told by the vote; longer, and the peers wait in a collective that this rank has left.
_EXPLAIN_S = 1.0
_MOST_TEXT = 800  # of an error, to fit into what ranks exchange, whatever its characters take as UTF-8


@dataclasses.dataclass
class Progress:
    """What a rank says of itself in its heartbeat: ``fingerprint`` sums up the branches, latents and frames that
    it has committed; ``unit_since`` is of the system's monotonic clock, which all processes share; ``voted``, that it
    has done its part of the present unit and waits for the others' votes."""

    units: dict[str, int]
    tick: int = 0
    fingerprint: int = 0
    unit_since: float | None = None
    voted: bool = False


class GPUWorker:
    """One rank's pipeline and the requests in flight. Every rank has the same requests in the same state."""

    def __init__(
        self,
        pipeline: Pipeline,
        executor: ParallelExecutor,
        control: Control,
        on_stuck: Callable[[DiffgenError], None] = lambda error: None,
    ) -> None:
        """``on_stuck`` is called on another thread when this rank has failed in a unit and can never be heard."""
        self._on_stuck = on_stuck
        self.pipeline = pipeline
        self.executor = executor
        self.control = control
        # All keys from the start: the heartbeat's thread reads the dict while this one counts.
        self.progress = Progress(units={stage.name: 0 for stage in pipeline.stages})
        self.previews: list[tuple[Preview, Any]] = []  # of the last tick, with their arrays; only on rank 0
        self._reqs: dict[str, Req] = {}
        self._texts: dict[int, Update] = {}  # encoded, by the slots of the plans; each with its own warnings alone

    def tick(self, plan: Plan) -> tuple[list[Outcome], dict[str, Req]]:
        """Carry out a plan: compute, vote, commit. Returns what became of each request, and the finished ones.

        Either every rank writes the new values of every planned request, or none writes any.
        """
        with about(plan.ids), self.watched():
            return self._tick(plan)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """For what must not take longer than a unit may: the supervisor ends a rank that hangs in it."""
        self.progress.unit_since = time.monotonic()
        try:
            yield
        finally:
            self.progress.unit_since = None

    def _tick(self, plan: Plan) -> tuple[list[Outcome], dict[str, Req]]:
        self.progress.tick = plan.tick
        self.previews.clear()
        for request_id in plan.drop:
            self._reqs.pop(request_id, None)
        for admit in plan.admit:
            self._reqs[admit.id] = _enter(admit)
            self._skip_empty(self._reqs[admit.id])
        for slot in plan.evict:
            del self._texts[slot]
        if not plan.ids:
            return [], {}
        stage = self.pipeline.stages[plan.stage]
        logger.debug("%s of %d request(s)", stage.name, len(plan.ids))
        computed = self._compute(plan, stage)
        if self.executor.device.type == "cuda":
            # An error that the device keeps, as after an assertion in a kernel, is raised here and ends this rank:
            # every later unit would fail of it.
            torch.cuda.synchronize()
        with self._or_ends(stage, computed):
            errors = self._vote(plan, computed)
        self.progress.voted = False
        held = [self._reqs.get(request_id) for request_id in plan.ids]
        if errors:
            return [
                Outcome(req.id, stage.name, req.unit, stage.units(req), self._position(req), error)
                for req, error in zip(held, errors, strict=True)
                if req is not None
            ], {}
        return self._commit(plan, [req for req in held if req is not None], computed)

    def _compute(self, plan: Plan, stage: Stage) -> list[Update | StageError]:
        for request_id in plan.ids:
            req = self._reqs.get(request_id)
            if req is None or req.stage != plan.stage:
                place = "over" if req is None else f"in {self.pipeline.stages[req.stage].name}"
                rule = f"request {request_id} is {place} on this rank, and in {stage.name} on rank 0"
                return [StageError(RanksDiverged(rule)) for _ in plan.ids]
        reqs = [self._reqs[request_id] for request_id in plan.ids]
        reused = self._encoded(plan, reqs[0])
        return [reused] if reused is not None else self.executor.run(stage, reqs)

    def position(self, request_id: str) -> Position:
        """Where a request that has just been admitted begins."""
        position = self._position(self._reqs[request_id])
        assert position is not None, "the first stage has a unit for every request"
        return position

    def _vote(self, plan: Plan, computed: list[Update | StageError]) -> list[ErrorInfo | None]:
        """An error a request where any rank has one; an empty list is a yes."""
        codes = [_code(item) for item in computed]
        prints = [
            0 if isinstance(item, StageError) else fingerprint(item, self._place(request_id))
            for request_id, item in zip(plan.ids, computed, strict=True)
        ]
        empty = [0] * (MAX_UNIT_REQS - len(codes))
        self.progress.voted = True
        votes = self.control.gather_vote([plan.tick, *codes, *empty, *prints, *empty])
        if any(vote[0] != plan.tick for vote in votes):
            raise RanksDiverged(f"ranks vote on different ticks: {[vote[0] for vote in votes]}")
        failed = any(any(vote[1 : 1 + MAX_UNIT_REQS]) for vote in votes)
        diverged = [_diverged(index, votes) for index in range(len(codes))]
        if not failed:
            if any(diverged):
                return diverged
            for value in prints:
                self.progress.fingerprint = (self.progress.fingerprint * 1_000_003 + value) % 2**63
            return []
        return self._gather_errors(codes, computed, votes)

    def _place(self, request_id: str) -> tuple[int, int, int]:
        """Stage, units of it that are done, and how many there are: on all ranks the same."""
        req = self._reqs[request_id]
        return req.stage, req.unit, self.pipeline.stages[req.stage].units(req)

    @contextlib.contextmanager
    def _or_ends(self, stage: Stage, computed: list[Update | StageError]) -> Iterator[None]:
        """End this rank where it has failed and its peers do not come to the vote: they wait for it elsewhere."""
        failed = [item.error for item in computed if isinstance(item, StageError)]
        if not failed or not self.executor.waits_for_peers(stage):
            yield
            return
        timer = threading.Timer(_EXPLAIN_S, self._on_stuck, [failed[0]])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _gather_errors(
        self, codes: list[int], computed: list[Update | StageError], votes: list[list[int]]
    ) -> list[ErrorInfo | None]:
        mine = [item.error.info() for item in computed if isinstance(item, StageError)]
        told = self.control.gather_bytes(msgspec.msgpack.encode(mine[0].shortened(_MOST_TEXT)) if mine else b"")
        errors: list[ErrorInfo | None] = []
        for index in range(len(codes)):
            failed = [(vote[1 + index], rank) for rank, vote in enumerate(votes) if vote[1 + index]]
            guilty = [rank for _, rank in sorted(failed)]
            if not guilty:
                errors.append(None)
                continue
            info = msgspec.msgpack.decode(told[guilty[0]], type=ErrorInfo)
            if min(failed)[0] == _FOLLOWS:  # and nobody else has failed
                info = RanksDiverged(info.message).info()
            if self.control.info.size > 1:
                info = msgspec.structs.replace(info, message=f"rank {guilty[0]}: {info.message}")
            errors.append(info)
        return errors

    def _commit(
        self, plan: Plan, reqs: list[Req], computed: list[Update | StageError]
    ) -> tuple[list[Outcome], dict[str, Req]]:
        stage = self.pipeline.stages[plan.stage]
        outcomes, finished = [], {}
        for req, update in zip(reqs, computed, strict=True):
            assert isinstance(update, Update)
            kept = self._keep(plan, req, update)
            total, before = stage.units(req), req.latents
            update.apply(req)
            req.unit += 1
            step = req.unit
            denoised = req.latents is not before and not stage.prepares
            every = req.params.preview_every if denoised and self.control.info.leads else None
            if every and step % every == 0:
                self._preview(req, before, total)
            if step == total:
                req.stage, req.unit = req.stage + 1, 0
            self._skip_empty(req)
            position = self._position(req)
            outcomes.append(Outcome(req.id, stage.name, step, total, position, kept=kept))
            if position is None:
                finished[req.id] = self._reqs.pop(req.id)
        self.progress.units[stage.name] += len(reqs)
        return outcomes, finished

    def _encoded(self, plan: Plan, req: Req) -> Update | None:
        """The unit's values where they are kept from an earlier request."""
        if plan.text is None or not plan.text.hit:
            return None
        text = self._texts[plan.text.slot]
        return dataclasses.replace(text, warnings=(*req.warnings, *text.warnings))

    def _keep(self, plan: Plan, req: Req, update: Update) -> int:
        """Keep what a unit has encoded, if the plan says so; the bytes of it."""
        if plan.text is None or plan.text.hit:
            return 0
        own = () if update.warnings is UNSET else update.warnings[len(req.warnings) :]
        self._texts[plan.text.slot] = dataclasses.replace(update, warnings=own)
        return sum(tensor.nbytes for tensor in _tensors(update.branches))

    def _preview(self, req: Req, before: torch.Tensor | None, total: int) -> None:
        assert self.pipeline.preview is not None, "only models with previews take preview_every"
        if req.without_previews:
            return
        try:
            pixels = self.pipeline.preview(req, before).cpu().numpy()
        except Exception as error:
            # The request itself is well. Only this rank draws previews and answers, so only here is it told.
            logger.exception("no preview of %s", req.id)
            req.without_previews = True
            why = without_paths(f"{type(error).__name__}: {error}")
            req.warnings += (f"a preview could not be made, so none comes any more: {why}",)
            return
        self.previews.append((Preview(req.id, req.unit, total, TensorHeader("uint8", pixels.shape)), pixels))

    def _skip_empty(self, req: Req) -> None:
        """Move the request past stages that have nothing to do for it."""
        stages = self.pipeline.stages
        while req.stage < len(stages) and stages[req.stage].units(req) <= req.unit:
            req.stage, req.unit = req.stage + 1, 0

    def _position(self, req: Req) -> Position | None:
        """The request's place; None at the end."""
        if req.stage == len(self.pipeline.stages):
            return None
        stage = self.pipeline.stages[req.stage]
        return Position(req.stage, stage.name, req.unit, stage.units(req), stage.batch_key(req), stage.prepares)


def _code(item: Update | StageError) -> int:
    if not isinstance(item, StageError):
        return _OK
    return _FOLLOWS if item.error.code == PEER_FAILED else _FAILED


def _enter(admit: Admit) -> Req:
    return Req(admit.id, admit.params, admit.warnings)


def _diverged(index: int, votes: list[list[int]]) -> ErrorInfo | None:
    prints = [vote[1 + MAX_UNIT_REQS + index] for vote in votes]
    odd = [rank for rank, value in enumerate(prints) if value != prints[0]]
    if not odd:
        return None
    rule = f"ranks {odd} computed other values than rank 0, or have other units to do"
    return RanksDiverged(f"{rule}; the result would depend on the rank").info()


def fingerprint(update: Update, place: tuple[int, ...] = ()) -> int:
    """32 bits that differ when a timestep, a branch, a latent or a new frame differs in any bit, place or shape, or the
    ``place`` of the unit does (CRC-32)."""
    total = zlib.crc32(repr(place).encode())
    # Of the frames, the part that this unit added.
    for tensor in (update.timesteps, update.latents, *_tensors(update.branches), *_tensors(update.frames)[-1:]):
        if isinstance(tensor, torch.Tensor):
            total = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            total = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data, total)
    return total


def _tensors(values: object) -> list[torch.Tensor]:
    if not isinstance(values, tuple):
        return []
    return [t for value in values for t in (value.values() if isinstance(value, dict) else [value])]


def peak_memory_mb(device: torch.device) -> float:
    """The most memory held so far: allocated on an accelerator, resident in a CPU process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
