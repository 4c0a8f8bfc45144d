"""A rank's tick: compute, vote, commit. One rank, with a small pipeline of real tensors."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from diffgen.distributed.groups import Control, RankInfo
from diffgen.errors import InvalidRequest
from diffgen.params import ModelSpec, SamplingParams
from diffgen.request import Req, Update
from diffgen.scheduler.plan import Admit, Outcome, Plan, TextSlot
from diffgen.worker.context import Row, Stage, StageContext
from diffgen.worker.executor import ParallelExecutor
from diffgen.worker.worker import GPUWorker, fingerprint

CPU = torch.device("cpu")


class Encode:
    """Takes the prompt's length for its meaning."""

    prepares = False
    stepped = False
    name = "encode"

    def units(self, req: Req) -> int:
        return 1

    def batch_key(self, req: Req) -> Hashable:
        return None

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        return [Update(branches=({"text": torch.full((1, 2), float(len(req.params.prompt)))},)) for req in reqs]


class Optional(Encode):
    """Has something to do only for requests with a negative prompt."""

    name = "optional"

    def units(self, req: Req) -> int:
        return 0 if req.params.negative_prompt is None else 2

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        return [Update(warnings=(*req.warnings, f"optional {req.unit}")) for req in reqs]


class Noise(Encode):
    name = "noise"

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        return [
            Update(latents=torch.randn(req.outputs, 3, generator=torch.Generator().manual_seed(req.seeds[0])))
            for req in reqs
        ]


class Denoise:
    """Each step adds the text's mean. ``bad`` and ``nan`` prompts fail in their second step."""

    prepares = False
    stepped = False
    name = "denoise"

    def __init__(self) -> None:
        self.forwards: list[int] = []

    def units(self, req: Req) -> int:
        return req.params.num_inference_steps or 0

    def batch_key(self, req: Req) -> Hashable:
        return "all"

    def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
        rows = [
            Row(req.latents, torch.tensor(req.unit), req.branches[0], "all") for req in reqs if req.latents is not None
        ]
        for req in reqs:
            if req.unit == 1 and req.params.prompt == "bad":
                raise KeyError("by design")
            if req.unit == 1 and req.params.prompt == "refused":
                raise InvalidRequest("by design", code="some_code", param="prompt")
        updates = [Update(latents=latents) for latents in ctx.map_rows(self._predict, rows)]
        for req, update in zip(reqs, updates, strict=True):
            if req.unit == 1 and req.params.prompt == "nan":
                update.latents[0, 0] = float("nan")
        return updates

    def _predict(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        self.forwards.append(len(rows))
        return [row.latents + row.branch["text"].mean() for row in rows]


@dataclasses.dataclass
class Small:
    stages: Sequence[Stage]
    spec: ModelSpec
    preview: Callable[[Req, torch.Tensor | None], torch.Tensor] | None = None


Make = Callable[[], GPUWorker]


@pytest.fixture
def make(model: ModelSpec) -> Make:
    def build() -> GPUWorker:
        pipeline = Small([Encode(), Optional(), Noise(), Denoise()], model)
        return GPUWorker(pipeline, ParallelExecutor(CPU), Control(RankInfo(0, 1)))

    return build


@pytest.fixture
def worker(make: Make) -> GPUWorker:
    return make()


def admit(name: str, prompt: str = "good", steps: int = 2, seed: int = 1, **values: object) -> Admit:
    params = SamplingParams(prompt=prompt, seed=seed, num_inference_steps=steps, **values)  # type: ignore[arg-type]
    return Admit(name, params, ())


class Ticks:
    """Numbers the plans of one worker."""

    def __init__(self, worker: GPUWorker) -> None:
        self.worker = worker
        self.number = 0

    def __call__(
        self, stage: int = 0, ids: tuple[str, ...] = (), admits: Sequence[Admit] = (), **what: Any
    ) -> tuple[list[Outcome], dict[str, Req]]:
        self.number += 1
        return self.worker.tick(Plan(tick=self.number, stage=stage, ids=ids, admit=tuple(admits), **what))

    def to_denoising(self, *admits: Admit) -> None:
        """Bring requests to their first step."""
        self(admits=admits)
        for each in admits:
            self(0, (each.id,))
            self(2, (each.id,))


def state(worker: GPUWorker, name: str) -> Req:
    return copy.deepcopy(worker._reqs[name])


def same(left: Req, right: Req) -> bool:
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, torch.Tensor):
            if not torch.equal(a, b):
                return False
        elif field.name == "branches":
            if any(not torch.equal(x["text"], y["text"]) for x, y in zip(a, b, strict=True)):
                return False
        elif a != b:
            return False
    return True


