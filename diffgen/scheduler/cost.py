"""What units of work take, learnt from those that have run: for order, batches, deadlines and times to come back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from diffgen.scheduler.job import Job, Kind
from diffgen.scheduler.plan import StageInfo
from diffgen.scheduler.sharing import Sharing, latest

_WEIGHT = 0.3  # of a new measurement against what is known


class CostModel:
    """Seconds of work, by stage, shape and batch.

    A shape is pixels (width x height x frames) and rows: outputs x guidance branches, of all requests in the forward.
    What has not been measured is drawn as a line through what has: over rows for the same pixels, else over the
    product of both. A stage of denoising steps is learnt by the step, any other as a whole.
    """

    def __init__(self, stages: Sequence[StageInfo] = ()) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self._times = {name: _Times() for name in self.stages}
        self._sharing = {name: Sharing(times.at) for name, times in self._times.items() if self.stages[name].stepped}
        self._units_per_step = dict.fromkeys(self.stages, 1.0)  # second-order schedulers have more than one
        self._gain = 1.0
        # By kind and stage, until something is learnt: most requests of a full queue are of a few kinds.
        self._paces: dict[tuple[Kind, str | None], _Pace] = {}

    @property
    def known(self) -> bool:
        """Whether :meth:`seconds_left` can tell the time of any request."""
        return bool(self.stages) and all(self._times[name] for name, stage in self.stages.items() if stage.stepped)

    def learn_unit(self, stage: str, jobs: Sequence[Job], seconds: float) -> None:
        """A unit of ``stage`` has run for ``jobs`` together."""
        if stage not in self.stages or not self.stages[stage].stepped:
            return
        times = self._times[stage]
        pixels, rows = _together(jobs)
        is_first = not times.count(pixels, rows)
        times.learn(pixels, rows, seconds)
        self._paces.clear()
        if seconds > 0:
            if not is_first:
                self._sharing[stage].learn(pixels, [job.rows for job in jobs], seconds)
            apart = sum(times.at(job.pixels, job.rows) or 0.0 for job in jobs)
            self._gain += _WEIGHT * (apart / seconds - self._gain)

    def learn_stage(self, stage: str, job: Job, units: int, seconds: float) -> None:
        """A request has left ``stage``, in which it had ``units`` that took ``seconds``."""
        if stage not in self.stages:
            return
        self._paces.clear()
        if self.stages[stage].stepped:
            self._units_per_step[stage] = units / job.steps
        else:
            self._times[stage].learn(*self._shape(stage, job), seconds)

    def seconds_left(self, job: Job) -> float:
        """What the request still takes, running by itself. Only once it is :attr:`known`."""
        place = job.position
        stage = None if place is None else place.name
        pace = self._paces.get((job.kind, stage))
        if pace is None:
            pace = self._paces[job.kind, stage] = self._pace(job, stage)
        left = pace.fixed + pace.step * job.steps
        if place is None:
            return left
        units = place.units - place.unit
        return left + pace.here * (units if pace.stepped else units / place.units)

    def _pace(self, job: Job, stage: str | None) -> _Pace:
        names = list(self.stages)
        if stage is not None:
            names = names[names.index(stage) + 1 :] if stage in self.stages else []
        fixed = sum(self._whole(name, job) for name in names if not self.stages[name].stepped)
        step = sum(self._whole(name, job) for name in names if self.stages[name].stepped)
        if stage is None or stage not in self.stages:
            return _Pace(fixed, step, 0.0, False)
        whole = self._times[stage].at(*self._shape(stage, job)) or 0.0
        return _Pace(fixed, step, whole, self.stages[stage].stepped)

    def share(self, stage: str, group: Sequence[Job]) -> int:
        """How many of ``group``, whose pixels are equal, should share its next unit: see :class:`Sharing`."""
        sharing = self._sharing.get(stage)
        return len(group) if sharing is None else sharing.share(group[0].pixels, [job.rows for job in group])

    def ends(self, jobs: Iterable[Job]) -> Mapping[str, float]:
        """Seconds until each of ``jobs`` ends if they are served in this order, nothing else comes, and sharing units
        saves as much as it did lately. Empty while not :attr:`known`."""
        if not self.known:
            return {}
        jobs = list(jobs)
        alone = [self.seconds_left(job) for job in jobs]
        gain = max(self._gain, 1.0)
        totals = itertools.accumulate(alone)
        return {job.id: max(own, total / gain) for job, own, total in zip(jobs, alone, totals, strict=True)}

    def _whole(self, name: str, job: Job) -> float:
        """Of a stage, or of a step of it where it is stepped."""
        seconds = self._times[name].at(*self._shape(name, job)) or 0.0
        return seconds * self._units_per_step[name] if self.stages[name].stepped else seconds

    def _shape(self, stage: str, job: Job) -> tuple[int, int]:
        # Preparing depends on the text, not on the size of the picture.
        return (1, job.branches) if self.stages[stage].prepares else (job.pixels, job.rows)


def _together(jobs: Sequence[Job]) -> tuple[int, int]:
    rows = sum(job.rows for job in jobs)
    return sum(job.pixels * job.rows for job in jobs) // rows, rows


class _Pace(NamedTuple):
    """Seconds of what is yet to come: of stages as a whole, and for each step of the request; and of the present stage,
    a unit of it where it is stepped, else all of it."""

    fixed: float
    step: float
    here: float
    stepped: bool


@dataclasses.dataclass
class _Measured:
    seconds: float
    count: int


class _Times:
    """Seconds by (pixels, rows)."""

    def __init__(self) -> None:
        self._by_pixels: dict[int, dict[int, _Measured]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_pixels)

    def learn(self, pixels: int, rows: int, seconds: float) -> None:
        by_rows: dict[int, _Measured] = latest(self._by_pixels, pixels, dict)
        known = by_rows.setdefault(rows, _Measured(seconds, 0))
        # The first one, in which libraries set themselves up, is forgotten with the second.
        known.seconds += (seconds - known.seconds) * (1.0 if known.count <= 1 else _WEIGHT)
        known.count += 1

    def count(self, pixels: int, rows: int) -> int:
        known = self._by_pixels.get(pixels, {}).get(rows)
        return 0 if known is None else known.count

    def at(self, pixels: int, rows: int) -> float | None:
        """Measured or drawn seconds; None where nothing has been measured."""
        same = self._by_pixels.get(pixels)
        if same is not None:
            known = same.get(rows)
            return known.seconds if known is not None else _on_line({r: each.seconds for r, each in same.items()}, rows)
        points = {p * r: each.seconds for p, by_rows in self._by_pixels.items() for r, each in by_rows.items()}
        return _on_line(points, pixels * rows) if points else None


def _on_line(points: Mapping[int, float], x: int) -> float:
    """The value at ``x`` of a line through the two points nearest to it, or in proportion to the only one.

    Outside of all points it is at least in proportion below, and at least the last value above.
    """
    xs = sorted(points)
    if len(xs) == 1:
        return points[xs[0]] * x / xs[0]
    above = next((index for index, each in enumerate(xs) if each >= x), len(xs) - 1)
    right = max(above, 1)
    left, right = xs[right - 1], xs[right]
    value = points[left] + (points[right] - points[left]) * (x - left) / (right - left)
    if x < xs[0]:
        return max(value, points[xs[0]] * x / xs[0])
    return max(value, points[xs[-1]]) if x > xs[-1] else value
