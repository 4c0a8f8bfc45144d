"""A submitted request as its owner sees it, from threads and from asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time

import pytest

from diffgen.errors import DiffgenError, GenerationError
from diffgen.handle import Event, GenerationHandle, is_final
from diffgen.params import SamplingParams
from diffgen.result import GenerationResult
from diffgen.wire.messages import Accepted, Failed, Progress

PARAMS = SamplingParams(prompt="a")


class Owned:
    """A handle and the side that publishes to it."""

    def __init__(self) -> None:
        self.cancels: list[str] = []
        self.handle = GenerationHandle(PARAMS, self.cancels.append)
        self.result = GenerationResult(id=self.handle.id, params=PARAMS, seeds=(1,))
        self.events: list[Event] = [
            Accepted(self.handle.id, 0, PARAMS, ()),
            *(Progress(self.handle.id, "denoise", step, 3) for step in (1, 2, 3)),
            self.result,
        ]

    def publish(self, count: int | None = None) -> None:
        for event in self.events[:count]:
            self.handle.publish(event)

    def fail(self) -> DiffgenError:
        error = GenerationError("by design")
        self.handle.publish(Failed(self.handle.id, error.info()), error)
        return error

    def later(self, *, fail: bool = False) -> threading.Thread:
        def work() -> None:
            for event in self.events[:-1]:
                time.sleep(0.005)
                self.handle.publish(event)
            if fail:
                self.fail()
            else:
                self.handle.publish(self.events[-1])

        thread = threading.Thread(target=work)
        thread.start()
        return thread


@pytest.fixture
def owned() -> Owned:
    return Owned()


def test_ids_are_unique() -> None:
    assert len({Owned().handle.id for _ in range(1000)}) == 1000


def test_result_waits(owned: Owned) -> None:
    assert not owned.handle.done()
    owned.later()
    assert owned.handle.result(5) is owned.result
    assert owned.handle.done()
    assert owned.handle.result(0) is owned.result


def test_a_timeout_leaves_the_request_running(owned: Owned) -> None:
    with pytest.raises(TimeoutError, match=r"has not ended within 0.01 s and goes on"):
        owned.handle.result(0.01)
    assert owned.cancels == []
    owned.publish()
    assert owned.handle.result(0) is owned.result


def test_an_error_is_raised_by_result_and_seen_in_events(owned: Owned) -> None:
    error = owned.fail()
    for _ in range(2):
        with pytest.raises(GenerationError) as caught:
            owned.handle.result(1)
        assert caught.value is error
    (event,) = owned.handle.events()
    assert isinstance(event, Failed)
    assert is_final(event)


def test_events_are_replayed_to_whoever_comes_late(owned: Owned) -> None:
    owned.publish()
    for _ in range(2):
        assert list(owned.handle.events()) == owned.events


def test_several_consumers_see_every_event(owned: Owned) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        seen = [pool.submit(list, owned.handle.events()) for _ in range(4)]
        owned.later()
        for future in seen:
            assert future.result(5) == owned.events


def test_nothing_comes_after_the_end(owned: Owned) -> None:
    owned.publish()
    owned.fail()
    owned.publish()
    assert list(owned.handle.events()) == owned.events
    assert owned.handle.result(0) is owned.result


def test_a_listener_hears_the_past_and_the_future_once_each(owned: Owned) -> None:
    heard: list[Event] = []
    owned.publish(2)
    owned.handle.subscribe(heard.append)
    for event in owned.events[2:4]:
        owned.handle.publish(event)
    owned.handle.unsubscribe(heard.append)
    owned.handle.publish(owned.result)
    assert heard == owned.events[:4]


def test_a_listener_that_leaves_does_not_keep_the_next_from_the_event(owned: Owned) -> None:
    heard: list[Event] = []

    def leave(event: Event) -> None:
        owned.handle.unsubscribe(leave)

    owned.handle.subscribe(leave)
    owned.handle.subscribe(heard.append)
    owned.publish()
    assert heard == owned.events


def test_who_waits_on_the_result_finds_every_event_told(owned: Owned) -> None:
    heard: list[Event] = []
    owned.handle.subscribe(heard.append)
    owned.later()
    owned.handle.result(5)
    assert heard == owned.events


def test_cancel_asks_until_the_end(owned: Owned) -> None:
    owned.handle.cancel()
    owned.publish()
    owned.handle.cancel()
    assert owned.cancels == [owned.handle.id]


def test_a_listener_may_use_the_handle(owned: Owned) -> None:
    def listen(event: Event) -> None:
        owned.handle.cancel()
        assert owned.handle.id in repr(owned.handle)

    owned.handle.subscribe(listen)
    thread = owned.later()
    thread.join(5)
    assert not thread.is_alive()
    assert owned.cancels


def test_await_gives_the_result(owned: Owned) -> None:
    async def main() -> GenerationResult:
        owned.later()
        return await owned.handle

    assert asyncio.run(main()) is owned.result


def test_await_raises_the_error(owned: Owned) -> None:
    async def main() -> None:
        owned.later(fail=True)
        await owned.handle

    with pytest.raises(GenerationError, match="by design"):
        asyncio.run(main())


def test_await_of_what_has_ended(owned: Owned) -> None:
    owned.publish()

    async def main() -> list[GenerationResult]:
        return list(await asyncio.gather(*(_wait(owned.handle) for _ in range(3))))

    assert asyncio.run(main()) == [owned.result] * 3


async def _wait(handle: GenerationHandle) -> GenerationResult:
    return await handle


def test_a_timeout_of_asyncio_leaves_the_handle_alone(owned: Owned) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_wait(owned.handle), 0.01)
        owned.later()
        assert await owned.handle is owned.result

    asyncio.run(main())


def test_asynchronous_iteration_sees_every_event_in_every_consumer(owned: Owned) -> None:
    async def consume() -> list[Event]:
        return [event async for event in owned.handle.aevents()]

    async def main() -> list[list[Event]]:
        owned.publish(1)
        owned.later()
        return list(await asyncio.gather(consume(), consume()))

    expected = [owned.events[0], *owned.events]
    assert asyncio.run(main()) == [expected, expected]


def test_a_loop_that_ends_early_does_not_disturb_the_publisher(owned: Owned) -> None:
    async def main() -> None:
        owned.publish(1)
        async for _ in owned.handle.aevents():
            break

    asyncio.run(main())
    owned.publish()
    assert owned.handle.done()


def test_a_listener_that_raises_does_not_keep_others_from_the_result(owned: Owned) -> None:
    def broken(event: Event) -> None:
        raise ValueError("a user's mistake")

    owned.handle.subscribe(broken)
    with contextlib.suppress(ValueError):
        owned.publish()
    assert owned.handle.done()