def test_a_request_goes_through_its_stages(worker: GPUWorker) -> None:
    tick = Ticks(worker)
    tick(admits=[admit("a")])
    first = worker.position("a")
    assert (first.stage, first.name, first.unit, first.units, first.key) == (0, "encode", 0, 1, None)
    ((outcome,), finished) = tick(0, ("a",))
    assert (outcome.stage, outcome.step, outcome.total, finished) == ("encode", 1, 1, {})
    assert outcome.position is not None
    assert (outcome.position.name, outcome.position.stage) == ("noise", 2), "a stage of no units is skipped"
    tick(2, ("a",))
    ((outcome,), _) = tick(3, ("a",))
    assert outcome.position is not None
    assert (outcome.step, outcome.total, outcome.position.unit, outcome.position.key) == (1, 2, 1, "all")
    ((outcome,), finished) = tick(3, ("a",))
    assert outcome.finished
    assert (outcome.step, outcome.total) == (2, 2)
    expected = torch.randn(1, 3, generator=torch.Generator().manual_seed(1)) + 2 * len("good")
    torch.testing.assert_close(finished["a"].latents, expected)
    assert worker._reqs == {}
    assert worker.progress.units == {"encode": 1, "optional": 0, "noise": 1, "denoise": 2}
    assert worker.progress.tick == 5
    assert worker.progress.unit_since is None


def test_since_when_a_unit_runs_is_told_by_a_clock_that_nobody_sets(model: ModelSpec) -> None:
    seen: list[tuple[float | None, float]] = []

    class Looks(Encode):
        def run(self, reqs: Sequence[Req], ctx: StageContext) -> list[Update]:
            seen.append((worker.progress.unit_since, time.monotonic()))
            return super().run(reqs, ctx)

    worker = GPUWorker(Small([Looks()], model), ParallelExecutor(CPU), Control(RankInfo(0, 1)))
    tick, before = Ticks(worker), time.monotonic()
    tick(0, ("a",), [admit("a")])
    ((since, now),) = seen
    assert since is not None
    assert before <= since <= now


def test_a_preview_that_fails_is_told_with_the_result(worker: GPUWorker) -> None:
    tried: list[int] = []

    def preview(req: Req, before: torch.Tensor | None) -> torch.Tensor:
        tried.append(req.unit)
        raise ValueError("no picture in /srv/a/b")

    worker.pipeline.preview = preview
    tick = Ticks(worker)
    tick.to_denoising(admit("a", steps=3, preview_every=1))
    finished = [tick(3, ("a",))[1] for _ in range(3)][-1]
    assert finished["a"].warnings == (
        "a preview could not be made, so none comes any more: ValueError: no picture in (path)",
    )
    assert tried == [1]
    assert worker.previews == []
    told = finished["a"].warnings
    tick.to_denoising(msgspec.structs.replace(admit("b", steps=1, preview_every=1), warnings=told))
    tick(3, ("b",))
    assert tried == [1, 1], "what a warning says is no state"


def test_a_stage_with_units_for_some_requests_is_run_for_those(worker: GPUWorker) -> None:
    tick = Ticks(worker)
    tick(admits=[admit("a", negative_prompt="x")])
    ((outcome,), _) = tick(0, ("a",))
    assert outcome.position is not None
    assert (outcome.position.name, outcome.position.units) == ("optional", 2)
    tick(1, ("a",))
    tick(1, ("a",))
    assert state(worker, "a").warnings == ("optional 0", "optional 1")
    assert worker.position("a").name == "noise"


