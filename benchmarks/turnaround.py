"""What the time from an answer to a client's next request does to the others' waiting: the scheduler by itself.

    python benchmarks/turnaround.py [--clients 32] [--requests 16] [--turns 0 0.1 0.3]

The real scheduler with a clock of its own and units that take about what those of the bundled model do on one core, so
it takes seconds and gives the same figures everywhere. Each client has one request at a time, of 4 steps, at 64, 96 and
128 px in turn; its next one is there ``turn`` seconds after the last has ended. Seconds are those at the ranks.
"""

from __future__ import annotations

import argparse
import heapq
import statistics

from diffgen.args import RunArgs
from diffgen.params import Limits, ModelSpec, SamplingParams
from diffgen.scheduler.plan import Outcome, Plan, Position, StageInfo
from diffgen.scheduler.scheduler import Scheduler
from diffgen.wire.messages import Submit

SIDES, STEPS = (64, 96, 128), 4
STAGES = (StageInfo("encode", prepares=True, encodes=True), StageInfo("denoise", stepped=True), StageInfo("decode"))
# Seconds of an encoding; of a step, and for each request in it; of a decode.
ENCODE, STEP = 0.004, 0.009
STEP_EACH, DECODE = {64: 0.0035, 96: 0.007, 128: 0.013}, {64: 0.005, 96: 0.01, 128: 0.02}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=16, help="of each client")
    parser.add_argument("--turns", type=float, nargs="+", default=[0, 0.1, 0.3])
    options = parser.parse_args()
    print(f"{'turn':>5} {'a second':>9} {'mean':>6} {'p50':>6} {'p99':>6}" + "".join(f"{s:>9} px" for s in SIDES))
    for turn in options.turns:
        load = Load(turn, options.clients, options.requests)
        load.run()
        every = [seconds for _, seconds in load.answers]
        centiles = statistics.quantiles(every, n=100, method="inclusive")
        by_side = [statistics.median(seconds for side, seconds in load.answers if side == each) for each in SIDES]
        figures = (statistics.fmean(every), centiles[49], centiles[98])
        sides = "".join(f"{median:12.2f}" for median in by_side)
        print(f"{turn:5.2f} {len(every) / load.now:9.2f}" + "".join(f"{each:7.2f}" for each in figures) + sides)


class Load:
    """Clients, and ranks that only let time pass."""

    def __init__(self, turn: float, clients: int, requests: int) -> None:
        self.now, self.answers = 0.0, list[tuple[int, float]]()
        self._turn, self._requests = turn, requests
        model = ModelSpec(name="m", family="f", defaults={}, size_multiple=16, frame_stride=0, guidance=None)
        self._scheduler = Scheduler(model, Limits(), RunArgs(), "", clock=lambda: self.now, stages=STAGES)
        # Client, turn and time of what is yet to come, spread over the first 50 ms.
        self._coming = [(0.05 * client / clients, client, 0) for client in range(clients)]
        self._sides: dict[str, int] = {}
        self._places: dict[str, Position | None] = {}
        self._begun: dict[str, float] = {}

    def run(self) -> None:
        while self._coming or not self._scheduler.idle:
            if self._scheduler.idle:
                self.now = max(self.now, self._coming[0][0])
            while self._coming and self._coming[0][0] <= self.now:
                self._submit(*heapq.heappop(self._coming)[1:])
            self._tick()

    def _submit(self, client: int, number: int) -> None:
        side = SIDES[(client * self._requests + number) % len(SIDES)]
        name = f"{client} {number}"
        self._sides[name], self._begun[name] = side, self.now
        params = SamplingParams(prompt=name, width=side, height=side, num_frames=1, num_inference_steps=STEPS)
        self._scheduler.handle(b"", Submit(name, params))

    def _tick(self) -> None:
        plan = self._scheduler.plan()
        for admit in plan.admit:
            self._places[admit.id] = Position(0, "encode", 0, 1, None, prepares=True)
        outcomes = [self._move(name) for name in plan.ids]
        for admit in plan.admit:
            if admit.id not in plan.ids:
                self._scheduler.place(admit.id, self._places[admit.id])  # type: ignore[arg-type]
        seconds = self._seconds(plan)
        self.now += seconds
        self._scheduler.commit(outcomes, seconds)
        for outcome in outcomes:
            if outcome.finished:
                self._end(outcome.id)

    def _seconds(self, plan: Plan) -> float:
        side = self._sides[plan.ids[0]]
        return (ENCODE, STEP + STEP_EACH[side] * len(plan.ids), DECODE[side])[plan.stage]

    def _move(self, name: str) -> Outcome:
        place = self._places[name]
        assert place is not None
        stage, unit = (place.stage, place.unit + 1) if place.unit + 1 < place.units else (place.stage + 1, 0)
        key = self._sides[name] if stage == 1 else None
        units = STEPS if stage == 1 else 1
        moved = Position(stage, STAGES[stage].name, unit, units, key) if stage < len(STAGES) else None
        self._places[name] = moved
        return Outcome(name, place.name, place.unit + 1, place.units, moved)

    def _end(self, name: str) -> None:
        self._scheduler.release(name)
        self.answers.append((self._sides[name], self.now - self._begun[name]))
        client, number = map(int, name.split())
        if number + 1 < self._requests:
            heapq.heappush(self._coming, (self.now + self._turn, client, number + 1))


if __name__ == "__main__":
    main()
