"""Rank 0's loop around a scheduler, without processes: what clients are told, and what the ranks would do."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from diffgen.args import RunArgs
from diffgen.errors import ErrorInfo, GenerationError
from diffgen.params import Limits, ModelSpec, SamplingParams
from diffgen.scheduler.admission import Memory
from diffgen.scheduler.plan import Outcome, Plan, Position, StageInfo
from diffgen.scheduler.scheduler import Scheduler
from diffgen.wire.messages import Failed, Submit

A, B = b"client a", b"client b"
STAGES = (StageInfo("encode", prepares=True), StageInfo("denoise", stepped=True))
FAULT = GenerationError("denoise failed: by design").info()
TEXT_BYTES = 2**19


@dataclasses.dataclass
class Ranks:
    """What the ranks would do with a plan: one unit of encoding, then a unit a step; ``poison`` maps an id to the unit
    of denoising that it fails in, and with ``blame_all`` every member of a batch with it. An encoded text has
    ``TEXT_BYTES``; ``texts`` are the slots that hold one."""

    poison: dict[str, int] = dataclasses.field(default_factory=dict)
    blame_all: bool = False
    held: dict[str, Position] = dataclasses.field(default_factory=dict)
    params: dict[str, SamplingParams] = dataclasses.field(default_factory=dict)
    batches: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    texts: set[int] = dataclasses.field(default_factory=set)

    def run(self, plan: Plan) -> list[Outcome]:
        for request_id in plan.drop:
            del self.held[request_id]
        for admit in plan.admit:
            assert admit.id not in self.held
            self.held[admit.id] = Position(0, "encode", 0, 1, None, prepares=True)
            self.params[admit.id] = admit.params
        for slot in plan.evict:
            self.texts.remove(slot)
        if not plan.ids:
            return []
        self.batches.append(plan.ids)
        places = [self.held[request_id] for request_id in plan.ids]
        assert {place.stage for place in places} == {plan.stage}
        assert len(plan.ids) == 1 or len({place.key for place in places} - {None}) == 1, "only equal keys share"
        culprits = {i for i, p in zip(plan.ids, places, strict=True) if p.stage == 1 and self.poison.get(i) == p.unit}
        if culprits:
            guilty = set(plan.ids) if self.blame_all else culprits
            return [
                Outcome(i, p.name, p.unit, p.units, p, FAULT if i in guilty else None)
                for i, p in zip(plan.ids, places, strict=True)
            ]
        kept = 0
        if plan.text is not None and plan.text.hit:
            assert plan.text.slot in self.texts
        elif plan.text is not None:
            self.texts.add(plan.text.slot)
            kept = TEXT_BYTES
        return [self._move(request_id, kept) for request_id in plan.ids]

    def _move(self, request_id: str, kept: int) -> Outcome:
        place, params = self.held[request_id], self.params[request_id]
        unit, stage = place.unit + 1, place.stage
        if unit == place.units:
            stage, unit = stage + 1, 0
        position = None
        if stage < len(STAGES):
            position = Position(stage, STAGES[stage].name, unit, params.num_inference_steps or 0, params.width)
        if position is None:
            del self.held[request_id]
        else:
            self.held[request_id] = position
        return Outcome(request_id, place.name, place.unit + 1, place.units, position, kept=kept)


class Driver:
    """Rank 0's loop around a scheduler, with the answers it would send."""

    def __init__(
        self,
        model: ModelSpec,
        ranks: Ranks | None = None,
        limits: Limits | None = None,
        memory: Memory | None = None,
        stages: tuple[StageInfo, ...] = STAGES,
        **run: Any,
    ) -> None:
        self.now = 0.0
        self.run_args = RunArgs(**run)
        self.model, self.limits, self.memory, self.stages = model, limits or Limits(), memory, stages
        self.ranks = ranks or Ranks()
        self.journal: tuple[str, ...] = ()
        self.deaths: collections.Counter[str] = collections.Counter()
        self.scheduler = self._start("epoch")
        self.answers: list[tuple[bytes, Any]] = []
        self.finished: list[str] = []
        self.timings: dict[str, dict[str, float]] = {}

    def _start(self, epoch: str) -> Scheduler:
        return Scheduler(
            self.model,
            self.limits,
            self.run_args,
            epoch,
            lambda: self.now,
            deaths=dict(self.deaths),
            stages=self.stages,
            memory=self.memory,
            restarts=len(epoch) - len("epoch"),
        )

    def die(self) -> None:
        """The ranks die in the last tick and begin anew, as the supervisor has it."""
        self.deaths.update(self.journal)
        self.journal = ()
        self.ranks = Ranks(self.ranks.poison, self.ranks.blame_all)
        self.scheduler = self._start(self.scheduler.epoch + "+")

    def send(self, client: bytes, message: Any) -> list[Any]:
        answers = self.scheduler.handle(client, message)
        self.answers += answers
        return [answer for _, answer in answers]

    def submit(self, request_id: str, client: bytes = A, **values: Any) -> list[Any]:
        values = {"prompt": "a", "num_inference_steps": 3, **values}
        return self.send(client, Submit(request_id, SamplingParams(**values)))

    def tick(self) -> Plan:
        self.answers += self.scheduler.expire()
        plan = self.scheduler.plan()
        self.journal = plan.ids
        self._check_places(plan)
        outcomes = self.ranks.run(plan)
        placed = {outcome.id for outcome in outcomes}
        for admit in plan.admit:
            if admit.id not in placed:
                self.scheduler.place(admit.id, self.ranks.held[admit.id])
        self.now += 1
        self.answers += self.scheduler.commit(outcomes, 1.0)
        for outcome in outcomes:
            if outcome.finished:
                self.timings[outcome.id] = self.scheduler.release(outcome.id).timings
                self.finished.append(outcome.id)
        return plan

    def _check_places(self, plan: Plan) -> None:
        """``max_running`` bounds what is in flight when a batch request begins, and interactive ones at any time."""
        held = [self.ranks.params[name].priority for name in self.ranks.held.keys() - set(plan.drop)]
        for admit in plan.admit:
            batch = admit.params.priority == "batch"
            assert len(held) - (0 if batch else held.count("batch")) < self.run_args.max_running
            held.append(admit.params.priority)

    def drain(self, ticks: int = 1000) -> None:
        for _ in range(ticks):
            if self.scheduler.idle:
                return
            self.tick()
        raise AssertionError("requests are left")

    def failures(self) -> dict[str, ErrorInfo]:
        return {answer.id: answer.error for _, answer in self.answers if isinstance(answer, Failed)}
