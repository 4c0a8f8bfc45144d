"""The scheduler under any sequence of arrivals, cancels, failures, deaths and time limits."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import A, B, Driver, Ranks

from diffgen.params import Limits, ModelSpec, SamplingParams
from diffgen.scheduler.job import Need
from diffgen.scheduler.plan import Plan
from diffgen.scheduler.policy import BATCH_TURN_S
from diffgen.scheduler.scheduler import MAX_DEATHS
from diffgen.wire.messages import Abort, Accepted, Bye, Cancel, Failed, Progress, Submit

MODEL = ModelSpec(
    name="m",
    family="f",
    defaults={"width": 64, "height": 64, "num_frames": 1, "num_inference_steps": 2},
    size_multiple=16,
    frame_stride=4,
    guidance=None,
)
NAMES = [f"r{index}" for index in range(7)]
CLIENTS = st.sampled_from([A, B])


@dataclasses.dataclass
class Bytes:
    """Memory of ten bytes; a request holds one and works with one an output."""

    def available(self) -> int:
        return 10

    def needs(self, params: SamplingParams, available: int) -> Need:
        return Need(1, params.num_outputs_per_prompt or 1)


@dataclasses.dataclass
class Open:
    """A request that was accepted and has not ended."""

    client: bytes
    params: SamplingParams
    since: float
    aborted: bool = False
    told: tuple[int, ...] = ()  # steps of denoising in this epoch


class Requests(RuleBasedStateMachine):
    """Each accepted request ends exactly once, for a reason that it has, and every plan keeps the rules."""

    @initialize(
        poison=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), max_size=3),
        blame_all=st.booleans(),
        batch=st.integers(1, 6),
        running=st.integers(1, 5),
        queue=st.integers(1, 7),
        memory=st.sampled_from([None, Bytes()]),
    )
    def begin(
        self, poison: dict[str, int], blame_all: bool, batch: int, running: int, queue: int, memory: Bytes | None
    ) -> None:
        limits = Limits(queue=queue, time=60)
        run = {"max_batch_size": batch, "max_running": running}
        self.driver = Driver(MODEL, Ranks(poison, blame_all), limits, memory, **run)
        self.open: dict[str, Open] = {}
        self.accepted = self.ended = self.read = self.taken = 0
        self.batch_served = 0.0
        self.failed_together: set[str] = set()

    @rule(
        name=st.sampled_from(NAMES),
        client=CLIENTS,
        steps=st.integers(1, 4),
        outputs=st.integers(1, 3),
        width=st.sampled_from([64, 128]),
        priority=st.sampled_from([None, "batch"]),
        time_limit=st.sampled_from([None, None, 4.0, 15.0]),
    )
    def submit(self, name: str, client: bytes, **values: Any) -> None:
        steps, outputs = values.pop("steps"), values.pop("outputs")
        params = SamplingParams(prompt="a", num_inference_steps=steps, num_outputs_per_prompt=outputs, **values)
        held = self.open.get(name)
        answers = self.driver.send(client, Submit(name, params))
        self.read = len(self.driver.answers)
        if answers and isinstance(answers[0], Accepted):
            assert held is None
            assert self.driver.deaths[name] < MAX_DEATHS
            assert len(self.open) < self.driver.limits.queue
            assert 0 <= answers[0].ahead <= len(self.open)
            self.open[name] = Open(client, params, self.driver.now)
            self.accepted += 1
        elif held is not None:
            assert (answers == []) == (held.client == client)
        else:
            assert answers[0].error.code in ("queue_full", "deadline_impossible", "worker_died")

    @rule(names=st.permutations(NAMES), ticks=st.integers(4, 7))
    def burst(self, names: list[str], ticks: int) -> None:
        """Some that can share steps."""
        for name in names[:4]:
            self.submit(name, A, steps=4, outputs=1, width=64, priority=None, time_limit=None)
        self.ticks(0 if self.driver.scheduler.idle else ticks)

    @rule(name=st.sampled_from(NAMES), client=CLIENTS)
    def cancel(self, name: str, client: bytes) -> None:
        mine = name in self.open and self.open[name].client == client
        if mine:
            self.open[name].aborted = True
        assert len(self.driver.send(client, Cancel(name))) == mine

    @rule(name=st.sampled_from(NAMES))
    def abort(self, name: str) -> None:
        if name in self.open:
            self.open[name].aborted = True
        aborted = self.driver.send(b"someone else", Abort(name))[-1]
        assert aborted.found == (name in self.open)

    @rule(client=CLIENTS)
    def bye(self, client: bytes) -> None:
        assert self.driver.send(client, Bye()) == []
        for name in [name for name, request in self.open.items() if request.client == client]:
            self._end(name)

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.driver.now += seconds

    @precondition(lambda self: not self.driver.scheduler.idle)
    @rule(count=st.integers(1, 6))
    def ticks(self, count: int) -> None:
        for _ in range(count):
            self._tick()

    @rule(units=st.integers(0, 3))
    def die(self, units: int) -> None:
        """After ``units`` more. All are sent again, as their clients do."""
        for _ in range(0 if self.driver.scheduler.idle else units):
            self._tick()
        self.driver.die()
        self.failed_together.clear()
        for name, request in list(self.open.items()):
            request.told = ()
            age = self.driver.now - request.since
            (answer,) = self.driver.send(request.client, Submit(name, request.params, age))
            assert isinstance(answer, Failed) == (self.driver.deaths[name] >= MAX_DEATHS)
            assert isinstance(answer, Accepted) or answer.error.code == "worker_died"
        self.batch_served = self.driver.now
        self.ticks(0 if self.driver.scheduler.idle else 5)

    @invariant()
    def settled(self) -> None:
        if not hasattr(self, "driver"):
            return
        fresh, self.read = self.driver.answers[self.read :], len(self.driver.answers)
        for client, answer in fresh:
            if isinstance(answer, Progress) and answer.stage == "denoise":
                request = self.open[answer.id]
                assert answer.step == len(request.told) + 1 <= answer.total, "each step once, in order"
                request.told += (answer.step,)
            elif isinstance(answer, Failed):
                assert self.open[answer.id].client == client
                self._check_reason(answer)
                self._end(answer.id)
        for name in self.driver.finished[self.taken :]:
            assert len(self.open[name].told) == self.open[name].params.num_inference_steps
            self._end(name)
        self.taken = len(self.driver.finished)
        status = self.driver.scheduler.status()
        assert {request.id for request in status.requests} == self.open.keys()
        assert sorted(request.ahead for request in status.requests) == list(range(len(self.open)))

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for _ in range(200):
            if not self.driver.scheduler.idle:
                self._tick()
        assert not self.open, "every accepted request has ended"
        assert self.ended == self.accepted
        assert self.driver.scheduler.idle
        assert self.driver.ranks.held == {}

    def _end(self, name: str) -> None:
        del self.open[name]
        self.failed_together.discard(name)
        self.ended += 1

    def _check_reason(self, failed: Failed) -> None:
        request = self.open[failed.id]
        match failed.error.code:
            case "request_cancelled":
                assert request.aborted
            case "deadline_exceeded":
                limit = request.params.time_limit or self.driver.limits.time
                assert self.driver.now >= request.since + limit
            case "generation_failed":
                assert failed.id in self.driver.ranks.poison
            case code:
                assert code == "worker_died"

    def _tick(self) -> None:
        now, before, held = self.driver.now, len(self.driver.answers), set(self.driver.ranks.held)
        plan = self.driver.tick()
        self._check_plan(plan, now)
        self._check_places(held - set(plan.drop) | {admit.id for admit in plan.admit})
        passed = any(isinstance(answer, Progress) for _, answer in self.driver.answers[before:])
        self.failed_together -= set(plan.ids)
        if len(plan.ids) > 1 and not passed:
            self.failed_together |= set(plan.ids)
        self.settled()

    def _check_places(self, flying: set[str]) -> None:
        """An interactive request waits for its own class alone, or for memory."""
        requests = self.driver.scheduler.status().requests
        waiting = [each for each in requests if each.state == "queued" and each.priority == "interactive"]
        if waiting and self.driver.memory is None:
            same = [name for name in flying if self.driver.ranks.params[name].priority != "batch"]
            assert len(same) == self.driver.run_args.max_running

    def _check_plan(self, plan: Plan, now: float) -> None:
        """Of what runs: limits, company, classes, time."""
        if not plan.ids:
            return
        members = [self.open[name] for name in plan.ids]
        run = self.driver.run_args
        outputs = sum(member.params.num_outputs_per_prompt or 1 for member in members)
        assert len(members) == 1 or outputs <= run.max_batch_size
        assert len(members) == 1 or not any(self.driver.deaths[name] for name in plan.ids), "suspects run alone"
        assert len(members) == 1 or not self.failed_together & set(plan.ids), "each alone after a failure"
        assert len({member.params.width for member in members}) == 1
        for member in members:
            assert now < member.since + (member.params.time_limit or self.driver.limits.time)
        batch = [member for member in members if member.params.priority == "batch"]
        others = [self.open[name] for name in self.driver.ranks.held.keys() & self.open.keys()]
        others = [other for other in others if other.params.priority is None]
        joins = plan.stage == 0 and any(other.params.width == members[0].params.width for other in others)
        if len(batch) == len(members) and others and not joins:
            first = min(other.since for other in self.open.values() if other.params.priority == "batch")
            assert now - max(self.batch_served, first) >= BATCH_TURN_S, "interactive requests go first"
        if batch:
            self.batch_served = self.driver.now


TestRequests = pytest.mark.timeout(120)(Requests.TestCase)
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32), load=st.floats(0.3, 1.5), batch=st.integers(1, 4))
def test_none_starves(seed: int, load: float, batch: int) -> None:
    """A clip, a bulk request and one of many outputs get their units while short ones keep coming, more than can be
    served; none waits for longer than a minute, and each ends."""
    draw = random.Random(seed)
    driver = Driver(MODEL, limits=Limits(queue=1000), max_batch_size=batch, max_running=12)
    driver.submit("clip", num_inference_steps=30, num_frames=17)
    driver.submit("bulk", num_inference_steps=5, priority="batch", width=128)
    driver.submit("many", num_inference_steps=10, num_outputs_per_prompt=4)
    slow = {"clip", "bulk", "many"}
    served: dict[str, float] = collections.defaultdict(float)
    for number in range(1500):
        if slow <= set(driver.finished):
            break
        if draw.random() < load / 3:
            driver.submit(f"short{number}", num_inference_steps=draw.randint(1, 4), width=draw.choice([64, 96]))
        for name in driver.tick().ids:
            served[name] = driver.now
        for name in slow - set(driver.finished):
            assert driver.now - served[name] < 60, name
    assert slow <= set(driver.finished)