def test_requests_share_a_forward_and_get_what_each_gets_alone(make: Make) -> None:
    together, alone = make(), make()
    tick = Ticks(together)
    tick.to_denoising(admit("a", seed=1), admit("b", prompt="longer", seed=2))
    _, finished = tick(3, ("a", "b"))
    _, finished = tick(3, ("b", "a"))
    denoise = together.pipeline.stages[3]
    assert isinstance(denoise, Denoise)
    assert denoise.forwards == [2, 2]
    tick = Ticks(alone)
    tick.to_denoising(admit("b", prompt="longer", seed=2))
    tick(3, ("b",))
    _, single = tick(3, ("b",))
    left, right = finished["b"].latents, single["b"].latents
    assert left is not None
    assert right is not None
    assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        ("bad", "generation_failed", "denoise failed: KeyError: 'by design'"),
        ("nan", "nan_output", "denoise: 1 of 3 latents are not finite"),
        ("refused", "some_code", "by design"),
    ],
)
def test_nothing_is_committed_when_any_member_fails(worker: GPUWorker, prompt: str, code: str, words: str) -> None:
    tick = Ticks(worker)
    tick.to_denoising(admit("good"), admit("culprit", prompt=prompt))
    tick(3, ("good", "culprit"))
    before = {name: state(worker, name) for name in ("good", "culprit")}
    prints, units = worker.progress.fingerprint, dict(worker.progress.units)
    outcomes, finished = tick(3, ("good", "culprit"))
    assert finished == {}
    assert all(same(state(worker, name), before[name]) for name in before)
    assert (worker.progress.fingerprint, worker.progress.units) == (prints, units)
    culprit = outcomes[1]
    assert culprit.error is not None
    assert culprit.error.code == code
    assert words in culprit.error.message
    assert all((outcome.step, outcome.total) == (1, 2) and outcome.position is not None for outcome in outcomes)
    # From the same state, the one passes alone and the other fails again.
    ((outcome,), finished) = tick(3, ("good",))
    assert outcome.finished
    assert set(finished) == {"good"}
    ((outcome,), _) = tick(3, ("culprit",))
    assert outcome.error is not None
    tick(drop=("culprit",))
    assert worker._reqs == {}


def test_dropping_what_is_not_held_does_nothing(worker: GPUWorker) -> None:
    Ticks(worker)(drop=("never",))


def test_a_text_is_kept_used_again_and_given_up_as_the_plan_says(worker: GPUWorker) -> None:
    tick = Ticks(worker)
    kept, _ = tick(0, ("a",), [admit("a", "one")], text=TextSlot(7))
    assert kept[0].kept == worker._texts[7].branches[0]["text"].nbytes
    used, _ = tick(0, ("b",), [admit("b", "another")], text=TextSlot(7, hit=True))
    assert used[0].kept == 0
    assert torch.equal(state(worker, "b").branches[0]["text"], torch.full((1, 2), float(len("one"))))
    tick(evict=(7,))
    assert worker._texts == {}


def test_updates_leave_the_request_alone_until_they_are_applied() -> None:
    req = Req("a", SamplingParams(prompt="a", seed=1), latents=torch.zeros(2))
    update = Update(latents=torch.ones(2))
    assert torch.equal(req.latents, torch.zeros(2)) if req.latents is not None else False
    assert set(update.changes()) == {"latents"}
    update.apply(req)
    assert req.latents is not None
    assert torch.equal(req.latents, torch.ones(2))


# Fingerprints


def _update(kind: str, tensor: torch.Tensor) -> Update:
    if kind in ("timesteps", "latents"):
        return Update(**{kind: tensor})
    if kind == "frames":
        return Update(frames=(torch.zeros(2, dtype=torch.uint8), tensor))
    return Update(branches=({"text": torch.zeros(2)}, {"text": tensor}))


@pytest.mark.parametrize("kind", ["timesteps", "latents", "frames", "branches"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_equal_values_have_equal_fingerprints(kind: str, dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(2, 3, 4).to(dtype)
    assert fingerprint(_update(kind, values)) == fingerprint(_update(kind, values.clone()))
    assert 0 <= fingerprint(_update(kind, values)) < 2**63


@pytest.mark.parametrize("kind", ["timesteps", "latents", "frames", "branches"])
@pytest.mark.parametrize("index", [0, 7, 23])
@pytest.mark.parametrize("bit", [0, 10, 22, 23, 30])
def test_any_bit_changes_the_fingerprint(kind: str, index: int, bit: int) -> None:
    values = torch.randn(24, generator=torch.Generator().manual_seed(0))
    other = values.clone()
    other.view(torch.int32)[index] ^= 1 << bit
    assert fingerprint(_update(kind, values)) != fingerprint(_update(kind, other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1.0, 2.0, 3.0], [-1.0, 2.0, 3.0]),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]),
        ([0.0, 0.0], [1.0, 1.0]),
        ([5.0, 5.0, 1.0], [7.0, 7.0, 1.0]),
    ],
    ids=["sign", "order", "all", "pair"],
)
def test_signs_order_and_equal_changes_change_the_fingerprint(one: list[float], other: list[float]) -> None:
    assert fingerprint(Update(latents=torch.tensor(one))) != fingerprint(Update(latents=torch.tensor(other)))


def test_progress_sums_up_all_commits(make: Make) -> None:
    prints = []
    for seed in (1, 1, 2):
        worker = make()
        tick = Ticks(worker)
        tick.to_denoising(admit("a", seed=seed))
        tick(3, ("a",))
        prints.append(worker.progress.fingerprint)
    assert prints[0] == prints[1] != prints[2]
