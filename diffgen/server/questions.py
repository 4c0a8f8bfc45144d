"""A status asked of several replicas, and one made of theirs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from diffgen.wire.messages import Status


@dataclasses.dataclass
class _Question:
    """``waiting`` has the replicas that have not told theirs and have lived ever since."""

    client: bytes
    waiting: set[int]
    answers: list[Status] = dataclasses.field(default_factory=list)


class Questions:
    """Clients' questions for a status, oldest first."""

    def __init__(self) -> None:
        self._questions: collections.deque[_Question] = collections.deque()

    def ask(self, client: bytes, replicas: Sequence[int]) -> None:
        self._questions.append(_Question(client, set(replicas)))

    def tell(self, replica: int, status: Status) -> None:
        """Replicas answer in order: it is for the oldest question that waits for this one."""
        question = next((each for each in self._questions if replica in each.waiting), None)
        if question is not None:
            question.waiting.remove(replica)
            question.answers.append(status)

    def give_up(self, replica: int) -> None:
        """It has gone; its next life knows nothing of what was asked."""
        for question in self._questions:
            question.waiting.discard(replica)

    def answered(self) -> Iterator[tuple[bytes, list[Status]]]:
        """Take out those for which nothing is awaited any more, and none before them: who asks, and the answers."""
        while self._questions and not self._questions[0].waiting:
            question = self._questions.popleft()
            yield question.client, question.answers


def merged(parts: Sequence[Status], restarts: int, malformed: int = 0) -> Status:
    """One status of several replicas: sums, and requests by age; ``malformed`` are the controller's own."""

    def total(name: str) -> dict[Any, int]:
        counts: collections.Counter[Any] = collections.Counter()
        for part in parts:
            counts.update(getattr(part, name))
        return dict(counts)

    requests = sorted((each for part in parts for each in part.requests), key=lambda each: -each.seconds)
    return Status(
        requests=tuple(requests),
        finished=total("finished"),
        ticks=sum(part.ticks for part in parts),
        seconds=max((part.seconds for part in parts), default=0.0),
        queued=sum(part.queued for part in parts),
        running=sum(part.running for part in parts),
        units=total("units"),
        batches=total("batches"),
        tick_seconds=sum(part.tick_seconds for part in parts),
        refused=total("refused"),
        restarts=restarts,
        text_cache=total("text_cache"),
        malformed=malformed + sum(part.malformed for part in parts),
        unread=sum(part.unread for part in parts),
    )
