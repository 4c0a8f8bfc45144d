"""Everything rank 0 decides: an object without sockets, processes or tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest
from scheduling import FAULT, STAGES, TEXT_BYTES, A, B, Driver, Ranks

from diffgen.params import Limits, ModelSpec, SamplingParams
from diffgen.scheduler import admission
from diffgen.scheduler.job import Need
from diffgen.wire.messages import Accepted, Bye, Cancel, Failed, Gone, Hello, Progress, Submit, Welcome

Drive = Callable[..., Driver]


@pytest.fixture
def drive(model: ModelSpec) -> Drive:
    return lambda ranks=None, limits=None, memory=None, **run: Driver(model, ranks, limits, memory, **run)


def test_hello_is_welcomed_with_epoch_and_model(drive: Drive, model: ModelSpec) -> None:
    assert drive().scheduler.welcome == Welcome("epoch", model)


def test_a_request_runs_unit_by_unit_and_is_done(drive: Drive) -> None:
    driver = drive()
    (accepted,) = driver.submit("a")
    assert isinstance(accepted, Accepted)
    assert accepted.ahead == 0
    assert accepted.params.seed is not None
    driver.drain()
    told = [answer for _, answer in driver.answers if isinstance(answer, Progress)]
    steps = [(p.stage, p.step, p.total) for p in told]
    assert steps == [("encode", 1, 1), ("denoise", 1, 3), ("denoise", 2, 3), ("denoise", 3, 3)]
    assert [p.eta for p in told] == [None, 2.0, 1.0, 0.0]
    assert driver.finished == ["a"]
    assert driver.ranks.held == {}


def test_a_plan_carries_what_rank_0_resolved(drive: Drive) -> None:
    driver = drive()
    (accepted,) = driver.submit("a", negative_prompt="b", guidance_scale=0.0)
    (admit,) = driver.tick().admit
    assert (admit.params, admit.warnings) == (accepted.params, accepted.warnings)
    assert "negative_prompt has no effect" in admit.warnings[0]


def test_timings_count_waiting_stages_and_all(drive: Drive) -> None:
    driver = drive(max_running=1)
    driver.submit("a", num_inference_steps=1)
    driver.submit("b", num_inference_steps=2)
    driver.drain()
    assert driver.timings == {
        "a": {"queue": 0.0, "encode": 1.0, "denoise": 1.0, "total": 2.0},
        "b": {"queue": 2.0, "encode": 1.0, "denoise": 2.0, "total": 5.0},
    }


def test_an_invalid_request_is_answered_and_not_held(drive: Drive) -> None:
    driver = drive()
    (answer,) = driver.submit("a", width=100)
    assert isinstance(answer, Failed)
    assert (answer.error.kind, answer.error.param) == ("InvalidRequest", "width")
    assert driver.scheduler.idle


def test_a_short_request_passes_a_long_one_at_the_next_unit(drive: Drive) -> None:
    driver = drive(max_batch_size=1)
    driver.submit("long", num_inference_steps=50)
    for _ in range(10):
        driver.tick()
    driver.submit("short", num_inference_steps=2)
    before = len(driver.ranks.batches)
    while "short" not in driver.finished:
        driver.tick()
    assert set(driver.ranks.batches[before:]) == {("short",)}
    driver.drain()
    assert "long" in driver.finished


def test_requests_of_one_key_share_units(drive: Drive) -> None:
    driver = drive(max_batch_size=4)
    for name in "abc":
        driver.submit(name)
    driver.drain()
    assert ("a", "b", "c") in driver.ranks.batches
    assert max(len(batch) for batch in driver.ranks.batches) == 3


def test_a_batch_is_capped_by_outputs(drive: Drive) -> None:
    driver = drive(max_batch_size=4)
    for name in "abc":
        driver.submit(name, num_outputs_per_prompt=2)
    driver.drain()
    assert max(len(batch) for batch in driver.ranks.batches) == 2
    assert sorted(driver.finished) == ["a", "b", "c"]


@pytest.mark.parametrize("blame_all", [False, True])
def test_members_of_a_failed_batch_run_alone_and_only_the_culprit_fails(drive: Drive, blame_all: bool) -> None:
    driver = drive(Ranks(poison={"bad": 1}, blame_all=blame_all), max_batch_size=4)
    for name in ("good", "bad", "fine"):
        driver.submit(name)
    driver.drain()
    assert driver.failures() == {"bad": FAULT}
    assert sorted(driver.finished) == ["fine", "good"]
    failed = driver.ranks.batches.index(("good", "bad", "fine"), 4)
    assert set(driver.ranks.batches[failed + 1 : failed + 4]) == {("good",), ("bad",), ("fine",)}
    assert driver.ranks.batches[-1] == ("good", "fine"), "those that passed share units again"
    assert driver.ranks.held == {}


def test_progress_is_not_told_for_a_unit_that_did_not_pass(drive: Drive) -> None:
    driver = drive(Ranks(poison={"bad": 0}), max_batch_size=4)
    driver.submit("good")
    driver.submit("bad")
    driver.drain()
    told = [answer.step for _, answer in driver.answers if isinstance(answer, Progress) and answer.id == "good"]
    assert told == [1, 1, 2, 3]


def _cancel_at(drive: Drive, ticks: int) -> Driver:
    driver = drive(max_running=1)
    driver.submit("first")
    driver.submit("second")
    for _ in range(ticks):
        driver.tick()
    return driver


@pytest.mark.parametrize(("ticks", "name"), [(0, "first"), (1, "first"), (2, "first"), (1, "second"), (6, "second")])
def test_cancel_in_every_state_is_answered_once_and_repeatable(drive: Drive, ticks: int, name: str) -> None:
    driver = _cancel_at(drive, ticks)
    (answer,) = driver.send(A, Cancel(name))
    assert isinstance(answer, Failed)
    assert answer.error.code == "request_cancelled"
    assert driver.send(A, Cancel(name)) == []
    driver.drain()
    assert driver.send(A, Cancel(name)) == []
    assert driver.finished == [other for other in ("first", "second") if other != name]
    assert not any(name in batch for batch in driver.ranks.batches[ticks:]), "no unit runs after it"
    assert driver.ranks.held == {}


def test_cancel_of_what_is_unknown_or_done_does_nothing(drive: Drive) -> None:
    driver = drive()
    assert driver.send(A, Cancel("never")) == []
    driver.submit("a")
    driver.drain()
    assert driver.send(A, Cancel("a")) == []


def test_a_foreign_client_cannot_cancel(drive: Drive) -> None:
    driver = drive()
    driver.submit("a", A)
    assert driver.send(B, Cancel("a")) == []
    driver.drain()
    assert driver.finished == ["a"]


def test_the_same_request_sent_again_is_dropped(drive: Drive) -> None:
    driver = drive()
    driver.submit("a")
    assert driver.submit("a") == []
    driver.tick()
    assert driver.submit("a") == []
    driver.drain()
    assert driver.finished == ["a"]


def test_an_id_of_another_client_is_refused_and_the_first_goes_on(drive: Drive) -> None:
    driver = drive()
    driver.submit("a", A)
    (answer,) = driver.submit("a", B)
    assert isinstance(answer, Failed)
    assert answer.error.param == "id"
    assert "UUID" in answer.error.message
    driver.drain()
    assert driver.finished == ["a"]
    assert [client for client, answer in driver.answers if isinstance(answer, Failed)] == [B]


def test_a_full_queue_refuses_until_there_is_room(drive: Drive) -> None:
    driver = drive(limits=Limits(queue=2))
    driver.submit("a")
    driver.submit("b")
    (answer,) = driver.submit("c")
    assert isinstance(answer, Failed)
    assert (answer.error.kind, answer.error.retryable) == ("QueueFull", True)
    assert "limit is 2" in answer.error.message
    assert driver.submit("a") == [], "one that is held is not refused when it comes again"
    driver.drain()
    (accepted,) = driver.submit("c")
    assert isinstance(accepted, Accepted)


def test_a_full_queue_says_when_to_come_back(drive: Drive) -> None:
    driver = drive(limits=Limits(queue=2), max_batch_size=1)
    driver.submit("a", num_inference_steps=3)
    driver.submit("b", num_inference_steps=8)
    (unknown,) = driver.submit("c")
    assert unknown.error.retry_after == 5
    driver.tick()
    driver.tick()
    (known,) = driver.submit("c")
    assert known.error.retry_after == 2, "the two steps that the first still has"
    assert "try again in 2.0 s" in known.error.message


def test_place_and_end_are_told_when_accepted_and_in_the_status(drive: Drive) -> None:
    driver = drive(max_batch_size=1)
    (first,) = driver.submit("warm", num_inference_steps=1)
    assert (first.ahead, first.eta) == (0, None)
    driver.drain()
    (long,), (short,) = driver.submit("long", num_inference_steps=9), driver.submit("short", num_inference_steps=2)
    (bulk,) = driver.submit("bulk", num_inference_steps=1, priority="batch")
    assert (long.ahead, long.eta) == (0, 10.0)
    assert (short.ahead, short.eta) == (0, 3.0), "it goes before the long one"
    assert (bulk.ahead, bulk.eta) == (2, 15.0)
    driver.tick()
    status = driver.scheduler.status()
    told = [(r.id, r.state, r.priority, r.ahead, r.eta) for r in status.requests]
    assert told == [
        ("long", "running", "interactive", 1, 12.0),
        ("short", "running", "interactive", 0, 2.0),
        ("bulk", "running", "batch", 2, 14.0),
    ]
    assert status.requests[0].time_left == Limits().time - 1
    driver.scheduler.plan()
    driver.now += 0.75
    etas = [each.eta for each in driver.scheduler.status().requests]
    assert etas == [11.25, 1.25, 13.25], "while a unit runs, its time counts"


def test_the_status_counts(drive: Drive) -> None:
    driver = drive(Ranks(poison={"bad": 1}), max_running=3, limits=Limits(queue=4))
    for name in ("a", "b", "bad", "gone"):
        driver.submit(name)
    driver.submit("too many")
    driver.submit("wrong", width=100)
    status = driver.scheduler.status()
    assert (status.queued, status.running, status.refused) == (4, 0, {"queue_full": 2})
    driver.tick()
    driver.send(A, Cancel("gone"))
    status = driver.scheduler.status()
    assert (status.queued, status.running) == (0, 3)
    driver.drain()
    driver.submit("wrong", width=100)
    status = driver.scheduler.status()
    assert status.finished == {"done": 2, "generation_failed": 1, "request_cancelled": 1}
    assert status.refused == {"queue_full": 2, "invalid_size": 1}
    assert status.units == {"encode": 3, "denoise": 7}, "only those that passed"
    assert sum(count * size for size, count in status.batches.items()) == 3 + 7 + 4, "and those that did not"
    assert status.tick_seconds == status.ticks == sum(status.batches.values())
    assert status.restarts == 0


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_a_time_limit_ends_a_request_in_every_state(drive: Drive, ticks: int) -> None:
    driver = drive(max_batch_size=1, max_running=1)
    driver.submit("a", num_inference_steps=9, time_limit=5.0)
    driver.submit("b", num_inference_steps=9, time_limit=4.5)
    for _ in range(ticks):
        driver.tick()
    driver.now = 4.5
    driver.tick()
    assert driver.failures().keys() == {"b"}
    driver.now = 5
    assert [answer.id for _, answer in driver.scheduler.expire()] == ["a"]
    error = driver.failures()["b"]
    assert (error.kind, error.code, error.retryable) == ("DeadlineExceeded", "deadline_exceeded", False)
    assert "time_limit of 4.5 s is over" in error.message
    driver.drain()
    assert driver.ranks.held == {}


def test_the_servers_own_time_limit_holds_for_all(drive: Drive) -> None:
    driver = drive(limits=Limits(time=10))
    (refused,) = driver.submit("a", time_limit=11.0)
    assert (refused.error.code, refused.error.param) == ("over_limit", "time_limit")
    driver.submit("b", num_inference_steps=50)
    driver.drain()
    error = driver.failures()["b"]
    assert error.code == "deadline_exceeded"
    assert "ended in denoise, after 9 of 50 units: this server's limit of 10 s for a request is over" in error.message
    assert len(driver.ranks.batches) == 10


def test_time_before_a_restart_counts(drive: Drive) -> None:
    driver = drive()
    driver.send(A, Submit("a", SamplingParams(prompt="a", num_inference_steps=20, time_limit=9.0), age=4.0))
    driver.drain()
    assert len(driver.ranks.batches) == 5


def test_an_impossible_time_limit_is_refused_with_the_numbers(drive: Drive) -> None:
    driver = drive(max_batch_size=1)
    driver.submit("warm", num_inference_steps=1)
    driver.drain()
    (refused,) = driver.submit("a", num_inference_steps=20, time_limit=10.0)
    assert (refused.error.code, refused.error.retryable, refused.error.param) == (
        "deadline_impossible", False, "time_limit",
    )  # fmt: skip
    assert "the request takes about 21.0 s by itself" in refused.error.message
    again = Submit("d", SamplingParams(prompt="a", num_inference_steps=20, time_limit=15.0), age=5.0)
    (late,) = driver.send(A, again)
    assert "time_limit is 15 s, of which 10.0 s are left; the request takes about 21.0 s" in late.error.message
    (accepted,) = driver.submit("b", num_inference_steps=20, time_limit=15.0)
    assert isinstance(accepted, Accepted), "estimates are rough: only what takes half as long again is refused"
    (later,) = driver.submit("c", num_inference_steps=20, time_limit=21.0, priority="batch")
    assert (later.error.code, later.error.retryable) == ("deadline_impossible", True)
    assert later.error.retry_after == 21.0
    driver.drain()
    assert driver.failures().keys() == {"a", "b", "c", "d"}


@dataclasses.dataclass
class Bytes:
    """Memory of 100 bytes, of which a request holds one a step and works with ten an output."""

    def available(self) -> int:
        return 100

    def needs(self, params: SamplingParams, available: int) -> Need:
        assert available == 100
        return Need(params.num_inference_steps or 0, 10 * (params.num_outputs_per_prompt or 0))


def test_what_cannot_fit_is_refused_and_others_wait_until_it_can(drive: Drive) -> None:
    driver = drive(memory=Bytes(), max_batch_size=9)
    (refused,) = driver.submit("a", num_inference_steps=81, num_outputs_per_prompt=2)
    assert (refused.error.kind, refused.error.code) == ("OutOfMemory", "insufficient_memory")
    for name, steps in (("b", 50), ("c", 60), ("d", 61)):
        driver.submit(name, num_inference_steps=steps)
    assert [admit.id for admit in driver.tick().admit] == ["b"]
    driver.submit("e", num_inference_steps=9, num_outputs_per_prompt=4)
    assert [admit.id for admit in driver.tick().admit] == ["e"], "it is the shortest, and fits beside the other"
    while not driver.finished:
        assert driver.scheduler.status().running == 2
        driver.tick()
    assert driver.finished == ["e"]
    driver.drain(ticks=500)
    assert driver.finished == ["e", "b", "c", "d"]


def test_none_passes_one_that_waits_for_memory(drive: Drive) -> None:
    driver = drive(memory=Bytes())
    driver.submit("running", num_inference_steps=50)
    driver.tick()
    driver.submit("wide", num_inference_steps=5, num_outputs_per_prompt=6)
    driver.submit("fits", num_inference_steps=40)
    while not driver.finished:
        assert driver.tick().admit == (), "or what is wide might never fit"
    driver.drain()
    assert driver.finished == ["running", "wide", "fits"]


def test_a_plan_admits_no_more_bytes_than_ranks_take(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ADMITTED", 5000)
    driver = drive(max_running=10)
    (refused,) = driver.submit("large", prompt="x" * 5000)
    assert (refused.error.kind, refused.error.code) == ("InvalidRequest", "request_too_large")
    assert "at most 5000" in refused.error.message
    for name in "abcde":
        (accepted,) = driver.submit(name, prompt="x" * 2000)
        assert isinstance(accepted, Accepted)
    plans = [driver.tick() for _ in range(3)]
    assert [[admit.id for admit in plan.admit] for plan in plans] == [["a", "b"], ["c", "d"], ["e"]]
    assert all(len(msgspec.msgpack.encode(plan.admit)) <= 5000 for plan in plans)
    driver.drain()
    assert sorted(driver.finished) == list("abcde")


def test_a_need_that_cannot_be_told_is_a_warning(drive: Drive) -> None:
    class Unknown(Bytes):
        def needs(self, params: SamplingParams, available: int) -> None:  # type: ignore[override]
            return None

    driver = drive(memory=Unknown())
    (accepted,) = driver.submit("a")
    assert "could not be estimated" in accepted.warnings[-1]
    assert driver.tick().admit[0].warnings == accepted.warnings
    driver.drain()


def test_a_batch_works_with_the_memory_that_is_left(drive: Drive) -> None:
    driver = drive(memory=Bytes(), max_batch_size=9)
    for name in "abcdefgh":
        driver.submit(name, num_inference_steps=6)
    while not driver.scheduler.idle:
        together = len(driver.tick().ids)
        assert together <= 1 or 6 * len(driver.ranks.held) + 10 * together <= 100
    assert ("a", "b", "c", "d", "e") in driver.ranks.batches, "while all are held"
    assert sorted(driver.finished) == sorted("abcdefgh")


def test_bye_cancels_all_of_one_client_and_answers_nothing(drive: Drive) -> None:
    driver = drive(max_running=2)
    for name in ("a1", "a2", "a3"):
        driver.submit(name, A)
    driver.submit("b", B)
    driver.tick()
    assert driver.send(A, Bye()) == []
    driver.drain()
    assert driver.finished == ["b"]
    assert driver.ranks.held == {}


def test_a_client_that_does_not_come_back_in_time_is_one_that_has_left(drive: Drive) -> None:
    driver = drive(max_running=2, limits=Limits(grace=30))
    for client in (A, B):
        driver.submit(client.decode(), client, num_inference_steps=50)
    for client in (A, B):
        assert driver.send(client, Gone()) == []
    driver.now += 29
    driver.tick()
    driver.send(B, Hello())
    driver.now += 1
    driver.drain(ticks=100)
    assert driver.finished == [B.decode()]
    assert driver.scheduler.status().finished == {"request_cancelled": 1, "done": 1}
    assert driver.ranks.held == {}


def test_no_more_than_max_running_are_held_by_the_ranks(drive: Drive) -> None:
    driver = drive(max_running=2)
    for index in range(6):
        driver.submit(str(index))
    most = 0
    while not driver.scheduler.idle:
        driver.tick()
        most = max(most, len(driver.ranks.held))
    assert most == 2
    assert sorted(driver.finished) == [str(index) for index in range(6)]
    assert driver.finished[:2] == ["0", "1"], "in order of arrival"


def test_interactive_requests_do_not_wait_for_places_of_batch_ones(drive: Drive) -> None:
    driver = drive(max_running=2)
    for index in range(3):
        driver.submit(f"bulk {index}", num_inference_steps=30, priority="batch")
    driver.tick()
    for index in range(3):
        driver.submit(f"picture {index}", num_inference_steps=3)
    driver.tick()
    assert driver.ranks.held.keys() == {"bulk 0", "bulk 1", "picture 0", "picture 1"}
    driver.drain()
    assert driver.finished[:3] == ["picture 0", "picture 1", "picture 2"]
    assert len(driver.finished) == 6


def test_ticks_are_numbered_and_the_last_one_stops(drive: Drive) -> None:
    driver = drive()
    driver.submit("a")
    assert [driver.tick().tick for _ in range(2)] == [1, 2]
    last = driver.scheduler.stop()
    assert (last.tick, last.stop, last.ids) == (3, True, ())


def test_ranks_keep_no_more_texts_than_were_granted(model: ModelSpec) -> None:
    encode, denoise = STAGES
    driver = Driver(model, stages=(msgspec.structs.replace(encode, encodes=True), denoise), text_cache_mb=1)
    for number, prompt in enumerate("abcbca"):
        driver.submit(f"{number}", prompt=prompt)
        driver.drain()
        assert len(driver.ranks.texts) * TEXT_BYTES <= 2**20 + TEXT_BYTES, "the next plan has them give up the oldest"
    cache = driver.scheduler.status().text_cache
    assert cache == {"hits": 2, "misses": 4, "bytes": 2**20}
