"""What a supervisor keeps of the lives of its replica."""

from __future__ import annotations

import msgspec

from diffgen.args import ServerArgs
from diffgen.errors import GenerationError, WorkerDied
from diffgen.server.pipe import MAX_BYTES, Start
from diffgen.server.supervisor import Supervisor


def test_what_a_life_is_told_of_earlier_ones_fits_into_its_first_message() -> None:
    """However many there were: the latest requests, and how often each was there when a replica died."""
    supervisor = Supervisor(ServerArgs())
    try:
        for number in range(5000):
            request_id = f"{number:04}" + "\U0001f600" * 60
            supervisor._remember((request_id,), WorkerDied("it died"))
            supervisor._remember((request_id,), GenerationError("\U0001f600" * 5000))
        deaths, failures = dict(supervisor.suspects), dict(supervisor._failures)
        start = Start(ServerArgs(), 0, "folder", 9, "socket", deaths, failures)
        assert len(msgspec.msgpack.encode(start)) < MAX_BYTES
        assert deaths[request_id] == 2
        assert failures[request_id].kind == "GenerationError"
    finally:
        supervisor.stop()
