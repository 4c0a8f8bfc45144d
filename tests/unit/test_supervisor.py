"""What a supervisor keeps of the lives of its replica, and hears of it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal

import msgspec
import pytest

from diffgen.args import ServerArgs
from diffgen.errors import GenerationError, StartFailed, WorkerDied
from diffgen.server.pipe import FROM_RANK, MAX_BYTES, Pipe, RankError, Start
from diffgen.server.rank import _fail
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


def test_ranks_that_cannot_be_started_now_are_a_life_that_failed() -> None:
    """And not the end of the supervisor: a later life may be another matter."""
    supervisor = Supervisor(ServerArgs())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(StartFailed, match=r"the ranks cannot be started: .* Too many open files"):
            supervisor.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        shutil.rmtree(supervisor._folder)


def test_an_error_with_a_text_of_any_length_is_told() -> None:
    """By a rank that ends: what does not fit into a message would look like a death without a reason."""
    ours, theirs = multiprocessing.Pipe()
    text = "\U0001f600" * MAX_BYTES
    child = os.fork()
    if child == 0:
        _fail(Pipe(theirs, FROM_RANK), GenerationError(text), False)
    theirs.close()
    try:
        told = Pipe(ours, FROM_RANK).receive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert isinstance(told, RankError)
    kept, _, left_out = told.error.message.partition(" ... ")
    assert text.startswith(kept)
    assert left_out == f"({MAX_BYTES - len(kept)} more characters)"
