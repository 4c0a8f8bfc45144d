"""Which requests the next tick serves."""

from __future__ import annotations

from diffgen.params import Resolved, SamplingParams
from diffgen.scheduler.cost import CostModel
from diffgen.scheduler.job import Job
from diffgen.scheduler.plan import MAX_UNIT_REQS, Position, StageInfo
from diffgen.scheduler.policy import BATCH_TURN_S, PATIENCE_S, BatchLimits, Policy

NOTHING_KNOWN = CostModel()


def job(
    name: str,
    *,
    outputs: int = 1,
    key: object = "k",
    stage: int = 1,
    arrived: float = 0,
    served: float = 0,
    steps: int = 8,
    done: int = 0,
    frames: int = 1,
    alone: bool = False,
    priority: str = "interactive",
    deadline: float | None = None,
) -> Job:
    params = SamplingParams(
        prompt="a",
        num_outputs_per_prompt=outputs,
        num_inference_steps=steps,
        width=64,
        height=64,
        num_frames=frames,
        priority=priority,  # type: ignore[arg-type]
    )
    position = Position(stage, "denoise", done, steps, key)
    resolved = Resolved(params, ())
    return Job(
        name, b"c", resolved, arrived, deadline=deadline, position=position, served=served, done=done, alone=alone
    )


def ids(
    jobs: list[Job],
    cap: int = 4,
    now: float = 0,
    pixels: int = 10**9,
    cost: CostModel = NOTHING_KNOWN,
) -> list[str]:
    return [chosen.id for chosen in Policy(cost, BatchLimits(cap, pixels)).choose(jobs, now)]


def knows(seconds: float, *, two: float | None = None) -> CostModel:
    """A cost model that has seen a step of :func:`job` by itself and, often enough, one of two of them together."""
    cost = CostModel((StageInfo("encode", prepares=True), StageInfo("denoise", stepped=True)))
    for _ in range(10):
        cost.learn_unit("denoise", [job("a")], seconds)
        if two is not None:
            cost.learn_unit("denoise", [job("a"), job("b")], two)
    return cost


def test_nothing_waits() -> None:
    assert ids([]) == []


def test_equal_keys_share_a_unit_and_others_wait() -> None:
    assert ids([job("a"), job("b", key="other"), job("c")]) == ["a", "c"]
    assert ids([job("a"), job("b", stage=2)]) == ["a"]


def test_none_shares_with_nobody() -> None:
    assert ids([job("a", key=None), job("b", key=None)]) == ["a"]


def test_the_least_work_left_leads_and_equals_by_arrival() -> None:
    assert ids([job("clip", frames=9), job("picture", key="other")])[0] == "picture"
    assert ids([job("many", steps=50), job("few", steps=8, key="other")])[0] == "few"
    assert ids([job("new"), job("half done", key="other", done=4)])[0] == "half done"
    assert ids([job("late", arrived=2), job("early", key="other", arrived=1)])[0] == "early"


def test_a_long_one_gets_a_unit_in_time() -> None:
    """A stream of new pictures passes a clip of 32 times their work for five times the patience, and no longer."""
    clip = job("clip", frames=32)
    for waited in (0, 1, 4.9 * PATIENCE_S):
        assert ids([clip, job("picture", key="other", served=waited)], now=waited)[0] == "picture"
    assert ids([clip, job("picture", key="other", served=5.1 * PATIENCE_S)], now=5.1 * PATIENCE_S)[0] == "clip"


def test_a_batch_is_capped_by_outputs_not_by_requests() -> None:
    assert ids([job("a"), job("b", outputs=2), job("c", outputs=2)], cap=4) == ["a", "b"]
    assert ids([job("a"), job("b", outputs=2, steps=9), job("c", outputs=3)], cap=4) == ["a", "b"]


def test_a_request_larger_than_the_cap_runs_by_itself() -> None:
    assert ids([job("a", outputs=9, steps=1), job("b", steps=10)], cap=4) == ["a"]


def test_one_that_failed_with_others_runs_alone() -> None:
    assert ids([job("a", alone=True), job("b")]) == ["a"]
    assert ids([job("a"), job("b", alone=True, steps=50), job("c")]) == ["b"], "and first, to share again after it"


def test_one_that_is_not_placed_yet_runs_alone() -> None:
    new = job("a")
    new.position = None
    assert ids([new, job("b")]) == ["a"]
    assert ids([job("b"), new]) == ["a"]


def test_what_could_share_the_next_step_is_prepared_before() -> None:
    new, clip = job("new"), job("clip", frames=9)
    new.position = clip.position = Position(0, "encode", 0, 1, None, prepares=True)
    assert ids([job("picture", done=1), new]) == ["new"]
    assert ids([job("picture", done=1), clip]) == ["picture"], "a clip cannot share it"
    assert ids([job("picture", done=7, outputs=4), new]) == ["picture"], "there is no room"
    assert ids([job("picture", done=1, key=None), new]) == ["picture"], "it shares with nobody"
    assert ids([job("picture", done=1), new], cost=knows(1.0, two=2.0)) == ["picture"], "it does not pay"


def test_interactive_requests_go_before_batch_ones_which_still_get_their_turns() -> None:
    policy = Policy(NOTHING_KNOWN, BatchLimits(4, 10**9))
    clip, bulk = job("clip", frames=32, key="other"), job("bulk", priority="batch")
    fresh = job("fresh", priority="batch", arrived=9, served=9, key="another")

    def first(*jobs: Job, now: float) -> str:
        return policy.choose(jobs, now)[0].id

    assert first(bulk, clip, now=0.9 * BATCH_TURN_S) == "clip"
    assert first(fresh, bulk, clip, now=BATCH_TURN_S) == "bulk", "new ones do not put off the turn of their class"
    policy.ran([clip, bulk], BATCH_TURN_S)
    assert first(fresh, clip, now=1.9 * BATCH_TURN_S) == "clip", "and one turn is one unit, whose ever"
    assert first(fresh, clip, now=2 * BATCH_TURN_S) == "fresh"
    assert ids([bulk, job("picture", done=4)], now=1) == ["picture", "bulk"], "both classes share a step"


def test_a_deadline_goes_first_while_it_only_just_can_be_kept() -> None:
    cost, short = knows(1.0), job("short", steps=2, key="other")
    for deadline, first in ((20.0, "short"), (8.5, "tight"), (8.0, "tight"), (7.5, "short")):
        assert ids([short, job("tight", deadline=deadline)], cost=cost)[0] == first, deadline
    assert ids([short, job("tight", deadline=8.5)])[0] == "short", "without times nobody can tell"


def test_order_is_by_seconds_once_they_are_known() -> None:
    few, many = job("few", steps=4, outputs=2, key="other"), job("many", steps=6)
    assert ids([few, many])[0] == "many"
    assert ids([few, many], cost=knows(1.0, two=1.2))[0] == "few"


def test_a_batch_is_capped_by_pixels() -> None:
    jobs = [job(name) for name in "abc"]
    assert ids(jobs, pixels=2 * 64 * 64) == ["a", "b"]
    assert ids(jobs, pixels=1) == ["a"], "the first runs whatever its size"


def test_a_batch_forms_only_where_it_pays() -> None:
    jobs = [job("a"), job("b")]
    assert ids(jobs, cost=knows(1.0, two=1.5)) == ["a", "b"]
    assert ids(jobs, cost=knows(1.0, two=2.0)) == ["a"]


def test_a_unit_has_a_slot_in_the_vote_for_each() -> None:
    assert len(ids([job(str(number)) for number in range(100)], cap=1000)) == MAX_UNIT_REQS
